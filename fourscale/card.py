"""Where an exported model comes from: the model card's words, and the same for programs (fourscale.json)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fourscale import __version__, budget, code_version, hf, rundir
from fourscale.agreement import Agreement
from fourscale.corpus import Corpus, Part
from fourscale.rundir import Checkpoint
from fourscale.tokenization import Tokenizer

DOCUMENT_MASK = """
It was trained with document masking: attention and positions began anew at each `{eot}`, which opens the document that
follows. This class has no such mask: give each document as a sequence of its own. For several in one sequence, pass
`position_ids` that restart at each `{eot}`, and `use_cache=False`: transformers 5 then keeps them apart. Otherwise it
sees across their boundaries, as it never did in training.
"""
TRAINED_TOKENIZER = """
Documents were separated by `{eot}`; in training text the same characters were ordinary text, while this
tokenizer reads them as the control token. It adds no token at the start of a text.
"""
BASE = "A base language model: it continues text and was never trained to answer or to refuse."
NO_TOKENIZER = "\nNo tokenizer came with this model: its ids are known by the data that it was trained on alone.\n"


def snippet(out: str, with_tokenizer: bool = True) -> str:
    """The lines that load an export."""
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{out}")\n' if with_tokenizer else ""
    return f'{tokenizer}model = AutoModelForCausalLM.from_pretrained("{out}")'


def model_card(ckpt: Checkpoint, tokenizer: Tokenizer | None, out_name: str, data: Corpus | None, dtype: str) -> str:
    """README.md of the export but for its last lines: what it is, and where every part of it comes from.

    data: None where it's gone; dtype: of the weights. Where things lay on this machine is nobody's business.
    """
    cfg = ckpt.model
    facts = {
        "architecture": f"{hf.architecture(cfg)}, {cfg.n_layers} layers, width {cfg.d_model}, {cfg.n_heads} heads "
        f"({cfg.n_kv_heads} for keys and values), weights in {dtype}",
        "parameters in training": f"{budget.count_parameters(cfg).total:,} (padded vocabulary rows included; cut here)",
        "context length": f"{cfg.ctx:,} tokens",
    }
    if tokenizer is not None:
        facts["tokenizer"] = f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids, sha256 `{tokenizer.sha256}`"
    facts |= _imported(ckpt) if "imported" in ckpt.run else _trained(ckpt, data)
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    if tokenizer is None:
        words = NO_TOKENIZER
    elif "imported" in ckpt.run:
        adds = ckpt.run["imported"].get("adds")
        words = f"\nThe tokenizer is the source's; of its own it puts {adds} a text.\n" if adds else ""
    else:
        words = TRAINED_TOKENIZER.format(eot=tokenizer.eot_token)
    if cfg.doc_mask:
        words += DOCUMENT_MASK.format(eot=tokenizer.eot_token if tokenizer else f"id {cfg.eot_id}")
    names = "AutoModelForCausalLM" + (", AutoTokenizer" if tokenizer else "")
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {out_name}

{BASE if "imported" not in ckpt.run else "A language model as its source has it, on its way through fourscale."}

```python
from transformers import {names}
{snippet(out_name, tokenizer is not None)}
```

| | |
|---|---|
{rows}
{words}"""


def _trained(ckpt: Checkpoint, data: Corpus | None) -> dict[str, str]:
    """Rows of the card for a run of train.py."""
    run, step = ckpt.run, ckpt.step
    attempt, val_loss = run["attempts"][-1], step.get("val_loss")
    digests = {name: table["train_digest"] for name, table in rundir.data_parts(run["data"]).items()}
    facts = {
        "checkpoint": f"{ckpt.dir.name} of run `{ckpt.run_dir.name}`, {step['tokens']:,} tokens seen",
        "digest of the checkpoint": f"`{rundir.digest(ckpt)}`",
        "held-out loss in training": "not evaluated" if val_loss is None else f"{val_loss:.4f} nats/token",
        "text": "no longer at hand; licence: unknown" if data is None else "<br>".join(map(provenance, data.parts)),
        "training tokens": "<br>".join(f"{name} sha256 `{digest}`".strip() for name, digest in digests.items()),
        "code": f"fourscale {attempt.get('code')}, torch {attempt.get('torch')}",
    }
    for word, told in (("init", "began with the weights of"), ("origin", "branched from")):
        if source := run.get(word):
            facts[told] = f"{public_name(source['from'])}, digest `{source['digest']}`"
    return facts


def _imported(ckpt: Checkpoint) -> dict[str, str]:
    """Rows of the card for a model of import_hf.py, which nobody trained here."""
    source = ckpt.run["imported"]
    revision = f", revision `{source['revision']}`" if source.get("revision") else ""
    return {
        "imported from": f"{public_name(source['source'])}{revision}, not trained further",
        "digest of its weights": f"`{source['digest']}`",
        "digest of the checkpoint": f"`{rundir.digest(ckpt)}`",
        "text": "see the source; licence: see the source",
    }


def public_name(source: str) -> str:
    """A hub id as it is, of a path, which is absolute, the end: two names for a step of a run, else one."""
    path = Path(source)
    if not path.is_absolute():
        return source
    return f"{path.parent.name}/{path.name}" if path.name.startswith("step_") else path.name


def provenance(part: Part) -> str:
    """Name and licence of a data set's text, and its share of the samples where there are others."""
    share = "" if part.weight == 1 else f" ({float(part.weight):.1%} of samples)"
    if part.manifest is None:
        return f"shards {part.name}{share}; licence: unknown"
    sources = part.manifest.get("sources") or [part.manifest.get("source", {})]
    names = [source.get("name", part.name) for source in sources]
    text = ", ".join(Path(name).name if Path(name).is_absolute() else name for name in names)
    return f"{text}{share}; licence: {part.manifest.get('license') or 'unknown'}"


def record(ckpt: Checkpoint, dtype: str) -> dict[str, Any]:
    """fourscale.json of the export but for its tokenizer and logits, which `publish` adds."""
    import torch
    import transformers

    run, step = ckpt.run, ckpt.step
    checkpoint = {"name": ckpt.dir.name, "run": ckpt.run_dir.name, "digest": rundir.digest(ckpt)}
    table: dict[str, Any] = {
        "checkpoint": checkpoint | {k: step.get(k) for k in ("update", "tokens", "val_loss")},
        "data": rundir.data_parts(run["data"]),
        "dtype": dtype,
        "versions": {
            "fourscale": __version__,
            "code": code_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    for word, key in (("imported", "source"), ("init", "from"), ("origin", "from")):
        if word in run:
            named = public_name(run[word][key])
            table[word] = {k: named if k in (key, "named") else v for k, v in run[word].items()}
    return table


def agreement_lines(agreement: Agreement) -> str:
    """The last lines of the card."""
    where = "random ids and held-out text" if agreement.held_out else "random ids"
    rounded = ""
    if agreement.rounding is not None:
        rounded = f" To the logits of the weights before they were rounded, it is {agreement.rounding:.2g}."
    return (
        f"\nLogits of this directory (fp32, CPU) were compared with the checkpoint's on {agreement.tokens:,} tokens of "
        f"{where}: largest difference {agreement.difference:.2g}, largest logit {agreement.largest:.3g}.{rounded}\n"
    )
