"""train.py --preflight: what is right passes, what is broken is found and named with a remedy, nothing is left."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, command, environment, run
from torch import Tensor

import train
from fourscale import checkpoint, generate, inspection, model, optim, parallel, plots, preflight, publish, trials
from fourscale.cli import InputError, parse
from fourscale.config import TrainConfig
from fourscale.model import GPT


@pytest.fixture(scope="module")
def topology() -> Iterator[parallel.Topology]:
    started = parallel.start(device="cpu", timeout_s=60)
    yield started
    parallel.stop(started)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(plots, "plot_loss", lambda run_dir: None)  # half a second a run
    monkeypatch.setattr(inspection, "FIT_S", 60.0)  # a busy machine


def flags_for(data: Path, ckpt_dir: Path, *extra: object) -> TrainConfig:
    return parse(TrainConfig, [str(a) for a in ("--data", data, "--ckpt-dir", ckpt_dir, *SMALL, "--preflight", *extra)])


def checked(flags: TrainConfig, topology: parallel.Topology) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """The exit code, and (status, text) of each line by its name."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = train.pretrain(flags, topology)
    return code, table_of(said.getvalue().splitlines())


def table_of(lines: list[str]) -> dict[str, list[tuple[str, str]]]:
    table: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        if line[:6] in ("pass  ", "FAIL  ", "note  "):
            table.setdefault(line[6:16].strip(), []).append((line[:4], line[17:]))
    return table


def failed(table: dict[str, list[tuple[str, str]]]) -> dict[str, str]:
    return {name: text for name, lines in table.items() for status, text in lines if status == "FAIL"}


def found(findings: Any) -> dict[str, str]:
    """The FAILs of a check."""
    return {name: text for status, name, text in findings if status == "FAIL"}


def tree(directory: Path) -> dict[str, str]:
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in directory.rglob("*")
        if p.is_file()
    }


# ---- what is right ---------------------------------------------------------------------------------------------------


def test_a_sound_run_passes_every_check_and_nothing_is_left(data, tmp_path, topology):
    code, table = checked(flags_for(data, tmp_path / "new" / "ckpt"), topology)
    assert code == 0 and not failed(table)
    passed = {name for name, lines in table.items() if any(status == "pass" for status, _ in lines)}
    assert passed >= {
        *("directory", "shards", "hashes", "masks", "ids", "tokenizer", "parameters", "shift", "causal", "control"),
        *("fit", "first loss", "loop", "updates", "save", "repeat", "resume", "generation", "memory", "disk"),
    }
    inputs, targets = (table[name][0][1].split("' '") for name in ("inputs", "targets"))
    assert table["masks"][0][1].startswith("first update 384 of 512 targets, last update 104 of 512 targets, 4 rows")
    assert len(inputs) == len(targets)
    assert "ln 257 = 5.5491" in table["first loss"][0][1]
    assert "35,840 in matrices decayed by 0.1, 896 in vectors" in table["parameters"][0][1]
    assert "4 in one go bit for bit" in table["resume"][0][1]
    assert "20 updates" in table["time"][0][1] and "--skip-limit" in table["ends"][0][1]
    assert not list(tmp_path.iterdir())


def test_of_slow_updates_fewer_and_smaller_ones_are_made_and_said(data, tmp_path, topology, monkeypatch):
    flags = flags_for(data, tmp_path / "ckpt", "--local-bsz", 3)  # 4 micro-batches
    monkeypatch.setattr(preflight, "LONG_S", 0.0)
    monkeypatch.setattr(preflight, "SLOW_MS", 0.0)
    code, table = checked(flags, topology)
    assert code == 0, failed(table)
    assert "those below are of 6 windows, not 12" in table["left out"][0][1]
    assert "192 tokens" in table["loop"][0][1] and "2 made" in table["updates"][0][1]
    assert "1 update twice (of 4 windows, since" in table["repeat"][0][1]
    assert "1 + 1 updates" in table["resume"][-1][1]
    assert "20 updates" in table["time"][0][1]


def test_inputs_stand_above_the_targets_that_follow_them(data, tmp_path, topology):
    setting = inspection.setting(flags_for(data, tmp_path / "ckpt"), topology)
    lines = {name: text for _, name, text in inspection.text(setting)}
    windows, _ = setting.tokens(0)
    at = int(lines["batch"].split("tokens ")[1].split(" ..")[0])
    pieces = [repr(chr(i)) for i in windows[0, 0, at : at + inspection.COLUMNS + 1]]
    assert lines["inputs"].split() == " ".join(pieces[:-1]).split()
    assert lines["targets"].split() == " ".join(pieces[1:]).split()
    assert len(lines["inputs"]) == len(lines["targets"])


def test_a_resume_is_tried_on_a_copy_and_its_contract_is_compared(data, trained, tmp_path, topology):
    out = tmp_path / "ckpt"
    shutil.copytree(trained("--local-bsz", 12, "--stop-after", 7), out)
    before = tree(out)
    base = ("--resume", "must", "--local-bsz", 12, "--grad-accum", 1)
    code, table = checked(flags_for(data, out, *base), topology)
    assert code == 0, failed(table)
    assert "step_7 fits these flags" in table["resume"][0][1]
    assert "trained before" in table["first loss"][0][1]
    code, table = checked(flags_for(data, out, *base, "--weight-decay", 0.2), topology)
    assert code == 1 and "another experiment (weight_decay: was 0.1, now 0.2)" in failed(table)["resume"]
    fault = found(preflight._directory(flags_for(data, out), topology))["directory"]
    assert "holds step_7 of an earlier run; --resume auto" in fault
    assert tree(out) == before
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_a_living_run_is_not_disturbed(data, tmp_path, topology):
    alive = publish.RunDir(tmp_path / "ckpt", topology)
    flags = flags_for(data, tmp_path / "ckpt")
    assert "a run is writing there" in preflight._directory(flags, topology)[0][2]
    with trials.scratch(flags, topology) as directory:
        assert directory.parent == tmp_path
        made = trials.run(flags, topology, train.train, directory / "a", 2)
        assert [row["update"] for row in made.rows] == [1, 2] and made.checkpoint.name == "step_2"
        alive.assert_writer()
    alive.assert_writer()
    alive.close()
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


# ---- what is broken --------------------------------------------------------------------------------------------------


@pytest.fixture
def probe(data, tmp_path, topology):
    def make(*extra: object) -> inspection.Probe:
        return inspection.Probe(inspection.setting(flags_for(data, tmp_path / "ckpt", *extra), topology))

    return make


def test_unshifted_targets_are_found(probe, monkeypatch):
    forward = GPT.forward

    def unshifted(self: GPT, idx: Tensor, targets: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        return forward(self, idx, None if targets is None else idx, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", unshifted)
    probe = probe()
    faults = found([*probe.next_tokens(), *probe.fit()])
    assert "the targets are not shifted; look at GPT.forward" in faults["shift"]
    assert "does not depend on targets; look at" in faults["fit"]


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_a_token_that_sees_later_ones_is_found(probe, monkeypatch, arch):
    attend = torch.nn.functional.scaled_dot_product_attention
    probe = probe("--arch", arch)
    assert not found(probe.next_tokens())
    monkeypatch.setattr(
        model.F, "scaled_dot_product_attention", lambda q, k, v, is_causal=False, **rest: attend(q, k, v, **rest)
    )
    assert "attention's mask" in found(probe.next_tokens())["causal"]


def test_a_document_mask_that_masks_nothing_is_found(probe, monkeypatch):
    probe = probe("--doc-mask")
    assert not found(probe.next_tokens())
    monkeypatch.setattr(model, "document_starts", lambda idx, eot_id: torch.zeros_like(idx))
    assert "--doc-mask and --eot-id" in found(probe.next_tokens())["documents"]


def test_an_optimizer_that_does_nothing_or_too_much_is_found(probe, monkeypatch):
    probe = probe()
    monkeypatch.setattr(inspection, "FIT_UPDATES", 5)
    monkeypatch.setattr(optim, "step", lambda optimizers, skipped: None)
    faults = found(probe.fit())
    assert list(faults) == ["fit"] and "are not learnt" in faults["fit"]

    def shaken(optimizers: list[torch.optim.Optimizer], skipped: Tensor) -> None:
        with torch.no_grad():
            probe.raw.norm.weight.mul_(1.001)

    monkeypatch.setattr(optim, "step", shaken)
    assert "weights moved; look at the optimizer" in found(probe.fit())["control"]


def test_vectors_that_are_decayed_are_found(probe, monkeypatch):
    def all_decayed(model: torch.nn.Module, weight_decay: float) -> list[dict]:
        return [{"params": list(model.parameters()), "weight_decay": weight_decay}]

    assert not found(probe().parameters())
    monkeypatch.setattr(optim, "parameter_groups", all_decayed)
    assert "on the wrong side of it" in found(probe().parameters())["parameters"]


def test_an_id_outside_the_vocabulary_is_found_and_nothing_is_trained(data, tmp_path, topology):
    bad = tmp_path / "bad"
    shutil.copytree(data, bad)
    shard = bad / "train_000.bin"
    ids = np.fromfile(shard, "<u2")
    ids[::50] = 60_000
    ids.tofile(shard)
    code, table = checked(flags_for(bad, tmp_path / "ckpt"), topology)
    faults = failed(table)
    assert code == 1
    assert "train_000.bin: its content has changed" in faults["hashes"] and "restore it" in faults["hashes"]
    assert "id 60000 at token" in faults["ids"] and "outside the vocabulary of 257" in faults["ids"]
    assert "updates" not in table and "left out" in table
    (bad / "train_000.bin").unlink()
    code, table = checked(flags_for(bad, tmp_path / "ckpt"), topology)
    assert code == 1 and "missing" in failed(table)["setup"]


def test_a_place_where_nothing_can_be_written_is_found(data, topology):
    code, table = checked(flags_for(data, Path("/proc/self/run")), topology)  # refuses root too
    assert code == 1 and list(failed(table)) == ["directory"]
    assert "--ckpt-dir /proc/self/run: nothing can be tried out beside it" in failed(table)["directory"]
    assert trials._place(Path("/")) == Path("/")


@pytest.mark.parametrize("mode", ["--preflight", "--lr-find", "--plan"])
def test_a_run_that_can_not_fit_is_refused_before_it_is_built(data, tmp_path, topology, monkeypatch, mode):
    built: list[int] = []
    monkeypatch.setattr(parallel, "build", lambda *args: built.append(1))
    monkeypatch.setattr(checkpoint, "available_memory", lambda: 1 << 20)
    flags = (
        "--data",
        data,
        "--ckpt-dir",
        tmp_path / "run",
        *SMALL,
        mode,
        *(("--measure", 2) if mode == "--plan" else ()),
    )
    asked = parse(TrainConfig, [str(a) for a in flags])
    if mode == "--preflight":
        code, table = checked(asked, topology)
        fault = failed(table)["memory"]
        assert code == 1 and list(failed(table)) == ["memory"]
    else:
        with pytest.raises(InputError) as refused:
            train.pretrain(asked, topology)
        fault = str(refused.value)
    assert "this process would take about" in fault and "1.0 MiB are there" in fault and "--act-ckpt block" in fault
    assert not built and not list(tmp_path.iterdir())


def test_another_tokenizer_is_found(data, tmp_path, topology):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for split in ("train", "val"):
        ids = np.fromfile(data / f"{split}_000.bin", "<u2")
        ((ids * 7 + 1) % 256).astype("<u2").tofile(foreign / f"{split}.bin")  # as if of other bytes
    flags = flags_for(foreign, tmp_path / "ckpt", "--data-dtype", "uint16", "--tokenizer", "byte")
    fault = found(inspection.text(inspection.setting(flags, topology)))["tokenizer"]
    assert "of the ids come back" in fault and "name that one" in fault
    changed = tmp_path / "changed"
    shutil.copytree(data, changed)
    text = (changed / "tokenizer.json").read_text()
    (changed / "tokenizer.json").write_text(text + "\n")
    code, table = checked(flags_for(changed, tmp_path / "ckpt"), topology)
    assert code == 1 and "tokenizer" in failed(table)["setup"]


def test_a_first_loss_that_is_too_low_and_a_disk_that_is_too_small_are_found(data, tmp_path, topology, monkeypatch):
    forward = GPT.forward

    def flattering(self: GPT, *args: Any, **kwargs: Any) -> Tensor:
        out = forward(self, *args, **kwargs)
        return out if out.dim() > 1 else out * 0.6

    monkeypatch.setattr(GPT, "forward", flattering)
    endless = ("--steps", 10**9, "--tokens", "none", "--ckpt-every", 1)
    code, table = checked(flags_for(data, tmp_path / "ckpt", *endless), topology)
    faults = failed(table)
    assert code == 1
    assert "too low" in faults["first loss"] and "look at the vocabulary" in faults["first loss"]
    assert "1,000,000,000 checkpoints of" in faults["disk"] and "--keep" in faults["disk"]
    flags = flags_for(data, tmp_path / "ckpt", *endless, "--keep", 2)
    assert preflight._kept(flags, inspection.setting(flags, topology))[0] == 4


def test_chance_in_an_update_is_found(data, tmp_path, topology, monkeypatch):
    forward, chance = GPT.forward, torch.Generator().manual_seed(1)

    def noisy(self: GPT, *args: Any, **kwargs: Any) -> Tensor:
        out = forward(self, *args, **kwargs)
        return out * (1 + 1e-5 * float(torch.rand((), generator=chance))) if self.training else out

    monkeypatch.setattr(GPT, "forward", noisy)
    code, table = checked(flags_for(data, tmp_path / "ckpt"), topology)
    faults = failed(table)
    assert code == 1 and set(faults) == {"repeat", "resume"}
    assert "not bit-equal (update 1: loss" in faults["repeat"] and "look for kernels" in faults["repeat"]


def test_a_checkpoint_that_leaves_out_the_optimizer_is_found(data, tmp_path, topology, monkeypatch):
    monkeypatch.setattr(checkpoint, "optimizer_tensors", lambda model, optimizers: {})
    code, table = checked(flags_for(data, tmp_path / "ckpt"), topology)
    faults = failed(table)
    assert code == 1 and list(faults) == ["resume"]
    assert "2 + 2 updates" in faults["resume"] and "look at what a checkpoint leaves out" in faults["resume"]


def test_generation_that_does_not_stop_is_found(data, trained, tmp_path, topology, monkeypatch):
    setting = inspection.setting(flags_for(data, tmp_path / "ckpt"), topology)
    out = trained("--local-bsz", 12, "--stop-after", 7)
    trial = trials.Trial([], {}, out / "step_7", 0.0, [])
    assert not found(preflight._generation(setting, trial))
    endless = generate.generate

    def deaf(*args: Any, **kwargs: Any) -> Iterator[generate.Text]:
        return endless(*args, **(kwargs | {"eot_ids": ()}))

    monkeypatch.setattr(generate, "generate", deaf)
    assert "told to stop at id" in found(preflight._generation(setting, trial))["generation"]


# ---- the scratch directory -------------------------------------------------------------------------------------------


def test_the_scratch_directory_goes_after_errors_and_those_of_the_dead_go_too(data, tmp_path, topology):
    flags = flags_for(data, tmp_path / "ckpt")
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name, pid in (("dead", dead.pid), ("alive", 1)):
        left = tmp_path / f".ckpt.trial-{name}"
        left.mkdir()
        (left / trials.OWNER).write_text(json.dumps({"host": parallel.host_name(), "pid": pid}))
    with pytest.raises(InputError, match="--lr"), trials.scratch(flags, topology) as directory:
        trials.run(flags, topology, train.train, directory / "a", 1, lr=-1.0)
    assert [p.name for p in tmp_path.iterdir()] == [".ckpt.trial-alive"]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), trials.scratch(flags, topology):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [p.name for p in tmp_path.iterdir()] == [".ckpt.trial-alive"]


@pytest.mark.parametrize("nproc", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_ends_it_and_leaves_nothing(data, tmp_path, nproc):
    line = command("train.py", "--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--lr-find", nproc=nproc)
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".ckpt.trial-*/*/metrics.jsonl")) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if nproc is None else 1) and "interrupted" in err
    assert not list(tmp_path.iterdir())


def test_the_exit_code_tells_scripts(data, tmp_path):
    (tmp_path / "ckpt" / "step_3").mkdir(parents=True)
    (tmp_path / "ckpt" / "step_3" / "step.json").write_text("{}")
    line = ("--data", tmp_path / "nowhere", "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--preflight")
    done = run("train.py", *line, code=1)
    faults = failed(table_of(done.stdout.splitlines()))
    assert set(faults) == {"directory", "setup"} and "no such data directory" in faults["setup"]
    assert "preflight: 2 failed (directory, setup)" in done.stdout


# ---- several ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_several_ranks(data, tmp_path):
    argv = ["--data", str(data), *map(str, SMALL), "--local-bsz", "3"]
    cells = [
        {"name": name, "argv": [*argv, flag], "parallel": kind, "shard_size": size, "breakage": breakage}
        for name, flag, kind, size, breakage in (
            ("ddp", "--preflight", "ddp", 1, None),
            ("fsdp", "--preflight", "fsdp", 2, None),
            ("unsynchronised", "--preflight", "ddp", 1, "unsynchronised"),
            ("damaged", "--preflight", "fsdp", 2, "damaged on rank 1"),
            ("sweep", "--lr-find", "fsdp", 2, None),
        )
    ]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    out = tmp_path / "out"
    out.mkdir()
    line = command(str(ROOT / "tests" / "preflights.py"), tmp_path / "cells.json", out, nproc=2)
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    tables = {cell["name"]: json.loads((out / f"{cell['name']}.json").read_text()) for cell in cells}
    assert tables["ddp"]["code"] == tables["fsdp"]["code"] == tables["sweep"]["code"] == 0
    ddp, fsdp, differing, damaged = (table_of(tables[n]["lines"]) for n in ("ddp", "fsdp", "unsynchronised", "damaged"))
    assert "2 ranks have equal weights" in ddp["ranks"][0][1]
    assert "is on one of 2 ranks" in fsdp["ranks"][0][1]
    assert tables["unsynchronised"]["code"] == 1
    assert "rank 1 has other weights than rank 0" in failed(differing)["ranks"]
    assert "--grad-sync" in failed(differing)["ranks"]
    assert tables["damaged"]["code"] == 1 and "outside the vocabulary" in failed(damaged)["ids"]
    assert "(rank 1)" in failed(damaged)["ids"] and "updates" not in damaged
    assert sorted(p.name for p in out.iterdir()) == sorted([*(f"{name}.json" for name in tables), "sweep"])
    assert sorted(p.name for p in (out / "sweep").iterdir()) == ["lr_find.json", "lr_find.png"]
