"""train.py --lr-find: the sweep, what is read off it, and that it touches nothing of a run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL

import train
from fourscale import lrfind, parallel, plots
from fourscale.cli import InputError, RunFailed, parse
from fourscale.config import TrainConfig
from fourscale.schedule import check_schedule, learning_rate


@pytest.fixture(scope="module")
def topology() -> Iterator[parallel.Topology]:
    started = parallel.start(device="cpu", timeout_s=60)
    yield started
    parallel.stop(started)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(plots, "plot_loss", lambda run_dir: None)  # half a second a run
    monkeypatch.setattr(lrfind, "UPDATES", 60)


def go(topology: parallel.Topology, data: Path, ckpt_dir: Path, *extra: object) -> str:
    """What train.py with these flags says."""
    said = io.StringIO()
    flags = parse(TrainConfig, [str(a) for a in ("--data", data, "--ckpt-dir", ckpt_dir, *SMALL, *extra)])
    with contextlib.redirect_stdout(said):
        assert train.pretrain(flags, topology) == 0
    return said.getvalue()


def tree(directory: Path) -> dict[str, str]:
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in directory.rglob("*")
        if p.is_file() and not p.name.startswith("lr_find")
    }


# ---- the schedule and the range --------------------------------------------------------------------------------------


def test_a_sweep_multiplies_the_rate_by_the_same_each_update():
    rates = [learning_rate(i, 211, 10, 1e-1, 1e-6, "sweep") for i in range(10, 211)]
    assert rates[0] == pytest.approx(1e-6) and rates[-1] == pytest.approx(1e-1)
    assert np.diff(np.log10(rates)) == pytest.approx(np.full(200, 5 / 200))
    with pytest.raises(InputError, match="--min-lr 0: a sweep"):
        check_schedule(100, 0, 1e-1, 0.0, "sweep", 0.2)


def test_the_range_is_what_was_named_or_lies_around_the_rate_in_question():
    assert lrfind.span(TrainConfig(lr=1.0, min_lr=1e-5), 1.0) == (1e-5, 1.0)
    assert lrfind.span(TrainConfig(lr=6e-4, min_lr=6e-5), 6e-4) == pytest.approx((6e-7, 6e-2))  # a run's own floor
    assert lrfind.span(TrainConfig(), 1e-3) == pytest.approx((1e-6, 1e-1))
    with pytest.raises(InputError, match="--lr 0"):
        lrfind.span(TrainConfig(lr=0.0), 0.0)


# ---- reading a curve -------------------------------------------------------------------------------------------------

RATES = np.logspace(-6, -1, 150)


def curve(best: float = 1e-2, fall: float = 3.0, rise: float = 30.0) -> np.ndarray:
    """Falls most a decade at best / 10, is least about best, and rises beyond; with noise."""
    x = np.log10(RATES / best)
    noise = np.random.default_rng(0).normal(0, 0.03, len(x))
    return 5.5 - fall / (1 + np.exp(-4 * (x + 1))) + rise * np.clip(x, 0, None) ** 2 + noise


def test_the_suggestion_lies_between_the_steepest_fall_and_the_least_loss():
    found = lrfind.read(RATES, curve(), ended_early=True)
    assert found.least == pytest.approx(1e-2, rel=0.5)
    assert found.steepest == pytest.approx(1e-3, rel=0.5)
    assert found.steepest < found.suggestion < found.least
    assert f"{found.least:.1e}" in found.why and "nats" in found.why


def test_what_can_not_be_read_off_is_said_with_the_way_on():
    rising = lrfind.read(RATES, curve(best=0.3), ended_early=False)
    assert rising.suggestion is None and "sweep further up (--min-lr" in rising.why
    flat = lrfind.read(RATES, np.full(150, 5.5), ended_early=False)
    assert flat.suggestion is None and "no rate of this range learns; look at --preflight" in flat.why
    short = lrfind.read(RATES[:5], curve()[:5], ended_early=True)
    assert short.suggestion is None and "lower --lr" in short.why


def test_a_sweep_ends_once_its_loss_has_risen_and_not_for_noise():
    losses = curve().tolist()
    assert not lrfind.has_risen(losses[:110])
    ends = next(n for n in range(150) if lrfind.has_risen(losses[:n]))
    assert 1e-2 < RATES[ends] < 1e-1
    assert lrfind.has_risen([5.0, 4.9, None])
    assert not lrfind.has_risen([])
    noise = np.random.default_rng(1).normal(5.5, 0.3, 150).tolist()
    assert not any(lrfind.has_risen(noise[:n]) for n in range(150))


# ---- the sweep itself ------------------------------------------------------------------------------------------------


def test_a_run_after_a_sweep_is_bit_equal_to_one_without(data, trained, tmp_path, topology):
    out = tmp_path / "deep" / "ckpt"
    said = go(topology, data, out, "--local-bsz", 12, "--lr-find")
    assert "suggested --lr" in said and "arXiv:1506.01186" in said
    assert sorted(p.name for p in out.iterdir()) == ["lr_find.json", "lr_find.png"]
    assert [p.name for p in out.parent.iterdir()] == ["ckpt"]
    table = json.loads((out / "lr_find.json").read_text())
    assert len(table["lr"]) == len(table["loss"]) == len(table["smoothed"]) <= 60
    assert table["lr"][0] == pytest.approx(3e-6) and table["training"]["schedule"] == "sweep"
    ratios = np.diff(np.log(table["lr"]))
    assert ratios == pytest.approx(np.full(len(ratios), ratios[0]))
    assert table["steepest_lr"] < table["suggestion"] <= table["least_loss_lr"]
    assert (out / "lr_find.png").read_bytes()[:4] == b"\x89PNG"

    go(topology, data, out, "--local-bsz", 12)
    digests = [json.loads((d / "DONE.json").read_text())["digest"] for d in (out, trained("--local-bsz", 12))]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("how", ["--branch-from", "--resume"])
def test_a_sweep_from_a_checkpoint_leaves_every_byte_of_its_run(data, trained, tmp_path, topology, how):
    run_dir = tmp_path / "run"
    shutil.copytree(trained("--local-bsz", 12, "--stop-after", 7), run_dir)
    before = tree(run_dir)
    target, flags = (run_dir, ("must",)) if how == "--resume" else (tmp_path / "new", (run_dir / "step_7",))
    with contextlib.suppress(RunFailed):  # a model that has learnt for 7 updates may show nothing
        assert "from_update" not in go(topology, data, target, "--local-bsz", 12, how, *flags, "--lr-find")
    assert tree(run_dir) == before
    table = json.loads((target / "lr_find.json").read_text())
    assert table["from_update"] == 7 and len(table["lr"]) >= 11
    assert {p.name for p in target.iterdir()} >= {"lr_find.json", "lr_find.png"}
    assert {p.name for p in tmp_path.iterdir()} <= {"run", "new"}


def test_a_rate_that_learns_nothing_is_a_failure_with_a_way_on(data, tmp_path, topology):
    with pytest.raises(RunFailed, match=r"no rate of this range learns; look at --preflight.*lr_find\.png"):
        go(topology, data, tmp_path / "ckpt", "--local-bsz", 12, "--lr", 1e-9, "--lr-find")
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir()) == ["lr_find.json", "lr_find.png"]
