"""Held-out nats per token, perplexity and bits per byte of a checkpoint; each held-out token is scored once.

    python eval_ppl.py --data ./data --ckpt ckpt/step_9000 --ctx 1024
    torchrun --nproc_per_node=2 eval_ppl.py --data ./data --ckpt ckpt --backend gloo
    python eval_ppl.py --data book.txt --ckpt ckpt              # text, by the model's own tokenizer
    python eval_ppl.py --data 'wiki/*.txt' --whole-files --ckpt ./gpt2 --stride 512    # a Hugging Face directory
    python eval_ppl.py --data 'shards/*.bin' --data-dtype uint16 --ckpt ckpt --by-shard
    python eval_ppl.py --data ./web --data ./code --ckpt ckpt   # a table, and the figures of all as one
    python eval_ppl.py --data ./data --ckpt ckpt --json ppl.json

The stream is cut into windows of --ctx tokens, the last one partial; a token sees what its window holds before it. With
--stride N windows overlap: each begins N tokens after the one before, and scores what is new in it. Every rank holds
the whole model and takes its share of the windows; the figures depend neither on how many ranks there are nor on
--local-bsz nor on where the stream is cut into shards. End-of-text tokens are scored like any other, and count no bytes
of text.

prepare.py mixes documents of several sources, and a manifest doesn't say which is where: for a figure of each, prepare
them into directories of their own and name all with --data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fourscale import code_version
from fourscale.cli import InputError, RunFailed, door, parse
from fourscale.config import ModelConfig
from fourscale.flags import EvalConfig

if TYPE_CHECKING:
    import numpy as np
    import torch

    from fourscale.heldout import Score
    from fourscale.parallel import Topology
    from fourscale.pretrained import Pretrained
    from fourscale.rawtext import TextStream
    from fourscale.shards import TokenStream
    from fourscale.tokenization import Tokenizer

R = TypeVar("R")
BLOCK = 1 << 20  # tokens read at once where bytes of text are counted


# ---- whose tokens ----------------------------------------------------------------------------------------------------


def check_tokenizer(
    trained: dict[str, Any] | None,
    data: dict[str, Any],
    data_dir: object,
    same: Callable[[], bool] = lambda: False,
) -> None:
    """Raise InputError where the data's tokenizer entry isn't the one that the model was trained with.

    same: asked where their files differ, whether the two give the same ids all the same.
    """
    if trained is None:
        raise InputError(
            f"--data {data_dir}: ids of the tokenizer {data.get('kind')}, but the run was trained on bare ids of an "
            "unknown one; name shards without a tokenizer, as the run's own"
        )
    for name in ("sha256", "vocab_size"):
        if trained.get(name) != data.get(name):
            if trained.get("vocab_size") == data.get("vocab_size") and same():
                return
            ours, theirs = (f"{t.get('kind')}, {name} {t.get(name)}" for t in (trained, data))
            raise InputError(
                f"--data {data_dir}: its tokenizer ({theirs}) is not that of the checkpoint ({ours}); "
                "name the data that the run was trained on, or prepare this text with the same tokenizer"
            )


def same_ids(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether two tokenizers have the same tokens by the same ids, and cut a hard text the same way."""
    from fourscale import foreign

    if (a.vocab_size, a.eot_id) != (b.vocab_size, b.eot_id):
        return False
    try:
        return a.encode(foreign.TRIAL) == b.encode(foreign.TRIAL) and all(
            a.token_bytes(i) == b.token_bytes(i) for i in range(a.vocab_size)
        )
    except InputError:  # a text that one of them can't spell
        return False


def flags_of(path: str, cfg: EvalConfig, run: dict[str, Any] | None) -> tuple[str | None, str]:
    """--val-data and --data-dtype for `path`: as said, else the run's own where `path` is one of its data sets."""
    from fourscale.sources import shares

    config = {} if run is None else run["config"]
    specs = [config["data"]] if isinstance(config.get("data"), str) else config.get("data", [])
    own = Path(path).resolve() in {Path(spec).resolve() for spec, _ in shares(specs, "--data")}
    val_data, data_dtype = (config.get("val_data"), config.get("data_dtype", "auto")) if own else (None, "auto")
    return cfg.val_data or val_data, data_dtype if cfg.data_dtype == "auto" else cfg.data_dtype


def own_digests(model: Pretrained, side: str) -> set[str | None]:
    """Digests of that side of the data that the model was trained on (of both for "all"), where a run knows them."""
    from fourscale import rundir, shards

    if model.ckpt is None:
        return set()
    parts = rundir.data_parts(model.ckpt.run["data"]).values()
    return {table.get(f"{split}_digest") for table in parts for split in shards.SPLITS if side in (split, "all")}


def scored_whole(path: str, split: str | None) -> bool:
    """True for shards whose names tell no two sides to choose from, and not the other one than --split or, where that
    isn't given, than val; what names training shards themselves, as a glob does, means them."""
    from fourscale import formats

    told = formats.sides_told(path)
    if len(told) == 2:
        return False
    return not told or (told == {split} if split else told == {"val"} or not Path(path).is_dir())


def open_data(path: str, cfg: EvalConfig, model: Pretrained) -> tuple[TokenStream, dict[str, Any]]:
    """The shards to score, and the manifest ({} for foreign ones). Raises InputError where ids aren't the model's."""
    from fourscale import formats, shards, tokenization

    trained = model.tokenizer_entry
    if not formats.is_foreign(path):
        manifest = shards.load_manifest(Path(path))
        entry = manifest["tokenizer"]
        if trained is None and model.ckpt is None:
            raise InputError(
                f"--data {path}: ids of the tokenizer {entry.get('kind')}, but {model.path} holds none to compare it "
                "with; put the model's tokenizer.json there"
            )
        check_tokenizer(trained, entry, path, lambda: same_ids(model.tokenizer(), tokenization.load(Path(path), entry)))
        stream = shards.open_split(Path(path), cfg.side, manifest)
        stream.vocab_size = min(stream.vocab_size, model.cfg.vocab_size)  # a model may lack rows for added tokens
        return stream, manifest
    vocab_size = model.cfg.vocab_size if trained is None else trained["vocab_size"]
    val_data, data_dtype = flags_of(path, cfg, None if model.ckpt is None else model.ckpt.run)
    if val_data is None and scored_whole(path, cfg.split):
        found, side = formats.open_whole(path, data_dtype, vocab_size), "all"
    else:
        found, side = formats.open_foreign(path, val_data, data_dtype, vocab_size), cfg.side
    stream = found.streams[side]
    if trained is None or stream.digest in own_digests(model, side):  # whose ids those are was settled as it began
        return stream, {}
    if found.tokenizer is not None:
        built = tokenization.build(found.tokenizer, lambda: iter(()))
        check_tokenizer(trained, built.entry(), path, lambda: same_ids(model.tokenizer(), built))
    elif found.vocab_size is not None and found.vocab_size > vocab_size:
        raise InputError(
            f"--data {path}: its header says {found.named} {found.vocab_size:,} ids, the checkpoint's tokenizer has "
            f"{vocab_size:,}; name the data that the run was trained on, or prepare this text with the same tokenizer"
        )
    return stream, {}


def refuse_needless(cfg: EvalConfig, paths: list[str], text: list[bool]) -> None:
    """Flags for one kind of data are a mistake where there is none of it."""
    from fourscale import corpus, formats

    for flag, given in (
        ("--text-field", cfg.text_field is not None),
        ("--doc-sep", cfg.doc_sep is not None),
        ("--whole-files", cfg.whole_files),
    ):
        if given and not any(text):
            raise InputError(f"{flag}: is for text, and --data {paths[0]} holds tokens; leave it out")
    tokens = [path for path, is_text in zip(paths, text, strict=True) if not is_text]
    if tokens:
        corpus.refuse_needless([formats.is_foreign(p) for p in tokens], tokens, cfg.val_data, cfg.data_dtype, None)
    elif cfg.val_data is not None or cfg.data_dtype != "auto":
        flag = "--val-data" if cfg.val_data is not None else "--data-dtype"
        raise InputError(f"{flag}: is for shards without a manifest, and --data {paths[0]} is text; leave it out")


def window_length(asked: int | None, model: ModelConfig) -> int:
    """--ctx, or the model's. Raises InputError where learned positions end before it."""
    if asked is not None and asked > model.ctx and model.arch == "gpt2":
        raise InputError(f"--ctx {asked}: the model has {model.ctx} learned positions; use at most {model.ctx}")
    return asked or model.ctx


# ---- on many ranks ---------------------------------------------------------------------------------------------------


def on_each_rank(topology: Topology, fn: Callable[[], R]) -> R:
    """What `fn` returns on this rank. Where it raises InputError (or meets a file that can't be read) on some, all
    raise that of the first, and rank 0 tells it: another node may not see what rank 0 sees. Collective."""
    result, fault = None, None
    try:
        result = fn()
    except InputError as e:
        fault = str(e)
    except OSError as e:
        fault = f"{e.filename or 'a file'}: {(e.strerror or str(e)).lower()}"
    faults = [(rank, text) for rank, text in enumerate(topology.gather(fault)) if text is not None]
    if faults:
        rank, text = faults[0]
        error = InputError(text if rank == 0 else f"rank {rank}: {text}")
        error.speaks = topology.main
        raise error
    return result


def open_model(topology: Topology, asked: Path) -> Pretrained:
    """The same model on every rank: rank 0 says which checkpoint is the latest, since a run that goes on may publish
    another while ranks look. A node that doesn't see what rank 0 downloaded looks for itself. Collective."""
    from fourscale.pretrained import open_pretrained

    found = topology.from_main(lambda: open_pretrained(asked).path)
    return on_each_rank(topology, lambda: open_pretrained(found if found.exists() else asked))


def scored(
    model: torch.nn.Module, stream: TokenStream | TextStream, ctx: int, stride: int, local_bsz: int, topology: Topology
) -> tuple[Score, np.ndarray]:
    """The score of a whole stream, and its windows' starts. Raises RunFailed where memory doesn't suffice."""
    import torch

    from fourscale import heldout

    starts = heldout.eval_starts(stream.total, ctx, stride=stride)
    try:
        return heldout.score(model, stream, ctx, starts, local_bsz, topology, progress=True), starts
    except RuntimeError as e:
        if isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in str(e):
            failed = RunFailed(
                f"rank {topology.rank}: out of memory with {local_bsz} windows of {ctx:,} tokens at once; lower "
                "--local-bsz, or --ctx"
            )
            failed.speaks = True
            raise failed from None
        raise


# ---- figures ---------------------------------------------------------------------------------------------------------


def scored_bytes(stream: TokenStream, tokenizer: Tokenizer | None) -> int | None:
    """Bytes of text in the scored tokens: all but those of the stream's first token, which nothing predicts."""
    if stream.text_bytes is None or tokenizer is None:
        return None
    first = int(stream.read(0, 1)[0])
    return stream.text_bytes - (0 if first == tokenizer.eot_id else len(tokenizer.decode_bytes([first])))


def sizes_of(tokenizer: Tokenizer | None) -> np.ndarray | None:
    """Bytes of text that each id stands for, int64 [vocab_size], end-of-text none; None where tokens aren't bytes."""
    import numpy as np

    if tokenizer is None or tokenizer.normalisation != "none":
        return None
    sizes = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)], np.int64)
    sizes[tokenizer.eot_id] = 0
    return sizes


def count_bytes(stream: TokenStream | TextStream, sizes: np.ndarray | None, first: int, end: int) -> int | None:
    """Bytes of text in the tokens first .. end - 1 of the stream."""
    if sizes is None:
        return None
    return sum(int(sizes[stream.read(at, min(BLOCK, end - at))].sum()) for at in range(first, end, BLOCK))


def figures_of(score: Score, text_bytes: int | None, unigram_nats: float | None) -> dict[str, Any]:
    """What a score says, for readers and --json; None where it can't be known."""
    from fourscale.heldout import bits_per_byte

    some = score.tokens > 0
    return {
        "nats_per_token": score.loss if some else None,
        "standard_error": None if not some or math.isnan(score.standard_error) else score.standard_error,
        "perplexity": score.perplexity if some else None,
        "unigram_perplexity": None if unigram_nats is None else math.exp(unigram_nats),
        "bits_per_byte": bits_per_byte(score.nats, text_bytes) if text_bytes else None,
        "nats": score.nats,
        "tokens": score.tokens,
        "text_bytes": text_bytes,
        "windows": len(score.window_nats),
    }


def shard_rows(
    score: Score, starts: np.ndarray, ctx: int, stream: TokenStream | TextStream, sizes: np.ndarray | None
) -> list[dict[str, Any]]:
    """The figures of each shard's windows; their tokens are consecutive."""
    from fourscale import heldout

    names = [shard.path.name for shard in stream.shards]
    if len(set(names)) < len(names):
        names = [str(shard.path) for shard in stream.shards]
    rows, at = [], 1  # nothing predicts the first token
    for name, part in zip(names, heldout.by_shard(score, starts, ctx, stream.shards), strict=True):
        text_bytes = count_bytes(stream, sizes, at, at + part.tokens)
        at += part.tokens
        rows.append({"shard": name} | figures_of(part, text_bytes, None))
    return rows


def name_of(f: dict[str, Any]) -> str:
    return f["ckpt"] if f["update"] is None else f"{f['ckpt']} (update {f['update']:,})"


def shape_of(f: dict[str, Any]) -> str:
    """'windows of 1,024', and how far apart they begin where they overlap."""
    return f"windows of {f['ctx']:,}" + ("" if f["stride"] == f["ctx"] else f", {f['stride']:,} apart")


def render(figures: dict[str, Any]) -> str:
    """The figures for a reader, a line each."""
    f = figures
    error = "" if f["standard_error"] is None else f" +- {f['standard_error']:.4f} (standard error over windows)"
    bits = "n/a (the data's text size is unknown)" if f["bits_per_byte"] is None else f"{f['bits_per_byte']:.4f}"
    bar = ""
    if f["unigram_perplexity"] is not None:
        counted = f["unigram_perplexity"]
        bar = f" (counting single tokens: {counted:.1f}, {counted / f['perplexity']:.1f} x)"
    return "\n".join(
        (
            f"checkpoint  {name_of(f)}",
            f"data        {f['data']} {f['split']}",
            f"nats/token  {f['nats_per_token']:.4f}{error}",
            f"perplexity  {f['perplexity']:.4f}{bar}",
            f"bits/byte   {bits}",
            f"tokens      {f['tokens']:,} scored, each once, in {f['windows']:,} {shape_of(f)}",
            f"computed    {f['dtype']} on {f['world_size']} x {f['device']}",
        )
    )


def render_table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures of data sets and, of those that have them, their shards, a line each; of several data sets, `rows`
    ends with the figures of all their windows as one."""
    lines = []
    for f in rows:
        lines += [(f"  {shard['shard']}", shard) for shard in f.get("shards", [])]
        lines.append((f["data"] if f["split"] is None else f"{f['data']} {f['split']}", f))
    width = max(len(label) for label, _ in lines)
    head = ("nats/token", "+-", "perplexity", "single tokens", "bits/byte", "tokens")
    columns = (("nats_per_token", 4), ("standard_error", 4), ("perplexity", 4), ("unigram_perplexity", 1))
    columns += (("bits_per_byte", 4), ("tokens", 0))

    def cells(f: dict[str, Any]) -> str:
        shown = ("n/a" if f[name] is None else f"{f[name]:,.{digits}f}" for name, digits in columns)
        return "  ".join(f"{text:>13}" for text in shown)

    return "\n".join(
        (
            f"{'':{width}}  " + "  ".join(f"{name:>13}" for name in head),
            *(f"{label:{width}}  {cells(f)}" for label, f in lines),
        )
    )


def headline(f: dict[str, Any]) -> str:
    """What stands above a table of several data sets."""
    where = f"{f['dtype']} on {f['world_size']} x {f['device']}"
    return f"checkpoint {name_of(f)}, {where}; each token scored once, in {shape_of(f)}"


def notes_of(
    cfg: EvalConfig,
    model: Pretrained,
    ctx: int,
    paths: list[str],
    opened: list[tuple[TokenStream | TextStream, dict[str, Any]]],
    weighted: bool,
) -> list[str]:
    """What a reader should know about the figures to come."""
    notes = []
    if weighted:
        notes.append("the weights of --data don't count here: pooled figures are of all tokens alike")
    if ctx > model.cfg.ctx:
        notes.append(f"--ctx {ctx} is longer than the {model.cfg.ctx} tokens that the model was trained on")
    for path, (stream, manifest) in zip(paths, opened, strict=True):
        if stream.split == "text":
            made = f"{stream.documents:,} documents, {stream.total:,} tokens, an end-of-text token after each document"
            notes.append(f"--data {path}: text, encoded by the model's tokenizer: {made}")
        elif not manifest:
            notes.append(f"--data {path}: shards without a manifest, taken as ids of the checkpoint's tokenizer")
        if stream.split in ("text", "all"):
            if cfg.split is not None:
                notes.append(f"--split {cfg.split}: --data {path} has no sides, all of it is scored")
            elif stream.split == "all":
                notes.append(f"--data {path}: its names don't tell two sides, all {len(stream.shards)} are scored")
        elif model.ckpt is not None and stream.digest not in own_digests(model, stream.split):
            notes.append(f"--data {path}: other {stream.split} tokens than the run's own")
    return notes


@door
def main() -> None:
    cfg = parse(EvalConfig)
    cfg.check()
    import torch

    from fourscale import durable, formats, heldout, parallel, rawtext
    from fourscale.sources import shares

    topology = parallel.start("ddp", cfg.backend, cfg.device, cfg.dtype)
    say = print if topology.main else (lambda *_, **__: None)

    # 1. The model and the data, as every rank sees them.
    pretrained = open_model(topology, cfg.ckpt)
    ctx = window_length(cfg.ctx, pretrained.cfg)
    stride = cfg.stride_for(ctx)
    weighted = shares(cfg.data, "--data")
    paths = [path for path, _ in weighted]
    text = [not formats.is_foreign(path) and rawtext.names_text(path) for path in paths]
    refuse_needless(cfg, paths, text)
    tokenizer = on_each_rank(
        topology, lambda: pretrained.tokenizer() if any(text) or pretrained.tokenizer_entry else None
    )
    options = (pretrained.cfg.vocab_size, cfg.text_field or "text", cfg.doc_sep, cfg.whole_files)
    opened: list[tuple[TokenStream | TextStream, dict[str, Any]]] = []
    for path, is_text in zip(paths, text, strict=True):
        if is_text:  # rank 0 encodes for all: another node may not see the file
            ids = topology.from_main(lambda p=path: rawtext.read_text(p, tokenizer, *options, progress=True))
            opened.append((ids, {}))
        else:
            opened.append(on_each_rank(topology, lambda p=path: open_data(p, cfg, pretrained)))
    for note in notes_of(cfg, pretrained, ctx, paths, opened, any(weight is not None for _, weight in weighted)):
        say(f"note: {note}")

    # 2. The scores.
    model = on_each_rank(topology, lambda: pretrained.model(topology.device))
    scores, rows = [], []
    counting = cfg.by_shard or any(stream.text_bytes is None for stream, _ in opened)
    sizes = sizes_of(tokenizer) if counting and topology.main else None
    for path, (stream, manifest) in zip(paths, opened, strict=True):
        score, starts = scored(model, stream, ctx, stride, cfg.local_bsz, topology)
        scores.append(score)
        if not math.isfinite(score.loss):
            cause = "the run diverged, use an earlier step" if pretrained.ckpt else "its weights are damaged"
            raise RunFailed(f"{pretrained.path}: the held-out loss is {score.loss}; {cause}")
        if not topology.main:
            continue
        text_bytes = scored_bytes(stream, tokenizer)
        if stream.text_bytes is None:
            text_bytes = count_bytes(stream, sizes, 1, stream.total)
        unigram = manifest.get("unigram_nats") if stream.split == "val" else None
        row = {"data": path, "split": stream.split, "digest": stream.digest} | figures_of(score, text_bytes, unigram)
        rows.append(row | ({"shards": shard_rows(score, starts, ctx, stream, sizes)} if cfg.by_shard else {}))

    # 3. What they say.
    if len(rows) > 1:
        counted = [row["text_bytes"] for row in rows]
        pooled = figures_of(heldout.pooled(scores), None if None in counted else sum(counted), None)
        rows.append({"data": "pooled", "split": None, "digest": None} | pooled)
    if topology.main:
        about = dict(pretrained.about)
        about = {"ckpt": about.pop("ckpt"), "update": about.pop("update"), "ckpt_digest": about.pop("digest"), **about}
        how = {"ctx": ctx, "stride": stride, "dtype": topology.dtype, "device": str(topology.device.type)}
        how |= {"world_size": topology.world_size, "torch": torch.__version__, "code": code_version()}
        rows = [about | row | how for row in rows]
        say(render(rows[0]) if len(rows) == 1 else headline(rows[0]))
        if len(rows) > 1 or cfg.by_shard:
            say(render_table(rows))
        if cfg.by_shard:
            say("a window counts for the shard or file that holds the first token scored in it")
    if cfg.json is not None:
        figures = json.dumps(rows[0] if len(rows) == 1 else rows, indent=2) if topology.main else ""
        topology.from_main(lambda: durable.replace(cfg.json, figures + "\n"))
    parallel.stop(topology)


if __name__ == "__main__":
    main()
