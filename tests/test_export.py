"""What leaves is what was trained: mapping, padded rows, tokenizer, provenance, and nothing published that differs."""

import json
import os

import pytest
import torch
from conftest import one_error, run

import export_hf
from fourscale import hf, tokenization
from fourscale.cli import InputError, RunFailed
from fourscale.config import ModelConfig
from fourscale.model import GPT, document_starts

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

os.environ["HF_HUB_OFFLINE"] = "1"

CORPUS = (
    "def f(x):\n    return x + 1  # one more\n\n\nclass A:\n    pass\n",
    "  spaces,\ttabs \u2026 and na\u00efve caf\u00e9 \u6771\u4eac",
)
FAMILIES = {
    "gpt2": ("gpt2", {}, "GPT2LMHeadModel"),
    "llama": ("modern", {"n_kv_heads": 2}, "LlamaForCausalLM"),
    "qwen3": ("modern", {"n_kv_heads": 2, "qk_norm": True, "rope_theta": 500_000.0}, "Qwen3ForCausalLM"),
}


def tokenizer_of(spec="char"):
    return tokenization.build(spec, lambda: iter(CORPUS))


def model_of(family="gpt2", tie=True, vocab_size=None, seed=0, **more):
    arch, changes, _ = FAMILIES[family]
    shape = {"n_kv_heads": 4, "tie": tie, "norm_eps": 3e-5, "dropout": 0.1} | changes | more
    model = GPT(
        ModelConfig(arch, 32, 2, 4, d_ff=48, ctx=24, vocab_size=vocab_size or tokenizer_of().vocab_size, **shape)
    )
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():  # large, and norms and biases off their initial values: a mix-up must show
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model.eval()


@pytest.mark.parametrize("tie", (True, False))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_directory_loads_by_itself_and_computes_the_same(tmp_path, family, tie):
    tokenizer, model, out = tokenizer_of(), model_of(family, tie), tmp_path / "made" / "hf"
    vocab = tokenizer.vocab_size
    assert vocab % 64  # padded rows exist
    agreement = export_hf.publish(out, model, tokenizer, "# card\n")
    assert agreement.difference < 1e-5 * agreement.largest and agreement.largest > 1 and agreement.tokens == 48
    assert os.listdir(out.parent) == ["hf"]

    theirs, their_tokenizer = export_hf.load_as_user(out)
    assert type(theirs).__name__ == FAMILIES[family][2]
    ids = torch.randint(vocab, (3, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), atol=1e-5, rtol=1e-5)
    assert theirs.get_input_embeddings().weight.shape[0] == theirs.get_output_embeddings().weight.shape[0] == vocab
    assert (theirs.get_input_embeddings().weight is theirs.get_output_embeddings().weight) == tie
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == tokenizer.eot_id
    assert theirs.config.max_position_embeddings == their_tokenizer.model_max_length == 24
    assert their_tokenizer.eos_token == their_tokenizer.bos_token == "<|endoftext|>"
    assert {p.name for p in out.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_and_names_are_all_that_transformers_asks_for(tmp_path, family):
    """Nothing missing, nothing left over: an unmatched name would leave a random weight with a mere warning."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = model_of(family, tie=False)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf.hf_config(model.cfg, 0)))
    state = hf.to_hf(model.state_dict(), model.cfg)
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in theirs.state_dict().items()}
    assert len({t.data_ptr() for t in state.values()}) == len(state)  # none shares memory: safetensors refuses that


def test_a_parameter_without_counterpart_is_an_error():
    with pytest.raises(KeyError):
        hf.to_hf({"blocks.0.attn.sink.weight": torch.zeros(2)}, model_of().cfg)


@pytest.mark.parametrize("spec", ("char", "byte", "bpe:300", "gpt2"))
def test_token_ids_are_the_same(tmp_path, spec):
    tokenizer = tokenizer_of(spec)
    model = model_of("llama", vocab_size=tokenizer.vocab_size)
    export_hf.publish(tmp_path / "hf", model, tokenizer, "")
    _, theirs = export_hf.load_as_user(tmp_path / "hf")
    texts = [*CORPUS, "  a", "\n\n a \n", " ", "e\n"]
    if spec != "char":
        texts += [*export_hf.TEXTS, "\u0000\u2028 \r\n"]
    for text in texts:
        assert theirs(text)["input_ids"] == tokenizer.encode(text), text
        assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs("a<|endoftext|>")["input_ids"] == [*tokenizer.encode("a"), tokenizer.eot_id]  # as the card says
    if spec != "char":
        assert tokenizer.eot_id not in tokenizer.encode("a<|endoftext|>")


def test_tokens_that_a_foreign_tokenizer_adds_are_not_exported(tmp_path):
    spec = json.loads(tokenizer_of("bpe:300")._data)
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    tokenizer = tokenization.Tokenizer("tokenizer.json", json.dumps(spec).encode(), "<|endoftext|>")
    export_hf.publish(tmp_path / "hf", model_of(vocab_size=tokenizer.vocab_size), tokenizer, "")
    _, theirs = export_hf.load_as_user(tmp_path / "hf")
    assert theirs(CORPUS[0])["input_ids"] == tokenizer.encode(CORPUS[0])


def refused(tmp_path, error, match, model=None, tokenizer=None):
    with pytest.raises(error, match=match):
        export_hf.publish(tmp_path / "hf", model or model_of(), tokenizer or tokenizer_of(), "")
    assert os.listdir(tmp_path) == []  # nothing published, nothing left behind


def tampered(change):
    """hf.to_hf with one thing wrong."""
    whole = hf.to_hf

    def to_hf(state, cfg):
        out = whole(state, cfg)
        change(out)
        return out

    return to_hf


def swap(a, b):
    def change(out):
        out[a], out[b] = out[b], out[a]

    return change


LAYER = "transformer.h.1"
WRONG_WEIGHTS = {
    "one value": lambda out: out[f"{LAYER}.mlp.c_fc.weight"][3, 5].add_(0.1),
    "one layer norm": lambda out: out[f"{LAYER}.ln_1.bias"][7].add_(0.05),
    "layers swapped": swap("transformer.h.0.attn.c_attn.weight", f"{LAYER}.attn.c_attn.weight"),
    "square matrix transposed": lambda out: out.update(
        {f"{LAYER}.attn.c_proj.weight": out[f"{LAYER}.attn.c_proj.weight"].T.contiguous()}
    ),
    "missing": lambda out: out.pop(f"{LAYER}.ln_2.weight"),
    "last position": lambda out: out["transformer.wpe.weight"][-1, 3].add_(0.5),
    "not finite": lambda out: out["transformer.ln_f.weight"][0].fill_(float("nan")),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_a_wrong_weight_is_not_published(tmp_path, monkeypatch, name):
    monkeypatch.setattr(hf, "to_hf", tampered(WRONG_WEIGHTS[name]))
    refused(tmp_path, RunFailed, "nothing was published")


def config_with(**changes):
    whole = hf.hf_config
    return lambda cfg, eot: whole(cfg, eot) | changes


@pytest.mark.parametrize(
    ("family", "changes"),
    (
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"layer_norm_epsilon": 1e-2}),
        ("gpt2", {"torch_dtype": "bfloat16"}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen3", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}),
        ("qwen3", {"model_type": "none of the known"}),
    ),
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_a_wrong_config_is_not_published(tmp_path, monkeypatch, family, changes):
    monkeypatch.setattr(hf, "hf_config", config_with(**changes))
    refused(tmp_path, RunFailed, "nothing was published", model_of(family))


def test_another_tokenizer_is_not_published(tmp_path, monkeypatch):
    byte, bpe = tokenizer_of("byte"), tokenizer_of("bpe:300")
    monkeypatch.setattr(byte, "save", bpe.save)
    refused(tmp_path, RunFailed, "its tokenizer differs", model_of(vocab_size=300), byte)


def test_what_exists_is_never_touched(tmp_path):
    out = tmp_path / "hf"
    out.mkdir()
    with pytest.raises(InputError, match="exists"):
        export_hf.publish(out, model_of(), tokenizer_of(), "")
    assert list(out.iterdir()) == []
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    with pytest.raises(InputError, match="--out"):
        export_hf.publish(tmp_path / "file" / "hf", model_of(), tokenizer_of(), "")


def test_held_out_text_is_compared_where_there_is_some(tmp_path):
    tokenizer = tokenizer_of("byte")
    ids = torch.tensor([[*tokenizer.encode(CORPUS[0])[:20], tokenizer.eot_id, 72, 105, 10]])
    assert {"Hi\n", CORPUS[0][:20]} <= set(export_hf.known_texts(tokenizer, ids))
    agreement = export_hf.publish(tmp_path / "hf", model_of(vocab_size=257), tokenizer, "# card\n", ids)
    assert agreement.held_out and agreement.tokens == 48 + 24
    assert "random ids and held-out text" in (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")


MASKED_WRONG = WRONG_WEIGHTS | {
    "end-of-text row": lambda out: out["transformer.wte.weight"][tokenizer_of().eot_id, 3].add_(0.5),
}


def masked_model_of(family="gpt2"):
    tokenizer = tokenizer_of()
    return model_of(family, tie=False, doc_mask=True, eot_id=tokenizer.eot_id), tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_document_mask_is_compared_document_by_document(tmp_path, family):
    model, tokenizer = masked_model_of(family)
    eot = tokenizer.eot_id
    held_out = torch.tensor([[eot, 1, 2, eot, eot, *range(3, 22)], [*range(1, 24), eot]])
    assert eot not in range(1, 24)
    parts = export_hf.comparable(model, held_out)
    assert [len(p) for p in parts] == [3, 1, 20, 23, 1] and torch.equal(torch.cat(parts), held_out.flatten())
    random = export_hf.random_ids(model, tokenizer.vocab_size)
    assert [len(p) for p in export_hf.comparable(model, random)] == [24, 24] and random[1, 0] == eot  # every position
    agreement = export_hf.publish(tmp_path / "hf", model, tokenizer, "# card\n", held_out)
    assert agreement.difference < 1e-5 * agreement.largest and agreement.tokens == 48 + 48

    theirs, _ = export_hf.load_as_user(tmp_path / "hf")
    assert export_hf.compare_logits(model, theirs, held_out)[0] > 0.1  # uncut, transformers sees other documents
    positions = torch.arange(24) - document_starts(held_out, eot)  # what the card tells users
    with torch.no_grad():
        apart = theirs(held_out, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(apart, model(held_out), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MASKED_WRONG)
def test_a_wrong_weight_of_a_model_with_document_mask_is_not_published(tmp_path, monkeypatch, name):
    model, tokenizer = masked_model_of()
    monkeypatch.setattr(hf, "to_hf", tampered(MASKED_WRONG[name]))
    refused(tmp_path, RunFailed, "nothing was published", model, tokenizer)


@pytest.mark.slow
def test_the_door_exports_a_run_with_document_mask_and_says_so(trained, tmp_path):
    out = tmp_path / "hf"
    run("export_hf.py", "--ckpt", trained("--doc-mask", "--arch", "modern"), "--out", out)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "trained with document masking" in card and "restart at each `<|endoftext|>`" in card


def test_the_door_exports_a_trained_run_with_its_provenance(trained, tmp_path):
    ckpt, out = trained("--eval-tokens", 1_000_000), tmp_path / "hf"
    shown = run("export_hf.py", "--ckpt", ckpt, "--out", out).stdout
    assert "largest difference of logits" in shown and f'AutoModelForCausalLM.from_pretrained("{out}")' in shown
    contract = json.loads((ckpt / "run.json").read_text(encoding="utf-8"))
    card = (out / "README.md").read_text(encoding="utf-8")
    for fact in (
        contract["tokenizer"]["sha256"],
        contract["data"]["train_digest"],
        "held-out text",
        "licence: unknown",
    ):
        assert fact in card
    assert str(tmp_path.parent) not in card  # nothing about the machine
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1  # who may read one file may read all
    assert "exists" in one_error(run("export_hf.py", "--ckpt", ckpt, "--out", out, code=2))
