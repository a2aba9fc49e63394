"""A data directory in the making: whether it's made already, its lock, the journal of a run that may be killed, and
publishing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock

from fourscale import __version__, shards, tokenization
from fourscale.cli import InputError, RunFailed, say
from fourscale.shards import sync_directory
from fourscale.tokenization import Tokenizer

UNFINISHED = ".prepare_unfinished"  # directory within --out where everything is made
LIBRARIES = ("tiktoken", "tokenizers")  # that decide the bytes
VERSIONS = ", ".join([f"fourscale {__version__}", *(f"{name} {metadata.version(name)}" for name in LIBRARIES)])


def already_made(out: Path, asked: dict[str, Any]) -> bool:
    """Whether `out` holds what this command would make, whole; InputError if it holds other data or lacks a shard."""
    if not (out / shards.MANIFEST).exists():
        return False
    way_on = f"choose another --out, or delete {out} first"
    try:
        made = shards.load_manifest(out).get("command", {})
    except InputError as e:
        raise InputError(f"{e}: to do so, {way_on}") from None
    if told := differing(made, asked):
        raise InputError(f"{out}: already holds data made with {told}; {way_on}")
    if made.get("inputs") != asked["inputs"]:
        raise InputError(
            f"{out}: was made by this command, but its input files have changed since (in size or time); {way_on}"
        )
    for split in shards.SPLITS:
        shards.open_split(out, split)  # raises for a shard that is gone or has another size
    return True


def differing(made: dict[str, Any], asked: dict[str, Any]) -> str:
    """The flags in which two commands differ, for a message."""
    local = None not in asked["inputs"] and made.get("inputs") == asked["inputs"]  # however the files are spelled
    skipped = {"inputs", "dataset"} if local else {"inputs", "shares"}
    names = [name for name in asked if name not in skipped and made.get(name) != asked[name]]

    def shown(value: Any) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    return ", ".join(f"--{name.replace('_', '-')} {shown(made.get(name))} (now {shown(asked[name])})" for name in names)


@contextlib.contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """A full disk, a missing permission and the like as one line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        raise RunFailed(
            f"{e.filename or out}: {(e.strerror or str(e)).lower()}; {out} is not finished: mend that and run the same "
            "command, which goes on from here"
        ) from None


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make `out` if need be and hold it for this process; a directory made for nothing goes again. Raises InputError
    where another prepare.py has it."""
    fresh = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(out / ".lock", timeout=0)
    try:
        lock.acquire()
    except NotImplementedError:
        say(f"note: {out}: its file system has no locks; start no second prepare.py there meanwhile")
    except filelock.Timeout:
        raise InputError(f"{out}: another prepare.py is at work here; wait for it or use another --out") from None
    try:
        yield
    except InputError:
        if fresh and [path.name for path in out.iterdir()] == [".lock"]:
            shutil.rmtree(out)
        raise
    finally:
        lock.release()


class Journal:
    """The directory where everything is made, and its journal: what is decided and durable, for a run that goes on.

    table: `command`, and as they come about `revisions`, `threshold`, `tokenizer`, `assembly`, `manifest`, `moves`.
    """

    def __init__(self, out: Path, command: dict[str, Any]) -> None:
        """Raises InputError for what another command left unfinished, and rather than touch shards of other origin."""
        self.work = out / UNFINISHED
        self._path = self.work / "journal.json"
        found = [path for path in sorted(out.iterdir()) if re.fullmatch(r"(train|val)_\d{3,}\.bin", path.name)]
        if not self.work.is_dir():
            if found:
                raise InputError(
                    f"{out}: holds {found[0].name} but no manifest; to train on shards of other origin name them "
                    "with train.py --data, else use another --out or delete these files"
                )
            self.work.mkdir()
        self.table = self._load()
        if not self.table:
            for path in self.work.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.table = {"command": json.loads(json.dumps(command)), "versions": VERSIONS}
            return
        way_on = f"choose another --out, or delete {out} first"
        begun = self.table["command"]
        if told := differing(begun, self.table["command"] | json.loads(json.dumps(command))):
            raise InputError(f"{out}: holds the unfinished work of a command with {told}; give that again, or {way_on}")
        if begun["inputs"] != command["inputs"]:
            raise InputError(f"{out}: its input files have changed since this work was begun; {way_on}")
        if self.table["versions"] != VERSIONS:
            raise InputError(f"{out}: was begun by {self.table['versions']}, this is {VERSIONS}; {way_on}")

    def save(self, **entries: Any) -> None:
        """Add to the table, durably and at once."""
        self.table |= entries
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as f:
            json.dump(self.table, f)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(self._path)
        sync_directory(self.work)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that an interrupted run has made. Raises InputError where it's gone."""
        try:
            return tokenization.load(self.work, self.table["tokenizer"])
        except InputError as e:
            raise InputError(f"{e}; or delete {self.work} to start over") from None

    def _load(self) -> dict[str, Any]:
        try:
            table = json.loads(self._path.read_text(encoding="utf-8"))
            return table if {"command", "versions"} <= table.keys() else {}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError):
            raise InputError(f"{self._path}: not valid JSON; delete {self.work} to start over") from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Where the input is refused before anything was made, nothing stays."""
        if kind is InputError and "assembly" not in self.table:
            shutil.rmtree(self.work, ignore_errors=True)


def publish(out: Path, journal: Journal) -> dict[str, Any]:
    """Move the finished files from the work directory to `out`, then write the manifest, then remove the rest. Killed
    in between, it can be done again. Returns the manifest."""
    manifest = journal.table["manifest"]
    file = manifest["tokenizer"]["file"]
    for name, final in [*journal.table["moves"], (file, file)]:
        if (journal.work / name).exists():
            (journal.work / name).replace(out / final)
        elif not (out / final).exists():  # else it was moved by a run that was killed here
            raise InputError(f"{out / final}: gone since it was made; delete {out} and run the same command again")
    shards.write_manifest(out, manifest)
    shutil.rmtree(journal.work)
    return manifest
