"""Short real runs that leave nothing behind: in a scratch directory beside --ckpt-dir, which itself is only read."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fourscale import checkpoint, costs, durable, metrics, rundir
from fourscale.budget import Plan
from fourscale.cli import InputError, RunFailed
from fourscale.config import TrainConfig
from fourscale.parallel import StopRequest, Topology, host_name
from fourscale.publish import RunDir
from fourscale.steps import size_text

Train = Callable[[TrainConfig, Topology, RunDir, StopRequest, Callable[[str], None]], int]  # train.py's `train`

OWNER = "owner.json"
# What a run does beside its updates and is left out here.
QUIET: dict[str, Any] = {
    "resume": "never",
    "resume_step": None,
    "verify_data": "off",
    "eval_every": 0,
    "save_best": False,
    "ckpt_every": 0,
    "ckpt_minutes": None,
    "keep": None,
    "keep_every": None,
    "async_ckpt": "off",
    "log_every": 1,
    "target_loss": None,
    "stop_when": (),
    "tracker": (),
    "profile": None,
    "progress": False,
    "sample_tokens": 0,
}


@dataclass(frozen=True)
class Trial:
    """What a short run came to; the same on every rank."""

    rows: list[dict[str, Any]]  # of metrics.jsonl, of this call's updates
    run: dict[str, Any]  # run.json
    checkpoint: Path | None  # the newest step_N; gone with the scratch directory
    seconds: float  # start-up and the save at the end included
    notes: list[str]  # what it would have said beyond its first lines


LEAST_SHARE = 0.9  # of the memory that is reckoned: estimates came within 10% of what was measured


# ---- before anything is allocated ------------------------------------------------------------------------------------


def check_room(plan: Plan, topology: Topology) -> None:
    """Raise InputError, on all ranks, for a run that can't fit into memory: on a CPU the system would end it without a
    word, and perhaps others with it. Collective."""
    cfg, device = plan.cfg, topology.device
    needs = costs.memory(cfg, costs.Layout(cfg.parallel, topology.world_size, topology.shard_size), device.type)
    host = host_name()
    ranks = 1 if device.type == "cuda" else topology.gather(host).count(host)
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else checkpoint.available_memory()
    short = room is not None and LEAST_SHARE * ranks * needs.peak > room
    if short := next((s for s in topology.gather((host, ranks, room) if short else None) if s), None):
        host, ranks, room = short
        where = "each device" if device.type == "cuda" else f"each of {ranks} ranks" if ranks > 1 else "this process"
        raise InputError(
            f"{host}: {where} would take about {size_text(needs.peak)} of memory, {size_text(needs.lasting)} of it for "
            f"weights, gradients and optimizer, and {size_text(room)} are there; choose a smaller model or "
            "--local-bsz, --act-ckpt block, or more ranks with --parallel fsdp (--plan shows what each saves)"
        )


# ---- the scratch directory -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch(flags: TrainConfig, topology: Topology) -> Iterator[Path]:
    """A fresh hidden directory on the file system of --ckpt-dir. Collective; it is gone when the block is left.

    That holds for errors too, and for SIGTERM, SIGINT and SIGUSR1, which raise KeyboardInterrupt within the block. What
    a killed process of this host has left beside the same --ckpt-dir is removed first. Raises InputError where nothing
    can be written there.
    """
    place, nonce = topology.from_main(lambda: (str(_place(flags.ckpt_dir.resolve())), secrets.token_hex(4)))
    stem = f".{flags.ckpt_dir.resolve().name}.trial-"
    path = Path(place) / f"{stem}{nonce}"

    def make() -> None:
        try:
            for left in path.parent.glob(f"{stem}*"):
                if _abandoned(left):
                    shutil.rmtree(left, ignore_errors=True)
            path.mkdir(parents=True)
            durable.write_json(path / OWNER, {"host": host_name(), "pid": os.getpid()})
        except OSError as e:
            raise InputError(
                f"--ckpt-dir {flags.ckpt_dir}: nothing can be tried out beside it: {path.parent}: "
                f"{(e.strerror or str(e)).lower()}; choose a writable place with room"
            ) from None

    with _interruptible():
        try:
            topology.from_main(make)
            yield path
            topology.barrier()
        finally:
            if topology.main:
                _remove(path)


def _place(ckpt_dir: Path) -> Path:
    """The nearest directory above `ckpt_dir`, where it is on the same disk; `ckpt_dir` itself where it is a disk."""
    above = next((p for p in ckpt_dir.parents if p.is_dir()), ckpt_dir)  # a root has none above
    if ckpt_dir.is_dir() and (ckpt_dir.stat().st_dev != above.stat().st_dev or not os.access(above, os.W_OK)):
        return ckpt_dir
    return above


def _abandoned(path: Path) -> bool:
    """True where the process that made this scratch directory was of this host and is gone."""
    try:
        owner = json.loads((path / OWNER).read_text(encoding="utf-8"))
        if owner["host"] == host_name():
            os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return False


def _remove(path: Path) -> None:
    """Remove a tree into which a rank on its way out may still write."""
    for _ in range(10):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.1)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Signals that ask to stop raise KeyboardInterrupt, once: what is then undone is not interrupted itself."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]

    def interrupt(number: int, frame: object) -> None:
        for n in numbers:
            signal.signal(n, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in numbers}
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


# ---- a short run -----------------------------------------------------------------------------------------------------


def start_of(flags: TrainConfig, topology: Topology) -> Path | None:
    """The checkpoint from which a run of these flags would go on or branch; None for a fresh one. Collective."""

    def find() -> str | None:
        steps = rundir.step_dirs(flags.ckpt_dir) if flags.resume != "never" else []
        if flags.resume_step is not None:
            steps = [p for p in steps if p.name == f"step_{flags.resume_step}"]
        return str(steps[-1].resolve()) if steps else None

    found = topology.from_main(find)
    return Path(found) if found else flags.branch_from


def run(
    flags: TrainConfig,
    topology: Topology,
    train: Train,
    directory: Path,
    updates: int,
    until: Callable[[list[dict[str, Any]]], bool] | None = None,
    **changes: Any,
) -> Trial:
    """Make `updates` updates of the run that `flags` describe, in `directory` (below `scratch`), and save. Collective.

    They are the loop's own, from where the run would begin: a checkpoint of --resume is branched from, so that clock
    and schedule are the run's; --branch-from and --init-from are as they are. A second call on the same directory goes
    on from the first one's end. Nothing is printed, evaluated, tracked or verified unless `changes`, fields of
    TrainConfig, ask for it. until: called on rank 0 before each update with the rows so far; True ends the run. Fewer
    updates are made where the run has no more. Raises InputError and RunFailed as the run itself would, with the name
    of --ckpt-dir in place of `directory`.
    """
    started = time.monotonic()
    start = start_of(flags, topology)
    own = topology.from_main(lambda: [str(p) for p in rundir.step_dirs(directory)])
    begun = int(Path(own[-1]).name[5:]) if own else _update_of(start) if start else 0
    here: dict[str, Any] = {"ckpt_dir": directory, "branch_from": start, "stop_after": begun + updates}
    if start is not None:
        here["init_from"] = None  # a resume may repeat it
    cfg = dataclasses.replace(flags, **(QUIET | here | ({"resume": "must"} if own else {}) | changes))
    said: list[str] = []
    run_dir = None
    if topology.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(topology.device)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the console lines and what other rooms say
            run_dir = RunDir(directory, topology)
            train(cfg, topology, run_dir, _Until(directory, topology, until), said.append)
            run_dir.close()
        run_dir = None
    except (InputError, RunFailed) as e:
        renamed = type(e)(str(e).replace(str(directory), str(flags.ckpt_dir)))
        if hasattr(e, "speaks"):
            renamed.speaks = e.speaks
        raise renamed from None
    finally:
        if run_dir is not None:
            run_dir.abandon()
        release(topology)
    rows, contract, newest = topology.from_main(lambda: _outcome(directory))
    notes = [line.removeprefix("note: ") for text in said for line in text.splitlines() if line.startswith("note: ")]
    rows = [row for row in rows if row["update"] > begun]
    return Trial(rows, contract, newest and Path(newest), time.monotonic() - started, topology.gather(notes)[0])


def release(topology: Topology) -> None:
    """Let go of a model that is no longer referred to: one that went during a collective would hold up the others."""
    gc.collect()
    if topology.device.type == "cuda":
        torch.cuda.empty_cache()


def _update_of(checkpoint: Path) -> int:
    return rundir.open_checkpoint(checkpoint).step["update"]


def _outcome(directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any], str | None]:
    steps = rundir.step_dirs(directory)
    rows = metrics.read_rows(directory / "metrics.jsonl")
    return rows, durable.read_json(directory / "run.json"), str(steps[-1]) if steps else None


class _Until:
    """Stands where a run looks whether it was asked to stop, and asks `until`."""

    def __init__(self, directory: Path, topology: Topology, until: Callable[[list[dict[str, Any]]], bool] | None):
        self._rows, self._until = directory / "metrics.jsonl", until if topology.main else None

    @property
    def name(self) -> str | None:
        return "until" if self._until is not None and self._until(metrics.read_rows(self._rows)) else None
