"""The one writer of a run's directory: lock, publishing of checkpoints, retention.

    run.json  metrics.jsonl  loss.png  tokenizer.json  latest  step_N/{step.json, tensors}  DONE.json | STOPPED.json

A checkpoint is written under a temporary name, hashed, made durable and only then renamed to step_N: a directory of
that name is complete, whenever the writer died.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import filelock
from torch import Tensor

from fourscale import checkpoint, optim
from fourscale.cli import InputError, RunFailed
from fourscale.parallel import Topology, host_name
from fourscale.rundir import Checkpoint, open_checkpoint, replace, step_dirs, write_json
from fourscale.tokenization import Tokenizer

SHARED_WAIT_S = 90  # a new file on NFS can stay unseen by other nodes for a minute


class RunDir:
    """The directory as its one writer, all ranks together, sees it. Public methods are collective."""

    def __init__(self, path: Path, topology: Topology):
        self.path = path.resolve()
        self.topology = topology
        self.attempt = topology.from_main(lambda: secrets.token_hex(4))
        self._lock: filelock.BaseFileLock | None = None
        self._published: int | None = None
        topology.from_main(self._claim)
        self._check_shared()

    def _claim(self) -> None:
        """Rank 0: make the directory, become its one writer, and clear what a dead writer left unfinished."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(self.path / ".lock", timeout=0)
            with contextlib.suppress(NotImplementedError):  # a file system without locks
                self._lock.acquire()
            for leftover in self.path.glob("step_*.tmp-*"):
                shutil.rmtree(leftover)
            replace(self.path / ".attempt", self.attempt)
        except filelock.Timeout:
            raise InputError(
                f"--ckpt-dir {self.path}: another run is writing there; wait for it or choose another"
            ) from None
        except OSError as e:
            raise InputError(f"--ckpt-dir {self.path}: {e.strerror.lower()}; choose a writable directory") from None

    def _check_shared(self) -> None:
        """Every rank must see what rank 0 wrote, or shards of a checkpoint would end up on different disks."""
        deadline = time.monotonic() + SHARED_WAIT_S
        while True:
            with contextlib.suppress(OSError):
                if (self.path / ".attempt").read_text(encoding="utf-8") == self.attempt:
                    break
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        seen = (self.path / ".attempt").is_file() and (self.path / ".attempt").read_text() == self.attempt
        blind = [host for host, ok in self.topology.gather((host_name(), seen)) if not ok]
        if blind:
            raise InputError(
                f"--ckpt-dir {self.path}: {blind[0]} does not see what rank 0 wrote there; "
                "name a directory that all nodes share"
            )

    def resume_point(self, resume: str) -> Checkpoint | None:
        """Where to go on from, None for a fresh run. Raises InputError for a directory that `resume` doesn't fit."""

        def find() -> Path | None:
            steps = step_dirs(self.path)
            if not steps:
                if resume == "must":
                    raise InputError(
                        f"--resume must: no complete checkpoint in {self.path}; use --resume auto to start"
                    )
                return None
            if resume == "never":
                raise InputError(
                    f"--ckpt-dir {self.path}: holds {steps[-1].name} of an earlier run; "
                    "add --resume auto to go on from it or choose another directory"
                )
            return steps[-1]

        found = self.topology.from_main(find)
        if found is None:
            return None
        ckpt = open_checkpoint(found)
        files = sorted(ckpt.step["files"])
        mine = files[self.topology.rank :: self.topology.world_size]
        faults = [f for f in self.topology.gather(checkpoint.damage(ckpt.dir, ckpt.step["files"], mine)) if f]
        if faults:
            older = [p.name for p in step_dirs(self.path)[:-1]]
            way = f"remove {found.name} to go on from {older[-1]}" if older else "start again in another directory"
            raise InputError(f"{faults[0]}; {way}")
        self._published = ckpt.step["update"]
        return ckpt

    def write_contract(self, run: dict[str, Any], tokenizer: Tokenizer | None) -> None:
        """Publish run.json; on a fresh run also the tokenizer's file. Earlier receipts of this directory end here."""

        def write() -> None:
            if tokenizer is not None:
                tokenizer.save(self.path)
            write_json(self.path / "run.json", run)
            for receipt in ("STOPPED.json", "DONE.json"):
                (self.path / receipt).unlink(missing_ok=True)

        self.topology.from_main(write)

    def publish(
        self, tensors: dict[str, Tensor], step: dict[str, Any], keep: int | None, keep_every: int | None
    ) -> bool:
        """Write step_N so that it exists whole or not at all, move `latest`, then drop what retention allows.

        `step` holds plain scalars, `update` among them; False where that update is the last one published. Raises
        RunFailed where the disk refuses; older checkpoints stay.
        """
        update = step["update"]
        if update == self._published:
            return False
        final, temporary = self.path / f"step_{update}", self.path / f"step_{update}.tmp-{self.attempt}"
        topology = self.topology
        fault = None
        broken = [n for n, t in tensors.items() if not optim.local(t).isfinite().all()]
        if topology.all_sum([len(broken)])[0]:
            name = next(n for names in topology.gather(broken[:1]) for n in names)
            raise RunFailed(
                f"step_{update}: {name} is not finite, not saved; the older checkpoints are intact: lower --lr"
            )
        try:
            topology.from_main(lambda: self._make(temporary))
            checkpoint.save(temporary, tensors, topology.cpu_group)
            mine = checkpoint.seal(temporary, topology.rank)
        except OSError as e:
            free = shutil.disk_usage(self.path).free
            mine, fault = {}, f"step_{update}: could not be written, {free:,} bytes are free on its disk ({e})"
        parts = topology.gather((mine, fault))
        faults = [f for _, f in parts if f]

        def commit() -> None:
            if faults:
                shutil.rmtree(temporary, ignore_errors=True)
                raise RunFailed(f"{faults[0]}; free the disk and go on with --resume auto from the last checkpoint")
            files = {name: entry for table, _ in parts for name, entry in sorted(table.items())}
            try:
                write_json(temporary / "step.json", step | {"files": files})
                checkpoint.fsync(temporary)
                if final.exists():  # left damaged by hand: a complete one would have been resumed from
                    shutil.rmtree(final)
                os.rename(temporary, final)
                checkpoint.fsync(self.path)
                replace(self.path / "latest", final.name + "\n")
            except OSError as e:
                raise RunFailed(f"{final}: {e.strerror}; the older checkpoints are intact") from None
            self._retain(keep, keep_every)

        topology.from_main(commit)
        self._published = update
        return True

    def _make(self, directory: Path) -> None:
        try:
            directory.mkdir()
        except OSError as e:
            raise RunFailed(f"{directory}: {e.strerror}; the older checkpoints are intact") from None

    def _retain(self, keep: int | None, keep_every: int | None) -> None:
        """Rank 0: remove all but the newest `keep` checkpoints and the multiples of `keep_every`."""
        if keep is None:
            return
        for old in step_dirs(self.path)[: -max(1, keep)]:
            if keep_every and int(old.name[5:]) % keep_every == 0:
                continue
            doomed = old.with_name(f"{old.name}.tmp-purge")  # never half a checkpoint under its own name
            os.rename(old, doomed)
            shutil.rmtree(doomed)

    def receipt(self, name: str, table: dict[str, Any]) -> None:
        """Write DONE.json or STOPPED.json."""
        self.topology.from_main(lambda: write_json(self.path / name, table))
