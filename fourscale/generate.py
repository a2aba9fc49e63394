"""Decoding: small functions from logits to tokens.

The prompt is read again at each step; `next_logits` is the one place that runs the model. Sample k has a random
generator of its own, seeded by (seed, k): its text doesn't depend on how many samples are drawn beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourscale.cli import InputError, RunFailed
from fourscale.order import key64


@dataclass(frozen=True)
class Decoding:
    """How a token is chosen from logits; `SampleConfig.check` says what is possible."""

    temperature: float = 1.0  # 0: the most likely token
    top_k: int | None = None  # None: no limit
    top_p: float | None = None


def filter_logits(logits: Tensor, how: Decoding) -> Tensor:
    """Logits [..., V] -> fp32 [..., V] of the distribution to sample from, -inf where a token is ruled out.

    In the order temperature, top-k (Fan et al. 2018, arXiv:1805.04833), top-p (Holtzman et al. 2019, arXiv:1904.09751),
    as in transformers: tokens tied with the k-th stay, and the token that reaches top_p is the last to stay.
    Temperature 0 leaves the first of the most likely tokens alone.
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
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = values.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of the strictly more likely tokens
        drop = before >= how.top_p
        drop[..., 0] = False
        logits = logits.masked_fill(torch.empty_like(drop).scatter(-1, order, drop), -math.inf)
    return logits


def choose(logits: Tensor, how: Decoding, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw one token per row, row k with generators[k] on the CPU: logits [B, V] on any device -> int64 [B] on the CPU.

    Raises RunFailed where logits are not finite.
    """
    logits = logits.float().cpu()
    if not torch.isfinite(logits).all():
        raise RunFailed(
            "logits are not finite (NaN or inf): the weights are damaged or the run diverged; use an earlier step"
        )
    probs = filter_logits(logits, how).softmax(-1)
    return torch.cat([torch.multinomial(p, 1, generator=g) for p, g in zip(probs, generators, strict=True)])


def sample_generators(seed: int, first: int, count: int) -> list[torch.Generator]:
    """CPU generators of samples first .. first + count - 1, each a function of (seed, its own index) alone."""
    return [torch.Generator().manual_seed(int(key64(seed, k)) >> 1) for k in range(first, first + count)]


def next_logits(model: nn.Module, ids: Tensor, ctx: int) -> Tensor:
    """Logits of the token after ids: int64 [B, T] -> fp32 [B, V].

    At most the last ctx tokens are seen, at positions 0 to ctx - 1: past the context length, the window slides. A model
    with a document mask sees of them what follows the last end-of-text token, and that token, at positions from 0.
    """
    return model(ids[:, -ctx:], last_only=True)[:, -1]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    generators: Sequence[torch.Generator],
    max_new_tokens: int,
    how: Decoding,
    eot_id: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue one prompt len(generators) times; yields each step's tokens, one per sample, None for a finished sample.

    A sample is finished after its end-of-text token, which is yielded; all end after max_new_tokens. Ids from
    vocab_size on, which the tokenizer doesn't have, are never drawn. `model` is a plain GPT in eval mode. Past its
    context length the oldest tokens drop out of sight. Raises InputError for an empty prompt, RunFailed for logits
    that aren't finite.
    """
    if not prompt:
        raise InputError("--prompt: no tokens; start from the end-of-text token or give a text")
    device = next(model.parameters()).device
    ids = torch.tensor(prompt, dtype=torch.int64, device=device).expand(len(generators), -1)  # [B, T]
    finished = [False] * len(generators)
    for _ in range(max_new_tokens):
        new = choose(next_logits(model, ids, model.cfg.ctx)[:, :vocab_size], how, generators)
        yield [None if done else token for done, token in zip(finished, new.tolist(), strict=True)]
        finished = [done or token == eot_id for done, token in zip(finished, new.tolist(), strict=True)]
        if all(finished):
            return
        ids = torch.cat((ids, new.to(device)[:, None]), dim=1)
