"""Every knob of a run and its model once, as dataclasses behind train.py's flags. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fourscale.cli import (
    Count,
    InputError,
    MaybeCount,
    MaybeFloat,
    MaybeText,
    Texts,
    flag,
    from_toml,
    parse,
)


def padded(vocab_size: int) -> int:
    """Rows of an embedding for `vocab_size` ids: the next multiple of 64. The rows beyond the vocabulary are masked."""
    return -(-vocab_size // 64) * 64


Stops = Annotated[
    tuple[Literal["reached", "hopeless", "never"], ...], tyro.conf.UseAppendAction, tyro.conf.arg(help_behavior_hint="")
]
Trackers = Annotated[
    tuple[Literal["wandb", "tensorboard", "none"], ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(help_behavior_hint=""),
]

# ---- the knobs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape. What is left out follows from the device and the vocabulary."""

    arch: Literal["gpt2", "modern"] = "gpt2"
    """gpt2: learned positions, LayerNorm, GELU, biases. modern: RoPE, RMSNorm, SwiGLU, grouped-query attention."""
    d_model: Annotated[MaybeCount, tyro.conf.arg(aliases=["--d"], help_behavior_hint="")] = None
    """width (default: 768 on a GPU; on a CPU the widest of 384, 320, 256, 192 that stays near 10M parameters)"""
    n_layers: MaybeCount = None
    """depth (default: 12 on a GPU, 6 on a CPU)"""
    n_heads: Annotated[MaybeCount, tyro.conf.arg(aliases=["--h"], help_behavior_hint="")] = None
    """query heads (default: d_model / 64)"""
    n_kv_heads: MaybeCount = None
    """key and value heads, modern only; must divide n_heads (default: n_heads)"""
    d_ff: MaybeCount = None
    """hidden width of the MLP (default: 4 * d_model; modern: 8/3 * d_model, rounded up to a multiple of 64)"""
    ctx: MaybeCount = None
    """context length in tokens (default: 1024 on a GPU, 256 on a CPU)"""
    vocab_size: MaybeCount = None
    """ids of the tokenizer (default: the data's); embedding rows are padded to a multiple of 64 and masked"""
    tie: bool = True
    """share the embedding with the output head"""
    qk_norm: bool = False
    """RMSNorm on queries and keys of each head (modern only)"""
    d_head: MaybeCount = None
    """width of a head (modern only; default: d_model / n_heads)"""
    dropout: float = 0.0
    """on embeddings, attention and residual branches"""
    rope_theta: float = 10_000.0
    """base of the rotary frequencies (modern only)"""
    rope_scaling: MaybeText = None
    """stretch of the rotary frequencies (modern only): linear:FACTOR, or llama3:FACTOR,LOW,HIGH,CTX as Llama 3.1 has it
    (default: none)"""
    norm_eps: float = 1e-5
    """epsilon of every norm"""
    doc_mask: bool = False
    """keep attention and positions within documents; an end-of-text token opens the next one"""
    eot_id: MaybeCount = None
    """id of the token between documents, for --doc-mask, where the data name no tokenizer"""

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""
        return padded(self.vocab_size)

    @property
    def head_dim(self) -> int:
        return self.d_head or self.d_model // self.n_heads

    def rope_stretch(self) -> tuple[str, tuple[float, ...]] | None:
        """rope_scaling's kind and numbers. Raises InputError where it is written otherwise."""
        if self.rope_scaling is None:
            return None
        kind, _, rest = self.rope_scaling.partition(":")
        try:
            numbers = tuple(float(x) for x in rest.split(","))
        except ValueError:
            numbers = ()
        if len(numbers) != {"linear": 1, "llama3": 4}.get(kind) or not all(0 < x < float("inf") for x in numbers):
            raise InputError(
                f"--rope-scaling {self.rope_scaling}: write linear:FACTOR, or llama3:FACTOR,LOW,HIGH,CTX as in "
                "llama3:32,1,4,8192"
            )
        if kind == "llama3" and numbers[1] >= numbers[2]:
            raise InputError(f"--rope-scaling {self.rope_scaling}: LOW must be below HIGH, as in llama3:32,1,4,8192")
        return kind, numbers

    def check(self) -> None:
        """Raise InputError where the (filled-in) shape is impossible."""
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "ctx", "vocab_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{flag(name)} {getattr(self, name)}: must be at least 1")
        if self.n_layers > 10_000:  # each is listed by name wherever a model is counted
            raise InputError(f"--n-layers {self.n_layers}: must be at most 10,000")
        if self.d_head is None and self.d_model % self.n_heads:
            raise InputError(f"--n-heads {self.n_heads} does not divide --d-model {self.d_model}; choose a divisor")
        if self.n_heads % self.n_kv_heads:
            raise InputError(
                f"--n-kv-heads {self.n_kv_heads} does not divide --n-heads {self.n_heads}; choose a divisor"
            )
        if self.arch == "gpt2" and self.n_kv_heads != self.n_heads:
            raise InputError(
                f"--n-kv-heads {self.n_kv_heads}: gpt2 has one per query head ({self.n_heads}); use --arch modern"
            )
        if self.d_head is not None and (self.d_head < 1 or self.arch == "gpt2"):
            why = "must be at least 1" if self.d_head < 1 else "gpt2 has d_model / n_heads; use --arch modern"
            raise InputError(f"--d-head {self.d_head}: {why}")
        if self.rope_stretch() and self.arch == "gpt2":
            raise InputError(f"--rope-scaling {self.rope_scaling}: gpt2 has learned positions; use --arch modern")
        if self.arch == "gpt2" and self.qk_norm:
            raise InputError("--qk-norm: gpt2 has no query/key norm; use --arch modern")
        if self.arch == "modern" and self.head_dim % 2:
            raise InputError(
                f"--n-heads {self.n_heads}: RoPE needs an even head width, it is {self.head_dim}; choose others"
            )
        if not 0 <= self.dropout < 1:
            raise InputError(f"--dropout {self.dropout}: must be at least 0 and below 1")
        if self.doc_mask and self.eot_id is None:
            raise InputError("--doc-mask: no end-of-text token is known; name the id between documents by --eot-id")
        if self.doc_mask and not 0 <= self.eot_id < self.vocab_size:
            raise InputError(f"--eot-id {self.eot_id}: --doc-mask needs an id below the vocabulary's {self.vocab_size}")


@dataclass
class TrainConfig:
    """Train a language model: the same command on a laptop, one GPU, a node and a cluster (launch with torchrun)."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)

    data: Texts = ("./data",)
    """directory written by prepare.py, or shards of nanoGPT, llm.c or datatrove; repeat it to mix several by share of
    samples, as in --data a:0.7 --data b:0.3"""
    val_data: MaybeText = None
    """held-out shards, where --data has foreign ones whose names don't tell train from val"""
    data_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """of headerless shards without a manifest, such as nanoGPT's train.bin"""
    tokenizer: MaybeText = None
    """of shards without a manifest: gpt2, another tiktoken name, a tokenizer.json, byte"""
    verify_data: Literal["background", "first", "off"] = "background"
    """compare the shards' hashes with the manifest while training goes on, before it begins, or not at all"""
    ckpt_dir: Path = Path("./ckpt")
    """run directory: contract, metrics, checkpoints, receipt"""
    config: Path | None = None
    """TOML file of flags; flags on the command line win over it"""
    resume: Literal["never", "auto", "must"] = "never"
    """never: a fresh directory is required. auto: go on where there is a checkpoint, else start. must: go on or fail"""
    resume_step: MaybeCount = None
    """go on from this checkpoint instead of the newest; later ones are set aside as discarded-step_N"""
    branch_from: Path | None = None
    """start a new run from this checkpoint's weights, optimizer and clock; what differs is recorded in run.json"""
    init_from: MaybeText = None
    """start a new run from these weights alone, with their model: a checkpoint, a Hugging Face directory or hub name"""
    stop_after: MaybeCount = None
    """save and stop after this update; the schedule stays that of the whole run"""

    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """ddp: a whole copy per rank. fsdp: weights, gradients and optimizer sharded over all ranks (FULL_SHARD). hsdp:
    sharded within groups of --shard-size ranks, replicated across them"""
    shard_size: MaybeCount = None
    """ranks that share one copy under hsdp (default: those of a node)"""
    grad_sync: Literal["auto", "every", "last"] = "auto"
    """exchange gradients in every micro-batch or in an update's last (auto: ddp last, fsdp and hsdp every; last then
    keeps whole gradients on each rank)"""
    expect_world_size: MaybeCount = None
    """stop unless there are exactly this many ranks"""
    timeout: Count = 600
    """seconds that a silent rank or a collective is waited for"""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on cuda, else gloo. gloo means the CPU unless --device says otherwise"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, else mps (one process), else cpu"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """of matrix products under autocast; weights, optimizer and reductions stay fp32 (auto: bf16 on cuda, else fp32).
    fp16 scales the loss (adamw only)"""
    act_ckpt: Literal["none", "block", "selective"] = "none"
    """activation checkpointing: keep each block's input alone and compute the rest again in backward (block), or keep
    the results of matrix products and attention too (selective)"""
    compile: bool = False
    """torch.compile, block by block; where it can't, training goes on without"""

    local_bsz: Count = 8
    """windows per rank and micro-batch"""
    grad_accum: MaybeCount = None
    """micro-batches per update (default 1, or derived from --global-bsz)"""
    global_bsz: MaybeCount = None
    """windows per update over all ranks, instead of --grad-accum; fixed for the life of a run"""
    steps: MaybeCount = None
    """updates (default 2000, or derived from --tokens)"""
    tokens: MaybeCount = None
    """exact budget of supervised tokens, instead of --steps; the last update is masked to it"""
    sampling: Literal["epoch", "random"] = "epoch"
    """epoch: each window once an epoch, shuffled. random: uniform starts"""
    seed: Count = 0
    """of the initial weights and dropout"""
    data_seed: Count = 1234
    """of the order of the data"""

    lr: MaybeFloat = None
    """peak learning rate (default: 1e-3 below width 512, else 6e-4; with --init-from 3e-5)"""
    min_lr: MaybeFloat = None
    """floor of the schedule (default: a tenth of the peak)"""
    warmup: MaybeCount = None
    """updates of linear warmup (default: 100, at most a tenth of the run)"""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """after warmup: cosine to the floor, constant with a linear decay at the end (wsd), or constant"""
    decay_fraction: float = 0.2
    """share of the run that wsd decays over"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised momentum on the blocks' matrices, AdamW on the rest, one --lr for both"""
    muon_dtype: Literal["fp32", "bf16"] = "fp32"
    """of muon's products. bf16 is for speed on GPUs: losses then depend a little on ranks and sharding, which fp32
    keeps them from"""
    weight_decay: float = 0.1
    """decoupled, on matrices only"""
    beta1: float = 0.9
    """decay of AdamW's mean of gradients"""
    beta2: float = 0.95
    """decay of AdamW's mean of squared gradients"""
    clip: float = 1.0
    """largest global gradient norm; 0 turns clipping off"""
    skip_spikes: float = 4.0
    """drop an update whose loss is more than this many times the running mean of the accepted ones; 0 for none"""
    skip_limit: Count = 10
    """dropped updates in a row after which the run stops"""

    eval_every: Count = 250
    """updates between held-out losses (and one at the end); 0 for none"""
    eval_tokens: MaybeCount = None
    """held-out tokens scored, always the same windows (default: the whole split, at most 1,048,576; on a CPU 65,536)"""
    log_every: Count = 10
    """updates between console lines"""
    ckpt_every: Count = 1000
    """updates between checkpoints (and one at the end); 0 for the end alone"""
    ckpt_minutes: MaybeFloat = None
    """minutes between checkpoints, also or (with --ckpt-every 0) instead"""
    save_best: bool = False
    """also save wherever the held-out loss is the lowest so far"""
    keep: MaybeCount = None
    """keep the newest N checkpoints and the best (default all)"""
    keep_every: MaybeCount = None
    """also keep each checkpoint whose update is a multiple of this"""
    async_ckpt: Literal["auto", "on", "off"] = "auto"
    """write checkpoints while training goes on, from a copy in memory (auto: where it fits beside all else)"""
    max_save_failures: Count = 2
    """failed saves in a row that are borne, and tried again when the next is due, before the run stops"""

    plan: bool = False
    """print what this run takes - parameters, updates, FLOPs, memory, disk, wire, hours, money - and end. Needs no GPU;
    --expect-world-size says for how many ranks"""
    measure: MaybeCount = None
    """with --plan: run this many updates here, in a scratch directory, and plan with what was measured"""
    preflight: bool = False
    """check what a run rests on - data, first loss, fitting, saving, resuming, ranks, memory - in seconds, and end"""
    lr_find: bool = False
    """sweep the rate upwards on a copy over 150 updates, plot the loss against it, suggest a peak, and end. From
    lr/1000 to 100 lr, or from --min-lr to --lr where these span two decades or more"""
    gpu: MaybeText = None
    """card to plan for, as in H100 or 'RTX 4090' (default: the one that is here)"""
    peak_tflops: MaybeFloat = None
    """peak TFLOP/s of one device at --dtype, where the table of cards doesn't have it: for MFU and the plan"""
    expect_mfu: float = 0.4
    """with --plan: share of the peak to expect, by 6 N a token"""
    expect_tokens_per_s: MaybeFloat = None
    """with --plan: tokens per second over all ranks, instead of --expect-mfu"""
    link_gbyte_s: float = 450.0
    """with --plan: GB/s from a GPU to others of its node, in one direction (NVLink 4; PCIe 4: 25)"""
    node_gbit_s: float = 3200.0
    """with --plan: Gbit/s from a node to others (eight InfiniBand adapters of 400; an Ethernet port: 100)"""
    price: MaybeText = None
    """price of a device-hour and its date, as in 2.50@2026-11-30: money in the plan and in metrics"""

    target_loss: MaybeFloat = None
    """held-out loss to beat, in nats a token: the run's forecast is compared with it at each evaluation"""
    stop_when: Stops = ()
    """save and stop when the target is reached, or when it is out of reach (hopeless); may be repeated. never: on a
    resume, takes back what the run was told before"""
    tracker: Trackers = ()
    """also log to wandb or tensorboard; may be repeated. WANDB_MODE=offline and the like are wandb's own"""
    profile: MaybeCount = None
    """profile this many updates by torch.profiler, after the first 3: a trace and a table by phase in
    --ckpt-dir/profile. They are slower, which their rows of metrics say"""
    progress: bool = False
    """a progress bar below the console lines"""
    sample_tokens: Count = 64
    """tokens of the text that is written at each evaluation, always from the same seed, to samples.jsonl; 0 for none"""
    sample_prompt: MaybeText = None
    """what that text begins with (default: the beginning of a document)"""


def layered(base: TrainConfig) -> TrainConfig:
    """`base`, the file of --config over it, the command line over both. A length given above, in updates or tokens,
    takes the place of either below."""

    def over(below: TrainConfig, lay: Callable[[TrainConfig], TrainConfig]) -> TrainConfig:
        above = lay(dataclasses.replace(below, steps=None, tokens=None))
        given = above.steps is not None or above.tokens is not None
        return above if given else dataclasses.replace(above, steps=below.steps, tokens=below.tokens)

    recipe = parse(TrainConfig, default=base).config
    if recipe is not None:
        base = over(base, lambda below: from_toml(TrainConfig, recipe, below))
    cfg = over(base, lambda below: parse(TrainConfig, default=below))
    modes = [flag(name) for name in ("plan", "preflight", "lr_find") if getattr(cfg, name)]
    if len(modes) > 1:
        raise InputError(f"{' and '.join(modes)}: each ends when it is done; give one at a time")
    if cfg.measure is not None and not (cfg.plan and cfg.measure):
        raise InputError(f"--measure {cfg.measure}: goes with --plan, and is at least 1")
    return cfg


def model_from_dict(table: dict[str, Any]) -> ModelConfig:
    """ModelConfig from run.json's `model` table. Raises InputError for a field this version doesn't know."""
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    if unknown := sorted(set(table) - known):
        raise InputError(f"run.json: model has unknown fields {', '.join(unknown)}; written by a newer version?")
    return ModelConfig(**table)
