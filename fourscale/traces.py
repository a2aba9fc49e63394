"""What a Chrome trace of torch.profiler says of a run's updates: time by phase, collectives, their bytes. Imports no
torch."""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fourscale.costs import Layout, Wire

MARK = "phase: "  # before the names of the ranges that train.py's loop is cut into

# In the order in which an update has them. A range of any other name counts as the rest.
PHASES = {
    "data wait": "for the batch that is read beside the update before",
    "host to device": "copies of the batch, where there are two memories",
    "forward": "embedding and blocks",
    "head + loss": "final norm, head, loss, and what of their gradient is computed there",
    "backward": "of all micro-batches",
    "collectives": "under way while nothing is computed, with waiting for other ranks",
    "clip": "norm, clipping, the guard",
    "optimizer": "its step",
    "eval": "held-out loss and sample, where they fell among these updates",
    "save": "what checkpoints held up, where they fell among these updates",
    "idle": "the device waits for the host",
    "rest": "the update's message, metrics, all else",
}
SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "reduce": 1, "all_to_all": 1}
BYTES = {
    **{"float": 4, "double": 8, "int": 4, "long int": 8, "long": 8, "short": 2, "char": 1, "byte": 1, "bool": 1},
    **{"half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "unsigned char": 1, "signed char": 1},
}
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Collective:
    """A call of one: kind (a key of SENT), phase in which it was called, bytes of the whole tensor - all ranks' parts
    of a gather or scatter, this rank's of an exchange - and ranks of its group, None where none records them."""

    kind: str
    phase: str
    size: int
    group: int | None


@dataclass(frozen=True)
class Profile:
    """Of one update, the mean of those in a trace, in ms."""

    updates: int
    phases: dict[str, float]  # by PHASES; on a GPU the device's time, by the phase that launched it. They sum to `ms`
    host: dict[str, float]  # on a GPU: where the host was meanwhile
    ms: float
    in_flight: float  # some collective was under way, hidden behind computing or not
    collectives: tuple[Collective, ...]  # of all updates


def read(trace: dict[str, Any], updates: int) -> Profile:
    """The profile of `updates` updates whose ranges, named MARK + phase, stand in a trace as export_chrome_trace writes
    it, with record_shapes. Raises ValueError where it holds none.

    On a CPU a collective is exposed while gloo's threads are at it and the training thread is in no operator. On a GPU
    a kernel counts for the phase in which the host launched it, whichever thread did (the backward has its own); where
    kernels overlap, the earlier one has the time, computing before NCCL's.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    marks = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(MARK), e["tid"])
        for e in events
        if e["name"].startswith(MARK) and e.get("cat") == "user_annotation"
    )
    if not marks:
        raise ValueError("no update in it")
    began, ended, thread = marks[0][0], marks[-1][1], marks[0][3]
    starts = [m[0] for m in marks]

    def phase_at(ts: float) -> str:
        name = marks[max(0, bisect.bisect_right(starts, ts) - 1)][2]
        return name if name in PHASES else "rest"

    host: Counter[str] = Counter()
    for first, last, name, _ in marks:
        host[name if name in PHASES else "rest"] += last - first
    host["rest"] += ended - began - sum(host.values())  # between two ranges
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        phases, flying, ended = _on_device(kernels, events, phase_at, began, ended)
    else:
        phases, flying = _on_host(events, marks, host, thread)
    scale = 1e-3 / updates  # a trace counts in microseconds
    calls = tuple(c for c in _collectives(events, phase_at) if c.size)
    return Profile(
        updates,
        {name: phases[name] * scale for name in PHASES if phases[name]},
        {name: host[name] * scale for name in PHASES if host[name]} if kernels else {},
        (ended - began) * scale,
        _length(flying) * scale,
        calls,
    )


# ---- time ----------------------------------------------------------------------------------------------------------


def _on_device(
    kernels: list[dict], events: list[dict], phase_at: Any, began: float, ended: float
) -> tuple[Counter[str], Spans, float]:
    """Phases of a GPU's time, when NCCL was at work, and when its last kernel ended."""
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    phases: Counter[str] = Counter()
    wire, busy, cursor = [], [], began
    for e in sorted(kernels, key=lambda e: e["ts"]):
        first, last = max(e["ts"], began), e["ts"] + e["dur"]
        if last <= began:
            continue
        if e["name"].startswith("nccl"):
            wire.append((first, last))
            continue
        busy.append((first, last))
        if last <= (first := max(first, cursor)):
            continue
        cursor = last
        launched = launches.get(e.get("args", {}).get("correlation"), first)
        phases["host to device" if e["name"].startswith("Memcpy HtoD") else phase_at(launched)] += last - first
    flying = _union(wire)
    phases["collectives"] = _length(_without(flying, _union(busy)))
    ended = max([ended, cursor, *(last for _, last in flying)])
    phases["idle"] = max(0.0, ended - began - sum(phases.values()))
    return phases, flying, ended


def _on_host(events: list[dict], marks: list[tuple], host: Counter[str], thread: int) -> tuple[Counter[str], Spans]:
    """Phases of the training thread's time, and when gloo was at work."""
    ops = sorted(
        (e for e in events if e.get("cat") == "cpu_op" and e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])
    )
    busy = []
    for e, following in zip(ops, [*ops[1:], None], strict=True):
        inner = following is not None and following["ts"] < e["ts"] + e["dur"]
        if not inner and "c10d" not in e["name"]:  # an operator that calls no other
            busy.append((e["ts"], e["ts"] + e["dur"]))
    flying = _union((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("gloo:"))
    flying = [(max(a, marks[0][0]), min(b, marks[-1][1])) for a, b in flying if b > marks[0][0] and a < marks[-1][1]]
    exposed = _without(flying, _union(busy))
    phases = Counter(host)
    within = 0.0
    for first, last, name, _ in marks:
        # `exposed` is in order: only what begins before this range ends can lie in it.
        part = sum(min(b, last) - max(a, first) for a, b in _touching(exposed, first, last))
        phases[name if name in PHASES else "rest"] -= part
        within += part
    phases["collectives"] = within
    return phases, flying


def _union(spans: Iterable[tuple[float, float]]) -> Spans:
    out: Spans = []
    for first, last in sorted(spans):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return out


def _touching(spans: Spans, first: float, last: float) -> Spans:
    """Those of disjoint spans in order that overlap (first, last)."""
    i = bisect.bisect_right(spans, (first, math.inf))
    i = i - 1 if i and spans[i - 1][1] > first else i
    return spans[i : bisect.bisect_left(spans, (last, -math.inf))]


def _without(spans: Spans, others: Spans) -> Spans:
    """What of disjoint spans in order no other covers."""
    out: Spans = []
    for first, last in spans:
        for a, b in _touching(others, first, last):
            if a > first:
                out.append((first, a))
            first = max(first, b)
        if last > first:
            out.append((first, last))
    return out


def _length(spans: Spans) -> float:
    return sum(b - a for a, b in spans)


# ---- collectives ---------------------------------------------------------------------------------------------------


def _kind(name: str) -> str | None:
    bare = name.lower().removeprefix("c10d::").replace("_", "")
    for kind in SENT:  # "allreduce" before "reduce"
        if bare.startswith(kind.replace("_", "")):
            return kind
    return None


def _numbers(dims: list) -> int:
    """Numbers of a tensor's shape, or of a list of shapes."""
    return sum(map(_numbers, dims)) if dims and isinstance(dims[0], list) else math.prod(dims)


def _collectives(events: list[dict], phase_at: Any) -> list[Collective]:
    """NCCL records group, type and sizes of its own. Of gloo's there are the operators' shapes, and in the events of
    its threads the type of the numbers."""
    nccl = [e for e in events if e["name"] == "record_param_comms" and "Collective name" in e.get("args", {})]
    types: dict[int, int] = {}
    for e in events:
        if e["name"].startswith("gloo:") and (dims := e["args"].get("Input Dims")):
            types[_numbers(dims[0])] = BYTES.get(e["args"]["Input type"][0].lower(), 4)
    out, recorded = [], {}
    for e in nccl:
        args = e["args"]
        recorded.setdefault(e["tid"], []).append(e["ts"])
        if (kind := _kind(args["Collective name"])) is not None:
            numbers = max(int(args["In msg nelems"]), int(args["Out msg nelems"]))
            size = numbers * BYTES.get(str(args.get("dtype", "float")).lower(), 4)
            out.append(Collective(kind, phase_at(e["ts"]), size, int(args["Group size"])))
    for stamps in recorded.values():
        stamps.sort()
    for e in events:
        if not e["name"].startswith("c10d::") or (kind := _kind(e["name"])) is None:
            continue
        stamps = recorded.get(e["tid"], [])
        if bisect.bisect_left(stamps, e["ts"]) < bisect.bisect_right(stamps, e["ts"] + e["dur"]):
            continue  # NCCL told of it within
        numbers = [_numbers(dims) for dims in e["args"].get("Input Dims", []) if dims]
        if not numbers:
            continue
        group, whole = None, numbers[0]
        if kind in ("all_gather", "reduce_scatter") and len(numbers) > 1:
            whole, part = max(numbers[:2]), min(numbers[:2])
            group = round(whole / part) if part else None
            out.append(Collective(kind, phase_at(e["ts"]), whole * _width(e, types, part, whole), group))
            continue
        if kind == "all_to_all" and len(numbers) > 1:
            whole = numbers[1]  # what this rank holds of it before
            splits = re.findall(r"\d+", e["args"]["Concrete Inputs"][4])
            if len(splits) > 1:  # uneven: as much as if it were even, by what leaves rank 0, which keeps the first
                group = len(splits)
                whole = round(sum(map(int, splits[1:])) * group / (group - 1))
        out.append(Collective(kind, phase_at(e["ts"]), whole * _width(e, types, *numbers), group))
    return out


def _width(event: dict, types: dict[int, int], *numbers: int) -> int:
    """Bytes of a number: the operator's own word where it takes tensors, else that of gloo's thread."""
    told = BYTES.get(str(event["args"]["Input type"][0]).lower())
    return told or next((types[n] for n in numbers if n in types), 4)


def wire(profile: Profile, layout: Layout) -> tuple[Wire, int, dict[str, int]]:
    """(Bytes that this rank sent in an update as rings send them, in the columns of costs.wire; those of the small
    messages, which that leaves out: norms, losses, counts; calls an update by kind and column).

    Gathers and scatters tell their group by their sizes; where gloo doesn't tell it for a sum, a sum of gradients is
    over the copies and any other over all ranks.
    """
    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    columns = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce", "broadcast": "reduce"}
    for c in profile.collectives:
        column = "other"
        if c.phase == "optimizer":
            column = "muon"
        elif c.phase in ("forward", "head + loss", "backward"):
            column = columns.get(c.kind, "other")
        ranks = c.group or (layout.copies if column == "reduce" else layout.world)
        sent[column] += SENT[c.kind] * (ranks - 1) / ranks * c.size
        calls[f"{column} {c.kind}"] += 1
    each = {name: round(sent[name] / profile.updates) for name in ("gather", "scatter", "reduce", "muon", "other")}
    other = each.pop("other")
    return Wire(**each), other, {name: round(n / profile.updates) for name, n in sorted(calls.items())}


# ---- in words ------------------------------------------------------------------------------------------------------


def lines(profile: Profile, layout: Layout, theory: Wire) -> list[str]:
    """The table by phase, and what crossed the wire beside what --plan says."""
    n, device = profile.updates, bool(profile.host)
    of = f"mean of {n} updates" if n > 1 else "1 update"
    out = [f"{f'an update ({of})':<28}{'ms':>11}{'share':>8}" + (f"{'host ms':>11}" if device else "")]
    for name, what in PHASES.items():
        ms, host = profile.phases.get(name, 0.0), profile.host.get(name, 0.0)
        if ms or host:
            beside = f"{host:>11.3f}" if device else ""
            out.append(f"  {name:<26}{ms:>11.3f}{ms / profile.ms:>8.1%}{beside}  {what}")
    out.append(f"  {'all':<26}{profile.ms:>11.3f}{1:>8.1%}")
    if device:
        out.append("  ms: of the GPU, by the phase that launched the kernels; host ms: where the host was meanwhile")
    if layout.world == 1:
        return out
    shown = profile.phases.get("collectives", 0.0)
    hidden = max(0.0, profile.in_flight - shown)
    out.append(f"  collectives under way: {profile.in_flight:.3f} ms, {hidden:.3f} of them behind computing")
    found, other, calls = wire(profile, layout)
    out += ["", f"{'sent by this rank an update':<28}{'MiB':>11}{'--plan':>10}{'ratio':>8}"]
    for column in ("gather", "scatter", "reduce", "muon", "total"):
        real, said = getattr(found, column), getattr(theory, column)
        if real or said:
            ratio = f"{real / said:>8.3f}" if said else f"{'n/a':>8}"
            out.append(f"  {column:<26}{real / 2**20:>11.3f}{said / 2**20:>10.3f}{ratio}")
    out.append(f"  small messages beside these: {other:,} bytes")
    out.append("  calls: " + ", ".join(f"{n} {name}" for name, n in calls.items()))
    return out
