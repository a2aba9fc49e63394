"""What a rank holds between updates, counted: bytes of weights, gradients and optimizer after a real one, for bench.py.

torchrun --nproc_per_node=N -m fourscale.statebytes '{"d_model": 768, ...}' PARALLEL OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from fourscale import muon, optim, parallel
from fourscale.config import ModelConfig
from fourscale.model import GPT


def held(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind this rank's parts of tensors, each once, the padding of shards included."""
    behind = (muon.local(t).untyped_storage() for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in behind if s.nbytes()}.values())


def main() -> None:
    shape, mode, out = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    topology = parallel.start(mode, backend="gloo", device="cpu")
    cfg = ModelConfig("gpt2", n_kv_heads=shape["n_heads"], d_ff=4 * shape["d_model"], **shape)
    with torch.device("meta"):
        raw = GPT(cfg)
    model = parallel.build(raw, lambda: raw.init_weights(0), topology)
    optimizers = optim.build(raw, "adamw", 0.1, 0.9, 0.95)
    ids = torch.zeros(1, 16, dtype=torch.int64)  # the state is the same, whatever the batch
    model(ids, ids).backward()
    optim.set_lr(optimizers, 1e-3)
    optim.step(optimizers, torch.zeros(()))
    state = [t for o in optimizers for s in o.state.values() for t in s.values()]
    mine = {
        "weights": held(list(raw.parameters())),
        "gradients": held([p.grad for p in raw.parameters()]),
        "optimizer": held(state),
    }
    ranks = topology.gather(mine)
    if topology.main:
        out.write_text(json.dumps(ranks))
    parallel.stop(topology)


if __name__ == "__main__":
    main()
