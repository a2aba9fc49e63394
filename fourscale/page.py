"""What was found of runs, in words, in JSON and as one page of HTML that needs nothing else. Imports no torch."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import math
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fourscale import __version__, budget
from fourscale.cli import InputError, flag
from fourscale.config import TrainConfig, model_from_dict
from fourscale.curves import Judged, Record, smoothed
from fourscale.durable import read_json

# ---- words ---------------------------------------------------------------------------------------------------------


def progress(record: Record) -> str:
    """'update 170 of 500 (34.0%), 1,392,640 tokens, running'."""
    whole = record.course.updates
    share = f" of {whole:,} ({100 * record.update / whole:.1f}%)" if whole else ""
    tokens = int(record.curve.tokens[-1]) if record.update and record.tokens_known else None
    words = [f"update {record.update:,}{share}", f"{tokens:,} tokens" if tokens else "", _STATES[record.state]]
    return ", ".join(w for w in words if w)


_STATES = {
    "finished": "finished",
    "stopped": "stopped on request",
    "running": "running",
    "silent": "no sign of life from its writer",
    "ended": "ended early, without a receipt",
    "": "",
}


def nats(loss: float) -> str:
    """Four significant places or so; a loss may be 1e30."""
    if not math.isfinite(loss):
        return "not finite"
    return f"{loss:.4f}" if abs(loss) < 1000 else f"{loss:.3g}"


def bits_per_byte(record: Record, loss: float) -> float | None:
    """Of a loss in nats a token, where the bytes of a held-out token are known."""
    size = record.course.bytes_per_token
    return loss / math.log(2) / size if size and math.isfinite(loss) else None


def findings(run: Judged) -> list[tuple[str, str]]:
    """What stands behind a verdict, a heading and its words each."""
    record, found, curve = run.record, run.judgement, run.record.curve
    lines = [("progress", progress(record))]
    good = np.isfinite(curve.loss) & ~curve.skipped
    if good.any():
        loss = curve.loss[good]
        lines.append(("loss", f"{nats(smoothed(loss)[-1])} smoothed, {nats(float(loss[-1]))} newest"))
    if lost := int((~good).sum()):
        lines.append(("lost", f"{lost:,} of {record.rows:,} updates on record skipped or not finite"))
    if run.held_out:
        at, value = run.held_out
        bits = bits_per_byte(record, value)
        words = f"{nats(value)} at update {at:,}" + (f" ({bits:.3f} bits a byte)" if bits else "")
        if np.isfinite(curve.val_loss).any():
            best = int(np.argmin(np.where(np.isfinite(curve.val_loss), curve.val_loss, math.inf)))
            if (lowest := nats(float(curve.val_loss[best]))) != nats(value):
                words += f"; lowest {lowest} at update {int(curve.val_update[best]):,}"
        lines.append(("held out", words))
    if found.forecast and not record.complete:
        f = found.forecast
        lines.append(("forecast", f"{nats(f.loss)} at the end, 90% interval {nats(f.low)} .. {nats(f.high)}"))
    if run.target is not None:
        lines.append(("target", _distance(run)))
    rates = record.rate[-20:][np.isfinite(record.rate[-20:])]
    if len(rates) and not record.complete:
        lines.append(("pace", f"{float(np.median(rates)):,.0f} tokens a second"))
    lines += [("why" if i == 0 else "", reason) for i, reason in enumerate(found.reasons)]
    lines.append(("what to do", remedy(run)))
    return lines + [("note", note) for note in record.notes]


def remedy(run: Judged) -> str:
    """The verdict's, or what there is to say of a run that stopped itself."""
    by = ""
    if run.record.state == "stopped":
        with contextlib.suppress(InputError):
            by = str(read_json(run.record.path / "STOPPED.json").get("by"))
    if by.startswith("--stop-when"):
        return f"it stopped itself by {by}; train.py --resume must --stop-when never goes on"
    return run.judgement.remedy


def _distance(run: Judged) -> str:
    words, found, target = [f"{run.target:g}"], run.judgement, run.target
    if found.crossed is not None:
        words.append(f"reached at update {found.crossed:,}")
    if run.held_out and math.isfinite(run.held_out[1]):
        gap = run.held_out[1] - target
        words.append(f"the newest held-out loss is {nats(abs(gap))} {'above' if gap > 0 else 'below'} it")
    elif run.held_out is None:
        words.append("no held-out loss to compare with it yet")
    if found.forecast and not run.record.complete:
        gap = found.forecast.loss - target
        words.append(f"the forecast of the schedule's end {nats(abs(gap))} {'above' if gap > 0 else 'below'}")
    return "; ".join(words)


def beat(run: Judged) -> str:
    """'yes' or 'no' of a run that has ended, else how it stands."""
    if run.target is None:
        return "-"
    if run.record.complete or run.record.state == "ended":
        return "yes" if run.beat else "no"
    return "yes, so far" if run.beat else "not yet"


def table(runs: Sequence[Judged]) -> list[dict[str, str]]:
    """A row a run, column by column; columns of what no run has, or all have alike, are left out."""
    several_targets = len({run.target for run in runs if run.target is not None}) > 1
    sizes = {size for run in runs if (size := run.record.course.bytes_per_token)}
    over = all(run.record.complete for run in runs)
    rows = []
    for run in runs:
        record, forecast = run.record, run.judgement.forecast
        whole = f" of {record.course.updates:,}" if record.course.updates else ""
        row = {"run": record.name, "peak lr": peak(record)}
        row["updates"] = f"{record.update:,}{whole if not record.complete else ''}"
        row["verdict"] = run.judgement.verdict
        if run.held_out is None:
            row["held out"] = "-"
        else:
            at, value = run.held_out
            row["held out"] = nats(value) + (f" at {at:,}" if at < record.update else "")
        if len(sizes) > 1:  # nats a token of different tokenizers don't compare
            bits = bits_per_byte(record, run.held_out[1]) if run.held_out else None
            row["bits/byte"] = f"{bits:.3f}" if bits else "-"
        if not over:
            known = forecast and not record.complete
            row["forecast"] = f"{forecast.loss:.3f} ({forecast.low:.3f} .. {forecast.high:.3f})" if known else "-"
        if several_targets:
            row["target"] = f"{run.target:g}" if run.target is not None else "-"
        if any(r.target is not None for r in runs):
            row["beat the target"] = beat(run)
            row["crossed at"] = f"{run.judgement.crossed:,}" if run.judgement.crossed is not None else "-"
        rows.append(row)
    return rows


def peak(record: Record) -> str:
    """The peak learning rate of the schedule, of a log the greatest seen."""
    if record.course.lr is not None:
        return f"{record.course.lr:g}"
    seen = record.curve.lr[np.isfinite(record.curve.lr)]
    return f"{float(seen.max()):g}" if len(seen) else "-"


def entry(run: Judged) -> dict[str, Any]:
    """What was found of a run, for JSON: null where there is nothing, or a figure was not finite."""
    record, found = run.record, run.judgement

    def finite(x: float) -> float | None:
        return float(x) if math.isfinite(x) else None

    smooth = smoothed(record.curve.loss[~record.curve.skipped])
    smooth = smooth[np.isfinite(smooth)]
    held = run.held_out or (None, math.nan)
    return {
        "run": record.name,
        "path": str(record.path),
        "state": record.state or None,
        "verdict": found.verdict,
        "reasons": list(found.reasons),
        "remedy": remedy(run),
        "update": record.update,
        "updates": record.course.updates,
        "tokens": int(record.curve.tokens[-1]) if record.update and record.tokens_known else None,
        "peak_lr": record.course.lr,
        "loss": finite(smooth[-1]) if len(smooth) else None,
        "val_loss": finite(held[1]),
        "val_update": held[0],
        "forecast": dataclasses.asdict(found.forecast) if found.forecast else None,
        "target": run.target,
        "beat": run.beat,
        "crossed": found.crossed,
        "notes": list(record.notes),
    }


# ---- the page ------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --soft: #59636e; --line: #d0d7de; --box: #f6f8fa;
  --healthy: #1a7f37; --stalled: #9a6700; --diverging: #cf222e; --suspicious: #8250df; --undecided: #59636e; }
@media (prefers-color-scheme: dark) { :root { --ink: #d7dae0; --paper: #16181d; --soft: #9aa2ad; --line: #3a3f4b;
  --box: #1e2127; --healthy: #4ac26b; --stalled: #d4a72c; --diverging: #ff7b72; --suspicious: #c297ff;
  --undecided: #9aa2ad; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid var(--line);
  padding-top: 1rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; white-space: nowrap; } td { overflow-wrap: anywhere; }
.runs td:not(:first-child) { white-space: nowrap; }
figure { margin: 1.5rem 0; } img { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
.verdict { font-weight: 700; }
""" + "".join(f".{v} {{ color: var(--{v}); }} " for v in ("healthy", "stalled", "diverging", "suspicious", "undecided"))
_STYLE += """
.bar { height: .5rem; background: var(--line); border-radius: .25rem; margin: .5rem 0 1rem; }
.bar div { height: 100%; border-radius: .25rem; background: var(--soft); }
pre { background: var(--box); padding: .8rem; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .8rem 0; } summary { cursor: pointer; } .soft { color: var(--soft); } b.prompt { font-weight: 700; }
"""


def render(runs: Sequence[Judged], light: bytes, dark: bytes, refresh_s: float | None = None) -> str:
    """One HTML page, no scripts and nothing fetched: the table, the figure (a PNG for light and one for dark screens),
    and of each run its verdict, reasons, remedy, what run.json says of it and samples of its text.

    refresh_s: seconds after which a browser is to read the file again, of runs that are being followed.
    """
    title = runs[0].record.name if len(runs) == 1 else f"{len(runs)} runs"
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    again = f'<meta http-equiv="refresh" content="{max(1, round(refresh_s))}">' if refresh_s else ""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_html(title)}: health</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{again}',
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>',
        f'<h1>{_html(title)}</h1><p class="soft">Judged by fourscale {__version__}, {now}. Losses are in nats a token.',
        _targets(runs),
        "</p>",
        _runs(runs),
        '<figure><picture><source media="(prefers-color-scheme: dark)" srcset="',
        f'{_data(dark)}"><img alt="loss, learning rate, gradient norm and throughput" src="{_data(light)}"></picture>',
        "</figure>",
        *(_section(run, i) for i, run in enumerate(runs)),
        "</body></html>\n",
    ]
    return "".join(parts)


def _html(text: object) -> str:
    return escape(str(text).encode("utf-8", "backslashreplace").decode())


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _targets(runs: Sequence[Judged]) -> str:
    targets = sorted({run.target for run in runs if run.target is not None})
    return f" The target is {targets[0]:g}." if len(targets) == 1 else ""


def _verdict(word: str) -> str:
    return f'<span class="verdict {word}">{word}</span>'


def _runs(runs: Sequence[Judged]) -> str:
    rows = table(runs)
    head = "".join(f"<th>{_html(name)}</th>" for name in rows[0])
    body = ""
    for i, row in enumerate(rows):
        cells = row | {"verdict": _verdict(row["verdict"])}
        cells = {k: v if k == "verdict" else _html(v) for k, v in cells.items()}
        if len(rows) > 1:
            cells["run"] = f'<a href="#run{i}">{cells["run"]}</a>'
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells.values())}</tr>"
    return f'<div class="scroll"><table class="runs"><tr>{head}</tr>{body}</table></div>'


def _section(run: Judged, i: int) -> str:
    record = run.record
    done = min(1.0, record.update / record.course.updates) if record.course.updates else None
    bar = f'<div class="bar"><div style="width:{100 * done:.1f}%"></div></div>' if done is not None else ""
    out = f'<h2 id="run{i}">{_html(record.name)}: {_verdict(run.judgement.verdict)}</h2>{bar}{_pairs(findings(run))}'
    if record.run:
        out += f"<details><summary>What this run is</summary>{_pairs(facts(record))}</details>"
    *earlier, newest = record.samples or (None,)
    if newest:
        out += f"<p>Its text at update {newest['update']:,} (the prompt in bold):</p>{_sample(newest)}"
    if earlier:
        texts = "".join(f"<p>update {s['update']:,}</p>{_sample(s)}" for s in reversed(earlier))
        out += f"<details><summary>Earlier ones</summary>{texts}</details>"
    return out


def _sample(sample: dict[str, Any]) -> str:
    prompt, text = sample["prompt"], sample["text"]
    text = text.removeprefix(prompt)  # whether the text repeats its prompt or goes on from it
    return f'<pre><b class="prompt">{_html(prompt)}</b>{_html(text)}</pre>'


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{_html(name)}</th><td>{_html(words)}</td></tr>" for name, words in pairs)
    return f'<div class="scroll"><table>{rows}</table></div>'


# ---- what a run is -------------------------------------------------------------------------------------------------


def facts(record: Record) -> list[tuple[str, str]]:
    """run.json in words: model, tokenizer, data, training, where it began, attempts, flags."""
    run = record.run
    pairs = [("directory", str(record.path)), ("model", _model(run["model"]))]
    if isinstance(tokenizer := run.get("tokenizer"), dict):
        pairs.append(("tokenizer", _named(tokenizer, ("kind", "vocab_size", "sha256"))))
    listed = run.get("attempts")
    attempts = [a for a in listed if isinstance(a, dict)] if isinstance(listed, list) else []
    if attempts and (where := attempts[-1].get("data")):
        pairs.append(("data", ", ".join(map(str, where)) if isinstance(where, list) else str(where)))
    if isinstance(data := run.get("data"), dict):
        parts = data.get("parts") if isinstance(data.get("parts"), dict) else {"": data}
        for name, part in ((k, v) for k, v in parts.items() if isinstance(v, dict)):
            words = _named(part, ("weight", "train_digest", "val_digest"))
            pairs.append(("data digests" + (f" ({name})" if name else ""), words))
    pairs.append(("training", _named(run["training"], tuple(run["training"]))))
    if isinstance(run.get("baselines"), dict):
        pairs.append(("held-out text", _named(run["baselines"], ("unigram_nats", "bytes_per_token"))))
    for name in ("origin", "init"):
        if isinstance(run.get(name), dict):
            pairs.append(("begun from", _named(run[name], ("named", "from", "update", "digest", "differences"))))
    shown = ("started", "from_update", "code", "torch", "device", "world_size", "parallel", "local_bsz", "grad_accum")
    pairs += [(f"attempt {i}", _named(a, shown)) for i, a in enumerate(attempts, 1)]
    return [*pairs, ("flags, filled in", " ".join(_flags(run["config"])))]


def _model(table: dict[str, Any]) -> str:
    try:
        cfg = model_from_dict(table)
        cfg.check()
        size = budget.count_parameters(cfg).total
    except (InputError, TypeError, ValueError, AttributeError, ZeroDivisionError):  # of another version, or damaged
        return _named(table, tuple(table))
    heads = f"{cfg.n_heads} heads" + (f" ({cfg.n_kv_heads} for keys)" if cfg.n_kv_heads != cfg.n_heads else "")
    return (
        f"{cfg.arch}, {cfg.n_layers} layers x {cfg.d_model} wide, {heads}, context {cfg.ctx:,}, "
        f"vocabulary {cfg.vocab_size:,}: {size:,} parameters"
    )


def _named(table: dict[str, Any], keys: tuple[str, ...]) -> str:
    """'lr 0.003, warmup 20': those of `keys` that the table has."""
    return ", ".join(f"{k.replace('_', ' ')} {_plain(table[k])}" for k in keys if table.get(k) is not None)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:,}" if type(value) is int and value >= 10_000 else str(value)


def _flags(config: dict[str, Any]) -> list[str]:
    """What train.py's flags came to, where that is not their default."""
    defaults = dataclasses.asdict(TrainConfig())
    usual = defaults | defaults.pop("model")
    model = config.get("model") if isinstance(config.get("model"), dict) else {}
    words = []
    for name, value in ({k: v for k, v in config.items() if k != "model"} | model).items():
        if name not in usual:
            continue
        default = list(usual[name]) if isinstance(usual[name], tuple) else usual[name]
        default = str(default) if isinstance(default, Path) else default
        if value is None or value == default:
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        else:
            for one in value if isinstance(value, list) else [value]:
                words += [flag(name), _plain(one) if isinstance(one, float) else shlex.quote(str(one))]
    return words or ["all at their defaults"]
