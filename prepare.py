"""Text -> tokens -> shards and a manifest, for train.py and eval_ppl.py.

    python prepare.py --dataset stdlib --tokenizer bpe:4096 --out ./data   # Python's own sources: no network needed
    python prepare.py --dataset tinystories --out ./data                   # 2.1 M stories, gpt2
    python prepare.py --dataset fineweb-edu --out ./data                   # 10 B tokens of web text, 20 GB
    python prepare.py --dataset 'corpus/*.jsonl' --text-field body --license CC-BY-4.0
    python prepare.py --dataset book.txt --tokenizer char --val-docs 20

Documents are encoded in the order of the source, each with an end-of-text token after it; nothing is normalised or
deduplicated. A document is held out by a keyed hash of its text alone: the same text is always on the same side, in
any order, with any shard size. Shards are written aside and the manifest comes last, so what was interrupted can't
be trained on, and the next run starts afresh.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourscale import code_version
from fourscale.config import InputError, PrepareConfig, RunFailed, door, padded, parse, parse_count

if TYPE_CHECKING:
    import numpy as np

    from fourscale.shards import ShardWriter
    from fourscale.sources import Document, Source
    from fourscale.tokenization import Tokenizer

UNFINISHED = ".prepare_unfinished"  # directory within --out where everything is made
HASH_KEY = b"fourscale held-out 1"
BATCH_BYTES = 4 << 20


@door
def main() -> None:
    cfg = parse(PrepareConfig)
    check(cfg)
    # Imported late, so that --help and usage errors are instant.
    from fourscale import shards, sources, tokenization
    from fourscale.shards import ShardWriter

    # 1. What is asked for, and whether it's there already.
    command = command_of(cfg, tokenization.kind_of(cfg.tokenizer), sources.fingerprint(cfg.dataset))
    if already_made(cfg.out, command):
        return
    source = sources.open_source(cfg.dataset, cfg.text_field, cfg.doc_sep)
    licence = cfg.license or source.entry["license"]
    started = time.monotonic()

    with disk_errors(cfg.out), locked(cfg.out):
        if already_made(cfg.out, command):  # by another process, in the meantime
            return
        with workspace(cfg.out) as work:
            # 2. The side of each document: a threshold on the hash of its text.
            if cfg.val_docs is None:
                threshold = threshold_for_share(source.documents(), cfg.val_fraction)
            else:
                print(f"choosing {cfg.val_docs} held-out documents", flush=True)
                threshold = threshold_for_count(progress(source, "hash"), cfg.val_docs)

            # 3. The tokenizer: merges are learned from the training side; a character must have an id on either.
            def corpus() -> Iterator[str]:
                for document in progress(source, "read"):
                    if cfg.tokenizer == "char" or document_hash(document.text.encode()) >= threshold:
                        yield document.text

            print(f"tokenizer {cfg.tokenizer}", flush=True)
            tokenizer = tokenization.build(cfg.tokenizer, corpus)
            note_smaller_vocabulary(cfg.tokenizer, tokenizer)

            # 4. Text -> ids -> shards.
            writers = {s: ShardWriter(work, s, tokenizer.vocab_size, cfg.shard_tokens) for s in shards.SPLITS}
            counts = encode(progress(source, "encode", writers), tokenizer, writers, threshold)
            splits = {split: writer.finish() for split, writer in writers.items()}
            refuse_empty_side(cfg, splits)

            # 5. The manifest, last.
            entry = tokenizer.save(work)
            manifest = {
                "dtype": writers["train"].dtype.name,
                "source": source.entry,
                "license": licence,
                "tokenizer": entry | {"padded_vocab_size": padded(tokenizer.vocab_size)},
                "normalisation": "none",
                "deduplication": "none",
                "eot": "after each document",
                "split": split_rule(cfg, threshold),
                "unigram_nats": unigram_nats(counts),
                "code": code_version(),
                "command": command,
                "splits": splits,
            }
            publish(cfg.out, work, manifest)

    # 6. What was made.
    report(cfg.out, splits, tokenizer, licence, time.monotonic() - started)


def check(cfg: PrepareConfig) -> None:
    """Raise InputError for values that can't be meant."""
    if cfg.shard_tokens < 1:
        raise InputError("--shard-tokens 0: a shard holds at least 1 token")
    if cfg.val_docs == 0:
        raise InputError("--val-docs 0: hold out at least 1 document, or held-out loss has nothing to measure")
    if not 0 < cfg.val_fraction < 1:
        raise InputError(f"--val-fraction {cfg.val_fraction}: give a share above 0 and below 1, such as 0.01")
    if cfg.out.exists() and not cfg.out.is_dir():
        raise InputError(f"--out {cfg.out}: a file; give a directory")


# ---- the directory ---------------------------------------------------------------------------------------------------


def command_of(cfg: PrepareConfig, tokenizer_kind: str, inputs: str | None) -> dict[str, Any]:
    """What decides the content of the data directory: the flags, and a fingerprint of the local files they name."""
    from fourscale import tokenization

    if tokenizer_kind == "tokenizer.json":
        stat = tokenization.json_path(cfg.tokenizer).stat()
        inputs = f"{inputs} {stat.st_size} {stat.st_mtime_ns}"
    return {name: value for name, value in asdict(cfg).items() if name != "out"} | {"inputs": inputs}


def already_made(out: Path, asked: dict[str, Any]) -> bool:
    """True, and said, if `out` holds what this command would make; InputError if it holds other finished data."""
    from fourscale import shards

    if not (out / shards.MANIFEST).exists():
        return False
    way_on = f"choose another --out, or delete {out} first"
    try:
        made = shards.load_manifest(out).get("command", {})
    except InputError as e:
        raise InputError(f"{e}: to do so, {way_on}") from None
    differing = [name for name in asked if name != "inputs" and made.get(name) != asked[name]]
    if differing:
        told = ", ".join(f"--{name.replace('_', '-')} {made.get(name)} (now {asked[name]})" for name in differing)
        raise InputError(f"{out}: already holds data made with {told}; {way_on}")
    if made.get("inputs") != asked["inputs"]:
        raise InputError(f"{out}: was made by this command, but its input files have changed since; {way_on}")
    print(f"{out}: already made by this very command; nothing to do")
    return True


@contextlib.contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """A full disk, a missing permission and the like as one line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        raise RunFailed(f"{e.filename or out}: {(e.strerror or str(e)).lower()}; {out} is not finished") from None


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make `out` if need be and hold it for this process. Raises InputError where another prepare.py has it."""
    import filelock

    out.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(out / ".lock", timeout=0)
    with contextlib.suppress(NotImplementedError):  # a file system without locks
        try:
            lock.acquire()
        except filelock.Timeout:
            raise InputError(f"{out}: another prepare.py is at work here; wait for it or use another --out") from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """An empty directory to work in, after removing what an interrupted run left. Where the input is refused, nothing
    stays. Raises InputError rather than touch shards that no interrupted run explains."""
    work = out / UNFINISHED
    found = [path for path in sorted(out.iterdir()) if re.fullmatch(r"(train|val)_\d{3,}\.bin", path.name)]
    if work.is_dir():
        print(f"{out}: removing what an interrupted run left", flush=True)
        for path in found:  # it was stopped while publishing
            path.unlink()
        shutil.rmtree(work)
    elif found:
        raise InputError(f"{out}: holds {found[0].name} but no manifest; use another --out, or delete these files")
    work.mkdir()
    try:
        yield work
    except InputError:
        shutil.rmtree(work, ignore_errors=True)
        raise


def publish(out: Path, work: Path, manifest: dict[str, Any]) -> None:
    """Move the finished files from `work` to `out`, then write the manifest, then remove `work`."""
    from fourscale import shards

    names = [shard["file"] for split in manifest["splits"].values() for shard in split["shards"]]
    for name in [*names, manifest["tokenizer"]["file"]]:
        (work / name).replace(out / name)
    shards.write_manifest(out, manifest)
    shutil.rmtree(work)


# ---- documents -------------------------------------------------------------------------------------------------------


def document_hash(text: bytes) -> int:
    """64 bits of the UTF-8 text, the same everywhere; a document is held out if they are below the threshold."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=HASH_KEY).digest(), "little")


def threshold_for_share(documents: Iterable[Document], share: float) -> int:
    """The threshold that holds out about `share` of the texts; one text where that is none of them.

    Reads up to the first text that is held out: in a small corpus perhaps all, in a large one a few.
    """
    threshold = int(share * 2**64)
    smallest = 2**64
    for document in documents:
        smallest = min(smallest, document_hash(document.text.encode()))
        if smallest < threshold:
            return threshold
    if smallest < 2**64:
        print(f"note: --val-fraction {share} of so few documents is none; holding out one (--val-docs N for more)")
    return smallest + 1


def threshold_for_count(documents: Iterable[Document], count: int) -> int:
    """The threshold that holds out exactly `count` distinct texts, those of the smallest hashes. Memory: `count`.

    Raises InputError where there are not more distinct texts than that.
    """
    largest_first: list[int] = []
    held: set[int] = set()
    distinct_beyond = False
    for document in documents:
        h = document_hash(document.text.encode())
        if h in held:
            continue
        if len(held) < count:
            heapq.heappush(largest_first, -h)
            held.add(h)
            continue
        distinct_beyond = True
        if h < -largest_first[0]:
            held.remove(-heapq.heapreplace(largest_first, -h))
            held.add(h)
    if not distinct_beyond:
        raise InputError(
            f"--val-docs {count}: the corpus has {len(held)} distinct documents, which leaves none to train on; "
            "hold out fewer, or divide plain text further with --doc-sep"
        )
    return -largest_first[0] + 1


def split_rule(cfg: PrepareConfig, threshold: int) -> dict[str, Any]:
    wish = {"val_fraction": cfg.val_fraction} if cfg.val_docs is None else {"val_docs": cfg.val_docs}
    rule = f"held out if blake2b-64 of the text, keyed {HASH_KEY.decode()!r}, is below the threshold"
    return {"rule": rule, "threshold": f"{threshold:#018x}"} | wish


def batches(documents: Iterable[Document]) -> Iterator[list[tuple[str, bytes]]]:
    """Documents as (text, UTF-8), in lists of about BATCH_BYTES."""
    batch: list[tuple[str, bytes]] = []
    size = 0
    for document in documents:
        batch.append((document.text, document.text.encode()))
        size += len(batch[-1][1])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(
    documents: Iterable[Document], tokenizer: Tokenizer, writers: dict[str, ShardWriter], threshold: int
) -> dict[str, np.ndarray]:
    """Write each document's ids and end-of-text to the writer of its side, in the order of the source.

    Returns how often each id occurs on each side, int64 [vocab_size].
    """
    import numpy as np

    counts = {side: np.zeros(tokenizer.vocab_size, np.int64) for side in writers}
    for batch in batches(documents):
        written: dict[str, list[np.ndarray]] = {side: [] for side in writers}
        for (_, data), ids in zip(batch, tokenizer.encode_batch([text for text, _ in batch]), strict=True):
            side = "val" if document_hash(data) < threshold else "train"
            written[side].append(np.append(ids, np.uint32(tokenizer.eot_id)))
            writers[side].add(written[side][-1], len(data))
        for side, parts in written.items():
            if parts:
                counts[side] += np.bincount(np.concatenate(parts), minlength=tokenizer.vocab_size)
    return counts


def unigram_nats(counts: dict[str, np.ndarray]) -> float:
    """Held-out nats per token by add-one counts of single tokens on the train side: the first bar for any model."""
    import numpy as np

    seen = counts["train"] + 1
    return float(-(counts["val"] * np.log(seen / seen.sum())).sum() / counts["val"].sum())


def refuse_empty_side(cfg: PrepareConfig, splits: dict[str, dict[str, Any]]) -> None:
    total = sum(part["documents"] for part in splits.values())
    for split, part in splits.items():
        if not part["documents"]:
            raise InputError(
                f"--dataset {cfg.dataset}: none of its {total} documents is left for the {split} split; give more "
                "text, or divide plain text further with --doc-sep, or hold out another share"
            )


# ---- what is said ----------------------------------------------------------------------------------------------------


def progress(source: Source, what: str, writers: dict[str, ShardWriter] | None = None) -> Iterator[Document]:
    """The source's documents behind a bar of text bytes read, with tokens/s where there are writers."""
    import tqdm

    pause = 0.5 if sys.stderr.isatty() else 10.0  # a log file wants few lines
    with tqdm.tqdm(
        desc=what, total=source.total_bytes, unit="B", unit_scale=True, mininterval=pause, leave=False, delay=1
    ) as bar:
        for document in source.documents():
            yield document
            if bar.update(len(document.text.encode())) and writers:
                tokens = sum(writer.tokens for writer in writers.values())
                bar.set_postfix_str(f"{tokens / bar.format_dict['elapsed']:,.0f} tok/s", refresh=False)


def note_smaller_vocabulary(spec: str, tokenizer: Tokenizer) -> None:
    if tokenizer.kind == "bpe" and tokenizer.vocab_size < parse_count(spec.partition(":")[2]):
        print(f"note: the text has pairs for {tokenizer.vocab_size} ids only, not for --tokenizer {spec}")


def report(
    out: Path, splits: dict[str, dict[str, Any]], tokenizer: Tokenizer, licence: str | None, seconds: float
) -> None:
    from fourscale import shards

    for split, part in splits.items():
        print(
            f"{split:5s}  {part['documents']:,} documents | {part['tokens']:,} tokens | {part['text_bytes']:,} bytes | "
            f"{part['text_bytes'] / part['tokens']:.3f} bytes/token | {len(part['shards'])} shard(s)"
        )
    stream = shards.open_split(out, "train")
    count = min(96, stream.total)
    window = stream.read((stream.total - count) // 2, count)
    print("a window of the training text:")
    for line in printable(tokenizer.decode(window)).split("\n"):
        print(f"    {line}")
    print(f"licence: {licence}" if licence else "licence: unknown; pass --license")
    tokens = sum(part["tokens"] for part in splits.values())
    size = tokens * stream.dtype.itemsize / 1e9
    speed = sum(part["text_bytes"] for part in splits.values()) / 1e6 / seconds
    print(f"wrote {out}: {tokens:,} tokens ({size:.3f} GB) in {seconds:.1f} s ({speed:.1f} MB of text/s)")


def printable(text: str) -> str:
    """Text that any terminal can show: control characters, and what its encoding lacks, become a mark."""
    visible = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    encoding = sys.stdout.encoding or "ascii"
    return visible.encode(encoding, "replace").decode(encoding)


if __name__ == "__main__":
    main()
