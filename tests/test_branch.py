"""Runs that begin from another's state, that change their length or their launch, and what run.json says of it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, command, environment, one_error, rows, run

from fourscale import budget, origins, rundir
from fourscale.cli import InputError, parse
from fourscale.config import TrainConfig

CONSTANT = ("--schedule", "constant", "--eval-every", 0)


def contract(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def events(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def parent(data, tmp_path_factory) -> Path:
    """20 updates at a constant rate, checkpoints at 10 and 20."""
    out = tmp_path_factory.mktemp("parent") / "ckpt"
    run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, *CONSTANT, "--ckpt-every", 10)
    return out


def test_a_branch_without_a_difference_is_the_same_run(parent, tmp_path):
    out = tmp_path / "branch"
    run("train.py", "--branch-from", parent / "step_10", "--ckpt-dir", out, "--ckpt-every", 5)
    assert [r["update"] for r in rows(out)] == list(range(11, 21))
    for a, b in zip(rows(parent)[10:], rows(out), strict=True):
        assert (a["loss"], a["tokens"], a["lr"], a["epoch"]) == (b["loss"], b["tokens"], b["lr"], b["epoch"])
    origin = contract(out)["origin"]
    assert origin["differences"] == []
    assert (origin["update"], origin["tokens"], origin["samples_seen"]) == (10, 3840, 120)
    assert origin["digest"] == rundir.digest(rundir.open_checkpoint(parent / "step_10"))
    done = [json.loads((r / "DONE.json").read_text())["digest"] for r in (parent, out)]
    assert done[0] == done[1]


@pytest.mark.slow
def test_a_branch_may_change_the_experiment_and_says_so(parent, tmp_path):
    out = tmp_path / "branch"
    changed = ("--global-bsz", 6, "--schedule", "wsd", "--decay-fraction", 1, "--lr", 1e-3, "--tokens", 6_000)
    line = ("--branch-from", parent / "step_10", "--ckpt-dir", out, *changed)
    run("train.py", *line, "--stop-after", 15)
    run("train.py", *line, "--resume", "auto", nproc=2)  # a restart repeats the whole line
    table = rows(out)
    assert [r["tokens"] for r in table] == [*range(3840 + 192, 6_000, 192), 6_000]
    assert [r["update"] for r in table] == list(range(11, 23))
    assert table[-1]["lr"] == pytest.approx(1e-4)  # a tenth of the new peak, reached at the end
    origin = contract(out)["origin"]
    assert "global_bsz: was 12, now 6" in origin["differences"]
    assert "schedule: was constant, now wsd" in origin["differences"]
    assert json.loads((out / "step_22" / "step.json").read_text())["samples_seen"] == 120 + 12 * 6


@pytest.mark.slow
def test_a_branch_reads_on_where_its_parent_stopped(parent, data, tmp_path):
    """Two half batches are one whole batch, sample for sample: the mean of their losses at equal weights would be."""
    out = tmp_path / "branch"
    run("train.py", "--branch-from", parent / "step_10", "--ckpt-dir", out, "--global-bsz", 6, "--lr", 0, "--min-lr", 0)
    frozen = tmp_path / "frozen"
    run("train.py", "--branch-from", parent / "step_10", "--ckpt-dir", frozen, "--lr", 0, "--min-lr", 0)
    half, whole = rows(out), rows(frozen)
    for i in range(9):  # the tenth is cut by the token budget
        assert (half[2 * i]["loss"] + half[2 * i + 1]["loss"]) / 2 == pytest.approx(whole[i]["loss"], abs=1e-5)


@pytest.mark.parametrize(
    "flags,words",
    [
        (("--d-model", 64), "another model"),
        (("--optimizer", "muon"), "optimizer: was adamw, now muon"),
        (("--tokens", 3_000), "--tokens 3000: the branch begins at 3,840"),
        (("--ckpt-dir", "{parent}"), "holds step_20"),
        (("--branch-from", "nowhere"), "nowhere: no such directory"),
    ],
)
def test_what_a_branch_cannot_do(parent, tmp_path, flags, words):
    flags = [str(f).format(parent=parent) for f in flags]
    line = ("--branch-from", parent / "step_10", "--ckpt-dir", tmp_path / "branch", *flags)
    assert words in one_error(run("train.py", *line, code=2, cwd=tmp_path))


@pytest.mark.slow
def test_a_branch_of_other_text_keeps_the_tokenizer(parent, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("\n\n".join(f"Chapter {i}. " + "A word and another one. " * 90 for i in range(60)))
    for name in ("byte", "char"):
        run("prepare.py", "--dataset", text, "--tokenizer", name, "--val-fraction", 0.2, "--out", tmp_path / name)
    line = ("--branch-from", parent / "best" if (parent / "best").exists() else parent, "--eval-every", 0)
    out = tmp_path / "byte_branch"
    run("train.py", *line, "--data", tmp_path / "byte", "--tokens", 9_000, "--ckpt-dir", out)
    assert "another data set" in " ".join(contract(out)["origin"]["differences"])
    message = one_error(
        run("train.py", *line, "--data", tmp_path / "char", "--tokens", 9_000, "--ckpt-dir", tmp_path / "c", code=2)
    )
    assert "the data's tokenizer" in message or "vocab" in message


def test_a_damaged_parent_is_not_branched_from(parent, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(parent, copy)
    shard = next((copy / "step_10").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    line = ("--branch-from", copy / "step_10", "--ckpt-dir", tmp_path / "branch")
    assert shard.name in one_error(run("train.py", *line, code=2))


def test_a_constant_rate_may_be_lengthened_and_a_cosine_not(parent, data, tmp_path):
    out = tmp_path / "ckpt"
    run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, *CONSTANT, "--stop-after", 10)
    message = one_error(run("train.py", "--ckpt-dir", out, "--resume", "auto", "--lr", 1, "--tokens", 9_000, code=2))
    assert "lr: was 0.003, now 1.0" in message
    assert f"--branch-from {out.resolve() / 'step_10'}" in message
    done = run("train.py", "--ckpt-dir", out, "--resume", "auto", "--tokens", 9_000)
    assert "note: token_budget: was 7400, now 9000" in done.stdout
    assert rows(out)[-1]["tokens"] == 9_000
    assert [r["loss"] for r in rows(out)][:19] == [r["loss"] for r in rows(parent)][:19]
    assert "token_budget: was 7400, now 9000" in events(out)[-1]["what"]


@pytest.mark.slow
def test_wsd_may_be_lengthened_until_its_decay_begins(data, tmp_path):
    out = tmp_path / "ckpt"
    wsd = ("--schedule", "wsd", "--decay-fraction", 0.25, "--eval-every", 0)
    run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, *wsd, "--stop-after", 18)
    message = one_error(run("train.py", "--ckpt-dir", out, "--resume", "auto", "--tokens", 9_000, code=2))
    assert "updates: was 20, now 24" in message
    shutil.rmtree(out)
    run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, *wsd, "--stop-after", 14)
    run("train.py", "--ckpt-dir", out, "--resume", "auto", "--tokens", 9_000)
    assert rows(out)[-1]["lr"] == pytest.approx(3e-4)


def test_other_ranks_keep_the_global_batch_and_say_how(data, tmp_path):
    out = tmp_path / "ckpt"
    run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, "--local-bsz", 6, "--stop-after", 4, nproc=2)
    done = run("train.py", "--ckpt-dir", out, "--resume", "auto", "--local-bsz", 5, "--parallel", "fsdp")
    line = "12 windows an update = 1 rank x 5 windows x 3 micro-batches, 3 of weight 0 (were 2 x 6 x 1)"
    assert f"note: {line}" in done.stdout
    (changed,) = [e for e in events(out) if e["event"] == "changed"]
    assert changed["update"] == 4
    assert line in changed["what"] and "world_size: was 2, now 1" in changed["what"]
    assert contract(out)["attempts"][1]["grad_accum"] == 3


def test_checkpoints_by_the_clock_and_by_the_held_out_loss(data, tmp_path):
    by_clock, by_loss = tmp_path / "clock", tmp_path / "loss"
    common = ("--data", data, *SMALL, "--ckpt-every", 0)
    run("train.py", *common, "--ckpt-dir", by_clock, "--ckpt-minutes", 1e-9, "--eval-every", 0, "--keep", 3)
    assert [p.name for p in rundir.step_dirs(by_clock)] == ["step_18", "step_19", "step_20"]
    run("train.py", *common, "--ckpt-dir", by_loss, "--save-best", "--eval-every", 5)
    assert [p.name for p in rundir.step_dirs(by_loss)] == ["step_5", "step_10", "step_15", "step_20"]
    losses = {r["val_loss"]: f"step_{r['update']}" for r in rows(by_loss) if "val_loss" in r}
    assert (by_loss / "best").read_text().strip() == losses[min(losses)]
    assert rundir.open_checkpoint(by_loss / "best").dir.name == losses[min(losses)]


IN_EVALUATION = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train
from fourscale import heldout
score = heldout.score
def stopped(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    return score(*args, **kwargs)
heldout.score = stopped
train.main()
"""


def test_a_run_stopped_in_its_last_evaluation_is_scored_by_the_next_start(parent, data, tmp_path):
    out = tmp_path / "ckpt"
    flags = [str(x) for x in ("--data", data, "--ckpt-dir", out, *SMALL, "--eval-every", 50)]
    program = IN_EVALUATION.format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", program, *flags], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the held-out loss was left off" in done.stdout
    assert not (out / "DONE.json").exists()
    assert json.loads((out / "STOPPED.json").read_text())["update"] == 20
    run("train.py", "--ckpt-dir", out, "--resume", "auto")
    receipt = json.loads((out / "DONE.json").read_text())
    assert receipt["val_loss"] > 3
    assert receipt["digest"] == rundir.digest(rundir.open_checkpoint(out / "step_20"))


def test_stopped_before_the_first_update(data, tmp_path):
    out = tmp_path / "ckpt"
    line = command("train.py", "--data", data, "--ckpt-dir", out, *SMALL, "--verify-data", "off")
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True)
    while not (out / ".writer.json").exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "before the first update: there is nothing to save" in said
    assert json.loads((out / "STOPPED.json").read_text())["update"] == 0 and not (out / ".writer.json").exists()
    assert "finished" in run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, "--resume", "auto").stdout


def test_a_restart_by_the_launcher_does_not_go_back_again(data, tmp_path):
    out = tmp_path / "ckpt"
    run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, "--ckpt-every", 5, "--stop-after", 12)
    again = ("train.py", "--ckpt-dir", out, "--resume", "auto", "--resume-step", 5)
    process = subprocess.run(
        command(*again, "--stop-after", 14), env=environment(SLURM_RESTART_COUNT="1"), capture_output=True, text=True
    )
    assert "resumed from step_12" in process.stdout
    assert "resumed from step_5" in run(*again, "--stop-after", 14).stdout
    assert sorted(p.name for p in out.glob("discarded-*")) == [
        "discarded-step_10",
        "discarded-step_12",
        "discarded-step_14",
    ]
    message = one_error(run("train.py", "--ckpt-dir", out, "--resume-step", 5, code=2))
    assert "--resume-step 5: goes with --resume auto or must" in message


@pytest.mark.slow
def test_what_a_launch_derived_is_derived_anew(parent, data, tmp_path):
    hsdp = tmp_path / "hsdp"
    shards = ("--parallel", "hsdp", "--shard-size", 2)
    run("train.py", "--data", data, "--ckpt-dir", hsdp, *SMALL, *shards, "--stop-after", 5, nproc=2)
    run("train.py", "--ckpt-dir", hsdp, "--resume", "auto", "--parallel", "ddp", "--stop-after", 6)
    branch = ("--branch-from", parent / "step_10", "--eval-every", 0)
    run("train.py", *branch, "--ckpt-dir", tmp_path / "steps", "--steps", 13, "--lr", 2e-4)
    training = contract(tmp_path / "steps")["training"]
    assert (training["updates"], training["token_budget"], training["min_lr"]) == (13, 13 * 384, 2e-5)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("tokens = 9000\nlr = 1e-4\n")
    run("train.py", *branch, "--ckpt-dir", tmp_path / "toml", "--config", recipe, "--steps", 12)
    assert contract(tmp_path / "toml")["training"]["updates"] == 12


@pytest.mark.slow
def test_a_refused_start_gives_the_directory_up(parent, data, tmp_path):
    out = tmp_path / "ckpt"
    shutil.copytree(parent, out)
    (out / "DONE.json").unlink()
    shutil.rmtree(out / "step_20")
    one_error(run("train.py", "--ckpt-dir", out, "--resume", "auto", "--lr", 1, code=2))
    one_error(run("train.py", "--ckpt-dir", out, "--resume", "auto", "--warmup", 99, nproc=2, code=1))
    assert not (out / ".writer.json").exists()
    run("train.py", "--ckpt-dir", out, "--resume", "auto")
    assert not (out / "events.jsonl").exists()  # nobody was taken over from


@pytest.mark.parametrize(
    "flags,words",
    [
        (("--ckpt-minutes", 0), "--ckpt-minutes 0"),
        (("--save-best", "--eval-every", 0), "--save-best: without held-out losses"),
        (("--keep-every", 5), "--keep-every: goes with --keep"),
        (("--skip-spikes", 0.5), "--skip-spikes 0.5"),
        (("--skip-limit", 0), "--skip-limit 0"),
        (("--dtype", "fp16", "--optimizer", "muon"), "--dtype fp16"),
    ],
)
def test_flags_that_would_do_nothing_or_harm(data, flags, words):
    cfg = parse(TrainConfig, [str(x) for x in ("--data", data, *SMALL, *flags)])
    with pytest.raises(InputError, match=words):
        budget.plan(cfg, 257, 1, "cpu", cfg.dtype)


def test_one_update_needs_no_decay(data, tmp_path):
    run("train.py", "--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--tokens", 384, "--warmup", 0)
    assert rows(tmp_path / "ckpt")[0]["lr"] == 3e-3


def test_a_checkpoint_that_saw_damaged_data_is_not_gone_on_from(parent, tmp_path):
    out = tmp_path / "ckpt"
    shutil.copytree(parent, out)
    (out / "DONE.json").unlink()
    shutil.rmtree(out / "step_20")
    run_json = contract(out)
    run_json["attempts"][0]["damaged_data"] = "train_000.bin differs"
    (out / "run.json").write_text(json.dumps(run_json))
    message = one_error(run("train.py", "--ckpt-dir", out, "--resume", "auto", code=2))
    assert "step_10: may have learnt from damaged data (train_000.bin differs); start again" in message
    later = {"attempt": "x", "from_update": 4} | {k: v for k, v in run_json["attempts"][0].items() if k == "world_size"}
    ckpt = rundir.open_checkpoint(parent / "step_10")
    for attempts, refused in (
        ([run_json["attempts"][0], later], False),  # made by a later attempt, from before
        ([later | {"from_update": 0}, later | {"damaged_data": "x"}], True),
        ([later | {"from_update": 0}, later | {"from_update": 10, "damaged_data": "x"}], False),
    ):
        ckpt.run["attempts"] = attempts
        with pytest.raises(InputError, match="damaged data") if refused else contextlib.nullcontext():
            rundir._refuse_damaged(ckpt)


def test_a_run_from_before_the_guards_goes_on_without_them(parent, tmp_path):
    old = contract(parent)
    for table in (old["training"], old["config"]):
        table.pop("skip_spikes")
        table.pop("skip_limit")
    cfg = origins.config_of(old, TrainConfig())
    assert (cfg.skip_spikes, cfg.skip_limit) == (0.0, 10)
    new = json.loads(json.dumps(old))
    new["training"] |= {"skip_spikes": 0.0, "skip_limit": 10}
    assert rundir.differences(old, new) == []
    new["training"]["skip_spikes"] = 4.0
    assert rundir.differences(old, new) == ["skip_spikes: was 0.0, now 4.0"]
