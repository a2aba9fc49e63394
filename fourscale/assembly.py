"""Encoded chunks -> shards: shares of several sources, duplicates, limits, and on from where a killed run was.

The bytes that are written depend on the text and the flags alone: not on the number of processes, on which of them is
first, or on where an earlier run was killed. Chunks are encoded ahead of their turn; whose turn it is follows from
counts of tokens, so that shares are exact.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from fourscale.cli import InputError
from fourscale.encoding import BAD_ROWS_SHOWN, Encoded, Part
from fourscale.shards import SPLITS, ShardWriter, Split, shard_name, split_entry, sync_directory
from fourscale.sources import Chunk, Source
from fourscale.tokenization import Tokenizer

SKIP_BAD = " (or --skip-bad)"
RECENT = 50_000
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
    """What was taken from one source. rows = documents + empty + bad + dropped + crossing."""

    bytes: int = 0  # of chunks that were read to their end, as stored
    rows: int = 0
    documents: int = 0  # written, on both sides
    empty: int = 0
    bad: int = 0
    duplicates: int = 0  # whose text was seen before, on the same side
    dropped: int = 0  # of these, with --dedup
    crossing: int = 0  # dropped: the text was seen before on the other side, which a group can bring about
    longest: tuple[int, str] = (0, "")  # bytes of UTF-8 of a document that was written, and where it stands
    bad_rows: list[str] = field(default_factory=list)


NEW, KEPT, REPEATED, CROSSING = 1, 2, 4, 8  # what a document turned out to be


class _Current:
    """A chunk whose documents are being taken, one after the other."""

    def __init__(self, chunk: Chunk, encoded: Encoded, start: Any, written: int) -> None:
        """start: Source.chunks(start) begins with this chunk. written: documents of it that an earlier run wrote."""
        self.chunk, self.encoded, self.start = chunk, encoded, start
        self.written = self.taken = min(written, len(encoded.hashes))
        self.count = len(encoded.hashes)
        # As lists, since they are asked for one by one.
        self.hashes, self.sides = encoded.hashes.tolist(), encoded.held_out.tolist()
        train, lengths = ~encoded.held_out, np.zeros(self.count, np.int64)
        lengths[train] = np.diff(encoded.parts["train"].ends, prepend=0)
        self.train_tokens: list[int] = lengths.tolist()
        self.outcome = np.zeros(self.count, np.uint8)
        self.known: list[int] = []
        self.closed = False

    def look_up(self, seen: dict[Split, Hashes]) -> None:
        """Note the side (0 train, 1 val, -1 none) on which each text stands already."""
        known = np.full(self.count, -1)
        for number, split in enumerate(SPLITS):
            known[seen[split].has(self.encoded.hashes)] = number
        self.known = known.tolist()

    def completed_by(self, last: int) -> bool:
        """Whether nothing of the chunk is left after the document before `last`."""
        return last == self.count and self.encoded.fault is None

    def part(self, split: Split, first: int, last: int) -> tuple[Part, np.ndarray]:
        """The kept documents of one side among those from `first` to `last`, and hashes of its new texts, uint64."""
        on_side = self.encoded.held_out == (split == "val")
        within = np.flatnonzero(on_side[first:last]) + first
        kept = self.encoded.parts[split].keep(int(on_side[:first].sum()), (self.outcome[within] & KEPT) > 0)
        return kept, self.encoded.hashes[within[(self.outcome[within] & NEW) > 0]]

    def account(self, taken: Taken, first: int, last: int) -> None:
        """Add the rows after document `first` - 1 up to document `last` - 1 (to the chunk's end, if that's all)."""
        e = self.encoded
        begin = int(e.rows[first - 1]) if first else 0
        end = e.all_rows if self.completed_by(last) else int(e.rows[last - 1]) if last else 0
        taken.rows += end - begin
        taken.empty += int(((e.empty > begin) & (e.empty <= end)).sum())
        bad = (e.bad > begin) & (e.bad <= end)
        taken.bad += int(bad.sum())
        shown = [message for message, now in zip(e.bad_rows, bad, strict=False) if now]
        taken.bad_rows = [*taken.bad_rows, *shown][:BAD_ROWS_SHOWN]
        outcome = self.outcome[first:last]
        taken.documents += int(((outcome & KEPT) > 0).sum())
        taken.crossing += int(((outcome & CROSSING) > 0).sum())
        taken.duplicates += int(((outcome & REPEATED) > 0).sum())
        taken.dropped += int((((outcome & REPEATED) > 0) & ((outcome & KEPT) == 0)).sum())
        for split in SPLITS:
            on_side = e.held_out == (split == "val")
            numbers = np.flatnonzero(on_side[first:last] & ((outcome & KEPT) > 0)) + first
            if len(numbers):
                sizes = e.parts[split].text_bytes[np.cumsum(on_side)[numbers] - 1]
                most = int(sizes.argmax())
                taken.longest = max(taken.longest, (int(sizes[most]), e.wheres[numbers[most]]), key=lambda x: x[0])


class _Lane:
    """One source on its way into shards of its own."""

    def __init__(self, source: Source, writers: dict[Split, ShardWriter], weight: Fraction | None, state: Any) -> None:
        self.source, self.writers, self.weight = source, writers, weight
        self.cursor, self.skip = (state["cursor"], state["written"]) if state else (None, 0)
        self.taken = Taken(**state["taken"]) if state else Taken()
        self.taken.longest = tuple(self.taken.longest)  # JSON knows lists
        self.tokens = writers["train"].tokens  # training tokens taken, the last document's among them
        self.queue: deque[_Current] = deque()  # chunks that are not wholly written
        self.last: tuple[_Current, int] | None = None  # the last training document, which may have to be cut
        self.exhausted = False
        self._next_start = self.cursor
        self._chunks: Iterator[Chunk] | None = None
        self._ahead: deque[tuple[Chunk, Future[Encoded]]] = deque()

    def load(self, submit: Callable[[Chunk], Future[Encoded]], ahead: int) -> _Current | None:
        """The next chunk, while `ahead` more are being encoded; None at the end of the source.

        Whatever is wrong further on is raised when its turn has come, or what a limit leaves out could stop a run.
        """
        if self._chunks is None:
            self._chunks = self.source.chunks(self.cursor)
        while len(self._ahead) <= ahead:
            try:
                chunk = next(self._chunks, None)
            except Exception as e:
                self._fail(e)
                break
            if chunk is None:
                break
            self._ahead.append((chunk, submit(chunk)))
        if not self._ahead:
            return None
        chunk, future = self._ahead.popleft()
        encoded = future.result()
        if encoded.fault is not None:
            self._ahead.clear()
            self._fail(InputError(f"{encoded.fault}{SKIP_BAD}"))
        current = _Current(chunk, encoded, self._next_start, self.skip)
        self._next_start, self.skip = chunk.after, 0
        self.queue.append(current)
        return current

    def _fail(self, e: Exception) -> None:
        """Raise this in place of the chunk after those that are ahead, and end there."""
        failed: Future[Encoded] = Future()
        failed.set_exception(e)
        self._ahead.append((Chunk(0, None, iter, ((),)), failed))
        self._chunks = iter(())


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
            try:
                lane = state and state["lanes"][number]
                kept = {shard["file"] for split in SPLITS for shard in (lane["shards"][split] if lane else ())}
            except (KeyError, IndexError, TypeError):
                raise InputError(f"{work}: its journal is not what a run wrote; delete {work} to start over") from None
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
        # Of max_docs: duplicates are documents too, or the number held out would depend on --dedup.
        self._documents = sum(t.documents + t.dropped + t.crossing for t in self.taken())
        if self.weighted:
            common = math.lcm(*(lane.weight.numerator for lane in self._lanes))
            self._scales = [common // x.weight.numerator * x.weight.denominator for x in self._lanes]
            self._asked = self._shares_of(max_tokens)
        self._seen_files = {split: (work / f"seen_{split}.u64") for split in SPLITS}
        self._seen_counts = dict(state["seen"]) if state else dict.fromkeys(SPLITS, 0)
        self._seen = {split: Hashes(self._load_seen(split)) for split in SPLITS}
        self._recent: dict[int, int] = {}  # hash -> side (0 train, 1 val) of texts that are not in _seen yet
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

        Documents are taken one by one, each from the source that is furthest behind its share, so that only what is
        written can make a later text a duplicate. Raises InputError for a malformed row (unless it was encoded with
        skip_bad) and as the sources do.
        """
        with contextlib.ExitStack() as files:
            self._seen_out = {s: files.enter_context(p.open("ab")) for s, p in self._seen_files.items()}
            while (turn := self._choose()) is not None:
                lane, bound = turn
                current = lane.queue[-1] if lane.queue else None
                if current is None or current.taken == current.count:
                    self._flush(lane)
                    current = lane.load(submit, ahead)
                    if current is None:
                        lane.exhausted = True
                        continue
                    current.look_up(self._seen)
                    tokens = sum(len(part.ids) for part in current.encoded.parts.values())
                    progress(current.chunk.size, tokens)
                    self._commit_now_and_then()
                self._take(lane, current, bound)
            targets = self._targets()
            for lane, target in zip(self._lanes, targets, strict=True):
                self._flush(lane)
                self._finish(lane, target)
        for lane in self._lanes:
            for writer in lane.writers.values():
                writer.finish()

    # ---- whose turn it is, and when it's enough

    def _choose(self) -> tuple[_Lane, int] | None:
        """The lane to take from, with weights the one furthest behind its share, else the first that isn't dry; and
        the number of training tokens that it may hold before another's turn comes."""
        if self.max_docs is not None and self._documents >= self.max_docs:
            return None
        if not self.weighted:
            lane = next((lane for lane in self._lanes if not lane.exhausted), None)
            others = sum(other.tokens for other in self._lanes if other is not lane)
            bound = sys.maxsize if self.max_tokens is None else self.max_tokens - others - 1
            return None if lane is None or lane.tokens > bound else (lane, bound)
        if any(lane.exhausted for lane in self._lanes):
            return None
        # Tokens by weight, as integers: this is asked for almost every document.
        order = sorted((x.tokens * s, i) for i, (x, s) in enumerate(zip(self._lanes, self._scales, strict=True)))
        order = [(far, i) for far, i in order if self._asked[i] is None or self._lanes[i].tokens < self._asked[i]]
        if not order:
            return None
        i, bound = order[0][1], sys.maxsize
        if len(order) > 1:
            far, other = order[1]
            bound = (far - (other < i)) // self._scales[i]  # of two that are equally far, the first has its turn
        return self._lanes[i], bound if self._asked[i] is None else min(bound, self._asked[i] - 1)

    def _targets(self) -> list[int | None]:
        """Training tokens of each source at the end; None for all of it."""
        if not self.weighted:
            left, targets = self.max_tokens, []
            for lane in self._lanes:
                targets.append(None if left is None else min(left, lane.tokens))
                left = None if left is None else left - targets[-1]
            return targets
        asked = self._asked
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

    # ---- a document's way

    def _take(self, lane: _Lane, current: _Current, bound: int) -> None:
        """Take documents of a chunk while the lane holds at most `bound` training tokens: which of them are kept?"""
        recent, outcome, left = self._recent, current.outcome, (self.max_docs or sys.maxsize) - self._documents
        first = k = current.taken
        last = min(current.count, first + left)
        tokens, newest = lane.tokens, None
        while k < last and tokens <= bound:
            h, side = current.hashes[k], int(current.sides[k])
            home = recent.get(h, current.known[k])
            if home < 0:
                recent[h] = side
                result = NEW | KEPT
            elif home != side:
                result = CROSSING
            else:
                result = REPEATED if self.dedup else REPEATED | KEPT
            outcome[k] = result
            if result & KEPT and side == 0:
                tokens += current.train_tokens[k]
                newest = k
            k += 1
        current.taken, lane.tokens = k, tokens
        self._documents += k - first
        if newest is not None:
            lane.last = current, newest
        if len(recent) >= RECENT:
            for number, split in enumerate(SPLITS):
                new = [h for h, side in recent.items() if side == number]
                self._seen[split].add(np.array(new, np.uint64))
            recent.clear()
            for other in self._lanes:
                if other.queue:
                    other.queue[-1].look_up(self._seen)

    def _flush(self, lane: _Lane) -> None:
        """Write what was taken before the lane's last training document."""
        while lane.queue:
            current = lane.queue[0]
            held = lane.last is not None and lane.last[0] is current
            self._write(lane, current, lane.last[1] if held else current.taken)
            if held or not current.completed_by(current.written):
                return
            lane.queue.popleft()
            lane.cursor = current.chunk.after

    def _write(self, lane: _Lane, current: _Current, end: int) -> None:
        """Write the documents of a chunk up to number `end`, and what they are to the account."""
        if current.written == end and (current.closed or not current.completed_by(end)):
            return
        for split, writer in lane.writers.items():
            part, new = current.part(split, current.written, end)
            writer.add(part.ids, part.ends, part.text_bytes)
            self._seen_out[split].write(new.astype("<u8").tobytes())
            self._seen_counts[split] += len(new)
        current.account(lane.taken, current.written, end)
        current.written = end
        if current.completed_by(end):
            current.closed = True
            lane.taken.bytes += current.chunk.size

    def _finish(self, lane: _Lane, target: int | None) -> None:
        """Write what is left, the last training document cut so that there are `target` tokens (None: all of it)."""
        if lane.last is None:
            return
        current, number = lane.last
        writer = lane.writers["train"]
        room = current.train_tokens[number] if target is None else target - writer.tokens
        if room >= current.train_tokens[number]:
            lane.last = None
            self._flush(lane)
        elif room > 0:
            part, new = current.part("train", number, number + 1)
            ids = part.ids[:room]
            size = len(self.tokenizer.decode_bytes(ids))
            writer.add(ids, np.array([room], np.int64), np.array([size], np.int64))
            self._seen_out["train"].write(new.astype("<u8").tobytes())
            current.account(lane.taken, number, number + 1)

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
                "written": lane.queue[0].written if lane.queue else lane.skip,
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
