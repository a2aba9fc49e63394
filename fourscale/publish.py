"""The one writer of a run's directory: its lock, where to go on from, the contract, receipts, events, removals.

run.json  metrics.jsonl  events.jsonl  loss.png  tokenizer.json  latest  best  DONE.json | STOPPED.json
step_N/{step.json, tensors}  discarded-step_N/  step_N.tmp-ATTEMPT/
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fourscale import checkpoint
from fourscale.cli import InputError
from fourscale.durable import fsync, naming, replace, write_json
from fourscale.lock import Lock
from fourscale.parallel import Topology, host_name
from fourscale.rundir import Checkpoint, open_checkpoint, read_run, step_dirs
from fourscale.tokenization import Tokenizer

SHARED_WAIT_S = 90  # a new file on NFS can stay unseen by other nodes for a minute
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
                way = "add --resume auto to go on from it or choose another directory"
                with contextlib.suppress(InputError):
                    if "imported" in read_run(self.path):
                        way = "it is an imported model: start from it with --init-from, in another directory"
                raise InputError(f"--ckpt-dir {self.path}: holds {steps[-1].name} of an earlier run; {way}")
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
            with naming(self.path):
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
        fsync(self.path)
        replace(self.path / "latest", f"step_{update}\n")

    def amend(self, run: dict[str, Any]) -> None:
        """Write run.json again, of the same attempt with more to tell."""

        def write() -> None:
            self.assert_writer()
            write_json(self.path / "run.json", run)

        self.topology.from_main(write)

    def abandon(self) -> None:
        """Give the directory up after an error that all ranks meet. Not collective: ranks may be on their way out."""
        if self.topology.main:
            self._lock.release()

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
