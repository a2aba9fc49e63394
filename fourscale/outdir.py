"""A directory that a door writes: it takes its name when it is whole, or leaves nothing behind."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from fourscale.cli import InputError


def refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise InputError(f"--out {out}: exists; remove it or choose another directory")


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn the disk's refusals into InputError."""
    try:
        yield
    except OSError as e:
        raise InputError(f"--out {out}: {(e.strerror or str(e)).lower()}; choose a writable place with room") from None


@contextlib.contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A fresh directory beside `out`, which takes that name, durably, where the block ends well, and else is removed,
    also by SIGTERM.

    Raises InputError where `out` exists or can't be written.
    """
    from fourscale.durable import fsync

    refuse_existing(out)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    temporary = out.parent / f".{out.name}.tmp-{secrets.token_hex(4)}"
    try:
        with writing(out):
            temporary.mkdir(parents=True)
        yield temporary
        with writing(out):
            for path in (*temporary.rglob("*"), temporary):
                fsync(path)
            refuse_existing(out)
            temporary.rename(out)
            fsync(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
