"""The shard format: what prepare.py writes and everything else reads.

A data directory holds one stream of token ids per split, cut into headerless little-endian files, and a manifest:

    train_000.bin  train_001.bin ...  val_000.bin ...   uint16 while the padded vocabulary fits 65,536, else uint32
    tokenizer.json                                      the tokenizer that made the ids
    manifest.json                                       written last: a directory without one is not trainable

A document may begin in one shard and end in the next, so the stream and its digest are the same for any shard size.

Other people's formats (nanoGPT, llm.c, datatrove) are TokenStreams over lists of Shards too, see formats.py.
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

from fourscale.cli import InputError
from fourscale.config import padded

FORMAT = "fourscale-shards"
VERSION = 2
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
    `commit` makes what was added durable; a writer made from its answer goes on from there, whatever was added later.
    """

    def __init__(
        self,
        directory: Path,
        split: Split,
        vocab_size: int,
        shard_tokens: int,
        committed: Sequence[dict[str, Any]] = (),
    ) -> None:
        """committed: what `commit` returned. Raises InputError where the shards no longer hold it."""
        self.directory, self.split, self.vocab_size, self.shard_tokens = directory, split, vocab_size, shard_tokens
        self.dtype = token_dtype(vocab_size)
        self._shards = [dict(shard) for shard in committed]
        self.tokens, self.documents, self.text_bytes = (self._sum(k) for k in ("tokens", "documents", "text_bytes"))
        self._file: Any = None
        self._shard_sha, self.stream_sha = hashlib.sha256(), hashlib.sha256()
        for shard in self._shards:
            self._reopen(shard)

    def add(self, ids: np.ndarray, ends: np.ndarray, text_bytes: np.ndarray) -> None:
        """Append documents: ids int [n], the end of each document among them int64 [D] ascending to n, and the UTF-8
        size of its text int64 [D]. The shard where a document ends counts it and its bytes.

        Raises InputError for an id outside the vocabulary.
        """
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            bad = int(ids[(ids < 0) | (ids >= self.vocab_size)][0])
            raise InputError(f"{self.split}: id {bad} is outside the vocabulary of {self.vocab_size}; refused")
        stored = ids.astype(self.dtype, copy=False)
        done = 0
        while done < len(stored):
            if self._file is None:
                self._open()
            shard = self._shards[-1]
            part = stored[done : done + self.shard_tokens - shard["tokens"]]
            data = part.tobytes()
            self._file.write(data)
            self._shard_sha.update(data)
            self.stream_sha.update(data)
            first, last = np.searchsorted(ends, (done, done + len(part)), side="right")
            shard["tokens"] += len(part)
            shard["documents"] += int(last - first)
            shard["text_bytes"] += int(text_bytes[first:last].sum())
            done += len(part)
            if shard["tokens"] == self.shard_tokens:
                self._close()
        self.tokens, self.documents = self.tokens + len(ids), self.documents + len(ends)
        self.text_bytes += int(text_bytes.sum())

    @property
    def finished(self) -> int:
        """Shards that are complete."""
        return len(self._shards) - (self._file is not None)

    def commit(self) -> list[dict[str, Any]]:
        """Make all that was added durable and return what a writer needs to go on from here, as JSON values."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return [dict(shard) for shard in self._shards]

    def finish(self) -> list[dict[str, Any]]:
        """Close the last shard and return the manifest's entries of all."""
        if self._file is not None:
            self._close()
        return self._shards

    def _sum(self, key: str) -> int:
        return sum(shard[key] for shard in self._shards)

    def _reopen(self, shard: dict[str, Any]) -> None:
        """Read a committed shard back into the hashes; cut and keep open one that was not complete."""
        path, sha = self.directory / shard["file"], hashlib.sha256()
        size = shard["tokens"] * self.dtype.itemsize
        with contextlib.suppress(OSError), path.open("rb") as f:
            while size and (data := f.read(min(size, 1 << 22))):
                sha.update(data)
                self.stream_sha.update(data)
                size -= len(data)
        if size or shard.get("sha256", sha.hexdigest()) != sha.hexdigest():
            raise InputError(f"{path}: not what an interrupted run wrote; delete {self.directory} to start over")
        if "sha256" not in shard:
            self._file, self._shard_sha = path.open("r+b"), sha
            self._file.truncate(shard["tokens"] * self.dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

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


def split_entry(shards: Sequence[dict[str, Any]], stream_sha256: str) -> dict[str, Any]:
    """The manifest's entry of a split from those of its shards."""
    sums = {key: sum(shard[key] for shard in shards) for key in ("tokens", "documents", "text_bytes")}
    return sums | {"stream_sha256": stream_sha256, "shards": list(shards)}


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
    """A file of `tokens` ids after a header of `offset` bytes, and the stream position of its first id."""

    path: Path
    tokens: int
    start: int
    offset: int = 0


class TokenStream:
    """The shards of one split as one stream of ids. Safe to use from threads and after fork or pickling.

    total: tokens. vocab_size: ids are below it. text_bytes: UTF-8 bytes of the text that the tokens stand for, None
    where unknown.
    digest: hex, names the stream's content for any shard size, as the manifest has it (`verify` reads the data).
    """

    def __init__(
        self, split: str, shards: Sequence[Shard], dtype: np.dtype, vocab_size: int, text_bytes: int | None, digest: str
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
        """int64 [B, length]: windows of ids from `starts`, int64 [B]. Raises as `read`, and InputError (naming the
        shard and the position in it) for an id outside the vocabulary."""
        out = np.empty((len(starts), length), np.int64)
        for row, start in zip(out, starts, strict=True):
            self._read_into(row, int(start))
        if out.size and out.max() >= self.vocab_size:
            b, t = np.argwhere(out >= self.vocab_size)[0]
            at = int(starts[b] + t)
            shard = self.shards[int(np.searchsorted(self._ends, at, side="right"))]
            raise _on_this_rank(
                f"{shard.path}: id {out[b, t]} at token {at - shard.start} is outside the vocabulary of "
                f"{self.vocab_size}; the shard was changed or belongs to another tokenizer: see check.py data"
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
        size, offset = count * self.dtype.itemsize, shard.offset + first * self.dtype.itemsize
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
    if found not in ((FORMAT, VERSION), (FORMAT, 1)):  # 1 had one source, under "source"
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
