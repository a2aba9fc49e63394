"""Checkpoint -> Hugging Face directory for transformers, lm_eval and vLLM, published only if it computes the same.

    python export_hf.py --ckpt ckpt/step_9000 --out ./ckpt_hf
    python export_hf.py --ckpt ckpt --out ./ckpt_bf16 --dtype bf16

The directory is written under a temporary name beside --out and loaded again as a user would, without a network. Its
fp32 logits are compared with ours on random ids and, where the run's data are still there, on held-out text; so are its
token ids. It takes its name only after that, and --out must not exist before. Memory holds one model at a time.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourscale.cli import InputError, RunFailed, door, parse
from fourscale.flags import ExportConfig
from fourscale.outdir import refuse_existing, whole, writing

if TYPE_CHECKING:
    from torch import Tensor

    from fourscale.agreement import Agreement, Logits
    from fourscale.config import ModelConfig
    from fourscale.corpus import Corpus
    from fourscale.model import GPT
    from fourscale.pretrained import Pretrained
    from fourscale.tokenization import Tokenizer

TEXTS = (
    "Hello world",
    "  two leading spaces, a tab\tand a line\n\n  end",
    "def f(x):\n    return x + 1  # twelve: 12, 3.14\n",
    "naïve café, 東京, здравствуй, \U0001f40d",
    "\n",
    " ",
)


def write(
    directory: Path,
    model: GPT,
    tokenizer: Tokenizer | None,
    dtype: str = "fp32",
    max_shard_size: int = 5_000_000_000,
    special_ids: dict[str, Any] | None = None,
) -> None:
    """Weights, config and tokenizer of a Hugging Face model into an existing empty directory.

    special_ids: bos_token_id and so on of config.json, in place of the tokenizer's end-of-text. The tokenizer's file is
    written as it is.
    """
    from fourscale import hf, hfdir

    hfdir.write_weights(directory, model, dtype, max_shard_size)
    eot = tokenizer.eot_id if tokenizer is not None else None
    special = special_ids or {"bos_token_id": eot, "eos_token_id": eot}
    # Padding is a matter of generation alone: in config.json it would cut the token's embedding off from training.
    generation = special if special.get("pad_token_id") is not None else special | {"pad_token_id": eot}
    tables = {
        "config.json": hf.hf_config(model.cfg, eot, dtype) | (special_ids or {}),
        "generation_config.json": {name: i for name, i in generation.items() if i is not None},
    }
    if tokenizer is not None:
        tokenizer.save(directory)
        tables["tokenizer_config.json"] = hf.tokenizer_config(tokenizer.eot_token, model.cfg.ctx)
    for name, table in tables.items():
        (directory / name).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def as_trained(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer without what would add or cut tokens, as training never did."""
    from fourscale.tokenization import Tokenizer

    spec = json.loads(tokenizer.data)
    unused = [name for name in ("post_processor", "truncation", "padding") if spec.get(name)]
    if not unused:
        return tokenizer
    data = json.dumps(spec | dict.fromkeys(unused), ensure_ascii=False).encode("utf-8")
    return Tokenizer(tokenizer.kind, data, tokenizer.eot_token)


def known_texts(tokenizer: Tokenizer, ids: Tensor) -> list[str]:
    """Texts that our tokenizer can encode: TEXTS where it knows their characters, and what rows of ids hold between
    control tokens.

    None holds the characters of a control token, which theirs reads as that token.
    """
    control = {token["id"]: token["content"] for token in json.loads(tokenizer.data).get("added_tokens") or []}
    known, texts = [], list(TEXTS)
    for row in ids.tolist():
        part: list[int] = []
        for i in (*row, tokenizer.eot_id):
            if i in control or i >= tokenizer.vocab_size:  # a model may have more rows than there are ids
                texts.append(tokenizer.decode(part))
                part = []
            else:
                part.append(i)
    for text in texts:
        if text and not any(name in text for name in control.values()):
            with contextlib.suppress(InputError):  # a char tokenizer that lacks one of its characters
                tokenizer.encode(text)
                known.append(text)
    return known


def compare_tokenizer(ours: Tokenizer, theirs: Any, texts: list[str]) -> str | None:
    """The first difference in ids or text as a phrase, None if there is none."""
    for text in texts:
        ids, found = ours.encode(text), theirs(text, add_special_tokens=False)["input_ids"]
        if found != ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(found, ids, strict=False)) if a != b), min(len(found), len(ids))
            )
            return f"{text[:40]!r} becomes {found[at : at + 8]} from token {at} on, ours {ids[at : at + 8]}"
        if (back := theirs.decode(ids)) != ours.decode(ids):
            return f"ids {ids[:8]} become {back[:40]!r}, ours {ours.decode(ids)[:40]!r}"
    return None if theirs.eos_token_id == ours.eot_id else f"eos id {theirs.eos_token_id}, ours {ours.eot_id}"


def load_as_user(directory: Path) -> tuple[Any, Any]:
    """(model, tokenizer) from files alone, by transformers' defaults. Raises RunFailed where they don't load."""
    from fourscale import agreement

    return agreement.load_theirs(directory), load_tokenizer_as_user(directory)


def load_tokenizer_as_user(directory: Path) -> Any:
    from transformers import AutoTokenizer

    from fourscale import agreement

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as e:  # whatever it is, a user would meet it too
        raise RunFailed(f"transformers can't load its tokenizer ({agreement.first_line(e)})") from None


def verify(
    directory: Path, kept: list[Logits], tokenizer: Tokenizer | None, ids: list[Tensor], dtype: str
) -> Agreement:
    """Load the directory as a user would and compare it with our logits (of the exported weights, then, where they were
    rounded, of those before) and our tokenizer. ids: random windows, and held-out ones where there are some.

    Raises RunFailed where logits differ by more than rounding, or token ids differ.
    """
    from fourscale import agreement

    try:
        theirs = agreement.load_theirs(directory, fp32=dtype != "fp32")
        gaps = agreement.differences(theirs, kept)
        del theirs
        if not agreement.agrees(gaps[0], kept[0].largest):
            raise RunFailed(
                f"its logits differ from ours by {gaps[0]:.3g} (largest logit {kept[0].largest:.3g}): look at the "
                "mapping in fourscale/hf.py and the installed transformers"
            )
        if tokenizer is not None:
            texts = known_texts(tokenizer, ids[-1])
            if fault := compare_tokenizer(tokenizer, load_tokenizer_as_user(directory), texts):
                raise RunFailed(f"its tokenizer differs from ours ({fault})")
    except RunFailed as e:
        raise RunFailed(f"export: {e}; nothing was published") from None
    tokens = sum(batch.numel() for batch in ids)
    return agreement.Agreement(gaps[0], kept[0].largest, tokens, len(ids) > 1, gaps[1] if len(gaps) > 1 else None)


def publish(
    out: Path,
    model: GPT | Pretrained,
    tokenizer: Tokenizer | None,
    card: str,
    held_out: Tensor | None = None,
    *,
    dtype: str = "fp32",
    max_shard_size: int = 5_000_000_000,
    record: dict[str, Any] | None = None,
    special_ids: dict[str, Any] | None = None,
    verbatim: bool = False,
) -> Agreement:
    """Write, verify and only then rename to `out`; otherwise nothing is left behind.

    model: one at hand (evaluation mode, fp32, CPU), or at rest, which is then loaded and freed again. held_out: int64
    [B, T]. record: more of fourscale.json. verbatim: the tokenizer may add tokens of its own, as its makers had it.
    Raises InputError where `out` exists or can't be written, RunFailed where it doesn't compute what `model` does.
    """
    from fourscale import agreement, hfdir
    from fourscale.card import agreement_lines
    from fourscale.pretrained import Pretrained

    tokenizer = tokenizer if tokenizer is None or verbatim else as_trained(tokenizer)
    with whole(out) as temporary:
        ours = model.model() if isinstance(model, Pretrained) else model
        ids = [agreement.random_ids(ours.cfg, ours.cfg.vocab_size), *([] if held_out is None else [held_out])]
        rows = [row for batch in ids for row in agreement.comparable(ours.cfg, batch)]
        with writing(out):
            kept = [agreement.Logits(ours, rows, temporary)]
            if dtype != "fp32":
                ours = hfdir.rounded(ours if isinstance(model, Pretrained) else copy.deepcopy(ours), dtype)
                kept.insert(0, agreement.Logits(ours, rows, temporary))
            write(temporary, ours, tokenizer, dtype, max_shard_size, special_ids)
        del ours  # theirs takes its place
        found = verify(temporary, kept, tokenizer, ids, dtype)
        with writing(out):
            (temporary / "README.md").write_text(card + agreement_lines(found), encoding="utf-8")
            entry = tokenizer.entry() if tokenizer is not None else None
            table = (record or {}) | {"tokenizer": entry, "logits": found.table()}
            (temporary / hfdir.PROVENANCE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return found


def held_out_windows(model: ModelConfig, data: Corpus, rows: int = 2) -> Tensor:
    """int64 [rows, T]: windows of the run's held-out tokens, of its largest data set."""
    import torch

    from fourscale import agreement, heldout

    stream = max(data.parts, key=lambda part: part.weight).val
    length = min(agreement.window(model), stream.total - 1)
    starts = heldout.eval_starts(stream.total, length, rows * length)[:rows]
    return torch.from_numpy(stream.windows(starts[starts + length <= stream.total], length))


@door
def main() -> None:
    cfg = parse(ExportConfig)
    cfg.check()
    refuse_existing(cfg.out)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs a network, and waiting for one takes long

    from fourscale import card, corpus
    from fourscale.pretrained import open_pretrained

    source = open_pretrained(cfg.ckpt)
    ckpt = source.ckpt
    if ckpt is None:
        raise InputError(f"--ckpt {cfg.ckpt}: is a Hugging Face directory already; name a checkpoint of train.py")
    imported = ckpt.run.get("imported")
    tokenizer = source.tokenizer() if source.tokenizer_entry is not None else None
    data = None if imported else corpus.of_run(ckpt.run)
    held_out = None if data is None else held_out_windows(ckpt.model, data)
    if tokenizer is None:
        print("note: the run has no tokenizer, so the export has none: ids in, ids out")
    if held_out is None and not imported:
        print("note: the run's data are gone or have changed; logits are compared on random ids alone")
    print(f"{ckpt.dir.name}: writing, then comparing with what transformers loads (fp32, on the CPU)", flush=True)
    agreement = publish(
        cfg.out,
        source,
        tokenizer,
        card.model_card(ckpt, tokenizer, cfg.out.resolve().name, data, cfg.dtype),
        held_out,
        dtype=cfg.dtype,
        max_shard_size=cfg.max_shard_size,
        record=card.record(ckpt, cfg.dtype),
        special_ids=imported and imported.get("special_ids"),
        verbatim=imported is not None,
    )
    names = "AutoModelForCausalLM" + (", AutoTokenizer" if tokenizer else "")
    print(
        f"{cfg.out}: {ckpt.dir.name} as a Hugging Face directory; {agreement.told()}\n\n"
        f"from transformers import {names}\n{card.snippet(cfg.out.as_posix(), tokenizer is not None)}"
    )


if __name__ == "__main__":
    main()
