"""A chunk of text -> the ids of its documents on either side of the split, in any process."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import os
import signal
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fourscale import tokenization
from fourscale.cli import InputError, RunFailed, say
from fourscale.documents import BadRow, Document
from fourscale.shards import SPLITS, Split, token_dtype
from fourscale.sources import Chunk
from fourscale.tokenization import Tokenizer

HASH_KEY = b"fourscale held-out 2"
SAME_TEXT = "equal but for ASCII whitespace and Unicode normal form (NFC)"
WHITESPACE = b" \t\n\r\x0b\x0c"
BAD_ROWS_SHOWN = 5


# ---- the side of a document ------------------------------------------------------------------------------------------


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=HASH_KEY).digest(), "little")


def text_hash(text: str) -> int:
    """64 bits of a text, the same everywhere, and for texts that are SAME_TEXT. UnicodeEncodeError for what no UTF-8
    can hold."""
    data = text.encode() if text.isascii() else unicodedata.normalize("NFC", text).encode()
    return _hash64(data.translate(None, WHITESPACE))


def side_hash(document: Document) -> int:
    """What is compared with the threshold of the split: the hash of the document's group, or else of its text."""
    return text_hash(document.text) if document.group is None else _hash64(document.group.encode())


def threshold_for_share(hashes: Iterable[int], share: float) -> int:
    """The threshold that holds out about `share` of the texts or groups; one where that is none of them.

    Reads up to the first that is held out: in a small corpus perhaps all, in a large one a few.
    """
    threshold = int(share * 2**64)
    smallest = 2**64
    for h in hashes:
        smallest = min(smallest, h)
        if smallest < threshold:
            return threshold
    if smallest < 2**64:
        say(f"note: --val-fraction {share} of so few documents is none; holding out one (--val-docs N for more)")
    return smallest + 1


def threshold_for_count(hashes: Iterable[int], count: int) -> int:
    """The threshold that holds out exactly `count` distinct texts, those of the smallest hashes. Memory: `count`.

    Raises InputError where there are not more distinct texts than that.
    """
    largest_first: list[int] = []
    held: set[int] = set()
    distinct_beyond = False
    for h in hashes:
        if h in held:
            continue
        if len(held) < count:
            heapq.heappush(largest_first, -h)
            held.add(h)
            continue
        distinct_beyond = True
        if h < -largest_first[0]:
            held.remove(-heapq.heapreplace(largest_first, -h))
            held.add(h)
    if not distinct_beyond:
        raise InputError(
            f"--val-docs {count}: the corpus has {len(held)} distinct documents, which leaves none to train on; "
            "hold out fewer, or divide plain text further with --doc-sep"
        )
    return -largest_first[0] + 1


# ---- a chunk, in any process -----------------------------------------------------------------------------------------


@dataclass
class Part:
    """The documents of a chunk on one side of the split."""

    ids: np.ndarray  # stored dtype [n]: each document's ids and end-of-text
    ends: np.ndarray  # int64 [D]
    text_bytes: np.ndarray  # int64 [D]

    def keep(self, first: int, mask: np.ndarray) -> Part:
        """Of the documents from number `first` on, those where bool [k] is true."""
        start = int(self.ends[first - 1]) if first else 0
        ends = self.ends[first : first + len(mask)] - start
        ids, text_bytes = self.ids[start : start + (ends[-1] if len(ends) else 0)], self.text_bytes[first:][: len(mask)]
        if mask.all():
            return Part(ids, ends, text_bytes)
        lengths = np.diff(ends, prepend=0)
        return Part(ids[np.repeat(mask, lengths)], np.cumsum(lengths[mask]), text_bytes[mask])


@dataclass
class Encoded:
    """A chunk's documents in their order, and what its other rows are. Rows are numbered from 1."""

    parts: dict[Split, Part]
    held_out: np.ndarray  # bool [D]: on the side "val"
    hashes: np.ndarray  # uint64 [D]: text_hash
    rows: np.ndarray  # int64 [D]: the row of each document
    wheres: list[str]  # [D]
    empty: np.ndarray  # int64: rows without text
    bad: np.ndarray  # int64: malformed rows
    bad_rows: list[str]  # messages of the first of these
    all_rows: int
    fault: str | None  # message of the malformed row that ended it


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer, threshold: int, skip_bad: bool) -> Encoded:
    """Parse, divide and encode the documents of a chunk. A malformed row ends it before that row, unless skip_bad."""
    texts: dict[Split, list[str]] = {split: [] for split in SPLITS}
    sizes: dict[Split, list[int]] = {split: [] for split in SPLITS}
    held_out, hashes, rows, wheres, empty, bad, bad_rows = [], [], [], [], [], [], []
    row, fault = 0, None
    for row, item in enumerate(chunk.documents(), 1):
        if isinstance(item, BadRow):
            if not skip_bad:
                row, fault = row - 1, item.message
                break
            bad.append(row)
            bad_rows = [*bad_rows, item.message][:BAD_ROWS_SHOWN]
        elif not item.text:
            empty.append(row)
        else:
            h = text_hash(item.text)
            held_out.append((h if item.group is None else side_hash(item)) < threshold)
            side: Split = "val" if held_out[-1] else "train"
            texts[side].append(item.text)
            sizes[side].append(len(item.text) if item.text.isascii() else len(item.text.encode()))
            hashes.append(h)
            rows.append(row)
            wheres.append(item.where)
    dtype = token_dtype(tokenizer.vocab_size)
    parts = {}
    for split in SPLITS:
        ids, ends = tokenizer.encode_documents(texts[split])
        parts[split] = Part(ids.astype(dtype), ends, np.array(sizes[split], np.int64))
    integers = [np.array(values, np.int64) for values in (rows, empty, bad)]
    sides, keys = np.array(held_out, bool), np.array(hashes, np.uint64)
    return Encoded(parts, sides, keys, integers[0], wheres, *integers[1:], bad_rows, row, fault)


_worker: tuple[Tokenizer, int, bool] | None = None  # of this process


def _start_worker(directory: Path, entry: dict[str, Any], threshold: int, skip_bad: bool) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = tokenization.load(directory, entry), threshold, skip_bad


def _end_with_parent() -> None:
    """A pool's processes wait for work forever if their parent is killed."""
    import multiprocessing

    multiprocessing.parent_process().join()
    os._exit(1)


def _encode_here(chunk: Chunk) -> Encoded:
    return encode_chunk(chunk, *_worker)


@contextlib.contextmanager
def pool(
    processes: int, directory: Path, tokenizer: Tokenizer, entry: dict[str, Any], threshold: int, skip_bad: bool
) -> Iterator[Callable[[Chunk], Future[Encoded]]]:
    """A function that begins to encode a chunk: in one of `processes` others, or at once in this one if 0.

    Processes are spawned on every platform (a fork would inherit the tokenizers' threads as they stand), and load the
    tokenizer from `directory` by its manifest entry.
    """
    if processes == 0:

        def at_once(chunk: Chunk) -> Future[Encoded]:
            future: Future[Encoded] = Future()
            future.set_result(encode_chunk(chunk, tokenizer, threshold, skip_bad))
            return future

        yield at_once
        return
    import multiprocessing

    arguments = (directory, entry, threshold, skip_bad)
    executor = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_worker, arguments)
    try:
        yield lambda chunk: executor.submit(_encode_here, chunk)
    except BrokenProcessPool:
        raise RunFailed(
            "a tokenizing process ended (out of memory?); lower --workers, and run the same command to go on"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)
