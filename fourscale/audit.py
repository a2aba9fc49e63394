"""What check.py and train.py verify of data: hashes, counts, ids, degenerate shards, held-out text in the training set.

One pass over the files, block by block: memory does not grow with the corpus. `verify` compares with the manifest;
`Survey` looks at the ids themselves and works for any TokenStream. Held-out windows are looked for at every position of
the training stream by a rolling hash (Karp and Rabin 1987), and a hit is compared id by id, so none is by chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fourscale.cli import InputError
from fourscale.shards import MANIFEST, SPLITS, Shard, TokenStream, load_manifest, open_split

BLOCK = 1 << 18  # tokens read at a time: what is made of them stays in the processor's cache
MAX_WINDOWS = 1 << 18  # held-out windows looked for, evenly spread: bounds memory to their ids
SAMPLED_HASHES = 1 << 14  # of a shard, to see what stands in it twice
MAX_PERIOD = 1 << 16  # tokens; longer repeats are seen by the sampled hashes

# Judgement of a shard. Padding, a repeated block and constant ids are far beyond these; text and code stay below.
MOSTLY_ONE_ID = 0.6
MOSTLY_REPEATED = 0.45  # 0.5: everything stands in the shard twice
LOW_ENTROPY = 0.5  # of the median shard's
SMALL_SHARD = 1 << 13  # tokens; shares of less say nothing
MAX_COUNTED = 1 << 20  # ids counted one by one; no vocabulary is larger

Visit = Callable[[str, Shard, np.ndarray], None]


class Stopped(Exception):
    """`stop` said so before all was read."""


def verify(
    data_dir: Path,
    on_bytes: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    visit: Visit | None = None,
    first: bool = False,
    opened: tuple[dict[str, Any], dict[str, TokenStream]] | None = None,
) -> list[str]:
    """Read all data of a prepared directory and return what is wrong with it, a line each; empty if every hash, count
    and id is right.

    Checks the manifest's sums, the tokenizer's file, each shard, each split's stream, and that ids are within the
    vocabulary. on_bytes(n): called as n more bytes of shards are read. stop(): asked every 0.5 or 1 MB; if true,
    `Stopped` is raised. visit(split, shard, ids): sees each block of ids, held-out ones first. first: return after the
    first shard that is wrong. opened: the manifest and the streams of a run that trains on them: these are read, and a
    directory that no longer is what they were opened from, now or at the end, is a problem.

    Raises InputError as `load_manifest`.
    """
    data_dir = Path(data_dir)
    manifest = load_manifest(data_dir)
    if opened is not None and (problems := _replaced(data_dir, manifest, *opened)):
        return problems
    problems = _tokenizer_problems(data_dir, manifest)
    for split in reversed(SPLITS):
        try:
            stream = open_split(data_dir, split, manifest)
        except InputError as e:
            problems.append(str(e))
            continue
        if opened is not None:  # files that have been put in its place since are not what the run reads
            stream = opened[1][split]
        problems += _count_problems(data_dir, split, manifest["splits"][split])
        listed = manifest["splits"][split]["shards"]
        stream_sha, changed = hashlib.sha256(), False
        for shard, entry in zip(stream.shards, listed, strict=True):
            if first and problems:
                return problems
            shard_sha, highest = hashlib.sha256(), -1
            try:
                for ids in blocks(stream, shard, on_bytes, stop):
                    shard_sha.update(ids)
                    stream_sha.update(ids)
                    highest = max(highest, int(ids.max()))
                    if visit:
                        visit(split, shard, ids)
            except InputError as e:  # shorter than when it was opened
                problems.append(str(e))
                changed = True
                continue
            if shard_sha.hexdigest() != entry["sha256"]:
                problems.append(f"{shard.path}: its content has changed since it was written (sha256)")
                changed = True
            if highest >= stream.vocab_size:
                problems.append(f"{shard.path}: id {highest} is outside the vocabulary of {stream.vocab_size}")
        if stream_sha.hexdigest() != stream.digest:
            why = "" if changed else "; its shards are right, so the manifest was edited"
            problems.append(f"{data_dir}: the {split} stream is not the manifest's (sha256){why}")
    if opened is not None and not problems:
        problems = _replaced(data_dir, load_manifest(data_dir), *opened)
    return problems


def blocks(
    stream: TokenStream, shard: Shard, on_bytes: Callable[[int], None] | None, stop: Callable[[], bool] | None
) -> Iterator[np.ndarray]:
    """The ids of one shard of a stream in its dtype, BLOCK at a time. Raises InputError where the file has become
    shorter, Stopped where `stop` says so."""
    for first in range(0, shard.tokens, BLOCK):
        if stop and stop():
            raise Stopped
        ids = stream._read_shard(shard, first, min(BLOCK, shard.tokens - first))
        yield ids
        if on_bytes:
            on_bytes(ids.nbytes)


def _replaced(
    data_dir: Path, manifest: dict[str, Any], began: dict[str, Any], streams: dict[str, TokenStream]
) -> list[str]:
    """A line where the manifest of now is not that which a run began with, or names other streams than it opened."""
    same = all(manifest[name] == began[name] for name in ("dtype", "tokenizer", "splits"))
    for split, stream in streams.items():
        part = manifest["splits"][split]
        same &= part["stream_sha256"] == stream.digest
        same &= [(s["file"], s["tokens"]) for s in part["shards"]] == [(s.path.name, s.tokens) for s in stream.shards]
    return [] if same else [f"{data_dir}: was replaced by other data since the run began"]


def _tokenizer_problems(data_dir: Path, manifest: dict[str, Any]) -> list[str]:
    entry = manifest["tokenizer"]
    path = data_dir / entry["file"]
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            return [f"{path}: not the tokenizer the data was made with"]
    except OSError:
        return [f"{path}: missing"]
    return []


def _count_problems(data_dir: Path, split: str, part: dict[str, Any]) -> list[str]:
    problems = []
    for name in ("tokens", "documents", "text_bytes"):
        found = sum(shard[name] for shard in part["shards"])
        if found != part[name]:
            problems.append(
                f"{data_dir / MANIFEST}: the {split} split has {part[name]:,} {name}, its shards {found:,} in all"
            )
    return problems


# ---- the ids themselves ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ShardFacts:
    """What was counted in one shard. Shares are of its tokens, 0 .. 1."""

    split: str
    shard: Shard
    digest: bytes = b""
    """of a sample of its windows: equal where the ids are, empty for a shard of less than a window"""
    highest: int = -1
    eots: int = 0
    top_id: int = -1
    """the most frequent id, and its share"""
    top_share: float = 0.0
    entropy: float = 0.0
    """nats of an id, counting single ids"""
    period: int = 0
    """tokens of the piece that blocks of the shard repeat, 0 for none, and the share of those blocks"""
    periodic: float = 0.0
    repeated: float = 0.0
    """share of windows that stand in the shard before, estimated from a sample of their hashes"""


class Survey:
    """Looks at ids block by block: all of val first, then all of train, as `verify` or `read` shows them.

    length: tokens of a window. Memory: MAX_WINDOWS windows of ids and some tens of MB.
    """

    def __init__(self, streams: dict[str, TokenStream], length: int, eot_id: int | None) -> None:
        self.streams, self.length, self.eot_id = streams, length, eot_id
        self.facts: list[ShardFacts] = []
        self._hash = WindowHash(length, streams["val"].dtype)
        self.overlap = HeldOut(streams["val"].total, self._hash)
        self._split, self._position = "", 0
        self._carry = np.zeros(0, streams["val"].dtype)
        self._open: _Counting | None = None

    def read(self, on_bytes: Callable[[int], None] | None = None, stop: Callable[[], bool] | None = None) -> None:
        """Visit all shards, where there is no manifest to compare them with. Raises as `blocks`."""
        for split in reversed(SPLITS):
            for shard in self.streams[split].shards:
                for ids in blocks(self.streams[split], shard, on_bytes, stop):
                    self.visit(split, shard, ids)

    def visit(self, split: str, shard: Shard, ids: np.ndarray) -> None:
        """Count a block of ids, uint16 or uint32 [n], the next one of `shard`."""
        if self._split != split:
            self._split, self._position, self._carry = split, 0, self._carry[:0]
        if self._open is None or self._open.facts.shard is not shard:
            self.close()
            self._open = _Counting(ShardFacts(split, shard), len(self._carry))
            self.facts.append(self._open.facts)
        joined = np.concatenate([self._carry, ids])  # windows cross blocks and shards
        hashes, first = self._hash(joined), self._position - len(self._carry)
        self._open.add(ids, self.eot_id, joined, hashes)
        (self.overlap.look_in if split == "train" else self.overlap.collect)(joined, hashes, first)
        self._carry, self._position = joined[max(0, len(joined) - self.length + 1) :], self._position + len(ids)

    def close(self) -> None:
        """Finish the figures of the last shard."""
        if self._open is not None:
            self._open.finish()
            self._open = None


class _Counting:
    """The counters of the shard that is being read."""

    def __init__(self, facts: ShardFacts, before: int) -> None:
        self.facts, self._before = facts, before  # windows that begin in the shard before
        self._counts = np.zeros(0, np.int64)
        self._sampled: list[np.ndarray] = []
        self._periodic: dict[int, int] = {}
        self._every = np.uint64(2 ** max(0, int(np.log2(max(1, facts.shard.tokens) / SAMPLED_HASHES))) - 1)

    def add(self, ids: np.ndarray, eot_id: int | None, joined: np.ndarray, hashes: np.ndarray) -> None:
        facts = self.facts
        facts.highest = max(facts.highest, int(ids.max()))
        # A damaged uint32 must not ask for a table of 2^32 counts.
        counts = np.bincount(ids if facts.highest < MAX_COUNTED else ids[ids < MAX_COUNTED])
        if len(counts) > len(self._counts):
            self._counts, counts = counts, self._counts
        self._counts[: len(counts)] += counts
        if eot_id is not None and eot_id < len(self._counts):
            facts.eots = int(self._counts[eot_id])
        within = hashes[self._before :]
        self._before = 0
        self._sampled.append(within[within & self._every == 0])
        if period := _period(joined, hashes):
            self._periodic[period] = self._periodic.get(period, 0) + len(ids)

    def finish(self) -> None:
        facts, tokens = self.facts, self.facts.shard.tokens
        if self._counts.any():
            p = self._counts[self._counts > 0] / self._counts.sum()
            facts.entropy = float(-(p * np.log(p)).sum()) + 0.0
            facts.top_id = int(self._counts.argmax())
            facts.top_share = float(self._counts[facts.top_id] / tokens)
        if self._periodic:
            facts.period = max(self._periodic, key=self._periodic.__getitem__)
            facts.periodic = self._periodic[facts.period] / tokens
        sampled = np.concatenate(self._sampled)
        facts.digest = hashlib.sha256(sampled).digest() if len(sampled) else b""
        if len(sampled) >= SAMPLED_HASHES // 64:  # of fewer, a share says nothing
            facts.repeated = 1 - len(np.unique(sampled)) / len(sampled)


def _period(ids: np.ndarray, hashes: np.ndarray) -> int:
    """The least p such that nearly all ids equal those p before them, if a window recurs within MAX_PERIOD; else 0."""
    for start in (0, len(hashes) // 2):
        again = np.flatnonzero(hashes[start + 1 : start + 1 + MAX_PERIOD] == hashes[start]) if len(hashes) else []
        if len(again):
            p = int(again[0]) + 1
            if len(ids) > 2 * p and (ids[p:] == ids[:-p]).mean() > 0.99:
                return p
    return 0


# ---- held-out text in the training text ------------------------------------------------------------------------------


class WindowHash:
    """64-bit hashes of all windows of `length` ids: the sum of value(id at j) * B^-j modulo 2^64, with a random value
    for each id and a random odd B. From running sums it costs the same for any length."""

    def __init__(self, length: int, dtype: np.dtype) -> None:
        self.length = length
        rng = np.random.default_rng(0)
        self._values = rng.integers(0, 1 << 64, 1 << (16 if dtype.itemsize == 2 else 18), np.uint64)
        base = int(rng.integers(0, 1 << 63)) * 2 + 1
        size = BLOCK + length
        self._up = np.multiply.accumulate(np.full(size, base, np.uint64)) * np.uint64(pow(base, -1, 1 << 64))
        self._down = np.multiply.accumulate(np.full(size, pow(base, -1, 1 << 64), np.uint64)) * np.uint64(base)

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """uint64 [n - length + 1]: the hash of the window at each position of ids, unsigned [n], n < BLOCK + length."""
        n = len(ids) - self.length + 1
        if n < 1:
            return np.zeros(0, np.uint64)
        sums = np.zeros(len(ids) + 1, np.uint64)
        np.multiply(self._value(ids), self._down[: len(ids)], out=sums[1:])
        np.cumsum(sums, out=sums)
        hashes = sums[self.length :] - sums[:n]
        hashes *= self._up[:n]
        return hashes

    def _value(self, ids: np.ndarray) -> np.ndarray:
        # Ids beyond the table share values: such a hit is compared id by id like any other.
        return self._values[ids & ids.dtype.type(len(self._values) - 1)]


class HeldOut:
    """Held-out windows, and which of them stand anywhere in the training stream. Both streams are shown as `joined` ids
    with the hashes of all their windows and the stream position of the first: val by `collect`, then train.

    windows: how many are looked for, `stride` tokens apart: all that fit side by side, at most MAX_WINDOWS.
    """

    def __init__(self, total: int, window_hash: WindowHash) -> None:
        self.length = window_hash.length
        self.windows = min(MAX_WINDOWS, total // self.length)
        self.stride = total // self.windows if self.windows else total
        self.example: tuple[int, int] | None = None
        """position in the held-out and in the training stream of the first window found"""
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._collected = 0
        self._hashes: np.ndarray | None = None

    @property
    def found(self) -> int:
        """Held-out windows found so far."""
        return int(self._found[self._which].sum()) if self._hashes is not None else 0

    def collect(self, joined: np.ndarray, hashes: np.ndarray, first: int) -> None:
        """Take the windows to look for from the next part of the held-out stream."""
        last = min(self.windows, -(-(first + len(hashes)) // self.stride))
        at = np.arange(self._collected, last) * self.stride - first
        self._parts.append((joined[at[:, None] + np.arange(self.length)], hashes[at]))
        self._collected = max(last, self._collected)

    def _sort(self) -> None:
        ids, hashes = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        self.windows = len(hashes)  # fewer than meant where a shard could not be read
        self._parts.clear()
        self._hashes, self._first, self._which = np.unique(hashes, return_index=True, return_inverse=True)
        self._ids = ids[self._first]
        self._found = np.zeros(len(self._hashes), bool)
        # Nearly all positions are dismissed by one look into a table of their hash's upper bits.
        bits = (64 * max(1, self.windows)).bit_length()
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, bool)
        self._table[self._hashes >> self._shift] = True

    def look_in(self, joined: np.ndarray, hashes: np.ndarray, first: int) -> None:
        """Look for the windows in the next part of the training stream."""
        if self._hashes is None and self._parts:
            self._sort()
        if self._hashes is None:
            return
        at = np.flatnonzero(self._table[hashes >> self._shift])
        if not len(at):
            return
        which = np.searchsorted(self._hashes, hashes[at])
        which[which == len(self._hashes)] = 0
        new = (self._hashes[which] == hashes[at]) & ~self._found[which]
        which, once = np.unique(which[new], return_index=True)
        for i, j in zip(which, at[new][once], strict=True):
            if np.array_equal(self._ids[i], joined[j : j + self.length]):
                self._found[i] = True
                self.example = self.example or (int(self._first[i]) * self.stride, first + int(j))


# ---- judgement of shards ---------------------------------------------------------------------------------------------


def degenerate(facts: Sequence[ShardFacts]) -> tuple[list[str], list[str]]:
    """(problems, notes), a line each, naming the shard: one id over and over, a repeated piece, much that stands in it
    twice, a unigram entropy far below the median shard's, the same tokens as another shard."""
    problems, notes = [], []
    large = [f for f in facts if f.shard.tokens >= SMALL_SHARD]
    median = float(np.median([f.entropy for f in large])) if len(large) > 2 else 0.0
    seen: dict[tuple[int, bytes], ShardFacts] = {}
    for f in facts:
        path, small = f.shard.path, f.shard.tokens < SMALL_SHARD
        twin = seen.setdefault((f.shard.tokens, f.digest), f) if f.digest else f
        if twin is not f:
            problems.append(f"{path}: the same tokens as {twin.shard.path}; leave one out")
        elif f.top_share == 1 and f.shard.tokens > 1:
            problems.append(f"{path}: all its ids are {f.top_id}; leave it out or write it again")
        elif f.top_share >= MOSTLY_ONE_ID and not small:
            problems.append(
                f"{path}: {f.top_share:.0%} of its ids are {f.top_id}, as if padded; write it again without"
            )
        elif f.periodic >= 0.5:
            problems.append(f"{path}: a piece of {f.period:,} tokens over and over; write it again from other text")
        elif f.repeated >= MOSTLY_REPEATED:
            problems.append(
                f"{path}: {f.repeated:.0%} of its windows stand in it before; the same text was written twice or more"
            )
        elif f.entropy < LOW_ENTROPY * median and not small:
            problems.append(
                f"{path}: single ids hold {f.entropy:.2f} nats, in the median shard {median:.2f}; look at its text"
            )
        elif f.periodic:
            notes.append(f"{path}: {f.periodic:.0%} of it is a piece of {f.period:,} tokens over and over")
        elif f.repeated >= MOSTLY_REPEATED / 2:
            notes.append(f"{path}: {f.repeated:.0%} of its windows stand in it before")
    return problems, notes
