"""bench.py: what it says of itself, what it writes, and the budgets that don't depend on a quiet machine."""

import gc
import json
import os
import time
from fractions import Fraction

import numpy as np
import pytest
from conftest import one_error, run

from fourscale import measuring, overheads
from fourscale.cli import RunFailed, importing
from fourscale.order import Mixture


def test_help_and_mistakes_are_quick_and_short():
    shown = run("bench.py", "--help").stdout
    for section in ("train", "memory", "loader", "checkpoint", "sample", "prepare", "startup", "scaling"):
        assert section in shown
    assert one_error(run("bench.py", "--what", "speed", code=2)).startswith(
        "error: --what speed: the sections are train,"
    )
    assert one_error(run("bench.py", "--rounds", "0", code=2)) == "error: --rounds 0: must be at least 1"
    line = one_error(run("bench.py", "--json", "nowhere/out.json", code=2))
    assert line == "error: --json nowhere/out.json: no such directory to write to; make it first"


def test_figures_with_hardware_versions_and_command(tmp_path):
    told = run(
        "bench.py", "--quick", "--what", "loader,startup", "--json", tmp_path / "out.json", "--scratch", tmp_path
    )
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["quick"] and results["hardware"]["cores"] >= 1 and results["versions"]["torch"]
    assert results["command"].startswith("python bench.py --quick --what loader,startup")
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]  # the scratch is gone
    loader, startup = results["sections"]["loader"], results["sections"]["startup"]
    assert set(loader["recipes"]) == set(overheads.RANKS)
    for cell in loader["recipes"].values():
        assert cell["order_kept_bytes"] < 10_000 and cell["order_peak_bytes"] < 1_000_000
        assert cell["warm_share"] < 0.5  # a quiet machine: below 0.02
    assert loader["runs"]["small"]["share"] < 0.05
    assert set(startup["help_s"]) == set(overheads.DOORS)
    assert min(seconds["median"] for seconds in startup["help_s"].values()) < 1
    assert startup["fresh_ratio"]["median"] < 2 and startup["resumed_ratio"]["median"] < 2  # quiet: below 1.1
    assert "first update, fresh:" in told.stdout


@pytest.mark.parametrize(("ctx", "windows"), [(1024, 320), (4096, 12)])
def test_the_order_of_a_batch_of_a_large_corpus_takes_less_than_a_millisecond(ctx, windows):
    at = np.arange(windows)
    for parts in (1, 2):
        order, took = Mixture([overheads.LARGE] * parts, [Fraction(1, 2)] * parts, ctx, 1234), []
        for i in range(60):
            began = time.thread_time()  # not the clock on the wall: of a machine that others use too
            order.starts(i * windows + at)
            took.append(time.thread_time() - began)
        assert 1e3 * min(took) < parts  # a mixture orders twice


def test_the_collector_rests_while_modules_come_in():
    with pytest.raises(ValueError), importing():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()


def test_windows_are_announced_before_the_first_is_waited_for(tmp_path, monkeypatch):
    stream = overheads.random_shards(tmp_path / "shards", 4_000)
    calls, read, advise = [], os.pread, os.posix_fadvise
    monkeypatch.setattr(os, "pread", lambda fd, size, at: calls.append(("read", at, size)) or read(fd, size, at))
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, how: calls.append((how, at, size)))
    out = stream.windows(np.array([5, 1_500, 990]), 20)
    asked, got = calls[:3], calls[3:]
    assert asked == [(os.POSIX_FADV_WILLNEED, at, 40) for at in (10, 1_000, 1_980)]
    assert {at for _, at, _ in got} == {10, 1_000, 1_980, 0}  # the last goes on in the next shard
    monkeypatch.setattr(os, "posix_fadvise", advise)
    assert (out[0] == stream.read(5, 20)).all() and (out[2] == stream.read(990, 20)).all()


def test_rows_of_a_run_are_beside_a_save_or_apart_from_it():
    rows, clock = [], 0.0
    for n in range(1, 13):
        # Saves after 4 and 8: the next row tells the copy, a later one the publishing before it.
        held = {"save_s": 0.5} if n in (5, 9) else {"save_s": 0.25} if n in (7, 11) else {}
        ms = 300.0 if n in (5, 6, 9, 10) else 100.0
        clock += ms / 1e3 + held.get("save_s", 0)
        rows.append({"update": n, "elapsed_s": clock, "ms": ms} | held)
    told = "".join(f"step {n} | saved x/step_{n} (1,024.0 MiB in 1.0 s)\n" for n in (4, 8, 12))
    found = overheads.saved(rows, told, 4)
    assert found["mib"] == 1024 and found["held_s"] == [0.75, 0.75] and found["mib_per_s"] == [1024.0, 1024.0]
    assert (found["update_ms"], found["beside_ms"]) == (100, 300)


def test_a_clock_in_milliseconds():
    assert 9 < overheads.timed(lambda: time.sleep(0.01)) < 1_000


def test_a_run_that_is_measured_ends_before_its_checkpoint(tmp_path):
    flags = measuring.SMALL | {"d_model": 32, "data": measuring.random_text(tmp_path / "data", 65, 20_000)}
    flags |= {"data_dtype": "uint16", "steps": 3, "device": "cpu", "log_every": 1}
    assert [row["update"] for row in measuring.train_unsaved(tmp_path / "run", flags)] == [1, 2, 3]
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunFailed, match=r"train.py --ckpt-dir ... ended with 2: --lr -1"):
        measuring.train_unsaved(tmp_path / "run", flags | {"lr": -1})
