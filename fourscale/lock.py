"""One writer a directory: a lock, who holds it, a heartbeat, and fencing of a writer that was taken over from.

.lock         locked by the writer's process, where the file system has locks
.writer.json  attempt, host, pid and start of the writer; gone after an orderly end
.heartbeat    "ATTEMPT COUNTER", rewritten every 5 s
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock

from fourscale.cli import InputError, RunFailed, say
from fourscale.durable import write_json
from fourscale.parallel import host_name

BEAT_S = 5.0
HOLDER_SILENT_S = 12.0  # a holder of the lock that hasn't beaten for so long is called stopped
TAKE_OVER_S = 20.0  # a writer without the lock that hasn't beaten for so long is taken over from


class Lock:
    """The right to write into a directory, for one process."""

    def __init__(self, directory: Path, attempt: str):
        self.directory, self.attempt = directory, attempt
        self._who, self._heart = directory / ".writer.json", directory / ".heartbeat"
        self._file: filelock.BaseFileLock | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> dict[str, Any] | None:
        """Become the writer; returns the table of a writer that was taken over from. Takes up to 20 s.

        Raises InputError, naming host and pid, where another writer lives; OSError where the directory can't be
        written.
        """
        self._file = filelock.FileLock(self.directory / ".lock", timeout=0)
        try:
            self._file.acquire()
        except NotImplementedError:
            say(f"note: {self.directory}: its file system has no locks; the heartbeat alone keeps a second writer out")
        except filelock.Timeout:
            raise self._refusal(locked=True, alive=self._beats(HOLDER_SILENT_S)) from None
        before = self._holder()
        if before is not None and not _dead(before):
            say(
                f"{self.directory}: a writer did not end in order ({_named(before)}); "
                f"waiting up to {TAKE_OVER_S:.0f} s for its heartbeat"
            )
            if self._beats(TAKE_OVER_S):
                self._file.release()
                raise self._refusal(locked=False, alive=True)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        # In this order: whoever reads who writes finds its heart beating.
        self._heart.write_text(self._beat(0), encoding="ascii")
        write_json(self._who, {"attempt": self.attempt, "host": host_name(), "pid": os.getpid(), "started": started})
        self._thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)
        self._thread.start()
        return before

    def check(self) -> None:
        """Raise RunFailed where another attempt has taken the directory over; OSError where the directory is gone."""
        try:
            now = json.loads(self._who.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if not self.directory.is_dir():
                raise
            raise RunFailed(
                f"--ckpt-dir {self.directory}: its .writer.json is gone: another attempt took over and has ended, "
                "or it was removed; nothing more was written here"
            ) from None
        except ValueError:
            raise RunFailed(f"{self._who}: not valid JSON; nothing more was written here") from None
        if now.get("attempt") != self.attempt:
            raise RunFailed(
                f"--ckpt-dir {self.directory}: superseded by attempt {now.get('attempt')} of {_named(now)}; "
                "nothing more was written here"
            )

    def release(self) -> None:
        """An orderly end: the next start needs to wait for nobody."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(OSError, RunFailed):
                self.check()
                self._heart.unlink()
                self._who.unlink()
        if self._file is not None:
            self._file.release()

    def _beat(self, count: int) -> str:
        return f"{self.attempt} {count:020d}\n"  # always as long: rewriting it needs no block of a full disk

    def _keep_beating(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_S):
            count += 1
            with contextlib.suppress(OSError, ValueError):  # an unlucky moment of a network file system
                if json.loads(self._who.read_text(encoding="utf-8")).get("attempt") != self.attempt:
                    return
                with self._heart.open("r+b", buffering=0) as f:  # closed each time, so that NFS shows it to others
                    f.write(self._beat(count).encode())

    def _holder(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            table = json.loads(self._who.read_text(encoding="utf-8"))
            if isinstance(table, dict):
                return table
        return None

    def _beats(self, patience_s: float) -> bool:
        """True as soon as the heartbeat changes, by the reader's own clock; False where it doesn't for so long."""
        deadline, first = time.monotonic() + patience_s, self._pulse()
        while time.monotonic() < deadline:
            time.sleep(0.25)
            if self._pulse() != first:
                return True
        return False

    def _pulse(self) -> bytes | None:
        with contextlib.suppress(OSError):
            return self._heart.read_bytes()
        return None

    def _refusal(self, locked: bool, alive: bool) -> InputError:
        holder = self._holder()
        who = f" ({_named(holder)})" if holder else ""
        if alive or holder is None:
            return InputError(
                f"--ckpt-dir {self.directory}: another run is writing there{who}; wait for it or choose another"
            )
        pid = holder.get("pid")
        return InputError(
            f"--ckpt-dir {self.directory}: another run is writing there{who} and seems stopped: no heartbeat for "
            f"{HOLDER_SILENT_S:.0f} s; on its host, let it go on (kill -CONT {pid}) or end it (kill -KILL {pid})"
        )


def _named(holder: dict[str, Any]) -> str:
    return f"pid {holder.get('pid')} on {holder.get('host')}, since {holder.get('started')}"


def _dead(holder: dict[str, Any]) -> bool:
    """True where the writer's process is surely gone: it was of this host, and there is none of its number."""
    if holder.get("host") != host_name() or not isinstance(pid := holder.get("pid"), int):
        return False
    if pid == os.getpid():  # a container restarted: numbers begin anew
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False
