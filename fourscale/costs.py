"""What a run takes of memory, disk, wire, time and money, from its plan. Imports no torch."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from dataclasses import dataclass

from fourscale.budget import ROUND_BYTES, SMALL_LOGITS, Plan, head_chunk, shapes
from fourscale.config import ModelConfig, TrainConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Measured: torch.save's record of a tensor, and its entries in the checkpoint's metadata.
RECORD_BYTES = 1_800
METRICS_ROW_BYTES = 560  # of metrics.jsonl


@dataclass(frozen=True)
class Layout:
    """How `world` ranks hold a model: each of `shards` ranks a share of one copy (1 under ddp, all under fsdp)."""

    parallel: str
    world: int
    shards: int

    @property
    def copies(self) -> int:
        return self.world // self.shards

    @property
    def sharded(self) -> bool:
        return self.parallel != "ddp"

    def held(self, shape: tuple[int, ...]) -> int:
        """Numbers of a tensor on the rank that holds most: FSDP cuts the first dimension into equal chunks, the last
        of them padded."""
        return -(-shape[0] // self.shards) * math.prod(shape[1:])


# ---- memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds most. Weights, gradients and optimizer are exact, the others estimates."""

    weights: int
    gradients: int
    optimizer: int
    accumulated: int  # gradients beside these while micro-batches add up
    copies: int  # of weights in 16 bits, which products under autocast are made with
    gathered: int  # whole parameters that are used at a moment, under fsdp and hsdp
    activations: int  # that a micro-batch keeps for its backward, up to the head
    logits: int  # a chunk's logits, and what the head computes beside them: losses, gradients
    peak: int  # most at one time: not the sum, since gradients come as activations go

    @property
    def lasting(self) -> int:
        """What is there between updates too, with the gradients."""
        return self.weights + self.gradients + self.optimizer


def optimizer_numbers(name: str, shape: tuple[int, ...], optimizer: str) -> int:
    """Numbers of state a parameter's number: AdamW's two means, or Muon's one on the matrices of the blocks."""
    return 1 if optimizer == "muon" and name.startswith("blocks.") and len(shape) > 1 else 2


def memory(cfg: TrainConfig, layout: Layout, device_type: str) -> Memory:
    """Memory a rank of a filled-in TrainConfig, for `layout` whatever cfg.parallel is.

    Not in it: the CUDA context and NCCL's buffers (about 1 GiB a GPU), what the allocator can't use again, a
    --compile that fuses (it needs less), and the copy of a checkpoint that is being written (host memory).
    """
    model, wide = cfg.model, BYTES[cfg.dtype]
    tensors = shapes(model)
    weights = 4 * sum(layout.held(shape) for shape in tensors.values())
    optimizer = sum(
        4 * layout.held(shape) * (states := optimizer_numbers(name, shape, cfg.optimizer)) + (4 if states == 2 else 0)
        for name, shape in tensors.items()
    )
    whole = 4 * sum(math.prod(shape) for shape in tensors.values())
    accumulates, gradients = cfg.grad_accum > 1, weights
    accumulated = 0
    if accumulates and layout.sharded and cfg.grad_sync == "last":
        accumulated = whole - weights
    elif accumulates and not layout.sharded and layout.world > 1 and cfg.grad_sync != "every":
        accumulated = weights  # what no_sync adds up lies beside DDP's buckets, until the last backward moves it there
    # Those that are there when a backward begins; DDP's buckets are made once.
    before = gradients if accumulates or (layout.world > 1 and not layout.sharded) else 0
    matrices = {n: math.prod(s) for n, s in tensors.items() if n.startswith("blocks.") and len(s) > 1}
    head = model.padded_vocab * model.d_model
    block = sum(math.prod(s) for n, s in tensors.items() if n.startswith("blocks.0."))
    root = whole // 4 - model.n_layers * block
    copies = kept_copies = 0
    if wide == 2:
        copies = 2 * (head + (0 if layout.sharded else sum(matrices.values())))
        kept_copies = copies if cfg.act_ckpt == "none" else 2 * head
    # FSDP gathers the embedding and the head once a micro-batch; of blocks, one is used while the next one comes.
    gathered = 4 * root + 2 * wide * block if layout.sharded else 0
    tokens = cfg.local_bsz * model.ctx
    each, inner, outer = block_activations(model, cfg.dtype, cfg.act_ckpt, device_type)
    activations = tokens * (model.n_layers * each + outer) + document_mask_bytes(model, cfg, device_type)
    root_now = 4 * root if layout.sharded else 0
    if 4 * tokens * model.padded_vocab <= SMALL_LOGITS:  # all at once: logits, softmax, and the gradient in a backward
        logits = 12 * tokens * model.vocab_size
        at_head = max(copies + 8 * tokens * model.vocab_size, kept_copies + logits)
    elif cfg.dtype == "fp16":  # a chunk's backward: those three, gradients of the head so far and of the chunk
        logits = 14 * head_chunk(tokens, model.padded_vocab, device_type) * model.padded_vocab + 10 * head
        at_head = kept_copies + logits
    else:  # a chunk's logits in each dtype, the head's gradient with a product of it, the input and its gradient
        logits = (4 if wide == 4 else 6) * head_chunk(tokens, model.padded_vocab, device_type) * model.padded_vocab
        logits += (4 if wide == 4 else 6) * head + (8 - wide) * tokens * model.d_model
        at_head = copies + logits
        kept_copies -= 2 * head if wide == 2 else 0
    at_loss = before + activations + root_now + at_head
    # In the backward of the first block, all gradients but its own are there.
    moving = tokens * (inner + 2 * wide * model.d_ff + 4 * model.d_model)
    whole_now = 2 * root_now + (3 * wide + 4) * block if layout.sharded else kept_copies
    in_block = gradients + moving + whole_now
    at_end = gradients + 3 * root_now  # the root's gradients, and what is sent of them
    stepping = gradients + (muon_round(model, layout) if cfg.optimizer == "muon" else 0)
    peak = weights + optimizer + accumulated + max(at_loss, in_block, at_end, stepping)
    return Memory(weights, gradients, optimizer, accumulated, copies, gathered, activations, logits, peak)


def muon_round(cfg: ModelConfig, layout: Layout) -> int:
    """Bytes beside weights, gradients and momentum while a rank orthogonalises its matrices of a round, at most."""
    hidden = Counter(tuple(s) for n, s in shapes(cfg).items() if n.startswith("blocks.") and len(s) > 1)
    most = 0
    for shape, count in hidden.items():
        m, n = sorted(shape)
        own = min(-(-count // layout.world), max(1, ROUND_BYTES // (4 * m * n)))
        exchanged = 2 * m * n if layout.sharded else 0
        told = min(ROUND_BYTES, 4 * count * layout.held(shape)) if layout.copies > 1 else 0
        most = max(most, 4 * own * (3 * m * n + 4 * m * m + exchanged) + told)  # X thrice, X X^T four times
    return most


def block_activations(cfg: ModelConfig, dtype: str, act_ckpt: str, device_type: str) -> tuple[int, int, int]:
    """Bytes a token that are kept for the backward: (by a block between forward and backward, by a block while its own
    backward runs, by embedding and final norm).

    What autograd keeps of each operation of model.py: the fp32 residual stream, inputs of products in the dtype of
    autocast, queries, keys, values and result of attention, which never holds ctx x ctx scores.
    """
    d, f, e = cfg.d_model, cfg.d_ff, BYTES[dtype]
    q, kv, modern = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim, cfg.arch == "modern"
    cpu = device_type == "cpu"
    norm = 4 * d + (
        4 + (4 * d if cpu else 0) if modern else 8
    )  # its input and statistics; RMSNorm on a CPU: its result
    attention = e * d + e * (q + 2 * kv) + e * q + 4 * cfg.n_heads
    if cpu and cfg.dropout == 0 and cfg.ctx < 256 and not cfg.doc_mask:  # all of it in fp32: model.attend_causal
        attention += (4 - e) * (q + 2 * kv) + (4 if e < 4 else 0) * q
    if modern:
        attention += e * (q + kv)  # queries and keys after rotation
    if cfg.qk_norm:
        attention += 4 * (cfg.n_heads + cfg.n_kv_heads) + (4 if cpu else 0) * (q + kv) + (0 if e == 4 else 4 * (q + kv))
    if cfg.doc_mask and kv != q and cpu:
        attention += 2 * e * q  # keys and values, repeated for each query head
    mlp = e * d + 2 * e * f
    if modern:
        mlp = (1 if e == 4 else 2) * e * d + 4 * e * f
    dropout = 0
    if cfg.dropout > 0:
        dropout = 2 * (e if cpu else 1) * d  # masks of the two branches
        if cpu:  # attention is computed step by step: its weights, their mask and the product of both
            attention += 12 * cfg.n_heads * cfg.ctx
    every = 2 * norm + attention + mlp + dropout
    outer = norm + e * d + (4 * d if cfg.dropout > 0 and cpu else 0)
    if act_ckpt == "block":
        return 4 * d, every, outer
    if act_ckpt == "selective":
        products = e * (q + 2 * kv) + 2 * e * d + e * f * (2 if modern else 1)
        kept = e * q + 4 * cfg.n_heads
        if cfg.dropout > 0:  # attention is computed again, but on a CPU its products are kept
            kept = e * q + e * cfg.n_heads * cfg.ctx if cpu else 0
        return 4 * d + products + kept, every, outer
    return every, every, outer


def document_mask_bytes(model: ModelConfig, cfg: TrainConfig, device_type: str) -> int:
    """Bytes of --doc-mask's dense mask, [local_bsz, 1, ctx, ctx]; flex_attention on CUDA needs none to speak of."""
    if not model.doc_mask or (device_type == "cuda" and model.dropout == 0):
        return 0
    return cfg.local_bsz * model.ctx * model.ctx * BYTES[cfg.dtype]


# ---- disk ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disk:
    """What a run's directory comes to: bytes of a checkpoint, how many are kept at the end, and bytes at the most."""

    weights: int
    optimizer: int
    checkpoint: int  # with the files' own overhead
    saved: int  # over the run
    kept: int
    kept_bytes: int
    most_bytes: int  # while one more is being written
    metrics: int


def disk(plan: Plan, minutes: float | None = None) -> Disk:
    """Disk over a run. minutes: of the whole run, for --ckpt-minutes; where that is unknown they count as none.

    --save-best may save at every evaluation: counted as if each were the best so far.
    """
    cfg, first, last = plan.cfg, plan.origin.update, plan.updates
    tensors = shapes(cfg.model)
    states = {n: optimizer_numbers(n, s, cfg.optimizer) for n, s in tensors.items()}
    weights = 4 * sum(math.prod(s) for s in tensors.values())
    optimizer = sum(4 * math.prod(s) * states[n] + (4 if states[n] == 2 else 0) for n, s in tensors.items())
    records = sum(2 if k == 1 else 4 for k in states.values())  # a weight, its means and AdamW's count of steps
    size = weights + optimizer + RECORD_BYTES * records
    every = [n for n in (cfg.ckpt_every, cfg.eval_every if cfg.save_best else 0) if n]

    def due_after(update: int) -> int:  # the last update among them
        return 1 + _count(every, update, last - 1)

    saved = due = due_after(first)
    if cfg.ckpt_minutes and minutes:
        saved = min(last - first, saved + int(minutes / cfg.ckpt_minutes))
    kept = saved
    if cfg.keep is not None and (newest := max(1, cfg.keep)) < saved:
        back = last - 1  # with --ckpt-minutes, updates at which it saves lie anywhere
        if saved == due:  # that which has so many behind it; counted, not listed: a run may be long
            back = first + bisect.bisect(range(first, last), -newest, key=lambda u: -due_after(u)) - 1
        lasting = _count([math.lcm(n, cfg.keep_every) for n in every], first, back) if cfg.keep_every else 0
        best = 1 if cfg.eval_every and newest + lasting < saved else 0  # it may lie among the others
        kept = min(saved, newest + lasting + best)
    metrics = METRICS_ROW_BYTES * (last - first)
    most = (kept + 1 if kept < saved else kept) * size
    return Disk(weights, optimizer, size, saved, kept, kept * size, most, metrics)


def _count(every: list[int], first: int, last: int) -> int:
    """How many updates above first and up to last are multiples of one of `every`, which holds up to two."""

    def of(n: int) -> int:
        return last // n - first // n

    return sum(map(of, every)) - (of(math.lcm(*every)) if len(every) == 2 else 0)


def multiples(every: int | None, first: int, last: int) -> range:
    """Multiples of `every` above first and up to last; none for 0 or None."""
    return range((first // every + 1) * every, last + 1, every) if every else range(0)


# ---- wire ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """Bytes that a rank sends in an update, or a node to others, by rings (Patarasuk and Yuan 2009): within a copy's
    group of ranks, and between groups. Under ddp, where each rank is a copy, all goes between."""

    gather: int  # weights, in each micro-batch: all blocks twice, embedding and head once
    scatter: int  # gradients
    reduce: int  # gradients, between copies
    muon: int  # rows of the blocks' matrices to their owner, its results back, and those of other copies

    @property
    def total(self) -> int:
        return self.gather + self.scatter + self.reduce + self.muon


@dataclass(frozen=True)
class Edges:
    """Edges of rings, in order of rank: those that a rank has, or those that leave a node, on average."""

    within: float = 1.0  # of the ring of ranks that share a copy
    between: float = 1.0  # of rings of ranks with the same share of it


def leaving(layout: Layout, node: int) -> Edges:
    """Edges that leave a node of `node` ranks: each node a ring passes through, it leaves once."""
    nodes, shards = -(-layout.world // node), layout.shards
    if nodes == 1:
        return Edges(0, 0)
    between = min(shards, node) if layout.copies > 1 else 0
    if shards % node == 0 or node % shards == 0:
        return Edges(1 if shards > node else 0, between)
    period = math.lcm(shards, node)  # groups that begin and end within nodes
    spans = [(k + shards - 1) // node - k // node + 1 for k in range(0, period, shards)]
    return Edges(sum(n for n in spans if n > 1) / (period // node), between)


def exchanged(layout: Layout, node: int) -> float:
    """What leaves a node of `node` ranks where each rank deals out something to its group, in such somethings."""
    groups = range(0, layout.world, layout.shards)
    nodes = [Counter(rank // node for rank in range(first, first + layout.shards)).values() for first in groups]
    crossing = sum(layout.shards**2 - sum(n * n for n in there) for there in nodes)
    return crossing / layout.shards / (layout.world / node)


def wire(cfg: TrainConfig, layout: Layout, node: int | None = None) -> Wire:
    """Bytes on the wire an update of a filled-in TrainConfig, for `layout` whatever cfg.parallel is: that a rank sends,
    or with `node`, that a node of so many ranks sends to other nodes.

    All-reduce of n bytes over W ranks: 2 (W - 1) / W n a rank; all-gather, reduce-scatter and, of n bytes that a rank
    has for all, an exchange of each with each: (W - 1) / W n. What the ranks tell each other beside (a message an
    update, the gradients' norm) is less.
    gloo has no reduce-scatter: torch makes it an all-reduce, which sends `scatter` twice.
    """
    edges = Edges() if node is None else leaving(layout, node)
    tensors = shapes(cfg.model)
    group, copies = layout.shards, layout.copies
    inside, between = (group - 1) / group, 2 * (copies - 1) / copies
    whole = 4 * sum(math.prod(s) for s in tensors.values())
    blocks = sum(layout.held(s) * group for n, s in tensors.items() if n.startswith("blocks."))
    root = sum(layout.held(s) * group for n, s in tensors.items() if not n.startswith("blocks."))
    micro = cfg.grad_accum
    gather = scatter = 0.0
    if layout.sharded:
        gather = micro * inside * (2 * BYTES[cfg.dtype] * blocks + 4 * root)
        scatter = (1 if cfg.grad_sync == "last" else micro) * inside * 4 * (blocks + root)
        held = 4 * (blocks + root) / group
    else:
        held = whole
    reduce = (micro if cfg.grad_sync == "every" else 1) * between * held
    muon = 0.0
    if cfg.optimizer == "muon":
        away = inside if node is None else exchanged(layout, node)
        for shape, count in Counter(s for n, s in tensors.items() if n.startswith("blocks.") and len(s) > 1).items():
            told = min(-(-count // copies) * copies, 2 * count)  # gathered with padding, or summed: muon.of_copies
            moved = 2 * count / copies * away + (copies - 1) / copies * told * edges.between
            muon += 4 * layout.held(shape) * moved
    return Wire(round(gather * edges.within), round(scatter * edges.within), round(reduce * edges.between), round(muon))


# ---- time and money ------------------------------------------------------------------------------------------------


def hours(tokens: float, tokens_per_s: float) -> float:
    """Hours that `tokens` take: 2e9 at 24,000 a second are 23.148."""
    return tokens / tokens_per_s / 3600


def money(device_hours: float, per_hour: float) -> float:
    """What device-hours cost: 23.148 at 1.10 are 25.46."""
    return device_hours * per_hour
