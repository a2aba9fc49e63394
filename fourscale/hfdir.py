"""Hugging Face directories on the disk: what one holds, a tensor at a time; its tokenizer; hub ids; writing one.

config.json, model.safetensors or shards named by model.safetensors.index.json, or pytorch_model.bin (never as code);
tokenizer.json, or vocab.json and merges.txt. No file is read whole but a tokenizer's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourscale import checkpoint, hf, tokenization
from fourscale.cli import InputError
from fourscale.config import ModelConfig
from fourscale.model import GPT
from fourscale.tokenization import Tokenizer
from fourscale.tokenizer_json import EOT, byte_level_json

PROVENANCE = "fourscale.json"  # what export_hf.py says of a directory
# Buffers that older versions of transformers saved: constants, no weights.
BUFFERS = re.compile(r"(.*\.)?(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    name: str  # in that file
    shape: tuple[int, ...]
    dtype: torch.dtype | str  # a str, as safetensors calls it, where it is none of ours


@dataclass(frozen=True)
class HFDir:
    """A Hugging Face directory whose model is one of ours: the headers have been read and fit, the weights have not."""

    path: Path
    config: dict[str, Any]
    cfg: ModelConfig
    stored: dict[str, Stored]  # by the names of `hf.their_names`, and lm_head.weight where a tied model has it too

    @property
    def files(self) -> list[Path]:
        """The files of weights."""
        return sorted({s.file for s in self.stored.values()})

    @functools.cached_property
    def digest(self) -> str:
        """sha256 hex over the names and sha256 of the files of weights; reads them once."""
        lines = (f"{path.name} {checkpoint.sha256_of(path)}\n" for path in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the weights."""
        sizes: dict[Any, int] = {}
        for s in self.stored.values():
            sizes[s.dtype] = sizes.get(s.dtype, 0) + torch.Size(s.shape).numel()
        return max(sizes, key=lambda d: sizes[d])

    def read(self, name: str) -> Tensor:
        """One of transformers' tensors, on the CPU in the file's dtype. Raises InputError where it isn't finite."""
        where = self.stored[name]
        if where.file.suffix == ".bin":
            t = self._bins[where.file][where.name]
        else:
            with _reading(where.file), safe_open(where.file, "pt") as f:
                t = f.get_tensor(where.name)
        if t.numel() and not all(x.float().isfinite() for x in torch.aminmax(t)):  # in fp32, as we hold it
            raise InputError(f"{where.file}: {where.name} is not finite; the file is damaged, or its training diverged")
        return t

    @functools.cached_property
    def _bins(self) -> dict[Path, dict[str, Tensor]]:
        return {path: _open_bin(path) for path in self.files}

    def parameter(self, name: str) -> Tensor:
        """One of our parameters by its name, fp32 in its full shape on the CPU, padded rows zero. Raises InputError."""
        full = hf.from_hf(name, self.read, self.cfg)
        twice = name == "wte.weight" and self.cfg.tie and "lm_head.weight" in self.stored
        if twice and not torch.equal(self.read("lm_head.weight").float(), full[: self.cfg.vocab_size]):
            raise InputError(
                f"{self.path / 'config.json'}: says that head and embedding are tied (tie_word_embeddings), but the "
                "weights hold two that differ; set it to false"
            )
        return full


def is_model(path: Path) -> bool:
    """True where `path` looks like a Hugging Face directory."""
    return (path / "config.json").is_file()


def open_directory(path: Path) -> HFDir:
    """What `path` holds. Raises InputError for a model that ours can't compute, for a tensor that is missing, too many
    or of another shape, and for files that are cut short."""
    if not is_model(path):
        raise InputError(f"{path}: no config.json there, so it is no Hugging Face model; name a directory that has one")
    config = read_json(path / "config.json")
    try:
        cfg = hf.model_config(config)
    except InputError as e:
        raise InputError(f"{path / 'config.json'}: {e}") from None
    found = _without_prefix_trouble(_tensors(path), cfg)
    if cfg.n_layers > len(found):  # or a mistaken number of them would be built, even without weights
        raise InputError(
            f"{path}: has {len(found)} tensors for the {cfg.n_layers} layers that its config.json asks for; "
            "download it again"
        )
    try:
        with torch.device("meta"):
            wanted = hf.to_hf(dict(GPT(cfg).named_parameters()), cfg)
    except (RuntimeError, OverflowError):  # a product of two sizes
        raise InputError(f"{path / 'config.json'}: asks for matrices larger than any can be; restore it") from None
    for name, t in wanted.items():
        if name not in found:
            raise InputError(f"{path}: has no {name}, which its config.json asks for; download it again")
        if found[name].shape != tuple(t.shape):
            raise InputError(
                f"{found[name].file}: {name} is {found[name].shape}, by config.json {tuple(t.shape)}; "
                "they belong to different models"
            )
    for name, s in found.items():
        if name not in wanted and not (name == "lm_head.weight" and cfg.tie):
            raise InputError(f"{s.file}: {s.name} has no place in a {hf.architecture(cfg)}; our model can't use it")
        if s.dtype not in FLOATS.values():
            raise InputError(f"{s.file}: {s.name} is {s.dtype}; only fp32, bf16 and fp16 weights can be read")
    return HFDir(path, config, cfg, found)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"{path}: {(e.strerror or str(e)).lower()}; download it again") from None
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: not valid JSON ({e}); download it again") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: holds no JSON object; download it again")
    return table


def weight_files(names: Iterable[str]) -> list[str]:
    """Of a directory's file names, those of its weights (with their index): safetensors where there are any."""
    names = sorted(name for name in names if "/" not in name)
    for stem, end in (("model", "safetensors"), ("pytorch_model", "bin")):
        own = [n for n in names if re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.{end}(\.index\.json)?", n)]
        if any(n.endswith(f".{end}") for n in own):
            return own
    return []


def _tensors(path: Path) -> dict[str, Stored]:
    """All tensors of the directory by the names they are stored under; headers alone are read."""
    names = weight_files(p.name for p in path.iterdir())
    if not names:
        if (path / "model.safetensors.index.json").is_file():
            raise InputError(f"{path}: its index names shards, but none is there; download them again")
        raise InputError(f"{path}: holds no weights (model.safetensors or pytorch_model.bin); download them")
    index = next((path / n for n in names if n.endswith(".index.json")), None)
    whole = next((path / n for n in names if n in ("model.safetensors", "pytorch_model.bin")), None)
    if whole is not None:  # as transformers has it: the index counts where there is no such file
        return dict(_header(whole))
    if index is None:
        raise InputError(f"{path}: {names[0]} is a shard, and there is no index beside it; download {path.name} again")
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(n, str) and Path(n).name == n for n in table.values()):
        raise InputError(f"{index}: has no weight_map of names to files beside it; download it again")
    out = {}
    there = {p.name for p in path.iterdir() if p.is_file()}
    for file in sorted(set(table.values())):
        if file not in there:
            raise InputError(f"{path / hf.brief(file)}: is missing, a shard that {index.name} names; download it again")
        held = dict(_header(path / file))
        for name in (n for n, f in table.items() if f == file):
            if name not in held:
                raise InputError(f"{path / file}: lacks {name}, which {index.name} says it holds; download it again")
            out[name] = held[name]
    return out


def _header(file: Path) -> Iterator[tuple[str, Stored]]:
    if file.suffix == ".bin":
        for name, t in _open_bin(file).items():
            yield name, Stored(file, name, tuple(t.shape), t.dtype)
        return
    with _reading(file), safe_open(file, "pt") as f:
        for name in f.keys():  # noqa: SIM118 (no mapping)
            piece = f.get_slice(name)
            kind = piece.get_dtype()
            yield name, Stored(file, name, tuple(piece.get_shape()), FLOATS.get(kind, kind))


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn safetensors' refusals into InputError."""
    try:
        yield
    except (SafetensorError, OSError) as e:
        first = str(e).strip().splitlines()[0]
        raise InputError(f"{file}: not a whole safetensors file ({first}); download it again") from None


def _open_bin(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled file, which may hold tensors and nothing that runs; mapped where its format allows."""
    table: Any = None
    for mmap in (True, False):  # files from before torch 1.6 can't be mapped
        try:
            table = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
            break
        except Exception as e:  # a pickle can fail in any way
            if mmap and "mmap can only be used" in str(e):
                continue
            first = (str(e).strip() or type(e).__name__).splitlines()[0]
            raise InputError(f"{file}: not a whole file of tensors alone ({first}); do not trust it") from None
    if not isinstance(table, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in table.items()):
        raise InputError(f"{file}: holds something other than named tensors; it is no file of weights")
    for name, t in table.items():
        if t.layout != torch.strided or t.device.type != "cpu":
            what = "without its numbers (a meta tensor)" if t.is_meta else f"in the layout {t.layout}"
            raise InputError(f"{file}: holds {hf.brief(name)} {what}; only dense tensors can be read")
    return table


def _without_prefix_trouble(found: dict[str, Stored], cfg: ModelConfig) -> dict[str, Stored]:
    """By the names that the model with its head has: the bare one (GPT2Model's files, as OpenAI's gpt2) lacks a prefix.
    Buffers are left out."""
    prefix = "transformer." if cfg.arch == "gpt2" else "model."
    out = {name: s for name, s in found.items() if not BUFFERS.fullmatch(name)}
    if not any(name.startswith(prefix) for name in out):
        out = {name if name.startswith("lm_head.") else prefix + name: s for name, s in out.items()}
    return out


# ---- ends of a text ------------------------------------------------------------------------------------------------


def stop_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """All ids that end a text, ascending: generation_config.json's eos_token_id, or, where it has none, config.json's.

    Empty where neither has any (absent, null or []). Raises InputError for a generation_config.json that can't be
    read, and for an eos_token_id that is neither an id nor a list of them.
    """
    table, file = config, directory / "config.json"
    if (beside := directory / "generation_config.json").exists():
        generation = read_json(beside)
        if generation.get("eos_token_id") is not None:
            table, file = generation, beside
    ends = table.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(i) is int and 0 <= i <= hf.LARGEST_SIZE for i in ids):
        raise InputError(f"{file}: eos_token_id {hf.brief(ends)}: neither an id nor a list of ids; restore it")
    return tuple(sorted(set(ids)))


# ---- tokenizer -----------------------------------------------------------------------------------------------------


def tokenizer_of(path: Path, config: dict[str, Any]) -> Tokenizer | None:
    """The directory's tokenizer; None where it holds none that can be read (as a sentencepiece model alone).

    Raises InputError for files that aren't a tokenizer, or don't say which token ends a text.
    """
    data = tokenizer_json(path)
    if data is None:
        return None
    if (path / PROVENANCE).is_file():  # our own export: its kind is known
        entry = read_json(path / PROVENANCE).get("tokenizer")
        if isinstance(entry, dict) and entry.get("sha256") == hashlib.sha256(data).hexdigest():
            return tokenization.load(path, entry)
    ends = config.get("eos_token_id")
    ends = ends[0] if isinstance(ends, list) and ends else ends
    return tokenization.from_json(path / tokenization.FILE, data, ends if type(ends) is int else None)


def tokenizer_json(path: Path) -> bytes | None:
    """The content of the directory's tokenizer.json, or one made of vocab.json and merges.txt (GPT-2's files)."""
    if (path / tokenization.FILE).is_file():
        return (path / tokenization.FILE).read_bytes()
    if not ((path / "vocab.json").is_file() and (path / "merges.txt").is_file()):
        return None
    vocab = read_json(path / "vocab.json")
    if not all(type(i) is int for i in vocab.values()) or EOT not in vocab:
        raise InputError(f"{path / 'vocab.json'}: no vocabulary of GPT-2's kind, with {EOT}; it needs a tokenizer.json")
    lines = (path / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line.split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    words = dict(sorted(vocab.items(), key=lambda item: item[1]))
    return byte_level_json(words, merges, {EOT: words.pop(EOT)})


def tokens_added(data: bytes) -> str:
    """What a tokenizer.json puts around a text of its own, as in "<|begin_of_text|> before"; "" where nothing."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True)
    ids, tokens = whole.ids, whole.tokens
    at = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), None)
    if ids == plain or at is None:
        return ""
    before, after = " ".join(tokens[:at]), " ".join(tokens[at + len(plain) :])
    return " and ".join([f"{t} {side}" for t, side in ((before, "before"), (after, "after")) if t])


# ---- the hub -------------------------------------------------------------------------------------------------------

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
OURS = re.compile(r"(.*/)?(ckpt\w*|step_\d+(\.tmp-.*)?|best|latest)")  # a run's own names, mistyped or not there yet
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
SMALL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES, "tokenizer.model", PROVENANCE)


def may_be_hub_id(name: str) -> bool:
    """True for the form 'gpt2' or 'owner/name' where no directory of that owner lies here."""
    local = "/" in name and Path(name).parent.is_dir()
    return HUB_ID.fullmatch(name) is not None and not local and OURS.fullmatch(name) is None


def download(name: str, revision: str | None = None) -> tuple[Path, str]:
    """A hub model's directory in the local cache, and its commit; only files that are needed are fetched.

    Without a network: what the cache has, else InputError at once.
    """
    import huggingface_hub
    from huggingface_hub import errors, utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    try:
        info = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=10)
        names = [f.rfilename for f in info.siblings or []]
        wanted = [*(n for n in SMALL_FILES if n in names), *weight_files(names)]
        if "config.json" in wanted:
            path = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted))
            return path, path.name  # by its branch: without a network, the cache then knows what that is
        raise InputError(f"{name}: has no config.json on the hub, so it is no model for transformers; name another")
    except errors.GatedRepoError:
        raise InputError(f"{name}: its owner wants to be asked first; accept the terms, then: hf auth login") from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{name}: has no revision {revision} on the hub") from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"{name}: no such directory here, and no such model on the hub (or it is private)") from None
    except InputError:
        raise
    except Exception as e:  # no network, a proxy's or a server's fault: each library has errors of its own
        why = type(e).__name__
    # Not snapshot_download: offline, it asks for files that were never wanted.
    cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(cached, str):
        raise InputError(
            f"{name}: no such directory here (train.py writes one under --ckpt-dir), and no hub to ask for a model of "
            f"that name ({why})"
        )
    return Path(cached).parent, Path(cached).parent.name


def cached_from(path: Path) -> tuple[str, str] | tuple[None, None]:
    """Hub id and commit of a directory in the hub's local cache; of any other, none."""
    found = re.search(r"/models--([^/]+)/snapshots/([0-9a-f]{40})$", path.as_posix())
    return (found[1].replace("--", "/"), found[2]) if found else (None, None)


# ---- writing -------------------------------------------------------------------------------------------------------


def rounded(model: GPT, dtype: str) -> GPT:
    """`model` itself, its weights rounded to bf16 or fp16 and held in fp32. Raises InputError for one too large."""
    to = getattr(torch, hf.TORCH_NAMES[dtype])
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(p.to(to))
            if not all(x.isfinite() for x in torch.aminmax(p)):
                raise InputError(f"--dtype {dtype}: {name} has values that it can't hold; use bf16 or fp32")
    return model


def write_weights(directory: Path, model: GPT, dtype: str, max_shard_size: int) -> None:
    """model.safetensors, or, of more than `max_shard_size` bytes, shards and their index; a tensor at a time.

    A tensor that is larger by itself gets a shard of its own.
    """
    cfg, to = model.cfg, getattr(torch, hf.TORCH_NAMES[dtype])
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in hf.to_hf(dict(GPT(cfg).named_parameters()), cfg).items()}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled, total = 0, 0
    for name, shape in shapes.items():
        size = to.itemsize * torch.Size(shape).numel()
        if filled and filled + size > max_shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled, total = filled + size, total + size
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    tensors = (item for name, p in model.named_parameters() for item in hf.to_hf({name: p.detach()}, cfg).items())
    for file, part in zip(names, shards, strict=True):
        write_safetensors(directory / file, part, to, itertools.islice(tensors, len(part)))
    if len(shards) > 1:
        files = {name: file for file, part in zip(names, shards, strict=True) for name in part}
        table = {"metadata": {"total_size": total}, "weight_map": files}
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def write_safetensors(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """One file, a tensor at a time: (name, Tensor) of `tensors` in the order and shapes of `shapes`.

    The format: 8 bytes little-endian with the header's length, the header as JSON, the numbers, row-major and
    little-endian (https://huggingface.co/docs/safetensors). safetensors' own save_file holds all of them at once.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        table[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        for (name, shape), (given, t) in zip(shapes.items(), tensors, strict=True):
            if given != name or tuple(t.shape) != shape:
                raise ValueError(f"{given} {tuple(t.shape)}, expected {name} {shape}")
            f.write(t.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)
