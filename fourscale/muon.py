"""Muon: momentum orthogonalised, matrices of one shape in one batch, shared over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourscale.budget import ROUND_BYTES, orthogonalising_flops

# Odd quintics a x + b x^3 + c x^5 that take singular values 0.003 .. 1 to 0.79 .. 1.21 in four steps, each the best for
# the interval that the one before it leaves (Amsel et al. 2025, arXiv:2505.16932, algorithm 1 and its cushion). Each is
# stretched by 2%: beyond its interval it leads far away, and there a rounded value may lie, in bf16 above all.
QUINTICS = (  # as many as budget.MUON_STEPS
    (8.0579422606, -22.0521864899, 15.5407094241),
    (3.9263490776, -2.7537926349, 0.4973535679),
    (3.4544719963, -2.4875458242, 0.4775129073),
    (2.4622815356, -1.7456034595, 0.3974642384),
)

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def orthogonalise(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix of each, fp32 [k, m, n], by products in `dtype` (fp32 or bf16).

    Singular values down to a 300th of the largest become about 0.8 .. 1.2, which Newton-Schulz steps do for Muon
    (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks").

    With m <= n, a step on X [m, n] takes 4 m^2 n + 2 m^3 FLOPs. In fp32, where it is cheaper, all steps are made on
    G = X X^T [m, m] instead, with which each polynomial commutes, and X is multiplied by their product at the end.
    """
    x = matrices.mT if (tall := matrices.shape[1] > matrices.shape[2]) else matrices
    m, n = x.shape[1:]
    small = dtype == torch.float32 and orthogonalising_flops(m, n, True) < orthogonalising_flops(m, n, False)
    x = (x / norm(x)).to(dtype)  # eighth powers of small gradients would underflow
    gram = x @ x.mT
    square = gram @ gram
    # |G^2|, a sum of eighth powers of singular values, bounds the largest of them, and more closely than |X| does.
    bound = norm(square).sqrt()
    x, gram, square = ((t / bound**power).to(dtype) for t, power in ((x, 0.5), (gram, 1), (square, 2)))
    factor = product = None
    for i, (a, b, c) in enumerate(QUINTICS):
        if i > 0:
            gram = factor @ gram @ factor if small else x @ x.mT
            square = gram @ gram
        factor = (b * gram).add_(square, alpha=c)
        if small:
            factor.diagonal(dim1=1, dim2=2).add_(a)
            product = factor if product is None else factor @ product
        else:
            x = torch.baddbmm(x, factor, x, beta=a)
    x = (product @ x if small else x).float()
    return x.mT if tall else x


def norm(matrices: Tensor) -> Tensor:
    """Frobenius norms of [k, m, n], fp32 [k, 1, 1], never 0."""
    return torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float32).clamp_(min=1e-30)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum 0.95, weights and momentum in fp32, the same on every topology.

    The step of an [m, n] matrix is scaled by 0.2 sqrt(max(m, n)), which gives it the size of an AdamW step, so that one
    rate serves both (Liu et al. 2025, arXiv:2502.16982). Ranks share the matrices of one shape, each orthogonalising
    its part of them in one batch: where weights are sharded, an exchange brings it all rows of those and another one
    takes the results back; where there are several copies, they tell each other what they have.
    """

    def __init__(
        self, params: list[Tensor], weight_decay: float, momentum: float = 0.95, dtype: torch.dtype = torch.float32
    ):
        """dtype: of the products; in bf16, losses of different topologies drift apart."""
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype = dtype
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        """One update; where `found_inf` (scalar) is 1, weights and momentum stay as they are."""
        skip = None if self.found_inf is None else self.found_inf.bool()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                self._momentum(p, group["momentum"], skip)
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                shares = Shares.of(params[0])
                at_once = shares.copies * shares.shards * max(1, ROUND_BYTES // (4 * shape.numel()))
                for first in range(0, len(params), at_once):
                    self._round(params[first : first + at_once], shares, group, skip)

    def _momentum(self, p: Tensor, beta: float, skip: Tensor | None) -> None:
        """Update the momentum of `p`; the direction to orthogonalise takes the place of its gradient."""
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p.data)
        grad, old = local(p.grad), local(state["momentum"])
        new = old.lerp(grad, 1 - beta)
        if skip is not None:
            new = torch.where(skip, old, new)
        old.copy_(new)
        grad.lerp_(new, beta)

    def _round(self, params: list[Tensor], shares: Shares, group: dict, skip: Tensor | None) -> None:
        """Step matrices of one shape."""
        mine = params[shares.block(len(params))]
        parts = torch.stack([local(p.grad) for p in mine or params[:1]])[: len(mine)]
        whole = shares.whole(parts)
        steps = shares.rows_of(orthogonalise(whole, self.dtype) if len(whole) else whole, len(mine))
        # Copies tell each other a band of rows at a time: all rows of all matrices of a large model are too much.
        rows, width = steps.shape[1:]
        band = max(1, ROUND_BYTES // (4 * len(params) * width)) if shares.copies > 1 else max(rows, 1)
        scale = group["lr"] * 0.2 * math.sqrt(max(params[0].shape))
        for first in range(0, rows, band):
            for p, step in zip(params, shares.of_copies(steps[:, first : first + band], len(params)), strict=True):
                weight = local(p)[first : first + band]
                new = (weight * (1 - group["lr"] * group["weight_decay"])).add_(step, alpha=-scale)
                weight.copy_(new if skip is None else torch.where(skip, weight, new))


@dataclass(frozen=True)
class Shares:
    """Which ranks hold what of a parameter: each of `copies` groups of `shards` ranks holds all of it, and the i-th
    rank of a group has `rows[i]` of its rows. Under ddp a group is one rank, under fsdp there is one group."""

    rows: tuple[int, ...]
    copies: int = 1
    copy: int = 0
    copy_group: dist.ProcessGroup | None = None  # of the ranks that have the same rows
    shards: int = 1
    shard: int = 0
    shard_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, p: Tensor) -> Shares:
        if isinstance(p, DTensor):
            mesh, last = p.device_mesh, p.device_mesh.ndim - 1
            shards = mesh.size(last)
            most = -(-p.shape[0] // shards)  # as torch.chunk cuts
            rows = tuple(max(0, min(most, p.shape[0] - i * most)) for i in range(shards))
            copies = (mesh.size(0), mesh.get_local_rank(0), mesh.get_group(0)) if last else (1, 0, None)
            return cls(rows, *copies, shards, mesh.get_local_rank(last), mesh.get_group(last))
        rows = (p.shape[0],)
        return cls(rows, dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else cls(rows)

    def block(self, count: int) -> slice:
        """Which of `count` matrices this copy sees to."""
        each = -(-count // self.copies)
        return slice(self.copy * each, (self.copy + 1) * each)

    def whole(self, parts: Tensor) -> Tensor:
        """From this rank's rows of its copy's k matrices [k, rows, n] to all rows of those it owns, [own, m, n]."""
        if self.shards == 1:
            return parts
        k, mine, width = parts.shape
        owned = self._owned(k)
        sent, got = [o * mine * width for o in owned], self._sizes(owned, width)
        out = parts.new_empty(sum(got))
        dist.all_to_all_single(out, parts.reshape(-1), got, sent, group=self.shard_group)
        own = owned[self.shard]
        return torch.cat([t.view(own, r, width) for t, r in zip(out.split(got), self.rows, strict=True)], dim=1)

    def rows_of(self, matrices: Tensor, k: int) -> Tensor:
        """The way back: from the matrices that this rank owns to its rows of all k of its copy."""
        if self.shards == 1:
            return matrices
        width, owned = matrices.shape[2], self._owned(k)
        sent, mine = self._sizes(owned, width), self.rows[self.shard]
        out = matrices.new_empty(k * mine * width)
        flat = torch.cat([t.reshape(-1) for t in matrices.split(self.rows, dim=1)])
        dist.all_to_all_single(out, flat, [o * mine * width for o in owned], sent, group=self.shard_group)
        return out.view(k, mine, width)

    def of_copies(self, steps: Tensor, count: int) -> Tensor:
        """From rows of this copy's matrices to the same rows of all `count`, [count, rows, n]."""
        if self.copies == 1:
            return steps
        _, rows, width = steps.shape
        each = -(-count // self.copies)
        if each * self.copies <= 2 * count:
            padded = steps.new_zeros(each, rows, width)
            padded[: len(steps)] = steps
            out = steps.new_empty(each * self.copies, rows, width)
            _all_gather(out, padded, group=self.copy_group)
            return out[:count]
        # Fewer matrices than copies: a sum with zeros sends twice as much as a gather, but none of its padding.
        out = steps.new_zeros(count, rows, width)
        out[self.block(count)] = steps
        dist.all_reduce(out, group=self.copy_group)
        return out

    def _owned(self, k: int) -> list[int]:
        """How many of its copy's k matrices each rank of a group orthogonalises."""
        each = -(-k // self.shards)
        return [max(0, min(each, k - i * each)) for i in range(self.shards)]

    def _sizes(self, owned: list[int], width: int) -> list[int]:
        """Numbers of this rank's matrices that lie on each rank of its group."""
        return [owned[self.shard] * rows * width for rows in self.rows]


def local(t: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t
