"""How bench.py measures: doors and the plain loop as processes of their own, sides in alternation, medians of rounds,
and what hardware and versions it was. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fourscale import __version__
from fourscale.cli import Count, InputError, MaybeCount, MaybeText, RunFailed, Texts, flag, say
from fourscale.config import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("train", "memory", "loader", "checkpoint", "sample", "prepare", "startup", "scaling", "learn")
PACKAGES = ("torch", "numpy", "tiktoken", "tokenizers", "datasets", "transformers")
# Shapes that sections measure where no flag names one: width, layers, heads, context, ids, windows a micro-batch. Those
# of GPT-2 are padded as nanoGPT has them, so that neither side has to cut the padding off.
SMALL = {"d_model": 128, "n_layers": 4, "n_heads": 4, "ctx": 64, "vocab_size": 65, "local_bsz": 12}
MEDIUM = {"d_model": 384, "n_layers": 6, "n_heads": 6, "ctx": 256, "vocab_size": 65, "local_bsz": 8}
GPT2 = {"d_model": 768, "n_layers": 12, "n_heads": 12, "ctx": 1024, "vocab_size": 50_304, "local_bsz": 4}


@dataclass
class BenchConfig:
    """Measure speed and memory against a plain loop, in alternation: the figures that the README quotes."""

    what: Texts = ("train",)
    """train, memory, loader, checkpoint, sample, prepare, startup, scaling, learn, or all; several by commas"""
    json: Path | None = None
    """also write the figures to this file, with hardware, versions and command"""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    local_bsz: MaybeCount = None
    """windows per rank and micro-batch"""
    grad_accum: Count = 1
    """micro-batches per update"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """of both sides (auto: bf16 on cuda, on a CPU what the section compares)"""
    compile: bool = False
    """torch.compile: ours block by block, the plain loop's whole model"""
    act_ckpt: Literal["none", "block", "selective"] = "none"
    """activation checkpointing of ours"""
    ranks: MaybeCount = None
    """processes under torchrun (default: what the section compares)"""
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """of several ranks"""
    alone: bool = False
    """train: ours without the plain loop, as for a model that it can't hold"""

    text: MaybeText = None
    """learn: a text file to learn, by characters (default: Python's standard library)"""
    seeds: Annotated[tuple[Count, ...], tyro.conf.arg(help_behavior_hint="")] = (0, 1, 2)
    """learn: of weights and order, a run of each side for each; others than those that the recipes were tuned on"""
    rounds: MaybeCount = None
    """alternations of the two sides; medians of their ratios are told (default: the section's own)"""
    updates: MaybeCount = None
    """updates a round that are measured, after as many as it takes to be warm (default: the section's own)"""
    quick: bool = False
    """small shapes and one round: shows that everything works, figures mean nothing"""
    scratch: Path | None = None
    """directory for data and runs, gone afterwards (default: the system's temporary one); the disk that is measured"""

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        if unknown := [name for name in self.sections() if name not in SECTIONS]:
            raise InputError(f"--what {unknown[0]}: the sections are {', '.join(SECTIONS)}, or all")
        for name in ("local_bsz", "grad_accum", "ranks", "rounds", "updates"):
            if getattr(self, name) == 0:
                raise InputError(f"{flag(name)} 0: must be at least 1")
        for name in ("json", "scratch"):
            path = getattr(self, name)
            if path is not None and not path.resolve().parent.is_dir():
                raise InputError(f"{flag(name)} {path}: no such directory to write to; make it first")
        if self.text is not None and not Path(self.text).is_file():
            raise InputError(f"--text {self.text}: no such file; name a text of a megabyte or more")

    def sections(self) -> list[str]:
        """The sections of --what, in order."""
        names = [name.strip() for text in self.what for name in text.split(",")]
        return list(SECTIONS) if names == ["all"] else names


def provenance(cfg: BenchConfig) -> dict[str, Any]:
    """When, where and with what these figures were measured."""
    versions = {"fourscale": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    with contextlib.suppress(OSError):
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
        raise failed(argv, out.returncode, out.stderr.strip() or out.stdout.strip())
    return out.stdout


def failed(argv: Sequence[str | Path], code: int, said: str) -> RunFailed:
    """What became of a command, by the line of its words that tells most."""
    lines = (said or "no word").splitlines()
    # torchrun's own lines come last, and say less than the rank that failed.
    raised = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b")
    telling = [line for line in lines if line.startswith("error: ")] or [line for line in lines if raised.match(line)]
    last = (telling or lines)[-1].removeprefix("error: ")
    return RunFailed(f"bench.py: {shlex.join(str(a) for a in argv[:3])} ... ended with {code}: {last}")


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


def train_unsaved(ckpt_dir: Path, flags: dict[str, Any], env: dict[str, str] | None = None) -> list[dict]:
    """As `train` on one rank, for `flags` with steps, but ended before the checkpoint that every run ends with: that of
    1.3B takes longer than what is measured. `ckpt_dir` is gone afterwards."""
    argv = [sys.executable, ROOT / "train.py", "--ckpt-dir", ckpt_dir, *flags_of(flags)]
    metrics, log = ckpt_dir / "metrics.jsonl", ckpt_dir.with_suffix(".log")
    with log.open("w+") as words:
        process = subprocess.Popen([str(a) for a in argv], env=os.environ | (env or {}), stdout=words, stderr=words)
        try:
            while process.poll() is None:
                if metrics.exists() and metrics.read_text().count("\n") >= flags["steps"]:
                    break
                time.sleep(0.1)
            if process.returncode:
                raise failed(argv, process.returncode, log.read_text().strip())
        finally:
            process.kill()
            process.wait()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    shutil.rmtree(ckpt_dir)
    return rows


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
    """`default` with what the flags say over it; --quick leaves it."""
    if cfg.quick:
        return default
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
    median = round(statistics.median(values), digits)
    return {"median": median, "least": min(values), "most": max(values), "rounds": values}


def table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows in columns, the first row above a rule."""
    text = [[str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    for i, row in enumerate(text):
        say("  ".join(c.ljust(w) if j == 0 else c.rjust(w) for j, (c, w) in enumerate(zip(row, widths, strict=True))))
        if i == 0:
            say("  ".join("-" * w for w in widths))
