"""Files that are whole and outlive a crash, and JSON from them. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourscale.cli import InputError


def fsync(path: Path) -> None:
    """Flush a file or directory to the disk; directories only where the system can."""
    if path.is_dir() and os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around writes: an OSError that names no file, as that of a full disk, gets the name of `path`."""
    try:
        yield
    except OSError as e:
        if e.filename is None:
            e.filename = str(path)
        raise


def read_json(path: Path, way: str = "start in another directory") -> dict[str, Any]:
    """A JSON object from a file; InputError where it is missing or isn't one. way: out, beside restoring the file."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"{path}: {e.strerror.lower()}; restore it or {way}") from None
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: not valid JSON ({e}); restore it or {way}") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: holds no JSON object; restore it or {way}")
    return table


def write_json(path: Path, table: dict[str, Any]) -> None:
    """Replace a JSON file whole: a reader sees the old one or the new one, also after a crash."""
    replace(path, json.dumps(table, indent=2, sort_keys=False) + "\n")


def replace(path: Path, text: str) -> None:
    """Replace a text file atomically and durably. An OSError names a file."""
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(path):
        with temporary.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        fsync(path.parent)
