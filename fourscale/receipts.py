"""What a run's directory says of the run, in words, and whether its records agree. Nothing is locked nor written.

Findings are ("pass" | "FAIL" | "note", name, text); a FAIL's text ends with its remedy.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from fourscale import budget, durable, lock, rundir, schedule, tokenization
from fourscale.cli import InputError
from fourscale.config import model_from_dict
from fourscale.metrics import each_row
from fourscale.parallel import host_name
from fourscale.steps import Finding

SHOWN = 5  # of the like events


def read_run(run_dir: Path) -> dict[str, Any]:
    """run.json, of the format that this version reads. Raises InputError."""
    run = durable.read_json(run_dir / "run.json")
    if run.get("format") != rundir.FORMAT:
        raise InputError(f"{run_dir / 'run.json'}: format {run.get('format')}, this version reads {rundir.FORMAT}")
    if "imported" in run:
        return rundir.read_run(run_dir)
    if lacking := [k for k in (*rundir.CONTRACT, "config", "attempts") if k not in run]:
        raise InputError(f"{run_dir / 'run.json'}: lacks {lacking[0]}; restore the file")
    return run


def number(x: Any) -> str:
    return "none" if x is None else f"{x:g}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)


# ---- the contract and the attempts ---------------------------------------------------------------------------------


def tokenizer_finding(run_dir: Path, run: dict[str, Any]) -> Finding:
    """Whether the run's tokenizer is there and the one that it was trained with."""
    entry = run["tokenizer"]
    if entry is None:
        return "note", "tokenizer", f"none: the {'source had' if 'imported' in run else 'run was trained on'} bare ids"
    try:
        tokenization.load(run_dir, entry)
    except InputError as e:
        return "FAIL", "tokenizer", str(e)
    words = f"{entry['kind']}, {entry['vocab_size']:,} ids, sha256 {entry['sha256'][:12]}"
    return "pass", "tokenizer", f"{words}; {entry['file']} is the one"


def contract(run: dict[str, Any]) -> Iterator[Finding]:
    """Everything that makes the experiment what it is. Raises InputError for a model this version doesn't know."""
    cfg = model_from_dict(run["model"])
    t = dict(run["training"])
    size = budget.count_parameters(cfg)
    heads = f"{cfg.n_heads} heads" + (f" ({cfg.n_kv_heads} of keys)" if cfg.n_kv_heads != cfg.n_heads else "")
    extras = [f"dropout {cfg.dropout:g}"] if cfg.dropout else []
    extras += [
        w for w, on in (("untied head", not cfg.tie), ("qk norm", cfg.qk_norm), ("doc mask", cfg.doc_mask)) if on
    ]
    shape = f"{cfg.n_layers} layers x {cfg.d_model} wide, {heads}, d_ff {cfg.d_ff:,}, ctx {cfg.ctx:,}"
    words = ", ".join([cfg.arch, shape, f"{cfg.vocab_size:,} ids", *extras])
    yield "note", "model", f"{words}: {size.total:,} parameters"
    if "imported" in run:
        return
    paths = run["attempts"][-1].get("data") or run["config"].get("data") or []
    paths = [paths] if isinstance(paths, str) else paths
    for i, (name, part) in enumerate(rundir.data_parts(run["data"]).items()):
        sums = ", ".join(
            f"{side} sha256 {part[f'{side}_digest'].removeprefix('sampled-')[:12]}" for side in ("train", "val")
        )
        share = f", share {float(Fraction(part['weight'])):g}" if "weight" in part else ""
        yield "note", "data", f"{paths[i] if i < len(paths) else name}: {sums}{share}"

    def take(*names: str) -> str:
        return ", ".join(f"{n.replace('_', ' ')} {number(t.pop(n))}" for n in names if n in t)

    batch, updates, tokens = t.pop("global_bsz"), t.pop("updates"), t.pop("token_budget")
    origin = run.get("origin") or {"update": 0, "tokens": 0}
    full = batch * cfg.ctx
    left = tokens - origin["tokens"] - (updates - 1 - origin["update"]) * full
    since = f" (from {origin['update']:,} and {origin['tokens']:,} on)" if origin["update"] else ""
    tail = f", the last update {left:,}" if left != full else ""
    arithmetic = (
        f"{updates:,} updates{since} of {batch:,} windows x {cfg.ctx:,} = {full:,} tokens: {tokens:,} in all{tail}"
    )
    if 0 < left <= full:
        yield "note", "budget", arithmetic
    else:
        yield "FAIL", "budget", f"{arithmetic}; that does not add up: run.json was changed by hand, restore it"
    yield "note", "optimizer", f"{t.pop('optimizer')}, {take('weight_decay', 'beta1', 'beta2', 'clip', 'muon_dtype')}"
    yield "note", "schedule", f"{t.pop('schedule')}, {take('lr', 'min_lr', 'warmup', 'decay_fraction')}"
    yield "note", "precision", t.pop("dtype")
    if "skip_spikes" in t:
        spikes = t.pop("skip_spikes")
        words = f"updates of {spikes:g} times the mean loss are dropped" if spikes else "no guard against spikes"
        yield "note", "guards", f"{words}; stops after {t.pop('skip_limit')} dropped in a row"
    seeds = f"seed {t.pop('data_seed')}; weights and dropout: seed {t.pop('seed')}"
    yield "note", "order", f"{t.pop('sampling')}, {seeds}; {take('eval_tokens')}"
    if t:  # a field of a later version
        yield "note", "also", take(*t)


def imported(run: dict[str, Any]) -> Iterator[Finding]:
    """Where an imported model comes from, and how it was compared."""
    if not (source := run.get("imported")):
        return
    revision = f" at {source['revision'][:12]}" if source.get("revision") else ""
    kind = f", weights in {source['dtype']}" if "dtype" in source else ""
    place = f"{source['source']}{revision} (digest {source['digest'][:12]}{kind})"
    yield "note", "imported", f"{place}; not trained further"
    if logits := source.get("logits"):
        words = f"largest difference of logits {logits['difference']:.2g} over {logits['tokens']:,} tokens"
        yield "note", "imported", f"{words} (largest logit {logits['largest']:.3g})"
    if source.get("adds"):
        yield "note", "imported", f"its tokenizer puts {source['adds']} each text of its own; here, none is added"


def branch(run: dict[str, Any]) -> Iterator[Finding]:
    """Where a run's state or weights come from, and what it changed."""
    if begun := run.get("init"):
        place = f"{begun['from']} (digest {begun['digest'][:12]})"
        yield "note", "origin", f"began with the weights of {place}"
        for line in begun.get("differences", []):
            yield "note", "origin", f"differs: {line}"
    if not (origin := run.get("origin")):
        return
    place = f"{origin['from']} (digest {origin['digest'][:12]})"
    yield "note", "origin", f"branched from {place} after {origin['update']:,} updates, {origin['tokens']:,} tokens"
    for line in origin.get("differences", []):
        yield "note", "origin", f"differs: {line}"
    source = Path(origin["from"])
    with contextlib.suppress(InputError, KeyError):
        if source.is_dir() and rundir.digest(rundir.open_checkpoint(source)) != origin["digest"]:
            yield "note", "origin", f"{source} holds another checkpoint by now"


def attempts(run: dict[str, Any]) -> Iterator[Finding]:
    """Each start of the run: when, from where, on what; and what changed from one to the next."""
    before = None
    for i, a in enumerate(run["attempts"], 1):
        words = [f"{a['world_size']} x {a['device']}", a["parallel"]]
        micro = f"{a['grad_accum']} micro-batch{'es' * (a['grad_accum'] != 1)}"
        words.append(f"{a['local_bsz']} windows x {micro} a rank")
        words += [a["host"]] if "host" in a else []
        words += [f"Slurm job {a['job']}"] if "job" in a else []
        words += [
            f"torch {a['torch']}",
            f"code {a['code'][:12]}{'+' * a['code'].endswith('+')}",
        ]  # +: uncommitted changes
        when = a["started"][:16].replace("T", " ")
        start = f"{i} ({a['attempt']}) {when}, from update {a['from_update']:,}"
        yield "note", "attempt", f"{start}: {', '.join(words)}"
        if before is not None:
            own = ("attempt", "started", "from_update", "job")
            changed = [k for k in a if k not in own and k in before and before[k] != a[k]]
            if changed:
                yield "note", "attempt", f"{i} changed {', '.join(f'{k} {before[k]} -> {a[k]}' for k in changed)}"
        before = a


# ---- what happened -------------------------------------------------------------------------------------------------


def read_events(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Events of a run in order, and how many lines of events.jsonl a crash cut short."""
    events, torn = [], 0
    path = run_dir / "events.jsonl"
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            event = json.loads(line)
            events.append(event | {"event": str(event["event"])})
        except (ValueError, TypeError, KeyError):
            torn += 1
    return events, torn


def happened(events: list[dict[str, Any]], torn: int, dropped: list[int]) -> Iterator[Finding]:
    """Skipped updates with their reasons, and all other events. dropped: the updates that the metrics call skipped."""
    skips = [e for e in events if e["event"] == "skipped"]
    for e in skips[:SHOWN]:
        first, end = e.get("samples") or (0, 0)
        figures = ", ".join(f"{k} {number(e[k])}" for k in ("loss", "norm") if e.get(k) is not None)
        text = f"update {number(e.get('update'))}, samples {first:,} .. {end - 1:,}: {e.get('why')}"
        yield "note", "skipped", text + (f" ({figures})" if figures else "")
    if len(skips) > SHOWN:
        yield "note", "skipped", f"and {len(skips) - SHOWN:,} more in events.jsonl"
    if unknown := sorted(set(dropped) - {e.get("update") for e in skips}):
        text = f"{len(unknown):,} of the skipped updates, the first {unknown[0]:,}, have no reason in events.jsonl"
        yield "note", "skipped", f"{text}: a full disk, or the file was removed"
    shown: Counter[str] = Counter()
    for e in events:
        name = e["event"]
        if name == "skipped":
            continue
        shown[name] += 1
        if shown[name] <= SHOWN:
            fields = ", ".join(f"{k} {flat(v)}" for k, v in e.items() if k not in ("time", "event", "attempt"))
            yield (
                "note",
                "event",
                f"{str(e.get('time', ''))[:16].replace('T', ' ')} {name}{': ' * bool(fields)}{fields}",
            )
    for name, count in shown.items():
        if count > SHOWN:
            yield "note", "event", f"{name}: and {count - SHOWN:,} more in events.jsonl"
    if torn:
        yield "note", "event", f"{torn} line(s) of events.jsonl were cut short by a crash"


def flat(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k} {v}" for k, v in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list) else number(value)


@dataclass
class Metrics:
    """What one pass over metrics.jsonl found. `at` has the rows of the updates that were asked for."""

    rows: int = 0
    first: int | None = None
    last: dict[str, Any] | None = None
    faults: list[str] = field(default_factory=list)
    at: dict[int, dict[str, Any]] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)  # updates that were skipped
    torn: int = 0


def read_metrics(run_dir: Path, run: dict[str, Any], wanted: set[int]) -> Metrics:
    """Read every row: each update once and in order, tokens and rates as the contract has them, skips that add up."""
    t, origin = run["training"], run.get("origin") or {"update": 0, "tokens": 0}
    course = [t[k] for k in ("updates", "warmup", "lr", "min_lr", "schedule")]
    full = t["global_bsz"] * run["model"]["ctx"]
    found = Metrics()
    counts: Counter[str] = Counter()

    def fault(kind: str, text: str) -> None:
        counts[kind] += 1
        if counts[kind] == 1:
            found.faults.append(text)

    expected, skipped = origin["update"] + 1, None
    for _, row in each_row(run_dir / "metrics.jsonl"):
        if row is None:
            found.torn += 1
            continue
        update = row["update"]
        found.rows += 1
        found.first = update if found.first is None else found.first
        if update > expected:
            fault("gap", f"updates {expected:,} .. {update - 1:,} are missing")
        elif update < expected:
            fault("twice", f"update {update:,} stands after {expected - 1:,}")
        odd = [k for k in ("tokens", "lr", "skipped", "applied") if not isinstance(row.get(k, 0), int | float)]
        if odd:
            fault("odd", f"update {update:,}: {odd[0]} is {row[odd[0]]!r}, not a number")
            expected = update + 1
            continue
        tokens = min(t["token_budget"], origin["tokens"] + (update - origin["update"]) * full)
        if row.get("tokens") != tokens:
            fault("tokens", f"update {update:,} has {number(row.get('tokens'))} tokens, by the contract {tokens:,}")
        lr = schedule.learning_rate(update - 1, *course, t.get("decay_fraction", 0.2))
        if not math.isclose(row.get("lr", math.nan), lr, rel_tol=1e-9):
            fault("lr", f"update {update:,} has lr {number(row.get('lr'))}, by the contract {lr:g}")
        now = row.get("skipped", 0)
        if (skipped is not None and not skipped <= now <= skipped + 1) or row.get(
            "applied", update - now
        ) != update - now:
            fault("skips", f"update {update:,}: the counts of applied and skipped updates do not add up")
        if now > (skipped if skipped is not None else now if origin["update"] else 0):
            found.dropped.append(update)
        expected, skipped, found.last = update + 1, now, row
        if update in wanted:
            found.at[update] = row
    found.faults = [
        f"{text}{f', and {n - 1:,} more like it' if n > 1 else ''}"
        for text, n in zip(found.faults, counts.values(), strict=True)
    ]
    return found


def metrics_findings(found: Metrics, steps: list[rundir.Checkpoint]) -> Iterator[Finding]:
    """What `read_metrics` found, and whether the checkpoints agree with it."""
    faults = list(found.faults)
    for ckpt in steps:
        update = ckpt.step["update"]
        row = found.at.get(update)
        if row is None:
            if found.last is None or update > found.last["update"]:
                end = f"end at update {found.last['update']:,}" if found.last else "are missing"
                faults.append(f"rows {end}, but there is {ckpt.dir.name}")
                break
            continue  # a gap, told already; or the origin of a branch
        for key in ("tokens", "skipped"):
            if row.get(key) != ckpt.step[key]:
                faults.append(f"update {update:,} has {key} {number(row.get(key))}, {ckpt.dir.name} {ckpt.step[key]:,}")
    if found.torn:
        text = f"{found.torn} line(s) are cut short: being written, or by a crash, and the next resume mends it"
        yield "note", "metrics", text
    for fault in faults:
        yield "FAIL", "metrics", f"{fault}; restore metrics.jsonl from a copy, the checkpoints don't need it"
    if not faults and found.last is None:
        yield "note", "metrics", "no row yet"
    elif not faults:
        last = found.last
        words = (
            f"{found.rows:,} rows, each update {found.first:,} .. {last['update']:,} once, rates and tokens as planned"
        )
        yield "pass", "metrics", f"{words}; {last['tokens']:,} tokens, {last.get('skipped', 0):,} skipped"


# ---- how it ended --------------------------------------------------------------------------------------------------


def ending(run_dir: Path, run: dict[str, Any], newest: rundir.Checkpoint | None, found: Metrics) -> Iterator[Finding]:
    """The receipt against the records, or whether the run is alive without one. `newest` has been verified."""
    t = run["training"]
    if (run_dir / "DONE.json").is_file():
        receipt = durable.read_json(run_dir / "DONE.json")
        facts = {"update": t["updates"], "tokens": t["token_budget"]}
        if found.last is not None:
            facts["skipped"] = found.last.get("skipped", 0)
        faults = [
            f"DONE.json has {k} {number(receipt.get(k))}, the run {number(v)}"
            for k, v in facts.items()
            if receipt.get(k) != v
        ]
        if newest is None or newest.step["update"] != t["updates"]:
            faults.append(f"step_{t['updates']} is not there in good order, so its digest can't be compared")
        elif receipt.get("digest") != rundir.digest(newest):
            faults.append(f"the digest of {newest.dir.name} is not that of DONE.json")
        for fault in faults:
            yield "FAIL", "receipt", f"{fault}; restore the run from a copy"
        if not faults:
            loss = receipt.get("val_loss")
            words = f"{t['updates']:,} updates, {t['token_budget']:,} tokens"
            words += f", held-out loss {loss:.4f}" if loss is not None else ""
            digest = f"digest {receipt['digest'][:12]} recomputed from {newest.dir.name}"
            yield "pass", "receipt", f"DONE.json: finished, {words}, {digest}"
        if receipt.get("data_verified") is False:
            yield "note", "receipt", "the data's hashes were not all compared during the run; python check.py data does"
    elif (run_dir / "STOPPED.json").is_file():
        receipt = durable.read_json(run_dir / "STOPPED.json")
        update = receipt.get("update")
        if newest is None and update == (run.get("origin") or {"update": 0})["update"]:
            yield "note", "receipt", f"STOPPED.json: stopped by {receipt.get('by')} before the first update"
        elif newest is None or newest.step["update"] != update:
            there = newest.dir.name if newest else "no whole checkpoint"
            yield "FAIL", "receipt", f"STOPPED.json is of update {number(update)}, there is {there}; restore it"
        else:
            text = f"STOPPED.json: stopped by {receipt.get('by')} after update {update:,} of {t['updates']:,}"
            yield "pass", "receipt", f"{text}; --resume auto goes on"
    else:
        yield "note", "receipt", f"neither DONE.json nor STOPPED.json: {alive(run_dir)}"
        if newest is not None:
            yield "note", "receipt", f"a resume would go on from {newest.dir.name} of {t['updates']:,} updates"


def alive(run_dir: Path) -> str:
    """Whether the writer of a run without a receipt lives; watches its heartbeat, for 12 s where it doesn't beat."""
    try:
        writer = durable.read_json(run_dir / ".writer.json")
    except InputError:
        return "its last attempt ended in good order, but not by its own will; its console has the reason"
    host, pid = writer.get("host"), writer.get("pid")
    name = f"attempt {writer.get('attempt')}, pid {pid} on {host}, since {writer.get('started')}"
    if host == host_name() and isinstance(pid, int):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return f"dead ({name})"
        except PermissionError:
            pass  # another user's
    heart = run_dir / ".heartbeat"
    first, deadline = pulse(heart), time.monotonic() + lock.HOLDER_SILENT_S
    while time.monotonic() < deadline:
        if pulse(heart) != first:
            return f"running ({name})"
        time.sleep(0.25)
    return f"dead or stopped, no heartbeat for {lock.HOLDER_SILENT_S:.0f} s ({name})"


def pulse(heart: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return heart.read_bytes()
    return None
