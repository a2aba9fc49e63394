"""Train runs to their end, judge them from their first 10%, 25% and 50%, and count how often that was right.

    python tests/verdicts.py train --text tinyshakespeare.txt --out /tmp/verdicts      # about 20 CPU-minutes
    python tests/verdicts.py score /tmp/verdicts --store tests/verdict_runs.jsonl.gz   # tables, as markdown
    python tests/verdicts.py score tests/verdict_runs.jsonl.gz                         # the same again

None of these runs served to set verdict.py's thresholds: other models, rates, batches, seeds, tokenizers, and other
data but for the text of one group, read by another tokenizer. The target is fixed by a rule that does not look at the
run that is scored: the final held-out loss of its group's reference run (not scored itself; the middle rate, another
seed of weights and order) plus 3%.

Truth is the end of a run: `beat` its target; `missed` it; `broken`, that is, it ended without a finite loss, by dropped
updates, above the unigram level (and by less than 1% lower than a quarter before), or above its own earlier minimum by
more than 3% in training and held-out loss alike.
Of runs with bad data it is what was done to them. Right is healthy for beat, stalled for missed and for shuffled
targets, diverging for broken, suspicious for targets that aren't shifted, a constant and a repeated text.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fourscale import curves
from fourscale.forecast import until
from fourscale.verdict import Course, Curve, Judgement, judge

ROOT = Path(__file__).resolve().parent.parent
FRACTIONS = (0.1, 0.25, 0.5)
MARGIN = 1.03
VERDICTS = ("healthy", "stalled", "diverging", "suspicious", "undecided")
RIGHT = {
    **{"beat": "healthy", "missed": "stalled", "broken": "diverging"},
    **{"unshifted": "suspicious", "constant": "suspicious", "repeated": "suspicious", "shuffled": "stalled"},
}
GPT2 = (*("--arch", "gpt2", "--d-model", 80, "--n-layers", 3, "--n-heads", 5, "--ctx", 96),)
MODERN = (*("--arch", "modern", "--d-model", 96, "--n-layers", 2, "--n-heads", 6, "--n-kv-heads", 2, "--ctx", 80),)
COMMON = ("--eval-every", 25, "--eval-tokens", 8_000, "--ckpt-every", 100, "--keep", 1, "--log-every", 25)


@dataclass(frozen=True)
class Run:
    """data: directory below OUT. fault: how its targets are broken, or what its data are ('' for nothing)."""

    name: str
    group: str  # whose reference run gives the target
    data: str
    flags: tuple[Any, ...]
    fault: str = ""


def runs() -> list[Run]:
    """References first: they are trained, but not scored."""

    def of(group: str, data: str, shape: tuple[Any, ...], batch: int, steps: int, warmup: int):
        def make(name: str, lr: float, *more: object, fault: str = "", seed: int = 11, **other: Any) -> Run:
            length = {"--local-bsz": batch, "--steps": steps, "--warmup": warmup, "--seed": seed, "--data-seed": seed}
            length |= {f"--{k.replace('_', '-')}": v for k, v in other.items() if k != "data"}
            flags = (*shape, "--lr", lr, *(x for pair in length.items() for x in pair), *more)
            return Run(f"{group}-{name}", group, other.get("data", data), flags, fault)

        return make

    a, b = of("bytes", "bytes", GPT2, 20, 360, 18), of("bpe", "bpe", MODERN, 24, 360, 20)
    return [
        a("reference", 4e-3, seed=5),
        b("reference", 4e-3, seed=5),
        a("low", 1.5e-4),
        a("lowish", 7e-4),
        a("right", 4e-3),
        a("right-again", 6e-3, seed=12),
        a("edge", 2.5e-2),
        a("high", 1.5e-1),
        a("higher", 6e-1),
        a("no-warmup", 8e-3, warmup=0),
        a("wsd", 5e-3, schedule="wsd"),
        a("constant", 4e-3, schedule="constant"),
        a("constant-high", 8e-2, schedule="constant"),
        a("constant-higher", 8e-1, schedule="constant"),
        a("small-batch", 4e-3, local_bsz=3),
        a("unshifted", 4e-3, fault="unshifted"),
        a("shuffled", 4e-3, fault="shuffled"),
        b("low", 1e-4),
        b("lowish", 8e-4),
        b("right", 4e-3),
        b("right-again", 7e-3, seed=12),
        b("edge", 3e-2),
        b("high", 2e-1),
        b("wsd", 6e-3, schedule="wsd"),
        b("constant-high", 6e-1, schedule="constant"),
        b("small-batch-high", 5e-2, local_bsz=2),
        b("large-batch", 6e-3, local_bsz=64, steps=200, warmup=10),
        b("unshifted", 2e-3, "--no-tie", fault="unshifted"),
        b("shuffled", 2e-3, fault="shuffled"),
        b("constant-shard", 4e-3, fault="constant", data="constant", steps=200, warmup=10),
        a("repeated-text", 4e-3, fault="repeated", data="repeated", steps=200, warmup=10),
    ]


# ---- training ------------------------------------------------------------------------------------------------------


def faulty(kind: str, argv: list[str]) -> None:
    """train.py with its targets broken, in training and in the held-out loss alike."""
    import torch

    import train
    from fourscale.model import GPT, IGNORE

    forward = GPT.forward
    draws = torch.Generator().manual_seed(0)

    def broken(self: GPT, idx: torch.Tensor, targets: torch.Tensor | None = None, *args: Any, **kwargs: Any):
        if targets is not None and kind == "unshifted":
            targets = torch.where(targets == IGNORE, targets, idx)
        elif targets is not None:
            flat = targets.flatten()
            targets = flat[torch.randperm(len(flat), generator=draws)].view_as(targets)
        return forward(self, idx, targets, *args, **kwargs)

    GPT.forward = broken
    sys.argv = ["train.py", *argv]
    train.main()


def prepare(text: list[Path], out: Path, environment: dict[str, str]) -> None:
    source = text[0].read_text(encoding="utf-8")
    made = out / "texts"
    made.mkdir(parents=True, exist_ok=True)
    (made / "constant.txt").write_text("\n\n".join("e" * (3_900 + i) for i in range(60)), encoding="utf-8")
    again = source[20_000:20_700] * 6
    (made / "repeated.txt").write_text("\n\n".join(f"{i}\n{again}" for i in range(120)), encoding="utf-8")
    sources = {
        "bytes": ("stdlib", "--tokenizer", "byte", "--max-docs", 120),
        "bpe": (*text[:1], *(x for t in text[1:] for x in ("--dataset", t)), "--tokenizer", "bpe:512"),
        "constant": (made / "constant.txt", "--tokenizer", "byte"),
        "repeated": (made / "repeated.txt", "--tokenizer", "byte"),
    }
    for name, flags in sources.items():
        if not (out / name / "manifest.json").is_file():
            command = [sys.executable, ROOT / "prepare.py", "--dataset", *flags, "--out", out / name]
            subprocess.run([*map(str, command), "--val-fraction", "0.08"], check=True, env=environment)


def train_all(text: list[Path], out: Path, jobs: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    prepare(text, out, environment)

    def one(run: Run) -> None:
        home = out / "runs" / run.name
        if (home / "DONE.json").is_file() or (home / "ended.json").is_file():
            return
        flags = [*run.flags, *COMMON, "--data", out / run.data, "--ckpt-dir", home, "--backend", "gloo"]
        by = [ROOT / "train.py"]
        if run.fault in ("unshifted", "shuffled"):
            by = [Path(__file__), "faulty", run.fault]
        command = [sys.executable, *by, *flags, "--resume", "auto", "--sample-tokens", 0]
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
        if done.returncode == 1 and "updates in a row were dropped" in done.stderr:
            (home / "ended.json").write_text(json.dumps({"error": done.stderr.strip().splitlines()[-1]}))
        elif done.returncode:
            raise SystemExit(f"{run.name}: exit {done.returncode}\n{done.stderr}")
        print(f"{run.name}: {(done.stdout.strip().splitlines() or done.stderr.strip().splitlines())[-1]}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, runs()))


# ---- scoring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """A run to its end: its target, and its fault or what came of it (a key of RIGHT)."""

    name: str
    curve: Curve
    course: Course
    target: float
    truth: str


def truth(curve: Curve, course: Course, target: float, ended: bool) -> str:
    """What came of a run: beat, missed or broken. ended: it was given up before its last update."""
    if ended or not len(curve.val_loss) or not np.isfinite([curve.val_loss[-1], curve.loss[-1]]).all():
        return "broken"
    final = float(curve.val_loss[-1])
    tenths = [float(np.nanmedian(part)) for part in np.array_split(curve.loss, 10)]
    risen = final > 1.03 * np.nanmin(curve.val_loss) and tenths[-1] > 1.03 * min(tenths)
    stuck = final > 0.99 * curve.val_loss[len(curve.val_loss) * 3 // 4 - 1]
    if risen or (stuck and course.unigram_nats is not None and final > course.unigram_nats):
        return "broken"
    return "beat" if final <= target else "missed"


def rounded(value: float, digits: int) -> float | None:
    return float(f"{value:.{digits}g}") if np.isfinite(value) else None


def trained(out: Path) -> list[Scored]:
    """The runs below OUT, with curves of few digits: what is scored is what is stored."""
    records = {run.name: curves.read(out / "runs" / run.name) for run in runs()}
    targets = {r.group: MARGIN * float(records[r.name].curve.val_loss[-1]) for r in runs() if "reference" in r.name}
    scored = []
    for run in runs():
        if "reference" in run.name:
            continue
        record, target = records[run.name], rounded(targets[run.group], 5)
        curve = unpacked(packed(record.curve))
        ended = (out / "runs" / run.name / "ended.json").is_file()
        what = run.fault or truth(curve, record.course, target, ended)
        scored.append(Scored(run.name, curve, record.course, target, what))
    return scored


def packed(curve: Curve) -> dict[str, Any]:
    """A curve as JSON; updates follow each other from 1."""
    assert (curve.update == np.arange(1, len(curve.update) + 1)).all()
    return {
        "tokens": np.diff(curve.tokens, prepend=0).tolist(),
        "loss": [rounded(x, 5) for x in curve.loss],
        "lr": [rounded(x, 4) for x in curve.lr],
        "norm": [rounded(x, 3) for x in curve.norm],
        "skipped": np.flatnonzero(curve.skipped).tolist(),
        "val_update": curve.val_update.tolist(),
        "val_loss": [rounded(x, 5) for x in curve.val_loss],
    }


def unpacked(table: dict[str, Any]) -> Curve:
    n = len(table["loss"])
    real = {k: np.array([np.nan if x is None else x for x in table[k]], float) for k in ("loss", "lr", "norm")}
    return Curve(
        update=np.arange(1, n + 1),
        tokens=np.cumsum(table["tokens"]),
        skipped=np.isin(np.arange(n), table["skipped"]),
        val_update=np.array(table["val_update"], np.int64),
        val_loss=np.array([np.nan if x is None else x for x in table["val_loss"]], float),
        **real,
    )


def store(scored: list[Scored], path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=9) as f:
        for s in scored:
            line = {"name": s.name, "truth": s.truth, "target": s.target, "course": dataclasses.asdict(s.course)}
            f.write(json.dumps(line | packed(s.curve), separators=(",", ":")) + "\n")


def stored(path: Path) -> list[Scored]:
    with gzip.open(path, "rt", encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    return [Scored(t["name"], unpacked(t), Course(**t["course"]), t["target"], t["truth"]) for t in lines]


def judged(scored: list[Scored]) -> dict[str, list[Judgement]]:
    """Each run's judgement after each of FRACTIONS of its updates."""
    return {
        s.name: [judge(until(s.curve, round(f * s.course.updates)), s.course, s.target) for f in FRACTIONS]
        for s in scored
    }


def confusion(scored: list[Scored], verdicts: dict[str, list[Judgement]], i: int) -> Counter[tuple[str, str]]:
    """Runs by truth and verdict after the i-th of FRACTIONS."""
    return Counter((s.truth, verdicts[s.name][i].verdict) for s in scored)


def errors(scored: list[Scored], verdicts: dict[str, list[Judgement]], i: int) -> tuple[int, float, float, int]:
    """Of forecasts after the i-th of FRACTIONS, of runs with sound data and an end: how many, their median absolute
    error and median half-width in nats, and how many held the end within their 90% interval."""
    pairs = [
        (float(s.curve.val_loss[-1]), verdicts[s.name][i].forecast)
        for s in scored
        if s.truth in ("beat", "missed", "broken") and s.curve.update[-1] == s.course.updates
    ]
    known = [(end, f) for end, f in pairs if f is not None and np.isfinite(end)]
    if not known:
        return 0, math.nan, math.nan, 0
    off = float(np.median([abs(f.loss - end) for end, f in known]))
    half = float(np.median([(f.high - f.low) / 2 for _, f in known]))
    return len(known), off, half, sum(f.low <= end <= f.high for end, f in known)


def tables(scored: list[Scored]) -> str:
    """The study as markdown."""
    verdicts = judged(scored)
    out = ["| run | peak lr | target | end | truth | 10% | 25% | 50% |", "|---|---|---|---|---|---|---|---|"]
    for s in scored:
        at = " | ".join(f"**{j.verdict}**" if j.verdict != RIGHT[s.truth] else j.verdict for j in verdicts[s.name])
        end = f"{s.curve.val_loss[-1]:.3f}" if len(s.curve.val_loss) else "none"
        out.append(f"| {s.name} | {s.course.lr:.1e} | {s.target:.3f} | {end} | {s.truth} | {at} |")
    for i, fraction in enumerate(FRACTIONS):
        counts = confusion(scored, verdicts, i)
        out += ["", f"| after {fraction:.0%}: truth | {' | '.join(VERDICTS)} |", f"|---|{'---|' * len(VERDICTS)}"]
        for what in dict.fromkeys(s.truth for s in scored):
            out.append(f"| {what} | {' | '.join(str(counts[what, v] or '') for v in VERDICTS)} |")
    head = "right | wrong | undecided | beat, called hopeless | not beaten, called healthy | forecasts | median error"
    out += ["", f"| after | {head} | median half-width | 90% interval held |", f"|---|{'---|' * 9}"]
    for i, fraction in enumerate(FRACTIONS):
        counts = confusion(scored, verdicts, i)
        right = sum(c for (what, v), c in counts.items() if RIGHT[what] == v)
        unsure = sum(c for (_, v), c in counts.items() if v == "undecided")
        gloomy = sum(c for (what, v), c in counts.items() if what == "beat" and v not in ("healthy", "undecided"))
        rosy = sum(c for (what, v), c in counts.items() if what != "beat" and v == "healthy")
        n, off, half, held = errors(scored, verdicts, i)
        out.append(
            f"| {fraction:.0%} | {right} of {len(scored)} | {len(scored) - right - unsure} | {unsure} | {gloomy} "
            f"| {rosy} | {n} | {off:.3f} | {half:.3f} | {held} of {n} |"
        )
    return "\n".join(out)


def main() -> None:
    if sys.argv[1:2] == ["faulty"]:
        return faulty(sys.argv[2], sys.argv[3:])
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = flags.add_subparsers(dest="way", required=True)
    way = ways.add_parser("train", help="train all runs, skipping what is finished")
    way.add_argument("--text", type=Path, nargs="+", required=True, help="a megabyte of text or more")
    way.add_argument("--out", type=Path, required=True)
    way.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    way = ways.add_parser("score", help="judge and count")
    way.add_argument("runs", type=Path, help="OUT of train, or what --store wrote")
    way.add_argument("--store", type=Path, help="write the curves here, gzipped, and the tables beside them as .md")
    given = flags.parse_args()
    if given.way == "train":
        return train_all(given.text, given.out.resolve(), given.jobs)
    scored = trained(given.runs) if given.runs.is_dir() else stored(given.runs)
    told = tables(scored)
    if given.store:
        store(scored, given.store)
        given.store.with_name(f"{given.store.name.split('.')[0]}.md").write_text(told + "\n", encoding="utf-8")
    print(told)


if __name__ == "__main__":
    main()
