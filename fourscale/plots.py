"""What runs look like: loss.png of one, and health.py's figure of several. No torch; matplotlib where one is made."""

from __future__ import annotations

import io
import math
import warnings
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fourscale.cli import InputError, say
from fourscale.curves import Judged, smoothed
from fourscale.durable import read_json
from fourscale.metrics import each_row
from fourscale.schedule import learning_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = float(np.finfo(np.float32).max)  # figures come from fp32
PLOTTED = 2000  # points of a curve; more rows than that are drawn in groups


def plot_loss(run_dir: Path) -> None:
    """Draw metrics.jsonl as loss.png: training loss, a smoothed curve, held-out loss and its target, skipped updates,
    learning rate.

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


def _target(run_dir: Path) -> float | None:
    """--target-loss of the run, as its run.json has it."""
    try:
        target = read_json(run_dir / "run.json")["config"]["target_loss"]
    except (InputError, KeyError, TypeError):
        return None
    return target if type(target) in (int, float) and 0 < target <= LARGEST else None


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
    if (target := _target(run_dir)) is not None:
        top.axhline(target, color="tab:green", linestyle="--", linewidth=1, label=f"target {target:g}")
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


# ---- several runs, for health.py -----------------------------------------------------------------------------------

LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "grid": "#d0d7de"}
DARK = {"paper": "#16181d", "ink": "#d7dae0", "grid": "#3a3f4b"}
ONE = ("tab:blue", "tab:orange")  # training and held out, where there is one run


def draw(runs: Sequence[Judged], dark: bool = False, dpi: int = 100) -> bytes:
    """A PNG, 9 inches wide, of all runs: loss with target and forecast, learning rate, gradient norm, throughput.

    Against updates, or against tokens where an update takes other numbers of them. The loss axis leaves out what would
    flatten the rest - the first updates, spikes - and says how many points that is.
    """
    import matplotlib

    look = DARK if dark else LIGHT
    rc = {f"axes.{k}": look["ink"] for k in ("edgecolor", "labelcolor", "titlecolor")}
    rc |= {f"{axis}tick.{k}": look["ink"] for axis in "xy" for k in ("color", "labelcolor")}
    rc |= {f"{k}.facecolor": look["paper"] for k in ("figure", "axes", "savefig")}
    rc |= {"text.color": look["ink"], "grid.color": look["grid"], "legend.frameon": False, "axes.axisbelow": True}
    with matplotlib.rc_context(rc), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters in a name that the font lacks
        out = io.BytesIO()
        panels(runs).savefig(out, dpi=dpi, format="png")
    return out.getvalue()


def panels(runs: Sequence[Judged]) -> Figure:
    """The figure of `draw`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8.2 + 0.2 * (len(runs) // 3)), layout="constrained")
    loss, lr, norm, rate = figure.subplots(4, 1, sharex=True, height_ratios=(4.2, 1, 1.3, 1))
    by_tokens = _unequal_updates(runs)
    legend = _loss_panel(loss, runs, by_tokens)
    _rate_panels(lr, norm, rate, runs, by_tokens)
    rate.set_xlabel("tokens" if by_tokens else "update")
    rate.set_xlim(left=0)
    for ax in (loss, lr, norm, rate):
        ax.grid(linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    rate.xaxis.set_major_formatter(_counted)
    figure.align_ylabels()
    if legend:
        shown = figure.legend(*zip(*legend, strict=True), loc="outside lower center", ncols=3, fontsize=9)
        for text in shown.get_texts():
            text.set_parse_math(False)
    return figure


def label(name: str, longest: int = 40) -> str:
    """A name as matplotlib can show it, on one line: characters that can't be encoded escaped, the middle left out."""
    name = " ".join(name.encode("utf-8", "backslashreplace").decode().split()) or "?"
    if len(name) > longest:
        name = f"{name[: longest // 2 - 1]}...{name[-(longest // 2 - 2) :]}"
    return f" {name}" if name.startswith("_") else name  # matplotlib leaves names with _ out of legends


def _counted(value: float, position: int | None = None) -> str:
    """200, 1,500, 20k, 1.5M, 2B: a tick of an axis of counts."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if letter == 'k' else unit):g}{letter}"
    return f"{value:,g}"


def _unequal_updates(runs: Sequence[Judged]) -> bool:
    """True where tokens are known of all runs, and an update of one takes other numbers of them than of another."""
    curves = [run.record.curve for run in runs if len(run.record.curve.update)]
    sizes = [curve.tokens[-1] / curve.update[-1] for curve in curves]
    known = all(run.record.tokens_known for run in runs)
    return known and len(sizes) > 1 and max(sizes) > 1.05 * min(sizes)


def _colours(runs: Sequence[Judged]) -> list[Any]:
    import matplotlib

    if len(runs) == 1:
        return [ONE[0]]
    if len(runs) <= 10:
        return [f"C{i}" for i in range(len(runs))]
    return [matplotlib.colormaps["turbo"](i / (len(runs) - 1)) for i in range(len(runs))]


def _across(run: Judged, updates: np.ndarray, by_tokens: bool) -> np.ndarray:
    """float64 [n]: where updates stand on the common axis."""
    curve = run.record.curve
    if not by_tokens or not len(curve.update):
        return updates.astype(float)
    return updates * (curve.tokens[-1] / curve.update[-1])  # the share of a masked last update doesn't show


def _faint(ax: Axes, x: np.ndarray, y: np.ndarray, colour: Any) -> Any:
    """The points as a thin line, of a long run as a band from the least to the greatest of each group."""
    if len(x) <= PLOTTED:
        return ax.plot(x, y, color=colour, alpha=0.3, linewidth=0.8, marker="." if len(x) == 1 else None)[0]
    first = np.arange(0, len(x), -(-len(x) // PLOTTED))
    low, high = np.fmin.reduceat(y, first), np.fmax.reduceat(y, first)
    return ax.fill_between(x[first], low, high, color=colour, alpha=0.25, linewidth=0)


def _loss_panel(ax: Axes, runs: Sequence[Judged], by_tokens: bool) -> list[tuple[Any, str]]:
    """Draws the losses; handles and labels of the legend."""
    from matplotlib.lines import Line2D

    one, legend = len(runs) == 1, []
    shown: list[np.ndarray] = []  # smoothed and held-out losses that the axis is to hold
    points: list[np.ndarray] = []
    for run, colour in zip(runs, _colours(runs), strict=True):
        curve = run.record.curve
        good = np.isfinite(curve.loss) & ~curve.skipped
        x, loss = _across(run, curve.update[good], by_tokens), curve.loss[good]
        smooth, held = smoothed(loss), ONE[1] if one else colour
        if one or len(runs) <= 4:
            faint = _faint(ax, x, loss, colour)
        line = ax.plot(x, smooth, color=colour, linewidth=1.6)[0]
        seen = np.isfinite(curve.val_loss)
        val_x, val = _across(run, curve.val_update[seen], by_tokens), curve.val_loss[seen]
        size = 4 if len(val) <= 60 else 2 if len(val) <= 400 else 0
        ax.plot(val_x, val, color=held, linewidth=1, marker="o", markersize=size, linestyle="-" if one else "")
        points += [loss, val]
        shown.append(_worth_showing(smooth, loss, val, one))
        if one:
            legend += [(faint, "training"), (line, "training, smoothed")]
        else:
            legend.append((line, f"{label(run.record.name)}: {run.judgement.verdict}"))
        if one and len(val):
            legend.append((Line2D([], [], color=held, marker="o", markersize=4), "held out"))
        legend += _forecast(ax, run, held, by_tokens, one)
        if (ahead := run.judgement.forecast) is not None and not run.record.complete and len(smooth):
            start = float(np.median(loss[:3]))
            shown.append(np.clip([ahead.low, ahead.high], 0, max(start, smooth[-1])))
        lost = curve.update[~good]
        if len(lost):
            at = _across(run, lost[:: -(-len(lost) // PLOTTED)], by_tokens)
            height = np.full(len(at), 0.03)
            marks = ax.plot(at, height, "|", color="tab:red", ms=8, mew=1.5, transform=ax.get_xaxis_transform())[0]
            of = "" if one else f" ({label(run.record.name, 24)})"
            legend.append((marks, f"{len(lost):,} skipped or not finite{of}"))
    if not one:
        grey = {"color": "gray", "markersize": 4}
        legend += [(Line2D([], [], linewidth=1.6, **grey), "training, smoothed")]
        legend += [(Line2D([], [], marker="o", linestyle="", **grey), "held out")]
    for target in sorted({run.target for run in runs if run.target is not None}):
        line = ax.axhline(target, color=ax.xaxis.label.get_color(), linestyle="--", linewidth=1.2)  # of no run
        legend.append((line, f"target {target:g}"))
        shown.append(np.array([target]))
    _clip_losses(ax, shown, points)
    _unigram(ax, runs)
    ax.set_ylabel("loss (nats per token)")
    if one:
        record = runs[0].record
        tokens = f", {record.curve.tokens[-1]:,} tokens" if record.tokens_known and len(record.curve.tokens) else ""
        title = f"{label(record.name)}: {runs[0].judgement.verdict} at update {record.update:,}{tokens}"
        ax.set_title(title, parse_math=False)
    else:
        ax.set_title(f"{len(runs)} runs")
    return legend


def _forecast(ax: Axes, run: Judged, colour: Any, by_tokens: bool, one: bool) -> list[tuple[Any, str]]:
    """The interval of the final held-out loss, at the run's end and as a band up to there; nothing once it is over."""
    forecast, updates = run.judgement.forecast, run.record.course.updates
    if forecast is None or updates is None or run.record.complete:
        return []
    now, end = _across(run, np.array([run.record.update, updates]), by_tokens)
    ax.fill_between([now, end], forecast.low, forecast.high, color=colour, alpha=0.15, linewidth=0)
    reach = [[max(0.0, forecast.loss - forecast.low)], [max(0.0, forecast.high - forecast.loss)]]
    bar = ax.errorbar([end], [forecast.loss], yerr=reach, color=colour, marker="D", ms=4, capsize=4, linewidth=1.2)
    if not one:
        return []
    words = f"forecast of the end {forecast.loss:.3f}, 90% {forecast.low:.3f} .. {forecast.high:.3f}"
    return [(bar, words)]


def _worth_showing(smooth: np.ndarray, loss: np.ndarray, held_out: np.ndarray, alone: bool) -> np.ndarray:
    """float64: the losses that the axis should hold: without the steep start, and of a run that has left for the sky
    not much more than the loss it began with, unless it is alone and most of it lies there."""
    late = smooth[min(len(smooth) - 1, math.ceil(0.03 * len(smooth))) :] if len(smooth) else smooth
    late = np.concatenate([late, held_out[len(held_out) // 20 :]])
    if not len(late):
        return late
    cap = 1.1 * float(np.median(loss[:3] if len(loss) else late))
    return np.minimum(late, max(cap, float(np.quantile(late, 0.6))) if alone else cap)


def _clip_losses(ax: Axes, shown: Sequence[np.ndarray], points: Sequence[np.ndarray]) -> None:
    """Limits of the loss axis: `shown` with some room; how many of `points` lie above them is said."""
    values = np.concatenate(shown) if shown else np.array([])
    if not len(values):
        return
    low, high = float(values.min()), float(values.max())
    room = max(high - low, 0.02 * abs(high), 1e-3)
    ax.set_ylim(low - 0.08 * room, high + 0.1 * room)
    above = sum(int((p > high + 0.1 * room).sum()) for p in points)
    if above:
        total = sum(map(len, points))
        words = f"{above:,} of {total:,} losses lie above"
        ax.text(0.995, 0.985, words, transform=ax.transAxes, ha="right", va="top", fontsize=8, alpha=0.75)


def _unigram(ax: Axes, runs: Sequence[Judged]) -> None:
    """The loss of counting single tokens as a faint line, where it lies within the axis."""
    low, high = ax.get_ylim()
    levels = {round(u, 4) for run in runs if (u := run.record.course.unigram_nats) is not None}
    for level in sorted(levels):
        if low < level < high:
            ax.axhline(level, color="gray", linestyle=":", linewidth=1)
            words, ink = f"counting single tokens: {level:.2f}", {"color": "gray", "fontsize": 8}
            side = "bottom" if level < low + 0.85 * (high - low) else "top"  # the corner above is taken
            ax.text(0.995, level, words, transform=ax.get_yaxis_transform(), ha="right", va=side, zorder=9, **ink)


def _schedule_ahead(run: Judged) -> tuple[np.ndarray, np.ndarray]:
    """Updates to come, int64 [k], and their learning rates, float64 [k]; none where the schedule isn't known."""
    course = run.record.course
    if run.record.complete or None in (course.updates, course.lr, course.min_lr, course.schedule):
        return np.array([], np.int64), np.array([])
    to_come = np.unique(np.linspace(run.record.update + 1, course.updates, 300).astype(np.int64))
    of = (course.updates, course.warmup, course.lr, course.min_lr, course.schedule, course.decay_fraction)
    return to_come, np.array([learning_rate(int(u) - 1, *of) for u in to_come])


def _rate_panels(lr: Axes, norm: Axes, rate: Axes, runs: Sequence[Judged], by_tokens: bool) -> None:
    """Learning rate, gradient norm before clipping, tokens per second."""
    peaks, rates, norms = [], [], []
    for run, colour in zip(runs, _colours(runs), strict=True):
        curve = run.record.curve
        x, dot = _across(run, curve.update, by_tokens), "." if len(curve.update) == 1 else None
        lr.plot(x, curve.lr, color=colour, linewidth=1.3, marker=dot)
        ahead, rates_ahead = _schedule_ahead(run)
        lr.plot(_across(run, ahead, by_tokens), rates_ahead, color=colour, linewidth=1, linestyle=":")
        positive = np.isfinite(curve.norm) & (curve.norm > 0)
        _faint(norm, x[positive], curve.norm[positive], colour)
        if positive.any():
            norm.plot(x[positive], np.exp(smoothed(np.log(curve.norm[positive]))), color=colour, linewidth=1.3)
        rate.plot(x, run.record.rate, color=colour, linewidth=1.3, marker=dot)
        known = curve.lr[np.isfinite(curve.lr) & (curve.lr > 0)]
        peaks += [known.max()] if len(known) else []
        norms.append(curve.norm[positive])
        rates.append(run.record.rate[np.isfinite(run.record.rate)])
    lr.set_ylabel("learning\nrate")
    if peaks and max(peaks) > 8 * min(peaks):  # several runs, decades apart
        lr.set_yscale("log")
        lr.set_ylim(min(peaks) / 30, 2 * max(peaks))
    elif peaks:
        lr.set_ylim(0, 1.1 * max(peaks))
        lr.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    norm.set_ylabel("gradient\nnorm")
    norm.set_yscale("log")
    pooled = np.concatenate(norms) if norms else np.array([])
    if len(pooled):
        low, high = np.quantile(pooled, (0.002, 0.998))
        low, high = low / 1.5, max(1.5 * high, 4 * low)
        norm.set_ylim(low, high)
        if high < 30 * low:  # few or no powers of ten in it: three plain numbers tell more than minor ticks
            norm.set_yticks([float(f"{x:.1g}") for x in np.geomspace(1.2 * low, high / 1.2, 3)])
            norm.yaxis.set_major_formatter("{x:g}")
        norm.yaxis.set_minor_formatter("")
        for clip in sorted({run.record.course.clip for run in runs if run.record.course.clip}):
            norm.axhline(clip, color="gray", linestyle=":", linewidth=1)
            at, ink = norm.get_yaxis_transform(), {"color": "gray", "fontsize": 8}
            if norm.get_ylim()[0] < clip < norm.get_ylim()[1]:
                norm.text(0.995, clip, f"clipped at {clip:g}", transform=at, ha="right", va="bottom", **ink)
    rate.set_ylabel("tokens\nper second")
    rate.yaxis.set_major_formatter(_counted)
    speeds = np.concatenate(rates) if rates else np.array([])
    if len(speeds):
        rate.set_ylim(0, 1.15 * float(np.quantile(speeds, 0.99)) or 1)
    for ax, values, what in ((lr, peaks, "rates"), (norm, pooled, "norms"), (rate, speeds, "speeds")):
        if not len(values):
            ax.text(0.5, 0.5, f"no {what} on record", transform=ax.transAxes, ha="center", va="center", alpha=0.6)
