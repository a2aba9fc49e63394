"""What a run says of itself: a row of metrics an update, one console line an interval, the loss curve."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourscale.checkpoint import fsync, naming
from fourscale.cli import RunFailed, say
from fourscale.parallel import Topology

LARGEST = torch.finfo(torch.float32).max  # figures come from fp32
PLOTTED = 2000  # points of a curve in loss.png; more rows than that are drawn in groups


def clock(seconds: float) -> str:
    """'12:04', '3:05:09' or '2d 03:05'."""
    s = int(seconds)
    if s >= 86_400:
        return f"{s // 86_400}d {s % 86_400 // 3600:02d}:{s % 3600 // 60:02d}"
    return f"{s // 3600}:{s % 3600 // 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"


def finite(x: float) -> float | None:
    """JSON has no NaN."""
    return x if math.isfinite(x) else None


def progress(epochs: dict[str, float]) -> dict[str, Any]:
    """Fields of a metrics row: how often the data, or each data set of a mixture, has been read."""
    rounded = {name: round(value, 6) for name, value in epochs.items()}
    return {"epochs": rounded} if len(rounded) > 1 else {"epoch": next(iter(rounded.values()))}


def held_out_fields(loss: float, losses: dict[str, float]) -> dict[str, Any]:
    """Fields of a metrics row and of step.json: the held-out loss, and that of each data set of a mixture."""
    fields: dict[str, Any] = {"val_loss": finite(loss)}
    return fields | ({"val_losses": {k: finite(v) for k, v in losses.items()}} if len(losses) > 1 else {})


# ---- the rows of a run ---------------------------------------------------------------------------------------------


@dataclass
class Pending:
    """An update whose figures are still on the device: four fp32 scalars."""

    update: int  # from 1
    tokens: int  # supervised, since the run began
    count: int  # supervised in this update, over all ranks
    lr: float
    epochs: dict[str, float]  # of each data set by its name
    samples: tuple[int, int]  # ids of its samples since the run began, the end exclusive
    data_ms: float  # waited for the batch
    own_ms: float  # this rank's own work, without what it waited for others
    loss: Tensor  # nats per token, over all supervised tokens of all ranks
    own_loss: Tensor  # nats, summed over this rank's tokens
    norm: Tensor  # global, before clipping
    skipped: Tensor  # 1.0 where the update was dropped, else 0.0


class Meter:
    """Collects updates without waiting for the device; `flush` waits, compares the ranks, writes rows, prints a line.

    path: the run's directory. updates: of the whole run. peak: FLOP/s of a device, None where unknown.
    event(name, **fields) and assert_writer() are RunDir's, called on rank 0 only; an event that returns False could not
    be written and is tried again. `skipped` (since the run began) and
    `skipped_in_a_row` (up to the newest flushed update) may be set on a resume; `longest_streak`, the most updates in a
    row that were dropped, of those flushed here, counts on from the latter.
    """

    def __init__(
        self,
        path: Path,
        topology: Topology,
        updates: int,
        flops_per_token: float,
        peak: float | None,
        event: Callable[..., None],
        assert_writer: Callable[[], None],
    ):
        self.topology = topology
        self.updates = updates
        self.flops_per_token, self.peak = flops_per_token, peak
        self.pending: list[Pending] = []
        self.skipped_in_a_row = self.longest_streak = self.skipped = 0
        self.started = time.monotonic()
        self._file = Rows(path / "metrics.jsonl", event, assert_writer)

    @property
    def unwritten(self) -> int:
        """Rows that wait in memory for room on the disk; 0 on all ranks but the first."""
        return len(self._file.lines)

    def restart_clock(self) -> None:
        """The interval begins now: what came before was start-up."""
        self.started = time.monotonic()

    @contextlib.contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Evaluation and saving don't count as training time; the updates in flight do, so they are awaited first."""
        self._settle()
        before = time.monotonic()
        yield
        self.started += time.monotonic() - max(before, self.started)  # a flush in between has begun a new interval

    def add(self, update: Pending) -> None:
        self.pending.append(update)

    def _settle(self) -> None:
        if self.topology.device.type == "cuda":
            torch.cuda.synchronize(self.topology.device)

    def flush(self, held_out: dict[str, Any] | None = None, aloud: bool = True, durable: bool = False) -> None:
        """Write the rows of all pending updates, `held_out` (the fields of an evaluation) to the last one. Collective.

        Rank 0 prints a line where `aloud`. `durable`, for before a save: the rows of a checkpoint outlive a power
        failure as it does. A disk that refuses costs nothing but a note: the rows wait in memory for the next flush.
        Raises RunFailed on all ranks where another attempt has taken the directory over.
        """
        rows, self.pending = self.pending, []
        console = ""
        if rows:
            console = self._describe(rows, held_out)
        failed = None
        if self.topology.main:
            try:
                self._file.write(durable)
            except RunFailed as e:
                failed = e
        if rows and self.topology.all_sum([failed is not None])[0]:
            self.topology.from_main(lambda: _raise(failed))
        elif failed is not None:
            raise failed
        if aloud and console and self.topology.main:
            say(console)

    def _describe(self, rows: list[Pending], held_out: dict[str, Any] | None) -> str:
        """Hand the rows and the events of skipped updates to the file of rank 0; the console line."""
        names = ("loss", "own_loss", "norm", "skipped")
        losses, own, norms, skips = (torch.stack([getattr(p, name) for p in rows]).tolist() for name in names)
        seconds = time.monotonic() - self.started
        self.started = time.monotonic()
        ms = 1e3 * seconds / len(rows)
        rate = sum(p.count for p in rows) / seconds
        mfu = rate * self.flops_per_token / (self.peak * self.topology.world_size) if self.peak else None
        dropped = [i for i, skip in enumerate(skips) if skip]
        paces, broken = self._compare_ranks(sum(p.own_ms for p in rows) / len(rows), [own[i] for i in dropped])
        slowest = max(range(len(paces)), key=paces.__getitem__)
        pace = {"ms_fastest": round(min(paces), 3), "ms_slowest": round(max(paces), 3), "slowest_rank": slowest}
        for i, (p, loss, norm, skip) in enumerate(zip(rows, losses, norms, skips, strict=True)):
            self.skipped += int(skip)
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
            self.longest_streak = max(self.longest_streak, self.skipped_in_a_row if skip else 0)
            row: dict[str, Any] = {
                "update": p.update,
                "tokens": p.tokens,
                "loss": finite(loss),
                "lr": p.lr,
                "preclip_norm": finite(norm),
                "ms": round(ms, 3),
                **pace,
                "data_ms": round(p.data_ms, 3),
                "tokens_per_s": round(rate, 1),
                "mfu": mfu,
                **progress(p.epochs),
                "applied": p.update - self.skipped,
                "skipped": self.skipped,
            }
            if held_out is not None and p is rows[-1]:
                row |= held_out
            if self.topology.main:
                self._file.lines.append(json.dumps(row))
            if skip and self.topology.main:
                self._tell_skip(p, loss, norm, broken[dropped.index(i)])
        last = rows[-1]
        share = f"{100 * mfu:.1f}%" if mfu is not None else "n/a"
        eta = clock((self.updates - last.update) * ms / 1e3)
        note = f" | {self.skipped} skipped" if self.skipped else ""
        return (
            f"step {last.update} | loss {losses[-1]:.4f} | gnorm {norms[-1]:.2f} | lr {last.lr:.2e} | "
            f"{ms:.1f} ms/step | {rate:,.0f} tok/s | mfu {share} | eta {eta}{note}"
        )

    def _compare_ranks(self, own_ms: float, own_losses: list[float]) -> tuple[list[float], list[list[int]]]:
        """Every rank's `own_ms`, and for each of `own_losses` the ranks where it is not finite. Collective."""
        table = torch.zeros(1 + len(own_losses), self.topology.world_size, dtype=torch.float64)
        table[:, self.topology.rank] = torch.tensor([own_ms, *(not math.isfinite(x) for x in own_losses)])
        # A sum rather than a gather: it is on the group that waits for a stopped rank no longer than --timeout.
        paces, *broken = torch.tensor(self.topology.all_sum(table.flatten().tolist())).view_as(table).tolist()
        return paces, [[rank for rank, is_broken in enumerate(flags) if is_broken] for flags in broken]

    def _tell_skip(self, p: Pending, loss: float, norm: float, broken: list[int]) -> None:
        first, end = p.samples
        way = ""
        if broken:
            why = f"loss not finite on rank{'s' if len(broken) > 1 else ''} {', '.join(map(str, broken))}"
        elif not math.isfinite(loss):
            why = "loss not finite"
        elif math.isfinite(norm):
            why = f"loss {loss:.4g} is a spike"
        else:
            why = "gradient not finite"
            if self.topology.dtype == "fp16":
                way = " at this loss scale; it is lowered"
        say(f"step {p.update} | skipped: {why}{way}; samples {first:,} .. {end - 1:,}")
        facts = {"update": p.update, "samples": [first, end], "why": why, "loss": finite(loss), "norm": finite(norm)}
        self._file.events.append(("skipped", facts))


def _raise(e: Exception) -> None:
    raise e


@dataclass
class Rows:
    """metrics.jsonl as rank 0 appends to it: what a full disk refuses waits in `lines` and `events`."""

    path: Path
    event: Callable[..., None]
    assert_writer: Callable[[], None]
    lines: list[str] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    cut: int | None = None  # bytes of the file that are whole, where the last write failed
    told: bool = False

    def write(self, durable: bool) -> None:
        """Append what waits. An OSError is told once and borne; RunFailed where another attempt has taken over."""
        if not (self.lines or self.events or durable):
            return
        try:
            self.assert_writer()
            self._append(durable)
            while self.events:
                name, fields = self.events[0]
                if self.event(name, **fields) is False:
                    break
                self.events.pop(0)
        except OSError as e:
            if not self.told:
                self.told = True
                fault = f"{e.filename or self.path}: {(e.strerror or str(e)).lower()}"
                say(f"note: {fault}; training goes on, rows of metrics wait in memory until they can be written")
            return
        if self.told:
            self.told = False
            say(f"note: {self.path}: written again, nothing is missing")

    def _append(self, durable: bool) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if self.cut is not None:
                os.ftruncate(fd, min(self.cut, os.fstat(fd).st_size))
            self.cut = os.fstat(fd).st_size
            data = memoryview("".join(f"{line}\n" for line in self.lines).encode())
            while data:
                data = data[os.write(fd, data) :]
            if durable:
                os.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):  # a reader should see no half line; else the next write cuts it off
                os.ftruncate(fd, self.cut)
            raise
        finally:
            os.close(fd)  # a quota on NFS may only be told here
        self.lines.clear()
        self.cut = None


def each_row(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Lines of a metrics.jsonl with the row that each holds, one at a time; None for a line without one.

    A crash cuts a line short, or leaves zeros; a row is an object with a whole number as `update`.
    """
    if not path.is_file():
        return
    with path.open("rb") as f:
        for line in f:
            row = None
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
            whole = isinstance(row, dict) and type(row.get("update")) is int and line.endswith(b"\n")
            yield line, row if whole else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; lines that hold none are left out."""
    return [row for _, row in each_row(path) if row is not None]


def rewind(run_dir: Path, update: int) -> None:
    """Keep the rows up to `update`; later ones, of updates that will be done again, move to metrics.discarded.jsonl.

    Lines that hold no row move there too; what a crash cut short at the end goes. events.jsonl is left alone: what
    happened has happened, also in updates done again. Raises OSError, naming a file, where the disk refuses.
    """
    path, temporary = run_dir / "metrics.jsonl", run_dir / ".metrics.jsonl.tmp"

    def lines(kept: bool) -> Iterator[bytes]:
        for line, row in each_row(path):
            if line.endswith(b"\n") and (row is not None and row["update"] <= update) is kept:
                yield line

    head = kept = size = 0  # bytes: of the rows to keep that open the file, of all to keep, of the file
    for line, row in each_row(path):
        if row is not None and row["update"] <= update:
            kept += len(line)
            head += len(line) if head == size else 0
        size += len(line)
    if head == size:
        return
    if any(True for _ in lines(kept=False)):
        _write_durably(run_dir / "metrics.discarded.jsonl", "ab", lines(kept=False))
    if kept == head:
        with naming(path), path.open("r+b") as f:
            f.truncate(head)  # one step, and it needs no room: killed before it, the next start does the same
            os.fsync(f.fileno())
        return
    try:
        _write_durably(temporary, "wb", lines(kept=True))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    with naming(path):
        fsync(run_dir)  # or a power failure brings the old file back, without the rows to come


def _write_durably(path: Path, mode: str, lines: Iterator[bytes]) -> None:
    with naming(path), path.open(mode) as f:
        f.writelines(lines)
        f.flush()
        os.fsync(f.fileno())


# ---- the curve -----------------------------------------------------------------------------------------------------


def plot_loss(run_dir: Path) -> None:
    """Draw metrics.jsonl as loss.png: training loss, a smoothed curve, held-out loss, skipped updates, learning rate.

    A run of a million rows is drawn in groups of updates, as a band from the least to the greatest loss of each; memory
    is a few numbers a row. Rows that lack a figure or hold something else in its place are left out. A plot that can't
    be made costs a note, no run.
    """
    try:
        _plot_loss(run_dir)
    except OSError as e:
        say(f"note: {e.filename or run_dir / 'loss.png'}: {(e.strerror or str(e)).lower()}; not drawn")
    except Exception as e:  # a receipt comes after the plot: what matplotlib may lack or meet must not cost it
        fault = (str(e).strip() or type(e).__name__).splitlines()[0]
        say(f"note: {run_dir / 'loss.png'}: {fault}; not drawn")


def _plot_loss(run_dir: Path) -> None:
    x, loss, smooth, lr = (array("d") for _ in range(4))
    held: list[tuple[int, float]] = []
    dropped: list[int] = []
    skipped = last = None
    for _, row in each_row(run_dir / "metrics.jsonl"):
        if row is None or not _is_drawable(row):
            continue
        if row.get("val_loss") is not None:
            held.append((row["update"], row["val_loss"]))
        # The first row of a branch begins with the count of its origin, so only a run's own first row tells of itself.
        now = row.get("skipped") or 0
        before = skipped if last else 0 if row["update"] == 1 else now
        skipped, last = now, row
        if skipped > before:
            dropped.append(row["update"])
        elif row.get("loss") is not None:
            # Smoothed over a window that grows with the run, so that the steep start isn't smeared.
            share = 1 / min(50, 1 + len(x) / 8)
            smooth.append(smooth[-1] + share * (row["loss"] - smooth[-1]) if smooth else row["loss"])
            for column, value in ((x, row["update"]), (loss, row["loss"]), (lr, row["lr"])):
                column.append(value)
    if last is not None:
        _draw(run_dir, last, [np.asarray(column) for column in (x, loss, smooth, lr)], held, dropped)


def _is_drawable(row: dict[str, Any]) -> bool:
    def is_number(value: object) -> bool:
        return type(value) in (int, float) and abs(value) <= LARGEST

    needed, others = ("update", "tokens", "lr"), ("loss", "val_loss", "skipped")
    return all(is_number(row.get(k)) for k in needed) and all(row.get(k) is None or is_number(row[k]) for k in others)


def _draw(
    run_dir: Path,
    last: dict[str, Any],
    columns: list[np.ndarray],  # float64 [rows applied] each: update, loss, smoothed loss, learning rate
    held: list[tuple[int, float]],
    dropped: list[int],
) -> None:
    from matplotlib.figure import Figure  # takes a second to import: only where a plot is made

    figure = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    x, loss, smooth, lr = columns
    dot = "o" if len(x) == 1 else None  # a line of one point is invisible
    if len(x) > PLOTTED:
        first = np.arange(0, len(x), -(-len(x) // PLOTTED))
        low, high = np.minimum.reduceat(loss, first), np.maximum.reduceat(loss, first)
        x, smooth, lr = x[first], smooth[first], lr[first]
        top.fill_between(x, low, high, color="tab:blue", alpha=0.25, linewidth=0, label="training")
    elif len(x):
        top.plot(x, loss, color="tab:blue", alpha=0.25, linewidth=0.8, marker=dot, label="training")
    if len(x):
        top.plot(x, smooth, color="tab:blue", linewidth=1.6, label="training, smoothed")
    if held:
        marks = {"marker": "o", "markersize": 4} if len(held) <= 100 else {}
        top.plot(*zip(*held, strict=True), color="tab:orange", label="held out", **marks)
    if dropped:  # at the foot: their losses are no part of the curve, and may be far off it
        shown = dropped[:: -(-len(dropped) // PLOTTED)]
        foot = top.get_xaxis_transform()
        label = f"{len(dropped):,} skipped"
        top.plot(shown, [0.03] * len(shown), "|", color="tab:red", ms=8, mew=2, transform=foot, label=label)
    top.set_ylabel("loss (nats per token)")
    title = f"{run_dir.name}: {last['update']:,} updates, {last['tokens']:,} tokens"
    top.set_title(title, parse_math=False)  # a directory's name may hold $
    top.grid(alpha=0.3)
    top.legend()
    bottom.plot(x, lr, color="tab:gray", marker=dot)
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("update")
    bottom.grid(alpha=0.3)
    temporary = run_dir / ".loss.png.tmp"
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(run_dir / "loss.png")
