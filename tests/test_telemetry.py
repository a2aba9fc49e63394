"""Metrics: what a row says of the ranks, why an update was dropped, what a full disk or a kill leaves behind."""

import json
import random
import subprocess
import sys
import time

import matplotlib.image
import pytest
from conftest import ROOT, run

from fourscale import telemetry

RANKS = """
import dataclasses, json, sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch
from fourscale import parallel, telemetry
from fourscale.cli import RunFailed

out = Path(sys.argv[2])
topology = parallel.start("ddp", "gloo")
rank = topology.rank
events, state = [], {"writer": True}

def event(name, **fields):
    events.append({"event": name, **fields})

def assert_writer():
    assert rank == 0, "only rank 0 writes"
    if not state["writer"]:
        raise RunFailed("superseded by attempt b; nothing more was written here")

def meter_of(topology):
    return telemetry.Meter(out, topology, 100, 6.0, None, event, assert_writer)

def pending(update, loss=2.0, own=24.0, norm=1.0, skipped=0.0, own_ms=1.0):
    figures = [torch.tensor(x) for x in (loss, own, norm, skipped)]
    samples = (12 * (update - 1), 12 * update)
    return telemetry.Pending(update, 10 * update, 10, 1e-3, {"": 0.1}, samples, 0.5, own_ms, *figures)

nan, inf = float("nan"), float("inf")
meter = meter_of(topology)
for update, own_ms in ((1, 5.0), (2, 7.0)):
    meter.add(pending(update, own_ms=own_ms + 10 * (rank == 1)))
meter.flush({"val_loss": 3.0})
meter.add(pending(3, nan, nan if rank == 1 else 24.0, nan, 1.0))
meter.add(pending(4, nan, nan if rank else 24.0, nan, 1.0))
meter.add(pending(5, nan, 24.0, nan, 1.0))
meter.flush()
in_a_row = [meter.skipped_in_a_row]
meter.add(pending(6, 2.0, 24.0, inf, 1.0))
meter.flush(aloud=False)
in_a_row.append(meter.skipped_in_a_row)
meter.add(pending(7))
meter.add(pending(8, 31.25, 375.0, 5.0, 1.0))
meter.flush(durable=True)
in_a_row.append(meter.skipped_in_a_row)
half = meter_of(dataclasses.replace(topology, dtype="fp16"))
half.skipped = 5
half.add(pending(9, 2.0, 24.0, inf, 1.0))
half.flush()
saving = meter_of(topology)
time.sleep(0.2)
saving.add(pending(10))
with saving.off_the_clock():
    saving.flush(aloud=False)
    time.sleep(1.0)
saving.add(pending(11))
saving.flush()
state["writer"] = False
meter.add(pending(12))
try:
    meter.flush()
    told = None
except RunFailed as e:
    told = str(e)
table = {"in_a_row": in_a_row, "skipped": meter.skipped, "told": told, "events": events}
(out / f"rank{rank}.json").write_text(json.dumps(table))
parallel.stop(topology)
"""

FULL_DISK = """
import json, resource, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch
from fourscale import parallel, telemetry

out, room = Path(sys.argv[2]), int(sys.argv[3])
topology = parallel.start("ddp", "gloo")
writable = []

def event(name, **fields):
    if not writable:
        return False
    with (out / "events.jsonl").open("a") as f:
        f.write(json.dumps(fields) + "\\n")

meter = telemetry.Meter(out, topology, 100, 6.0, None, event, lambda: None)

def updates(first, last):
    for i in range(first, last + 1):
        dropped = i == 5
        figures = [torch.tensor(x) for x in (2.0, 24.0, float("inf") if dropped else 1.0, float(dropped))]
        meter.add(telemetry.Pending(i, 10 * i, 10, 1e-3, {"": 0.1}, (12 * (i - 1), 12 * i), 0.5, 1.0, *figures))
    meter.flush(aloud=False)

updates(1, 3)
whole = (out / "metrics.jsonl").read_bytes()
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + room, unlimited[1]))
updates(4, 8)
updates(9, 9)
assert (out / "metrics.jsonl").read_bytes() == whole, "a reader sees whole rows only"
assert meter.unwritten == 6
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
writable.append(True)
updates(10, 10)
assert meter.unwritten == 0
meter.flush()
"""


def metrics(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_rows_name_the_pace_of_ranks_and_events_say_why_an_update_was_dropped(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    shown = run(script, ROOT, tmp_path, nproc=3).stdout
    rows = metrics(tmp_path)
    assert [r["update"] for r in rows] == list(range(1, 12)), "nothing is written by a superseded writer"
    first = rows[0]
    assert (first["ms_fastest"], first["ms_slowest"], first["slowest_rank"]) == (6.0, 16.0, 1)
    assert "val_loss" not in first and rows[1]["val_loss"] == 3.0
    assert rows[9]["ms"] > 200 and 0 < rows[10]["ms"] < 900, "a save is no training time"
    assert [r["skipped"] for r in rows[:9]] == [0, 0, 1, 2, 3, 4, 4, 5, 6]
    assert [r["applied"] for r in rows[:9]] == [1, 2, 2, 2, 2, 2, 3, 3, 3]
    assert rows[2]["loss"] is None and rows[0]["loss"] == 2.0
    tables = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(3)]
    assert [t["in_a_row"] for t in tables] == [[3, 4, 1]] * 3
    assert [t["skipped"] for t in tables] == [5] * 3
    assert {t["told"] for t in tables} == {"superseded by attempt b; nothing more was written here"}
    assert not tables[1]["events"] and not tables[2]["events"]
    events = tables[0]["events"]
    assert {e["event"] for e in events} == {"skipped"}
    assert [(e["update"], e["why"]) for e in events] == [
        (3, "loss not finite on rank 1"),
        (4, "loss not finite on ranks 1, 2"),
        (5, "loss not finite"),
        (6, "gradient not finite"),
        (8, "loss 31.25 is a spike"),
        (9, "gradient not finite"),
    ]
    assert events[0]["samples"] == [24, 36] and events[0]["loss"] is None
    assert (events[4]["loss"], events[4]["norm"]) == (31.25, 5.0)
    assert "step 3 | skipped: loss not finite on rank 1; samples 24 .. 35" in shown.splitlines()
    assert "step 9 | skipped: gradient not finite at this loss scale; it is lowered; samples 96 .. 107" in shown
    assert "step 2 | loss 2.0000 | gnorm 1.00 | lr 1.00e-03 | " in shown and "step 6 | loss" not in shown


@pytest.mark.parametrize("room", (0, 100))
def test_a_full_disk_costs_no_row(tmp_path, room):
    script = tmp_path / "full.py"
    script.write_text(FULL_DISK)
    shown = run(script, ROOT, tmp_path, room).stdout
    assert [r["update"] for r in metrics(tmp_path)] == list(range(1, 11))
    events = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(e)["update"] for e in events] == [5]
    notes = [line for line in shown.splitlines() if line.startswith("note: ")]
    path = tmp_path / "metrics.jsonl"
    assert notes == [
        f"note: {path}: file too large; training goes on, rows of metrics wait in memory until they can be written",
        f"note: {path}: written again, nothing is missing",
    ]


def some_rows(count, first=1, **extra):
    return [
        {"update": i, "tokens": 10 * i, "loss": 5.0 - 3 * i / (count + first), "lr": 1e-3, "skipped": 0, **extra}
        for i in range(first, first + count)
    ]


def written(directory, rows, torn=""):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + torn)
    return directory / "metrics.jsonl"


def test_rewind_sets_later_rows_aside_and_mends_a_torn_one(tmp_path):
    rows = some_rows(8)
    path = written(tmp_path, rows, '{"update": 9, "tok')
    (tmp_path / "events.jsonl").write_text('{"event": "skipped", "update": 7}\n')
    telemetry.rewind(tmp_path, 5)
    assert metrics(tmp_path) == rows[:5] and path.read_text().endswith("}\n")
    late = (tmp_path / "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in late] == [6, 7, 8]
    assert (tmp_path / "events.jsonl").read_text() == '{"event": "skipped", "update": 7}\n', "history stays"
    before = path.stat()
    telemetry.rewind(tmp_path, 5)
    assert path.stat().st_ino == before.st_ino, "nothing to do is nothing done"
    telemetry.rewind(tmp_path, 0)
    assert path.read_text() == ""
    # A whole row without its newline may still lack digits of its last number.
    written(tmp_path, rows[:2], json.dumps(rows[2]))
    telemetry.rewind(tmp_path, 5)
    assert metrics(tmp_path) == rows[:2]


def test_rewind_without_metrics_makes_none(tmp_path):
    telemetry.rewind(tmp_path, 3)
    assert not list(tmp_path.iterdir())


def reds(directory):
    """Pixels of loss.png in the red of skipped updates."""
    picture = matplotlib.image.imread(directory / "loss.png")
    return int(((picture[..., 0] > 0.75) & (picture[..., 1] < 0.3) & (picture[..., 2] < 0.3)).sum())


def dark(directory):
    """Pixels of loss.png that are not near white."""
    return int((matplotlib.image.imread(directory / "loss.png")[..., :3].min(-1) < 0.8).sum())


def test_plots_of_no_row_one_row_and_a_run_without_an_accepted_update(tmp_path):
    written(tmp_path, [])
    telemetry.plot_loss(tmp_path)
    assert not (tmp_path / "loss.png").exists()
    written(tmp_path, some_rows(1))
    telemetry.plot_loss(tmp_path)
    assert reds(tmp_path) == 0
    one = dark(tmp_path)
    written(tmp_path, [some_rows(1)[0] | {"loss": None, "skipped": 1}])
    telemetry.plot_loss(tmp_path)
    assert reds(tmp_path) > 0 and one > 0


def test_skipped_updates_are_marked_and_leave_the_curve_alone(tmp_path):
    rows = some_rows(300)
    written(tmp_path, rows)
    telemetry.plot_loss(tmp_path)
    clean = dark(tmp_path)
    assert reds(tmp_path) == 0
    for i, row in enumerate(rows):
        row["skipped"] = (i >= 100) + (i >= 200)
    rows[100]["loss"], rows[200]["loss"] = 1e6, None
    written(tmp_path, rows)
    telemetry.plot_loss(tmp_path)
    assert reds(tmp_path) > 0
    assert dark(tmp_path) > 0.8 * clean, "a spike must not flatten the curve"
    # The first row of a branch has the count of its origin; no update of its own was dropped.
    written(tmp_path, [row | {"skipped": 3} for row in some_rows(300, first=5001)])
    telemetry.plot_loss(tmp_path)
    assert reds(tmp_path) == 0


def test_a_long_run_is_drawn_in_groups(tmp_path):
    noise = random.Random(0)
    rows = some_rows(120_000)
    for row in rows:
        row["loss"] += noise.random()
    rows[-1]["val_loss"] = 2.5
    path = written(tmp_path, rows)
    script = (
        "import resource, sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from fourscale import telemetry; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "telemetry.plot_loss(Path(sys.argv[2]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT), str(tmp_path)], capture_output=True, text=True, check=True
    )
    grown = int(done.stdout.split()[-1])  # KiB; the rows as Python objects would take 60 MiB and more
    assert time.monotonic() - started < 60
    if sys.platform == "linux":
        assert grown < 110_000, f"{grown} KiB for {path.stat().st_size >> 10} KiB of rows"
    assert dark(tmp_path) > 1000


def test_a_plot_that_cannot_be_written_is_a_note(tmp_path, capsys):
    written(tmp_path, some_rows(3))
    (tmp_path / ".loss.png.tmp").mkdir()
    telemetry.plot_loss(tmp_path)
    assert capsys.readouterr().out == f"note: {tmp_path / '.loss.png.tmp'}: is a directory; not drawn\n"
