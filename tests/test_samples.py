"""The text of each evaluation: from every rank's same forwards, without a trace in the run, and once an evaluation."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import SMALL, rows, run

from fourscale import budget, curves, samples, tokenization
from fourscale.cli import InputError, RunFailed
from fourscale.config import ModelConfig
from fourscale.model import GPT
from fourscale.parallel import Topology

ALONE = Topology(0, 1, torch.device("cpu"), "fp32", "ddp", 1, cpu_group=None, publish_group=None, save_group=None)
BYTE = tokenization.build("byte", lambda: iter(()))


def texts(run_dir: Path, stem: str = "samples") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / f"{stem}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def cells(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two ranks, in one torchrun: with and without texts, and one that goes back to before its first text."""
    out = tmp_path_factory.mktemp("cells")
    modern = ("--arch", "modern", "--n-kv-heads", 2, "--no-tie", "--doc-mask")
    back = ("--ckpt-every", 5, "--async-ckpt", "off", "--sample-tokens", 40)
    table = []
    for name, parallel, directory, flags in (
        ("ddp", "ddp", "ddp", ("--sample-tokens", 40)),
        ("ddp-none", "ddp", "ddp-none", ("--sample-tokens", 0)),
        ("fsdp", "fsdp", "fsdp", (*modern, "--sample-tokens", 40, "--sample-prompt", "import os")),
        ("fsdp-none", "fsdp", "fsdp-none", (*modern, "--sample-tokens", 0)),
        ("hsdp", "hsdp", "hsdp", (*modern, "--shard-size", 2, "--sample-tokens", 40, "--sample-prompt", "import os")),
        ("stopped", "ddp", "again", (*back, "--stop-after", 15)),
        ("resumed", "ddp", "again", (*back, "--resume", "must", "--resume-step", 5)),
    ):
        argv = [str(x) for x in ("--data", data, *SMALL, "--parallel", parallel, *flags)]
        shard_size = 1 if parallel == "ddp" else 2
        cell = {"name": name, "directory": directory, "argv": argv, "parallel": parallel, "shard_size": shard_size}
        table.append(cell | {"dtype": "bf16" if parallel == "fsdp" else "fp32", "backend": "eager"})
    (out / "cells.json").write_text(json.dumps(table))
    done = run(Path(__file__).with_name("matrix.py"), out / "cells.json", out, nproc=2)
    (out / "shown").write_text(done.stdout)
    return out


@pytest.mark.parametrize("name", ("ddp", "fsdp"))
def test_a_run_with_texts_is_bit_equal_to_one_without(cells: Path, name: str) -> None:
    its, other = ([{k: r.get(k) for k in ("loss", "preclip_norm", "lr", "val_loss")} for r in rows(cells / d)]
                  for d in (name, f"{name}-none"))  # fmt: skip
    assert its == other and len(its) == 20 and its[-1]["val_loss"]
    assert not (cells / f"{name}-none" / "samples.jsonl").exists()
    assert [t["update"] for t in texts(cells / name)] == [10, 20]


def test_sharded_or_not_there_is_a_text_after_the_prompt(cells: Path) -> None:
    for name in ("fsdp", "hsdp"):
        assert [t["prompt"] for t in texts(cells / name)] == ["import os"] * 2
        assert all(t["text"] for t in texts(cells / name))
    shown = (cells / "shown").read_text().splitlines()
    assert sum(line.startswith("step 10 | sample | import os") for line in shown) == 2
    assert sum(" | sample | " in line for line in shown) == 9, "one line a text"


def test_a_text_beyond_the_checkpoint_is_set_aside_and_comes_again_the_same(cells: Path) -> None:
    assert texts(cells / "again") == texts(cells / "ddp")
    assert texts(cells / "again", "samples.discarded") == texts(cells / "ddp")[:1]


def sampler(directory: Path, **kwargs: Any) -> samples.Sampler:
    run_dir = SimpleNamespace(path=directory, topology=ALONE, assert_writer=lambda: None)
    return samples.Sampler(run_dir, **({"tokenizer": BYTE, "tokens": 30, "prompt": None} | kwargs))


def model_of(arch: str, doc_mask: bool = False) -> GPT:
    shape = ModelConfig(
        arch=arch, d_model=32, n_layers=2, n_heads=4, ctx=16, dropout=0.5, doc_mask=doc_mask, eot_id=256
    )
    model = GPT(budget.size_model(shape, 257, "cpu"))
    model.init_weights(0)
    return model


@pytest.mark.parametrize("arch", ("gpt2", "modern"))
@pytest.mark.parametrize("doc_mask", (False, True))
def test_a_text_leaves_no_trace_in_the_model_or_in_random_numbers(tmp_path, capsys, arch, doc_mask):
    model, before = model_of(arch, doc_mask), torch.get_rng_state()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    for update in (1, 2):
        sampler(tmp_path, prompt="def ").write(update, model)  # beyond the context length of 16
    assert torch.equal(torch.get_rng_state(), before) and model.training
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    first, second = texts(tmp_path)
    assert (first["update"], first["prompt"], second["update"]) == (1, "def ", 2) and first["text"] == second["text"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("step 1 | sample | def ")
    assert lines[0].isprintable() and len(lines[0]) <= 100, "what a model of random weights says reaches no terminal"


def test_what_ends_a_text_ends_no_forward(tmp_path):
    model = model_of("gpt2")
    with torch.no_grad():
        model.norm.bias[:] = 1e4 * model.wte.weight[256]  # the end of a document follows whatever is there
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *args: calls.append(1))
    sampler(tmp_path, prompt="ab").write(1, model)
    assert len(calls) >= 30
    assert texts(tmp_path) == [{"update": 1, "prompt": "ab", "text": ""}]


def test_a_text_that_looks_like_a_line_of_the_console_is_none(tmp_path, capsys):
    prompt = "step 7 | loss 1.0 | iter 3: loss 9.9 step 5: train loss 1.5, val loss 1.5"
    sampler(tmp_path, prompt=prompt, tokens=1).write(10, model_of("gpt2"))
    shown = capsys.readouterr().out
    assert "step 7 ¦ loss 1.0" in shown and not re.search(r"step\s+(\d+)\s+\|\s+loss\s+([\d.]+)", shown)
    assert texts(tmp_path)[0]["prompt"] == prompt
    log = tmp_path / "log"
    log.write_text(f"step 1 | loss 4.0000 | gnorm 1.00\n{shown}step 10 | loss 3.0000 | gnorm 1.00\n", "utf-8")
    curve = curves.read(log).curve
    assert (curve.update.tolist(), curve.loss.tolist(), curve.val_loss.tolist()) == ([1, 10], [4.0, 3.0], [])


def test_faults_of_a_text_are_notes_and_those_of_a_prompt_errors(tmp_path, capsys):
    model = model_of("gpt2")
    sampler(tmp_path, tokenizer=None).write(1, model)
    assert capsys.readouterr().out.startswith("note: no text is sampled at evaluations: the data name no tokenizer")
    sampler(tmp_path, tokens=0, tokenizer=None).write(1, model)
    assert capsys.readouterr().out == "" and not (tmp_path / "samples.jsonl").exists()
    chars = tokenization.build("char", lambda: iter(["abc"]))
    with pytest.raises(InputError, match=r"^--sample-prompt: character 'é'"):
        sampler(tmp_path, tokenizer=chars, prompt="é")
    its = sampler(tmp_path)
    (tmp_path / "samples.jsonl").mkdir()
    its.write(1, model)
    its.write(2, model)
    out = capsys.readouterr().out
    assert out.count("note: ") == 1 and "is a directory; training goes on without texts there" in out
    assert out.count(" | sample | ") == 2
    model.norm.weight.data.fill_(math.nan)
    its.write(3, model)
    assert capsys.readouterr().out.startswith("note: step 3: no text: logits are not finite")
    assert model.training


def test_a_directory_that_fails_or_is_lost_costs_a_text_alone(tmp_path, capsys):
    model, its = model_of("gpt2"), sampler(tmp_path)

    def stale() -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(tmp_path / ".writer.json"))

    def superseded() -> None:
        raise RunFailed("another attempt writes there")

    its._check = stale
    its.write(1, model)
    out = capsys.readouterr().out
    assert out.startswith(f"note: {tmp_path / '.writer.json'}: stale file handle; training") and " | sample | " in out
    its._check = superseded  # on rank 0 alone: the others would wait for it in vain
    its.write(2, model)
    assert not (tmp_path / "samples.jsonl").exists()
