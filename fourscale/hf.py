"""Names, shapes and configurations between our model and transformers': pure functions, one table for both directions.

`gpt2` is GPT2LMHeadModel; `modern` is LlamaForCausalLM, or Qwen3ForCausalLM where queries and keys are normalised, or
MistralForCausalLM (without its window) where the heads' width is none that Llama's configuration allows. Only the real
rows of the vocabulary leave: the padded ones exist for speed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fourscale.cli import InputError
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
    if cfg.qk_norm:
        return "Qwen3ForCausalLM"
    # Llama's configuration refuses a width that the heads don't divide, whatever theirs is.
    return "MistralForCausalLM" if cfg.d_model % cfg.n_heads else "LlamaForCausalLM"


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


def from_hf(name: str, read: Callable[[str], Tensor], cfg: ModelConfig) -> Tensor:
    """One of our parameters by its name, fp32 in its full shape, padded rows zero; `read` gives transformers' tensors.

    Holds what it reads and what it returns. Raises KeyError for a parameter that has no counterpart.
    """
    parts = [read(theirs) for theirs in their_names(name, cfg)]
    t = parts[0] if len(parts) == 1 else torch.cat(parts)
    if is_transposed(name, cfg):
        t = t.T
    if name not in ("wte.weight", "head.weight"):
        return t.float().contiguous()
    out = torch.zeros(cfg.padded_vocab, t.shape[1])
    out[: len(t)] = t
    return out


# ---- config.json ---------------------------------------------------------------------------------------------------

MODEL_TYPES = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen3ForCausalLM": "qwen3",
}
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def hf_config(cfg: ModelConfig, eot_id: int | None, dtype: str = "fp32") -> dict[str, Any]:
    """The content of config.json; dtype: that of the weights. Dropout is a matter of training and left at 0."""
    shared = {
        "architectures": [architecture(cfg)],
        "model_type": MODEL_TYPES[architecture(cfg)],
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": cfg.tie,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "initializer_range": 0.02,
        "torch_dtype": TORCH_NAMES[dtype],
        "use_cache": True,
    }
    if cfg.arch == "gpt2":
        return shared | {
            "n_positions": cfg.ctx,
            "n_ctx": cfg.ctx,  # where llama.cpp's converter reads it
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
    own = {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "qwen3": {"attention_bias": False, "use_sliding_window": False},
        "mistral": {"sliding_window": None},
    }
    return (
        shared
        | own[shared["model_type"]]
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
            **_rope_tables(cfg),
            "attention_dropout": 0.0,
        }
    )


def _rope_tables(cfg: ModelConfig) -> dict[str, Any]:
    """Rotary positions where transformers 5 reads them (rope_parameters) and where 4 does."""
    scaling = {"rope_type": "default"}
    if (stretch := cfg.rope_stretch()) is not None:
        kind, numbers = stretch
        scaling = {"rope_type": kind, **dict(zip(ROPE_NUMBERS, numbers, strict=False))}
        if kind == "llama3":
            scaling[ROPE_NUMBERS[3]] = int(numbers[3])
    tables = {"rope_theta": cfg.rope_theta, "rope_parameters": {**scaling, "rope_theta": cfg.rope_theta}}
    return tables | ({} if stretch is None else {"rope_scaling": scaling})


ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

# Per model type: what a key means where it is absent, and the values under which our model computes the same.
SAME: dict[str, dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
        "scale_attn_weights": (True, (True,)),
        "scale_attn_by_inverse_layer_idx": (False, (False,)),
        "reorder_and_upcast_attn": (False, (False,)),
        "add_cross_attention": (False, (False,)),
    },
    "llama": {"attention_bias": (False, (False,)), "mlp_bias": (False, (False,))},
    "mistral": {"sliding_window": (4096, (None,))},
    "qwen3": {"attention_bias": (False, (False,)), "use_sliding_window": (False, (False, None))},
}
SAME_ALL: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "quantization_config": (None, (None,)),
    "is_encoder_decoder": (False, (False,)),
    "partial_rotary_factor": (None, (None, 1)),
    "is_causal": (True, (True,)),
}
LARGEST_SIZE = 2**31 - 1  # of a shape's integers: beyond, products of two overflow
LARGEST_FLOAT = sys.float_info.max  # JSON's integers may be larger
# Per model type: the key of each of our fields, and what it means where it is absent.
SHAPES: dict[str, dict[str, tuple[str, Any]]] = {
    "gpt2": {
        "ctx": ("n_positions", 1024),
        "d_model": ("n_embd", 768),
        "n_layers": ("n_layer", 12),
        "n_heads": ("n_head", 12),
        "d_ff": ("n_inner", None),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "vocab_size": ("vocab_size", 50257),
        "tie": ("tie_word_embeddings", True),
    },
    "llama": {
        "ctx": ("max_position_embeddings", 2048),
        "d_model": ("hidden_size", 4096),
        "n_layers": ("num_hidden_layers", 32),
        "n_heads": ("num_attention_heads", 32),
        "n_kv_heads": ("num_key_value_heads", None),
        "d_head": ("head_dim", None),
        "d_ff": ("intermediate_size", 11008),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "vocab_size": ("vocab_size", 32000),
        "tie": ("tie_word_embeddings", False),
    },
}
# The names that transformers' GPT-2 knows its own by as well; where both are there, these count.
GPT2_ALIASES = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}
SHAPES["mistral"] = SHAPES["llama"] | {
    "ctx": ("max_position_embeddings", 131072),
    "n_kv_heads": ("num_key_value_heads", 8),
    "d_ff": ("intermediate_size", 14336),
}
SHAPES["qwen3"] = SHAPES["llama"] | {
    "ctx": ("max_position_embeddings", 32768),
    "n_kv_heads": ("num_key_value_heads", 32),
    "d_head": ("head_dim", 128),
    "d_ff": ("intermediate_size", 22016),
    "vocab_size": ("vocab_size", 151936),
}


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Our model of a config.json; absent keys mean what they mean to transformers, keys that change nothing are let be.

    Raises InputError naming the key and its value where our model would not compute the same.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in SHAPES:
        raise InputError(f"model_type {brief(repr(kind))}: not supported; what can be read is {', '.join(SHAPES)}")
    acts = {} if kind == "gpt2" else {"hidden_act": ("silu", ("silu", "swish"))}
    for key, (absent, same) in (SAME[kind] | acts | SAME_ALL).items():
        value = config.get(key, absent)
        if value not in same:
            raise InputError(f"{key} {brief(value)}: not supported; our model computes {key} {brief(same[0])}")
    layers = config.get("layer_types")
    if layers is not None and not isinstance(layers, list):
        raise InputError(f"layer_types {brief(layers)}: not a value it can have; restore the config.json")
    if other := [x for x in layers or [] if x != "full_attention"]:
        raise InputError(f"layer_types {brief(other[0])}: not supported; our model has full_attention alone")
    shape: dict[str, Any] = {}
    for ours, (key, absent) in SHAPES[kind].items():
        if kind == "gpt2" and (alias := GPT2_ALIASES.get(key)) in config:
            key = alias
        value = shape[ours] = config.get(key, absent)
        if value is None and ours in ("n_kv_heads", "d_head", "d_ff"):
            continue  # null, as if it were absent
        wanted = {"norm_eps": (float, int), "tie": (bool,)}.get(ours, (int,))
        most = LARGEST_FLOAT if ours == "norm_eps" else LARGEST_SIZE
        if type(value) not in wanted or (ours != "tie" and not 0 < value <= most):
            raise InputError(f"{key} {brief(value)}: not a value it can have; restore the config.json")
    shape["norm_eps"] = float(shape["norm_eps"])
    shape["n_kv_heads"] = shape.get("n_kv_heads") or shape["n_heads"]
    shape["d_ff"] = shape["d_ff"] or 4 * shape["d_model"]
    if shape.get("d_head") == shape["d_model"] / shape["n_heads"]:
        shape["d_head"] = None
    cfg = ModelConfig("gpt2" if kind == "gpt2" else "modern", qk_norm=kind == "qwen3", **shape)
    if kind != "gpt2":
        theta, scaling = _rope_of(config)
        cfg = dataclasses.replace(cfg, rope_theta=theta, rope_scaling=scaling)
    try:
        cfg.check()
    except InputError as e:
        raise InputError(f"a shape that our model can't have ({e})") from None
    return cfg


def _rope_of(config: Mapping[str, Any]) -> tuple[float, str | None]:
    """Base and stretch of the rotary frequencies, from rope_parameters, or rope_theta and rope_scaling."""
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}  # transformers 5 prefers the older
    theta = table.get("rope_theta") if isinstance(table, dict) else None
    theta = config.get("rope_theta", 10_000.0) if theta is None else theta
    if not isinstance(table, dict) or type(theta) not in (int, float) or not 0 < theta <= LARGEST_FLOAT:
        raise InputError(f"rope_parameters {brief(table or theta)}: not a value it can have; restore the config.json")
    kind = table.get("rope_type", table.get("type", "default"))
    names = {"default": (), "linear": ROPE_NUMBERS[:1], "llama3": ROPE_NUMBERS}.get(str(kind))
    if any(isinstance(value, dict) for value in table.values()) or names is None:
        what = "one a layer type" if names else f"rope_type {brief(kind)}"
        raise InputError(f"rope_parameters {what}: not supported; our model knows default, linear and llama3")
    if (share := table.get("partial_rotary_factor")) not in (None, 1):
        raise InputError(f"partial_rotary_factor {share}: not supported; our model turns whole heads")
    table = {ROPE_NUMBERS[3]: config.get("max_position_embeddings")} | table
    if ROPE_NUMBERS[3] in config:  # beside the table, it goes before the table's
        table[ROPE_NUMBERS[3]] = config[ROPE_NUMBERS[3]]
    numbers = [table.get(name) for name in names]
    if any(type(x) not in (int, float) or not abs(x) <= LARGEST_FLOAT for x in numbers):
        raise InputError(
            f"rope_parameters {brief(table)}: lacks one of {', '.join(names)}, or it is no number; "
            "restore the config.json"
        )
    return float(theta), f"{kind}:{','.join(repr(float(x)).removesuffix('.0') for x in numbers)}" if names else None


def brief(value: Any) -> str:
    """At most 60 characters of a value from a file, for a message; printable text as it is, all else by repr."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- the tokenizer's -----------------------------------------------------------------------------------------------


def tokenizer_config(eot_token: str, ctx: int) -> dict[str, Any]:
    """The content of tokenizer_config.json beside a tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eot_token,
        "eos_token": eot_token,
        "model_max_length": ctx,
        "clean_up_tokenization_spaces": False,
    }
