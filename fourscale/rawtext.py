"""Text files as a stream of ids in memory, made with a model's own tokenizer: what eval_ppl.py scores without shards.

Documents and the end-of-text token after each are those of prepare.py, so that the figures are those of its shards.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fourscale import files, sources
from fourscale.cli import InputError
from fourscale.documents import BadRow, Document
from fourscale.shards import Shard, token_dtype
from fourscale.tokenization import Tokenizer

GROUP_BYTES = 1 << 20  # of text that is encoded at once


class TextStream:
    """Ids of text in memory, with what heldout.py reads of a `shards.TokenStream`; a file of text is a shard.

    ids: uint16 or uint32 [total]. documents: how many. The other fields are the TokenStream's.
    """

    split = "text"

    def __init__(
        self, ids: np.ndarray, shards: Sequence[Shard], vocab_size: int, text_bytes: int, documents: int
    ) -> None:
        self.ids, self.shards, self.total = ids, list(shards), len(ids)
        self.vocab_size, self.text_bytes, self.documents = vocab_size, text_bytes, documents
        self.digest = hashlib.sha256(ids).hexdigest()

    def read(self, start: int, count: int) -> np.ndarray:
        """int64 [count]: the ids from stream position `start` on."""
        return self.ids[start : start + count].astype(np.int64)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int64 [B, length]: windows of ids from `starts`, int64 [B]."""
        return self.ids[starts[:, None] + np.arange(length)].astype(np.int64)


def names_text(spec: str) -> bool:
    """True for a file, a glob or a URL, as against a directory of shards: for what `read_text` is to read or refuse."""
    path = Path(spec)
    return not path.is_dir() and bool(
        path.is_file() or files.is_url(spec) or files.has_magic(spec) or files.suffix_of(spec)
    )


def read_text(
    spec: str,
    tokenizer: Tokenizer,
    vocab_size: int,
    text_field: str = "text",
    doc_sep: str | None = None,
    whole_files: bool = False,
    progress: bool = False,
) -> TextStream:
    """The ids of the files that `spec` (--data) names: .txt, .jsonl, .csv, also compressed, or .parquet; a glob's are
    read in order of their paths.

    vocab_size: the model's, which may lack a token. text_field, doc_sep: as prepare.py has them. whole_files: each
    plain text file is one document. Raises InputError, one line naming the place, for what can't be read, a malformed
    row, and text that the tokenizer can't spell or the model has no row for.
    """
    try:
        source = sources.open_source(spec, text_field=text_field, doc_sep=doc_sep)
        found = _documents(source, progress)
        if whole_files:
            found = _joined(found)
        stream = _encoded(found, tokenizer)
        if stream.total < 2:
            raise InputError(f"--data {spec}: holds no text; name files that do")
        if (highest := int(stream.ids.max())) >= vocab_size:
            raise InputError(
                f"--data {spec}: its text has id {highest} by the model's tokenizer, the model only {vocab_size:,} "
                "ids; is that the tokenizer of this model?"
            )
        return stream
    except InputError as e:
        raise InputError(str(e).replace("--dataset", "--data")) from None


def _documents(source: sources.Source, progress: bool) -> Iterator[Document]:
    """The documents that hold text, behind a bar of bytes. Raises InputError for a malformed row."""
    pause = 0.2 if sys.stderr.isatty() else 10
    bar = tqdm(
        desc="encoding", total=source.total_bytes, unit="B", unit_scale=True, disable=not progress, leave=False,
        mininterval=pause, delay=1,
    )  # fmt: skip
    with bar:
        for chunk in source.chunks(None):
            for item in chunk.documents():
                if isinstance(item, BadRow):
                    raise InputError(item.message)
                if item.text:
                    yield item
            bar.update(chunk.size)


def _file_of(document: Document) -> str:
    """The path in "path:line" (of text) or "path: row 7" (of tables)."""
    where = document.where
    return where.rpartition(": row " if ": row " in where else ":")[0]


def _joined(documents: Iterator[Document]) -> Iterator[Document]:
    """The units of each plain text file as one document; those of other files as they are."""
    for path, units in itertools.groupby(documents, _file_of):
        if files.suffix_of(path).startswith(".txt"):
            yield Document("".join(unit.text for unit in units), f"{path}:1")
        else:
            yield from units


def _encoded(documents: Iterator[Document], tokenizer: Tokenizer) -> TextStream:
    dtype = token_dtype(tokenizer.vocab_size)
    parts: list[np.ndarray] = []
    shards: list[Shard] = []
    total, text_bytes, count = 0, 0, 0
    for path, of_file in itertools.groupby(documents, _file_of):
        begun = total
        for group in _groups(of_file):
            parts.append(_ids(group, tokenizer).astype(dtype))
            total += len(parts[-1])
            text_bytes += sum(len(document.text.encode()) for document in group)
            count += len(group)
        shards.append(Shard(Path(path), total - begun, begun))
    ids = np.concatenate(parts) if parts else np.empty(0, dtype)
    return TextStream(ids, shards, tokenizer.vocab_size, text_bytes, count)


def _groups(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Consecutive documents, about GROUP_BYTES of text together."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _ids(group: list[Document], tokenizer: Tokenizer) -> np.ndarray:
    try:
        return tokenizer.encode_documents([document.text for document in group])[0]
    except InputError:
        for document in group:  # which of them?
            try:
                tokenizer.encode(document.text)
            except InputError as e:
                reason = str(e).split("; ")[0]
                raise InputError(
                    f"{document.where}: {reason}; the model can be scored only on text that its tokenizer spells"
                ) from None
        raise
