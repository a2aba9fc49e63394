"""What becomes of a run on more GPUs: its efficiency by a model of links and of what hides behind computing. Imports no
torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from fourscale import budget, costs
from fourscale.cli import from_toml
from fourscale.config import TrainConfig
from fourscale.costs import Layout

BUCKET = 25 * 2**20  # bytes of gradients that DDP sends at once
SMALL_SUMS = 3  # an update: its message, the gradients' norm, the loss
GPUS = (8, 64, 512)


@dataclass(frozen=True)
class Links:
    """How GPUs are joined: rates in one direction. The defaults are a DGX H100's: NVLink 4, 900 GB/s both ways
    together, and eight adapters of 400 Gbit/s a node ("NVIDIA DGX H100" data sheet, 2023)."""

    link_gbyte_s: float = 450.0  # of a GPU within its node
    node_gbit_s: float = 3200.0  # of a node to others
    node: int = 8  # GPUs of a node
    reach: float = 0.8  # share of these rates that large collectives come to
    start_us: float = 10.0  # of each collective
    hop_us: float = 1.0  # of a message from GPU to GPU of a node
    net_us: float = 5.0  # of one between nodes

    def seconds(self, rank: float, node: float) -> float:
        """Time of a collective in which a rank sends `rank` bytes and a node `node` bytes to others: the slower of the
        two links sets the pace. A sum of 1 GB over 8 ranks of a node is 1.75 GB a rank: 4.861 ms at 0.8 of 450 GB/s."""
        return max(rank / (1e9 * self.link_gbyte_s), node / (1e9 / 8 * self.node_gbit_s)) / self.reach

    def latency(self, ranks: int, apart: int, tree: bool) -> float:
        """Seconds before a collective of `ranks`, `apart` ranks between neighbours, moves any bytes to speak of: rings
        for gathers and scatters, a hop a rank; for sums trees between nodes, up and down (Jeaugey 2019, "Massively
        scale your deep learning training with NCCL 2.4")."""
        if ranks == 1:
            return 0.0
        a_node = max(1, min(ranks, self.node // apart))
        nodes = -(-ranks // a_node)
        if tree:
            us = 2 * ((a_node - 1) * self.hop_us + math.ceil(math.log2(nodes)) * self.net_us)
        else:
            us = (ranks - nodes) * self.hop_us + (nodes if nodes > 1 else 0) * self.net_us
        return 1e-6 * (self.start_us + us)


ETHERNET = Links(node_gbit_s=100.0)


@dataclass(frozen=True)
class Estimate:
    """Seconds of an update on each rank."""

    compute: float
    exposed: float  # sending that nothing hides
    sending: float  # all of it

    @property
    def efficiency(self) -> float:
        """Of the ranks' time, the share that computes."""
        return self.compute / (self.compute + self.exposed)


def estimate(cfg: TrainConfig, layout: Layout, links: Links, flops_per_s: float) -> Estimate:
    """An update of a filled-in TrainConfig under `layout`, on GPUs that each come to flops_per_s by 6 N a token alone.

    What hides behind what, by mode:
    - ddp: buckets of gradients, from the first that is full, behind the rest of the (last) backward; the embeddings'
      gradients are ready when it ends and are never hidden.
    - fsdp, hsdp: the next block's weights come while a block computes, in forward and backward; a block's gradients go
      while the block before it computes; both share a link. Not hidden: the root's weights and the first block's, the
      root's gradients and the first block's. hsdp's sums between copies go beside these, on a link of their own where a
      copy lies within a node.
    - Muon's matrices, and three small sums an update: nothing hides them.
    """
    model, micro, last = cfg.model, cfg.grad_accum, 1 if cfg.grad_sync != "every" else cfg.grad_accum
    compute = budget.flops_per_token(model) * cfg.local_bsz * model.ctx / flops_per_s  # of a micro-batch
    backward = compute * (3 / 4 if cfg.act_ckpt == "block" else 2 / 3)
    tensors = {name: math.prod(shape) for name, shape in budget.shapes(model).items()}
    whole, layers = sum(tensors.values()), model.n_layers
    blocks = sum(n for name, n in tensors.items() if name.startswith("blocks."))
    root = whole - blocks
    rank, node = costs.wire(cfg, layout), costs.wire(cfg, layout, links.node)
    world, shards, copies = layout.world, layout.shards, layout.copies
    ring = links.latency(shards, 1, tree=False)
    tree = links.latency(copies, shards, tree=True)
    small = SMALL_SUMS * links.latency(world, 1, tree=True)

    def part(name: str, share: float, times: int, latency: float) -> float:
        """Seconds of one of `times` rounds in an update, of a call that moves `share` of a round's bytes."""
        each = links.seconds(getattr(rank, name), getattr(node, name)) / times
        return each * share + (latency if each else 0.0)

    muon = links.seconds(rank.muon, node.muon)
    if not layout.sharded:
        buckets = max(1, math.ceil(4 * whole / BUCKET))
        all_of_it = part("reduce", 1.0, last, buckets * tree)
        late = sum(n for name, n in tensors.items() if name.startswith(("wte", "wpe")))
        tail = part("reduce", max(late / whole, 1 / buckets), last, tree)
        exposed = last * max(tail, all_of_it - backward * (1 - 1 / buckets))
        return Estimate(micro * compute, exposed + muon + small, last * all_of_it + muon + small)

    # Of the blocks' weights each goes twice in 16 bits (or 32), of the root's once in 32.
    wide = costs.BYTES[cfg.dtype]
    gathered = 2 * wide * blocks + 4 * root
    scatters = 1 if cfg.grad_sync == "last" else micro
    in_block, in_root = wide * blocks / layers / gathered, 4 * root / gathered
    gather, gather_root = part("gather", in_block, micro, ring), part("gather", in_root, micro, ring)
    scatter = part("scatter", blocks / layers / whole, scatters, ring)
    scatter_root = part("scatter", root / whole, scatters, ring)
    reduce = part("reduce", blocks / layers / whole, last, tree)
    reduce_root = part("reduce", root / whole, last, tree)
    flops = budget.exact_flops(model)
    body = 1 - flops.head / flops.total
    a_forward, a_backward = (compute - backward) * body / layers, backward * body / layers
    exposed = sending = 0.0
    for m in range(micro):
        s, s_root = (scatter, scatter_root) if m >= micro - scatters else (0.0, 0.0)
        r, r_root = (reduce, reduce_root) if m >= micro - last else (0.0, 0.0)
        busy = max(gather + s, r) if shards <= links.node else gather + s + r
        exposed += gather_root + gather + (layers - 1) * max(0.0, gather - a_forward)
        exposed += layers * max(0.0, busy - a_backward) + s + s_root + r + r_root
        sending += gather_root + 2 * layers * gather + layers * (s + r) + s_root + r_root
    return Estimate(micro * compute, exposed + muon + small, sending + muon + small)


def on(cfg: TrainConfig, world: int, parallel: str, links: Links, strong: bool) -> tuple[TrainConfig, Layout]:
    """`cfg` on `world` GPUs: each with the batch that it has now, or (strong) sharing one global batch as --global-bsz
    shares it."""
    shards = {"ddp": 1, "fsdp": world}.get(parallel) or min(cfg.shard_size or links.node, world)
    if strong:
        local = min(cfg.local_bsz, -(-cfg.global_bsz // world))
        cfg = dataclasses.replace(cfg, local_bsz=local, grad_accum=-(-cfg.global_bsz // (world * local)))
    return dataclasses.replace(cfg, parallel=parallel), Layout(parallel, world, shards)


def efficiency(
    cfg: TrainConfig, world: int, parallel: str, links: Links, flops_per_s: float, strong: bool = False
) -> float:
    """Speed on `world` GPUs over `world` times the speed of one, 0 .. 1. Under strong scaling, GPUs that find no window
    left in the global batch count as idle."""
    there, layout = on(cfg, world, parallel, links, strong)
    share = cfg.global_bsz / (world * there.local_bsz * there.grad_accum) if strong else 1.0
    return share * estimate(there, layout, links, flops_per_s).efficiency


def recipe(path: Path, world: int, vocab_size: int = 50_257) -> TrainConfig:
    """A recipe of launch/, filled in as on `world` GPUs. Raises InputError for what train.py would refuse."""
    return budget.plan(from_toml(TrainConfig, path, TrainConfig()), vocab_size, world, "cuda", "bf16").cfg


# ---- in words ------------------------------------------------------------------------------------------------------


def figures(
    cfgs: dict[str, TrainConfig], links: Links, flops_per_s: float, memory: int | None = None
) -> list[dict[str, str | int | bool | float | None]]:
    """Efficiency, 0 .. 1, of each configuration under each mode on GPUS, with a fixed batch a GPU and a fixed global
    batch. None for what doesn't fit 90% of `memory`, GB of a GPU."""
    out = []
    for name, cfg in cfgs.items():
        for mode, strong, world in itertools.product(("ddp", "fsdp", "hsdp"), (False, True), GPUS):
            there, layout = on(cfg, world, mode, links, strong)
            fits = memory is None or costs.memory(there, layout, "cuda").peak <= 0.9e9 * memory
            found = efficiency(cfg, world, mode, links, flops_per_s, strong) if fits else None
            out.append({"name": name, "parallel": mode, "gpus": world, "global_bsz_fixed": strong, "efficiency": found})
    return out


def assumptions(links: Links, flops_per_s: float, memory: int | None = None) -> list[str]:
    """What the table rests on, a line each."""
    out = [
        f"a GPU alone comes to {flops_per_s / 1e12:,.0f} TFLOP/s by 6 N a token, the optimizer's step included, with "
        "any micro-batch",
        f"in a node of {links.node}: {links.link_gbyte_s:g} GB/s a GPU; between nodes: {links.node_gbit_s:g} Gbit/s a "
        f"node; collectives come to {links.reach:g} of either",
        f"latency: {links.start_us:g} us a collective, {links.hop_us:g} us a hop within a node, {links.net_us:g} us "
        "between; rings gather and scatter, trees sum",
        "ddp hides gradients behind the backward but for the embeddings'",
        "fsdp and hsdp hide a block's weights and gradients behind its neighbour's computing",
        "no stragglers, no contention for network or memory, data always there, saves and evaluations not counted",
    ]
    if memory is not None:
        out.append(f"-: more than 90% of {memory} GB")
    return out


def table(cfgs: dict[str, TrainConfig], links: Links, flops_per_s: float, memory: int | None = None) -> list[str]:
    """`figures` in percent, and what they rest on."""
    width = 7 * len(GPUS)
    gpus = "".join(f"{n:>7,}" for n in GPUS)
    out = [f"  {'':<22}{'same batch a GPU':^{width}}   |{'same global batch':^{width}}"]
    out.append(f"  {'':<22}{gpus}   |{gpus}   GPUs")
    found = figures(cfgs, links, flops_per_s, memory)
    for first in range(0, len(found), 2 * len(GPUS)):
        cells = found[first : first + 2 * len(GPUS)]
        told = [f"{'-':>7}" if c["efficiency"] is None else f"{100 * c['efficiency']:>7.1f}" for c in cells]
        each = "".join(told[: len(GPUS)]) + "   |" + "".join(told[len(GPUS) :])
        out.append(f"  {cells[0]['name']:<15}{cells[0]['parallel']:<7}{each}")
    return out + [f"  assumed: {text}" for text in assumptions(links, flops_per_s, memory)]
