"""Small models of published kinds, as transformers saves them, and the ways in and out; no tests."""

import json

import torch
from safetensors.torch import load_file, save_file

import export_hf
import import_hf
from fourscale import card
from fourscale.pretrained import open_pretrained

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
# The shapes of published models, and how many parameters they are known to have.
REAL = {
    "gpt2": ("gpt2", {}, 124_439_808),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    "Llama-3.2-1B": (
        "llama",
        {
            **{"vocab_size": 128_256, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "rope_parameters": LLAMA3},
            **{"tie_word_embeddings": True, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
        },
        1_235_814_400,
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {
            **{"vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16},
            **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True},
            **{"max_position_embeddings": 40_960, "rms_norm_eps": 1e-6},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        596_049_920,
    ),
}
# The same, as small as keeps what is special about each.
SMALLER = {
    "gpt2": {"vocab_size": 101, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt2-xl": {"vocab_size": 101, "n_positions": 24, "n_embd": 50, "n_layer": 2, "n_head": 5, "n_inner": 40},
    "Llama-3.2-1B": {
        **{"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 512},
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64, "rope_theta": 5000.0},
    },
    "Qwen3-0.6B": {
        **{"vocab_size": 151, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 64},
    },
}
OTHERS = {
    "untied llama": (
        "llama",
        {
            **{"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
            **{"intermediate_size": 48, "max_position_embeddings": 64},
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
        },
    ),
    "mistral": (
        "mistral",
        {
            **{"vocab_size": 101, "hidden_size": 36, "num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 4},
            **{"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64},
            "sliding_window": None,
        },
    ),
}


def kind_of(name):
    """(model_type, config) of a model small enough to compute with."""
    if name in OTHERS:
        return OTHERS[name]
    kind, real, _ = REAL[name]
    return kind, real | SMALLER[name]


def theirs_of(name, seed=0):
    """transformers' model with random weights, large, and norms off their initial values: a mix-up must show."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, config = kind_of(name)
    config = AutoConfig.for_model(kind, **config, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.2)
    return model


def saved(name, directory, dtype=torch.float32, **how):
    theirs_of(name).to(dtype).save_pretrained(directory, **how)
    return directory


def taken_in(directory, out):
    source = open_pretrained(directory, "--model")
    return import_hf.publish(out, source, import_hf.tokenizer_of(source))


def given_back(run_dir, out, dtype="fp32"):
    """What export_hf.py does of a run."""
    source = open_pretrained(run_dir)
    imported = source.ckpt.run["imported"]
    tokenizer = source.tokenizer() if source.tokenizer_entry else None
    words = card.model_card(source.ckpt, tokenizer, out.name, None, dtype)
    special = imported["special_ids"]
    export_hf.publish(out, source, tokenizer, words, dtype=dtype, special_ids=special, verbatim=True)
    return {name: t for path in out.glob("*.safetensors") for name, t in load_file(path).items()}


def change(directory, **changes):
    """config.json with some values changed; None takes a key away."""
    path = directory / "config.json"
    table = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in table.items() if v is not ...}), encoding="utf-8")


def as_bin(directory):
    """The weights as older versions of transformers saved them."""
    for path in sorted(directory.glob("*.safetensors")):
        torch.save(load_file(path), path.with_name(path.name.replace("model", "pytorch_model")).with_suffix(".bin"))
        path.unlink()
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        table = json.loads(index.read_text(encoding="utf-8"))
        table["weight_map"] = {
            n: f.replace("model", "pytorch_model").replace("safetensors", "bin") for n, f in table["weight_map"].items()
        }
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(table), encoding="utf-8")
        index.unlink()


def overwrite(path, change):
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
