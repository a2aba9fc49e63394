"""Curves of runs: from a run directory, a metrics.jsonl or a scraped console log, also while it is being written.

Imports no torch. Memory does not grow with the rows: a long run is thinned while it is read.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import dataclasses
import math
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fourscale import thinning
from fourscale.budget import count_parameters
from fourscale.cli import InputError
from fourscale.config import model_from_dict
from fourscale.durable import read_json
from fourscale.metrics import each_row
from fourscale.records import Training, misfit
from fourscale.schedule import check_schedule
from fourscale.thinning import Points
from fourscale.verdict import Course, Curve, Judgement

SAMPLES = 12  # texts kept of samples.jsonl: the newest
BEATING_S = 60.0  # a writer whose heart has beaten within so long is running; it beats every 5 s
SCHEDULES = ("cosine", "wsd", "constant")
LARGEST = float(np.finfo(np.float32).max)  # figures come from fp32


@dataclass(frozen=True)
class Record:
    """What a run has put on record so far."""

    name: str
    path: Path  # run directory, or the file that was read
    curve: Curve
    course: Course
    target: float | None  # --target-loss of the run, nats a token
    rate: np.ndarray  # float64 [n], beside curve.update: tokens per second, nan where unknown
    rows: int  # updates read; more than n where the curve was thinned
    tokens_known: bool  # else curve.tokens counts updates
    state: str  # finished | stopped | running | silent | ended, '' where only a file was read
    run: dict[str, Any]  # run.json, {} where there is none
    samples: tuple[dict[str, Any], ...]  # update, prompt, text: the newest of samples.jsonl
    notes: tuple[str, ...]  # what was left out, or could not be known

    @property
    def update(self) -> int:
        """The newest update on record, 0 before the first."""
        return int(self.curve.update[-1]) if len(self.curve.update) else 0

    @property
    def complete(self) -> bool:
        """True where nothing more will come: the whole schedule is done."""
        return self.state == "finished" or bool(self.course.updates and self.update >= self.course.updates)


@dataclass(frozen=True)
class Judged:
    """A run, the loss it is to beat and what was found of it."""

    record: Record
    target: float | None
    judgement: Judgement

    @property
    def held_out(self) -> tuple[int, float] | None:
        """The newest held-out loss, nan where it was not finite, and the update that it was taken at."""
        curve = self.record.curve
        return (int(curve.val_update[-1]), float(curve.val_loss[-1])) if len(curve.val_update) else None

    @property
    def beat(self) -> bool | None:
        """Whether the newest held-out loss is at the target or below; None without either."""
        return None if self.target is None or self.held_out is None else self.held_out[1] <= self.target


def find(spec: str) -> list[Path]:
    """What a RUN on the command line names: itself, or the run directories in it. Raises InputError."""
    path = Path("/dev/stdin" if spec == "-" else spec)
    if not path.exists():
        raise InputError(f"{spec}: no such file or directory; name a run directory, a metrics.jsonl or a console log")
    if not path.is_dir() or _is_run(path):
        return [path]
    if (path / "step.json").is_file():
        raise InputError(f"{spec}: a checkpoint; name its run directory {path.resolve().parent}")
    if found := sorted(p for p in path.iterdir() if p.is_dir() and _is_run(p)):
        return found
    raise InputError(f"{spec}: no metrics.jsonl in it or in a directory of it; name what --ckpt-dir named")


def files(path: Path) -> list[Path]:
    """The files that tell of the run at `path`."""
    names = ("metrics.jsonl", "run.json", "samples.jsonl", "DONE.json", "STOPPED.json", ".writer.json")
    return [path / name for name in names] if path.is_dir() else [path]


def read_all(specs: tuple[str, ...]) -> list[Record]:
    """Each run once, in the order named, under names that tell them apart. Raises InputError."""
    paths = {path.resolve(): path for spec in specs for path in find(spec)}
    records = [read(path) for path in paths.values()]
    names = _apart(records)
    return [dataclasses.replace(r, name=name) for r, name in zip(records, names, strict=True)]


def read(path: Path, reading: Reading | None = None) -> Record:
    """The run at `path`: a run directory, a metrics.jsonl (with the run.json beside it, if any) or a console log.

    Console lines are train.py's, `step 10 | loss 4.2 | ...`, or nanoGPT's, `iter 10: loss 4.2` and
    `step 250: train loss 4.2, val loss 4.3`; prefixes and lines of others may stand among them. Raises InputError.
    reading: how far a run directory was read before, so that who watches it reads each row once; it is moved on.
    """
    if path.is_dir():
        return _from_directory(path, path / "metrics.jsonl", reading)
    try:
        with path.open("rb") as f:
            rows = path.suffix == ".jsonl" or b'"update"' in f.peek(1).lstrip().partition(b"\n")[0]
            if not rows:
                wide = f.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as Windows PowerShell's tee writes
                return _from_log(path, codecs.EncodedFile(f, "utf-8", "utf-16", "replace") if wide else f)
            if not path.is_file():
                raise InputError(f"{path}: metrics are read from a file or a run directory, not from a pipe; name it")
    except OSError as e:
        raise InputError(f"{path}: {(e.strerror or str(e)).lower()}; name a run directory or a file of it") from None
    return _from_directory(path.parent if path.name == "metrics.jsonl" else None, path)


def smoothed(loss: np.ndarray) -> np.ndarray:
    """float64 [n] -> [n]: medians about each point, over windows that grow to 51 points or a hundredth of the run, so
    that neither the steep start is smeared nor a spike shown. Non-finite losses stay so, and count nowhere."""
    out = np.full(len(loss), math.nan)
    there = np.flatnonzero(np.isfinite(loss))
    values, n = loss[there], len(there)
    half = max(25, n // 200)
    middle = np.empty(n)
    wide = slice(8 * half, n - half)  # where the window has its full width
    if n > 9 * half:
        windows = np.lib.stride_tricks.sliding_window_view(values, 2 * half + 1)
        middle[wide] = np.median(windows[7 * half :], axis=1)
    for i in range(n):
        if not (n > 9 * half and wide.start <= i < wide.stop):
            reach = min(half, i // 8)
            middle[i] = np.median(values[i - reach : i + reach + 1])
    out[there] = middle
    return out


# ---- a run directory or a metrics.jsonl ----------------------------------------------------------------------------


def _is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() or ((path / "run.json").is_file() and not (path / "step.json").is_file())


def _apart(records: list[Record]) -> list[str]:
    """Their names, with as many of the directories above as tell them from others that bear the same."""
    names, wholes = [r.name for r in records], [r.path.resolve() for r in records]
    for depth in range(2, max((len(w.parts) for w in wholes), default=0) + 1):
        same = [i for i, name in enumerate(names) if names.count(name) > 1]
        for i in same:
            names[i] = "/".join(wholes[i].parts[-depth:]).replace("//", "/")
    return names


class Reading:
    """How far a metrics.jsonl that is only appended to has been read."""

    def __init__(self) -> None:
        self.points, self.bytes, self.without = Points(), 0, 0
        self.before: float | None = None  # updates skipped up to the last row


def _from_directory(run_dir: Path | None, metrics: Path, reading: Reading | None = None) -> Record:
    notes: list[str] = []
    run = _contract(run_dir, notes) if run_dir else {}
    if "imported" in run:
        raise InputError(f"{run_dir}: imported weights, which nobody trained here; name the run that trains them on")
    reading = reading or Reading()
    points = reading.points
    for line, row in each_row(metrics, reading.bytes):
        reading.bytes += len(line) if line.endswith(b"\n") else 0  # the last line may be half written
        if row is None or not _usable(row):
            reading.without += line.endswith(b"\n")
            continue
        # The first row of a branch begins with the count of its origin, so only a run's own first row tells of itself.
        now = _number(row.get("skipped")) or 0
        skip = now > (reading.before if reading.before is not None else 0 if row["update"] == 1 else now)
        reading.before = now
        loss, lr, norm = (_figure(row.get(k)) for k in ("loss", "lr", "preclip_norm"))
        points.rewind(row["update"] - 1, row["update"] - 1)
        tokens, rate = _tokens(row.get("tokens")), _figure(row.get("tokens_per_s"))
        points.add(row["update"], tokens, loss, lr, norm, rate, skip)
        if "val_loss" in row:
            points.add_held_out(row["update"], _figure(row["val_loss"]))
    if without := reading.without:
        notes.append(f"{without:,} line{'s' * (without > 1)} of {metrics.name} held no row and were left out")
    if without and not points.rows:
        raise InputError(f"{metrics}: holds no row of metrics; name a metrics.jsonl that train.py wrote")
    where = run_dir or metrics
    name = run_dir.resolve().name if run_dir else metrics.name
    target = run.get("config", {}).get("target_loss")
    samples = _samples(run_dir / "samples.jsonl") if run_dir else ()
    state = _state(run_dir, points.newest) if run and run_dir else ""
    return _record(
        copy.deepcopy(points),  # which thins them for good, whatever is still to be read
        notes,
        name=name,
        path=where,
        course=_course(run),
        target=_positive(target),
        state=state,
        run=run,
        samples=samples,
    )


def _usable(row: dict[str, Any]) -> bool:
    """A row of an update. A null loss is one that was not finite; so is NaN, as other programs write it."""
    loss = row.get("loss", "")
    return 0 < row["update"] < 1 << 62 and (loss is None or type(loss) in (int, float))


def _number(value: object) -> float | None:
    return value if type(value) in (int, float) and abs(value) <= LARGEST else None


def _tokens(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and 0 <= number < 1 << 62 else None


def _positive(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and number > 0 else None


def _figure(value: object) -> float:
    number = _number(value)
    return math.nan if number is None else float(number)


def _contract(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """run.json, or {} and a note where it is missing or not what train.py writes: a curve can be judged without it."""
    path = run_dir / "run.json"
    try:
        run = read_json(path, "judge without it") if path.is_file() else {}
        if run and "imported" not in run:
            tables = ("training", "model", "config")
            fault = next((f"{t} is no table" for t in tables if not isinstance(run.get(t), dict)), None)
            if fault := fault or misfit(run["training"], Training, "training"):
                raise InputError(f"{path}: {fault}")
        if run:
            return run
        notes.append(f"no run.json beside {run_dir.resolve().name}'s metrics: its schedule and length are not known")
    except InputError as e:
        notes.append(f"{e}: judged without its schedule and length")
    return {}


def _course(run: dict[str, Any]) -> Course:
    def table(name: str) -> dict[str, Any]:
        return run[name] if isinstance(run.get(name), dict) else {}

    training, model, baselines = table("training"), table("model"), table("baselines")
    # Any number of the right kind passes the check of run.json; what no run can have counts as unknown.
    vocab_size = _positive(model.get("vocab_size"))
    course = Course(
        updates=_tokens(training.get("updates")) or None,
        vocab_size=vocab_size if vocab_size is not None and vocab_size >= 1 else None,
        unigram_nats=_number(baselines.get("unigram_nats")),
        bytes_per_token=_positive(baselines.get("bytes_per_token")),
        clip=_positive(training.get("clip")),  # 0 turns clipping off
        trained_before="origin" in run or "init" in run,
        global_bsz=_tokens(training.get("global_bsz")) or None,
        ctx=_positive(model.get("ctx")),
        n_parameters=_parameters(model),
    )
    names = ("warmup", "lr", "min_lr", "schedule", "decay_fraction")
    schedule = {name: training[name] for name in names if name in training}
    if course.updates and schedule and schedule["lr"] <= LARGEST and schedule["schedule"] in SCHEDULES:
        with contextlib.suppress(InputError):
            check_schedule(course.updates, *(schedule.get(name, 0.2) for name in names))
            return dataclasses.replace(course, **schedule)
    return course


def _parameters(model: dict[str, Any]) -> int | None:
    with contextlib.suppress(InputError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        shape = model_from_dict(model)
        shape.check()
        return count_parameters(shape).total
    return None


def _state(run_dir: Path, newest: int) -> str:
    """finished, stopped (both with a receipt), running, silent (its writer gives no sign of life) or ended."""
    if (run_dir / "DONE.json").is_file():
        return "finished"
    with contextlib.suppress(OSError, InputError):
        writer = read_json(run_dir / ".writer.json")
        if writer.get("host") != socket.gethostname() or _alive(writer.get("pid")):
            beaten = (run_dir / ".heartbeat").stat().st_mtime
            return "running" if time.time() - beaten < BEATING_S else "silent"
    with contextlib.suppress(InputError, TypeError):
        if read_json(run_dir / "STOPPED.json")["update"] >= newest:
            return "stopped"
    return "ended"


def _alive(pid: object) -> bool:
    """Whether this host has such a process."""
    if type(pid) is not int or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _samples(path: Path) -> tuple[dict[str, Any], ...]:
    newest: dict[int, dict[str, Any]] = {}
    for _, row in each_row(path):
        if row is None or not all(isinstance(row.get(k), str) for k in ("prompt", "text")):
            continue
        newest = {u: s for u, s in newest.items() if u < row["update"]}  # later ones will be written again
        newest[row["update"]] = {k: row[k] for k in ("update", "prompt", "text")}
        if len(newest) > SAMPLES:
            del newest[min(newest)]
    return tuple(newest.values())


# ---- a console log -------------------------------------------------------------------------------------------------

_VALUE = r"(nan|[+-]?inf|[\d.]+(?:e[+-]?\d+)?)"
_COUNT = r"(\d[\d,]{0,22})"  # longer ones are no counts, and no int64
_HEAD = re.compile(rf"x {_COUNT} = {_COUNT} tokens \| {_COUNT} updates, {_COUNT} tokens")
_BATCH = re.compile(rf"^{_COUNT} windows an update")
_STEP = re.compile(rf"step\s+(\d{{1,18}})\s+\|\s+loss\s+{_VALUE}")
_HELD_OUT = re.compile(rf"step\s+(\d{{1,18}})\s+\|\s+val loss\s+{_VALUE}")
_SKIPPED = re.compile(r"step\s+(\d{1,18})\s+\|\s+skipped:(?: loss ([\d.e+]+) is)?")
_SAMPLE = re.compile(r"step\s+\d+\s+\|\s+sample\s+\|")  # a model's text, whatever it looks like
_GNORM, _LR = re.compile(rf"\bgnorm\s+{_VALUE}"), re.compile(rf"\blr\s+{_VALUE}")
_RATE = re.compile(r"([\d,]+) tok/s")
_GONE_ON = re.compile(r"(resumed|branched) from step_(\d{1,18})")
_ITER = re.compile(rf"iter\s+(\d{{1,18}}):\s+loss\s+{_VALUE}")
_ITER_HELD_OUT = re.compile(rf"step\s+(\d{{1,18}}):\s+train loss\s+{_VALUE},\s+val loss\s+{_VALUE}")
_ITER_TOKENS = re.compile(rf"tokens per iteration will be:\s+{_COUNT}")
_TRAINED = re.compile(r"^weights of |branched from step_|Initializing from OpenAI GPT-2|Resuming training from")


def _from_log(path: Path, f: BinaryIO) -> Record:
    points, skips, notes = Points(), dict[int, float](), []
    ctx = batch = per_update = updates = budget = None
    estimated: list[tuple[int, float]] = []  # nanoGPT's training loss at evaluations, for logs without its iter lines
    trained = False

    def tokens(update: int) -> int | None:
        return min(update * per_update, budget or 1 << 62, 1 << 62) if per_update else None

    def train(update: int, loss: float, line: str) -> None:
        points.rewind(update - 1, update)
        found = [p.search(line) for p in (_LR, _GNORM, _RATE)]
        lr, norm, rate = (_read(m[1]) if m else math.nan for m in found)
        points.add(update, tokens(update), loss, lr, norm, rate, False)

    def held_out(update: int, loss: float) -> None:
        points.rewind(update, update - 1)
        if update:  # nanoGPT's of the untouched model: its first iter line says the same
            points.add_held_out(update, loss)

    for line in _lines(f):
        if _SAMPLE.search(line):
            continue
        if m := _HEAD.search(line):
            ctx, per_update, updates, budget = map(_count, m.groups())
            batch = _count(m[1]) if (m := _BATCH.search(line)) else None
        elif m := _STEP.search(line):
            train(int(m[1]), _read(m[2]), line)
        elif m := _HELD_OUT.search(line):
            held_out(int(m[1]), _read(m[2]))
        elif m := _SKIPPED.search(line):
            skips[int(m[1])] = _read(m[2]) if m[2] else math.nan
        elif m := _ITER.search(line):
            train(int(m[1]) + 1, _read(m[2]), line)  # counted from 0
        elif m := _ITER_HELD_OUT.search(line):
            held_out(int(m[1]), _read(m[3]))
            estimated = [e for e in estimated if e[0] < int(m[1])] + [(int(m[1]), _read(m[2]))]
        elif m := _ITER_TOKENS.search(line):
            per_update = _count(m[1])
        if m := _GONE_ON.search(line):
            points.rewind(int(m[2]), int(m[2]))
            skips = {u: loss for u, loss in skips.items() if u <= int(m[2])}
        trained = trained or bool(_TRAINED.search(line))
        if len(skips) > thinning.ODD_POINTS:
            del skips[next(iter(skips))]
    if not points.rows and estimated:
        for update, loss in estimated:
            points.add(max(1, update), tokens(update), loss, math.nan, math.nan, math.nan, False)
    if not points.rows:
        raise InputError(
            f"{path}: has no line such as 'step 10 | loss 4.2' or 'iter 10: loss 4.2'; name a run directory, a "
            "metrics.jsonl or a console log"
        )
    points.mark_skipped(skips, tokens)
    if not per_update:
        notes.append("the log doesn't tell the tokens an update: counted in updates")
    if updates is None:
        notes.append("the log doesn't tell the length of the run: nothing can be forecast")
    known = {"updates": updates, "ctx": ctx, "global_bsz": batch, "trained_before": trained}
    name = "stdin" if path == Path("/dev/stdin") else path.name
    course = Course(**known)
    return _record(points, notes, name=name, path=path, course=course, target=None, state="", run={}, samples=())


def _lines(f: BinaryIO) -> Iterator[str]:
    """Lines, also those that a progress bar ends with a carriage return; a file without line ends comes in pieces."""
    for raw in iter(lambda: f.readline(1 << 16), b""):
        yield from raw.decode(errors="replace").rstrip("\r\n").split("\r")


def _read(text: str) -> float:
    try:
        value = float(text.replace(",", ""))
    except ValueError:  # such as 1.2.3, of another program
        return math.nan
    return value if abs(value) <= LARGEST else math.nan


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def _record(points: Points, notes: list[str], **known: Any) -> Record:
    """The points as a Record, with what is known beside them."""
    curve, rate = points.curve()
    if len(curve.update) < points.rows:
        n = len(curve.update)
        notes = [*notes, f"{points.rows:,} updates were thinned to {n:,} points before they were judged"]
    return Record(
        curve=curve, rate=rate, rows=points.rows, tokens_known=points.tokens_known, notes=tuple(notes), **known
    )
