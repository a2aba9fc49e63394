"""metrics.jsonl: a row an update, appended by rank 0, read at any time, rewound on a resume. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourscale.cli import say
from fourscale.durable import fsync, naming


@dataclass
class Rows:
    """metrics.jsonl as rank 0 appends to it: what a full disk refuses waits in `lines` and `events`."""

    path: Path
    event: Callable[..., None]
    assert_writer: Callable[[], None]
    lines: list[str] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    cut: int | None = None  # bytes of the file that are whole, where the last write failed
    told: bool = False

    def write(self, durable: bool) -> None:
        """Append what waits. An OSError is told once and borne; RunFailed where another attempt has taken over."""
        if not (self.lines or self.events or durable):
            return
        try:
            self.assert_writer()
            self._append(durable)
            while self.events:
                name, fields = self.events[0]
                if self.event(name, **fields) is False:
                    break
                self.events.pop(0)
        except OSError as e:
            if not self.told:
                self.told = True
                fault = f"{e.filename or self.path}: {(e.strerror or str(e)).lower()}"
                say(f"note: {fault}; training goes on, rows of metrics wait in memory until they can be written")
            return
        if self.told:
            self.told = False
            say(f"note: {self.path}: written again, nothing is missing")

    def _append(self, durable: bool) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if self.cut is not None:
                os.ftruncate(fd, min(self.cut, os.fstat(fd).st_size))
            self.cut = os.fstat(fd).st_size
            data = memoryview("".join(f"{line}\n" for line in self.lines).encode())
            while data:
                data = data[os.write(fd, data) :]
            if durable:
                os.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):  # a reader should see no half line; else the next write cuts it off
                os.ftruncate(fd, self.cut)
            raise
        finally:
            os.close(fd)  # a quota on NFS may only be told here
        self.lines.clear()
        self.cut = None


def each_row(path: Path, start: int = 0) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Lines of a metrics.jsonl, from byte `start` on, with the row that each holds, one at a time; None for a line
    without one.

    A crash cuts a line short, or leaves zeros; a row is an object with a whole number as `update`.
    """
    if not path.is_file():
        return
    with path.open("rb") as f:
        f.seek(start)
        for line in f:
            row = None
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
            whole = isinstance(row, dict) and type(row.get("update")) is int and line.endswith(b"\n")
            yield line, row if whole else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; lines that hold none are left out."""
    return [row for _, row in each_row(path) if row is not None]


def rewind(run_dir: Path, update: int, stem: str = "metrics") -> None:
    """Keep the rows up to `update`; later ones, of updates that will be done again, move to metrics.discarded.jsonl.

    stem: of another file of rows with an `update`, as samples.jsonl.

    Lines that hold no row move there too; what a crash cut short at the end goes. events.jsonl is left alone: what
    happened has happened, also in updates done again. Raises OSError, naming a file, where the disk refuses.
    """
    path, temporary = run_dir / f"{stem}.jsonl", run_dir / f".{stem}.jsonl.tmp"

    def lines(kept: bool) -> Iterator[bytes]:
        for line, row in each_row(path):
            if line.endswith(b"\n") and (row is not None and row["update"] <= update) is kept:
                yield line

    head = kept = size = 0  # bytes: of the rows to keep that open the file, of all to keep, of the file
    for line, row in each_row(path):
        if row is not None and row["update"] <= update:
            kept += len(line)
            head += len(line) if head == size else 0
        size += len(line)
    if head == size:
        return
    if any(True for _ in lines(kept=False)):
        _write_durably(run_dir / f"{stem}.discarded.jsonl", "ab", lines(kept=False))
    if kept == head:
        with naming(path), path.open("r+b") as f:
            f.truncate(head)  # one step, and it needs no room: killed before it, the next start does the same
            os.fsync(f.fileno())
        return
    try:
        _write_durably(temporary, "wb", lines(kept=True))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    with naming(path):
        fsync(run_dir)  # or a power failure brings the old file back, without the rows to come


def _write_durably(path: Path, mode: str, lines: Iterator[bytes]) -> None:
    with naming(path), path.open(mode) as f:
        f.writelines(lines)
        f.flush()
        os.fsync(f.fileno())
