"""Gradients of the chunked head under the modes of parallelism against those of full logits on one process.

    torchrun --nproc_per_node=2 tests/head_program.py

Rank 0 prints, for each cell, how far the worst gradient is from that of one process, of its largest value.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fourscale import headloss, parallel
from fourscale.config import ModelConfig
from fourscale.headloss import IGNORE
from fourscale.model import GPT

headloss.SMALL_LOGITS, headloss.head_chunk = 0, lambda tokens, rows, device_type: 10
CELLS = [
    ("ddp", "fp32", True, "none"),
    ("ddp", "bf16", False, "none"),
    ("fsdp", "fp32", True, "none"),
    ("fsdp", "fp32", False, "block"),
    ("fsdp", "bf16", True, "selective"),
    ("hsdp", "fp32", True, "selective"),
    ("hsdp", "bf16", False, "none"),
    ("ddp", "fp32", False, "block"),
]


def built(cfg: ModelConfig, act_ckpt: str = "none") -> GPT:
    with torch.device("meta"):
        return GPT(cfg, act_ckpt)


def cell(topology: parallel.Topology, tie: bool, act_ckpt: str) -> float:
    cfg = ModelConfig("gpt2", 32, 2, 4, 4, 64, 16, 65, tie=tie)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(65, (2, 2, 3, 17), generator=generator)  # micro-batch, rank, window
    targets = ids[..., 1:].clone()
    targets[0, 1, 1, 5:] = IGNORE
    alone = built(cfg).to_empty(device="cpu")
    alone.init_weights(0)
    with topology.autocast():
        logits = alone(ids[..., :-1].flatten(0, 2))
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum").backward()
    raw = built(cfg, act_ckpt)
    model = parallel.build(raw, lambda: raw.init_weights(0), topology)
    for m in range(2):
        with parallel.accumulate(model, m == 1, topology):
            with topology.autocast():
                loss = model(ids[m, topology.rank, :, :-1], targets[m, topology.rank])
            (loss * topology.world_size).backward()  # ranks are averaged
    worst = 0.0
    for p, q in zip(raw.parameters(), alone.parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        worst = max(worst, ((grad - q.grad).abs().max() / q.grad.abs().max()).item())
    return worst


if __name__ == "__main__":
    group = parallel.start(backend="gloo")
    for mode, dtype, tie, act_ckpt in CELLS:
        shards = {"ddp": 1, "fsdp": 2, "hsdp": 2}[mode]
        off = cell(replace(group, parallel=mode, dtype=dtype, shard_size=shards), tie, act_ckpt)
        if group.main:
            print(f"{mode}-{dtype}-{'tied' if tie else 'untied'}-{act_ckpt} {off:.2e}", flush=True)
    parallel.stop(group)
