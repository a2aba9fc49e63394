"""Parameter groups, AdamW, Muon, the guard and the scaler."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fourscale.model import GPT

GUARD_DECAY = 0.99


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups, disjoint and covering: matrices and embeddings are decayed; norms and biases are not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def build(model: GPT, kind: str, weight_decay: float, beta1: float, beta2: float) -> list[torch.optim.Optimizer]:
    """The optimizers of a model, every parameter in exactly one; set the rate with `set_lr` before each step.

    adamw: fused AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) on all. muon: Muon on the matrices of the blocks,
    AdamW on embeddings, head, norms and biases.
    """
    groups = parameter_groups(model, weight_decay)
    out: list[torch.optim.Optimizer] = []
    if kind == "muon":
        hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
        taken = {id(p) for p in hidden}
        groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in taken]
        out.append(Muon(hidden, weight_decay))
    out.append(torch.optim.AdamW(groups, lr=0.0, betas=(beta1, beta2), eps=1e-8, fused=True))
    return out


def orthogonalise(matrix: Tensor) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix, fp32 [m, n]: five quintic Newton-Schulz steps, singular values to
    about 0.7 .. 1.2 (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks")."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if (tall := matrix.shape[0] > matrix.shape[1]) else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum 0.95, in fp32, the same on every topology.

    The step of an [m, n] matrix is scaled by 0.2 sqrt(max(m, n)), which gives it the size of an AdamW step, so that one
    rate serves both (Liu et al. 2025, arXiv:2502.16982). Ranks share the work: each orthogonalises every world_size-th
    matrix whole, and under FSDP keeps only its own slice of the others' results.
    """

    def __init__(self, params: list[Tensor], weight_decay: float, momentum: float = 0.95):
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay, "momentum": momentum})
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        """One update; where `found_inf` (scalar) is 1, weights and momentum stay as they are."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        skip = None if self.found_inf is None else self.found_inf.bool()
        for group in self.param_groups:
            for first in range(0, len(group["params"]), world):
                mine = None
                chunk = group["params"][first : first + world]
                for owner, p in enumerate(chunk):
                    direction = self._momentum(p, group["momentum"], skip)
                    full = direction.full_tensor() if isinstance(direction, DTensor) else direction
                    if owner == rank:
                        mine = orthogonalise(full).contiguous()
                for owner, p in enumerate(chunk):
                    full = mine if owner == rank else torch.empty(p.shape, dtype=torch.float32, device=p.device)
                    if world > 1:
                        dist.broadcast(full, src=owner)
                    scale = 0.2 * math.sqrt(max(p.shape))
                    self._apply(p, full, group["lr"], scale, group["weight_decay"], skip)

    def _momentum(self, p: Tensor, beta: float, skip: Tensor | None) -> Tensor:
        """Update the momentum of `p` and return the direction to orthogonalise, sharded as `p` is."""
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p.data)
        grad, old = local(p.grad), local(state["momentum"])
        new = old.lerp(grad, 1 - beta)
        if skip is not None:
            new = torch.where(skip, old, new)
        old.copy_(new)
        # The buffer of the gradient is free from here on: it takes the direction, and keeps the sharding.
        grad.lerp_(new, beta)
        return p.grad

    @staticmethod
    def _apply(p: Tensor, full: Tensor, lr: float, scale: float, weight_decay: float, skip: Tensor | None) -> None:
        if isinstance(p, DTensor):
            full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
        weight, step = local(p), local(full)
        new = (weight * (1 - lr * weight_decay)).add_(step, alpha=-lr * scale)
        weight.copy_(new if skip is None else torch.where(skip, weight, new))


def local(t: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


class Guard:
    """Says which updates are dropped before the optimizer: those that are not finite, and spikes of the loss.

    The decision and its baseline, a running mean of the losses of accepted updates (decay 0.99, set by the first of
    them), stay on the device: the host need not wait.
    """

    def __init__(self, device: torch.device, factor: float, mean: float | None = None):
        """factor: a loss above factor x mean is a spike; 0 for none. mean: of a resumed run, from `mean()`."""
        self.factor = factor
        self._mean = torch.tensor(math.nan if mean is None else mean, dtype=torch.float32, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """1.0 where the update must be dropped, else 0.0 (fp32 scalar), from its loss and gradient norm (fp32 scalars,
        equal on all ranks)."""
        dropped = ~(torch.isfinite(loss) & torch.isfinite(norm))
        if self.factor > 0:
            dropped = dropped | (loss > self.factor * self._mean)  # nothing exceeds the NaN of no mean yet
        blended = torch.where(self._mean.isnan(), loss, self._mean.lerp(loss, 1 - GUARD_DECAY))
        self._mean = torch.where(dropped, self._mean, blended)
        return dropped.float()

    def mean(self) -> float | None:
        """The baseline in nats, None before the first accepted update. Waits for the device."""
        mean = self._mean.item()
        return None if math.isnan(mean) else mean


def gradient_scaler(
    dtype: str, device: torch.device, world_size: int, state: dict[str, float] | None = None
) -> torch.amp.GradScaler:
    """Loss scaling for fp16 (Micikevicius et al. 2017, arXiv:1710.03740), which does nothing for other dtypes.

    state: `scaler_state` of a resumed run. The loss of each rank is multiplied by world_size before backward: the scale
    makes up for that, so that what overflows in fp16 has no factor of the number of ranks in it.
    """
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16", init_scale=65536 / world_size)
    if state:
        scaler.load_state_dict(state | {"scale": state["scale"] / world_size})
    return scaler


def scaler_state(scaler: torch.amp.GradScaler, world_size: int) -> dict[str, float]:
    """A scaler as JSON numbers, its scale that of a world of one; empty unless it's enabled. Waits for the device."""
    state = scaler.state_dict()
    return state | {"scale": state["scale"] * world_size} if state else {}


def unscale(scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer]) -> None:
    """Divide the gradients by the scale, before clipping. What overflowed on any rank counts on all: under DDP the
    gradients are equal, and of DTensors torch takes the maximum over the mesh."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)


def step(optimizers: list[torch.optim.Optimizer], skipped: Tensor) -> None:
    """Step unless `skipped` (scalar on the device, equal on all ranks) is 1.0.

    Fused AdamW takes it as `found_inf` and then leaves weights, moments and step counts untouched; Muon does the same.
    """
    for optimizer in optimizers:
        optimizer.found_inf = skipped
        optimizer.step()


def set_lr(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
