"""Names and shapes between our model and transformers': pure functions, one table for both directions.

`gpt2` is GPT2LMHeadModel; `modern` is LlamaForCausalLM, or Qwen3ForCausalLM where queries and keys are normalised.
Only the real rows of the vocabulary leave: the padded ones exist for speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fourscale.config import ModelConfig

GPT2_NAMES = {
    "wte": "transformer.wte",
    "wpe": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks": "transformer.h",
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
LLAMA_NAMES = {
    "wte": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attn_norm": "input_layernorm",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
LLAMA_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def architecture(cfg: ModelConfig) -> str:
    """The transformers class that computes what this model computes."""
    if cfg.arch == "gpt2":
        return "GPT2LMHeadModel"
    return "Qwen3ForCausalLM" if cfg.qk_norm else "LlamaForCausalLM"


def their_names(name: str, cfg: ModelConfig) -> list[str]:
    """transformers' names of one of our parameters; three (query, key, value) where it holds them separately.

    Raises KeyError for a name that has no counterpart.
    """
    table = GPT2_NAMES if cfg.arch == "gpt2" else LLAMA_NAMES
    module, _, leaf = name.rpartition(".")  # leaf: weight or bias
    prefix = ""
    if module.startswith("blocks."):
        _, layer, module = module.split(".", 2)
        prefix = f"{table['blocks']}.{layer}."
    if module == "attn.qkv" and cfg.arch == "modern":
        return [f"{prefix}{projection}.{leaf}" for projection in LLAMA_QKV]
    return [f"{prefix}{table[module]}.{leaf}"]


def is_transposed(name: str, cfg: ModelConfig) -> bool:
    """True for matrices that transformers' GPT-2 keeps as Conv1D, [in, out] instead of [out, in]."""
    return cfg.arch == "gpt2" and name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name


def to_hf(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Our parameters by name -> transformers', each a contiguous tensor of its own; a tied head has no entry.

    Raises KeyError for a parameter that has no counterpart.
    """
    out = {}
    for name, t in state.items():
        names = their_names(name, cfg)
        if name in ("wte.weight", "head.weight"):
            t = t[: cfg.vocab_size]
        if is_transposed(name, cfg):
            t = t.T
        heads = (cfg.n_heads, cfg.n_kv_heads, cfg.n_kv_heads)
        parts = [t] if len(names) == 1 else t.split([h * cfg.head_dim for h in heads], dim=0)
        out |= {theirs: part.detach().clone().contiguous() for theirs, part in zip(names, parts, strict=True)}
    return out


def hf_config(cfg: ModelConfig, eot_id: int) -> dict[str, Any]:
    """The content of config.json. Dropout is a matter of training and left at 0."""
    shared = {
        "architectures": [architecture(cfg)],
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": cfg.tie,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if cfg.arch == "gpt2":
        return shared | {
            "model_type": "gpt2",
            "n_positions": cfg.ctx,
            "n_embd": cfg.d_model,
            "n_layer": cfg.n_layers,
            "n_head": cfg.n_heads,
            "n_inner": cfg.d_ff,
            "activation_function": "gelu_new",  # GELU in its tanh form
            "layer_norm_epsilon": cfg.norm_eps,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    llama = {"model_type": "llama", "mlp_bias": False}
    return (
        shared
        | ({"model_type": "qwen3", "use_sliding_window": False} if cfg.qk_norm else llama)
        | {
            "hidden_size": cfg.d_model,
            "intermediate_size": cfg.d_ff,
            "num_hidden_layers": cfg.n_layers,
            "num_attention_heads": cfg.n_heads,
            "num_key_value_heads": cfg.n_kv_heads,
            "head_dim": cfg.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": cfg.ctx,
            "rms_norm_eps": cfg.norm_eps,
            "rope_theta": cfg.rope_theta,  # where transformers 4 reads it
            "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},  # where transformers 5 does
            "attention_bias": False,
            "attention_dropout": 0.0,
        }
    )


def tokenizer_config(eot_token: str, ctx: int) -> dict[str, Any]:
    """The content of tokenizer_config.json beside a tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eot_token,
        "eos_token": eot_token,
        "model_max_length": ctx,
        "clean_up_tokenization_spaces": False,
    }
