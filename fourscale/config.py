"""Every knob once: the dataclasses behind the doors' flags, TOML files, and one-line errors. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

T = TypeVar("T")


class InputError(Exception):
    """The user's input or usage is at fault: one line naming the thing, what was found, what to do (exit code 2)."""


class RunFailed(Exception):
    """A run can't go on though its input was right, as when losses stay non-finite: one line (exit code 1)."""


def is_rank_zero() -> bool:
    """True in a plain process and on torchrun's rank 0: the one that speaks."""
    return int(os.environ.get("RANK", "0")) == 0


def door(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a door's main: InputError ends with one line and code 2, RunFailed with code 1, Ctrl-C with 130.

    Under torchrun the first rank of each node prints: all ranks meet most errors, but another node may lack a file. One
    that carries `all_ranks = True` was met by a single rank and is printed by it. A file that can't be read or written
    is input too.
    """

    @functools.wraps(main)
    def wrapped() -> None:
        try:
            main()
        except (InputError, RunFailed) as e:
            if int(os.environ.get("LOCAL_RANK", "0")) == 0 or getattr(e, "all_ranks", False):
                print(f"error: {e}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            # os._exit: under torchrun other ranks may be blocked in a collective, and teardown would wait for them.
            os._exit(2 if isinstance(e, InputError) else 1)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(130)
        except BrokenPipeError:  # `python sample.py | head`
            os._exit(0)
        except OSError as e:
            if e.filename is None or e.strerror is None:
                raise
            print(f"error: {e.filename}: {e.strerror.lower()}", file=sys.stderr, flush=True)
            os._exit(2)

    return wrapped


def say(line: str) -> None:
    """Print a line at once. A reader who has gone (`| head`, a closed terminal) must not end a run of days."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)


# ---- flag types ----------------------------------------------------------------------------------------------------


def parse_count(text: str) -> int:
    """'2e9', '100_000', '1,000' or '42' as an int; ValueError if it's no whole number >= 0."""
    cleaned = text.replace("_", "").replace(",", "")
    try:
        number = int(cleaned)
    except ValueError:
        number = float(cleaned)
        if not number.is_integer():
            raise ValueError(f"{text!r} is not a whole number") from None
    if number < 0:
        raise ValueError(f"{text!r} is negative")
    return int(number)


def _count_from(args: list[str]) -> int | None:
    if args[0].lower() == "none":
        return None
    try:
        return parse_count(args[0])
    except (ValueError, OverflowError):
        raise ValueError(f"expected a whole number such as 2000, 2e9 or 100_000, got {args[0]!r}") from None


def _float_from(args: list[str]) -> float | None:
    if args[0].lower() == "none":
        return None
    try:
        return float(args[0].replace("_", ""))
    except ValueError:
        raise ValueError(f"expected a number, got {args[0]!r}") from None


def _spec(metavar: str, parse: Callable[[list[str]], Any], kinds: tuple[type, ...]) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda x: x is None or isinstance(x, kinds),
        str_from_instance=lambda x: [str(x)],
    )


_derived = tyro.conf.arg(help_behavior_hint="")  # the help text itself says what None becomes
Count = Annotated[int, _spec("N", _count_from, (int,))]
MaybeCount = Annotated[int | None, _spec("N", _count_from, (int,)), _derived]
MaybeFloat = Annotated[float | None, _spec("X", _float_from, (float, int)), _derived]
MaybeText = Annotated[str | None, _spec("TEXT", lambda a: a[0], (str,)), _derived]


def _one_line(boxed: str) -> str:
    """The gist of tyro's boxed message: the words above its first rule, and the flag it suggests."""
    words, suggestion = [], ""
    lines = [line.strip("│ ").strip() for line in boxed.splitlines()]
    body = [line for line in lines if line and line[0] not in "╭╰"]
    for i, line in enumerate(body):
        if line.startswith("Perhaps you meant") and i + 1 < len(body):
            suggestion = f"; did you mean {body[i + 1].split(' ')[0].rstrip(',')}?"
    for line in body:
        if line.startswith("──"):
            break
        words.append(line)
    return " ".join(words) + suggestion


def parse(cls: type[T], argv: Sequence[str] | None = None, default: T | None = None, prog: str | None = None) -> T:
    """Parse flags into `cls`; flags that are absent keep `default`'s values. Raises InputError for a usage error.

    `--a-b` and `--a_b` are alike; counts may be written 2e9 or 100_000. `--help` prints on rank 0 and exits with 0.
    """
    err = io.StringIO()
    columns = os.environ.get("COLUMNS")
    argv = sys.argv[1:] if argv is None else list(argv)
    asked_help = "--help" in argv or "-h" in argv
    try:
        if not asked_help:
            os.environ["COLUMNS"] = "4000"  # one message, one line: no wrapping inside the box
        with contextlib.redirect_stderr(err):
            kwargs = {} if default is None else {"default": default}
            return tyro.cli(
                cls,
                args=argv,
                prog=prog or Path(sys.argv[0]).name,
                console_outputs=is_rank_zero(),
                config=(tyro.conf.OmitArgPrefixes,),
                **kwargs,
            )
    except SystemExit as e:
        if e.code in (0, None):
            raise
        raise InputError(_one_line(err.getvalue()) or "usage error; see --help") from None
    finally:
        if columns is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = columns


def from_toml(cls: type[T], path: Path, default: T) -> T:
    """`default` with the flat keys of a TOML file laid over it, checked exactly as flags are. Raises InputError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"--config {path}: {e.strerror.lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise InputError(f"--config {path}: not valid TOML: {e}") from None
    argv = []
    for key, value in table.items():
        if isinstance(value, dict):
            raise InputError(f"--config {path}: [{key}] is a table; write flags as flat keys such as d_model = 768")
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        else:
            argv += [flag, str(value)]
    try:
        return parse(cls, argv, default)
    except InputError as e:
        raise InputError(f"--config {path}: {e}") from None


def padded(vocab_size: int) -> int:
    """Rows of an embedding for `vocab_size` ids: the next multiple of 64. The rows beyond the vocabulary are masked."""
    return -(-vocab_size // 64) * 64


# ---- the knobs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape. A field that is None is filled in by `budget.size_model` from the device and vocabulary."""

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
    dropout: float = 0.0
    """on embeddings, attention and residual branches"""
    rope_theta: float = 10_000.0
    """base of the rotary frequencies (modern only)"""
    norm_eps: float = 1e-5
    """epsilon of every norm"""

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""
        return padded(self.vocab_size)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    def check(self) -> None:
        """Raise InputError where the (filled-in) shape is impossible."""
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "ctx", "vocab_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{flag(name)} {getattr(self, name)}: must be at least 1")
        if self.d_model % self.n_heads:
            raise InputError(f"--n-heads {self.n_heads} does not divide --d-model {self.d_model}; choose a divisor")
        if self.n_heads % self.n_kv_heads:
            raise InputError(
                f"--n-kv-heads {self.n_kv_heads} does not divide --n-heads {self.n_heads}; choose a divisor"
            )
        if self.arch == "gpt2" and self.n_kv_heads != self.n_heads:
            raise InputError(
                f"--n-kv-heads {self.n_kv_heads}: gpt2 has one per query head ({self.n_heads}); use --arch modern"
            )
        if self.arch == "gpt2" and self.qk_norm:
            raise InputError("--qk-norm: gpt2 has no query/key norm; use --arch modern")
        if self.arch == "modern" and self.head_dim % 2:
            raise InputError(
                f"--n-heads {self.n_heads}: RoPE needs an even head width, d_model / n_heads is {self.head_dim}"
            )
        if not 0 <= self.dropout < 1:
            raise InputError(f"--dropout {self.dropout}: must be at least 0 and below 1")


@dataclass
class PrepareConfig:
    """Text -> tokens -> shards and a manifest. Sources: stdlib, tinystories, fineweb-edu, hub ids, files and globs."""

    dataset: str = "stdlib"
    """stdlib (no network), tinystories, fineweb-edu, a hub id (owner/name or owner/name:config), files: 'c/*.jsonl'"""
    out: Path = Path("./data")
    """directory for shards and manifest.json"""
    tokenizer: str = "gpt2"
    """gpt2, another tiktoken name, a tokenizer.json, bpe:N (trained on the corpus), byte, or char"""
    shard_tokens: Count = 100_000_000
    """tokens per shard"""
    val_fraction: float = 0.01
    """share of documents held out, chosen by a hash of their text"""
    val_docs: MaybeCount = None
    """hold out exactly this many distinct documents instead"""
    doc_sep: MaybeText = None
    """separator of documents in plain text, such as '<|endoftext|>' (default: units of about 4 KB at blank lines)"""
    text_field: str = "text"
    """field that holds the text in jsonl, parquet and hub rows"""
    license: MaybeText = None
    """licence of the text, for the manifest (known for the named sources)"""


@dataclass
class TrainConfig:
    """Train a language model: the same command on a laptop, one GPU, a node and a cluster (launch with torchrun)."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)

    data: Path = Path("./data")
    """directory written by prepare.py"""
    ckpt_dir: Path = Path("./ckpt")
    """run directory: contract, metrics, checkpoints, receipt"""
    config: Path | None = None
    """TOML file of flags; flags on the command line win over it"""
    resume: Literal["never", "auto", "must"] = "never"
    """never: a fresh directory is required. auto: go on where there is a checkpoint, else start. must: go on or fail"""
    stop_after: MaybeCount = None
    """save and stop after this update; the schedule stays that of the whole run"""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: a whole copy per rank. fsdp: weights, gradients and optimizer sharded (FULL_SHARD)"""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on cuda, else gloo. gloo means the CPU unless --device says otherwise"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, else mps (one process), else cpu"""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """of matrix products under autocast; weights, optimizer and reductions stay fp32 (auto: bf16 on cuda, else fp32)"""
    compile: bool = False
    """torch.compile, block by block"""

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
    """peak learning rate (default: 1e-3 below width 512, else 6e-4)"""
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
    weight_decay: float = 0.1
    """decoupled, on matrices only"""
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    """largest global gradient norm; 0 turns clipping off"""

    eval_every: Count = 250
    """updates between held-out losses (and one at the end); 0 for none"""
    eval_tokens: MaybeCount = None
    """held-out tokens scored, always the same windows (default: the whole split, at most 1,048,576; on a CPU 65,536)"""
    log_every: Count = 10
    """updates between console lines"""
    ckpt_every: Count = 1000
    """updates between checkpoints (and one at the end); 0 for the end alone"""
    keep: MaybeCount = None
    """keep the newest N checkpoints (default all)"""
    keep_every: MaybeCount = None
    """also keep each checkpoint whose update is a multiple of this"""


@dataclass
class SampleConfig:
    """Checkpoint -> text."""

    ckpt: Path = Path("./ckpt")
    """a step_N directory, or a run directory (its latest)"""
    prompt: Annotated[str, _derived] = ""
    """text to continue (default: none, the model begins a document)"""
    num_samples: Count = 1
    """continuations of the prompt; a single one is printed as it is made"""
    max_new_tokens: Count = 256
    """tokens to add, unless the end-of-text token comes first; past the context length the oldest drop out of sight"""
    temperature: float = 0.8
    """0 takes the most likely token"""
    top_k: MaybeCount = None
    """sample from the K most likely tokens (default: all)"""
    top_p: MaybeFloat = None
    """sample from the smallest set of tokens whose probability reaches P (default: all)"""
    seed: Count = 0
    """sample k of a seed is the same text however many are made"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        if self.num_samples < 1:
            raise InputError("--num-samples 0: must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature {self.temperature}: must be 0 (most likely token) or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"--top-k {self.top_k}: must be at least 1; leave it out for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"--top-p {self.top_p}: must be above 0 and at most 1; leave it out for all tokens")
        try:
            self.prompt.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError("--prompt: not valid UTF-8; check the terminal's encoding") from None


@dataclass
class EvalConfig:
    """Held-out nats per token, perplexity and bits per byte of a checkpoint; also under torchrun."""

    data: Path = Path("./data")
    """directory written by prepare.py"""
    ckpt: Path = Path("./ckpt")
    """a step_N directory, or a run directory (its latest)"""
    split: Literal["val", "train"] = "val"
    ctx: MaybeCount = None
    """window length in tokens (default: the model's)"""
    local_bsz: Count = 8
    """windows per rank and forward; the result does not depend on it"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    dtype: Literal["fp32", "bf16"] = "fp32"
    """of matrix products"""
    json: Path | None = None
    """also write the figures to this file"""

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        for name in ("ctx", "local_bsz"):
            if getattr(self, name) == 0:
                raise InputError(f"{flag(name)} 0: must be at least 1")
        if self.json is not None and not self.json.resolve().parent.is_dir():
            raise InputError(f"--json {self.json}: no such directory to write to; make it first")


@dataclass
class ExportConfig:
    """Checkpoint -> Hugging Face directory, published only if its logits equal ours."""

    ckpt: Path = Path("./ckpt")
    """a step_N directory, or a run directory (its latest)"""
    out: Path = Path("./ckpt_hf")
    """directory to write; must not exist yet"""


def flag(name: str) -> str:
    """'n_heads' -> '--n-heads'."""
    return "--" + name.replace("_", "-")


def model_from_dict(table: dict[str, Any]) -> ModelConfig:
    """ModelConfig from run.json's `model` table. Raises InputError for a field this version doesn't know."""
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    if unknown := sorted(set(table) - known):
        raise InputError(f"run.json: model has unknown fields {', '.join(unknown)}; written by a newer version?")
    return ModelConfig(**table)
