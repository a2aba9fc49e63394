"""Held-out loss: sums of token losses over all ranks, divided once by the count of scored tokens.

Used during training (on a wrapped, possibly sharded module) and by eval_ppl.py. Losses are kept per window,
for a standard error and so that the total doesn't depend on how windows were dealt to ranks or batches.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from fourscale.cli import InputError
from fourscale.model import IGNORE
from fourscale.order import update_rows

if TYPE_CHECKING:
    from fourscale.parallel import Topology
    from fourscale.shards import Shard, TokenStream

SUMMED = 1 << 16  # windows whose losses cross the ranks in one message


@dataclass(frozen=True)
class Score:
    """Losses of W scored windows, the same on every rank."""

    window_nats: np.ndarray  # float64 [W]: summed token losses of each window
    window_tokens: np.ndarray  # int64 [W]: tokens scored in each window

    @functools.cached_property
    def nats(self) -> float:
        """Total loss in nats."""
        return math.fsum(self.window_nats)

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens scored."""
        return int(self.window_tokens.sum())

    @property
    def loss(self) -> float:
        """Nats per token: one sum over one count, never a mean of means."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def standard_error(self) -> float:
        """Standard error of `loss` in nats, windows taken as the independent units; nan for a single window.

        Linearised variance of a ratio of sums, W/(W-1) sum_i (s_i - loss n_i)^2 / (sum_i n_i)^2 (Cochran 1977,
        "Sampling Techniques", 6.4): tokens of one window share a context, so they don't count as independent. Where
        windows overlap, the unit is what is new in each: the smaller the stride, the more alike neighbours are, and the
        more this understates.
        """
        w = len(self.window_nats)
        if w < 2:
            return math.nan
        residual = self.window_nats - self.loss * self.window_tokens
        return math.sqrt(w / (w - 1) * math.fsum(residual**2)) / self.tokens


def pooled(scores: Iterable[Score]) -> Score:
    """The windows of several data sets as one: its loss is all nats over all tokens, never a mean of means."""
    scores = list(scores)
    return Score(np.concatenate([s.window_nats for s in scores]), np.concatenate([s.window_tokens for s in scores]))


def by_shard(score: Score, starts: np.ndarray, ctx: int, shards: Sequence[Shard]) -> list[Score]:
    """The windows of each shard, of a score of all `starts`: a window belongs to the shard that holds the first token
    scored in it. Their nats and tokens sum to the score's; a shard in which no window begins to score has none."""
    first = starts + already_scored(starts, ctx) + 1
    cuts = np.searchsorted(first, [shard.start for shard in shards[1:]])
    parts = (np.split(values, cuts) for values in (score.window_nats, score.window_tokens))
    return [Score(nats, tokens) for nats, tokens in zip(*parts, strict=True)]


def eval_starts(total: int, ctx: int, max_tokens: int | None = None, stride: int | None = None) -> np.ndarray:
    """First tokens of the windows to score: int64 [W], ascending.

    A stream of `total` tokens has total - 1 targets. The windows k * ctx cover each of them once, the last one may be
    partial. With a stride of 1 .. ctx they are k * stride, up to the first that reaches the end: what an earlier window
    has scored is context in the next, so that each target sees at least ctx - stride tokens before it where the stream
    has them. (The sliding window of Hugging Face's guide "Perplexity of fixed-length models", whose max_length is
    ctx + 1.)

    Where `max_tokens` is less than all targets, it's max_tokens // ctx whole windows (at least one), evenly spread,
    without overlap, always the same. Raises InputError for a stream without a target.
    """
    if total < 2:
        raise InputError(
            f"held-out split: {total} tokens, nothing to predict; prepare the data with more held-out text"
        )
    if max_tokens is None or max_tokens >= total - 1:
        stride = stride or ctx
        n_windows = 1 + max(0, -(-(total - 1 - ctx) // stride))
        return np.arange(n_windows, dtype=np.int64) * stride
    whole = max(1, (total - 1) // ctx)
    count = min(whole, max(1, max_tokens // ctx))
    return (2 * np.arange(count, dtype=np.int64) + 1) * whole // (2 * count) * ctx


def window_lengths(starts: np.ndarray, total: int, ctx: int) -> np.ndarray:
    """Targets of each window, scored in it or before: int64 like starts, ctx but for partial last ones."""
    return np.minimum(ctx, total - 1 - starts)


def already_scored(starts: np.ndarray, ctx: int) -> np.ndarray:
    """How many of each window's first targets the windows before it have scored: int64 like starts (ascending)."""
    return np.maximum(0, np.diff(-starts, prepend=ctx) + ctx)


def window_batch(
    stream: TokenStream, starts: np.ndarray, length: int, skip: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and next-token targets of windows: two int64 [B, length].

    A start of -1 is a padding row. What lies beyond the end of the stream, the first `skip` targets of each window
    (int64 [B], None for 0), and padding rows have IGNORE as target.
    """
    ids = np.zeros((len(starts), length + 1), np.int64)
    held = np.zeros(len(starts), np.int64)  # tokens that each row really holds
    whole = (starts >= 0) & (starts + length < stream.total)
    if whole.any():
        ids[whole], held[whole] = stream.windows(starts[whole], length + 1), length + 1
    for row in np.flatnonzero((starts >= 0) & ~whole):
        held[row] = stream.total - starts[row]
        ids[row, : held[row]] = stream.windows(starts[row : row + 1], int(held[row]))[0]
    place = np.arange(length)
    scored = place + 1 < held[:, None]
    if skip is not None:
        scored &= place >= skip[:, None]
    return ids[:, :-1], np.where(scored, ids[:, 1:], IGNORE)


def score(
    model: nn.Module,
    stream: TokenStream,
    ctx: int,
    starts: np.ndarray,
    local_bsz: int,
    topology: Topology,
    progress: bool = False,
    asked_to_stop: Callable[[], bool] | None = None,
) -> Score | None:
    """Score each window of `starts` (from `eval_starts`) once, dealt over the ranks: of its targets those that no
    window before it holds. The same Score on every rank, or None once `asked_to_stop` is true on one of them.

    Collective: every rank runs the same number of forwards of the same shape, only through `model(idx, targets, ...)`,
    so DDP, FSDP and plain modules will do. Training mode is put back afterwards, and no random number is drawn.
    """
    rank, world_size, device = topology.rank, topology.world_size, topology.device
    count = len(starts)
    lengths, skip = window_lengths(starts, stream.total, ctx), already_scored(starts, ctx)
    length = int(lengths.max())  # a split shorter than ctx needs no ctx-wide batch
    local_bsz = max(1, min(local_bsz, -(-count // world_size)))
    batches = -(-count // (local_bsz * world_size))
    rows = update_rows(count, world_size, rank, local_bsz, batches)  # int64 [batches, local_bsz]; >= count is padding

    was_training = model.training
    model.eval()
    sums = torch.zeros(batches, local_bsz, device=device)  # fp32; stay on the device: no wait per batch
    try:
        with torch.no_grad():
            pause = 0.2 if sys.stderr.isatty() else 10  # a log file wants few lines
            quiet = not progress or rank != 0
            bar = tqdm(rows, "scoring", unit="batch", disable=quiet, leave=False, mininterval=pause, delay=1)
            for i, batch in enumerate(bar):
                if asked_to_stop is not None and topology.all_sum([asked_to_stop()])[0]:
                    return None
                window = np.minimum(batch, count - 1)
                at = np.where(batch < count, starts[window], -1)
                arrays = window_batch(stream, at, length, skip[window])
                idx, targets = (torch.from_numpy(x).to(device) for x in arrays)
                with topology.autocast():
                    sums[i] = model(idx, targets, per_window=True)
    finally:
        model.train(was_training)
        if hasattr(model, "reshard"):  # FSDP2 leaves the root's parameters gathered after a forward without backward
            model.reshard()

    window_nats = np.zeros(count)
    window_nats[rows[rows < count]] = sums.cpu().numpy()[rows < count]
    # Each window has one owner and zeros from the others: the sum over ranks is exact, whatever their number.
    for at in range(0, count, SUMMED):
        part = window_nats[at : at + SUMMED]
        part[:] = topology.all_sum(part)
    return Score(window_nats, lengths - skip)


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """Bits per byte of text from a loss in nats, comparable across tokenizers (Gao et al. 2020, arXiv:2101.00027)."""
    return nats / math.log(2) / text_bytes
