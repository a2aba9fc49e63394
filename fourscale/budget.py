"""Arithmetic of a run, without torch: sizes, parameters, updates, FLOPs, peaks of cards."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

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


def count_parameters(cfg: ModelConfig) -> Parameters:
    """Parameters of a filled-in ModelConfig: matrices are decayed, vectors (norms, biases) are not."""
    d, q, kv = cfg.d_model, cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    embedding = cfg.padded_vocab * d * (1 if cfg.tie else 2)
    attention = d * (q + 2 * kv) + q * d
    if cfg.arch == "gpt2":
        embedding += cfg.ctx * d
        matrices = attention + 2 * d * cfg.d_ff
        vectors = (d + 2 * kv) + d + cfg.d_ff + d + 2 * 2 * d  # biases, then two LayerNorms
        final = 2 * d
    else:
        matrices = attention + 3 * d * cfg.d_ff
        vectors = 2 * d + (2 * cfg.head_dim if cfg.qk_norm else 0)
        final = d
    return Parameters(embedding + cfg.n_layers * matrices, cfg.n_layers * vectors + final, embedding)


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
    for name in (*counts, "shard_size"):
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
        grad_accum=grad_accum,
        dtype=dtype,
        lr=lr,
        min_lr=cfg.min_lr if cfg.min_lr is not None else lr / 10,
        warmup=cfg.warmup if cfg.warmup is not None else min(100, updates // 10),
        eval_tokens=cfg.eval_tokens or (65_536 if device_type == "cpu" else 1_048_576),
    )
    token_budget = cfg.tokens or origin.tokens + (updates - origin.update) * per_update
    return Plan(full, updates, token_budget, per_update, origin)


def flops_per_token(cfg: ModelConfig) -> float:
    """Training FLOPs a token by 6 N, N all parameters (Kaplan et al. 2020, arXiv:2001.08361): MFU counts these."""
    return 6.0 * count_parameters(cfg).total


# Dense bf16 tensor-core peaks in TFLOP/s with fp32 accumulation, from NVIDIA's data sheets and white papers.
# The longest name that occurs in the device's name counts.
PEAK_TFLOPS = {
    "A100": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A6000": 154.8,
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "L4": 121.0,
    "L40S": 362.0,
    "L40": 181.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a card for bf16 matrix products, or None where it is unknown (other dtypes included)."""
    if dtype != "bf16":
        return None
    words = device_name.replace("-", " ").split()
    hits = [k for k in PEAK_TFLOPS if all(w in words for w in k.split())]
    return PEAK_TFLOPS[max(hits, key=len)] * 1e12 if hits else None
