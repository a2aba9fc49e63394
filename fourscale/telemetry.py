"""What a run says of itself while it lives: a row of metrics an update, one console line an interval, a bar.

Every attempt counts from the start of its process: of rank 0's, by /proc on Linux; elsewhere from the import of this
module, a few seconds later.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from fourscale import cli
from fourscale.cli import RunFailed, say
from fourscale.metrics import Rows, each_row
from fourscale.parallel import Topology

if TYPE_CHECKING:
    from fourscale.profiling import Profiler

LOWEST_EXCESS, HIGHEST_EXCESS = -0.75, 2.0  # nats that the loss of random weights may lie from ln(vocabulary)


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


def first_loss_fault(loss: float, vocab_size: int, trained_before: bool) -> str | None:
    """What is wrong with the loss of update 1, in nats a token; None where it is plausible or weights were trained.

    Random weights give each of V ids about the same probability: ln V, and half the variance of the logits more, which
    is d_model * 0.02^2 for weights of N(0, 0.02). Measured on both archs, tied and untied, 1 to 24 layers, widths 64 to
    2,048, V from 65 to 4,096: ln V - 0.10 to + 0.55 on random ids; on text of bytes, a fifth of which repeat the one
    before, down to ln V - 0.51 where the head is tied, since a shallow model then leans towards its input.
    """
    expected = math.log(vocab_size)
    if trained_before or LOWEST_EXCESS <= loss - expected <= HIGHEST_EXCESS:
        return None
    ought = f"random weights over {vocab_size:,} ids give about ln {vocab_size:,} = {expected:.2f}"
    if not math.isfinite(loss):
        return f"first loss {loss}, {ought}; look at the initial weights and --dtype"
    if loss > expected:
        return f"first loss {loss:.2f}, {ought}; too high: look at the initial weights, and whether targets are shifted"
    like = f"as {math.exp(loss):,.0f} equally likely ids would give" if loss > 0 else "below what is possible"
    return f"first loss {loss:.2f}, {ought}; too low, {like}: look at the vocabulary and at a batch for a leak"


def phases(instants: tuple[Any, ...]) -> dict[str, float]:
    """Fields of a metrics row from the three instants of an update: forward and backward of all its micro-batches, and
    clipping, guard and step. None for an update without them."""
    if not instants:
        return {}
    names = ("fwd_bwd_ms", "optim_ms")
    return {n: round(ms_between(*pair), 3) for n, pair in zip(names, itertools.pairwise(instants), strict=True)}


# ---- clocks --------------------------------------------------------------------------------------------------------


def _process_age() -> float:
    """Seconds since this process was started, in Linux's 10 ms; 0 where the system doesn't tell."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return age if 0 <= age < 3600 else 0.0  # some sandboxes put the boot there
    return 0.0


PROCESS_BEGAN = time.monotonic() - _process_age()


def instant(device: torch.device) -> float | torch.cuda.Event:
    """Now on the device's own clock, without waiting for it: on CUDA an event, else seconds of the host's."""
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def ms_between(first: float | torch.cuda.Event, then: float | torch.cuda.Event) -> float:
    """Milliseconds from one `instant` to another; events must have happened."""
    return 1e3 * (then - first) if isinstance(first, float) else first.elapsed_time(then)


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors took on this CUDA device so far; elsewhere, that this process took. 0: unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


@dataclass(frozen=True)
class Spent:
    """What the attempts before this one took, with updates that are done again, up to the last row of each."""

    flops: float = 0.0
    device_hours: float = 0.0
    cost: float = 0.0


def spent_before(run_dir: Path, price: float | None) -> Spent:
    """Of the rows in metrics.jsonl and metrics.discarded.jsonl, the highest counts: each attempt counts on from them.

    price: of a device-hour; what earlier attempts cost without one is reckoned by it.
    """
    most: dict[str, float] = {"flops": 0.0, "device_hours": 0.0}
    for name in ("metrics.jsonl", "metrics.discarded.jsonl"):
        for _, row in each_row(run_dir / name):
            for key in ("flops", "device_hours", "cost"):
                value = (row or {}).get(key)
                if isinstance(value, int | float) and math.isfinite(value) and value > most.get(key, -1.0):
                    most[key] = value
    return Spent(most["flops"], most["device_hours"], most.get("cost", (price or 0.0) * most["device_hours"]))


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
    instants: tuple[Any, ...] = ()  # before forward, after backward, after the optimizer's step


class Meter:
    """Collects updates without waiting for the device; `flush` waits, compares the ranks, writes rows, prints a line.

    path: the run's directory. updates: of the whole run. peak: FLOP/s of a device, None where unknown. price: of a
    device-hour, None where it isn't given. event(name, **fields) and assert_writer() are RunDir's, called on rank 0
    only; an event that returns False could not be written and is tried again. `spent`, `skipped` (since the run began)
    and `skipped_in_a_row` (up to the newest flushed update) may be set on a resume; `longest_streak`, the most updates
    in a row that were dropped, of those flushed here, counts on from the latter. `newest_loss`: of the last update that
    was flushed.
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
        price: float | None = None,
    ):
        self.topology = topology
        self.updates = updates
        self.flops_per_token, self.peak, self.price = flops_per_token, peak, price
        self.pending: list[Pending] = []
        self.skipped_in_a_row = self.longest_streak = self.skipped = 0
        self.spent, self.newest_loss = Spent(), math.nan
        self.started, self._tokens_before = time.monotonic(), 0
        self._off: Counter[str] = Counter()  # seconds of evaluation and saving that no row has told yet
        self._bar: tqdm | None = None
        self.profiler: Profiler | None = None  # of --profile; it slows updates, whose rows say so
        self._file = Rows(path / "metrics.jsonl", event, assert_writer)

    @property
    def unwritten(self) -> int:
        """Rows that wait in memory for room on the disk; 0 on all ranks but the first."""
        return len(self._file.lines)

    def begin(self, update: int, tokens: int, bar: bool = False) -> None:
        """The loop begins after `update` and `tokens`: what came before was start-up. bar: rank 0 shows one."""
        self._settle()
        self.started, self._tokens_before = time.monotonic(), tokens
        if bar and self.topology.main:
            pause = 0.2 if sys.stderr.isatty() else 10  # a log file wants few lines
            self._bar = tqdm(
                initial=update, total=self.updates, unit="update", mininterval=pause, dynamic_ncols=True, leave=False
            )
            cli.aside = tqdm.external_write_mode

    def end(self) -> None:
        """Take the bar away, and write a profile that the run has ended in."""
        if self.profiler is not None:
            self.profiler.end()
        if self._bar is not None:
            self._bar.close()
            self._bar, cli.aside = None, contextlib.nullcontext

    def phase(self, name: str) -> None:
        """Here a phase of the loop begins, a key of traces.PHASES: only a profile takes note."""
        if self.profiler is not None:
            self.profiler.mark(name)

    def instant(self, phase: str) -> float | torch.cuda.Event:
        """Now on the device's clock, where `phase` begins."""
        self.phase(phase)
        return instant(self.topology.device)

    @contextlib.contextmanager
    def off_the_clock(self, what: str = "save") -> Iterator[None]:
        """Evaluation ("eval") and saving don't count as training time; updates in flight do, and are awaited first."""
        self._settle()
        before = time.monotonic()
        self.phase(what)
        yield
        self.phase("rest")
        now = time.monotonic()
        self._off[what] += now - before
        self.started += now - max(before, self.started)  # a flush in between has begun a new interval

    def add(self, update: Pending) -> None:
        self.pending.append(update)
        if self._bar is not None:
            self._bar.update()

    def _settle(self) -> None:
        if self.topology.device.type == "cuda":
            torch.cuda.synchronize(self.topology.device)
        elif self.topology.device.type == "mps":
            torch.mps.synchronize()

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
        if self._bar is not None and rows:
            self._bar.set_postfix({"loss": f"{self.newest_loss:.4f}", "skipped": self.skipped}, refresh=False)
        if aloud and console and self.topology.main:
            say(console)

    def _describe(self, rows: list[Pending], held_out: dict[str, Any] | None) -> str:
        """Hand the rows and the events of skipped updates to the file of rank 0; the console line."""
        names = ("loss", "own_loss", "norm", "skipped")
        losses, own, norms, skips = (torch.stack([getattr(p, name) for p in rows]).tolist() for name in names)
        self._settle()  # the step of the last update may be under way
        now = time.monotonic()
        seconds, self.started = now - self.started, now
        ms = 1e3 * seconds / len(rows)
        off, self._off = self._off, Counter()
        profiled = self.profiler is not None and self.profiler.touched
        if profiled:
            self.profiler.touched = False
        rate = sum(p.count for p in rows) / seconds
        mfu = rate * self.flops_per_token / (self.peak * self.topology.world_size) if self.peak else None
        dropped = [i for i, skip in enumerate(skips) if skip]
        own_ms = sum(p.own_ms for p in rows) / len(rows)
        paces, memory, broken = self._compare_ranks(own_ms, [own[i] for i in dropped])
        slowest = max(range(len(paces)), key=paces.__getitem__)
        pace = {"ms_fastest": round(min(paces), 3), "ms_slowest": round(max(paces), 3), "slowest_rank": slowest}
        for i, (p, loss, norm, skip) in enumerate(zip(rows, losses, norms, skips, strict=True)):
            self.skipped += int(skip)
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
            self.longest_streak = max(self.longest_streak, self.skipped_in_a_row if skip else 0)
            last = p is rows[-1]
            # Updates of an interval share its pace; what was evaluated came after the last of them.
            elapsed = now - PROCESS_BEGAN - (0 if last else (len(rows) - 1 - i) * ms / 1e3 + off["eval"])
            hours = elapsed * self.topology.world_size / 3600
            tokens = p.tokens - self._tokens_before
            row: dict[str, Any] = {
                "update": p.update,
                "tokens": p.tokens,
                "loss": finite(loss),
                "lr": p.lr,
                "preclip_norm": finite(norm),
                "ms": round(ms, 3),
                **pace,
                "data_ms": round(p.data_ms, 3),
                **phases(p.instants),
                **({"eval_s": round(off["eval"], 3)} if last and off["eval"] > 0 else {}),
                **({"save_s": round(off["save"], 3)} if i == 0 and off["save"] > 0 else {}),
                "tokens_per_s": round(rate, 1),
                "end_to_end_tokens_per_s": round(tokens / elapsed, 1),
                "elapsed_s": round(elapsed, 3),
                "mfu": mfu,
                "flops": self.spent.flops + self.flops_per_token * tokens,
                "device_hours": round(self.spent.device_hours + hours, 6),
                **({"cost": round(self.spent.cost + self.price * hours, 6)} if self.price is not None else {}),
                **({"peak_memory": memory} if memory else {}),
                **({"profiled": True} if profiled else {}),
                **progress(p.epochs),
                "applied": p.update - self.skipped,
                "skipped": self.skipped,
            }
            if held_out is not None and last:
                row |= held_out
            if self.topology.main:
                self._file.lines.append(json.dumps(row))
            if skip and self.topology.main:
                self._tell_skip(p, loss, norm, broken[dropped.index(i)])
        self.newest_loss = losses[-1]
        newest = rows[-1]
        share = f"{100 * mfu:.1f}%" if mfu is not None else "n/a"
        eta = clock((self.updates - newest.update) * ms / 1e3)
        note = (f" | {self.skipped} skipped" if self.skipped else "") + (" | profiled" if profiled else "")
        return (
            f"step {newest.update} | loss {losses[-1]:.4f} | gnorm {norms[-1]:.2f} | lr {newest.lr:.2e} | "
            f"{ms:.1f} ms/step | {rate:,.0f} tok/s | mfu {share} | eta {eta}{note}"
        )

    def _compare_ranks(self, own_ms: float, own_losses: list[float]) -> tuple[list[float], int, list[list[int]]]:
        """Every rank's `own_ms`, the largest peak memory, and for each of `own_losses` the ranks where it is not
        finite. Collective."""
        table = torch.zeros(2 + len(own_losses), self.topology.world_size, dtype=torch.float64)
        mine = [own_ms, peak_memory(self.topology.device), *(not math.isfinite(x) for x in own_losses)]
        table[:, self.topology.rank] = torch.tensor(mine, dtype=torch.float64)
        # A sum rather than a gather: it is on the group that waits for a stopped rank no longer than --timeout.
        summed = torch.tensor(self.topology.all_sum(table.flatten().tolist()), dtype=torch.float64)
        paces, peaks, *broken = summed.view_as(table).tolist()
        return paces, int(max(peaks)), [[rank for rank, flag in enumerate(flags) if flag] for flags in broken]

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
