"""Parameter groups, the optimizers, the guard and the scaler."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fourscale.model import GPT
from fourscale.muon import Muon

GUARD_DECAY = 0.99


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups, disjoint and covering: matrices and embeddings are decayed; norms and biases are not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def build(
    model: GPT, kind: str, weight_decay: float, beta1: float, beta2: float, muon_dtype: str = "fp32"
) -> list[torch.optim.Optimizer]:
    """The optimizers of a model, every parameter in exactly one; set the rate with `set_lr` before each step.

    adamw: fused AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) on all. muon: Muon on the matrices of the blocks,
    with products in `muon_dtype` (fp32 or bf16), AdamW on embeddings, head, norms and biases.
    """
    groups = parameter_groups(model, weight_decay)
    out: list[torch.optim.Optimizer] = []
    if kind == "muon":
        hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
        taken = {id(p) for p in hidden}
        groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in taken]
        out.append(Muon(hidden, weight_decay, dtype=torch.bfloat16 if muon_dtype == "bf16" else torch.float32))
    out.append(torch.optim.AdamW(groups, lr=0.0, betas=(beta1, beta2), eps=1e-8, fused=True))
    return out


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
