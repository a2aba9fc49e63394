"""The bytes of input files, local or behind a URL, plain or compressed: found, opened, and cut into blocks of rows.

Cutting is all that one process does for many, so nothing here loops over lines or characters. A block depends on the
file and on the block's offset alone: reading on from any block's end gives the same blocks as reading from the start.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fourscale.cli import InputError, RunFailed

CHUNK_BYTES = 1 << 20  # about the size of a block
LONGEST = 1 << 27  # bytes of a row, which has to be held in memory
PARAGRAPHS = 1 << 16  # a block of plain text ends at a blank line if its last 64 KB have one
BOM = b"\xef\xbb\xbf"
CODECS = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES = (*(kind + codec for kind in (".txt", ".jsonl", ".csv") for codec in ("", *CODECS)), ".parquet")

# A line end and the blank lines after it. Bytes: all blank lines that a plain text file may have are ASCII in practice.
BLANK_LINES = re.compile(rb"\n(?:[ \t\r\v\f]*+\n)++")
# A whole quoted field of CSV after its separator: RFC 4180 knows quotes nowhere else.
QUOTED = re.compile(rb'(?<![^,\r\n])"[^"]*+(?:""[^"]*+)*+"(?![^,\r\n])')


@dataclass(frozen=True)
class File:
    """A path as the user's pattern gave it, or a URL; its bytes as stored, None if a server doesn't tell; and a stamp
    (time of change or ETag) that changes with its content."""

    path: str
    size: int | None
    stamp: str

    @property
    def remote(self) -> bool:
        return is_url(self.path)

    @property
    def suffix(self) -> str:
        """One of SUFFIXES, or ""."""
        return suffix_of(self.path)


class Block(NamedTuple):
    """Whole rows of a file, decompressed; the line where they begin, from 1; where the next block begins, and its line;
    the stored bytes that reading it took."""

    data: bytes
    line: int
    end: int
    end_line: int
    size: int


# A cut: (data, whether the file ends here) -> the length of its whole rows, 0 to ask for more data.
Cut = Callable[[bytes, bool], int]


class BadCut(Exception):
    """Bytes that can't be cut, with the position of the fault."""

    def __init__(self, at: int, message: str) -> None:
        self.at, self.message = at, message


def is_url(path: str) -> bool:
    return "://" in path


def suffix_of(path: str) -> str:
    name = (urlsplit(path).path if is_url(path) else path).lower()
    return next((s for s in SUFFIXES if name.endswith(s)), "")


def has_magic(path: str) -> bool:
    """A pattern rather than a name. The ? of a web address begins its query."""
    return ("*" in path or "[" in path) if path.startswith("http") and is_url(path) else glob.has_magic(path)


# ---- finding ---------------------------------------------------------------------------------------------------------


def find(pattern: str) -> list[File]:
    """The files that a name, glob or URL means, sorted by path. Raises InputError where there are none, where one has
    no suffix of SUFFIXES, and where a URL can't be listed."""
    if is_url(pattern):
        found = _find_remote(pattern)
    else:
        names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
        found = [local(Path(name)) for name in names if not Path(name).is_dir()]
    if not found:
        raise InputError(f"--dataset {pattern}: no file matches")
    for file in found:
        if not file.suffix:
            raise InputError(
                f"--dataset {pattern}: can't read {file.path}; readable are {', '.join(SUFFIXES)}; "
                "copy other plain text to a name that ends in .txt"
            )
    return sorted(found, key=lambda file: file.path)


def local(path: Path) -> File:
    """Raises InputError for what is no regular file, as a link into a file system that isn't there."""
    if not path.is_file():
        raise InputError(f"--dataset {path}: no readable file (a broken link?); mend it, or name the others alone")
    stat = path.stat()
    return File(str(path), stat.st_size, str(stat.st_mtime_ns))


def identity(file: File) -> str:
    """A line that changes if the file may have changed; the same for each spelling of its path."""
    path = file.path if file.remote else os.fsdecode(Path(file.path).resolve())
    return f"{path}\0{file.size}\0{file.stamp}\n"


def _find_remote(url: str) -> list[File]:
    file_system, path = _file_system(url)
    try:
        infos = file_system.glob(path, detail=True) if has_magic(url) else {path: file_system.info(path)}
    except Exception as e:
        # The web's file system calls whatever went wrong a missing file.
        cause = e.__cause__ if isinstance(e, FileNotFoundError) else e
        if cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) == 404:
            return []
        raise InputError(f"--dataset {url}: can't be reached ({first_line(cause)}); check address and login") from None
    found = []
    for name, info in infos.items():
        if info.get("type", "file") == "file":
            keys = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
            stamp = next((str(info[key]) for key in keys if info.get(key)), "")
            found.append(File(file_system.unstrip_protocol(name) if has_magic(url) else url, info.get("size"), stamp))
    return found


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec
    from fsspec.registry import known_implementations

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError:
        module = known_implementations[url.split("://")[0]]["class"].split(".")[0]
        if module == "fsspec":
            module = "aiohttp" if url.startswith("http") else "'fsspec[full]'"
        raise InputError(f"--dataset {url}: needs a package that is missing; pip install {module}") from None
    except Exception as e:
        raise InputError(f"--dataset {url}: {first_line(e)}") from None


def first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


# ---- opening ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(file: File) -> Iterator[Any]:
    """The file as a binary stream of its stored bytes. While it is open, data that can't be decoded is an InputError
    and a lost connection RunFailed, both naming the file."""
    import pyarrow

    try:
        if file.remote:
            file_system, path = _file_system(file.path)
            stream = file_system.open(path, "rb")
        else:
            stream = open(file.path, "rb")  # noqa: SIM115
        with stream:
            yield stream
    except (InputError, RunFailed):
        raise
    except Exception as e:
        # Arrow's decompression speaks through OSErrors without a number, as some connections do.
        decoding = (
            isinstance(e, OSError) and e.errno is None and (not file.remote or re.search("compress|zlib", str(e)))
        )
        if isinstance(e, pyarrow.ArrowException) or decoding:
            raise InputError(f"{file.path}: damaged {file.suffix} ({first_line(e)}); fetch the file again") from None
        if file.remote:
            raise RunFailed(f"{file.path}: lost ({first_line(e)}); the same command goes on where it was") from None
        if isinstance(e, OSError):
            raise InputError(f"{file.path}: can't be read ({e.strerror or first_line(e)})") from None
        raise


class _Bytes:
    """The decompressed bytes of an open file."""

    def __init__(self, file: File, stored: Any) -> None:
        import pyarrow

        codec = CODECS.get(Path(file.suffix).suffix)
        if codec and file.size == 0:
            raise InputError(f"{file.path}: damaged {file.suffix} (an empty file); fetch the file again")
        self.compressed, self.stored, self.held, self.offset = codec is not None, stored, b"", 0
        self.stream = pyarrow.CompressedInputStream(stored, codec) if codec else stored

    def skip(self, count: int) -> None:
        """To the offset `count`, from the start."""
        self.offset = count
        if self.compressed:
            while count and (piece := self.stream.read(min(count, CHUNK_BYTES))):
                count -= len(piece)
        else:
            self.stream.seek(count)

    def peek(self, count: int) -> bytes:
        """The next `count` bytes, fewer only at the end of the file."""
        if len(self.held) < count:
            parts, missing = [self.held], count - len(self.held)
            while missing and (piece := self.stream.read(missing)):
                parts.append(piece)
                missing -= len(piece)
            self.held = b"".join(parts)
        return self.held[:count]

    def take(self, count: int) -> None:
        self.held = self.held[count:]
        self.offset += count

    def read_so_far(self) -> int:
        """In stored bytes."""
        return self.stored.tell() if self.compressed else self.offset


def blocks(file: File, offset: int, line: int, cut: Cut) -> Iterator[Block]:
    """The file from `offset` (after decompression), which stands on `line`, as blocks of about CHUNK_BYTES.

    Raises InputError, naming the line, where `cut` finds nothing to cut at.
    """
    with opened(file) as stored:
        source = _Bytes(file, stored)
        source.skip(offset)
        before = source.read_so_far()
        while True:
            data, length = _whole_rows(file, source, line, cut)
            if not length:
                return
            source.take(length)
            now = source.read_so_far()
            end_line = line + data.count(b"\n", 0, length)
            yield Block(data[:length], line, source.offset, end_line, now - before)
            line, before = end_line, now


def _whole_rows(file: File, source: _Bytes, line: int, cut: Cut) -> tuple[bytes, int]:
    """Data at least as long as its first row, and the length of its whole rows (0 at the end of the file)."""
    size = CHUNK_BYTES
    while True:
        data = source.peek(size)
        end = len(data) < size
        try:
            length = cut(data, end)
        except BadCut as e:
            at = line + data.count(b"\n", 0, e.at)
            raise InputError(f"{file.path}:{at}: {e.message}") from None
        if length or end:
            return data, length
        size *= 2


# ---- cutting ---------------------------------------------------------------------------------------------------------


def at_lines(data: bytes, end: bool) -> int:
    """After the last newline. Raises BadCut for a line of LONGEST bytes."""
    length = len(data) if end else data.rfind(b"\n") + 1
    if not length and len(data) >= LONGEST:
        raise BadCut(0, f"a line of more than {LONGEST >> 20} MB; is this really a file of one row a line?")
    return length


def at_separator(separator: bytes) -> Cut:
    """After the last separator; a document of LONGEST bytes is a BadCut."""

    def cut(data: bytes, end: bool) -> int:
        if end:
            return len(data)
        # Separators are found from the left, as by split: the last one that rfind sees may overlap another.
        length = len(data) - len(data.split(separator)[-1])
        if not length and len(data) >= LONGEST:
            raise BadCut(0, f"no {separator.decode()!r} within {LONGEST >> 20} MB; check --doc-sep, or leave it out")
        return length

    return cut


def at_paragraphs(data: bytes, end: bool) -> int:
    """Of plain text: after blank lines if there are any near the end, else after a line, else after a character."""
    if end:
        return len(data)
    half, length = len(data) // 2, 0
    for match in BLANK_LINES.finditer(data, max(half, len(data) - PARAGRAPHS)):
        length = match.end()
    return length or data.rfind(b"\n", half) + 1 or _whole_characters(data)


def _whole_characters(data: bytes) -> int:
    """The length of `data` without a UTF-8 character that is cut off at its end."""
    for back in range(1, 5):
        lead = data[-back]
        if lead < 0x80 or lead >= 0xC0:
            needs = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return len(data) - back if back < needs else len(data)
    return len(data)


def outside_quotes(data: bytes, end: bool) -> int:
    """Of CSV: after the last newline that is not within a quoted field. Raises BadCut for a quote that is neither at
    the start nor at the end of a field, and for a field that isn't closed within the file or LONGEST bytes."""
    newline = len(data) if end else data.rfind(b"\n") + 1
    if data.count(b'"', 0, newline) % 2 == 0:
        return newline
    if not end:
        between = data.split(b'"')  # the even ones are outside
        for k in range((len(between) - 1) // 2 * 2, -1, -2):
            if (at := between[k].rfind(b"\n")) >= 0:
                return sum(map(len, between[:k])) + k + at + 1
    at = stray_quote(data)
    if at > 0 and data[at - 1] not in b",\r\n":
        raise BadCut(at, STRAY_QUOTE)
    if end or len(data) >= LONGEST:
        where = "" if end else f" within {LONGEST >> 20} MB"
        raise BadCut(at, f'a quoted field begins and is not closed{where}; close it, and write a quote in it as ""')
    return 0


STRAY_QUOTE = 'a quote amid a field; quote the whole field, and write a quote in it as ""'


def stray_quote(data: bytes) -> int:
    """The position of the first quote in CSV that doesn't belong to a whole quoted field, -1 if there is none. `data`
    begins outside quotes."""
    if data.startswith(BOM):
        data = b",,," + data[len(BOM) :]
    if b'"' not in data:
        return -1
    rest = QUOTED.sub(b"", data)
    if b'"' not in rest:
        return -1
    return QUOTED.sub(lambda match: b" " * len(match[0]), data).find(b'"')
