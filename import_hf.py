"""Hugging Face directory or hub id -> a run directory to train on from, published only if it computes the same.

    python import_hf.py --model openai-community/gpt2 --out ./ckpt_imported
    python train.py --init-from ./ckpt_imported --data ./data --ckpt-dir ./tuned --lr 3e-5

What can come in: GPT-2, Llama, Mistral without its window, Qwen3; what our model would compute otherwise is refused by
its name in config.json. Every weight is kept, bit for bit, in fp32, and every row of the vocabulary. train.py,
eval_ppl.py and sample.py read a Hugging Face directory as it is, too: a run directory of it is for keeping and proving.
Memory holds one model at a time.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourscale.cli import InputError, RunFailed, door, parse
from fourscale.flags import ImportConfig
from fourscale.outdir import refuse_existing, whole, writing

if TYPE_CHECKING:
    from fourscale.agreement import Agreement, Logits
    from fourscale.pretrained import Pretrained
    from fourscale.tokenization import Tokenizer

STEP = "step_0"


def notes_of(source: Pretrained, tokenizer: Tokenizer | None) -> list[str]:
    """What a user should know of what comes in, and what doesn't."""
    from fourscale import hfdir

    notes, path = [], source.path
    if tokenizer is None:
        why = "only a sentencepiece model" if (path / "tokenizer.model").is_file() else "no tokenizer.json"
        return [f"it comes without a tokenizer ({source.hub_id or path.name} has {why}): ids in, ids out"]
    if adds := hfdir.tokens_added(tokenizer.data):
        notes.append(
            f"its tokenizer puts {adds} each text; sample.py, eval_ppl.py and prepare.py add none, so figures and text "
            "may differ from transformers'"
        )
    if tokenizer.vocab_size < source.cfg.vocab_size:
        notes.append(
            f"the model has {source.cfg.vocab_size:,} rows for {tokenizer.vocab_size:,} ids; all are kept, and text is "
            "made of the ids alone"
        )
    settings = path / "tokenizer_config.json"
    chats = settings.is_file() and "chat_template" in hfdir.read_json(settings)
    if chats or (path / "chat_template.jinja").is_file():
        notes.append("its chat template stays behind: here, a model continues text")
    return notes


def tokenizer_of(source: Pretrained) -> Tokenizer | None:
    """The source's tokenizer, None where it has none. Raises InputError where the model lacks rows for its ids."""
    if source.tokenizer_entry is None:
        return None
    tokenizer = source.tokenizer()
    if tokenizer.vocab_size > source.cfg.vocab_size:
        raise InputError(
            f"--model {source.path}: its tokenizer has {tokenizer.vocab_size:,} ids, the model rows for "
            f"{source.cfg.vocab_size:,}; put the tokenizer that it was trained with there"
        )
    return tokenizer


def entry_of(source: Pretrained, tokenizer: Tokenizer | None, agreement: Agreement) -> dict[str, Any]:
    """run.json's `imported`: what the weights are and how they were compared."""
    import torch
    import transformers

    from fourscale import code_version, hf, hfdir

    about, config = source.about, source.hf.config
    names = {getattr(torch, theirs): ours for ours, theirs in hf.TORCH_NAMES.items()}
    return {
        "source": about["ckpt"],
        "revision": about.get("revision"),
        "digest": about["digest"],
        "class": (config.get("architectures") or [None])[0],
        "dtype": names.get(source.hf.dtype, str(source.hf.dtype)),
        "special_ids": {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config},
        "stop_ids": list(hfdir.stop_ids(source.path, config)),
        "adds": hfdir.tokens_added(tokenizer.data) if tokenizer is not None else "",
        "logits": agreement.table(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": code_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def compare(source: Pretrained, kept: Logits, tokens: int) -> Agreement:
    """Our logits against those that transformers computes of the source. Raises RunFailed where they differ."""
    from fourscale import agreement

    try:
        gap = agreement.differences(agreement.load_theirs(source.path, fp32=True), [kept])[0]
        if not agreement.agrees(gap, kept.largest):
            raise RunFailed(
                f"transformers' logits differ from ours by {gap:.3g} (largest logit {kept.largest:.3g}): look for what "
                "its config.json has that isn't known here"
            )
    except RunFailed as e:
        raise RunFailed(f"--model {source.path}: {e}; nothing was published") from None
    return agreement.Agreement(gap, kept.largest, tokens, held_out=False)


def publish(out: Path, source: Pretrained, tokenizer: Tokenizer | None) -> Agreement:
    """Write the run, compare its logits with those that transformers computes of the source, and only then rename it to
    `out`; otherwise nothing is left behind. Raises InputError, or RunFailed where they differ."""
    from fourscale import agreement, checkpoint, durable, rundir

    with whole(out) as temporary:
        model = source.model()
        ids = agreement.random_ids(source.cfg, source.cfg.vocab_size)
        with writing(out):
            (temporary / STEP).mkdir()
            kept = agreement.Logits(model, list(ids), temporary)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")  # as it is meant
                files = checkpoint.write(temporary / STEP, checkpoint.model_tensors(model), 0, None)
        del model  # theirs takes its place
        found = compare(source, kept, ids.numel())
        run = {
            "format": rundir.FORMAT,
            "model": dataclasses.asdict(source.cfg),
            "tokenizer": tokenizer.entry() if tokenizer is not None else None,
            "imported": entry_of(source, tokenizer, found),
        }
        step = {"update": 0, "tokens": 0, "samples_seen": 0, "applied": 0, "skipped": 0, "val_loss": None}
        step |= {"files": files}
        with writing(out):
            if tokenizer is not None:
                tokenizer.save(temporary)
            durable.write_json(temporary / STEP / "step.json", step | {"sha256": rundir.seal(step)})
            durable.write_json(temporary / "run.json", run)
            durable.replace(temporary / "latest", f"{STEP}\n")
    return found


@door
def main() -> None:
    cfg = parse(ImportConfig)
    cfg.check()
    refuse_existing(cfg.out)

    from fourscale import budget, hf
    from fourscale.pretrained import open_pretrained

    source = open_pretrained(cfg.model, "--model", cfg.revision)
    os.environ["HF_HUB_OFFLINE"] = "1"  # all that is needed is here by now
    if source.ckpt is not None:
        raise InputError(f"--model {cfg.model}: is a checkpoint of train.py already; name it with --init-from, --ckpt")
    tokenizer = tokenizer_of(source)
    size = budget.count_parameters(source.cfg).total
    print(
        f"{cfg.model}: {hf.architecture(source.cfg)}, {size:,} parameters; reading, then comparing "
        "with what transformers loads (fp32, on the CPU)",
        flush=True,
    )
    for note in notes_of(source, tokenizer):
        print(f"note: {note}")
    agreement = publish(cfg.out, source, tokenizer)
    print(
        f"{cfg.out}: {cfg.model} as a run; {agreement.told()}\n\n"
        f"python train.py --init-from {cfg.out} --data ./data --ckpt-dir ./tuned"
    )


if __name__ == "__main__":
    main()
