"""Saving: a checkpoint is staged, written by all ranks, hashed, published by rank 0, and kept or removed by the rules.

It is written under a temporary name, made durable and only then renamed to step_N: a directory of that name is
complete, whenever the writer died.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fourscale import checkpoint
from fourscale.cli import InputError, RunFailed, say
from fourscale.durable import fsync, replace, write_json
from fourscale.parallel import host_name
from fourscale.publish import RunDir
from fourscale.rundir import read_step, seal, step_dirs

MEMORY_SHARE = 0.9  # of the available memory that copies of checkpoints may take


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
        self._stager, self._reserved = checkpoint.stager(self.topology.device), False
        self._reserving: threading.Thread | None = None
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
            with contextlib.suppress(InputError):  # a damaged one is none, whatever its loss
                best = _better(best, int(path.name[5:]), read_step(path).get("val_loss"))
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

    def reserve(self, tensors: Callable[[], dict[str, Tensor]]) -> None:
        """Take the memory for copies of `tensors()`, once, in a thread: the first save then waits for no new pages.

        To be called after an update, when activations have got theirs, by a run that saves on its way. Collective.
        """
        if self._mode == "off" or self._reserved:
            return
        mine = checkpoint.share(tensors(), self.topology.rank, self.topology.world_size)
        self._take(mine)
        if self._mode != "off":
            args = (self._stager, mine, self.topology.device)
            self._reserving = threading.Thread(target=checkpoint.touch, args=args, name="reserve", daemon=True)
            self._reserving.start()

    def _take(self, mine: dict[str, Tensor]) -> None:
        """Settle whether there is memory for copies of `mine`, which is kept from then on."""
        self._reserved = True
        for note in self._decide(mine):
            self._say(f"note: {note}")

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
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        if self._mode != "off" and not self._reserved:
            self._take(mine)
        broken, fault, staged = checkpoint.non_finite(mine), None, mine
        if self._mode != "off" and broken is None:
            try:
                staged = self._stager.stage(mine)
            except (RuntimeError, MemoryError) as e:
                fault = f"rank {topology.rank} has no memory for a copy ({checkpoint.cause(e)})"
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
            step = flight.step | {"files": files}
            write_json(flight.directory / "step.json", step | {"sha256": seal(step)})
            fsync(flight.directory)
            if final.exists():  # left damaged by hand: a complete one would have been resumed from
                self._purge([final])
            self.run_dir.assert_writer()
            os.rename(flight.directory, final)
            fsync(path)
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
            elif not path.is_file() or path.read_bytes() != text.encode():
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
