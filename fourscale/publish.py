"""The one writer of a run's directory: publishing of checkpoints, retention, receipts.

    run.json  metrics.jsonl  events.jsonl  loss.png  tokenizer.json  latest  best  DONE.json | STOPPED.json
    step_N/{step.json, tensors}  discarded-step_N/  step_N.tmp-ATTEMPT/

A checkpoint is written under a temporary name, hashed, made durable and only then renamed to step_N: a directory of
that name is complete, whenever the writer died.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from fourscale import checkpoint
from fourscale.cli import InputError, RunFailed, say
from fourscale.lock import Lock
from fourscale.parallel import Topology, host_name
from fourscale.rundir import Checkpoint, open_checkpoint, replace, step_dirs, write_json
from fourscale.tokenization import Tokenizer

SHARED_WAIT_S = 90  # a new file on NFS can stay unseen by other nodes for a minute
MEMORY_SHARE = 0.9  # of the available memory that copies of checkpoints may take
LEFTOVER = re.compile(r"step_\d+\.tmp-[\w-]+")


class RunDir:
    """The directory as its one writer, all ranks together, sees it. Methods are collective but where they say."""

    def __init__(self, path: Path, topology: Topology):
        self.path = path.resolve()
        self.topology = topology
        self.attempt: str = topology.from_main(lambda: secrets.token_hex(4))
        self._lock = Lock(self.path, self.attempt)
        self._discard_after: int | None = None
        self._removals: list[threading.Thread] = []
        topology.from_main(self._claim)
        self._check_shared()

    def _claim(self) -> None:
        """Rank 0: make the directory, become its one writer, and clear what a dead writer left unfinished."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            before = self._lock.acquire()
            self.remove([p for p in self.path.glob("step_*") if LEFTOVER.fullmatch(p.name)])
            for name in ("run.json", "latest", "best", "DONE.json", "STOPPED.json"):
                (self.path / f".{name}.tmp").unlink(missing_ok=True)
        except OSError as e:
            raise InputError(f"--ckpt-dir {self.path}: {e.strerror.lower()}; choose a writable directory") from None
        if before is not None and self._wrote(before):
            self.event("took_over", predecessor=before)

    def _wrote(self, writer: dict[str, Any]) -> bool:
        """True where that attempt came as far as the contract; a refused start changed nothing worth telling."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            run = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            return writer.get("attempt") in [attempt["attempt"] for attempt in run["attempts"]]
        return False

    def _check_shared(self) -> None:
        """Every rank must see what rank 0 wrote, or shards of a checkpoint would end up on different disks."""
        deadline = time.monotonic() + SHARED_WAIT_S
        while not (seen := self._seen()) and time.monotonic() < deadline:
            time.sleep(0.5)
        blind = [host for host, ok in self.topology.gather((host_name(), seen)) if not ok]
        if blind:
            raise InputError(
                f"--ckpt-dir {self.path}: {blind[0]} does not see what rank 0 wrote there, or may not write; "
                "name a directory that all nodes share"
            )

    def _seen(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            writer = json.loads((self.path / ".writer.json").read_text(encoding="utf-8"))
            return writer["attempt"] == self.attempt and os.access(self.path, os.W_OK)
        return False

    def resume_point(self, resume: str, step: int | None = None) -> Checkpoint | None:
        """Where to go on from, verified, None for a fresh run: the newest checkpoint, or that of update `step`.

        Later ones than `step` are set aside by `write_contract`. Raises InputError for a directory that `resume` or
        `step` doesn't fit, and for a damaged checkpoint, naming the newest undamaged one before it.
        """
        try:
            return self._resume_point(resume, step)
        except InputError:
            self.close()  # a refused start leaves nothing behind
            raise

    def _resume_point(self, resume: str, step: int | None) -> Checkpoint | None:
        def find() -> list[Path]:
            steps = step_dirs(self.path)
            if step is not None:
                if not any(p.name == f"step_{step}" for p in steps):
                    there = "there are " + ", ".join(p.name for p in steps) if steps else "there is none"
                    raise InputError(f"--resume-step {step}: no complete step_{step} in {self.path}; {there}")
                return [p for p in steps if int(p.name[5:]) <= step]
            if not steps and resume == "must":
                raise InputError(f"--resume must: no complete checkpoint in {self.path}; use --resume auto to start")
            if steps and resume == "never":
                raise InputError(
                    f"--ckpt-dir {self.path}: holds {steps[-1].name} of an earlier run; "
                    "add --resume auto to go on from it or choose another directory"
                )
            return steps

        steps = self.topology.from_main(find)
        if not steps:
            return None
        found, fault = self._verified(steps[-1])
        if fault:
            for older in reversed(steps[:-1]):
                if self._verified(older)[1] is None:
                    way = f"--resume-step {older.name[5:]} goes on from {older.name}, the newest undamaged one"
                    raise InputError(f"{fault}; {way}")
            raise InputError(f"{fault}; there is no older undamaged one: start again in another directory")
        self._discard_after = step
        return found

    def _verified(self, directory: Path) -> tuple[Checkpoint | None, str | None]:
        """The checkpoint, and its first fault if it has one; the files are dealt over the ranks."""
        ckpt, fault = None, None
        try:
            ckpt = open_checkpoint(directory)
            files = sorted(ckpt.step["files"])[self.topology.rank :: self.topology.world_size]
            fault = checkpoint.damage(directory, ckpt.step["files"], files)
        except InputError as e:
            fault = str(e)
        except OSError as e:
            fault = f"{e.filename or directory}: {(e.strerror or str(e)).lower()}"
        faults = [f for f in self.topology.gather(fault) if f]
        return ckpt, faults[0] if faults else None

    def write_contract(self, run: dict[str, Any], tokenizer: Tokenizer | None) -> None:
        """Publish run.json; on a fresh run also the tokenizer's file. Earlier receipts of this directory end here, and
        so do the checkpoints beyond the one that --resume-step names."""

        def write() -> None:
            self.assert_writer()
            if tokenizer is not None:
                tokenizer.save(self.path)
            if self._discard_after is not None:
                self._discard(self._discard_after)
            write_json(self.path / "run.json", run)
            for receipt in ("STOPPED.json", "DONE.json"):
                (self.path / receipt).unlink(missing_ok=True)

        self.topology.from_main(write)

    def _discard(self, update: int) -> None:
        """Rank 0: set aside the checkpoints beyond `update`, newest first, so that what is left is always one run."""
        for path in reversed([p for p in step_dirs(self.path) if int(p.name[5:]) > update]):
            aside, n = path.with_name(f"discarded-{path.name}"), 1
            while aside.exists():
                n += 1
                aside = path.with_name(f"discarded-{path.name}-{n}")
            os.rename(path, aside)
        checkpoint.fsync(self.path)
        replace(self.path / "latest", f"step_{update}\n")

    def receipt(self, name: str, table: dict[str, Any]) -> None:
        """Write DONE.json or STOPPED.json."""

        def write() -> None:
            self.assert_writer()
            write_json(self.path / name, table)

        self.topology.from_main(write)

    def event(self, name: str, **fields: Any) -> bool:
        """Append a row to events.jsonl (rank 0 only, not collective); False where the disk refuses it."""
        self.assert_writer()
        row = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "event": name,
            "attempt": self.attempt,
            **fields,
        }
        try:
            with (self.path / "events.jsonl").open("ab+") as f:
                if f.tell():
                    f.seek(-1, os.SEEK_END)
                    if f.read(1) != b"\n":  # a kill in the middle of a row
                        f.write(b"\n")
                f.write(json.dumps(row).encode() + b"\n")
        except OSError:
            return False
        return True

    def assert_writer(self) -> None:
        """Raise RunFailed where another attempt has taken the directory over (rank 0 only, not collective).

        To be called before each write into the directory. Raises OSError where the directory is gone.
        """
        self._lock.check()

    def remove(self, doomed: list[Path]) -> None:
        """Remove files and directories in a thread: a checkpoint may be large (rank 0 only, not collective)."""

        def work() -> None:
            for path in doomed:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)  # what stays is cleared by the next start
                else:
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)

        if doomed:
            self._removals.append(threading.Thread(target=work, name="remove", daemon=True))
            self._removals[-1].start()

    def settle(self) -> None:
        """Wait for removals under way (rank 0 only, not collective)."""
        while self._removals:
            self._removals.pop().join()

    def close(self) -> None:
        """An orderly end: heartbeat and lock are given up. Nothing may be written afterwards."""

        def end() -> None:
            self.settle()
            self._lock.release()

        self.topology.from_main(end)


# ---- saving ----------------------------------------------------------------------------------------------------------


@dataclass
class _Flight:
    """A save on its way: written, not yet published."""

    step: dict[str, Any]
    directory: Path
    bytes: int  # over all ranks
    started: float
    files: Future[dict[str, dict[str, Any]]]  # this rank's
    ended: float = math.inf


class Saver:
    """Writes, publishes and keeps a run's checkpoints; make it after the contract is written.

    One save is in flight at most. A save that fails leaves the older checkpoints as they are; `max_failures` in a row
    are borne, more raise RunFailed.
    """

    def __init__(self, run_dir: RunDir, keep: int | None, keep_every: int | None, async_ckpt: str, max_failures: int):
        self.run_dir, self.topology = run_dir, run_dir.topology
        self.keep, self.keep_every, self.max_failures = keep, keep_every, max_failures
        self._mode = async_ckpt
        self._stager, self._staged = checkpoint.stager(self.topology.device), False
        self._flight: _Flight | None = None
        self._failures, self._fault = 0, ""
        self.saved: int | None
        self.best: tuple[int, float] | None
        self.saved, self.best = self.topology.from_main(self._take_stock)

    def _take_stock(self) -> tuple[int | None, tuple[int, float] | None]:
        """Rank 0: what is published; finishes what a kill left between a checkpoint's rename and the end of purging."""
        self.run_dir.assert_writer()
        steps, best = step_dirs(self.run_dir.path), None
        for path in steps:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                best = _better(best, int(path.name[5:]), json.loads((path / "step.json").read_text()).get("val_loss"))
        if steps:
            self._point(steps[-1].name, best)
            self._retain(best)
        return (int(steps[-1].name[5:]) if steps else None), best

    @property
    def in_flight(self) -> bool:
        """True from `begin` to `finish`; equal on all ranks."""
        return self._flight is not None

    @property
    def ready(self) -> bool:
        """True where this rank's part of the save in flight is written and hashed, or has failed."""
        return self._flight is not None and self._flight.files.done()

    def check_space(self, tensors: dict[str, Tensor]) -> list[str]:
        """Before the first update: compare what checkpoints of `tensors` take with the free disk and memory.

        Decides `async_ckpt` auto. Returns notes to say. Raises InputError where not even one checkpoint fits.
        """
        mine = checkpoint.share(tensors, self.topology.rank, self.topology.world_size)
        size = sum(self.topology.gather(checkpoint.bytes_on_disk(mine)))
        notes = self.topology.from_main(lambda: self._disk(size))
        if self._mode != "off":
            # The first update will allocate gradients, and activations too: on a CPU from the same memory.
            model = {n: t for n, t in tensors.items() if n.startswith("model.")}
            growth = 2 * checkpoint.local_bytes(model) if self.topology.device.type == "cpu" else 0
            notes += self._decide(mine, growth)
        return notes

    def _disk(self, size: int) -> list[str]:
        """Rank 0: notes on the room for checkpoints of `size` bytes."""
        path, keep = self.run_dir.path, self.keep
        self.run_dir.settle()
        free = shutil.disk_usage(path).free
        if size > free:
            raise InputError(
                f"--ckpt-dir {path}: a checkpoint takes {told(size)}, {told(free)} are free on its disk; "
                "make room or choose another disk"
            )
        if keep is None:
            if (room := free // size) >= 10:
                return []
            return [
                f"--ckpt-dir {path}: a checkpoint takes {told(size)}, {told(free)} are free: there is room for {room}; "
                "--keep N removes older ones"
            ]
        more = max(1, max(1, keep) + 1 - len(step_dirs(path)))
        if more * size <= free:
            return []
        return [
            f"--ckpt-dir {path}: --keep {keep} takes {keep + 1} checkpoints while one is written; {more} to come x "
            f"{told(size)} = {told(more * size)}, {told(free)} are free"
        ]

    def _decide(self, mine: dict[str, Tensor], growth: int = 0) -> list[str]:
        """Settle whether saves are asynchronous, by the memory of each host; notes where they can't be."""
        copy, free = checkpoint.local_bytes(mine), checkpoint.available_memory()
        hosts: dict[str, list[int]] = {}
        for host, need, room in self.topology.gather((host_name(), copy + growth, -1 if free is None else free)):
            before = hosts.setdefault(host, [0, room])
            hosts[host] = [before[0] + need, min(before[1], room)]
        for host, (need, room) in hosts.items():
            if self._mode == "auto" and need > MEMORY_SHARE * room:
                self._mode = "off"
                what = f"{told(room)} are available" if room >= 0 else "this system doesn't tell what is available"
                return [
                    f"--async-ckpt: off, training waits for saves: copies beside training need {told(need)} of memory "
                    f"on {host}, {what}"
                ]
        return []

    def begin(self, tensors: dict[str, Tensor], step: dict[str, Any]) -> None:
        """Save `tensors` (any rank's plain tensors are whole, DTensors are shards) as step_N, N being step["update"].

        Synchronous saves are published on return; asynchronous ones are copied, and `finish` publishes them. An update
        that is published already is left alone. `step` holds plain JSON values. Raises RunFailed where a tensor isn't
        finite, or one failure too many came together.
        """
        self.finish()
        update, topology = step["update"], self.topology
        if update == self.saved:
            return
        directory = self.run_dir.path / f"step_{update}.tmp-{self.run_dir.attempt}"
        started = time.monotonic()
        mine = checkpoint.share(tensors, topology.rank, topology.world_size)
        if self._mode != "off" and not self._staged:  # the first copy: its memory is kept for the next
            for note in self._decide(mine):
                self._say(f"note: {note}")
        broken, fault, staged = checkpoint.non_finite(mine), None, mine
        if self._mode != "off" and broken is None:
            try:
                staged = self._stager.stage(mine)
            except (RuntimeError, MemoryError) as e:
                fault = f"rank {topology.rank} has no memory for a copy ({checkpoint.cause(e)})"
            self._staged = True
        parts = topology.gather((broken, fault, checkpoint.bytes_on_disk(mine)))
        if names := [b for b, _, _ in parts if b]:
            raise RunFailed(
                f"step_{update}: {names[0]} is not finite, not saved; the older checkpoints are intact: lower --lr"
            )
        size = sum(b for _, _, b in parts)
        fault = next((f for _, f, _ in parts if f), None)
        if fault and self._mode == "auto":
            self._say(f"note: --async-ckpt: off, training waits for saves: {fault}")
            self._mode, staged, fault = "off", mine, None
            self._stager.close()
        if fault := fault or topology.from_main(lambda: self._make(directory)):
            return self._failed(update, size, fault)
        if self._mode == "off":
            files: Future[dict[str, dict[str, Any]]] = Future()
            try:
                files.set_result(checkpoint.write(directory, mine, topology.rank, topology.save_group))
            except OSError as e:
                files.set_exception(e)
        else:
            files = checkpoint.write_in_background(directory, staged, topology.rank, topology.save_group)
        self._flight = _Flight(step, directory, size, started, files)
        files.add_done_callback(lambda _, flight=self._flight: setattr(flight, "ended", time.monotonic()))
        if self._mode == "off":
            self.finish()

    def _make(self, directory: Path) -> str | None:
        """Rank 0: the fresh directory of a save; the fault where there can be none."""
        try:
            self.run_dir.assert_writer()
            if directory.exists():  # of a failed save of the same update
                shutil.rmtree(directory)
            directory.mkdir()
        except OSError as e:
            return checkpoint.cause(e)
        return None

    def finish(self, final: bool = False) -> None:
        """Wait for the save in flight, if there is one, and publish it.

        Raises RunFailed where this failure is one too many in a row, or with `final` where the newest save failed.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            if final and self._fault:
                raise RunFailed(self._fault)
            return
        files, fault = {}, None
        try:
            files = flight.files.result()
        except OSError as e:
            fault = checkpoint.cause(e)
        parts = self.topology.gather((files, fault))
        fault, best, line = self.topology.from_main(lambda: self._commit(flight, parts))
        update = flight.step["update"]
        if fault:
            return self._failed(update, flight.bytes, fault, final)
        self.saved, self.best, self._failures, self._fault = update, best, 0, ""
        self._say(line)

    def _commit(
        self, flight: _Flight, parts: list[tuple[dict[str, Any], str | None]]
    ) -> tuple[str | None, tuple[int, float] | None, str]:
        """Rank 0: publish what all ranks have written, or remove it. Returns the fault, `best`, a line to say."""
        path, update = self.run_dir.path, flight.step["update"]
        final = path / f"step_{update}"
        try:
            self.run_dir.assert_writer()  # first: a successor has removed our files, which then are no fault
            if faults := [fault for _, fault in parts if fault]:
                raise OSError(faults[0])
            files = {name: entry for table, _ in parts for name, entry in sorted(table.items())}
            write_json(flight.directory / "step.json", flight.step | {"files": files})
            checkpoint.fsync(flight.directory)
            if final.exists():  # left damaged by hand: a complete one would have been resumed from
                self._purge([final])
            self.run_dir.assert_writer()
            os.rename(flight.directory, final)
            checkpoint.fsync(path)
        except RunFailed:
            shutil.rmtree(flight.directory, ignore_errors=True)
            raise
        except OSError as e:
            shutil.rmtree(flight.directory, ignore_errors=True)
            return checkpoint.cause(e), None, ""
        best = _better(self.best, update, flight.step.get("val_loss"))
        size = sum(entry["size"] for entry in files.values())
        line = f"step {update} | saved {final} ({told(size)} in {flight.ended - flight.started:.1f} s)"
        try:
            self._point(final.name, best)
            self._retain(best)
        except OSError as e:  # the checkpoint is there, and that is what counts
            line += f" | {checkpoint.cause(e)}"
        return None, best, line

    def _point(self, latest: str, best: tuple[int, float] | None) -> None:
        """Rank 0: the files `latest` and `best` name their checkpoints."""
        self.run_dir.assert_writer()
        for name, text in (("latest", f"{latest}\n"), ("best", f"step_{best[0]}\n" if best else None)):
            path = self.run_dir.path / name
            if text is None:
                path.unlink(missing_ok=True)
            elif not path.is_file() or path.read_text(encoding="utf-8") != text:
                replace(path, text)

    def _retain(self, best: tuple[int, float] | None) -> None:
        """Rank 0: remove all but the newest `keep` checkpoints, the best and the multiples of `keep_every`."""
        if self.keep is None:
            return
        older = [(int(p.name[5:]), p) for p in step_dirs(self.run_dir.path)[: -max(1, self.keep)]]
        self._purge(
            [p for n, p in older if not (self.keep_every and n % self.keep_every == 0) and not (best and n == best[0])]
        )

    def _purge(self, paths: list[Path]) -> None:
        """Rank 0: rename away, so that there is never half a checkpoint under its own name, then remove."""
        self.run_dir.assert_writer()
        doomed = []
        for path in paths:
            doomed.append(path.with_name(f"{path.name}.tmp-{self.run_dir.attempt}-purged"))
            os.rename(path, doomed[-1])
        self.run_dir.remove(doomed)

    def _failed(self, update: int, size: int, fault: str, final: bool = False) -> None:
        """Bear a failed save, or raise RunFailed where it is the last straw."""
        self._failures += 1

        def tell() -> str:
            free = "its disk is gone"
            with contextlib.suppress(OSError):
                free = f"{told(shutil.disk_usage(self.run_dir.path).free)} are free on its disk"
                self.run_dir.event("save_failed", update=update, fault=fault, in_a_row=self._failures)
            return f"{self.run_dir.path / f'step_{update}'}: {fault}; {told(size)} are needed, {free}"

        what = self.topology.from_main(tell)
        way = "the older checkpoints are intact; make room and go on with --resume auto"
        self._fault = f"step {update} could not be saved: {what}; {way}"
        if final or self._failures > self.max_failures:
            count = f" ({self._failures} failed saves in a row)" if self._failures > 1 else ""
            raise RunFailed(self._fault + count)
        left = self.max_failures - self._failures
        more = f"{left} more in a row are borne" if left else "the next one in a row ends the run"
        self._say(f"step {update} | NOT SAVED: {what}; training goes on, the older checkpoints are intact; {more}")

    def _say(self, line: str) -> None:
        if self.topology.main:
            say(line)


def _better(best: tuple[int, float] | None, update: int, loss: object) -> tuple[int, float] | None:
    """The best checkpoint so far: update and held-out loss; one without a finite loss is none."""
    if isinstance(loss, float) and math.isfinite(loss) and (best is None or loss < best[1]):
        return update, loss
    return best


def told(size: int) -> str:
    """'312.4 MiB'."""
    return f"{size / 2**30:,.1f} GiB" if size >= 10 * 2**30 else f"{size / 2**20:,.1f} MiB"
