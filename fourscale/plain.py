"""The plain loop that bench.py measures against: GPT-2 as nanoGPT (Karpathy 2022) trains it, on one process.

One gather of samples a micro-batch from a memory map, full logits, eager unless told, AdamW that is fused on CUDA
alone, the loss read at each log. Its weights, data order and rates are train.py's, so that its losses must be too: what
is compared is how an update is made, not what it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourscale import order, schedule, telemetry
from fourscale.config import ModelConfig


@dataclass
class Plain:
    """What to train, filled in."""

    data: str  # headerless uint16 ids
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    ctx: int
    local_bsz: int
    grad_accum: int
    updates: int
    log_every: int
    lr: float = 1e-3
    warmup: int = 1
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    data_seed: int = 1234
    device: str = "cpu"
    dtype: str = "fp32"
    compile: bool = False


class SelfAttention(nn.Module):
    """[B, T, D] -> [B, T, D], causal."""

    def __init__(self, cfg: Plain):
        super().__init__()
        self.n_heads = cfg.n_heads
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model)
        self.out = nn.Linear(cfg.d_model, cfg.d_model)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).split(D, dim=2)
        q, k, v = (t.view(B, T, self.n_heads, D // self.n_heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(B, T, D))


class Layer(nn.Module):
    """Pre-norm block: [B, T, D] -> [B, T, D]."""

    def __init__(self, cfg: Plain):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(cfg.d_model), nn.LayerNorm(cfg.d_model)
        self.attn = SelfAttention(cfg)
        self.up, self.down = nn.Linear(cfg.d_model, 4 * cfg.d_model), nn.Linear(4 * cfg.d_model, cfg.d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """(ids, targets) int64 [B, T] each -> (logits [B, T, V], mean loss)."""

    def __init__(self, cfg: Plain):
        super().__init__()
        self.vocab_size = cfg.vocab_size
        self.wte = nn.Embedding(ModelConfig(vocab_size=cfg.vocab_size).padded_vocab, cfg.d_model)
        self.wpe = nn.Embedding(cfg.ctx, cfg.d_model)
        self.blocks = nn.ModuleList(Layer(cfg) for _ in range(cfg.n_layers))
        self.norm = nn.LayerNorm(cfg.d_model)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        # nanoGPT trains the padded ids along; without them, the loss is ours to compare.
        logits = F.linear(self.norm(x), self.wte.weight)[..., : self.vocab_size]
        return logits, F.cross_entropy(logits.reshape(-1, self.vocab_size), targets.view(-1))


def initial_weights(cfg: Plain) -> dict[str, Tensor]:
    """train.py's, by the names of PlainGPT."""
    from fourscale.model import GPT

    shape = {name: getattr(cfg, name) for name in ("d_model", "n_layers", "n_heads", "ctx", "vocab_size")}
    model = GPT(ModelConfig(**shape, n_kv_heads=cfg.n_heads, d_ff=4 * cfg.d_model))
    model.init_weights(cfg.seed)
    return {name.replace(".mlp.", "."): tensor for name, tensor in model.state_dict().items()}


def train(cfg: Plain) -> dict[str, object]:
    """Train and return: `losses` of each logged update (from 1), `ms` an update of each interval between logs,
    `tokens_per_s` of each, `first_update_s` from the start of the process, `peak_bytes` (telemetry.peak_memory)."""
    device = torch.device(cfg.device)
    torch.manual_seed(cfg.seed)
    with device:
        model = PlainGPT(cfg)
    model.load_state_dict(initial_weights(cfg))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    extra = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), eps=1e-8, **extra)
    step_model = torch.compile(model) if cfg.compile else model
    scaler = torch.amp.GradScaler(device.type, enabled=cfg.dtype == "fp16")
    autocast = contextlib.nullcontext()
    if cfg.dtype != "fp32":
        autocast = torch.autocast(device.type, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[cfg.dtype])
    total = Path(cfg.data).stat().st_size // 2
    rows = cfg.local_bsz * cfg.grad_accum
    samples = order.Order(total, cfg.ctx, cfg.data_seed)

    def batch(update: int, micro: int) -> tuple[Tensor, Tensor]:
        ids = np.memmap(cfg.data, dtype=np.uint16, mode="r")
        first = update * rows + micro * cfg.local_bsz
        at = samples.starts(np.arange(first, first + cfg.local_bsz))
        x = torch.stack([torch.from_numpy(ids[i : i + cfg.ctx].astype(np.int64)) for i in at])
        y = torch.stack([torch.from_numpy(ids[i + 1 : i + 1 + cfg.ctx].astype(np.int64)) for i in at])
        if device.type == "cuda":
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x, y

    out: dict[str, list[float]] = {"losses": [], "ms": [], "tokens_per_s": []}
    x, y = batch(0, 0)
    first_update_s = 0.0
    mark, marked = time.monotonic(), 0
    for i in range(cfg.updates):
        lr = schedule.learning_rate(i, cfg.updates, cfg.warmup, cfg.lr, 0.1 * cfg.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        for micro in range(cfg.grad_accum):
            with autocast:
                _, loss = step_model(x, y)
                loss = loss / cfg.grad_accum
            x, y = batch(i + (micro + 1) // cfg.grad_accum, (micro + 1) % cfg.grad_accum)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if i == 0 or (i + 1) % cfg.log_every == 0:
            out["losses"].append(loss.item() * cfg.grad_accum)  # of the last micro-batch, as nanoGPT logs it
            now = time.monotonic()
            if i == 0:
                first_update_s = now - telemetry.PROCESS_BEGAN
            out["ms"].append(1e3 * (now - mark) / (i + 1 - marked))
            out["tokens_per_s"].append(rows * cfg.ctx * (i + 1 - marked) / (now - mark))
            mark, marked = now, i + 1
    return {**out, "first_update_s": first_update_s, "peak_bytes": telemetry.peak_memory(device)}


def main() -> None:
    """`python -m fourscale.plain JSON-OF-Plain OUT.json`, for bench.py."""
    cfg = Plain(**json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(train(cfg) | {"config": dataclasses.asdict(cfg)}))


if __name__ == "__main__":
    main()
