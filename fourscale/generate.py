"""Decoding: small functions from logits to tokens, and the loop that keeps a batch of texts going.

A text is a function of the model, the seed, its prompt and its index alone: each has a random generator of its own, and
what it sees when a token is drawn follows from its length (`window_start`). Texts that are computed side by side change
at most the rounding of each other's logits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fourscale.cli import InputError, RunFailed
from fourscale.model import GPT, Cache
from fourscale.order import key64

# ---- logits -> token -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoding:
    """How a token is chosen from logits; `SampleConfig.check` says what is possible."""

    temperature: float = 1.0  # 0: the most likely token
    top_k: int | None = None  # None: no limit
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0


def penalize(logits: Tensor, seen: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Logits [B, V] -> fp32 [B, V]: those of row k's seen[k] divided by the penalty where positive, multiplied where
    negative (Keskar et al. 2019, arXiv:1909.05858, and, for negative ones, transformers)."""
    logits = logits.float().clone()
    for row, ids in zip(logits, seen, strict=True):
        at = torch.tensor(sorted({i for i in ids if i < len(row)}), dtype=torch.int64, device=row.device)
        row[at] = torch.where(row[at] < 0, row[at] * penalty, row[at] / penalty)
    return logits


def filter_logits(logits: Tensor, how: Decoding) -> Tensor:
    """Logits [..., V] -> fp32 [..., V] of the distribution to sample from, -inf where a token is ruled out.

    In the order temperature, top-k (Fan et al. 2018, arXiv:1805.04833), top-p (Holtzman et al. 2019, arXiv:1904.09751),
    min-p (Nguyen et al. 2024, arXiv:2407.01082), as in transformers: tokens tied with the k-th stay, the token that
    reaches top_p is the last to stay, and min_p is a share of the most likely token's probability. Temperature 0 leaves
    the first of the most likely tokens alone.
    """
    logits = logits.float()
    if how.temperature == 0:
        best = torch.full_like(logits, -math.inf)
        return best.scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    # Shifting by the maximum changes no probability and keeps tiny temperatures finite.
    logits = (logits - logits.amax(-1, keepdim=True)) / how.temperature
    if how.top_k is not None and how.top_k < logits.shape[-1]:
        kth = logits.topk(how.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if how.top_p is not None and how.top_p < 1:
        values, order = logits.sort(dim=-1)  # from the least likely: sums of small numbers first, and as transformers
        drop = values.softmax(-1).cumsum(-1) <= 1 - how.top_p
        drop[..., -1] = False
        logits = logits.masked_fill(torch.empty_like(drop).scatter(-1, order, drop), -math.inf)
    if how.min_p is not None:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < how.min_p * probs.amax(-1, keepdim=True), -math.inf)
    return logits


def choose(
    logits: Tensor, how: Decoding, generators: Sequence[torch.Generator], seen: Sequence[Sequence[int]] = ()
) -> Tensor:
    """Draw one token per row, row k with generators[k] on the CPU: logits [B, V] on any device -> int64 [B] on the CPU.

    seen[k]: the ids of row k so far, for the repetition penalty. Raises RunFailed where logits are not finite.
    """
    logits = logits.float().cpu()
    if not torch.isfinite(logits).all():
        raise RunFailed(
            "logits are not finite (NaN or inf): the weights are damaged or the run diverged; use an earlier step"
        )
    if how.repetition_penalty != 1:
        logits = penalize(logits, seen, how.repetition_penalty)
    if how.temperature == 0:
        return logits.argmax(-1)
    probs = filter_logits(logits, how).softmax(-1)
    return torch.cat([torch.multinomial(p, 1, generator=g) for p, g in zip(probs, generators, strict=True)])


def sample_generator(seed: int, prompt: Sequence[int], index: int) -> torch.Generator:
    """CPU generator of one sample, a function of the seed, the prompt's ids and the sample's index alone."""
    digest = hashlib.sha256(np.asarray(prompt, "<i8").tobytes()).digest()
    return torch.Generator().manual_seed(int(key64(seed, int.from_bytes(digest[:8], "little"), index)) >> 1)


# ---- prompts -> texts ------------------------------------------------------------------------------------------------


@dataclass
class Text:
    """One text in the making: a prompt of at least one token, and what is drawn after it."""

    prompt: Sequence[int]
    generator: torch.Generator
    finish: str | None = None  # "eot", "length", or what the reader of `generate` sets to end it
    ids: list[int] = field(init=False)  # the prompt's, then those drawn

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("--prompt: no tokens; start from the end-of-text token or give a text")
        self.ids = list(self.prompt)

    @property
    def new(self) -> list[int]:
        """The ids drawn, with the end-of-text token where that ended it."""
        return self.ids[len(self.prompt) :]


def window_start(length: int, ctx: int) -> int:
    """Index of the first of `length` tokens that are seen, at positions from 0, when the next one is drawn.

    All are, up to ctx tokens. Beyond that the oldest half of the window drops out whenever it is full: between
    ctx // 2 + 1 and ctx tokens are seen. A model with a document mask sees of them what follows the last end-of-text
    token, and that token.
    """
    hop = ctx - ctx // 2
    return 0 if length <= ctx else -(-(length - ctx) // hop) * hop


def read(model: GPT, row: Cache, ids: Sequence[int]) -> None:
    """Let one row of a cache hold ids, at most as many as it has room for, and nothing else."""
    row.clear()
    if ids:
        model(torch.tensor([ids], device=row.starts.device), last_only=True, cache=row)


def next_logits(model: GPT, cache: Cache, texts: Sequence[Text]) -> Tensor:
    """Logits of the token after each text, fp32 [B, V]. Row k of the cache is text k's; what it lacks is read first."""
    for k, text in enumerate(texts):
        start, seen = window_start(len(text.ids), model.cfg.ctx), len(text.ids) - 1
        if seen - start == cache.lengths[k]:
            continue
        same = [j for j in range(k) if texts[j].ids == text.ids]  # samples of one prompt: it is read once
        if same:
            cache.copy_row(same[0], k)
        else:
            read(model, cache[k : k + 1], text.ids[start:seen])
    last = torch.tensor([[text.ids[-1]] for text in texts], device=cache.starts.device)
    return model(last, cache=cache[: len(texts)])[:, -1]


def reserve(model: GPT, rows: int, size: int) -> Cache:
    """An empty cache beside the model. Raises RunFailed where there is no memory for it."""
    try:
        return Cache(model.cfg, rows, size, next(model.parameters()).device)
    except RuntimeError as e:  # torch's out of memory, on any device
        raise RunFailed(
            f"--batch-size {rows}: no memory for the keys and values of {rows} texts of {size:,} tokens "
            f"({str(e).splitlines()[0]}); use a smaller one, or fewer --max-new-tokens"
        ) from None


@torch.no_grad()
def generate(
    model: GPT,
    texts: Iterable[Text],
    max_new_tokens: int,
    how: Decoding,
    eot_ids: Collection[int] = (),
    vocab_size: int | None = None,
    batch_size: int = 16,
) -> Iterator[Text]:
    """Continue texts, batch_size of them at a time; yields a text whenever a token has been added to it.

    A text is finished ("eot") by a token of eot_ids, which is added, or ("length") by max_new_tokens; whoever reads
    may set `finish` of the one that was yielded to end it there. The next text takes its place at once. Ids from
    vocab_size on, which the tokenizer doesn't have, are never drawn. `model` is a plain GPT in evaluation mode. Past
    its context length see `window_start`. Memory is that of one `Cache`, whatever the length. Raises RunFailed for
    logits that aren't finite and for a cache that doesn't fit.
    """
    waiting = list(texts)[::-1]
    if max_new_tokens < 1:
        for text in waiting:
            text.finish = "length"
        return
    if not waiting:
        return
    rows = min(batch_size, len(waiting))
    size = min(model.cfg.ctx, max(len(text.prompt) for text in waiting) + max_new_tokens)
    cache = reserve(model, rows, size)
    live: list[Text] = []  # text k is in row k
    while waiting or live:
        while waiting and len(live) < rows:
            cache[len(live) : len(live) + 1].clear()
            live.append(waiting.pop())
        logits = next_logits(model, cache, live)[:, :vocab_size]
        drawn = choose(logits, how, [text.generator for text in live], [text.ids for text in live])
        for text, token in zip(tuple(live), drawn.tolist(), strict=True):
            text.ids.append(token)
            if token in eot_ids:
                text.finish = "eot"
            elif len(text.ids) - len(text.prompt) == max_new_tokens:
                text.finish = "length"
            yield text
        for k in reversed(range(len(live))):
            if live[k].finish is not None:
                last = live.pop()
                if k < len(live):
                    cache.copy_row(len(live), k)
                    live[k] = last
