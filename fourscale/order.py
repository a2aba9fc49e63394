"""Which window is sample i. Pure numpy: a function of (seed, epoch, index), with no trace of the world size.

The tokens of a split are one stream. In `epoch` order, sample i is window `permutation(i % n)` of epoch `i // n`, so
each window is seen once an epoch, by exactly one rank, however many there are. The permutation is a Feistel network
with cycle-walking: constant memory for any corpus (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
Several corpora are mixed by weight a level above: which of them sample i is from is such a function too, see `Mixture`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fourscale.cli import InputError

ROUNDS = 8  # 4 leave visible structure in domains of a few hundred windows
LARGEST_BLOCK = 1_000_000  # of samples within which a mixture's shares are exact
OFFSET_FROM = 100  # an epoch's offset costs one window: used only where that is at most 1 %

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEPS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST = np.uint64(31)


def mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: uint64 -> uint64, a bijection (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        for shift, factor in _STEPS:
            x = (x ^ (x >> shift)) * factor
        return x ^ (x >> _LAST)


def _mix64_inplace(x: np.ndarray) -> np.ndarray:
    """`mix64` of an array that is nobody else's: a third of the time for the few that a batch has."""
    x += _GOLDEN
    for shift, factor in _STEPS:
        x ^= x >> shift
        x *= factor
    x ^= x >> _LAST
    return x


def key64(*parts: int | np.ndarray) -> np.uint64 | np.ndarray:
    """One uint64 from integers, order mattering; where a part is int64 [B], one for each of its values: uint64 [B]."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        array = isinstance(part, np.ndarray)
        key = mix64(key ^ (part.astype(np.uint64) if array else np.uint64(part & 0xFFFFFFFFFFFFFFFF)))
    return key if any(isinstance(part, np.ndarray) for part in parts) else key[0]


def permute(index: np.ndarray, n: int, key: np.uint64 | np.ndarray) -> np.ndarray:
    """The keyed permutation of range(n) at `index` (int64, each in [0, n)) -> int64 of the same shape.

    key: one for all, or an array like `index` with a key for each.
    """
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    rounds = [mix64(np.asarray(key, np.uint64).reshape(-1) ^ np.uint64(r)) for r in range(ROUNDS)]
    out = index.astype(np.uint64)
    todo = np.arange(out.size)
    flat = out.reshape(-1)
    while todo.size:  # walk the cycle until back inside [0, n): the domain is less than 4 n, so a few steps
        left, right = flat[todo] >> half, flat[todo] & mask
        for k in rounds:
            left ^= _mix64_inplace(right ^ (k if k.size == 1 else k[todo])) & mask
            left, right = right, left
        walked = (left << half) | right
        flat[todo] = walked
        todo = todo[walked >= np.uint64(n)]
    return flat.reshape(index.shape).astype(np.int64)


@dataclass(frozen=True)
class Order:
    """The order of the training windows of a stream of `total` tokens; a window is ctx inputs and one token more."""

    total: int
    ctx: int
    seed: int
    sampling: str = "epoch"

    def __post_init__(self) -> None:
        if self.total < self.ctx + 1:
            raise InputError(
                f"train split holds {self.total:,} tokens, a window needs ctx + 1 = {self.ctx + 1:,}: "
                "lower --ctx or prepare more text"
            )

    @property
    def n_windows(self) -> int:
        """Windows in an epoch."""
        n = (self.total - 1) // self.ctx
        return n - 1 if n >= OFFSET_FROM else n

    def starts(self, index: np.ndarray) -> np.ndarray:
        """First token of each sample's window: index int64 [...] of samples since the run began -> int64 [...]."""
        index = np.asarray(index, np.int64)
        if self.sampling == "random":
            legal = np.uint64(self.total - self.ctx)
            return (mix64(mix64(index.astype(np.uint64)) ^ key64(self.seed, -1)) % legal).astype(np.int64)
        n = self.n_windows
        epoch = index // n
        start = np.empty_like(index)
        for e in np.unique(epoch):
            at = epoch == e
            offset = int(key64(self.seed, int(e), 1)) % self.ctx if (self.total - 1) // self.ctx >= OFFSET_FROM else 0
            start[at] = offset + self.ctx * permute(index[at] % n, n, key64(self.seed, int(e), 0))
        return start


class Mixture:
    """The order of samples from several streams by weight; of a single one, exactly its `Order`.

    The weights are integers w_k by their common denominator; each block of sum(w_k) samples holds w_k of part k, at
    places that a permutation keyed by (seed, block) chooses. Within a part, they are samples of its own `Order`.
    """

    def __init__(
        self, totals: Sequence[int], weights: Sequence[Fraction], ctx: int, seed: int, sampling: str = "epoch"
    ) -> None:
        """totals: tokens of each part; weights: positive, of any sum. Raises InputError where shares have too fine a
        common denominator, or a part is shorter than a window."""
        whole = math.lcm(*(w.denominator for w in weights))
        counts = [int(w * whole) for w in weights]
        self.slots = np.array(counts, np.int64) // math.gcd(*counts)  # int64 [parts]: samples of a block
        self.block = int(self.slots.sum())
        if self.block > LARGEST_BLOCK:
            raise InputError(
                f"--data: the weights are exact only in {self.block:,} samples, at most {LARGEST_BLOCK:,} are allowed; "
                "round them, as in --data a:0.7 --data b:0.3"
            )
        self.seed = seed
        self.ctx = ctx
        self._ends = np.cumsum(self.slots)
        # The first part keeps the seed of a run on it alone; others differ, were they the same text again.
        seeds = [seed, *(int(key64(seed, -2, k)) for k in range(1, len(totals)))]
        self.orders = [Order(n, ctx, s, sampling) for n, s in zip(totals, seeds, strict=True)]

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Part of each sample since the run began, and which of that part's samples it is: int64 [...] each."""
        index = np.asarray(index, np.int64)
        if self.block == 1:
            return np.zeros_like(index), index
        block, place = index // self.block, index % self.block
        slot = permute(place, self.block, key64(self.seed, block.reshape(-1), -3))
        part = np.searchsorted(self._ends, slot, side="right")
        return part, block * self.slots[part] + slot - (self._ends - self.slots)[part]

    def starts(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Part and first token of each sample's window: index int64 [...] of samples since the run began -> two int64
        [...]."""
        part, within = self.locate(index)
        start = np.empty_like(within)
        for k, order in enumerate(self.orders):
            start[part == k] = order.starts(within[part == k])
        return part, start

    def epochs(self, samples: float) -> list[float]:
        """How often each part has been read once `samples` have been, by its share of them."""
        return [samples * int(w) / self.block / o.n_windows for w, o in zip(self.slots, self.orders, strict=True)]


def update_rows(global_bsz: int, world_size: int, rank: int, local_bsz: int, grad_accum: int) -> np.ndarray:
    """Which rows of the global batch a rank computes: int64 [grad_accum, local_bsz].

    Row j of micro-batch m is (m * world_size + rank) * local_bsz + j; values >= global_bsz are padding of weight 0.
    """
    micro = np.arange(grad_accum, dtype=np.int64)[:, None]
    return (micro * world_size + rank) * local_bsz + np.arange(local_bsz, dtype=np.int64)[None, :]


def supervised(rows: np.ndarray, budget: int, ctx: int, global_bsz: int) -> np.ndarray:
    """Supervised targets of each row when an update may still use `budget` tokens: int64 like rows, in [0, ctx].

    Rows are filled in order, so the tail of an exact token budget ends inside a window; padding rows get none.
    """
    return np.where(rows < global_bsz, np.clip(budget - rows * ctx, 0, ctx), 0)
