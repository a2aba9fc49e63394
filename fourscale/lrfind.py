"""A range test of the learning rate on a copy of a run: `train.py --lr-find`."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from fourscale import code_version, inspection, metrics, trials
from fourscale.cli import InputError, RunFailed, say
from fourscale.durable import naming, write_json

if TYPE_CHECKING:
    from fourscale.config import TrainConfig
    from fourscale.parallel import Topology
    from fourscale.trials import Train

UPDATES = 150
BELOW, ABOVE = 1000.0, 100.0  # the sweep goes from the rate in question over the one to it times the other
DECADES = 2.0  # --min-lr .. --lr is a range to sweep where it spans so many; else the floor and peak of a schedule
SMOOTHED = 0.9  # share of the old in the running mean that decides when the loss has risen
RISE, RISE_SHARE = 0.5, 0.5  # nats, and share of the fall so far: so far above its least, the loss has risen
WINDOW = 11  # updates of the centred mean that figures are read off
LEAST_FALL = 0.05  # nats: a fall by less says nothing
KNEE = 0.9  # of the fall: where so much of it is reached, the curve flattens; the least of a flat piece is chance


@dataclass(frozen=True)
class Reading:
    """What a sweep says. Rates None where they can't be read off."""

    smoothed: np.ndarray  # float64 [n]: nats a token, centred mean
    steepest: float | None  # rate where the loss falls fastest a decade of rate
    least: float | None  # rate of the least smoothed loss
    suggestion: float | None
    why: str  # the suggestion's reason, or why there is none and what to do


def sweep(flags: TrainConfig, topology: Topology, train: Train) -> int:
    """Raise the rate exponentially over real updates, plot the loss against it, suggest a peak. Collective; 0.

    Writes lr_find.png and lr_find.json into --ckpt-dir and changes nothing else there. Raises RunFailed where nothing
    can be suggested.
    """
    run = inspection.setting(_lengthened(flags), topology)
    low, high = span(flags, run.plan.cfg.lr)
    begun = run.begun
    trials.check_room(run.plan, topology)
    if topology.main:
        begin = f" from {run.before.dir}" if run.before else ""
        tokens = f"{run.plan.tokens_per_update:,} tokens"
        say(f"lr-find: {low:.1e} .. {high:.1e} over up to {UPDATES} updates of {tokens}{begin}")
        if flags.min_lr is not None and low != flags.min_lr:
            say(f"note: --min-lr and --lr span less than {DECADES:g} decades: a schedule's, no range to sweep")
    changes: dict[str, Any] = {"schedule": "sweep", "warmup": begun, "min_lr": low, "lr": high}
    # One update more than is made: a run that is not finished has no receipt, and its contract is not read again.
    changes |= {"steps": begun + UPDATES + 1, "tokens": None, "skip_spikes": 0.0, "skip_limit": UPDATES + 1}
    with trials.scratch(flags, topology) as scratch, tqdm(
        desc="lr-find", total=UPDATES, unit="update", leave=False, disable=not topology.main, delay=2,
        mininterval=0.5 if sys.stderr.isatty() else 10,
    ) as bar:  # fmt: skip

        def risen(rows: Sequence[dict[str, Any]]) -> bool:
            bar.update(len(rows) - bar.n)
            return has_risen([row["loss"] for row in rows])

        try:
            rows = trials.run(flags, topology, train, scratch / "sweep", UPDATES, risen, **changes).rows
        except RunFailed:  # the last updates may have left weights that can't be saved: nobody needs them
            rows = topology.from_main(lambda: metrics.read_rows(scratch / "sweep" / "metrics.jsonl"))
            if not rows:
                raise
    finite = [row for row in rows if row["loss"] is not None]
    rates, losses = (np.array([row[key] for row in finite]) for key in ("lr", "loss"))
    reading = read(rates, losses, ended_early=len(rows) < UPDATES)
    table = {
        "suggestion": reading.suggestion,
        "why": reading.why,
        "steepest_lr": reading.steepest,
        "least_loss_lr": reading.least,
        "from_update": begun,
        "code": code_version(),
        "training": run.plan.training_table()
        | {"lr": high, "min_lr": low, "schedule": "sweep", "warmup": 0, "updates": len(rates)}
        | {"token_budget": len(rates) * run.plan.tokens_per_update},
        "model": dataclasses.asdict(run.plan.cfg.model),
        "lr": rates.tolist(),
        "loss": losses.tolist(),
        "smoothed": reading.smoothed.tolist(),
    }
    topology.from_main(lambda: _publish(flags.ckpt_dir, rates, losses, reading, table))
    if reading.suggestion is None:
        raise RunFailed(f"--lr-find: {reading.why}; the curve is in {flags.ckpt_dir / 'lr_find.png'}")
    if topology.main:
        say(f"suggested --lr {reading.suggestion:.1e}: {reading.why}")
        say(
            "a start, not an optimum: a sweep (Smith 2015, arXiv:1506.01186) sees few updates, no warmup and no decay; "
            "the best peak of a long run, or after a short warmup, is often lower: compare a third and three times it"
        )
        say(f"{flags.ckpt_dir / 'lr_find.png'} | {flags.ckpt_dir / 'lr_find.json'}")
    return 0


def _lengthened(flags: TrainConfig) -> TrainConfig:
    """Flags whose length and schedule stand in no sweep's way: they are not used."""
    return dataclasses.replace(flags, steps=None, tokens=None, warmup=None, min_lr=None, schedule="constant")


def span(flags: TrainConfig, peak: float) -> tuple[float, float]:
    """The rates to sweep: --min-lr .. --lr where both are given and lie far apart, else around `peak`, the run's.

    Raises InputError for a range that can't be swept.
    """
    low, high = flags.min_lr, flags.lr
    if low is not None and high is not None and high >= low * 10**DECADES and low > 0:
        return low, high
    if not 0 < peak < math.inf:
        raise InputError(f"--lr {peak:g}: a sweep goes from {1 / BELOW:g} to {ABOVE:g} times it, so it must be above 0")
    return peak / BELOW, peak * ABOVE


def has_risen(losses: Sequence[float | None]) -> bool:
    """True once the smoothed loss is well above its least, or a loss is not finite (None)."""
    mean = least = first = None
    for loss in losses:
        if loss is None:
            return True
        mean = loss if mean is None else SMOOTHED * mean + (1 - SMOOTHED) * loss
        first = mean if first is None else first
        least = mean if least is None else min(least, mean)
    return mean is not None and mean > least + max(RISE, RISE_SHARE * (first - least))


def read(rates: np.ndarray, losses: np.ndarray, ended_early: bool) -> Reading:
    """Read a sweep: rates ascending, nats a token, float64 [n] each. ended_early: the loss had risen."""
    n = len(losses)
    if n < WINDOW:
        why = f"the loss rose or was not finite after {n} updates already: lower --lr, which is the middle of the sweep"
        return Reading(losses, None, None, None, why)
    padded = np.pad(losses, WINDOW // 2, mode="edge")
    smoothed = np.convolve(padded, np.full(WINDOW, 1 / WINDOW), mode="valid")
    at = int(smoothed.argmin())
    first, lowest, least = float(smoothed[0]), float(smoothed[at]), float(rates[at])
    if first - lowest < LEAST_FALL:
        why = (
            f"the loss fell by no more than {first - lowest:.3f} nats: no rate of this range learns; look at "
            "--preflight, or name another range (--min-lr LOW --lr HIGH)"
        )
        return Reading(smoothed, None, None, None, why)
    slope = np.gradient(smoothed, np.log10(rates))
    steepest = float(rates[slope[: at + 1].argmin()])
    if not ended_early and smoothed[-1] < lowest + LEAST_FALL:
        wider = f"--min-lr {least / 1e3:.0e} --lr {least * 1e2:.0e}"
        why = f"the loss was still near its least at {rates[-1]:.1e}, the highest rate: sweep further up ({wider})"
        return Reading(smoothed, steepest, least, None, why)
    knee = float(rates[int((smoothed <= first - KNEE * (first - lowest)).argmax())])
    why = (
        f"the lowest rate with {KNEE:.0%} of the fall from {first:.3f} to {lowest:.3f} nats; it was fastest at "
        f"{steepest:.1e}, the loss was least at {least:.1e} and rose beyond"
    )
    return Reading(smoothed, steepest, least, knee, why)


# ---- what is left of it ----------------------------------------------------------------------------------------------


def _publish(directory: Path, rates: np.ndarray, losses: np.ndarray, reading: Reading, table: dict[str, Any]) -> None:
    with naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "lr_find.json", table)
        try:
            _draw(directory, rates, losses, reading)
        except OSError:
            raise
        except Exception as e:  # matplotlib may be missing or broken: the figures are in the JSON
            say(f"note: {directory / 'lr_find.png'}: {(str(e).strip() or type(e).__name__).splitlines()[0]}; not drawn")


def _draw(directory: Path, rates: np.ndarray, losses: np.ndarray, reading: Reading) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(rates, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training loss")
    axes.plot(rates, reading.smoothed, color="tab:blue", linewidth=1.8, label=f"mean of {WINDOW} updates")
    for rate, style, name in (
        (reading.steepest, ":", "steepest fall"),
        (reading.least, "--", "least loss"),
    ):
        if rate is not None:
            axes.axvline(rate, color="tab:gray", linestyle=style, linewidth=1.2, label=f"{name}: {rate:.1e}")
    if reading.suggestion is not None:
        height = np.interp(np.log(reading.suggestion), np.log(rates), reading.smoothed)
        axes.axvline(reading.suggestion, color="tab:red", linewidth=1.2)
        label = f"suggested --lr {reading.suggestion:.1e}"
        axes.plot([reading.suggestion], [height], "o", color="tab:red", markersize=7, label=label)
    axes.set_xscale("log")
    if len(losses):
        top = max(losses[0], float(reading.smoothed[0])) + 1.0  # what blew up at the end would flatten the rest
        axes.set_ylim(float(losses.min()) - 0.2, min(float(losses.max()) + 0.2, top))
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"{directory.resolve().name}: learning rate range test, {len(losses)} updates", parse_math=False)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    temporary = directory / ".lr_find.png.tmp"
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(directory / "lr_find.png")
