"""Held-out nats per token, perplexity and bits per byte of a checkpoint; each held-out token is scored once.

    python eval_ppl.py --data ./data --ckpt ckpt/step_9000 --ctx 1024
    torchrun --nproc_per_node=2 eval_ppl.py --data ./data --ckpt ckpt --backend gloo
    python eval_ppl.py --data ./data --ckpt ckpt --json ppl.json        # the figures in a file as well
    python eval_ppl.py --data ./web --data ./code --ckpt ckpt           # a table, and the figures of all as one

The stream is cut into windows of --ctx tokens, the last one partial; a token sees what its window holds before it.
Every rank holds the whole model and takes its share of the windows; the figures depend neither on how many ranks there
are nor on --local-bsz. End-of-text tokens are scored like any other, and count no bytes of text.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourscale.cli import InputError, RunFailed, door, parse
from fourscale.config import EvalConfig, ModelConfig

if TYPE_CHECKING:
    from fourscale.heldout import Score
    from fourscale.rundir import Checkpoint
    from fourscale.shards import TokenStream
    from fourscale.tokenization import Tokenizer


def check_tokenizer(trained: dict[str, Any] | None, data: dict[str, Any], data_dir: object) -> None:
    """Raise InputError where the data's tokenizer entry isn't the one that the model was trained with."""
    if trained is None:
        raise InputError(
            f"--data {data_dir}: ids of the tokenizer {data.get('kind')}, but the run was trained on bare ids of an "
            "unknown one; name shards without a tokenizer, as the run's own"
        )
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


def flags_of(path: str, cfg: EvalConfig, run: dict[str, Any]) -> tuple[str | None, str]:
    """--val-data and --data-dtype for `path`: as said, else the run's own where `path` is one of its data sets."""
    from fourscale.sources import shares

    config = run["config"]
    specs = [config["data"]] if isinstance(config.get("data"), str) else config.get("data", [])
    own = Path(path).resolve() in {Path(spec).resolve() for spec, _ in shares(specs, "--data")}
    val_data, data_dtype = (config.get("val_data"), config.get("data_dtype", "auto")) if own else (None, "auto")
    return cfg.val_data or val_data, data_dtype if cfg.data_dtype == "auto" else cfg.data_dtype


def open_data(path: str, cfg: EvalConfig, ckpt: Checkpoint) -> tuple[TokenStream, dict[str, Any]]:
    """The split to score, and the manifest ({} for foreign shards). Raises InputError where ids aren't the model's."""
    from fourscale import formats, rundir, shards, tokenization

    trained = ckpt.run["tokenizer"]
    if not formats.is_foreign(path):
        manifest = shards.load_manifest(Path(path))
        check_tokenizer(trained, manifest["tokenizer"], path)
        return shards.open_split(Path(path), cfg.split), manifest
    vocab_size = ckpt.model.vocab_size if trained is None else trained["vocab_size"]
    found = formats.open_foreign(path, *flags_of(path, cfg, ckpt.run), vocab_size)
    stream = found.streams[cfg.split]
    own = {table.get(f"{cfg.split}_digest") for table in rundir.data_parts(ckpt.run["data"]).values()}
    if trained is None or stream.digest in own:  # whose ids the run's own are was settled when it began
        return stream, {}
    if found.tokenizer is not None:
        check_tokenizer(trained, tokenization.build(found.tokenizer, lambda: iter(())).entry(), path)
    elif found.vocab_size is not None and found.vocab_size > vocab_size:
        raise InputError(
            f"--data {path}: its header says {found.named} {found.vocab_size:,} ids, the checkpoint's tokenizer has "
            f"{vocab_size:,}; name the data that the run was trained on, or prepare this text with the same tokenizer"
        )
    return stream, {}


def scored_bytes(stream: TokenStream, tokenizer: Tokenizer | None) -> int | None:
    """Bytes of text in the scored tokens: all but those of the stream's first token, which nothing predicts."""
    if stream.text_bytes is None or tokenizer is None:
        return None
    first = int(stream.read(0, 1)[0])
    return stream.text_bytes - (0 if first == tokenizer.eot_id else len(tokenizer.decode_bytes([first])))


def figures_of(score: Score, text_bytes: int | None, unigram_nats: float | None) -> dict[str, Any]:
    """What a score says, for readers and --json; None where it can't be known."""
    from fourscale.heldout import bits_per_byte

    return {
        "nats_per_token": score.loss,
        "standard_error": None if math.isnan(score.standard_error) else score.standard_error,
        "perplexity": score.perplexity,
        "unigram_perplexity": None if unigram_nats is None else math.exp(unigram_nats),
        "bits_per_byte": bits_per_byte(score.nats, text_bytes) if text_bytes else None,
        "nats": score.nats,
        "tokens": score.tokens,
        "text_bytes": text_bytes,
        "windows": len(score.window_nats),
    }


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


def render_table(rows: list[dict[str, Any]]) -> str:
    """The figures of several data sets, a line each, and last those of all their windows as one."""

    def cell(value: float | None, digits: int) -> str:
        return "n/a" if value is None else f"{value:,.{digits}f}"

    first = rows[0]
    labels = [f"{f['data']} {f['split']}" for f in rows[:-1]] + ["pooled"]
    width = max(map(len, labels))
    head = ("nats/token", "+-", "perplexity", "single tokens", "bits/byte", "tokens")
    columns = (("nats_per_token", 4), ("standard_error", 4), ("perplexity", 4), ("unigram_perplexity", 1))
    columns += (("bits_per_byte", 4), ("tokens", 0))
    lines = [f"{'':{width}}  " + "  ".join(f"{name:>13}" for name in head)]
    for label, f in zip(labels, rows, strict=True):
        lines.append(f"{label:{width}}  " + "  ".join(f"{cell(f[name], digits):>13}" for name, digits in columns))
    return "\n".join(
        (
            f"checkpoint {first['ckpt']} (update {first['update']:,}), {first['dtype']} on "
            f"{first['world_size']} x {first['device']}; each token scored once, in windows of {first['ctx']:,}",
            *lines,
        )
    )


@door
def main() -> None:
    cfg = parse(EvalConfig)
    cfg.check()
    import torch

    from fourscale import corpus, formats, heldout, parallel, rundir
    from fourscale.sources import shares

    topology = parallel.start("ddp", cfg.backend, cfg.device, cfg.dtype)
    say = print if topology.main else (lambda *_, **__: None)

    # Rank 0 says which checkpoint is the latest: a run that goes on may publish another while ranks look.
    ckpt = rundir.open_checkpoint(topology.from_main(lambda: rundir.open_checkpoint(cfg.ckpt).dir))
    ctx = window_length(cfg.ctx, ckpt.model)
    weighted = shares(cfg.data, "--data")
    paths = [path for path, _ in weighted]
    corpus.refuse_needless([formats.is_foreign(p) for p in paths], paths, cfg.val_data, cfg.data_dtype, None)
    # Rank 0 first: its line must be out before torchrun ends all ranks for the first that fails.
    topology.from_main(lambda: [open_data(path, cfg, ckpt) for path in paths] and None)
    opened = [open_data(path, cfg, ckpt) for path in paths]
    if any(weight is not None for _, weight in weighted):
        say("note: the weights of --data don't count here: pooled figures are of all tokens alike")
    if ctx > ckpt.model.ctx:
        say(f"note: --ctx {ctx} is longer than the {ckpt.model.ctx} tokens that the model was trained on")
    known = {table.get(f"{cfg.split}_digest") for table in rundir.data_parts(ckpt.run["data"]).values()}
    for path, (stream, manifest) in zip(paths, opened, strict=True):
        if not manifest:
            say(f"note: --data {path}: shards without a manifest, taken as ids of the checkpoint's tokenizer")
        if stream.digest not in known:
            say(f"note: --data {path}: other {cfg.split} tokens than the run's own")

    model = rundir.load_model(ckpt, topology.device)
    tokenizer = None if ckpt.run["tokenizer"] is None else rundir.load_tokenizer(ckpt)
    scores, rows = [], []
    for path, (stream, manifest) in zip(paths, opened, strict=True):
        starts = heldout.eval_starts(stream.total, ctx)
        scores.append(heldout.score(model, stream, ctx, starts, cfg.local_bsz, topology, progress=True))
        if not math.isfinite(scores[-1].loss):
            raise RunFailed(
                f"{ckpt.dir}: the held-out loss is {scores[-1].loss}; the run diverged, use an earlier step"
            )
        unigram = manifest.get("unigram_nats") if cfg.split == "val" else None
        rows.append(
            {"data": path, "split": cfg.split, "digest": stream.digest}
            | figures_of(scores[-1], scored_bytes(stream, tokenizer), unigram)
        )
    if len(rows) > 1:
        sizes = [row["text_bytes"] for row in rows]
        pooled = figures_of(heldout.pooled(scores), None if None in sizes else sum(sizes), None)
        rows.append({"data": "pooled", "split": cfg.split, "digest": None} | pooled)
    about = {"ckpt": str(ckpt.dir), "update": ckpt.step["update"]}
    how = {
        "ctx": ctx,
        "dtype": topology.dtype,
        "device": str(topology.device.type),
        "world_size": topology.world_size,
        "torch": torch.__version__,
    }
    rows = [about | row | how for row in rows]
    figures = rows[0] if len(rows) == 1 else rows
    say(render(rows[0]) if len(rows) == 1 else render_table(rows), flush=True)
    if cfg.json is not None and topology.main:
        cfg.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    parallel.stop(topology)


if __name__ == "__main__":
    main()
