"""Where text comes from: the Python library's own sources, files, saved data sets, and the Hugging Face hub.

A source is a factory of chunks of about 1 MB: cut by one process, which does as little as possible for each byte, and
parsed by any other (`documents.py`). The sequence of chunks is a function of the source alone, and can go on after any
of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from fourscale import documents, files
from fourscale.cli import InputError, RunFailed
from fourscale.documents import Fields, Rows
from fourscale.files import File, first_line

HUB_ROWS = 256  # rows asked of a streamed data set at once
NOT_SOURCE = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Chunk:
    """About CHUNK_BYTES of a source, not yet parsed; it can be pickled.

    size: its bytes, in the measure of Source.total_bytes. after: a JSON value; Source.chunks(after) begins with the
    next chunk.
    """

    size: int
    after: Any
    parse: Callable[..., Rows]
    args: tuple[Any, ...]

    def documents(self) -> Rows:
        """Its rows in order. Raises InputError for CSV whose quotes leave open what its rows are."""
        return self.parse(*self.args)


@dataclass(frozen=True)
class Source:
    """chunks(None) begins with the first chunk, chunks(chunk.after) after that one; it raises InputError for damaged
    files and RunFailed for a lost connection. entry: for the manifest, with the licence under "license" (None if
    unknown). total_bytes: of all chunks, as stored, None if unknown."""

    chunks: Callable[[Any], Iterator[Chunk]]
    entry: dict[str, Any]
    total_bytes: int | None = None

    def documents(self) -> Rows:
        """All rows in order, parsed in this process."""
        for chunk in self.chunks(None):
            yield from chunk.documents()


@dataclass(frozen=True)
class Hub:
    """A data set on the hub."""

    repo: str
    config: str | None = None
    license: str | None = None

    @property
    def spec(self) -> str:
        return self.repo if self.config is None else f"{self.repo}:{self.config}"


NAMED = {
    "tinystories": Hub("roneneldan/TinyStories", None, "CDLA-Sharing-1.0"),
    "fineweb-edu": Hub("HuggingFaceFW/fineweb-edu", "sample-10BT", "ODC-By-1.0"),
}


def open_source(
    dataset: str,
    *,
    text_field: str = "text",
    group_field: str | None = None,
    doc_sep: str | None = None,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
) -> Source:
    """The source that `--dataset` names: stdlib, tinystories, fineweb-edu, files (a glob or URL), a directory made by
    save_to_disk, or a hub id owner/name (owner/name:config for one of its configurations).

    text_field, group_field: of jsonl, csv, parquet and data sets. doc_sep: separator in plain text, with escapes such
    as \\n; without it, plain text is cut at blank lines (`documents.parse_units`). name, revision: configuration and
    version of a hub data set; split: of that or of a saved one.

    Raises InputError, naming the flag, for a source that can't be read and for a flag that means nothing to it.
    """
    where = _locate(dataset)
    fields = Fields(text_field, group_field)
    hub, saved = isinstance(where, Hub), isinstance(where, Path)
    for flag, given in (("--name", name is not None), ("--revision", revision is not None)):
        if given and not hub:
            raise InputError(f"{flag}: only a data set of the hub has one, not --dataset {dataset}")
    if split != "train" and not (hub or saved):
        raise InputError(f"--split {split}: only data sets have splits, not --dataset {dataset}")
    plain = isinstance(where, list) and any(file.suffix.startswith(".txt") for file in where)
    if doc_sep is not None and not plain:
        raise InputError(f"--doc-sep: only plain text (.txt) has a separator, not --dataset {dataset}")
    if group_field is not None and (plain or where == "stdlib"):
        raise InputError(f"--group-field {group_field}: plain text has no fields, as in --dataset {dataset}")
    if isinstance(where, Hub):
        if name is not None and where.config not in (None, name) and dataset not in NAMED:
            raise InputError(f"--name {name}: --dataset {dataset} names another; give one of them")
        return _hub(Hub(where.repo, name or where.config, where.license), split, revision, fields)
    if isinstance(where, Path):
        return _saved(dataset, where, split, fields)
    if isinstance(where, list):
        return _files(dataset, where, fields, None if doc_sep is None else _unescaped(doc_sep))
    return _stdlib()


def shares(specs: Sequence[str], flag: str = "--dataset") -> list[tuple[str, Fraction | None]]:
    """Specs and their shares, which sum to 1: "a:0.7" is a with 7/10. None for each where none has a share.

    Raises InputError, naming `flag`, where some have a share and others not, for one that isn't above 0, and for a spec
    given twice.
    """
    found: list[tuple[str, Fraction | None]] = []
    for spec in specs:
        match = re.fullmatch(
            r"(.+):([+-]?(?:[1-9]\d*/[1-9]\d*|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?))", spec, re.DOTALL
        )
        if match is None or Path(spec).exists():
            found.append((spec, None))
        elif (share := Fraction(match[2])) > 0:
            found.append((match[1], share))
        else:
            raise InputError(f"{flag} {spec}: the share must be above 0; leave {match[1]} out for none of it")
    names = [name if files.is_url(name) else os.path.normpath(name) for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{flag} {name}: given twice; give it once, with the sum of the shares")
    weighed = [share for _, share in found if share is not None]
    if weighed and len(weighed) < len(found):
        without = next(name for name, share in found if share is None)
        raise InputError(f"{flag} {without}: has no share though others have; write {without}:0.5 or the like")
    return [(name, share if share is None else share / sum(weighed)) for name, share in found]


def fingerprint(dataset: str) -> str | None:
    """sha256 over path, size and time (or ETag) of each file of a source: differs if the input may have changed. None
    for the hub. Raises InputError as `open_source`."""
    where = _locate(dataset)
    if isinstance(where, Hub):
        return None
    if isinstance(where, Path):
        where = [files.local(path) for path in sorted(where.rglob("*")) if path.is_file()]
    elif where == "stdlib":
        where = [files.local(path) for path in _stdlib_paths()]
    lines = "".join(map(files.identity, where))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _locate(dataset: str) -> str | Path | Hub | list[File]:
    """What a spec names: "stdlib", the directory of a saved data set, a hub data set, or files."""
    if dataset == "stdlib":
        return dataset
    if dataset in NAMED:
        return NAMED[dataset]
    if Path(dataset).is_dir():
        if any((Path(dataset) / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return Path(dataset)
        raise InputError(f"--dataset {dataset}: a directory; name its files, as in '{dataset.rstrip('/')}/*.txt'")
    named = files.is_url(dataset) or files.has_magic(dataset) or files.suffix_of(dataset)
    if named or Path(dataset).is_file():
        return files.find(dataset)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", dataset):
        repo, _, config = dataset.partition(":")
        return Hub(repo, config or None)
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


def _stdlib() -> Source:
    """Each module a document, without tests and idlelib."""
    paths = _stdlib_paths()
    sizes = [path.stat().st_size for path in paths]

    def chunks(after: int | None) -> Iterator[Chunk]:
        first, size = after or 0, 0
        for i in range(first, len(paths)):
            size += sizes[i]
            if size >= files.CHUNK_BYTES or i == len(paths) - 1:
                yield Chunk(size, i + 1, documents.parse_modules, (tuple(map(str, paths[first : i + 1])),))
                first, size = i + 1, 0

    entry = {"name": "stdlib", "python": platform.python_version(), "files": len(paths), "license": "PSF-2.0"}
    return Source(chunks, entry, sum(sizes))


# ---- files -----------------------------------------------------------------------------------------------------------


def _unescaped(doc_sep: str) -> str:
    try:
        separator = doc_sep.encode("latin-1", "backslashreplace").decode("unicode_escape")
        separator.encode("utf-8")
    except UnicodeError as e:
        raise InputError(f"--doc-sep {doc_sep!r}: not a valid escape ({e.reason}); write a backslash as \\\\") from None
    if not separator:
        raise InputError("--doc-sep '': an empty separator; leave the flag out to cut at blank lines")
    return separator


def _files(pattern: str, found: list[File], fields: Fields, separator: str | None) -> Source:
    # A column that is missing should not come to light after hours; a remote file is asked once it's reached.
    for i, file in enumerate(found):
        if not file.remote or i == 0:
            if file.suffix.startswith(".csv"):
                _csv_columns(file, fields)
            elif file.suffix == ".parquet":
                with _parquet(file, fields):
                    pass

    def chunks(after: list[int] | None) -> Iterator[Chunk]:
        first, *within = after or [0]
        for i, file in enumerate(found[first:], first):
            if file.suffix == ".parquet":
                made = _parquet_chunks(file, i, *(within or [0]), fields)
            elif file.suffix.startswith(".csv"):
                made = _csv_chunks(file, i, *(within or [0, 1]), fields)
            else:
                made = _text_chunks(file, i, *(within or [0, 1]), fields, separator)
            try:
                yield from made
            except InputError as e:  # the rest of the file can't be read: one malformed row
                yield Chunk(0, [i + 1], documents.parse_fault, (str(e),))
            within = []

    sizes = [file.size for file in found]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    formats = sorted({file.suffix for file in found})
    entry: dict[str, Any] = {"name": pattern, "files": len(found), "bytes": total, "formats": formats}
    if any(not suffix.startswith(".txt") for suffix in formats):
        entry |= fields.entry()
    if any(suffix.startswith(".txt") for suffix in formats):
        units = f"units of about {documents.UNIT} bytes, at blank lines"
        entry["plain_text"] = f"cut at {separator!r}" if separator else units
    return Source(chunks, entry | {"license": None}, total)


def _text_chunks(file: File, i: int, offset: int, line: int, fields: Fields, separator: str | None) -> Iterator[Chunk]:
    """Of a .txt or .jsonl file, which is the i-th, from the offset that stands on `line`."""
    if file.suffix.startswith(".jsonl"):
        cut, parse, options = files.at_lines, documents.parse_jsonl, (fields,)
    elif separator is not None:
        cut, parse, options = files.at_separator(separator.encode()), documents.parse_separated, (separator.encode(),)
    else:
        cut, parse, options = files.at_paragraphs, documents.parse_units, ()
    for block in files.blocks(file, offset, line, cut):
        yield Chunk(block.size, [i, block.end, block.end_line], parse, (block.data, file.path, block.line, *options))


# ---- tables: CSV, Parquet, data sets ---------------------------------------------------------------------------------


def _csv_columns(file: File, fields: Fields) -> list[str]:
    """The header of a CSV file, which has the fields; none where the file is empty."""
    with contextlib.closing(files.blocks(file, 0, 1, files.outside_quotes)) as found:
        block = next(found, None)
    if block is None:
        return []
    columns = documents.csv_header(block.data, file.path)
    fields.require(columns, file.path)
    return columns


def _csv_chunks(file: File, i: int, offset: int, line: int, fields: Fields) -> Iterator[Chunk]:
    columns = _csv_columns(file, fields)
    if columns:
        at = tuple(columns.index(field) for _, field in fields.named())
        for block in files.blocks(file, offset, line, files.outside_quotes):
            args = (block.data, file.path, block.line, len(columns), at, fields)
            yield Chunk(block.size, [i, block.end, block.end_line], documents.parse_csv, args)


@contextlib.contextmanager
def _parquet(file: File, fields: Fields) -> Iterator[Any]:
    """A ParquetFile that has the fields."""
    import pyarrow.parquet

    # Otherwise Arrow would read the column of a whole row group at once.
    options = {"buffer_size": files.CHUNK_BYTES, "pre_buffer": False}
    with files.opened(file) as stream, pyarrow.parquet.ParquetFile(stream, **options) as parquet:
        fields.require(parquet.schema_arrow.names, file.path)
        yield parquet


def _parquet_chunks(file: File, i: int, first: int, fields: Fields) -> Iterator[Chunk]:
    columns = fields.columns()
    with _parquet(file, fields) as parquet:
        rows, row = parquet.metadata.num_rows, 0
        for g in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(g)
            if row + group.num_rows <= first:
                row += group.num_rows
                continue
            parts = [group.column(c) for c in range(group.num_columns)]
            read = sum(part.total_uncompressed_size for part in parts if part.path_in_schema in columns)
            count = max(1, min(group.num_rows, group.num_rows * files.CHUNK_BYTES // max(read, 1)))
            for batch in parquet.iter_batches(batch_size=count, row_groups=[g], columns=columns, use_threads=False):
                start, row = row, row + batch.num_rows
                if row > first:
                    size = _part(file.size or 0, start, row, rows)
                    yield _table_chunk(batch, file.path, start, fields, [i, row], size)


def _part(size: int, start: int, end: int, rows: int) -> int:
    """The share of `size` that rows start .. end of `rows` have; all parts sum to it."""
    return size * end // rows - size * start // rows


def _table_chunk(table: Any, label: str, row: int, fields: Fields, after: Any, size: int) -> Chunk:
    """Of an Arrow table or batch, whose first row is `row` (from 0) of the whole. Serialised, a slice takes no more
    than its own bytes along."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return Chunk(size, after, documents.parse_table, (sink.getvalue().to_pybytes(), label, row, fields))


def _row_chunks(table: Any, label: str, fields: Fields, after: int | None) -> Iterator[Chunk]:
    """Of a `datasets.Dataset`, memory-mapped, from the row `after` on."""
    import pyarrow

    table, rows = table.with_format("arrow"), len(table)
    count = max(1, rows * files.CHUNK_BYTES // max(1, table.data.nbytes))
    for start in range(after or 0, rows, count):
        end = min(rows, start + count)
        try:
            part = table[start:end]
        except (OSError, pyarrow.ArrowException) as e:
            raise InputError(f"{label}: damaged after row {start} ({first_line(e)}); make it again") from None
        yield _table_chunk(part, label, start, fields, end, _part(table.data.nbytes, start, end, rows))


def _rows(table: Any, label: str, fields: Fields, entry: dict[str, Any]) -> Source:
    fields.require(table.column_names, label)
    table = table.select_columns(fields.columns())
    entry = entry | {"rows": len(table)} | fields.entry()
    return Source(functools.partial(_row_chunks, table, label, fields), entry, table.data.nbytes)


def _saved(dataset: str, directory: Path, split: str, fields: Fields) -> Source:
    """A directory made by `save_to_disk`: a data set, or one for each split."""
    import datasets

    try:
        table = datasets.load_from_disk(str(directory))
    except Exception as e:
        raise InputError(f"--dataset {dataset}: not a readable save_to_disk directory ({first_line(e)})") from None
    if isinstance(table, datasets.DatasetDict):
        if split not in table:
            raise InputError(f"--split {split}: {dataset} has {', '.join(table)}")
        table = table[split]
    elif split not in ("train", str(table.split)):
        raise InputError(f"--split {split}: {dataset} is a single data set; leave the flag out")
    split = str(table.split or split)
    entry = {"name": dataset, "format": "save_to_disk", "split": split, "license": table.info.license or None}
    return _rows(table, dataset, fields, entry)


# ---- the hub ---------------------------------------------------------------------------------------------------------


def _hub(hub: Hub, split: str, revision: str | None, fields: Fields) -> Source:
    import huggingface_hub.constants

    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    commit, license = (revision, None) if offline else _hub_revision(hub.repo, revision)
    table = _load(hub, split, commit, offline)
    entry = {"name": hub.repo, "config": hub.config, "split": split, "revision": commit}
    entry["license"] = hub.license or license
    if not offline:
        return _streamed(table, hub.spec, fields, entry)
    # The cache names the directory of a copy by its commit.
    cached = re.search(r"[/\\]([0-9a-f]{40})[/\\]", table.cache_files[0]["filename"]) if table.cache_files else None
    if cached and re.fullmatch("[0-9a-f]{40}", revision or "") and cached[1] != revision:
        raise InputError(f"--revision {revision}: HF_HUB_OFFLINE is set, and the cache holds {cached[1]}")
    return _rows(table, hub.spec, fields, entry | {"revision": cached[1] if cached else commit})


def _streamed(dataset: Any, label: str, fields: Fields, entry: dict[str, Any]) -> Source:
    """Of a `datasets.IterableDataset`."""
    columns = fields.columns()
    if dataset.column_names:
        fields.require(dataset.column_names, label)
    split = (dataset.info.splits or {}).get(entry["split"])
    total, rows = (split.num_bytes, split.num_examples) if split else (None, None)

    def chunks(after: dict[str, Any] | None) -> Iterator[Chunk]:
        table = dataset.with_format("arrow")  # a new one: each keeps the state of one pass
        row = 0
        if after is not None:
            table.load_state_dict(after["state"])
            row = after["row"]
        held: list[Any] = []
        try:
            for batch in table.iter(batch_size=HUB_ROWS):
                fields.require(batch.column_names, label)
                held.append(batch.select(columns))
                if sum(part.nbytes for part in held) >= files.CHUNK_BYTES:
                    yield chunk(held, row, table.state_dict())
                    row, held = row + sum(map(len, held)), []
            if held:
                yield chunk(held, row, table.state_dict())
        except (OSError, _http_error(), *_dataset_errors()) as e:
            row += sum(map(len, held))
            raise RunFailed(
                f"{label}: lost the hub after row {row} ({first_line(e)}); the same command goes on where it was"
            ) from None

    def chunk(held: list[Any], row: int, state: dict[str, Any]) -> Chunk:
        import pyarrow

        whole = pyarrow.concat_tables(held)
        end = row + len(whole)
        size = _part(total, row, min(end, rows), rows) if total and rows else whole.nbytes
        return _table_chunk(whole, label, row, fields, {"row": end, "state": state}, size)

    return Source(chunks, entry | fields.entry(), total or None)


def _hub_revision(repo: str, revision: str | None) -> tuple[str, str | None]:
    """(commit, licence) of a data set. One quick question, since `datasets` itself tries for long without a network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    try:
        info = HfApi().dataset_info(repo, revision=revision, timeout=10)
    except RevisionNotFoundError:
        raise InputError(f"--revision {revision}: {repo} has no such branch, tag or commit") from None
    except (HfHubHTTPError, ValueError) as e:
        raise InputError(f"--dataset {repo}: the hub has none, or wants a login for it ({first_line(e)})") from None
    except (OSError, _http_error()) as e:
        raise InputError(
            f"--dataset {repo}: no file here, and the Hugging Face hub can't be reached ({first_line(e)}); connect to "
            "the network, set HF_HUB_OFFLINE=1 to use a copy in the cache, or give files"
        ) from None
    license = (info.card_data or {}).get("license")
    return info.sha, ", ".join(license) if isinstance(license, list) else license


def _load(hub: Hub, split: str, revision: str | None, offline: bool) -> Any:
    """A split: streamed from the hub, or from the local cache where HF_HUB_OFFLINE is set."""
    import datasets

    try:
        return datasets.load_dataset(hub.repo, hub.config, split=split, streaming=not offline, revision=revision)
    except (OSError, ValueError, RuntimeError, *_dataset_errors(), _http_error()) as e:
        missing = "; HF_HUB_OFFLINE is set, and the cache holds no copy" if offline else ""
        hint = "; choose one with --name" if "onfig name is missing" in str(e) else ""
        hint = "; choose with --split" if "split" in first_line(e).lower() else hint
        raise InputError(f"--dataset {hub.spec}: {first_line(e)}{hint}{missing}") from None


def _dataset_errors() -> tuple[type[Exception], ...]:
    import datasets
    import pyarrow

    return datasets.exceptions.DatasetsError, pyarrow.ArrowException


def _http_error() -> type[Exception]:
    """The base of errors of the HTTP client that huggingface_hub uses, which has changed and is no OSError."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]
