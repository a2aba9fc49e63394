"""Arithmetic of a run, without torch: sizes, parameters, updates, FLOPs, peaks of cards."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import math
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from fourscale.cli import InputError, flag
from fourscale.config import ModelConfig, TrainConfig


@dataclass(frozen=True)
class Parameters:
    """Exact parameter counts of a model, the padded rows of the vocabulary included."""

    decayed: int
    not_decayed: int
    embedding: int  # token and position tables, and the head where it is untied; all of them decayed

    @property
    def total(self) -> int:
        return self.decayed + self.not_decayed


def shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of a filled-in ModelConfig by its name in the model, in the model's order."""
    d, q, kv, f = cfg.d_model, cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim, cfg.d_ff
    gpt2 = cfg.arch == "gpt2"

    def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (width,)} | ({f"{name}.bias": (width,)} if gpt2 else {})

    def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if gpt2 else {})

    block = norm("attn_norm", d) | linear("attn.qkv", q + 2 * kv, d) | linear("attn.out", d, q)
    if cfg.qk_norm:
        block |= norm("attn.q_norm", cfg.head_dim) | norm("attn.k_norm", cfg.head_dim)
    block |= norm("mlp_norm", d) | linear("mlp.up", f, d)
    block |= ({} if gpt2 else linear("mlp.gate", f, d)) | linear("mlp.down", d, f)
    out: dict[str, tuple[int, ...]] = {"wte.weight": (cfg.padded_vocab, d)}
    out |= {"wpe.weight": (cfg.ctx, d)} if gpt2 else {}
    for i in range(cfg.n_layers):
        out |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return out | norm("norm", d) | ({} if cfg.tie else {"head.weight": (cfg.padded_vocab, d)})


def count_parameters(cfg: ModelConfig) -> Parameters:
    """Parameters of a filled-in ModelConfig: matrices are decayed, vectors (norms, biases) are not."""
    sizes = {name: (math.prod(shape), len(shape) > 1) for name, shape in shapes(cfg).items()}
    return Parameters(
        decayed=sum(n for n, matrix in sizes.values() if matrix),
        not_decayed=sum(n for n, matrix in sizes.values() if not matrix),
        embedding=sum(sizes[name][0] for name in ("wte.weight", "wpe.weight", "head.weight") if name in sizes),
    )


def heads_for(d_model: int, n_kv_heads: int) -> int:
    """Query heads for a width: the most, none under 64 wide, that divide it and share the key/value heads evenly."""
    most = max(1, d_model // 64)
    return next((h for h in range(most, 0, -1) if d_model % h == 0 and h % n_kv_heads == 0), most)


def size_model(cfg: ModelConfig, vocab_size: int, device_type: str) -> ModelConfig:
    """Fill in what the user left open: GPT-2 124M on a GPU, about 10M parameters on a CPU. Raises InputError.

    On a CPU the width is the widest of 384, 320, 256, 192 whose model stays under 12.5M parameters.
    """
    if cfg.vocab_size is not None and cfg.vocab_size < vocab_size:
        raise InputError(f"--vocab-size {cfg.vocab_size}: the data's tokenizer has {vocab_size} ids; raise or omit it")
    small = device_type == "cpu"

    def filled(d_model: int) -> ModelConfig:
        n_heads = cfg.n_heads or heads_for(d_model, cfg.n_kv_heads or 1)
        d_ff = 4 * d_model if cfg.arch == "gpt2" else -(-8 * d_model // (3 * 64)) * 64
        full = dataclasses.replace(
            cfg,
            d_model=d_model,
            n_layers=cfg.n_layers or (6 if small else 12),
            n_heads=n_heads,
            n_kv_heads=cfg.n_kv_heads or n_heads,
            d_ff=cfg.d_ff or d_ff,
            ctx=cfg.ctx or (256 if small else 1024),
            vocab_size=cfg.vocab_size or vocab_size,
        )
        full.check()
        return full

    if cfg.d_model is not None:
        return filled(cfg.d_model)
    if not small:
        return filled(768)
    if cfg.n_heads:  # widths that the asked heads divide
        return filled(max(1, 320 // (2 * cfg.n_heads)) * 2 * cfg.n_heads)
    widths = [w for w in (384, 320, 256, 192) if heads_for(w, cfg.n_kv_heads or 1) % (cfg.n_kv_heads or 1) == 0]
    fits = [w for w in widths if count_parameters(filled(w)).total <= 12_500_000]
    return filled((fits or widths[-1:] or [192])[0])


def updates_for(tokens: int, tokens_per_update: int) -> tuple[int, int]:
    """(updates, tokens of the last one) for an exact budget: 2e9 at 262,144 is (7630, 103424)."""
    updates = -(-tokens // tokens_per_update)
    return updates, tokens - (updates - 1) * tokens_per_update


@dataclass(frozen=True)
class Origin:
    """The clock at which a run begins: zeros, or the checkpoint's that --branch-from names."""

    update: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """A TrainConfig with nothing left open, and what follows from it for the ranks there are."""

    cfg: TrainConfig
    updates: int  # of the whole run, the origin's among them; so is the budget
    token_budget: int  # supervised tokens
    tokens_per_update: int
    origin: Origin = Origin()

    def samples(self, i: int) -> int:
        """Samples read before update i (zero-based)."""
        return self.origin.samples + (i - self.origin.update) * self.cfg.global_bsz

    def tokens(self, i: int) -> int:
        """Supervised tokens before update i."""
        return min(self.token_budget, self.origin.tokens + (i - self.origin.update) * self.tokens_per_update)

    def training_table(self) -> dict[str, int | float | str]:
        """What changes the experiment beside model, tokenizer and data: part of the run's contract."""
        c = self.cfg
        names = (
            "global_bsz",
            "lr",
            "min_lr",
            "warmup",
            "schedule",
            "optimizer",
            "weight_decay",
            "beta1",
            "beta2",
            "clip",
            "skip_spikes",
            "skip_limit",
        )
        table = {name: getattr(c, name) for name in (*names, "dtype", "sampling", "seed", "data_seed", "eval_tokens")}
        if c.schedule == "wsd":
            table["decay_fraction"] = c.decay_fraction
        if c.optimizer == "muon" and c.muon_dtype != "fp32":  # fp32 is what a run without the field had
            table["muon_dtype"] = c.muon_dtype
        return table | {"updates": self.updates, "token_budget": self.token_budget}


def plan(
    cfg: TrainConfig,
    vocab_size: int,
    world_size: int,
    device_type: str,
    dtype: str,
    eot_id: int | None = None,
    origin: Origin = Origin(),
) -> Plan:
    """Fill in every derived knob. Raises InputError where flags contradict each other or can't be carried out.

    vocab_size, eot_id: of the data's tokenizer; eot_id is None where that isn't known. cfg.global_bsz wins over
    cfg.grad_accum where a run's contract has fixed it; where both are given they must agree.
    """
    for name in ("local_bsz", "log_every", "skip_limit"):
        if getattr(cfg, name) < 1:
            raise InputError(f"{flag(name)} {getattr(cfg, name)}: must be at least 1")
    counts = ("grad_accum", "global_bsz", "steps", "tokens", "stop_after", "keep", "keep_every", "eval_tokens")
    for name in (*counts, "shard_size", "profile"):
        if getattr(cfg, name) == 0:
            raise InputError(f"{flag(name)} 0: must be at least 1, or left out")
    asked = cfg.model
    if asked.doc_mask and asked.eot_id is None and eot_id is None:
        raise InputError("--doc-mask: the data name no tokenizer, so no end of a document; give its id with --eot-id")
    if asked.doc_mask and None not in (asked.eot_id, eot_id) and asked.eot_id != eot_id:
        raise InputError(f"--eot-id {asked.eot_id}: the data's tokenizer ends documents with id {eot_id}; leave it out")
    # Without --doc-mask the id is inert, so no part of the contract.
    between = (asked.eot_id if asked.eot_id is not None else eot_id) if asked.doc_mask else None
    model = size_model(dataclasses.replace(asked, eot_id=between), vocab_size, device_type)
    rows = world_size * cfg.local_bsz  # of one micro-batch, over all ranks
    global_bsz = cfg.global_bsz or rows * (cfg.grad_accum or 1)
    grad_accum = -(-global_bsz // rows)
    if cfg.grad_accum and cfg.grad_accum != grad_accum:
        raise InputError(
            f"--grad-accum {cfg.grad_accum}: {world_size} ranks x {cfg.local_bsz} windows x {cfg.grad_accum} is not "
            f"the global batch of {global_bsz} windows; leave it out ({grad_accum} follows)"
        )
    if cfg.steps and cfg.tokens:
        raise InputError("--steps and --tokens both set the length of the run; give one")
    per_update = global_bsz * model.ctx
    for name, asked_length, begun in (("steps", cfg.steps, origin.update), ("tokens", cfg.tokens, origin.tokens)):
        if asked_length and asked_length <= begun:
            raise InputError(f"{flag(name)} {asked_length}: the branch begins at {begun:,}; ask for more")
    if cfg.tokens:
        updates = origin.update + updates_for(cfg.tokens - origin.tokens, per_update)[0]
    else:
        updates = cfg.steps or max(2000, origin.update + 1)
    if cfg.muon_dtype != "fp32" and cfg.optimizer != "muon":
        raise InputError(f"--muon-dtype {cfg.muon_dtype}: goes with --optimizer muon, not {cfg.optimizer}")
    if dtype == "fp16" and cfg.optimizer != "adamw":
        raise InputError(f"--dtype fp16: its scaled gradients go with --optimizer adamw, not {cfg.optimizer}; use bf16")
    for name in ("lr", "min_lr", "weight_decay", "clip", "skip_spikes", "ckpt_minutes"):
        value = getattr(cfg, name)
        if value is not None and not 0 <= value < float("inf"):
            raise InputError(f"{flag(name)} {value}: must be a finite number, 0 or more")
    if cfg.ckpt_minutes == 0:
        raise InputError("--ckpt-minutes 0: must be above 0, or left out")
    if cfg.save_best and not cfg.eval_every:
        raise InputError("--save-best: without held-out losses there is no best; leave it out or raise --eval-every")
    if cfg.keep_every and cfg.keep is None:
        raise InputError("--keep-every: goes with --keep N; without it every checkpoint is kept")
    _check_expectations(cfg)
    if cfg.target_loss is not None and not 0 < cfg.target_loss < float("inf"):
        raise InputError(f"--target-loss {cfg.target_loss}: must be above 0, in nats a token")
    if cfg.target_loss is not None and not cfg.eval_every:
        raise InputError("--target-loss: without held-out losses nothing is compared with it; raise --eval-every")
    if cfg.stop_when and cfg.target_loss is None:
        raise InputError(f"--stop-when {cfg.stop_when[0]}: needs the loss to reach; give --target-loss")
    if 0 < cfg.skip_spikes <= 1:
        raise InputError(f"--skip-spikes {cfg.skip_spikes:g}: must be above 1, or every update is one; 0 for none")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(cfg, name) < 1:
            raise InputError(f"{flag(name)} {getattr(cfg, name)}: must be at least 0 and below 1")
    lr = cfg.lr
    if lr is None:  # weights that have been trained would forget at the rate of a beginning
        lr = 3e-5 if cfg.init_from is not None else 1e-3 if model.d_model < 512 else 6e-4
    full = dataclasses.replace(
        cfg,
        model=model,
        global_bsz=global_bsz,
        local_bsz=min(cfg.local_bsz, -(-global_bsz // world_size)),  # beyond a rank's share there are only empty rows
        grad_accum=grad_accum,
        dtype=dtype,
        lr=lr,
        min_lr=cfg.min_lr if cfg.min_lr is not None else lr / 10,
        warmup=cfg.warmup if cfg.warmup is not None else min(100, updates // 10),
        eval_tokens=cfg.eval_tokens or (65_536 if device_type == "cpu" else 1_048_576),
    )
    token_budget = cfg.tokens or origin.tokens + (updates - origin.update) * per_update
    return Plan(full, updates, token_budget, per_update, origin)


def _check_expectations(cfg: TrainConfig) -> None:
    """Raise InputError for what a plan or a run's cost can't be reckoned with."""
    for name in ("peak_tflops", "expect_tokens_per_s", "link_gbyte_s", "node_gbit_s"):
        value = getattr(cfg, name)
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{flag(name)} {value:g}: must be a finite number above 0")
    if cfg.peak_tflops is not None and cfg.peak_tflops > 1e6:
        raise InputError(f"--peak-tflops {cfg.peak_tflops:g}: is in TFLOP/s of one device, as in 312")
    if not 0 < cfg.expect_mfu <= 1:
        raise InputError(f"--expect-mfu {cfg.expect_mfu:g}: is a share of the peak, above 0 and at most 1, as in 0.4")
    if cfg.price is not None:
        price_of(cfg.price)
    if cfg.gpu is not None:
        card_asked(cfg.gpu)


@dataclass(frozen=True)
class Price:
    """Of a device-hour, in whatever currency --price is meant, as it was on a day."""

    per_hour: float
    date: datetime.date


def price_of(text: str) -> Price:
    """--price, as in 2.50@2026-11-30. Raises InputError where the day is missing: prices age."""
    number, at, day = text.partition("@")
    if not at:
        raise InputError(f"--price {text}: prices age; add the day this one was seen, as in {text}@2026-11-30")
    try:
        price = Price(float(number), datetime.date.fromisoformat(day))
    except ValueError:
        raise InputError(
            f"--price {text}: write the price of a device-hour and its day, as in 2.50@2026-11-30"
        ) from None
    if not 0 <= price.per_hour < float("inf"):
        raise InputError(f"--price {text}: must be a finite number, 0 or more")
    if price.date > datetime.date.today() + datetime.timedelta(days=1):  # a day ahead may be a time zone
        raise InputError(f"--price {text}: its day lies ahead; write the day on which the price was seen")
    return price


def shard_size_of(parallel: str, asked: int | None, world: int) -> int:
    """How many ranks share one copy of weights and optimizer. Raises InputError where `asked` doesn't fit."""
    if parallel != "hsdp":
        if asked is not None:
            raise InputError(f"--shard-size {asked}: goes with --parallel hsdp; {parallel} has no choice")
        return world if parallel == "fsdp" else 1
    if asked is None and world > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        raise InputError("--parallel hsdp: the launcher doesn't tell the ranks of a node; give --shard-size")
    size = asked if asked is not None else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if size < 1 or world % size:
        given = f"--shard-size {size}" if asked is not None else f"--parallel hsdp: {size} ranks a node"
        raise InputError(f"{given}: {world} ranks are not a multiple of it; give --shard-size a divisor of {world}")
    return size


SMALL_LOGITS = 8 << 20  # bytes of all logits in fp32, up to which nothing is gained by taking them apart


def head_chunk(tokens: int, rows: int, device_type: str) -> int:
    """How many of `tokens` the head of `rows` rows takes at once: all, or the largest equal part whose fp32 logits stay
    within 1 GiB on CUDA, where a product wants thousands of rows, and within 128 MiB elsewhere; at least 256.

    Equal parts where such a number of them divides the tokens, so that what is compiled sees one shape.
    """
    most = max(256, (1 << 30 if device_type == "cuda" else 128 << 20) // (4 * rows))
    parts = max(1, -(-tokens // most))
    even = next((n for n in range(parts, min(2 * parts, tokens) + 1) if tokens % n == 0), parts)
    return max(1, -(-tokens // even))


# ---- FLOPs ---------------------------------------------------------------------------------------------------------


def flops_per_token(cfg: ModelConfig) -> float:
    """Training FLOPs a token by 6 N, N all parameters (Kaplan et al. 2020, arXiv:2001.08361): MFU counts these."""
    return 6.0 * count_parameters(cfg).total


@dataclass(frozen=True)
class Flops:
    """Training FLOPs a token of each kind of matrix product, forward and backward."""

    blocks: float
    scores: float
    head: float

    @property
    def total(self) -> float:
        return self.blocks + self.scores + self.head


def exact_flops(cfg: ModelConfig) -> Flops:
    """Training FLOPs a token, product by product: 2 a multiplication of a forward, twice that for the backward.

    scores: queries by keys and weights by values, 12 n_layers n_heads head_dim ctx, with the whole ctx x ctx square
    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): a causal kernel that leaves out what is masked does half.
    head: over the padded vocabulary, whether tied or not. Norms, activations and lookups count as nothing.
    """
    matrices = sum(math.prod(s) for name, s in shapes(cfg).items() if name.startswith("blocks.") and len(s) > 1)
    scores = 12.0 * cfg.n_layers * cfg.n_heads * cfg.head_dim * cfg.ctx
    return Flops(6.0 * matrices, scores, 6.0 * cfg.padded_vocab * cfg.d_model)


def with_recomputation(cfg: ModelConfig, act_ckpt: str) -> Flops:
    """`exact_flops` as the device really computes them: --act-ckpt block runs each block's forward twice, but for its
    last product, whose result no gradient needs; selective runs no product twice."""
    flops = exact_flops(cfg)
    if act_ckpt != "block":
        return flops
    down = 2.0 * cfg.n_layers * cfg.d_ff * cfg.d_model
    return Flops(4 / 3 * flops.blocks - down, 4 / 3 * flops.scores, flops.head)


MUON_STEPS = 4
ROUND_BYTES = 64 << 20  # of matrices that a rank orthogonalises at a time, though at least one matrix


def orthogonalising_flops(m: int, n: int, on_gram: bool) -> float:
    """FLOPs of muon.orthogonalise for one X [m, n], m <= n: steps on X itself, or on X X^T [m, m]."""
    if on_gram:
        return 4.0 * m * m * n + (8 * MUON_STEPS - 6) * m**3
    return MUON_STEPS * (4.0 * m * m * n + 2 * m**3)


def muon_flops(cfg: ModelConfig, dtype: str) -> float:
    """FLOPs of an update's orthogonalising of the blocks' matrices by products in --muon-dtype, over all ranks."""
    sides = [sorted(s) for name, s in shapes(cfg).items() if name.startswith("blocks.") and len(s) > 1]
    forms = (False, True) if dtype == "fp32" else (False,)
    return sum(min(orthogonalising_flops(m, n, form) for form in forms) for m, n in sides)


def mfu(tokens_per_s: float, flops_a_token: float, peak: float, devices: int) -> float:
    """Model FLOPs utilisation, 0 to 1: tokens_per_s over all devices, peak in FLOP/s of one (arXiv:2204.02311).

    With 6 N a token, whatever is recomputed: what a model needs, not what a device is kept busy with.
    """
    return tokens_per_s * flops_a_token / (peak * devices)


def tokens_per_s(share: float, flops_a_token: float, peak: float, devices: int) -> float:
    """The rate over all devices that an MFU of `share` means; the inverse of `mfu`."""
    return share * peak * devices / flops_a_token


# ---- cards ---------------------------------------------------------------------------------------------------------


class Card(NamedTuple):
    """Peaks of dense matrix products with fp32 accumulation in TFLOP/s, None where the card has no unit for them, and
    its memory in GB (several where it is sold with several)."""

    bf16: float | None
    fp16: float | None
    memory: tuple[int, ...]


# From the makers' data sheets and white papers. Where these only give the rate with 2:4 sparsity, it is halved.
CARDS = {
    # "NVIDIA Tesla V100 GPU Accelerator" (2018), "V100S PCIe" (2019): fp16 alone
    "V100": Card(None, 125.0, (16, 32)),
    "V100 PCIE": Card(None, 112.0, (16, 32)),
    "V100S": Card(None, 130.0, (32,)),
    "T4": Card(None, 65.0, (16,)),  # "NVIDIA T4" (2018)
    "A100": Card(312.0, 312.0, (40, 80)),  # "NVIDIA A100 Tensor Core GPU" (2020, 2021), PCIe and SXM alike
    "A800": Card(312.0, 312.0, (40, 80)),  # the same with slower NVLink
    "A30": Card(165.0, 165.0, (24,)),  # "NVIDIA A30" (2021)
    "A10": Card(125.0, 125.0, (24,)),  # "NVIDIA A10" (2021)
    "A10G": Card(70.0, 70.0, (24,)),  # "NVIDIA A10G", for AWS G5 (2021)
    "A40": Card(149.7, 149.7, (48,)),  # "NVIDIA A40" (2020)
    "A6000": Card(154.8, 154.8, (48,)),  # "NVIDIA Ampere GA102 GPU Architecture", v2 (2021), RTX A6000
    "RTX 3090": Card(71.0, 71.0, (24,)),  # the same paper, appendix A: with fp16 accumulation it would be twice that
    "RTX 3090 TI": Card(80.0, 80.0, (24,)),
    "H100": Card(989.0, 989.0, (80,)),  # "NVIDIA H100 Tensor Core GPU" (2023), SXM: 1,979 with sparsity
    "H100 PCIE": Card(756.0, 756.0, (80,)),
    "H100 NVL": Card(835.0, 835.0, (94,)),
    "H800": Card(989.0, 989.0, (80,)),  # as H100 SXM, with slower NVLink
    "H800 PCIE": Card(756.0, 756.0, (80,)),
    "H200": Card(989.0, 989.0, (141,)),  # "NVIDIA H200 Tensor Core GPU" (2024), SXM
    "H200 NVL": Card(835.0, 835.0, (141,)),
    "GH200": Card(989.0, 989.0, (96, 144)),  # "NVIDIA GH200 Grace Hopper Superchip" (2023)
    "L4": Card(121.0, 121.0, (24,)),  # "NVIDIA L4" (2023): 242 with sparsity
    "L40": Card(181.0, 181.0, (48,)),  # "NVIDIA L40" (2022)
    "L40S": Card(362.0, 362.0, (48,)),  # "NVIDIA L40S" (2023)
    "RTX 4090": Card(165.2, 165.2, (24,)),  # "NVIDIA Ada GPU Architecture", v2 (2023), appendix A
    "RTX 6000 ADA": Card(364.2, 364.2, (48,)),  # "NVIDIA RTX 6000 Ada Generation" (2023): 1,457 in fp8 with sparsity
    "RTX 5090": Card(209.5, 209.5, (32,)),  # "NVIDIA RTX Blackwell GPU Architecture" (2025), appendix
    "B200": Card(2250.0, 2250.0, (180,)),  # "NVIDIA Blackwell" (2025), HGX B200: 4,500 with sparsity
    "GB200": Card(2500.0, 2500.0, (186,)),  # the same, GB200 NVL72
    # "AMD Instinct MI200" (2022), a half of the two dies: each is a device
    "MI250X": Card(191.5, 191.5, (64,)),
    "MI250": Card(181.0, 181.0, (64,)),
    "MI300X": Card(1307.4, 1307.4, (192,)),  # "AMD Instinct MI300X" (2023)
    "MI325X": Card(1307.4, 1307.4, (256,)),  # "AMD Instinct MI325X" (2024)
}

# A part of a card, or another card under a similar name.
OTHERS = {"LAPTOP", "MOBILE", "MAX", "MIG", "D"}


def card_of(device_name: str) -> str | None:
    """The key of CARDS for a device's own name, as in 'NVIDIA A100-SXM4-80GB'; None where it has none."""
    words = set(re.split(r"[\s/-]+", device_name.upper()))
    hits = [name for name in CARDS if set(name.split()) <= words]
    return max(hits, key=len) if hits and not words & OTHERS else None


def card_asked(name: str) -> str:
    """The key of CARDS for --gpu, in a person's spelling: h100, rtx4090, '4090', 'H100 SXM'. Raises InputError."""
    bare = {re.sub(r"\W", "", key): key for key in CARDS}
    typed = re.sub(r"\W", "", name.upper())
    found = card_of(name) or bare.get(typed) or bare.get(f"RTX{typed}")
    if found is None:
        near = [bare[b] for b in difflib.get_close_matches(typed, bare, n=4, cutoff=0.5)]
        raise InputError(
            f"--gpu {name}: not in the table of cards; {'nearest are' if near else 'it has'} "
            f"{', '.join(near or CARDS)}; or give the card's --peak-tflops"
        )
    return found


def peak_flops(device_name: str, dtype: str, tflops: float | None = None) -> float | None:
    """Peak FLOP/s of a card for dense matrix products in `dtype`, or None where it is unknown (fp32 always is: it
    depends on whether TF32 is allowed). tflops: --peak-tflops, which wins over the table."""
    if tflops is not None:
        return tflops * 1e12
    name = card_of(device_name)
    peak = None if name is None or dtype not in ("bf16", "fp16") else getattr(CARDS[name], dtype)
    return None if peak is None else peak * 1e12
