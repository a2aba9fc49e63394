"""Every speed and memory figure that the README quotes, measured anew: ours against a plain loop, in alternation.

    python bench.py                                        # training on this machine, against the plain loop
    python bench.py --what memory,checkpoint --json out.json
    python bench.py --what train --device cuda --d-model 768 --n-layers 12 --ctx 1024 --vocab-size 50257 --local-bsz 32
    python bench.py --what all --quick                     # does everything run here? figures mean nothing

Each section starts train.py and its neighbours as users do. Timings of a busy machine mean little: look at the ratios,
and at how they spread over the rounds.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fourscale import __version__
from fourscale.cli import RunFailed, door, parse, say
from fourscale.flags import BenchConfig

ROOT = Path(__file__).resolve().parent
PACKAGES = ("torch", "numpy", "tiktoken", "tokenizers", "datasets", "transformers")
# Shapes that sections measure where no flag names one: width, layers, heads, context, ids, windows a micro-batch.
SMALL = {"d_model": 128, "n_layers": 4, "n_heads": 4, "ctx": 64, "vocab_size": 65, "local_bsz": 12}
MEDIUM = {"d_model": 384, "n_layers": 6, "n_heads": 6, "ctx": 256, "vocab_size": 65, "local_bsz": 8}
GPT2 = {"d_model": 768, "n_layers": 12, "n_heads": 12, "ctx": 1024, "vocab_size": 50_257, "local_bsz": 4}


@door
def main() -> None:
    cfg = parse(BenchConfig)
    cfg.check()
    os.environ.pop("PYTHONSTARTUP", None)
    results: dict[str, Any] = {"format": 1, **provenance(cfg), "sections": {}}
    for name in cfg.sections():
        say(f"---- {name} ----")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fourscale-bench-", dir=cfg.scratch) as scratch:
            figures = SECTIONS[name](cfg, Path(scratch))
        results["sections"][name] = figures | {"took_s": round(time.monotonic() - started, 1)}
        if cfg.json is not None:  # after each section: a later one may be interrupted
            cfg.json.write_text(json.dumps(results, indent=1) + "\n")
    if cfg.json is not None:
        say(f"figures in {cfg.json}")


# ---- what all sections share -----------------------------------------------------------------------------------------


def provenance(cfg: BenchConfig) -> dict[str, Any]:
    """When, where and with what these figures were measured."""
    versions = {"fourscale": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    if commit.returncode == 0:
        versions["commit"] = commit.stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "bench.py", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions,
        "quick": cfg.quick,
    }


def hardware() -> dict[str, Any]:
    """The processor, how many of its cores are ours, memory, and GPUs."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about: dict[str, Any] = {"cpu": name, "cores": cores, "system": platform.platform()}
    with contextlib.suppress(OSError, ValueError):
        about["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    if gpus := gpu_names():
        about["gpus"] = gpus
    return about


def gpu_names() -> list[str]:
    """GPUs by nvidia-smi; none where there is none."""
    with contextlib.suppress(OSError):
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
        return out.stdout.split("\n")[:-1] if out.returncode == 0 else []
    return []


def run(argv: Sequence[str | Path], env: dict[str, str] | None = None) -> str:
    """Standard output of a command that must succeed; RunFailed with its last words otherwise."""
    # Every core is one process's unless a section says otherwise: torchrun would leave each rank one thread.
    out = subprocess.run([str(a) for a in argv], env=os.environ | (env or {}), capture_output=True, text=True)
    if out.returncode:
        last = (out.stderr.strip() or out.stdout.strip() or "no word").splitlines()[-1]
        raise RunFailed(f"bench.py: {shlex.join(str(a) for a in argv[:3])} ... ended with {out.returncode}: {last}")
    return out.stdout


def launcher(ranks: int) -> list[str]:
    """How train.py is started: plainly in a world of one, else by torchrun."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]


def flags_of(table: dict[str, Any]) -> list[str]:
    """{'d_model': 128, 'compile': True} as flags; None and False are left out."""
    out = []
    for key, value in table.items():
        if value is not None and value is not False:
            out += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return out


def train(ckpt_dir: Path, flags: dict[str, Any], ranks: int = 1, env: dict[str, str] | None = None) -> list[dict]:
    """Run train.py with `flags` into `ckpt_dir`; the rows of its metrics.jsonl."""
    run([*launcher(ranks), ROOT / "train.py", "--ckpt-dir", ckpt_dir, *flags_of(flags)], env)
    return [json.loads(line) for line in (ckpt_dir / "metrics.jsonl").read_text().splitlines()]


def plain(cfg: dict[str, Any], out: Path, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run the plain loop on a fourscale.plain.Plain in a process of its own; what it returns."""
    run([sys.executable, "-m", "fourscale.plain", json.dumps(cfg), out], {"PYTHONPATH": str(ROOT)} | (env or {}))
    return json.loads(out.read_text())


def random_text(directory: Path, vocab_size: int, tokens: int = 2_000_000) -> Path:
    """A directory with train.bin and val.bin as nanoGPT has them: ids by Zipf's law, the same each time."""
    import numpy as np

    directory.mkdir(parents=True, exist_ok=True)
    weights = 1 / np.arange(1, vocab_size + 1)
    draws = np.random.default_rng(0).choice(vocab_size, tokens, p=weights / weights.sum())
    for name, part in (("val", draws[: tokens // 10]), ("train", draws[tokens // 10 :])):
        part.astype("<u2").tofile(directory / f"{name}.bin")
    return directory


def shape(cfg: BenchConfig, default: dict[str, int]) -> dict[str, int]:
    """`default` with what the flags say over it."""
    given = {k: getattr(cfg.model, k) for k in default if k != "local_bsz"} | {"local_bsz": cfg.local_bsz}
    return default | {k: v for k, v in given.items() if v is not None}


def alternate(rounds: int, sides: dict[str, Callable[[int], float]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Each round: every side once, in an order that turns around, its number by name."""
    for i in range(rounds):
        names = list(sides) if i % 2 == 0 else list(sides)[::-1]
        yield i, {name: sides[name](i) for name in names}


def spread(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Median, least and most of some rounds, and the rounds."""
    values = [round(v, digits) for v in values]
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "rounds": values}


def table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows in columns, the first row above a rule."""
    text = [[str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    for i, row in enumerate(text):
        say("  ".join(c.ljust(w) if j == 0 else c.rjust(w) for j, (c, w) in enumerate(zip(row, widths, strict=True))))
        if i == 0:
            say("  ".join("-" * w for w in widths))


# ---- training ------------------------------------------------------------------------------------------------------


def section_train(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """Tokens per second of train.py and of the plain loop, on the same weights and data; their losses must agree."""
    cuda = cfg.device == "cuda" or (cfg.device == "auto" and bool(gpu_names()))
    named = any(getattr(cfg.model, k) is not None for k in MEDIUM if k != "local_bsz")
    if cuda:
        cells = [(shape(cfg, GPT2 | {"local_bsz": 32}), "bf16" if cfg.dtype == "auto" else cfg.dtype)]
    else:
        dtypes = ["fp32", "bf16"] if cfg.dtype == "auto" else [cfg.dtype]
        shapes = [MEDIUM] if named else [SMALL] if cfg.quick else [MEDIUM, SMALL]
        cells = [(shape(cfg, s), dtype) for s in shapes for dtype in dtypes]
    out: dict[str, Any] = {"cells": []}
    rows: list[list[object]] = [
        ["d, layers, ctx, batch", "ours", "plain", "ours ms", "plain ms", "ratio", "least..most"]
    ]
    for what, dtype in cells:
        cell = compare(cfg, scratch, what, dtype, "bf16" if cuda else "fp32", "cuda" if cuda else "cpu")
        out["cells"].append(cell)
        names = f"{what['d_model']}, {what['n_layers']}, {what['ctx']}, {what['local_bsz']} x {cfg.grad_accum}"
        ratio = cell["ratio"]
        ours, theirs = (f"{cell[f'{side}_ms']['median']:,.1f}" for side in ("ours", "plain"))
        rows.append([names, dtype, cell["plain_dtype"], ours, theirs, f"{ratio['median']:.3f}"])
        rows[-1].append(f"{ratio['least']:.2f}..{ratio['most']:.2f}")
        if (cell["ours_mfu"] or 0) > 0:
            say(f"MFU {100 * cell['ours_mfu']:.1f}% of one device by 6 N D, attention apart")
    table(rows)
    return out


def compare(
    cfg: BenchConfig, scratch: Path, what: dict[str, int], dtype: str, plain_dtype: str, device: str
) -> dict[str, Any]:
    """One shape, ours in `dtype` against the plain loop in `plain_dtype`: times an update and the ratio of tokens/s."""
    data = random_text(scratch / f"data{what['vocab_size']}", what["vocab_size"])
    small = what["d_model"] < 256
    updates = cfg.updates or (4 if cfg.quick else 200 if small else 12)
    every = max(1, updates // 4)
    rounds = cfg.rounds or (1 if cfg.quick else 7 if small else 5)
    ranks = cfg.ranks or 1
    common = {"grad_accum": cfg.grad_accum, "lr": 1e-3, "warmup": 1, "log_every": every}
    sides = what | common | {"updates": updates + every}
    ours_flags = what | common | {"steps": updates + every, "data": data, "data_dtype": "uint16", "dtype": dtype}
    ours_flags |= {"device": device, "compile": cfg.compile, "act_ckpt": cfg.act_ckpt, "parallel": cfg.parallel}
    ours_flags |= {"eval_every": 0, "ckpt_every": 0, "sample_tokens": 0, "verify_data": "off", "log_every": every}
    losses: dict[str, list[float]] = {}
    mfu: list[float] = []

    def ours(i: int) -> float:
        rows = train(scratch / f"ours{dtype}{what['d_model']}-{i}", ours_flags, ranks)
        losses["ours"] = [r["loss"] for r in rows]
        mfu.extend(r["mfu"] for r in rows[every:] if r.get("mfu"))
        # Rows of an interval share its pace; the first interval is warm-up.
        return statistics.median(r["ms"] for r in rows[2 * every - 1 :: every])

    def theirs(i: int) -> float:
        told = sides | {"data": str(data / "train.bin"), "device": device}
        told |= {"dtype": plain_dtype, "compile": cfg.compile and device == "cuda"}
        result = plain(told, scratch / "plain.json")
        losses["plain"] = result["losses"]
        return statistics.median(result["ms"][2:])

    pairs = [pair for _, pair in alternate(rounds, {"plain": theirs, "ours": ours})]
    apart = None
    if ranks == 1 and cfg.grad_accum == 1:  # the same batch: update 1 and the end must agree
        logged = [losses["ours"][0], *losses["ours"][every - 1 :: every]] if every > 1 else losses["ours"]
        apart = max(abs(a - b) for a, b in zip(logged, losses["plain"], strict=True))
        if apart > (0.05 if "bf16" in (dtype, plain_dtype) else 5e-3):
            raise RunFailed(f"bench.py: the two loops' losses differ by {apart:.4f}: they do not train the same model")
    return {
        **what,
        "grad_accum": cfg.grad_accum,
        "ranks": ranks,
        "device": device,
        "ours_dtype": dtype,
        "plain_dtype": plain_dtype,
        "compile": cfg.compile,
        "updates": updates,
        "ours_ms": spread([p["ours"] for p in pairs]),
        "plain_ms": spread([p["plain"] for p in pairs]),
        "ratio": spread([p["plain"] / p["ours"] * ranks for p in pairs]),
        "ours_tokens_per_s": round(
            statistics.median(1e3 * what["local_bsz"] * what["ctx"] * cfg.grad_accum * ranks / p["ours"] for p in pairs)
        ),
        "ours_mfu": round(statistics.median(mfu), 4) if mfu else None,
        "losses_apart": apart,
    }


SECTIONS: dict[str, Callable[[BenchConfig, Path], dict[str, Any]]] = {
    "train": section_train,
}

if __name__ == "__main__":
    main()
