"""The head and its loss over chunks of tokens: the logits of all tokens never stand in memory at once.

Logits are the largest tensor of training (1,024 tokens times 50,304 ids are 196 MiB in fp32), and cross entropy needs
several of that size. Here a chunk's loss is followed at once by its gradients, as in Liger Kernel (Hsu et al. 2024,
arXiv:2410.10989): the products are those of full logits, three for each token, none of them twice.

Shapes: N tokens, n of them in a chunk, D = d_model, V = rows of the head, the padded ones included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from fourscale.budget import SMALL_LOGITS, head_chunk

IGNORE = -100  # a target that is not supervised


def softmax_gradient(
    logits: Tensor, targets: Tensor, vocab_size: int, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of logits [n, V] with targets int64 [n]: losses fp32 [n] in nats, and the gradient of their sum by
    the logits, softmax less one-hot, which takes the place of the logits.

    Columns from vocab_size on don't exist: no probability, no gradient. IGNORE: neither loss nor gradient. scratch:
    fp32 [n, V] to compute in, for logits of 16 bits; without it, memory is taken for that.
    """
    z = logits.float() if scratch is None else scratch.copy_(logits)  # logits.float() of fp32 is the logits themselves
    if vocab_size < z.shape[1]:
        z[:, vocab_size:] = -torch.inf
    supervised = (targets != IGNORE)[:, None]
    places = torch.where(supervised, targets[:, None], 0)
    z.sub_(z.amax(1, keepdim=True))
    own = z.gather(1, places)
    total = z.exp_().sum(1, keepdim=True)
    losses = torch.where(supervised, total.log() - own, 0.0)[:, 0]
    gradient = logits.copy_(z.mul_(supervised / total))
    # Of its own, not p - 1 of a p that 16 bits may have rounded to 1.
    own = torch.where(supervised, own.exp() / total - 1, 0.0)
    return losses, gradient.scatter_(1, places, own.to(gradient.dtype))


class SummedLoss(torch.autograd.Function):
    """Sum of all token losses, with the gradients by x and the head computed beside it: the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor,
        targets: Tensor,
        vocab_size: int,
        dtype: torch.dtype,
        gradient_of: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        w = head.to(dtype)
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        # Memory of all chunks: on a CPU, pages that are asked for anew cost more than what is computed in them.
        size, narrow = head_chunk(len(x), len(head), x.device.type), dtype != torch.float32
        logits = x.new_empty(size, len(head), dtype=dtype)
        eager = gradient_of is softmax_gradient  # what is compiled holds no fp32 logits
        given = (torch.empty_like(logits, dtype=torch.float32),) if eager and narrow else ()
        product = torch.empty_like(w) if narrow and dw is not None else None
        for at in range(0, len(x), size):
            rows, n = slice(at, at + size), min(size, len(x) - at)
            part = x[rows].to(dtype)
            z = torch.mm(part, w.t(), out=logits[:n])
            losses[rows], gradient = gradient_of(z, targets[rows], vocab_size, *(memory[:n] for memory in given))
            if dx is not None:
                dx[rows] = gradient @ w
            if product is not None:
                dw.add_(torch.mm(gradient.t(), part, out=product))
            elif dw is not None:
                dw.addmm_(gradient.t(), part)
        ctx.gradients = dx, None if dw is None else dw.to(head.dtype)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were handed out by an earlier backward")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if g is None else g.mul_(scale) for g in gradients), None, None, None, None


def summed_loss(
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    vocab_size: int,
    gradient_of: Callable[..., tuple[Tensor, Tensor]] = softmax_gradient,
) -> Tensor:
    """Sum of the token losses, in nats: fp32 [].

    x [..., D], head [V, D], targets int64 [...], IGNORE where unsupervised. Products are made in autocast's dtype; the
    gradient of the head adds up over chunks in fp32. gradient_of: `softmax_gradient`, or the same compiled. The
    gradients are there once: a second backward raises RuntimeError.
    """
    dtype = product_dtype(x, head)
    learns = torch.is_grad_enabled() and (x.requires_grad or head.requires_grad)
    # Gradients of fp16 are made under a GradScaler's scale; those of a scale of 1 would be lost.
    if not learns or dtype == torch.float16 or small(x, head):
        return token_losses(x, head, targets, vocab_size).sum()
    return SummedLoss.apply(x.flatten(0, -2), head, targets.flatten(), vocab_size, dtype, gradient_of)


def token_losses(x: Tensor, head: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """The loss of each token in nats: fp32, of the shape of targets, 0 where IGNORE. Arguments as of `summed_loss`.

    For a backward, a chunk's logits are computed a second time; small ones are kept.
    """
    dtype = product_dtype(x, head)

    def losses(part: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        # Cast here, not by autocast, which would let all chunks share a copy, and their gradients add up in 16 bits.
        logits = F.linear(part.to(dtype), head.to(dtype))[:, :vocab_size].float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")

    flat, wanted = x.flatten(0, -2), targets.flatten()
    if small(x, head):
        return losses(flat, head, wanted).view(targets.shape)
    size = head_chunk(len(flat), len(head), x.device.type)
    found = [
        checkpoint(losses, part, head, some, use_reentrant=False, preserve_rng_state=False)
        for part, some in zip(flat.split(size), wanted.split(size), strict=True)
    ]
    return torch.cat(found).view(targets.shape)


def small(x: Tensor, head: Tensor) -> bool:
    """True where the logits of all tokens at once are no burden."""
    return 4 * (x.numel() // x.shape[-1]) * len(head) <= SMALL_LOGITS


def product_dtype(x: Tensor, head: Tensor) -> torch.dtype:
    """The dtype of a product of both: autocast's, or the head's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
