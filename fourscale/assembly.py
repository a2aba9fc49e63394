"""Encoded chunks -> shards: shares of several sources, duplicates, limits, and on from where a killed run was.

The bytes that are written depend on the text and the flags alone: not on the number of processes, on which of them is
first, or on where an earlier run was killed. Chunks are encoded ahead of their turn; whose turn it is follows from
counts of tokens, so that shares are exact.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from fourscale import __version__
from fourscale.cli import InputError
from fourscale.encoding import BAD_ROWS_SHOWN, Encoded, Part
from fourscale.shards import SPLITS, ShardWriter, Split, shard_name, split_entry, sync_directory
from fourscale.sources import Chunk, Source
from fourscale.tokenization import Tokenizer

UNFINISHED = ".prepare_unfinished"  # directory within --out where everything is made
SKIP_BAD = " (or --skip-bad)"
COMMIT_SECONDS = 10.0  # at most this much work is lost by a kill, and a start
COMMIT_APART = 1.0  # however small the shards


# ---- which texts were seen -------------------------------------------------------------------------------------------


class Hashes:
    """A growing set of uint64 in sorted arrays of falling size: 8 bytes each, for a billion documents too."""

    def __init__(self, first: np.ndarray) -> None:
        self._runs = [np.sort(first)]

    def has(self, hashes: np.ndarray) -> np.ndarray:
        """bool [n] for uint64 [n]."""
        found = np.zeros(len(hashes), bool)
        for run in self._runs:
            at = np.searchsorted(run, hashes)
            within = at < len(run)
            found[within] |= run[at[within]] == hashes[within]
        return found

    def add(self, hashes: np.ndarray) -> None:
        """Add uint64 [n] that are not in the set."""
        self._runs.append(np.sort(hashes))
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            last = self._runs.pop()
            self._runs[-1] = np.sort(np.concatenate((self._runs[-1], last)), kind="stable")  # merges sorted runs


# ---- all sources -----------------------------------------------------------------------------------------------------


@dataclass
class Taken:
    """What was taken from one source. rows = documents + empty + bad + dropped + crossing + beyond."""

    bytes: int = 0  # read
    rows: int = 0
    documents: int = 0  # written, on both sides
    empty: int = 0
    bad: int = 0
    duplicates: int = 0  # whose text was seen before, on the same side
    dropped: int = 0  # of these, with --dedup
    crossing: int = 0  # dropped: the text was seen before on the other side, which a group can bring about
    beyond: int = 0  # in a chunk that was begun, after the limit was reached
    longest: tuple[int, str] = (0, "")
    bad_rows: list[str] = field(default_factory=list)


@dataclass
class _Drawn:
    """A chunk that was encoded and admitted, not yet written."""

    after: Any
    parts: dict[Split, Part]
    taken: Taken
    new: dict[Split, np.ndarray]  # hashes first seen here


class _Lane:
    """One source on its way into shards of its own."""

    def __init__(self, source: Source, writers: dict[Split, ShardWriter], weight: Fraction | None, state: Any) -> None:
        self.source, self.writers, self.weight = source, writers, weight
        self.cursor = state["cursor"] if state else None
        self.taken = Taken(**state["taken"]) if state else Taken()
        self.taken.longest = tuple(self.taken.longest)  # JSON knows lists
        self.pending: _Drawn | None = None
        self.exhausted = False
        self._chunks: Iterator[Chunk] | None = None
        self._ahead: deque[tuple[Chunk, Future[Encoded]]] = deque()

    @property
    def tokens(self) -> int:
        """Training tokens, the pending chunk's among them."""
        return self.writers["train"].tokens + (len(self.pending.parts["train"].ids) if self.pending else 0)

    def next(self, submit: Callable[[Chunk], Future[Encoded]], ahead: int) -> tuple[Chunk, Encoded] | None:
        """The next chunk, while `ahead` more are being encoded; None at the end of the source."""
        if self._chunks is None:
            self._chunks = self.source.chunks(self.cursor)
        while len(self._ahead) <= ahead and (chunk := next(self._chunks, None)) is not None:
            self._ahead.append((chunk, submit(chunk)))
        if not self._ahead:
            return None
        chunk, future = self._ahead.popleft()
        return chunk, future.result()


class Assembly:
    """The whole of it: `run` to the end, or to the limit; `entries` and `taken` then say what was written."""

    def __init__(
        self,
        work: Path,
        sources: Sequence[Source],
        weights: Sequence[Fraction | None],
        tokenizer: Tokenizer,
        shard_tokens: int,
        *,
        dedup: bool = False,
        max_tokens: int | None = None,
        max_docs: int | None = None,
        state: dict[str, Any] | None = None,
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        """Shards go into a directory of `work` a source. weights: shares of the training tokens, which sum to 1, or all
        None. save(state) stores a JSON value durably; given back as `state`, a later run goes on from there."""
        self.work, self.tokenizer, self.dedup, self.save = work, tokenizer, dedup, save
        self.max_tokens, self.max_docs = max_tokens, max_docs
        self.weighted = weights[0] is not None
        self._lanes: list[_Lane] = []
        for number, (source, weight) in enumerate(zip(sources, weights, strict=True)):
            directory = work / str(number)
            directory.mkdir(exist_ok=True)
            lane = state and state["lanes"][number]
            kept = {shard["file"] for split in SPLITS for shard in (lane["shards"][split] if lane else ())}
            for path in directory.iterdir():  # written after the last commit
                if path.name not in kept:
                    path.unlink()
            writers: dict[Split, ShardWriter] = {
                split: ShardWriter(
                    directory, split, tokenizer.vocab_size, shard_tokens, lane["shards"][split] if lane else ()
                )
                for split in SPLITS
            }
            self._lanes.append(_Lane(source, writers, weight, lane))
        self._seen_files = {split: (work / f"seen_{split}.u64") for split in SPLITS}
        self._seen_counts = dict(state["seen"]) if state else dict.fromkeys(SPLITS, 0)
        self._seen = {split: Hashes(self._load_seen(split)) for split in SPLITS}
        self._committed = time.monotonic()
        self._finished_shards = self._count_finished()

    def taken(self) -> list[Taken]:
        """What was taken from each source."""
        return [lane.taken for lane in self._lanes]

    def tokens(self) -> list[dict[Split, int]]:
        """Tokens of each source on each side."""
        return [{split: writer.tokens for split, writer in lane.writers.items()} for lane in self._lanes]

    def entries(self) -> tuple[dict[Split, dict[str, Any]], list[tuple[str, str]]]:
        """After `run`: the manifest's entry of each split, the sources' shards one after the other and numbered anew;
        and the (name within work, final name) of each shard."""
        entries, moves = {}, []
        for split in SPLITS:
            stream, listed = self._lanes[0].writers[split].stream_sha.copy(), []
            for number, lane in enumerate(self._lanes):
                for shard in lane.writers[split].finish():
                    name = shard_name(split, len(listed))
                    moves.append((f"{number}/{shard['file']}", name))
                    listed.append(shard | {"file": name} | ({"source": number} if len(self._lanes) > 1 else {}))
                    if number:  # the stream's hash goes on over the other sources
                        with (self.work / moves[-1][0]).open("rb") as f:
                            while data := f.read(1 << 22):
                                stream.update(data)
            entries[split] = split_entry(listed, stream.hexdigest())
        return entries, moves

    def run(
        self,
        submit: Callable[[Chunk], Future[Encoded]],
        ahead: int,
        progress: Callable[[int, int], None] = lambda size, tokens: None,
    ) -> None:
        """Encode until the sources or the limits end. progress(bytes, tokens) is called for each chunk taken.

        Raises InputError for a malformed row (unless it was encoded with skip_bad) and as the sources do.
        """
        with contextlib.ExitStack() as files:
            self._seen_out = {s: files.enter_context(p.open("ab")) for s, p in self._seen_files.items()}
            while (lane := self._choose()) is not None:
                drawn = lane.next(submit, ahead)
                if drawn is None:
                    lane.exhausted = True
                    continue
                self._write(lane)
                chunk, encoded = drawn
                lane.pending = self._admit(chunk, encoded)
                progress(chunk.size, sum(len(part.ids) for part in lane.pending.parts.values()))
                self._commit_now_and_then()
            targets = self._targets()
            for lane, target in zip(self._lanes, targets, strict=True):
                if lane.pending and target is not None:
                    self._trim(lane.pending, target - lane.writers["train"].tokens)
                self._write(lane)
        for lane in self._lanes:
            for writer in lane.writers.values():
                writer.finish()

    # ---- whose turn it is, and when it's enough

    def _choose(self) -> _Lane | None:
        """The lane to draw from: with weights the one furthest behind its share, else the first that isn't dry."""
        if self.max_docs is not None and self._documents() >= self.max_docs:
            return None
        if self.weighted:
            if any(lane.exhausted for lane in self._lanes):
                return None
            targets = self._shares_of(self.max_tokens)
            short = [x for x, t in zip(self._lanes, targets, strict=True) if t is None or x.tokens < t]
            return min(short, key=lambda lane: lane.tokens / lane.weight, default=None)
        if self.max_tokens is not None and sum(lane.tokens for lane in self._lanes) >= self.max_tokens:
            return None
        return next((lane for lane in self._lanes if not lane.exhausted), None)

    def _documents(self) -> int:
        def pending(lane: _Lane) -> int:
            return sum(len(part.ends) for part in lane.pending.parts.values()) if lane.pending else 0

        return sum(lane.taken.documents + pending(lane) for lane in self._lanes)

    def _targets(self) -> list[int | None]:
        """Training tokens of each source at the end; None for all of it."""
        if not self.weighted:
            left, targets = self.max_tokens, []
            for lane in self._lanes:
                targets.append(None if left is None else min(left, lane.tokens))
                left = None if left is None else left - targets[-1]
            return targets
        asked = self._shares_of(self.max_tokens)
        dry = [lane.tokens / lane.weight for lane in self._lanes if lane.exhausted]
        if not dry:
            return asked
        return [
            math.floor(min(dry) * x.weight) if t is None else min(t, math.floor(min(dry) * x.weight))
            for x, t in zip(self._lanes, asked, strict=True)
        ]

    def _shares_of(self, total: int | None) -> list[int | None]:
        """`total` tokens divided by weight, exactly: what flooring leaves goes to the largest remainders."""
        if total is None:
            return [None] * len(self._lanes)
        exact = [lane.weight * total for lane in self._lanes]
        shares = [math.floor(x) for x in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
        for i in by_remainder[: total - sum(shares)]:
            shares[i] += 1
        return shares

    # ---- a chunk's way

    def _admit(self, chunk: Chunk, encoded: Encoded) -> _Drawn:
        """Leave out what was seen before on the other side or, with dedup, at all; and what is beyond max_docs."""
        if encoded.bad and not encoded.parts:  # it was not to be skipped
            raise InputError(f"{encoded.bad_rows[0]}{SKIP_BAD}")
        taken = Taken(chunk.size, encoded.rows, 0, encoded.empty, encoded.bad)
        taken.longest, taken.bad_rows = encoded.longest, encoded.bad_rows
        parts = [encoded.parts[split] for split in SPLITS]
        side = np.repeat((0, 1), [len(part.ends) for part in parts])
        hashes = np.concatenate([part.hashes for part in parts])
        order = np.argsort(np.concatenate([part.index for part in parts]))  # as the chunk has them
        side, hashes = side[order], hashes[order]
        known = np.full(len(hashes), -1)
        for number, split in enumerate(SPLITS):
            known[self._seen[split].has(hashes)] = number
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        repeated = (known >= 0) | (first[inverse] != np.arange(len(hashes)))
        crossing = np.where(known >= 0, known, side[first][inverse]) != side
        dropped = repeated & ~crossing & self.dedup
        keep = ~(crossing | dropped)
        if self.max_docs is not None:
            within = np.cumsum(keep) <= self.max_docs - self._documents()
            taken.beyond = int((keep & ~within).sum())
            keep &= within
        taken.duplicates, taken.crossing = int((repeated & ~crossing).sum()), int(crossing.sum())
        taken.dropped = int(dropped.sum())
        drawn = _Drawn(chunk.after, {}, taken, {})
        mask = np.empty(len(order), bool)
        mask[order] = keep
        for number, (split, part) in enumerate(zip(SPLITS, parts, strict=True)):
            start = number * len(parts[0].ends)
            drawn.parts[split] = part.keep(mask[start : start + len(part.ends)])
            drawn.new[split] = hashes[~repeated & (side == number)]
            self._seen[split].add(drawn.new[split])
        return drawn

    def _trim(self, drawn: _Drawn, room: int) -> None:
        """Cut to `room` training tokens, and to the held-out documents before the cut."""
        train, val = drawn.parts["train"], drawn.parts["val"]
        if room >= len(train.ids):
            return
        drawn.parts["train"] = train.cut(room, self.tokenizer)
        first_cut = train.index[np.searchsorted(train.ends, room, side="right")]
        drawn.parts["val"] = val.keep(val.index < first_cut)
        before, after = len(train.ends) + len(val.ends), sum(len(part.ends) for part in drawn.parts.values())
        drawn.taken.beyond += before - after

    def _write(self, lane: _Lane) -> None:
        drawn, lane.pending = lane.pending, None
        if drawn is None:
            return
        for split, part in drawn.parts.items():
            lane.writers[split].add(part.ids, part.ends, part.text_bytes)
            self._seen_out[split].write(drawn.new[split].astype("<u8").tobytes())
            self._seen_counts[split] += len(drawn.new[split])
        drawn.taken.documents = sum(len(part.ends) for part in drawn.parts.values())
        total = lane.taken
        for name, value in vars(drawn.taken).items():
            if isinstance(value, int):
                setattr(total, name, getattr(total, name) + value)
        total.longest = max(total.longest, drawn.taken.longest, key=lambda longest: longest[0])
        total.bad_rows = [*total.bad_rows, *drawn.taken.bad_rows][:BAD_ROWS_SHOWN]
        lane.cursor = drawn.after

    # ---- what a kill leaves

    def _count_finished(self) -> int:
        return sum(writer.finished for lane in self._lanes for writer in lane.writers.values())

    def _commit_now_and_then(self) -> None:
        """After a shard is complete, and every few seconds."""
        now, finished = time.monotonic(), self._count_finished()
        due = COMMIT_APART if finished > self._finished_shards else COMMIT_SECONDS
        if now - self._committed < due:
            return
        lanes = [
            {
                "cursor": lane.cursor,
                "taken": asdict(lane.taken),
                "shards": {split: writer.commit() for split, writer in lane.writers.items()},
            }
            for lane in self._lanes
        ]
        for f in self._seen_out.values():
            f.flush()
            os.fsync(f.fileno())
        for number in range(len(lanes)):
            sync_directory(self.work / str(number))
        self.save({"lanes": lanes, "seen": dict(self._seen_counts)})
        self._committed, self._finished_shards = time.monotonic(), finished

    def _load_seen(self, split: Split) -> np.ndarray:
        path, count = self._seen_files[split], self._seen_counts[split]
        path.touch()
        os.truncate(path, min(8 * count, path.stat().st_size))
        hashes = np.fromfile(path, "<u8")
        if len(hashes) != count:
            raise InputError(f"{path}: not what an interrupted run wrote; delete {self.work} to start over")
        return hashes


# ---- the directory where it is made ----------------------------------------------------------------------------------


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
            self.table = {"command": json.loads(json.dumps(command)), "version": __version__}
            return
        way_on = f"choose another --out, or delete {out} first"
        begun = self.table["command"]
        if told := differing(begun, self.table["command"] | json.loads(json.dumps(command))):
            raise InputError(f"{out}: holds the unfinished work of a command with {told}; give that again, or {way_on}")
        if begun["inputs"] != command["inputs"]:
            raise InputError(f"{out}: its input files have changed since this work was begun; {way_on}")
        if self.table["version"] != __version__:
            raise InputError(f"{out}: was begun by fourscale {self.table['version']}, this is {__version__}; {way_on}")

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

    def _load(self) -> dict[str, Any]:
        try:
            table = json.loads(self._path.read_text(encoding="utf-8"))
            return table if {"command", "version"} <= table.keys() else {}
        except FileNotFoundError:
            return {}
        except ValueError:
            raise InputError(f"{self._path}: not valid JSON; delete {self.work} to start over") from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Where the input is refused before anything was made, nothing stays."""
        if kind is InputError and "assembly" not in self.table:
            shutil.rmtree(self.work, ignore_errors=True)


def differing(made: dict[str, Any], asked: dict[str, Any]) -> str:
    """The flags in which two commands differ, for a message."""
    names = [name for name in asked if name != "inputs" and made.get(name) != asked[name]]

    def shown(value: Any) -> str:
        return " ".join(value) if isinstance(value, list) else str(value)

    return ", ".join(f"--{name.replace('_', '-')} {shown(made.get(name))} (now {shown(asked[name])})" for name in names)
