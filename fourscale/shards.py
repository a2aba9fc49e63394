"""The shard format: what prepare.py writes and everything else reads.

A data directory holds one stream of token ids per split, cut into headerless little-endian files, and a manifest:

    train_000.bin  train_001.bin ...  val_000.bin ...   uint16 while the padded vocabulary fits 65,536, else uint32
    tokenizer.json                                      the tokenizer that made the ids
    manifest.json                                       written last: a directory without one is not trainable

A document may begin in one shard and end in the next, so the stream and its digest are the same for any shard size.

Reading other people's formats (nanoGPT, llm.c, datatrove) means building a TokenStream from other lists of Shards.
Preparing in several processes means a ShardWriter per process; the stream is then their shards in order of process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fourscale.config import InputError, padded

FORMAT = "fourscale-shards"
VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "val")
MAX_OPEN_FILES = 256  # of the usual limit of 1024 a process

Split = Literal["train", "val"]


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16 where the padded vocabulary fits 65,536, else uint32."""
    return np.dtype("<u2" if padded(vocab_size) <= 1 << 16 else "<u4")


def shard_name(split: Split, index: int) -> str:
    return f"{split}_{index:03d}.bin"


# ---- writing ---------------------------------------------------------------------------------------------------------


class ShardWriter:
    """Writes one split's stream as shards of exactly `shard_tokens` tokens (the last may be shorter) into `directory`.

    Names are final: write into a directory that readers don't look at, and move the shards once all are complete.
    """

    def __init__(self, directory: Path, split: Split, vocab_size: int, shard_tokens: int) -> None:
        self.directory, self.split, self.vocab_size, self.shard_tokens = directory, split, vocab_size, shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.tokens = self.documents = self.text_bytes = 0
        self._shards: list[dict[str, Any]] = []
        self._file: Any = None
        self._shard_sha = self._stream_sha = hashlib.sha256()

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append a document: ids int [n] with its end-of-text, n >= 1, and the UTF-8 size of its text.

        The shard where a document ends counts it and its bytes. Raises InputError for an id outside the vocabulary.
        """
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            bad = int(ids[(ids < 0) | (ids >= self.vocab_size)][0])
            raise InputError(f"{self.split}: id {bad} is outside the vocabulary of {self.vocab_size}; refused")
        stored = ids.astype(self.dtype)
        while len(stored):
            if self._file is None:
                self._open()
            shard = self._shards[-1]
            part, stored = np.split(stored, [self.shard_tokens - shard["tokens"]])
            data = part.tobytes()
            self._file.write(data)
            self._shard_sha.update(data)
            self._stream_sha.update(data)
            shard["tokens"] += len(part)
            if not len(stored):
                shard["documents"] += 1
                shard["text_bytes"] += text_bytes
            if shard["tokens"] == self.shard_tokens:
                self._close()
        self.tokens, self.documents = self.tokens + len(ids), self.documents + 1
        self.text_bytes += text_bytes

    def finish(self) -> dict[str, Any]:
        """Close the last shard and return the split's manifest entry."""
        if self._file is not None:
            self._close()
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "stream_sha256": self._stream_sha.hexdigest(),
            "shards": self._shards,
        }

    def _open(self) -> None:
        name = shard_name(self.split, len(self._shards))
        self._file = (self.directory / name).open("wb")
        self._shard_sha = hashlib.sha256()
        self._shards.append({"file": name, "tokens": 0, "documents": 0, "text_bytes": 0})

    def _close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._shards[-1]["sha256"] = self._shard_sha.hexdigest()


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Publish the manifest: durable under a temporary name, then renamed, in a directory whose shards are durable."""
    sync_directory(directory)
    temporary = directory / f"{MANIFEST}.tmp"
    with temporary.open("w", encoding="utf-8") as f:
        json.dump({"format": FORMAT, "version": VERSION} | manifest, f, indent=2, ensure_ascii=False)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(directory / MANIFEST)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make renames within a directory durable, where the platform can."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """A file of `tokens` ids, and the stream position of its first."""

    path: Path
    tokens: int
    start: int


class TokenStream:
    """The shards of one split as one stream of ids. Safe to use from threads and after fork or pickling.

    total: tokens. vocab_size: ids are below it. text_bytes: UTF-8 bytes of the text that the tokens stand for.
    digest: hex, names the stream's content for any shard size, as the manifest has it (`verify` reads the data).
    """

    def __init__(
        self, split: str, shards: Sequence[Shard], dtype: np.dtype, vocab_size: int, text_bytes: int, digest: str
    ) -> None:
        self.split, self.shards, self.dtype = split, list(shards), np.dtype(dtype)
        self.vocab_size, self.text_bytes, self.digest = vocab_size, text_bytes, digest
        self.total = sum(shard.tokens for shard in self.shards)
        self._ends = np.cumsum([shard.tokens for shard in self.shards])
        self._files: dict[Path, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def __del__(self) -> None:
        for fd in self.__dict__.get("_files", {}).values():
            with contextlib.suppress(OSError):
                os.close(fd)

    def read(self, start: int, count: int) -> np.ndarray:
        """int64 [count]: the ids from stream position `start` on, across shards.

        Raises IndexError for a range that isn't within the stream, InputError (naming the shard) for a file that has
        gone missing or become shorter.
        """
        out = np.empty(count, np.int64)
        self._read_into(out, start)
        return out

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int64 [B, length]: windows of ids from `starts`, int64 [B]. Raises as `read`, and InputError (naming split
        and position) for an id outside the vocabulary."""
        out = np.empty((len(starts), length), np.int64)
        for row, start in zip(out, starts, strict=True):
            self._read_into(row, int(start))
        if out.size and out.max() >= self.vocab_size:
            b, t = np.argwhere(out >= self.vocab_size)[0]
            raise _on_this_rank(
                f"{self.split} data: id {out[b, t]} at position {int(starts[b]) + t} is outside the vocabulary of "
                f"{self.vocab_size}; the shards were changed or belong to another tokenizer: run prepare.py again"
            )
        return out

    def _read_into(self, out: np.ndarray, start: int) -> None:
        count = len(out)
        if start < 0 or start + count > self.total:
            raise IndexError(f"{self.split}: tokens {start} .. {start + count} of a stream of {self.total}")
        done = 0
        index = int(np.searchsorted(self._ends, start, side="right"))
        while done < count:
            shard = self.shards[index]
            within = start + done - shard.start
            part = min(count - done, shard.tokens - within)
            out[done : done + part] = self._read_shard(shard, within, part)
            done += part
            index += 1

    def _read_shard(self, shard: Shard, first: int, count: int) -> np.ndarray:
        # pread, not memmap: where a mapped file has become shorter, a read kills the process with SIGBUS.
        size, offset = count * self.dtype.itemsize, first * self.dtype.itemsize
        with self._opened(shard.path) as fd:
            data = os.pread(fd, size, offset)
            while 0 < len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
                data += more
        if len(data) != size:
            raise _on_this_rank(
                f"{shard.path}: ends before token {first + count} of {shard.tokens}; the shard was truncated: restore "
                "it or run prepare.py again"
            )
        return np.frombuffer(data, self.dtype)

    @contextlib.contextmanager
    def _opened(self, path: Path):
        try:
            fd = self._files.get(path)
            if fd is None:
                fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise _on_this_rank(f"{path}: missing; restore the shard or run prepare.py again") from None
        keep = len(self.shards) <= MAX_OPEN_FILES and self._files.setdefault(path, fd) == fd
        try:
            yield fd
        finally:
            if not keep:  # too many shards to keep open, or another thread was first to open this one
                os.close(fd)


def _on_this_rank(message: str) -> InputError:
    """An error that a read meets on one rank of many, which must speak for itself."""
    error = InputError(message)
    error.all_ranks = True
    return error


def load_manifest(data_dir: Path) -> dict[str, Any]:
    """The manifest of a data directory. Raises InputError where there is no directory or manifest, or it can't be read
    by this version."""
    data_dir = Path(data_dir)
    path = data_dir / MANIFEST
    if data_dir.is_file():
        raise InputError(f"{data_dir}: a file, not a data directory; python prepare.py --dataset {data_dir} makes one")
    if not data_dir.is_dir():
        raise InputError(f"{data_dir}: no such data directory; make it with python prepare.py --out {data_dir}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{data_dir}: no {MANIFEST}, so no finished data; run python prepare.py --out {data_dir}"
        ) from None
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: can't be read ({e}); restore it or run prepare.py again") from None
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if found != (FORMAT, VERSION):
        raise InputError(
            f"{path}: format {found[0]} version {found[1]}, this code reads {FORMAT} version {VERSION}; "
            "run prepare.py again"
        )
    return manifest


def open_split(data_dir: Path, split: Split) -> TokenStream:
    """One split of a data directory, after checking that each shard is there in its full size.

    Raises InputError as `load_manifest`, and for a missing shard, one of another size, and an empty split.
    """
    data_dir = Path(data_dir)
    manifest = load_manifest(data_dir)
    try:
        part, vocab_size = manifest["splits"][split], manifest["tokenizer"]["vocab_size"]
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        listed = [(shard["file"], shard["tokens"]) for shard in part["shards"]]
        text_bytes, digest = part["text_bytes"], part["stream_sha256"]
    except (KeyError, TypeError) as e:
        raise InputError(f"{data_dir / MANIFEST}: lacks {e}; restore it or run prepare.py again") from None
    if not sum(tokens for _, tokens in listed):
        raise InputError(f"{data_dir}: the {split} split is empty; run prepare.py again with more text")
    shards, start = [], 0
    for name, tokens in listed:
        shards.append(Shard(data_dir / name, tokens, start))
        start += tokens
        _check_size(shards[-1], dtype)
    return TokenStream(split, shards, dtype, vocab_size, text_bytes, digest)


def _check_size(shard: Shard, dtype: np.dtype) -> None:
    try:
        found = shard.path.stat().st_size
    except OSError:
        raise InputError(f"{shard.path}: missing; restore the shard or run prepare.py again") from None
    if found != shard.tokens * dtype.itemsize:
        raise InputError(
            f"{shard.path}: {found:,} bytes, the manifest has {shard.tokens:,} tokens of {dtype.itemsize} bytes "
            f"({shard.tokens * dtype.itemsize:,}); restore the shard or run prepare.py again"
        )


def verify(data_dir: Path) -> list[str]:
    """Read all data and return what is wrong with it, a line each; empty if every hash, count and id is right.

    Checks the tokenizer's file, each shard, each split's stream, and that ids are within the vocabulary. Raises
    InputError as `load_manifest`.
    """
    data_dir = Path(data_dir)
    manifest = load_manifest(data_dir)
    problems = []
    entry = manifest["tokenizer"]
    try:
        if hashlib.sha256((data_dir / entry["file"]).read_bytes()).hexdigest() != entry["sha256"]:
            problems.append(f"{data_dir / entry['file']}: not the tokenizer the data was made with")
    except OSError:
        problems.append(f"{data_dir / entry['file']}: missing")
    for split in SPLITS:
        try:
            stream = open_split(data_dir, split)
        except InputError as e:
            problems.append(str(e))
            continue
        expected = {shard["file"]: shard["sha256"] for shard in manifest["splits"][split]["shards"]}
        stream_sha = hashlib.sha256()
        for shard in stream.shards:
            shard_sha = hashlib.sha256()
            highest = 0
            for first in range(0, shard.tokens, 1 << 22):
                ids = stream._read_shard(shard, first, min(1 << 22, shard.tokens - first))
                shard_sha.update(ids.tobytes())
                stream_sha.update(ids.tobytes())
                highest = max(highest, int(ids.max()))
            if shard_sha.hexdigest() != expected[shard.path.name]:
                problems.append(f"{shard.path}: its content has changed since it was written (sha256)")
            if highest >= stream.vocab_size:
                problems.append(f"{shard.path}: id {highest} is outside the vocabulary of {stream.vocab_size}")
        if stream_sha.hexdigest() != stream.digest:
            problems.append(f"{data_dir}: the {split} stream is not the manifest's (sha256)")
    return problems
