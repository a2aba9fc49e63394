"""Held-out nats per token, perplexity and bits per byte of a checkpoint; each held-out token is scored once.

    python eval_ppl.py --data ./data --ckpt ckpt/step_9000 --ctx 1024
    torchrun --nproc_per_node=2 eval_ppl.py --data ./data --ckpt ckpt --backend gloo
    python eval_ppl.py --data ./data --ckpt ckpt --json ppl.json        # the figures in a file as well

The stream is cut into windows of --ctx tokens, the last one partial; a token sees what its window holds before it.
Every rank holds the whole model and takes its share of the windows; the figures depend neither on how many ranks there
are nor on --local-bsz. End-of-text tokens are scored like any other, and count no bytes of text.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from fourscale.config import EvalConfig, InputError, ModelConfig, RunFailed, door, parse

if TYPE_CHECKING:
    from fourscale.shards import TokenStream
    from fourscale.tokenization import Tokenizer


def check_tokenizer(trained: dict[str, Any], data: dict[str, Any], data_dir: object) -> None:
    """Raise InputError where the data's tokenizer entry isn't the one that the model was trained with."""
    for name in ("sha256", "vocab_size"):
        if trained.get(name) != data.get(name):
            ours, theirs = (f"{t.get('kind')}, {name} {t.get(name)}" for t in (trained, data))
            raise InputError(
                f"--data {data_dir}: its tokenizer ({theirs}) is not that of the checkpoint ({ours}); "
                "name the data that the run was trained on, or prepare this text with the same tokenizer"
            )


def window_length(asked: int | None, model: ModelConfig) -> int:
    """--ctx, or the model's. Raises InputError where learned positions end before it."""
    if asked is not None and asked > model.ctx and model.arch == "gpt2":
        raise InputError(f"--ctx {asked}: the model has {model.ctx} learned positions; use at most {model.ctx}")
    return asked or model.ctx


def scored_bytes(stream: TokenStream, tokenizer: Tokenizer) -> int | None:
    """Bytes of text in the scored tokens: all but those of the stream's first token, which nothing predicts."""
    if stream.text_bytes is None:
        return None
    first = int(stream.read(0, 1)[0])
    return stream.text_bytes - (0 if first == tokenizer.eot_id else len(tokenizer.decode_bytes([first])))


def render(figures: dict[str, Any]) -> str:
    """The figures for a reader, a line each."""
    f = figures
    error = "" if f["standard_error"] is None else f" +- {f['standard_error']:.4f} (standard error over windows)"
    bits = "n/a (the data's text size is unknown)" if f["bits_per_byte"] is None else f"{f['bits_per_byte']:.4f}"
    update = f"{f['update']:,}"
    bar = ""
    if f["unigram_perplexity"] is not None:
        counted = f["unigram_perplexity"]
        bar = f" (counting single tokens: {counted:.1f}, {counted / f['perplexity']:.1f} x)"
    return "\n".join(
        (
            f"checkpoint  {f['ckpt']} (update {update})",
            f"data        {f['data']} {f['split']}",
            f"nats/token  {f['nats_per_token']:.4f}{error}",
            f"perplexity  {f['perplexity']:.4f}{bar}",
            f"bits/byte   {bits}",
            f"tokens      {f['tokens']:,} scored, each once, in {f['windows']:,} windows of {f['ctx']:,}",
            f"computed    {f['dtype']} on {f['world_size']} x {f['device']}",
        )
    )


@door
def main() -> None:
    cfg = parse(EvalConfig)
    cfg.check()
    import torch

    from fourscale import heldout, parallel, rundir, shards

    topology = parallel.start("ddp", cfg.backend, cfg.device, cfg.dtype)
    say = print if topology.main else (lambda *_, **__: None)

    # Rank 0 says which checkpoint is the latest: a run that goes on may publish another while ranks look.
    ckpt = rundir.open_checkpoint(topology.from_main(lambda: rundir.open_checkpoint(cfg.ckpt).dir))
    ctx = window_length(cfg.ctx, ckpt.model)
    manifest = shards.load_manifest(cfg.data)
    check_tokenizer(ckpt.run["tokenizer"], manifest["tokenizer"], cfg.data)
    stream = shards.open_split(cfg.data, cfg.split)
    if ctx > ckpt.model.ctx:
        say(f"note: --ctx {ctx} is longer than the {ckpt.model.ctx} tokens that the model was trained on")
    if stream.digest != ckpt.run["data"].get(f"{cfg.split}_digest"):
        say(f"note: --data {cfg.data}: other {cfg.split} tokens than the run's own")

    model = rundir.load_model(ckpt, topology.device)
    starts = heldout.eval_starts(stream.total, ctx)
    score = heldout.score(model, stream, ctx, starts, cfg.local_bsz, topology, progress=True)
    if not math.isfinite(score.loss):
        raise RunFailed(f"{ckpt.dir}: the held-out loss is {score.loss}; the run diverged, use an earlier step")

    unigram = manifest.get("unigram_nats") if cfg.split == "val" else None
    text_bytes = scored_bytes(stream, rundir.load_tokenizer(ckpt))
    figures = {
        "ckpt": str(ckpt.dir),
        "update": ckpt.step["update"],
        "data": str(cfg.data),
        "split": cfg.split,
        "digest": stream.digest,
        "nats_per_token": score.loss,
        "standard_error": None if math.isnan(score.standard_error) else score.standard_error,
        "perplexity": score.perplexity,
        "unigram_perplexity": None if unigram is None else math.exp(unigram),
        "bits_per_byte": heldout.bits_per_byte(score.nats, text_bytes) if text_bytes else None,
        "nats": score.nats,
        "tokens": score.tokens,
        "text_bytes": text_bytes,
        "windows": len(starts),
        "ctx": ctx,
        "dtype": topology.dtype,
        "device": str(topology.device.type),
        "world_size": topology.world_size,
        "torch": torch.__version__,
    }
    say(render(figures), flush=True)
    if cfg.json is not None and topology.main:
        cfg.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    parallel.stop(topology)


if __name__ == "__main__":
    main()
