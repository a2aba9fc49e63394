"""What a run says of itself: a row of metrics an update, one console line an interval, the loss curve."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourscale.cli import say
from fourscale.parallel import Topology


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


@dataclass
class Pending:
    """An update whose loss and norm are still on the device."""

    update: int  # from 1
    tokens: int  # supervised, since the run began
    count: int  # supervised in this update, over all ranks
    lr: float
    epochs: dict[str, float]  # of each data set by its name
    data_ms: float
    loss_sum: Tensor  # nats, this rank's
    norm: Tensor
    skipped: Tensor


class Meter:
    """Collects updates without waiting for the device; `flush` waits, sums over ranks, writes rows, prints a line."""

    def __init__(self, run_dir: Path, topology: Topology, updates: int, flops_per_token: float, peak: float | None):
        self.path = run_dir / "metrics.jsonl"
        self.topology = topology
        self.updates = updates
        self.flops_per_token, self.peak = flops_per_token, peak
        self.pending: list[Pending] = []
        self.skipped_in_a_row = self.skipped = 0
        self.last_loss = math.nan
        self.started = time.monotonic()

    def restart_clock(self) -> None:
        """The interval begins now: what came before was start-up."""
        self.started = time.monotonic()

    @contextlib.contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Evaluation and saving don't count as training time; the updates in flight do, so they are awaited first."""
        self._settle()
        before = time.monotonic()
        yield
        self.started += time.monotonic() - before

    def add(self, update: Pending) -> None:
        self.pending.append(update)

    def _settle(self) -> None:
        if self.topology.device.type == "cuda":
            torch.cuda.synchronize(self.topology.device)

    def flush(self, held_out: dict[str, Any] | None = None, aloud: bool = True) -> None:
        """Write the rows of all pending updates (`held_out`, the fields of an evaluation, to the last one); rank 0
        prints a line. Collective."""
        if not self.pending:
            return
        rows = self.pending
        self.pending = []
        sums = self.topology.sum_on_device(torch.stack([p.loss_sum for p in rows])).tolist()
        norms = torch.stack([p.norm for p in rows]).tolist()
        skips = torch.stack([p.skipped for p in rows]).tolist()
        seconds = time.monotonic() - self.started
        self.started = time.monotonic()
        ms = 1e3 * seconds / len(rows)
        rate = sum(p.count for p in rows) / seconds
        mfu = rate * self.flops_per_token / (self.peak * self.topology.world_size) if self.peak else None
        lines = []
        for p, total, norm, skip in zip(rows, sums, norms, skips, strict=True):
            self.skipped += int(skip)
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
            self.last_loss = total / p.count
            row: dict[str, Any] = {
                "update": p.update,
                "tokens": p.tokens,
                "loss": finite(self.last_loss),
                "lr": p.lr,
                "preclip_norm": finite(norm),
                "ms": round(ms, 3),
                "data_ms": round(p.data_ms, 3),
                "tokens_per_s": round(rate, 1),
                "mfu": mfu,
                **progress(p.epochs),
                "skipped": self.skipped,
            }
            if held_out is not None and p is rows[-1]:
                row |= held_out
            lines.append(json.dumps(row))
        if not self.topology.main:
            return
        with self.path.open("a", encoding="utf-8") as f:
            f.write("\n".join(lines) + "\n")
        if aloud:
            last = rows[-1]
            share = f"{100 * mfu:.1f}%" if mfu is not None else "n/a"
            eta = clock((self.updates - last.update) * ms / 1e3)
            note = f" | {self.skipped} skipped" if self.skipped else ""
            say(
                f"step {last.update} | loss {self.last_loss:.4f} | gnorm {norms[-1]:.2f} | lr {last.lr:.2e} | "
                f"{ms:.1f} ms/step | {rate:,.0f} tok/s | mfu {share} | eta {eta}{note}"
            )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; a last line that a crash cut short is left out."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def rewind(run_dir: Path, update: int) -> None:
    """Keep the rows up to `update`; later ones, of updates that will be done again, move to metrics.discarded.jsonl."""
    path = run_dir / "metrics.jsonl"
    rows = read_rows(path)
    late = [r for r in rows if r["update"] > update]
    if late:
        with (run_dir / "metrics.discarded.jsonl").open("a", encoding="utf-8") as f:
            f.writelines(json.dumps(r) + "\n" for r in late)
    if path.is_file():
        temporary = path.with_name(".metrics.jsonl.tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in rows if r["update"] <= update), encoding="utf-8")
        temporary.replace(path)


def plot_loss(run_dir: Path) -> None:
    """Draw metrics.jsonl as loss.png: training loss, a smoothed curve, held-out loss, and the learning rate below."""
    from matplotlib.figure import Figure  # takes a second to import: only where a plot is made

    rows = [r for r in read_rows(run_dir / "metrics.jsonl") if r.get("loss") is not None]
    if not rows:
        return
    x, loss = [r["update"] for r in rows], [r["loss"] for r in rows]
    smooth = []
    for i, value in enumerate(loss):  # over a window that grows with the run, so that the steep start isn't smeared
        share = 1 / min(50, 1 + i / 8)
        smooth.append(value if not smooth else smooth[-1] + share * (value - smooth[-1]))
    figure = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    top.plot(x, loss, color="tab:blue", alpha=0.25, linewidth=0.8, label="training")
    top.plot(x, smooth, color="tab:blue", linewidth=1.6, label="training, smoothed")
    if held := [(r["update"], r["val_loss"]) for r in rows if r.get("val_loss") is not None]:
        top.plot(*zip(*held, strict=True), "o-", color="tab:orange", markersize=4, label="held out")
    top.set_ylabel("loss (nats per token)")
    top.set_title(f"{run_dir.name}: {rows[-1]['update']:,} updates, {rows[-1]['tokens']:,} tokens")
    top.grid(alpha=0.3)
    top.legend()
    bottom.plot(x, [r["lr"] for r in rows], color="tab:gray")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("update")
    bottom.grid(alpha=0.3)
    figure.savefig(run_dir / "loss.png.tmp", dpi=110, format="png")
    (run_dir / "loss.png.tmp").replace(run_dir / "loss.png")
