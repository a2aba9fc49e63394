"""Parsing: chunks of bytes -> documents, in whichever process. Nothing here reads files but `parse_modules`.

Every row is accounted for, as a Document (perhaps empty) or as a BadRow; blank lines are no rows. Text is left as it
is: no newline, byte order mark or Unicode form of it is touched.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fourscale import files
from fourscale.cli import InputError

UNIT = 4096  # bytes after which a blank line ends a unit of plain text
LONGEST_PARAGRAPH = 16 * UNIT  # without a blank line, a unit ends with this line
UTF16 = (b"\xff\xfe", b"\xfe\xff")
ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that Python's surrogateescape carries through str


class Document(NamedTuple):
    """A text; where it stands ("file:line", "file: row 7"), for messages; and the value of --group-field (the host, if
    that is a web address), None without the flag."""

    text: str
    where: str
    group: str | None = None


class BadRow(NamedTuple):
    """A malformed row, left to the reader to stop at or to count: the whole line to print."""

    message: str


Rows = Iterator[Document | BadRow]


class Fields(NamedTuple):
    """Names of the fields that hold a row's text and, with --group-field, its group."""

    text: str
    group: str | None = None

    def named(self) -> list[tuple[str, str]]:
        """(flag, field) of each."""
        return [("--text-field", self.text), *([("--group-field", self.group)] if self.group is not None else [])]

    def columns(self) -> list[str]:
        """Each of them once."""
        return list(dict.fromkeys(field for _, field in self.named()))

    def entry(self) -> dict[str, str]:
        """For the manifest."""
        return {flag[2:].replace("-", "_"): field for flag, field in self.named()}

    def require(self, columns: Sequence[str], where: str) -> None:
        """Raise InputError, listing the columns, unless each field is one of them."""
        for flag, field in self.named():
            if columns.count(field) != 1:
                how = "no" if field not in columns else "more than one"
                known = ", ".join(columns) or "none"
                raise InputError(f"{where}: {how} field {field!r}; there are {known}: choose with {flag}")


# ---- text -----------------------------------------------------------------------------------------------------------


def parse_fault(message: str) -> Rows:
    """What stands for the rest of a file that can't be read."""
    yield BadRow(message)


def parse_modules(paths: Sequence[str]) -> Rows:
    """Each file a document, but for empty ones and those that are not UTF-8."""
    for path in paths:
        with contextlib.suppress(UnicodeDecodeError):
            if text := Path(path).read_bytes().decode("utf-8"):
                yield Document(text, path)


def parse_units(data: bytes, path: str, line: int) -> Rows:
    """Plain text in units of about 4 KB, so that a corpus of one file can be divided; joined, they are the file.

    A unit ends after the blank lines that follow its 4096th byte; within a paragraph of more than 64 KB after a line,
    within such a line after a space, and without any of these after a character.
    """
    at = 0
    while at < len(data):
        blank = files.BLANK_LINES.search(data, at + UNIT - 1, at + LONGEST_PARAGRAPH)
        end = blank.end() if blank else _unit_end(data, at)
        unit = data[at:end]
        yield _decoded(unit, path, line)
        at, line = end, line + unit.count(b"\n")


def _unit_end(data: bytes, at: int) -> int:
    """Where a unit of LONGEST_PARAGRAPH bytes from `at` on, without blank lines, ends."""
    end = at + LONGEST_PARAGRAPH
    if end >= len(data):
        return len(data)
    for mark in (b"\n", b" "):
        if (found := data.rfind(mark, at + LONGEST_PARAGRAPH // 2, end)) >= 0:
            return found + 1
    while data[end] & 0xC0 == 0x80:  # amid a character
        end -= 1
    return end


def parse_separated(data: bytes, path: str, line: int, separator: bytes) -> Rows:
    """The documents between separators, which are dropped; nothing between two is no document. All whitespace stays."""
    for part in data.split(separator):
        if part:
            yield _decoded(part, path, line)
        line += part.count(b"\n") + separator.count(b"\n")


def parse_jsonl(data: bytes, path: str, line: int, fields: Fields) -> Rows:
    """A document per line of JSON, from its field `fields.text`; blank lines are passed over."""
    if line == 1:
        data = data.removeprefix(files.BOM)
    lines: Iterable[str | bytes]
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        lines = data.split(b"\n")
    for number, raw in enumerate(lines, line):
        if raw and not raw.isspace():
            yield _json_row(raw, path, number, fields)


def _json_row(raw: str | bytes, path: str, number: int, fields: Fields) -> Document | BadRow:
    where = f"{path}:{number}"
    if isinstance(raw, bytes):
        decoded = _decoded(raw, path, number)
        if isinstance(decoded, BadRow):
            return decoded
        raw = decoded.text
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as e:
        return BadRow(f"{where}: not valid JSON ({e}); repair or remove the line")
    if not isinstance(row, dict):
        return BadRow(f"{where}: a JSON {type(row).__name__}, not an object with a field {fields.text!r}")
    for flag, field in fields.named():
        if field not in row:
            known = ", ".join(row) or "none"
            return BadRow(f"{where}: no field {field!r}; there are {known}: choose with {flag}")
    document = _row(where, fields, row[fields.text], row[fields.group] if fields.group is not None else None)
    if "\\u" in raw and isinstance(document, Document):
        # JSON can escape half of a surrogate pair, which no UTF-8 and so no tokenizer can hold.
        for text in filter(None, (document.text, document.group)):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as e:
                found = f"\\u{ord(text[e.start]):04x}"
                return BadRow(f"{where}: {found} is a lone surrogate, which is not text; repair or remove the row")
    return document


def _decoded(data: bytes, path: str, line: int) -> Document | BadRow:
    try:
        return Document(data.decode("utf-8"), f"{path}:{line}")
    except UnicodeDecodeError as e:
        return BadRow(not_utf8(data, e.start, path, line))


def not_utf8(data: bytes, at: int, path: str, line: int) -> str:
    if line == 1 and data.startswith(UTF16):
        return f"{path}: looks like UTF-16, not UTF-8; convert the file, as with iconv -f utf-16 -t utf-8"
    line, column = line + data.count(b"\n", 0, at), at - data.rfind(b"\n", 0, at)
    return (
        f"{path}:{line}: byte {column} of the line (0x{data[at]:02x}) is not UTF-8; "
        "convert the file, as with iconv -f latin1 -t utf-8"
    )


def _row(where: str, fields: Fields, text: Any, group: Any) -> Document | BadRow:
    """The document of a row with these values."""
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        found = "not UTF-8" if isinstance(text, NotText) else f"{kind}, not text"
        return BadRow(f"{where}: field {fields.text!r} is {found}; repair or remove the row")
    if fields.group is None:
        return Document(text, where)
    if group is None or group == "" or isinstance(group, NotText):
        return BadRow(f"{where}: field {fields.group!r}, asked for by --group-field, is empty; fill or remove the row")
    return Document(text, where, _group(str(group)))


class NotText(bytes):
    """A value of a text column that isn't UTF-8."""


def _group(value: str) -> str:
    """The host of a web address, as sites count; else the value."""
    if value[:4].lower() == "http":
        with contextlib.suppress(ValueError):
            address = urlsplit(value.strip())
            if address.scheme in ("http", "https") and address.hostname:
                return address.hostname.removeprefix("www.")
    return value


# ---- tables ----------------------------------------------------------------------------------------------------------


def csv_header(data: bytes, path: str) -> list[str]:
    """The column names with which CSV begins. Raises InputError, naming the file, where that can't be read."""
    if data.startswith(UTF16):
        raise InputError(not_utf8(data, 0, path, 1))
    text = data.removeprefix(files.BOM).decode("utf-8", "surrogateescape")
    try:
        columns = next(csv.reader(io.StringIO(text, newline="\n"), strict=True), [])
    except csv.Error as e:
        raise InputError(f"{path}:1: not a CSV header ({e}); end lines with \\n or \\r\\n") from None
    if bad := ESCAPED.search("".join(columns)):
        raise InputError(not_utf8(data, data.index(ord(bad[0]) - 0xDC00), path, 1))
    return columns


def parse_csv(data: bytes, path: str, line: int, width: int, at: tuple[int, ...], fields: Fields) -> Rows:
    """A document per row of CSV by RFC 4180: `width` fields, of which `at` are the text and the group."""
    stray = files.stray_quote(data)
    if stray >= 0:
        line += data.count(b"\n", 0, stray)
        raise InputError(f"{path}:{line}: {files.STRAY_QUOTE}")
    csv.field_size_limit(files.LONGEST)
    if line == 1:
        data = data.removeprefix(files.BOM)
    try:
        text, valid = data.decode("utf-8"), True
    except UnicodeDecodeError:
        text, valid = data.decode("utf-8", "surrogateescape"), False
    reader = csv.reader(io.StringIO(text, newline="\n"), strict=True)
    if line == 1:
        next(reader)  # the header
    while True:
        where = f"{path}:{line + reader.line_num}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as e:
            yield BadRow(f"{where}: not valid CSV ({e}); repair or remove the row")
            continue
        if not row:
            continue
        if not valid and (bad := ESCAPED.search("".join(row))):
            byte = f"byte 0x{ord(bad[0]) - 0xDC00:02x} of the row"
            yield BadRow(f"{where}: {byte} is not UTF-8; convert the file, as with iconv -f latin1 -t utf-8")
        elif len(row) != width:
            yield BadRow(f"{where}: {len(row)} fields where the header has {width}; repair or remove the row")
        else:
            yield _row(where, fields, row[at[0]], row[at[1]] if len(at) > 1 else None)


def parse_table(data: bytes, label: str, row: int, fields: Fields) -> Rows:
    """A document per row of a table in Arrow's stream format; its first row is `row` (from 0) of the whole."""
    import pyarrow

    table = pyarrow.ipc.open_stream(data).read_all()
    columns = [_values(table.column(field)) for _, field in fields.named()]
    groups = columns[1] if len(columns) > 1 else [None] * len(table)
    for number, (text, group) in enumerate(zip(columns[0], groups, strict=True), row + 1):
        yield _row(f"{label}: row {number}", fields, text, group)


def _values(column: Any) -> list[Any]:
    import pyarrow

    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_text_or_not(value) for value in column.cast(pyarrow.large_binary()).to_pylist()]


def _text_or_not(value: bytes | None) -> str | NotText | None:
    try:
        return value if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return NotText(value)
