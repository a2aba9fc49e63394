"""What leaves is what was trained: mapping, padded rows, tokenizer, provenance, and nothing published that differs."""

import dataclasses
import json
import os
import signal
import time

import pytest
import torch
from conftest import SMALL, one_error, run
from safetensors.torch import load_file, save_file

import export_hf
from fourscale import agreement, card, hf, hfdir, outdir, rundir, tokenization, tokenizer_json
from fourscale.cli import InputError, RunFailed
from fourscale.config import ModelConfig
from fourscale.model import GPT, document_starts
from fourscale.pretrained import open_pretrained

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

os.environ["HF_HUB_OFFLINE"] = "1"

SHAPE = ("--d-model", "--n-layers", "--n-heads")
CORPUS = (
    "def f(x):\n    return x + 1  # one more\n\n\nclass A:\n    pass\n",
    "  spaces,\ttabs \u2026 and na\u00efve caf\u00e9 \u6771\u4eac",
)
FAMILIES = {
    "gpt2": ("gpt2", {}, "GPT2LMHeadModel"),
    "llama": ("modern", {"n_kv_heads": 2}, "LlamaForCausalLM"),
    "qwen3": ("modern", {"n_kv_heads": 2, "qk_norm": True, "rope_theta": 500_000.0}, "Qwen3ForCausalLM"),
}


def bytes_to_unicode():
    """GPT-2's alphabet, as its encoder.py makes it."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table, n = {b: chr(b) for b in shown}, 0
    for b in range(256):
        if b not in table:
            table[b], n = chr(256 + n), n + 1
    return table


def tokenizer_of(spec="char"):
    return tokenization.build(spec, lambda: iter(CORPUS))


def model_of(family="gpt2", tie=True, vocab_size=None, seed=0, **more):
    arch, changes, _ = FAMILIES[family]
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "d_ff": 48, "ctx": 24, "norm_eps": 3e-5}
    shape |= {"tie": tie, "dropout": 0.1, "vocab_size": vocab_size or tokenizer_of().vocab_size} | changes | more
    model = GPT(ModelConfig(arch, **shape))
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
    found = export_hf.publish(out, model, tokenizer, "# card\n")
    assert found.difference < 1e-5 * found.largest and found.largest > 1 and found.tokens == 48
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
    assert family != "gpt2" or json.loads((out / "config.json").read_text())["n_ctx"] == 24  # for llama.cpp
    assert their_tokenizer.eos_token == their_tokenizer.bos_token == "<|endoftext|>"
    assert {p.name for p in out.iterdir()} == {
        "README.md",
        "config.json",
        "fourscale.json",
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
    """hfdir.write_weights with one thing wrong."""

    def write_weights(directory, model, dtype, max_shard_size):
        out = hf.to_hf(model.state_dict(), model.cfg)
        change(out)
        save_file(out, directory / "model.safetensors", metadata={"format": "pt"})

    return write_weights


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
    monkeypatch.setattr(hfdir, "write_weights", tampered(WRONG_WEIGHTS[name]))
    refused(tmp_path, RunFailed, "nothing was published")


def config_with(**changes):
    whole = hf.hf_config
    return lambda *args: whole(*args) | changes


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
    found = export_hf.publish(tmp_path / "hf", model_of(vocab_size=257), tokenizer, "# card\n", ids)
    assert found.held_out and found.tokens == 48 + 24
    stored = json.loads((tmp_path / "hf" / "fourscale.json").read_text(encoding="utf-8"))["logits"]
    assert stored == found.table() and stored["difference"] == found.difference
    assert "random ids and held-out text" in (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    (
        ("llama", {"d_head": 16, "rope_scaling": "llama3:8,1,4,16"}, "LlamaForCausalLM"),
        ("llama", {"d_head": 6, "rope_scaling": "linear:2.5", "n_kv_heads": 1}, "LlamaForCausalLM"),
        ("llama", {"d_model": 36, "n_heads": 8, "d_head": 4}, "MistralForCausalLM"),  # whose widths Llama refuses
        ("qwen3", {"d_head": 16, "rope_scaling": "llama3:4,1,2,12", "d_model": 36, "n_heads": 8}, "Qwen3ForCausalLM"),
    ),
)
def test_head_width_and_rotary_scaling_go_along(tmp_path, family, changes, name):
    """And come in again: the configuration that is read back is the one that was written."""
    model = model_of(family, rope_theta=100.0, **changes)  # so that wavelengths lie on both sides of the bounds
    found = export_hf.publish(tmp_path / "hf", model, tokenizer_of(), "")
    assert found.difference < 1e-5 * found.largest
    theirs, _ = export_hf.load_as_user(tmp_path / "hf")
    assert type(theirs).__name__ == name
    back = open_pretrained(tmp_path / "hf").cfg
    assert back == dataclasses.replace(model.cfg, dropout=0.0)
    plain = GPT(dataclasses.replace(model.cfg, rope_scaling=None)).eval()
    plain.load_state_dict(model.state_dict())
    if "rope_scaling" in changes:  # the stretch counts on windows this short, or nothing was tested
        rows = list(agreement.random_ids(model.cfg, model.cfg.vocab_size))
        assert agreement.differences(theirs, [agreement.Logits(plain, rows, tmp_path)])[0] > 1e-2


@pytest.mark.parametrize(("dtype", "family"), (("bf16", "llama"), ("fp16", "gpt2")))
def test_rounded_weights_are_compared_with_rounded_ones(tmp_path, dtype, family):
    model, tokenizer, to = model_of(family), tokenizer_of(), getattr(torch, hf.TORCH_NAMES[dtype])
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = export_hf.publish(tmp_path / "hf", model, tokenizer, "", dtype=dtype)
    assert all(
        torch.equal(p, before[name]) for name, p in model.state_dict().items()
    )  # the model at hand isn't rounded
    assert found.difference < 1e-5 * found.largest and found.rounding > 100 * found.difference
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    for name, t in hf.to_hf(before, model.cfg).items():
        assert stored[name].dtype == to and torch.equal(stored[name], t.to(to))
    theirs, _ = export_hf.load_as_user(tmp_path / "hf")
    assert theirs.dtype == to  # by its config alone
    card = (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    assert f"before they were rounded, it is {found.rounding:.2g}" in card
    assert f"{found.rounding:.2g} to the unrounded weights'" in found.told()
    assert found.table()["rounding"] == found.rounding


def test_weights_that_a_narrower_type_cannot_hold_are_not_published(tmp_path):
    model = model_of()
    with torch.no_grad():
        model.blocks[1].mlp.up.bias[3] = 70_000.0
    with pytest.raises(InputError, match=r"--dtype fp16: blocks.1.mlp.up.bias has values that it can't hold"):
        export_hf.publish(tmp_path / "hf", model, tokenizer_of(), "", dtype="fp16")
    assert os.listdir(tmp_path) == []


def test_a_large_model_is_written_in_shards(tmp_path):
    model, tokenizer = model_of("llama", tie=False), tokenizer_of()
    export_hf.publish(tmp_path / "one", model, tokenizer, "")
    export_hf.publish(tmp_path / "many", model, tokenizer, "", max_shard_size=20_000)
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    whole, parts, sizes = load_file(tmp_path / "one" / "model.safetensors"), {}, []
    for name in files:
        part = load_file(tmp_path / "many" / name)
        sizes.append(sum(t.nbytes for t in part.values()))
        assert sizes[-1] <= 20_000 and not parts.keys() & part.keys()
        assert all(index["weight_map"][n] == name for n in part)
        parts |= part
    assert parts.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(parts[n], whole[n]) for n in whole)
    assert min(sizes[:-1]) > 20_000 - max(t.nbytes for t in whole.values())  # none was closed while there was room
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    again, real = open_pretrained(tmp_path / "many").model().state_dict(), model.cfg.vocab_size
    for name, p in model.state_dict().items():
        rows = slice(real) if name in ("wte.weight", "head.weight") else slice(None)
        assert torch.equal(again[name][rows], p[rows]), name
        assert not again[name][real:].any() or rows == slice(None)


@pytest.mark.parametrize("spec", ("byte", "bpe:300", "gpt2"))
def test_the_tokenizer_loads_in_tokenizers_and_as_a_tiktoken_encoding(tmp_path, spec):
    import tiktoken
    import tokenizers

    ours = tokenizer_of(spec)
    export_hf.publish(tmp_path / "hf", model_of(vocab_size=ours.vocab_size), ours, "")
    path = tmp_path / "hf" / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    to_byte = {c: b for b, c in bytes_to_unicode().items()}
    ends = {token["content"]: token["id"] for token in spec["added_tokens"]}
    words = {token: i for token, i in spec["model"]["vocab"].items() if token not in ends}
    ranks = {bytes(to_byte[c] for c in token): i for token, i in words.items()}
    pattern = tokenizer_json.GPT2_PATTERN
    fast = tiktoken.Encoding("exported", pat_str=pattern, mergeable_ranks=ranks, special_tokens=ends)
    plain = tokenizers.Tokenizer.from_file(str(path))
    for text in (*CORPUS, *export_hf.TEXTS, "\u0000\u2028 \r\n"):
        assert fast.encode_ordinary(text) == plain.encode(text).ids == ours.encode(text), text
        assert fast.decode(ours.encode(text)) == plain.decode(ours.encode(text)) == text
    assert fast.encode("<|endoftext|>", allowed_special="all") == [ours.eot_id] == plain.encode("<|endoftext|>").ids


def test_a_model_without_a_tokenizer_leaves_without_one(tmp_path):
    export_hf.publish(tmp_path / "hf", model_of(), None, "")
    assert not list((tmp_path / "hf").glob("tokenizer*"))
    assert agreement.load_theirs(tmp_path / "hf").config.eos_token_id is None
    source = open_pretrained(tmp_path / "hf")
    assert source.tokenizer_entry is None
    with pytest.raises(InputError, match="has no tokenizer"):
        source.tokenizer()


@pytest.mark.parametrize("spec", ("char", "byte"))
def test_an_export_read_again_is_the_same_model_and_tokenizer(tmp_path, spec):
    """By its path alone, as eval_ppl.py, sample.py and --init-from do."""
    tokenizer = tokenizer_of(spec)
    model = model_of("qwen3", vocab_size=tokenizer.vocab_size)
    export_hf.publish(tmp_path / "hf", model, tokenizer, "")
    source = open_pretrained(str(tmp_path / "hf"))
    assert source.tokenizer_entry == tokenizer.entry() and source.tokenizer().encode("def") == tokenizer.encode("def")
    again = source.model()
    ids = torch.randint(tokenizer.vocab_size, (2, 24))
    with torch.no_grad():
        assert torch.equal(again(ids), model(ids))
    assert source.about["update"] is None and len(source.about["digest"]) == 64


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
    parts = agreement.comparable(model.cfg, held_out)
    assert [len(p) for p in parts] == [3, 1, 20, 23, 1] and torch.equal(torch.cat(parts), held_out.flatten())
    random = agreement.random_ids(model.cfg, tokenizer.vocab_size)
    assert [len(p) for p in agreement.comparable(model.cfg, random)] == [24, 24]  # every position
    assert random[1, 0] == eot
    found = export_hf.publish(tmp_path / "hf", model, tokenizer, "# card\n", held_out)
    assert found.difference < 1e-5 * found.largest and found.tokens == 48 + 48

    theirs, _ = export_hf.load_as_user(tmp_path / "hf")
    uncut = agreement.Logits(model, list(held_out), tmp_path)
    assert agreement.differences(theirs, [uncut])[0] > 0.1  # uncut, transformers sees other documents
    positions = torch.arange(24) - document_starts(held_out, eot)  # what the card tells users
    with torch.no_grad():
        apart = theirs(held_out, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(apart, model(held_out), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MASKED_WRONG)
def test_a_wrong_weight_of_a_model_with_document_mask_is_not_published(tmp_path, monkeypatch, name):
    model, tokenizer = masked_model_of()
    monkeypatch.setattr(hfdir, "write_weights", tampered(MASKED_WRONG[name]))
    refused(tmp_path, RunFailed, "nothing was published", model, tokenizer)


@pytest.mark.slow
def test_the_door_exports_a_run_with_document_mask_and_says_so(trained, tmp_path):
    out = tmp_path / "hf"
    run("export_hf.py", "--ckpt", trained("--doc-mask", "--arch", "modern"), "--out", out)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "trained with document masking" in card and "restart at each `<|endoftext|>`" in card


@pytest.mark.slow
def test_the_export_of_four_ranks_is_that_of_one_to_the_byte(trained, data, tmp_path):
    """The same weights, saved by 4 ranks under fsdp and by 1: an update at a rate of 0 changes none."""
    shapeless = [x for i in range(0, len(SMALL), 2) if SMALL[i] not in SHAPE for x in SMALL[i : i + 2]]
    still = ("--init-from", trained(), "--data", data, *shapeless, "--lr", 0, "--min-lr", 0, "--stop-after", 1)
    for name, nproc, mode in (("one", None, "ddp"), ("four", 4, "fsdp")):
        run("train.py", *still, "--ckpt-dir", tmp_path / name, "--parallel", mode, nproc=nproc)
        run("export_hf.py", "--ckpt", tmp_path / name, "--out", tmp_path / f"hf_{name}")
    assert len(list((tmp_path / "four" / "step_1").glob("*.distcp"))) == 4
    files = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    for name in files:
        one, four = ((tmp_path / f"hf_{run}" / name).read_bytes() for run in ("one", "four"))
        assert one == four, name
    run("export_hf.py", "--ckpt", trained(), "--out", tmp_path / "hf_before")
    before, four = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("hf_before", "hf_four"))
    assert before == four
    other = run("export_hf.py", "--ckpt", trained(), "--dtype", "bf16", "--out", tmp_path / "hf_bf16").stdout
    assert "to the unrounded weights'" in other


def test_the_door_exports_a_trained_run_with_its_provenance(trained, tmp_path):
    ckpt, out = trained("--eval-tokens", 1_000_000), tmp_path / "hf"
    shown = run("export_hf.py", "--ckpt", ckpt, "--out", out).stdout
    assert "largest difference of logits" in shown and f'AutoModelForCausalLM.from_pretrained("{out}")' in shown
    contract = json.loads((ckpt / "run.json").read_text(encoding="utf-8"))
    card = (out / "README.md").read_text(encoding="utf-8")
    digest = rundir.digest(rundir.open_checkpoint(ckpt))
    loss = f"{rundir.open_checkpoint(ckpt).step['val_loss']:.4f} nats/token"
    facts = (contract["tokenizer"]["sha256"], contract["data"]["train_digest"], digest, loss)
    for fact in (*facts, "held-out text", "licence: unknown", "7,400 tokens seen"):
        assert fact in card
    told = (out / "fourscale.json").read_text(encoding="utf-8")
    record = json.loads(told)
    assert record["checkpoint"]["digest"] == digest and record["checkpoint"]["tokens"] == 7400
    assert record["data"][""]["val_digest"] == contract["data"]["val_digest"] and record["logits"]["held_out"]
    assert record["logits"]["difference"] < 1e-4 and record["dtype"] == "fp32"
    assert str(tmp_path.parent) not in card + told  # nothing about the machine
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1  # who may read one file may read all
    assert "exists" in one_error(run("export_hf.py", "--ckpt", ckpt, "--out", out, code=2))


def test_a_door_that_is_told_to_end_leaves_nothing(tmp_path):
    with pytest.raises(SystemExit) as e, outdir.whole(tmp_path / "hf") as temporary:
        (temporary / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert e.value.code == 143 and not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_card_says_nothing_of_this_machine():
    assert card.public_name("owner/name") == "owner/name"
    assert card.public_name("/home/me/secret/run/step_20") == "run/step_20"
    assert card.public_name("/home/me/secret/model") == "model"
