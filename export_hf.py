"""Checkpoint -> Hugging Face directory for transformers, lm_eval and vLLM, published only if it computes the same.

    python export_hf.py --ckpt ckpt/step_9000 --out ./ckpt_hf

The directory is written under a temporary name beside --out and loaded again as a user would, without a network. Its
fp32 logits are compared with ours on random ids and, where the run's data are still there, on held-out text; so are its
token ids. It takes its name only after that, and --out must not exist before.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourscale.cli import InputError, RunFailed, door, parse
from fourscale.config import ExportConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fourscale.config import ModelConfig
    from fourscale.corpus import Corpus, Part
    from fourscale.model import GPT
    from fourscale.rundir import Checkpoint
    from fourscale.tokenization import Tokenizer

TOLERANCE = 1e-4  # of the largest logit, or of 1
COMPARED_TOKENS = 1024  # per row: the longest window that logits are compared on
DOCUMENT_MASK = """
It was trained with document masking: attention and positions began anew at each `{eot}`, which opens the document that
follows. This class has no such mask: give each document as a sequence of its own. For several in one sequence, pass
`position_ids` that restart at each `{eot}`, and `use_cache=False`: transformers 5 then keeps them apart. Otherwise it
sees across their boundaries, as it never did in training.
"""
TEXTS = (
    "Hello world",
    "  two leading spaces, a tab\tand a line\n\n  end",
    "def f(x):\n    return x + 1  # twelve: 12, 3.14\n",
    "naïve café, 東京, здравствуй, \U0001f40d",
    "\n",
    " ",
)


@dataclass(frozen=True)
class Agreement:
    """How the reloaded directory compares with the model it was made from."""

    difference: float  # largest absolute difference of a logit
    largest: float  # largest absolute logit
    tokens: int  # positions compared, each over the whole vocabulary
    held_out: bool  # real held-out text among them


def write(directory: Path, model: GPT, tokenizer: Tokenizer) -> None:
    """Weights, config and tokenizer of a Hugging Face model into an existing empty directory."""
    from safetensors.torch import save_file

    from fourscale import hf

    save_file(hf.to_hf(model.state_dict(), model.cfg), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(directory)
    path = directory / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    unused = [name for name in ("post_processor", "truncation", "padding") if spec.get(name)]
    if unused:  # they would add or cut tokens, as training never did
        path.write_text(json.dumps(spec | dict.fromkeys(unused), ensure_ascii=False), encoding="utf-8")
    eot = tokenizer.eot_id
    tables = {
        "config.json": hf.hf_config(model.cfg, eot),
        "generation_config.json": {"bos_token_id": eot, "eos_token_id": eot},
        "tokenizer_config.json": hf.tokenizer_config(tokenizer.eot_token, model.cfg.ctx),
    }
    for name, table in tables.items():
        (directory / name).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    shutil.copymode(directory / "config.json", directory / "model.safetensors")  # safetensors makes it private


def compare_logits(ours: GPT, theirs: Any, ids: Iterable[Tensor]) -> tuple[float, float]:
    """(largest difference, largest logit), absolute, over rows int64 [T]; a row at a time. Not finite is inf."""
    import torch

    difference, largest = 0.0, 0.0
    with torch.no_grad():
        for row in ids:
            a, b = ours(row[None]), theirs(row[None]).logits
            if a.shape != b.shape:
                return float("inf"), largest
            difference = max(difference, torch.nan_to_num((a - b).abs().max(), nan=float("inf")).item())
            largest = max(largest, torch.nan_to_num(a.abs().max(), nan=0.0).item())
    return difference, largest


def random_ids(model: GPT, vocab_size: int) -> Tensor:
    """Two windows of random ids, always the same, int64 [2, T].

    Where the model masks documents, each is one document of full length, and one begins with the end-of-text token.
    """
    import torch

    length = min(model.cfg.ctx, COMPARED_TOKENS)
    ids = torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    if model.cfg.doc_mask:
        ids[ids == model.cfg.eot_id] = (model.cfg.eot_id + 1) % vocab_size
        ids[1, 0] = model.cfg.eot_id
    return ids


def comparable(model: GPT, ids: Tensor) -> list[Tensor]:
    """Rows int64 [T] of ids [B, T] on which transformers must compute the same.

    Its models have no document mask: where ours has one, windows are cut before each end-of-text token.
    """
    if not model.cfg.doc_mask:
        return list(ids)
    cuts = [(row == model.cfg.eot_id).nonzero().flatten().tolist() for row in ids]
    return [part for row, at in zip(ids, cuts, strict=True) for part in row.tensor_split(at) if len(part)]


def known_texts(tokenizer: Tokenizer, ids: Tensor) -> list[str]:
    """Texts that our tokenizer can encode: TEXTS where it knows their characters, and documents that rows of ids hold.

    None holds the end-of-text characters, which theirs reads as the control token.
    """
    known = []
    documents = (part for row in ids.tolist() for part in tokenizer.decode(row).split(tokenizer.eot_token))
    for text in (*TEXTS, *documents):
        with contextlib.suppress(InputError):  # a char tokenizer that lacks one of its characters
            tokenizer.encode(text)
            known.append(text)
    return known


def compare_tokenizer(ours: Tokenizer, theirs: Any, texts: list[str]) -> str | None:
    """The first difference in ids or text as a phrase, None if there is none."""
    for text in texts:
        ids, found = ours.encode(text), theirs(text)["input_ids"]
        if found != ids:
            return f"{text[:40]!r} becomes {found[:8]}, ours {ids[:8]}"
        if (back := theirs.decode(ids)) != ours.decode(ids):
            return f"ids {ids[:8]} become {back[:40]!r}, ours {ours.decode(ids)[:40]!r}"
    return None if theirs.eos_token_id == ours.eot_id else f"eos id {theirs.eos_token_id}, ours {ours.eot_id}"


def load_as_user(directory: Path) -> tuple[Any, Any]:
    """(model, tokenizer) from files alone, by transformers' defaults. Raises RunFailed where they don't load."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as e:  # whatever it is, a user would meet it too
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise RunFailed(f"export: transformers can't load it ({first}); nothing was published") from None


def verify(directory: Path, model: GPT, tokenizer: Tokenizer, held_out: Tensor | None) -> Agreement:
    """Load the directory as a user would and compare it with `model` (fp32, CPU). held_out: int64 [B, T] or None.

    Raises RunFailed where logits differ by more than TOLERANCE * max(1, largest logit), or token ids differ.
    """
    theirs, their_tokenizer = load_as_user(directory)
    random = random_ids(model, tokenizer.vocab_size)
    batches = [random] if held_out is None else [random, held_out]
    pairs = [compare_logits(model, theirs, comparable(model, ids)) for ids in batches]
    difference, largest = (max(p[i] for p in pairs) for i in (0, 1))
    if not difference <= TOLERANCE * max(1.0, largest):
        raise RunFailed(
            f"export: its logits differ from ours by {difference:.3g} (largest logit {largest:.3g}); "
            "nothing was published: look at the mapping in fourscale/hf.py and the installed transformers"
        )
    if fault := compare_tokenizer(tokenizer, their_tokenizer, known_texts(tokenizer, batches[-1])):
        raise RunFailed(f"export: its tokenizer differs from ours ({fault}); nothing was published")
    return Agreement(difference, largest, sum(ids.numel() for ids in batches), held_out is not None)


def refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise InputError(f"--out {out}: exists; remove it or choose another directory")


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn the disk's refusals into InputError."""
    try:
        yield
    except OSError as e:
        raise InputError(f"--out {out}: {(e.strerror or str(e)).lower()}; choose a writable place with room") from None


def publish(out: Path, model: GPT, tokenizer: Tokenizer, card: str, held_out: Tensor | None = None) -> Agreement:
    """Write, verify and only then rename to `out`; otherwise nothing is left behind.

    Raises InputError where `out` exists or can't be written, RunFailed where it doesn't compute what `model` does.
    """
    from fourscale.checkpoint import fsync

    refuse_existing(out)
    temporary = out.parent / f".{out.name}.tmp-{secrets.token_hex(4)}"
    try:
        with writing(out):
            temporary.mkdir(parents=True)
            write(temporary, model, tokenizer)
        agreement = verify(temporary, model, tokenizer, held_out)
        with writing(out):
            (temporary / "README.md").write_text(card + agreement_lines(agreement), encoding="utf-8")
            for path in (*temporary.iterdir(), temporary):
                fsync(path)
            refuse_existing(out)
            temporary.rename(out)
            fsync(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return agreement


def agreement_lines(agreement: Agreement) -> str:
    where = "random ids and held-out text" if agreement.held_out else "random ids"
    return (
        f"\nLogits of this directory (fp32, CPU) were compared with the checkpoint's on {agreement.tokens:,} tokens of "
        f"{where}: largest difference {agreement.difference:.2g}, largest logit {agreement.largest:.3g}.\n"
    )


def snippet(out: Path) -> str:
    """Two lines that load the export."""
    return (
        f'tokenizer = AutoTokenizer.from_pretrained("{out.as_posix()}")\n'
        f'model = AutoModelForCausalLM.from_pretrained("{out.as_posix()}")'
    )


def model_card(ckpt: Checkpoint, tokenizer: Tokenizer, out_name: str, data: Corpus | None) -> str:
    """README.md of the export: what it is, and where every part of it comes from. data: None where it's gone."""
    from fourscale import hf, rundir
    from fourscale.budget import count_parameters

    cfg, run, step = ckpt.model, ckpt.run, ckpt.step
    attempt = run["attempts"][-1]
    digests = {name: table["train_digest"] for name, table in rundir.data_parts(run["data"]).items()}
    val_loss = step.get("val_loss")
    facts = {
        "architecture": f"{hf.architecture(cfg)}, {cfg.n_layers} layers, width {cfg.d_model}, {cfg.n_heads} heads "
        f"({cfg.n_kv_heads} for keys and values)",
        "parameters in training": f"{count_parameters(cfg).total:,} (padded vocabulary rows included; cut here)",
        "context length": f"{cfg.ctx:,} tokens",
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids, sha256 `{tokenizer.sha256}`",
        "checkpoint": f"{ckpt.dir.name} of run `{ckpt.run_dir.name}`, {step['tokens']:,} tokens seen",
        "held-out loss in training": "not evaluated" if val_loss is None else f"{val_loss:.4f} nats/token",
        "text": "no longer at hand; licence: unknown" if data is None else "<br>".join(map(provenance, data.parts)),
        "training tokens": "<br>".join(f"{name} sha256 `{digest}`".strip() for name, digest in digests.items()),
        "code": f"fourscale {attempt.get('code')}, torch {attempt.get('torch')}",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {out_name}

A base language model: it continues text and was never trained to answer or to refuse.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
{snippet(Path(out_name))}
```

| | |
|---|---|
{rows}

Documents were separated by `{tokenizer.eot_token}`; in training text the same characters were ordinary text, while this
tokenizer reads them as the control token. It adds no token at the start of a text.
{DOCUMENT_MASK.format(eot=tokenizer.eot_token) if cfg.doc_mask else ""}"""


def provenance(part: Part) -> str:
    """Name and licence of a data set's text, and its share of the samples where there are others."""
    share = "" if part.weight == 1 else f" ({float(part.weight):.1%} of samples)"
    if part.manifest is None:
        return f"shards {part.name}{share}; licence: unknown"
    sources = part.manifest.get("sources") or [part.manifest.get("source", {})]
    names = [source.get("name", part.name) for source in sources]
    # Where it lay on this machine is nobody's business.
    text = ", ".join(Path(name).name if Path(name).is_absolute() else name for name in names)
    return f"{text}{share}; licence: {part.manifest.get('license') or 'unknown'}"


def held_out_windows(model: ModelConfig, data: Corpus, rows: int = 2) -> Tensor:
    """int64 [rows, T]: windows of the run's held-out tokens, of its largest data set."""
    import torch

    from fourscale import heldout

    stream = max(data.parts, key=lambda part: part.weight).val
    length = min(model.ctx, COMPARED_TOKENS, stream.total - 1)
    starts = heldout.eval_starts(stream.total, length, rows * length)[:rows]
    return torch.from_numpy(stream.windows(starts[starts + length <= stream.total], length))


@door
def main() -> None:
    cfg = parse(ExportConfig)
    refuse_existing(cfg.out)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs a network, and waiting for one takes long

    from fourscale import corpus, rundir

    ckpt = rundir.open_checkpoint(cfg.ckpt)
    tokenizer = rundir.load_tokenizer(ckpt)
    data = corpus.of_run(ckpt.run)
    held_out = None if data is None else held_out_windows(ckpt.model, data)
    if held_out is None:
        print("note: the run's data are gone or have changed; logits are compared on random ids alone")
    print(f"{ckpt.dir.name}: writing, then comparing with what transformers loads (fp32, on the CPU)", flush=True)
    model = rundir.load_model(ckpt, "cpu")
    card = model_card(ckpt, tokenizer, cfg.out.resolve().name, data)
    agreement = publish(cfg.out, model, tokenizer, card, held_out)
    print(
        f"{cfg.out}: {ckpt.dir.name} as a Hugging Face directory; largest difference of logits "
        f"{agreement.difference:.2g} over {agreement.tokens:,} tokens (largest logit {agreement.largest:.3g})\n\n"
        f"from transformers import AutoModelForCausalLM, AutoTokenizer\n{snippet(cfg.out)}"
    )


if __name__ == "__main__":
    main()
