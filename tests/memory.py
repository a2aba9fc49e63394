"""What models and optimizers hold after real updates, and the most that was allocated at one time, for test_plan.py.

    torchrun --nproc_per_node=N tests/memory.py 'FLAGS OF TRAIN.PY' ...

Rank 0 prints a line of JSON for each set of flags, with what fourscale.costs says of it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fourscale import budget, costs, muon, optim, parallel
from fourscale.cli import parse
from fourscale.config import TrainConfig
from fourscale.model import GPT
from fourscale.parallel import Topology
from fourscale.statebytes import held

SHAPE = ("--d-model", "96", "--n-layers", "3", "--n-heads", "4", "--ctx", "64", "--vocab-size", "1001", "--steps", "9")


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def update(model: nn.Module, optimizers: list[torch.optim.Optimizer], cfg: TrainConfig, topology: Topology) -> set[int]:
    """One update as train.py makes it; where its gradients lay before the last backward."""
    places: set[int] = set()
    ids = torch.randint(0, cfg.model.vocab_size, (cfg.grad_accum, cfg.local_bsz, cfg.model.ctx))
    model.zero_grad(set_to_none=True)
    for m in range(cfg.grad_accum):
        places = {muon.local(g).untyped_storage().data_ptr() for g in gradients(model)}
        with parallel.accumulate(model, m == cfg.grad_accum - 1, topology, cfg.grad_sync):
            with topology.autocast():
                sums = model(ids[m], ids[m])
            sums.sum().backward()
    parallel.clip_gradients(model, cfg.clip)
    optim.set_lr(optimizers, 1e-3)
    optim.step(optimizers, torch.zeros(()))
    return places


@contextlib.contextmanager
def counted(world: int) -> Iterator[list[float]]:
    """The bytes that this rank sends by collectives meanwhile, as rings send them; not those of DDP, which are C++."""
    sent, share = [0.0], (world - 1) / world
    names = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    ways = dict.fromkeys(names, share) | {"all_reduce": 2 * share}
    before = {name: getattr(dist, name) for name in ways if hasattr(dist, name)}

    def counting(name: str) -> Callable[..., Any]:
        factor = ways[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            size = max(t.nbytes for t in tensors)  # the whole one, whatever the order of arguments
            if size > 64:  # norms and counts
                sent[0] += factor * size
            return before[name](*args, **kwargs)

        return call

    for name in before:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name, fn in before.items():
            setattr(dist, name, fn)


def cell(flags: list[str], world: int = 1, rank: int = 0) -> dict[str, Any]:
    """Bytes by name that were found and that costs.memory says, of the small model with `flags` over it. Collective."""
    cfg = parse(TrainConfig, [*SHAPE, *flags])
    dtype = "fp32" if cfg.dtype == "auto" else cfg.dtype
    shards = budget.shard_size_of(cfg.parallel, cfg.shard_size, world)
    topology = Topology(rank, world, torch.device("cpu"), dtype, cfg.parallel, shards, None, None, None)
    cfg = budget.plan(cfg, cfg.model.vocab_size, world, "cpu", dtype).cfg
    with torch.device("meta"):
        raw = GPT(cfg.model, cfg.act_ckpt)
    model = parallel.build(raw, lambda: raw.init_weights(0), topology)
    optimizers = optim.build(raw, cfg.optimizer, cfg.weight_decay, cfg.beta1, cfg.beta2)
    update(model, optimizers, cfg, topology)
    with counted(world) as sent:
        places = update(model, optimizers, cfg, topology)
    state = [t for o in optimizers for s in o.state.values() for t in s.values()]
    found = {"weights": held(list(raw.parameters())), "gradients": held(gradients(raw)), "optimizer": held(state)}
    last = {muon.local(g).untyped_storage().data_ptr() for g in gradients(raw)}
    found["moved"] = cfg.grad_accum > 1 and not places & last
    layout = costs.Layout(cfg.parallel, world, shards)
    if cfg.grad_accum == 1:  # the tracker wants each module called once
        tracker = MemTracker()
        tracker.track_external(raw, *optimizers)
        with tracker:
            update(model, optimizers, cfg, topology)
        found["peak"] = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    found["sent"], wire = round(sent[0]), costs.wire(cfg, layout)
    return {"flags": flags, "found": found, "want": vars(costs.memory(cfg, layout, "cpu")) | {"sent": wire.total}}


if __name__ == "__main__":
    group = parallel.start(backend="gloo")
    for line in sys.argv[1:]:
        measured = cell(line.split(), group.world_size, group.rank)
        if group.main:
            print(json.dumps(measured), flush=True)
    parallel.stop(group)
