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
from collections.abc import Callable, Sequence
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
DTYPES = (np.dtype("<u2"), np.dtype("<u4"))
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
    The directory is one of several in a work directory, which messages tell to delete.
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
            raise InputError(f"{path}: not what an interrupted run wrote; delete {self.directory.parent} to start over")
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
    # A lone surrogate (of a file name that isn't UTF-8) becomes \udcXX, which is what JSON calls it too.
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as f:
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
    where unknown. dtype: uint16 or uint32, so that no id is negative.
    digest: hex, names the stream's content for any shard size, as the manifest has it (`verify` reads the data).
    """

    def __init__(
        self, split: str, shards: Sequence[Shard], dtype: np.dtype, vocab_size: int, text_bytes: int | None, digest: str
    ) -> None:
        self.split, self.shards, self.dtype = split, list(shards), np.dtype(dtype)
        if self.dtype not in DTYPES:
            raise ValueError(f"{split}: ids of {self.dtype}, not of uint16 or uint32")
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
        if len(starts) > 1:
            self._announce(starts, length)
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

    def _announce(self, starts: np.ndarray, length: int) -> None:
        """Let the disk look for all windows at once: read one after the other, each would wait for it alone."""
        if not hasattr(os, "posix_fadvise"):
            return
        size = length * self.dtype.itemsize
        for start, index in zip(
            starts.tolist(), np.searchsorted(self._ends, starts, side="right").tolist(), strict=True
        ):
            if index < len(self.shards):
                shard = self.shards[index]
                with self._opened(shard.path) as fd, contextlib.suppress(OSError):
                    offset = shard.offset + (start - shard.start) * self.dtype.itemsize
                    os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)

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
                f"{shard.path}: ends before token {first + count} of {shard.tokens}; the shard was truncated: "
                f"{remedy(shard.path.parent)}"
            )
        return np.frombuffer(data, self.dtype)

    @contextlib.contextmanager
    def _opened(self, path: Path):
        try:
            fd = self._files.get(path)
            if fd is None:
                fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise _on_this_rank(f"{path}: missing; {remedy(path.parent)}") from None
        keep = len(self.shards) <= MAX_OPEN_FILES and self._files.setdefault(path, fd) == fd
        try:
            yield fd
        finally:
            if not keep:  # too many shards to keep open, or another thread was first to open this one
                os.close(fd)


def _on_this_rank(message: str) -> InputError:
    """An error that a read meets on one rank of many, which must speak for itself."""
    error = InputError(message)
    error.speaks = True
    return error


def remedy(data_dir: Path) -> str:
    """What to do about damage: prepare.py makes nothing anew beside a manifest, and foreign shards not at all."""
    return "restore it" + (
        f", or delete {data_dir} and run prepare.py again" if (data_dir / MANIFEST).is_file() else ""
    )


def load_manifest(data_dir: Path) -> dict[str, Any]:
    """The manifest of a data directory: what the code reads of it is there, and of the right kind.

    Raises InputError where there is no directory or manifest, where it can't be read by this version, and where a field
    is missing or malformed.
    """
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
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"{path}: can't be read ({e}); {remedy(data_dir)}") from None
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if found not in ((FORMAT, VERSION), (FORMAT, 1)):  # 1 had one source, under "source"
        raise InputError(
            f"{path}: format {_shown(found[0])} version {_shown(found[1])}, this code reads {FORMAT} version "
            f"{VERSION}; delete {data_dir} and run prepare.py again"
        )
    try:
        _check_fields(manifest)
    except ValueError as e:
        raise InputError(f"{path}: {e}; {remedy(data_dir)}") from None
    return manifest


def _check_fields(manifest: dict[str, Any]) -> None:
    """Raise ValueError naming the first field that is missing or malformed."""
    tokenizer = _field(manifest, "tokenizer", _is_table, "an object")
    _field(tokenizer, "file", _is_file_name, "the name of a file beside it", "tokenizer.")
    _field(tokenizer, "sha256", _is_text, "text", "tokenizer.")
    vocab_size = _field(
        tokenizer, "vocab_size", lambda v: _is_count(v) and 0 < v <= 1 << 32, "a number from 1 to 2^32", "tokenizer."
    )
    right = token_dtype(vocab_size).name
    _field(manifest, "dtype", lambda v: v == right, f"{right!r}, as ids of a vocabulary of {vocab_size:,} have")
    splits = _field(manifest, "splits", _is_table, "an object")
    for split in SPLITS:
        part = _field(splits, split, _is_table, "an object", "splits.")
        _field(part, "stream_sha256", _is_text, "text", f"splits.{split}.")
        listed = _field(part, "shards", _is_tables, "a list of objects", f"splits.{split}.")
        for i, table in enumerate([part, *listed]):
            where = f"splits.{split}." + (f"shards[{i - 1}]." if i else "")
            for name in ("tokens", "documents", "text_bytes"):
                _field(table, name, _is_count, "a whole number, 0 or more", where)
        for i, shard in enumerate(listed):
            _field(shard, "file", _is_file_name, "the name of a file beside it", f"splits.{split}.shards[{i}].")
            _field(shard, "sha256", _is_text, "text", f"splits.{split}.shards[{i}].")
    if "command" in manifest:  # which older ones lack, as they do the next
        _field(manifest, "command", _is_table, "an object")
    if "sources" in manifest:
        _field(manifest, "sources", _is_tables, "a list of objects")
    if manifest.get("unigram_nats") is not None:
        _field(manifest, "unigram_nats", lambda v: type(v) in (int, float) and 0 <= v < 100, "a number of nats")


def _field(table: dict[str, Any], name: str, fits: Callable[[Any], bool], what: str, where: str = "") -> Any:
    if name not in table:
        raise ValueError(f"lacks {where + name!r}")
    if not fits(table[name]):
        raise ValueError(f"its {where}{name} is {_shown(table[name])}, not {what}")
    return table[name]


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_table, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 60  # no bool; bytes of it still fit an int64


def _is_file_name(value: Any) -> bool:
    """No path that leads elsewhere, and nothing that a message can't show."""
    return _is_text(value) and value not in ("", ".", "..") and not set("/\\") & set(value) and value.isprintable()


def _shown(value: Any) -> str:
    """A value of the manifest for a message: one line, and not a long one."""
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def open_split(data_dir: Path, split: Split, manifest: dict[str, Any] | None = None) -> TokenStream:
    """One split of a data directory, after checking that each shard is there in its full size.

    manifest: as `load_manifest` returned it, None to load it. Raises InputError as that, and for a missing shard, one
    of another size, and an empty split.
    """
    data_dir = Path(data_dir)
    manifest = manifest or load_manifest(data_dir)
    part, vocab_size = manifest["splits"][split], manifest["tokenizer"]["vocab_size"]
    dtype, text_bytes, digest = token_dtype(vocab_size), part["text_bytes"], part["stream_sha256"]
    listed = [(shard["file"], shard["tokens"]) for shard in part["shards"]]
    if not sum(tokens for _, tokens in listed):
        raise InputError(
            f"{data_dir}: the {split} split is empty; delete {data_dir} and run prepare.py again with more text"
        )
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
        raise InputError(f"{shard.path}: missing; {remedy(shard.path.parent)}") from None
    if found != shard.tokens * dtype.itemsize:
        raise InputError(
            f"{shard.path}: {found:,} bytes, the manifest has {shard.tokens:,} tokens of {dtype.itemsize} bytes "
            f"({shard.tokens * dtype.itemsize:,}); {remedy(shard.path.parent)}"
        )
