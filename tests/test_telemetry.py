"""Metrics: what a row says of the ranks, why an update was dropped, what a full disk or a kill leaves behind."""

import json
import random
import subprocess
import sys
import time

import matplotlib.image
import pytest
import torch
from conftest import ROOT, run

from fourscale import metrics, plots, telemetry
from fourscale.parallel import Topology

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

REFUSALS = """
import errno, json, resource, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from fourscale import metrics, parallel, publish, telemetry, tokenization
from fourscale.cli import RunFailed

out = Path(sys.argv[2])
tokenizer = tokenization.build("byte", lambda: iter(()))
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
topology = parallel.start("ddp", "gloo")
run_dir = publish.RunDir(out, topology)
(out / "metrics.jsonl").write_text("".join(json.dumps({"update": i}) + "\\n" for i in range(1, 9)))
before = (out / "metrics.jsonl").read_bytes()
told = []

def refused(fn):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, unlimited[1]))
    try:
        fn()
    except RunFailed as e:
        told.append(str(e))
    else:
        told.append("written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

refused(lambda: run_dir.write_contract({"attempts": []}, tokenizer))
refused(lambda: run_dir.write_contract({"attempts": []}, None))
run_dir.write_contract({"attempts": []}, tokenizer)
refused(lambda: run_dir.receipt("DONE.json", {"update": 8}))
refused(lambda: topology.from_main(lambda: metrics.rewind(out, 5)))
assert (out / "metrics.jsonl").read_bytes() == before, "what can't be set aside stays"
(out / "metrics.jsonl").write_bytes(b"[]\\n" + before)
refused(lambda: topology.from_main(lambda: metrics.rewind(out, 5)))
assert (out / "metrics.jsonl").read_bytes() == b"[]\\n" + before

for e in (OSError(errno.ENOSPC, "No space left on device"), OSError(5, "Input/output error", "a file"), OSError()):
    def fn(e=e):
        raise e
    refused(lambda: topology.from_main(fn))
run_dir.close()
parallel.stop(topology)
print(json.dumps(told))
"""


def metric_rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_rows_name_the_pace_of_ranks_and_events_say_why_an_update_was_dropped(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    shown = run(script, ROOT, tmp_path, nproc=3).stdout
    rows = metric_rows(tmp_path)
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
    assert [r["update"] for r in metric_rows(tmp_path)] == list(range(1, 11))
    events = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(e)["update"] for e in events] == [5]
    notes = [line for line in shown.splitlines() if line.startswith("note: ")]
    path = tmp_path / "metrics.jsonl"
    assert notes == [
        f"note: {path}: file too large; training goes on, rows of metrics wait in memory until they can be written",
        f"note: {path}: written again, nothing is missing",
    ]


def test_what_a_disk_refuses_in_a_run_directory_is_told_by_file_never_by_function(tmp_path):
    script, out = tmp_path / "refusals.py", tmp_path / "ckpt"
    script.write_text(REFUSALS)
    told = json.loads(run(script, ROOT, out).stdout.splitlines()[-1])
    assert told == [
        f"{out}: file too large",
        f"{out / 'run.json'}: file too large",
        f"{out / 'DONE.json'}: file too large",
        f"{out / 'metrics.discarded.jsonl'}: file too large",
        f"{out / 'metrics.discarded.jsonl'}: file too large",
        "rank 0: no space left on device; make room and start again with --resume auto",
        "a file: input/output error",
        "rank 0: a file could not be read or written",
    ]


ALONE = Topology(0, 1, torch.device("cpu"), "fp32", "ddp", 1, cpu_group=None, publish_group=None, save_group=None)


def flushed(directory, dropped, updates, in_a_row=0):
    """A meter after one flush of `updates` rows, those of `dropped` with a loss that is not finite."""
    meter = telemetry.Meter(directory, ALONE, 100, 6.0, None, lambda name, **fields: True, lambda: None)
    meter.skipped_in_a_row = in_a_row
    for i in range(1, updates + 1):
        loss = float("nan") if i in dropped else 2.0
        figures = [torch.tensor(x) for x in (loss, 10 * loss, 1.0, float(i in dropped))]
        meter.add(telemetry.Pending(i, 10 * i, 10, 1e-3, {"": 0.1}, (12 * (i - 1), 12 * i), 0.5, 1.0, *figures))
    meter.flush(aloud=False)
    return meter


def test_the_longest_streak_of_dropped_updates_is_seen_though_good_ones_follow(tmp_path):
    meter = flushed(tmp_path, range(3, 7), 10)
    assert (meter.longest_streak, meter.skipped_in_a_row) == (4, 0)
    for dropped, in_a_row, longest in (
        ((), 0, 0),
        ((1, 2, 4), 3, 5),  # counts on from before the resume
        ((2, 3), 3, 2),  # a good update ended what was before
        ((2, 5, 6, 8), 0, 2),
        ((9, 10), 0, 2),
    ):
        assert flushed(tmp_path, dropped, 10, in_a_row).longest_streak == longest
    meter = flushed(tmp_path, (9, 10), 10)  # and from one flush to the next
    figures = [torch.tensor(x) for x in (2.0, 20.0, float("inf"), 1.0)]
    meter.add(telemetry.Pending(11, 110, 10, 1e-3, {"": 0.1}, (120, 132), 0.5, 1.0, *figures))
    meter.flush(aloud=False)
    assert meter.longest_streak == 3


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
    metrics.rewind(tmp_path, 5)
    assert metric_rows(tmp_path) == rows[:5] and path.read_text().endswith("}\n")
    late = (tmp_path / "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in late] == [6, 7, 8]
    assert (tmp_path / "events.jsonl").read_text() == '{"event": "skipped", "update": 7}\n', "history stays"
    before = path.stat()
    metrics.rewind(tmp_path, 5)
    assert path.stat().st_ino == before.st_ino, "nothing to do is nothing done"
    metrics.rewind(tmp_path, 0)
    assert path.read_text() == ""
    # A whole row without its newline may still lack digits of its last number.
    written(tmp_path, rows[:2], json.dumps(rows[2]))
    metrics.rewind(tmp_path, 5)
    assert metric_rows(tmp_path) == rows[:2]


ODD = (
    *('{"tokens": 10}', '{"update": "7"}', '{"update": 7.0}', '{"update": true}', '{"update": null}'),
    *("[1, 2]", "7", "null", '"text"', "", "no json", '{"update": 7', "[" * 100_000, "\0" * 512),
)


@pytest.mark.parametrize("upto", (0, 2, 3, 8))
def test_lines_that_hold_no_row_are_set_aside_by_a_rewind(tmp_path, upto):
    rows = some_rows(6)
    lines = [json.dumps(r) for r in rows]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*lines[:2], *ODD, *lines[2:], ODD[0]]) + '\n{"update": 7, "tok')
    path.write_bytes(path.read_bytes().replace(b"no json", b"\xff\xfe"))
    assert metrics.read_rows(path) == rows
    metrics.rewind(tmp_path, upto)
    assert metric_rows(tmp_path) == rows[:upto]
    late = (tmp_path / "metrics.discarded.jsonl").read_bytes().replace(b"\xff\xfe", b"no json").decode().split("\n")
    assert late == [*lines[upto:2], *ODD, *lines[max(2, upto) :], ODD[0], ""], "all else, in its order"
    kept = path.stat()
    metrics.rewind(tmp_path, upto)
    assert path.stat().st_ino == kept.st_ino, "nothing to do is nothing done"
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "metrics.discarded.jsonl"}


def test_rewind_without_metrics_makes_none(tmp_path):
    metrics.rewind(tmp_path, 3)
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
    plots.plot_loss(tmp_path)
    assert not (tmp_path / "loss.png").exists()
    written(tmp_path, some_rows(1))
    plots.plot_loss(tmp_path)
    assert reds(tmp_path) == 0
    one = dark(tmp_path)
    written(tmp_path, [some_rows(1)[0] | {"loss": None, "skipped": 1}])
    plots.plot_loss(tmp_path)
    assert reds(tmp_path) > 0 and one > 0


def test_skipped_updates_are_marked_and_leave_the_curve_alone(tmp_path):
    rows = some_rows(300)
    written(tmp_path, rows)
    plots.plot_loss(tmp_path)
    clean = dark(tmp_path)
    assert reds(tmp_path) == 0
    for i, row in enumerate(rows):
        row["skipped"] = (i >= 100) + (i >= 200)
    rows[100]["loss"], rows[200]["loss"] = 1e6, None
    written(tmp_path, rows)
    plots.plot_loss(tmp_path)
    assert reds(tmp_path) > 0
    assert dark(tmp_path) > 0.8 * clean, "a spike must not flatten the curve"
    # The first row of a branch has the count of its origin; no update of its own was dropped.
    written(tmp_path, [row | {"skipped": 3} for row in some_rows(300, first=5001)])
    plots.plot_loss(tmp_path)
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
        "from fourscale import plots; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "plots.plot_loss(Path(sys.argv[2]))\n"
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
    plots.plot_loss(tmp_path)
    assert capsys.readouterr().out == f"note: {tmp_path / '.loss.png.tmp'}: is a directory; not drawn\n"


def test_rows_without_their_figures_are_left_out_of_the_plot(tmp_path, capsys):
    rows = some_rows(40, val_loss=2.5)
    written(tmp_path, rows)
    plots.plot_loss(tmp_path)
    clean = (tmp_path / "loss.png").read_bytes()
    assert clean[:4] == b"\x89PNG"
    odd = [{k: v for k, v in rows[9].items() if k != lacking} for lacking in ("lr", "tokens", "update")]
    wrong = ("1e-3", None, True, [1], {}, float("inf"), float("nan"), 10**400)
    odd += [rows[9] | {name: value} for name in ("lr", "tokens", "update") for value in wrong]
    odd += [rows[9] | {name: v} for name in ("loss", "val_loss", "skipped") for v in wrong if v is not None]
    for place in (0, 9, 40):  # also as the first, and as the last, whose counts are in the title
        lines = [json.dumps(r) for r in rows]
        lines[place:place] = [*(json.dumps(r) for r in odd), *ODD]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        plots.plot_loss(tmp_path)
        assert (tmp_path / "loss.png").read_bytes() == clean
    assert capsys.readouterr().out == ""
    (tmp_path / "loss.png").unlink()
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(r) for r in odd) + "\n")
    plots.plot_loss(tmp_path)
    assert not (tmp_path / "loss.png").exists()


def test_no_name_of_a_directory_and_no_fault_of_the_plot_ends_a_run(tmp_path, capsys, monkeypatch):
    run_dir = tmp_path / "a$b_^$"  # no formula
    run_dir.mkdir()
    written(run_dir, some_rows(3))
    plots.plot_loss(run_dir)
    assert (run_dir / "loss.png").is_file() and capsys.readouterr().out == ""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as where it isn't installed
    plots.plot_loss(run_dir)
    out = capsys.readouterr().out
    assert out.startswith(f"note: {run_dir / 'loss.png'}: ") and out.endswith("; not drawn\n") and out.count("\n") == 1
