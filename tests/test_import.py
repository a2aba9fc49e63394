"""What comes in is what was there: each tensor back bit for bit, logits as transformers', no option lost in silence."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, environment, one_error, run
from published import (
    LLAMA3,
    OTHERS,
    REAL,
    SMALLER,
    as_bin,
    change,
    given_back,
    overwrite,
    saved,
    taken_in,
)
from safetensors.torch import load_file, save_file

import export_hf
from fourscale import agreement, hf, origins, receipts, rundir, steps, tokenization
from fourscale.cli import InputError, RunFailed
from fourscale.config import ModelConfig, TrainConfig
from fourscale.model import GPT, rotary_tables
from fourscale.pretrained import open_pretrained

STRETCH = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"} | {"rope_theta": 5000.0}

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"

# ---- shapes of published models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_published_models_fit_name_by_name(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, config, parameters = REAL[name]
    config = AutoConfig.for_model(kind, **config)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
        cfg = hf.model_config(config.to_dict())
        ours = dict(GPT(cfg).named_parameters())
    wanted = {n: tuple(p.shape) for n, p in theirs.named_parameters()}  # a tied head is named once
    assert sum(p.numel() for p in theirs.parameters()) == parameters
    assert {n: tuple(t.shape) for n, t in hf.to_hf(ours, cfg).items()} == wanted
    for name, p in ours.items():
        part = {n: torch.empty(wanted[n], device="meta") for n in hf.their_names(name, cfg)}
        back = torch.cat([*part.values()]) if len(part) > 1 else next(iter(part.values()))
        back = back.T if hf.is_transposed(name, cfg) else back
        assert back.shape[1:] == p.shape[1:] and len(back) == (cfg.vocab_size if "wte" in name else len(p))
    again = AutoConfig.for_model(**hf.hf_config(cfg, 0))
    assert hf.model_config(again.to_dict()) == cfg


def test_absent_keys_mean_what_they_mean_to_transformers():
    from transformers import AutoConfig

    for kind in ("gpt2", "llama", "qwen3"):
        assert hf.model_config({"model_type": kind}) == hf.model_config(AutoConfig.for_model(kind).to_dict())
    with pytest.raises(InputError, match="sliding_window 4096"):  # Mistral's default is a window
        hf.model_config({"model_type": "mistral"})
    bare, full = (
        {"model_type": "mistral", "sliding_window": None},
        AutoConfig.for_model("mistral", sliding_window=None),
    )
    assert hf.model_config(bare) == hf.model_config(full.to_dict())


def test_rotary_scaling_as_transformers_4_writes_it():
    base = {"model_type": "llama", "rope_theta": 500_000.0}
    old = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    cfg = hf.model_config(base | {"rope_scaling": old})
    assert (cfg.rope_theta, cfg.rope_scaling) == (500_000.0, "llama3:32,1,4,8192")
    assert hf.model_config(base | {"rope_scaling": {"type": "linear", "factor": 2.5}}).rope_scaling == "linear:2.5"
    assert hf.model_config(base | {"rope_scaling": None}).rope_scaling is None


@pytest.mark.parametrize(
    ("name", "changes"),
    (
        ("Llama-3.2-1B", {"original_max_position_embeddings": 16}),  # beside the table's 64
        ("Llama-3.2-1B", {"original_max_position_embeddings": 16, "rope_parameters": STRETCH}),
        ("Llama-3.2-1B", {"rope_parameters": STRETCH}),
        ("gpt2", {"num_attention_heads": 8}),  # beside n_head 4
        ("gpt2", {"num_attention_heads": 8, "n_head": ...}),
        (
            "gpt2",
            {
                **{"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 24},
                **{"n_embd": 7, "n_layer": ..., "n_positions": 7},
            },
        ),
    ),
    ids=("16 and 64", "16 alone", "no context", "8 and 4 heads", "8 heads", "all aliases"),
)
def test_keys_that_stand_twice_count_as_they_do_for_transformers(tmp_path, name, changes):
    from transformers import AutoModelForCausalLM

    source = saved(name, tmp_path / "x")
    change(source, **changes)
    place = open_pretrained(source)
    ids = torch.randint(101, (2, min(place.cfg.ctx, 256)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = place.model()(ids)
        theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()(ids).logits
    assert (ours - theirs).abs().max() < 1e-4 and theirs.abs().max() > 1


@pytest.mark.parametrize("name", ("Llama-3.2-1B", "Qwen3-0.6B"))
def test_rotary_tables_are_theirs_to_the_bit(name):
    """Over the whole context: at position 100,000 an ulp of a frequency turns a head by a hundredth of a radian."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    kind, real, _ = REAL[name]
    for changes in ({}, SMALLER[name], {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7e4}}):
        config = AutoConfig.for_model(kind, **(real | changes))
        theirs = {"llama": LlamaRotaryEmbedding, "qwen3": Qwen3RotaryEmbedding}[kind](config)
        cfg = hf.model_config(config.to_dict())
        want = theirs(torch.zeros(1), torch.arange(cfg.ctx)[None])
        for a, b in zip(rotary_tables(cfg.ctx, cfg, torch.device("cpu")), want, strict=True):
            assert torch.equal(a, b[0])


# ---- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", (*REAL, *OTHERS))
def test_every_tensor_comes_back(tmp_path, name):
    source = saved(name, tmp_path / "x")
    found = taken_in(source, tmp_path / "run")
    assert found.difference < 1e-5 * found.largest and found.largest > 1
    back, before = given_back(tmp_path / "run", tmp_path / "y"), load_file(source / "model.safetensors")
    assert back.keys() == before.keys()
    for key in before:
        assert back[key].dtype == before[key].dtype and torch.equal(back[key], before[key]), key
    old, new = (json.loads((tmp_path / d / "config.json").read_text(encoding="utf-8")) for d in "xy")
    assert (new["bos_token_id"], new["eos_token_id"]) == (old["bos_token_id"], old["eos_token_id"])
    generation = json.loads((tmp_path / "y" / "generation_config.json").read_text(encoding="utf-8"))
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    assert hf.model_config(old) == hf.model_config(new)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "x", "y"]


@pytest.mark.parametrize("how", ("sharded", "pytorch_model.bin", "sharded bin"))
def test_bf16_comes_back_from_every_form_of_directory(tmp_path, how):
    name = "Qwen3-0.6B"
    shards = {"max_shard_size": "10KB"} if "sharded" in how else {}
    source = saved(name, tmp_path / "x", torch.bfloat16, **shards)
    before = {n: t for path in source.glob("*.safetensors") for n, t in load_file(path).items()}
    assert (len(list(source.glob("*.safetensors"))) > 2) == ("sharded" in how)
    if "bin" in how:
        as_bin(source)
    taken_in(source, tmp_path / "run")
    back = given_back(tmp_path / "run", tmp_path / "y", "bf16")
    assert back.keys() == before.keys() and json.loads((tmp_path / "run" / "run.json").read_text())["imported"]["dtype"]
    for key in before:
        assert back[key].dtype == torch.bfloat16 and torch.equal(back[key], before[key]), key


def test_openais_gpt2_as_it_was_published(tmp_path):
    """GPT2Model's names without a prefix, with the masks that were once saved as buffers, and no head."""
    source = saved("gpt2", tmp_path / "x")
    before = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): t for name, t in before.items()}
    for layer in range(2):
        bare[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(24, 24)).view(1, 1, 24, 24)
        bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, source / "model.safetensors", metadata={"format": "pt"})
    found = taken_in(source, tmp_path / "run")
    assert found.difference < 1e-5 * found.largest
    back = given_back(tmp_path / "run", tmp_path / "y")
    assert back.keys() == before.keys() and all(torch.equal(back[n], before[n]) for n in before)


def test_a_tied_head_that_is_stored_too_must_be_the_embedding(tmp_path):
    source = saved("gpt2", tmp_path / "x")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert taken_in(source, tmp_path / "run").difference < 1e-4
    weights["lm_head.weight"][3, 5] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="tie_word_embeddings"):
        taken_in(source, tmp_path / "other")


def test_the_run_is_one_that_every_reader_knows(tmp_path):
    source = saved("Llama-3.2-1B", tmp_path / "x")
    taken_in(source, tmp_path / "run")
    place = open_pretrained(tmp_path / "run")
    assert place.path == tmp_path / "run" / "step_0" and place.ckpt.step["update"] == 0
    entry = place.ckpt.run["imported"]
    assert entry["source"] == str(source) and entry["class"] == "LlamaForCausalLM"
    assert entry["digest"] == open_pretrained(source).about["digest"] and entry["logits"]["difference"] < 1e-4
    a, b = place.model().state_dict(), open_pretrained(source).model().state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)

    ckpt, faults = steps.checkpoint_faults(place.path, True, lambda n: None)
    assert faults == [] and ckpt is not None
    words = [text for _, _, text in (*receipts.contract(place.ckpt.run), *receipts.imported(place.ckpt.run))]
    assert any(str(source) in text and entry["digest"][:12] in text for text in words)
    for flags, named in (
        (TrainConfig(ckpt_dir=tmp_path / "run", resume="must"), "--resume: "),
        (TrainConfig(branch_from=tmp_path / "run"), "--branch-from: "),
    ):
        with pytest.raises(InputError, match=rf"^{named}.*holds an imported model.*--init-from {tmp_path / 'run'} in "):
            origins.recall(flags)
    shutil.copytree(tmp_path / "run", tmp_path / "bad")
    table = json.loads((tmp_path / "bad" / "run.json").read_text(encoding="utf-8"))
    del table["imported"]["digest"]
    (tmp_path / "bad" / "run.json").write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(InputError, match=r"imported\.digest is missing"):
        rundir.read_run(tmp_path / "bad")


def test_parameters_are_filled_by_name_and_positions_may_be_fewer(tmp_path):
    source = saved("gpt2", tmp_path / "x")
    taken_in(source, tmp_path / "run")
    for place in (open_pretrained(source), open_pretrained(tmp_path / "run")):
        whole = place.model().state_dict()
        for fewer in (whole["wpe.weight"].shape[0], 7):
            some = {"blocks.1.mlp.up.weight": torch.empty(128, 32), "wpe.weight": torch.full((fewer, 32), torch.nan)}
            some["wte.weight"] = torch.full((128, 32), torch.nan)
            place.fill(some)
            assert torch.equal(some["wpe.weight"], whole["wpe.weight"][:fewer])
            assert torch.equal(some["wte.weight"], whole["wte.weight"]) and not some["wte.weight"][101:].any()
            assert torch.equal(some["blocks.1.mlp.up.weight"], whole["blocks.1.mlp.up.weight"])
        with pytest.raises(InputError, match=r"wpe\.weight"):
            place.fill({"wpe.weight": torch.empty(25, 32)})


def test_nothing_is_published_where_logits_differ(tmp_path, monkeypatch):
    source = saved("gpt2", tmp_path / "x")
    whole = hf.from_hf

    def wrong(name, read, cfg):
        t = whole(name, read, cfg)
        return t.T.contiguous() if name == "blocks.0.attn.out.weight" else t

    monkeypatch.setattr(hf, "from_hf", wrong)
    with pytest.raises(RunFailed, match=r"transformers' logits differ from ours by .*nothing was published"):
        taken_in(source, tmp_path / "run")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.slow
def test_the_doors_pass_an_imported_model_on(data, tmp_path):
    source, out = saved("Qwen3-0.6B", tmp_path / "x"), tmp_path / "run"
    change(source, vocab_size=320)
    overwrite(source / "model.safetensors", lambda w: w.update({"model.embed_tokens.weight": torch.randn(320, 32)}))
    tokenization.build("byte", lambda: iter(())).save(source)
    shown = run("import_hf.py", "--model", source, "--out", out)
    assert f"train.py --init-from {out}" in shown.stdout and "320 rows for 257 ids" in shown.stdout
    assert shown.stderr == ""
    assert "exists" in one_error(run("import_hf.py", "--model", source, "--out", out, code=2))
    assert "is a checkpoint of train.py already" in one_error(
        run("import_hf.py", "--model", out, "--out", tmp_path / "z", code=2)
    )
    told = run("check.py", "run", out).stdout
    assert "imported" in told and "not trained further" in told and "1 run(s) checked, nothing failed" in told
    assert "nothing failed" in run("check.py", "ckpt", "--deep", out).stdout
    again = one_error(run("train.py", "--data", data, "--ckpt-dir", out, "--resume", "auto", code=2))
    assert f"start one from its weights with --init-from {out}" in again
    fresh = one_error(run("train.py", "--data", data, "--ckpt-dir", out, code=2))
    assert "it is an imported model: start from it with --init-from, in another directory" in fresh
    for place in (out, source):
        assert run("sample.py", "--ckpt", place, "--prompt", "a", "--max-new-tokens", 3).stdout.startswith("a")
    flags = ("--ctx", 32, "--global-bsz", 4, "--steps", 2, "--lr", 1e-3, "--backend", "gloo", "--eval-tokens", 500)
    for place, name in ((out, "a"), (source, "b")):
        tuned = tmp_path / name
        run("train.py", "--init-from", place, "--data", data, "--ckpt-dir", tuned, *flags)
    a, b = (open_pretrained(tmp_path / name).model().state_dict() for name in "ab")
    assert all(torch.equal(a[n], b[n]) for n in a)
    run("export_hf.py", "--ckpt", out, "--out", tmp_path / "y")
    back, before = load_file(tmp_path / "y" / "model.safetensors"), load_file(source / "model.safetensors")
    assert back.keys() == before.keys() and all(torch.equal(back[n], before[n]) for n in before)


def test_two_models_are_never_in_memory_at_once(tmp_path, monkeypatch):
    """Ours is gone when transformers' is loaded, and the other way round."""
    import gc
    import weakref

    alive = []
    build, load = GPT.__init__, agreement.load_theirs

    def seen(self, *args, **more):
        build(self, *args, **more)
        alive.append(weakref.ref(self))

    def alone(*args, **more):
        gc.collect()
        held = [m() for m in alive if m() is not None and m().wte.weight.device.type != "meta"]
        assert held == []
        return load(*args, **more)

    monkeypatch.setattr(GPT, "__init__", seen)
    monkeypatch.setattr(agreement, "load_theirs", alone)
    taken_in(saved("gpt2", tmp_path / "x"), tmp_path / "run")
    given_back(tmp_path / "run", tmp_path / "y", "bf16")
    assert len(alive) >= 4
    assert dataclasses.asdict(open_pretrained(tmp_path / "y").cfg) == dataclasses.asdict(
        open_pretrained(tmp_path / "x").cfg
    )


MEASURED = """
import resource, sys
from pathlib import Path
import torch, transformers
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
import export_hf, import_hf
from fourscale import card, corpus
from fourscale.pretrained import open_pretrained

torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
source = open_pretrained(sys.argv[1])
if source.ckpt is None:
    import_hf.publish(Path(sys.argv[2]), source, None)
else:
    export_hf.publish(Path(sys.argv[2]), source, None, "", dtype="bf16")
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_about_one_copy_of_the_model(tmp_path):
    """Either way, where weights outweigh a window's logits: beyond one copy, a matrix or two."""
    model = GPT(ModelConfig("gpt2", 768, 8, 12, 12, 3072, 256, 257))
    model.init_weights(0)
    (tmp_path / "x").mkdir()
    export_hf.write(tmp_path / "x", model, None)
    size = (tmp_path / "x" / "model.safetensors").stat().st_size
    for source, out in (("x", "run"), ("run", "y")):
        command = [sys.executable, "-c", MEASURED, str(tmp_path / source), str(tmp_path / out)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.split()[-1]) < 1.5 * size
