"""Where text comes from: the Python library's own sources, files and globs, and data sets on the Hugging Face hub.

A source is a factory of document iterators, since a tokenizer or a count may read the corpus before it is encoded.
Every iterator yields the same documents in the same order, holds a few of them at a time, and leaves their text as it
is: no newline, byte order mark or Unicode form is touched.

A later preparation by several processes divides the files, or the hub's shards, among iterators of this kind.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from fourscale.config import InputError, RunFailed

UNIT = 4096  # characters after which a blank line ends a unit of plain text
LONGEST_PARAGRAPH = 16 * UNIT  # without a blank line, a unit ends with this line
LONGEST_LINE = 1 << 20  # without a newline, a unit ends here
SUFFIXES = (".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz")
NOT_SOURCE = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    """A text, and where it stands (file:line and the like) for messages."""

    text: str
    where: str


@dataclass(frozen=True)
class Source:
    """`documents()` starts from the first document each time. `entry` describes the source for the manifest (its
    licence under "license", None if unknown); `total_bytes` of text if known beforehand."""

    documents: Callable[[], Iterator[Document]]
    entry: dict[str, Any]
    total_bytes: int | None = None


@dataclass(frozen=True)
class Hub:
    """A data set on the hub; its split `train` is read."""

    repo: str
    config: str | None = None
    license: str | None = None


NAMED = {
    "tinystories": Hub("roneneldan/TinyStories", None, "CDLA-Sharing-1.0"),
    "fineweb-edu": Hub("HuggingFaceFW/fineweb-edu", "sample-10BT", "ODC-By-1.0"),
}


def open_source(dataset: str, text_field: str = "text", doc_sep: str | None = None) -> Source:
    """The source that `--dataset` names: stdlib, tinystories, fineweb-edu, a file or glob, or a hub id owner/name
    (owner/name:config for one of its configurations).

    text_field: of jsonl, parquet and hub rows. doc_sep: separator in plain text, with escapes such as \\n; without it,
    plain text is cut at blank lines (`read_units`). Raises InputError for a source that can't be read; so do its
    iterators, naming file and line.
    """
    where, paths = _locate(dataset)
    if doc_sep is not None and not any(_suffix(p).startswith(".txt") for p in paths):
        raise InputError(f"--doc-sep: only plain text (.txt, .txt.gz) has a separator, not --dataset {dataset}")
    if isinstance(where, Hub):
        return _hub(where, text_field)
    if where == "stdlib":
        return _stdlib(paths)
    return _files(dataset, paths, text_field, None if doc_sep is None else _unescaped(doc_sep))


def fingerprint(dataset: str) -> str | None:
    """sha256 over path, size and time of each file of a local source: differs if the input may have changed. None for
    the hub. Raises InputError as `open_source`."""
    paths = _locate(dataset)[1]
    lines = [f"{p.resolve()}\0{p.stat().st_size}\0{p.stat().st_mtime_ns}\n" for p in paths]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest() if paths else None


def _locate(dataset: str) -> tuple[str | Hub, list[Path]]:
    """What kind of source a spec names ("stdlib", "files" or a Hub) and its files in order."""
    if dataset == "stdlib":
        return "stdlib", _stdlib_paths()
    if dataset in NAMED:
        return NAMED[dataset], []
    if Path(dataset).is_dir():
        raise InputError(f"--dataset {dataset}: a directory; name its files, as in '{dataset.rstrip('/')}/*.txt'")
    if Path(dataset).is_file() or glob.has_magic(dataset) or dataset.endswith(SUFFIXES):
        return "files", _expand(dataset)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", dataset):
        repo, _, config = dataset.partition(":")
        return Hub(repo, config or None), []
    raise InputError(
        f"--dataset {dataset}: no such file; give stdlib, {', '.join(NAMED)}, files such as 'corpus/*.jsonl', "
        "or a hub id owner/name"
    )


# ---- the Python library ----------------------------------------------------------------------------------------------


def _stdlib_paths() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [p for p in root.rglob("*.py") if NOT_SOURCE.isdisjoint(p.relative_to(root).parts[:-1])]
    if not found:
        raise InputError(f"--dataset stdlib: this Python keeps no .py sources in {root}; use another --dataset")
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def _stdlib(paths: list[Path]) -> Source:
    """Each module a document, without tests and idlelib, empty files, and files that are not UTF-8."""

    def documents() -> Iterator[Document]:
        for path in paths:
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
            if text:
                yield Document(text, str(path))

    entry = {"name": "stdlib", "python": platform.python_version(), "files": len(paths), "license": "PSF-2.0"}
    return Source(documents, entry, sum(p.stat().st_size for p in paths))


# ---- files -----------------------------------------------------------------------------------------------------------


def _suffix(path: Path) -> str:
    return next((s for s in SUFFIXES if path.name.lower().endswith(s)), "")


def _expand(pattern: str) -> list[Path]:
    if Path(pattern).is_file():
        found = [Path(pattern)]
    else:
        found = sorted(p for p in map(Path, glob.glob(pattern, recursive=True)) if p.is_file())
    if not found:
        raise InputError(f"--dataset {pattern}: no file matches")
    for path in found:
        if not _suffix(path):
            raise InputError(f"--dataset {pattern}: can't read {path}; readable are {', '.join(SUFFIXES)}")
    return found


def _unescaped(doc_sep: str) -> str:
    try:
        separator = doc_sep.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as e:
        raise InputError(f"--doc-sep {doc_sep!r}: not a valid escape ({e.reason}); write a backslash as \\\\") from None
    if not separator:
        raise InputError("--doc-sep '': an empty separator; leave the flag out to cut at blank lines")
    return separator


def _files(pattern: str, paths: list[Path], text_field: str, separator: str | None) -> Source:
    def documents() -> Iterator[Document]:
        for path in paths:
            suffix = _suffix(path)
            if suffix == ".parquet":
                yield from read_parquet(path, text_field)
            elif suffix.startswith(".jsonl"):
                yield from read_jsonl(path, text_field)
            elif separator is None:
                yield from read_units(path)
            else:
                yield from read_separated(path, separator)

    sizes = sum(p.stat().st_size for p in paths)
    plain = all(_suffix(p) in (".txt", ".jsonl") for p in paths)
    entry: dict[str, Any] = {"name": pattern, "files": len(paths), "bytes": sizes, "license": None}
    if any(not _suffix(p).startswith(".txt") for p in paths):
        entry["text_field"] = text_field
    if any(_suffix(p).startswith(".txt") for p in paths):
        entry["plain_text"] = f"cut at {separator!r}" if separator else f"units of {UNIT} characters, at blank lines"
    return Source(documents, entry, sizes if plain else None)


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


def _lines(path: Path, limit: int) -> Iterator[tuple[int, str]]:
    """(line number, line with its end) of a UTF-8 file; a line of more than `limit` bytes comes in parts, -1 for no
    limit. Raises InputError with file and line."""
    number, column, rest = 1, 0, b""
    with _open(path) as f:
        while True:
            try:
                piece = f.readline(limit)
            except (EOFError, gzip.BadGzipFile, zlib.error) as e:
                raise InputError(f"{path}:{number}: damaged gzip data ({e}); fetch the file again") from None
            raw = rest + piece
            try:
                line, rest = raw.decode("utf-8"), b""
            except UnicodeDecodeError as e:
                if not piece or e.reason != "unexpected end of data":  # a part of a line may end within a character
                    at = column + e.start + 1
                    raise InputError(
                        f"{path}:{number}: byte {at} of the line (0x{raw[e.start]:02x}) is not UTF-8; "
                        "convert the file, as with iconv -f latin1 -t utf-8"
                    ) from None
                line, rest = raw[: e.start].decode("utf-8"), raw[e.start :]
            if line:
                yield number, line
            if not piece:
                return
            column += len(raw) - len(rest)
            if piece.endswith(b"\n"):
                number, column = number + 1, 0


def read_units(path: Path) -> Iterator[Document]:
    """A plain text file in units of about 4 KB, so that a corpus of one file can be divided; joined, they are the file.

    A unit ends after the blank lines that follow its 4096th character; within a very long paragraph after a line, and
    within a very long line anywhere.
    """
    parts: list[str] = []
    size, first, after_blank = 0, 1, False
    for number, line in _lines(path, LONGEST_LINE):
        blank = line.isspace()
        if (size >= UNIT and after_blank and not blank) or size >= LONGEST_PARAGRAPH:
            yield Document("".join(parts), f"{path}:{first}")
            parts, size, first = [], 0, number
        parts.append(line)
        size += len(line)
        after_blank = blank
    if parts:
        yield Document("".join(parts), f"{path}:{first}")


def read_separated(path: Path, separator: str) -> Iterator[Document]:
    """The documents of a plain text file between separators, which are dropped, as are empty documents; all other
    whitespace stays."""
    held, first, number = "", 1, 1
    for number, line in _lines(path, LONGEST_LINE):
        # Searching again only where a separator can end keeps a long document from being searched at each line.
        start = max(0, len(held) - len(separator) + 1)
        held += line
        while (at := held.find(separator, start)) >= 0:
            if at:
                yield Document(held[:at], f"{path}:{first}")
            held, start, first = held[at + len(separator) :], 0, number
    if held:
        yield Document(held, f"{path}:{first}")


def read_jsonl(path: Path, text_field: str) -> Iterator[Document]:
    """A document per line of JSON, from its field `text_field`; blank lines are passed over."""
    for number, line in _lines(path, -1):
        where = f"{path}:{number}"
        if number == 1:
            line = line.removeprefix("\ufeff")
        if line.isspace() or not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise InputError(f"{where}: not valid JSON ({e}); repair or remove the line") from None
        if not isinstance(row, dict):
            raise InputError(f"{where}: a JSON {type(row).__name__}, not an object with a field {text_field!r}")
        text = _text(row, text_field, where)
        if "\\u" in line:
            _refuse_surrogates(text, where)
        yield Document(text, where)


def read_parquet(path: Path, text_field: str) -> Iterator[Document]:
    """A document per row of a Parquet file, from its column `text_field`."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as f:
            if text_field not in f.schema_arrow.names:
                raise _no_field(f.schema_arrow.names, text_field, str(path))
            row = 0
            for batch in f.iter_batches(batch_size=256, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    where = f"{path}: row {row}"
                    yield Document(_text({text_field: text}, text_field, where), where)
    except pyarrow.ArrowException as e:
        raise InputError(f"{path}: not a readable Parquet file ({str(e).splitlines()[0]})") from None


def _text(row: dict[str, Any], text_field: str, where: str) -> str:
    if text_field not in row:
        raise _no_field(row, text_field, where)
    text = row[text_field]
    if not isinstance(text, str):
        found = "null" if text is None else type(text).__name__
        raise InputError(f"{where}: field {text_field!r} is {found}, not text; repair or remove the row")
    return text


def _no_field(fields: Any, text_field: str, where: str) -> InputError:
    known = ", ".join(map(str, fields)) or "none"
    return InputError(f"{where}: no field {text_field!r}; there are {known}: choose with --text-field")


def _refuse_surrogates(text: str, where: str) -> None:
    """JSON can escape half of a surrogate pair, which no UTF-8 and so no tokenizer can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InputError(
            f"{where}: \\u{ord(text[e.start]):04x} is a lone surrogate, which is not text; repair or remove the row"
        ) from None


# ---- the hub ---------------------------------------------------------------------------------------------------------


def _hub(hub: Hub, text_field: str) -> Source:
    import huggingface_hub.constants

    spec = hub.repo if hub.config is None else f"{hub.repo}:{hub.config}"
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    revision, license = (None, None) if offline else _hub_revision(hub.repo)
    table = _load(hub, revision, offline)
    columns = getattr(table, "column_names", None)
    if columns and text_field not in columns:
        raise _no_field(columns, text_field, spec)

    def documents() -> Iterator[Document]:
        row = 0
        try:
            for batch in _load(hub, revision, offline).iter(batch_size=256):
                if text_field not in batch:
                    raise _no_field(batch, text_field, spec)
                for text in batch[text_field]:
                    row += 1
                    where = f"{spec}: row {row}"
                    yield Document(_text({text_field: text}, text_field, where), where)
        except (OSError, _http_error()) as e:
            raise RunFailed(f"{spec}: lost the hub after row {row} ({_first_line(e)}); run the command again") from None

    entry = {"name": spec, "split": "train", "revision": revision, "text_field": text_field}
    return Source(documents, entry | {"license": hub.license or license})


def _hub_revision(repo: str) -> tuple[str, str | None]:
    """(commit, licence) of a data set. One quick question, since `datasets` itself tries for long without a network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().dataset_info(repo, timeout=10)
    except (HfHubHTTPError, ValueError) as e:
        raise InputError(f"--dataset {repo}: the hub has none, or wants a login for it ({_first_line(e)})") from None
    except (OSError, _http_error()) as e:
        raise InputError(
            f"--dataset {repo}: no file here, and the Hugging Face hub can't be reached ({_first_line(e)}); connect to "
            "the network, set HF_HUB_OFFLINE=1 to use a copy in the cache, or give files"
        ) from None
    license = (info.card_data or {}).get("license")
    return info.sha, ", ".join(license) if isinstance(license, list) else license


def _load(hub: Hub, revision: str | None, offline: bool) -> Any:
    """The split `train`: streamed from the hub, or from the local cache where HF_HUB_OFFLINE is set."""
    import datasets

    try:
        return datasets.load_dataset(hub.repo, hub.config, split="train", streaming=not offline, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, _http_error()) as e:
        missing = "; HF_HUB_OFFLINE is set, and the cache holds no copy" if offline else ""
        hint = "; choose one as owner/name:config" if "onfig name is missing" in str(e) else ""
        raise InputError(f"--dataset {hub.repo}: {_first_line(e)}{hint}{missing}") from None


def _http_error() -> type[Exception]:
    """The base of errors of the HTTP client that huggingface_hub uses, which has changed and is no OSError."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]
