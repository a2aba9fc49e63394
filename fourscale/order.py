"""Which window is sample i. Pure numpy: a function of (seed, epoch, index), with no trace of the world size.

The tokens of a split are one stream. In `epoch` order, sample i is window `permutation(i % n)` of epoch `i // n`, so
each window is seen once an epoch, by exactly one rank, however many there are. The permutation is a Feistel network
with cycle-walking: constant memory for any corpus (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourscale.config import InputError

ROUNDS = 8  # 4 leave visible structure in domains of a few hundred windows
OFFSET_FROM = 100  # an epoch's offset costs one window: used only where that is at most 1 %

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: uint64 -> uint64, a bijection (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def key64(*parts: int) -> np.uint64:
    """One uint64 from integers, order mattering."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = mix64(key ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return key[0]


def permute(index: np.ndarray, n: int, key: np.uint64) -> np.ndarray:
    """The keyed permutation of range(n) at `index` (int64, each in [0, n)) -> int64 of the same shape."""
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    rounds = [mix64(np.array(key ^ np.uint64(r), np.uint64)) for r in range(ROUNDS)]
    out = index.astype(np.uint64)
    todo = np.arange(out.size)
    flat = out.reshape(-1)
    while todo.size:  # walk the cycle until back inside [0, n): the domain is less than 4 n, so a few steps
        left, right = flat[todo] >> half, flat[todo] & mask
        for k in rounds:
            left, right = right, left ^ (mix64(right ^ k) & mask)
        flat[todo] = (left << half) | right
        todo = todo[flat[todo] >= np.uint64(n)]
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
