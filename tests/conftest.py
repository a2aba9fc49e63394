"""Real processes for the tests: the doors as a user starts them, and a small corpus prepared once a session."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # tiny models on busy cores: threads that wait for each other cost more than they give

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


# Tests of one file stay together, for what they share; the longest files begin, so that no process is left with one.
LONGEST = (
    *("test_kills", "test_matrix", "test_train", "test_faults", "test_branch", "test_publish", "test_parallel"),
    *("test_slurm_train", "test_hosts", "test_health", "test_preflight", "test_launchers", "test_slurm_jobs"),
    *("test_trackers", "test_recipes", "test_budget"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def command(script: str, *args: object, nproc: int | None = None) -> list[str]:
    """The command line of a door, under torchrun on a free port if `nproc` is given."""
    launcher = [sys.executable]
    if nproc is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [*launcher, str(ROOT / script), *map(str, args)]


def environment(**extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"} | extra


def run(
    script: str, *args: object, nproc: int | None = None, code: int = 0, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a door to its end and check its exit code."""
    done = subprocess.run(
        command(script, *args, nproc=nproc),
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(),
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, f"exit {done.returncode}, not {code}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failed door printed. torchrun's own lines are not ours."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr[-4000:]
    assert "Traceback (most recent call last):\n  File" not in done.stderr.split("torch/distributed")[0]
    return lines[0]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 100,000 bytes of real text (a few modules of the standard library) as byte-level shards."""
    work = tmp_path_factory.mktemp("corpus")
    source = Path(os.__file__).parent
    names = ("argparse.py", "ast.py", "calendar.py", "csv.py", "heapq.py", "shlex.py", "statistics.py", "textwrap.py")
    for name in names:
        shutil.copy(source / name, work / f"{name}.txt")
    run("prepare.py", "--dataset", work / "*.txt", "--tokenizer", "byte", "--val-fraction", 0.1, "--out", work / "data")
    return work / "data"


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train the small model once for each set of flags and hand out the run directory; treat it as read-only."""
    made: dict[tuple[object, ...], Path] = {}

    def train(*args: object, nproc: int | None = None) -> Path:
        key = (*args, nproc)
        if key not in made:
            out = tmp_path_factory.mktemp("run") / "ckpt"
            run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, *args, nproc=nproc)
            made[key] = out
        return made[key]

    return train


# A model that a core trains in seconds: 12 windows of 32 tokens an update; 20 updates, the last cut inside a window.
SMALL = (
    *("--d-model", 32, "--n-layers", 2, "--n-heads", 4, "--ctx", 32, "--global-bsz", 12, "--tokens", 7_400),
    *("--lr", 3e-3, "--warmup", 4, "--log-every", 5, "--eval-every", 10, "--eval-tokens", 2_000, "--backend", "gloo"),
    *("--sample-tokens", 8),
)
