"""Text -> tokens -> shards and a manifest, for train.py and eval_ppl.py.

    python prepare.py --dataset stdlib --tokenizer bpe:4096 --out ./data   # Python's own sources: no network needed
    python prepare.py --dataset tinystories --out ./data                   # 2.1 M stories, gpt2
    python prepare.py --dataset fineweb-edu --max-tokens 3e9               # the first 3 B tokens of 10 B, of web text
    python prepare.py --dataset 'corpus/*.jsonl.zst' --text-field body --group-field url --dedup --license CC-BY-4.0
    python prepare.py --dataset code.parquet:0.3 --dataset 'books/*.txt.gz:0.7' --tokenizer bpe:32000
    python prepare.py --dataset book.txt --tokenizer char --val-docs 20

Documents are encoded in the order of the source, each with an end-of-text token after it; nothing is normalised. A
document is held out by a keyed hash of its text alone (or of its --group-field): the same text is always on the same
side, in any order, with any shard size. Shards are made aside and the manifest comes last, so what was interrupted
can't be trained on; the same command goes on from the last commit, and ends with the same bytes.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourscale import code_version
from fourscale.cli import InputError, door, parse, parse_count, say
from fourscale.config import padded
from fourscale.flags import PrepareConfig

if TYPE_CHECKING:
    from fourscale.assembly import Assembly
    from fourscale.documents import Document
    from fourscale.journal import Journal
    from fourscale.sources import Source
    from fourscale.tokenization import Tokenizer

SMALL = 32 << 20  # bytes of text below which starting processes takes longer than they save
BYTES_A_TOKEN = 8  # of text that a tokenizer is trained on where --max-tokens limits the corpus
UNIGRAM_TOKENS = 20_000_000
SHARDS_SHOWN = 12  # of a side; of more, the first and last two


@door
def main() -> None:
    cfg = parse(PrepareConfig)
    check(cfg)
    # Imported late, so that --help and usage errors are instant.
    from fourscale import encoding, shards, sources, tokenization
    from fourscale.assembly import Assembly
    from fourscale.journal import UNFINISHED, Journal, already_made, disk_errors, locked, publish

    # 1. What is asked for, and whether it's there already, whole or in part.
    named = sources.shares(cfg.dataset, "--dataset")
    if cfg.val_docs is not None and named[0][1] is not None:
        raise InputError("--val-docs: chosen from all of the corpus, of which shares take a part; use --val-fraction")
    command = command_of(cfg)
    if already_made(cfg.out, command) and not (cfg.out / UNFINISHED).exists():
        return say(f"{cfg.out}: already made by this very command; nothing to do")
    started = time.monotonic()
    with disk_errors(cfg.out), locked(cfg.out):
        if already_made(cfg.out, command):  # by another process, or by one that was killed with all but this done
            shutil.rmtree(cfg.out / UNFINISHED, ignore_errors=True)
            return say(f"{cfg.out}: already made by this very command; nothing to do")
        with Journal(cfg.out, command) as journal:
            if "moves" in journal.table:  # everything is made: only the publishing was interrupted
                return say_published(cfg.out, publish(cfg.out, journal))
            opened = [open_source(cfg, i, spec, journal) for i, (spec, _) in enumerate(named)]
            weights = [weight for _, weight in named]
            licence = cfg.license or shared_licence(opened)
            if licence is None:
                say("note: the licence of the text is unknown; --license NAME puts it into the manifest")

            # 2. The side of each document: a threshold on the hash of its text or group.
            def documents(what: str) -> Iterator[Document]:
                return islice(every_document(opened, weights, cfg.skip_bad, what), cfg.max_docs)

            if "threshold" not in journal.table:
                journal.save(threshold=threshold_of(cfg, documents))  # also for documents before a limit: see there
            threshold = journal.table["threshold"]

            # 3. The tokenizer: merges are learned from the training side; a character must have an id on either.
            def corpus() -> Iterator[str]:
                left = BYTES_A_TOKEN * cfg.max_tokens if cfg.max_tokens and cfg.tokenizer != "char" else sys.maxsize
                for document in documents("read"):
                    if cfg.tokenizer == "char" or encoding.side_hash(document) >= threshold:
                        yield document.text
                        left -= len(document.text)
                    if left <= 0:
                        return

            if "tokenizer" not in journal.table:
                say(f"tokenizer {cfg.tokenizer}")
                tokenizer = tokenization.build(cfg.tokenizer, corpus)
                note_smaller_vocabulary(cfg.tokenizer, tokenizer)
                journal.save(tokenizer=tokenizer.save(journal.work))
            else:
                tokenizer = journal.load_tokenizer()
            if tokenizer.normalisation != "none":
                say(f"note: --tokenizer {cfg.tokenizer} changes the text; {tokenizer.normalisation}")
            entry = journal.table["tokenizer"]

            # 4. Text -> ids -> shards.
            assembly = Assembly(
                journal.work,
                opened,
                weights,
                tokenizer,
                cfg.shard_tokens,
                dedup=cfg.dedup,
                max_tokens=cfg.max_tokens,
                max_docs=cfg.max_docs,
                state=journal.table.get("assembly"),
                save=lambda state: journal.save(assembly=state),
            )
            before = sum(taken.bytes for taken in assembly.taken())
            if "assembly" in journal.table:
                say(f"{cfg.out}: going on where an interrupted run was, after {before / 1e6:,.1f} MB of input")
            processes = processes_for(cfg.workers, opened)
            with (
                encoding.pool(processes, journal.work, tokenizer, entry, threshold, cfg.skip_bad) as submit,
                bar_of(opened, "encode", assembly) as tick,
            ):
                assembly.run(submit, 2 * processes, tick)
            if command_of(cfg)["inputs"] != command["inputs"]:
                journal.table.pop("assembly", None)
                raise InputError(
                    f"--dataset {' '.join(cfg.dataset)}: files have changed while they were read; run again"
                )
            refuse_empty_side(cfg, named, assembly, journal)
            splits, moves = assembly.entries()

            # 5. The manifest, last.
            manifest = {
                "dtype": shards.token_dtype(tokenizer.vocab_size).name,
                "sources": [
                    entry_of(*each) for each in zip(opened, weights, assembly.taken(), assembly.tokens(), strict=True)
                ],
                "license": licence,
                "tokenizer": entry | {"padded_vocab_size": padded(tokenizer.vocab_size)},
                "normalisation": tokenizer.normalisation,
                "deduplication": f"first of texts that are {encoding.SAME_TEXT}" if cfg.dedup else "none",
                "eot": "after each document",
                "split": split_rule(cfg, threshold),
                "unigram_nats": unigram_nats(journal.work, moves, splits, tokenizer.vocab_size),
                "code": code_version(),
                "command": command,
                "splits": splits,
            }
            journal.save(manifest=manifest, moves=moves)
            publish(cfg.out, journal)

    # 6. What was made.
    read = sum(source["bytes"] for source in manifest["sources"]) - before
    report(cfg, manifest, tokenizer, f"{time.monotonic() - started:.1f} s ({read / 1e6:,.1f} MB of input)")


def check(cfg: PrepareConfig) -> None:
    """Raise InputError for values that can't be meant."""
    for name in ("shard_tokens", "max_tokens", "max_docs", "workers"):
        if getattr(cfg, name) == 0:
            raise InputError(f"--{name.replace('_', '-')} 0: must be at least 1")
    if cfg.val_docs == 0:
        raise InputError("--val-docs 0: hold out at least 1 document, or held-out loss has nothing to measure")
    if not 0 < cfg.val_fraction < 1:
        raise InputError(f"--val-fraction {cfg.val_fraction}: give a share above 0 and below 1, such as 0.01")
    if cfg.out.exists() and not cfg.out.is_dir():
        raise InputError(f"--out {cfg.out}: a file; give a directory")
    if cfg.max_docs is not None and len(cfg.dataset) > 1:
        raise InputError("--max-docs: counts the documents of one source; with several --dataset use --max-tokens")
    if cfg.val_docs is not None:
        for name in ("max_tokens", "group_field"):
            if getattr(cfg, name) is not None:
                raise InputError(
                    f"--val-docs: chosen from all of the corpus, which --{name.replace('_', '-')} doesn't go with; "
                    "use --val-fraction"
                )


def open_source(cfg: PrepareConfig, number: int, spec: str, journal: Journal) -> Source:
    """A source as the flags want it; a moving hub data set stays at the revision that this work was begun with."""
    from fourscale import sources

    begun = journal.table.get("revisions", {}).get(str(number))
    options = {name: getattr(cfg, name) for name in ("text_field", "group_field", "doc_sep", "name", "split")}
    source = sources.open_source(spec, **options, revision=begun or cfg.revision)
    if source.entry.get("revision"):
        pinned = {**journal.table.get("revisions", {}), str(number): source.entry["revision"]}
        journal.save(revisions=pinned)
    return source


def processes_for(asked: int | None, opened: Sequence[Source]) -> int:
    """Tokenizing processes beside this one; 0 to tokenize in this one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if asked is None and sum(source.total_bytes or SMALL for source in opened) < SMALL:
        return 0
    count = asked or cores
    return 0 if count == 1 else count


# ---- the directory ---------------------------------------------------------------------------------------------------


def command_of(cfg: PrepareConfig) -> dict[str, Any]:
    """What decides the content of the data directory: the flags, and a fingerprint of the local files they name."""
    from fourscale import sources, tokenization

    named = sources.shares(cfg.dataset, "--dataset")
    inputs = [sources.fingerprint(spec) for spec, _ in named]
    if tokenization.kind_of(cfg.tokenizer) == "tokenizer.json":
        stat = tokenization.json_path(cfg.tokenizer).stat()
        inputs.append(f"{stat.st_size} {stat.st_mtime_ns}")
    # --skip-bad is left out: until a malformed row is met, it changes nothing.
    flags = {name: value for name, value in asdict(cfg).items() if name not in ("out", "workers", "skip_bad")}
    shares = [None if share is None else str(share) for _, share in named]
    return flags | {"dataset": list(cfg.dataset), "shares": shares, "inputs": inputs}


# ---- documents -------------------------------------------------------------------------------------------------------


def every_document(
    opened: Sequence[Source], weights: Sequence[Fraction | None], skip_bad: bool, what: str
) -> Iterator[Document]:
    """The documents of all sources behind a bar, a chunk at a time from the one furthest behind its share of bytes.

    Empty documents are passed over, malformed rows too with skip_bad; else they raise InputError.
    """
    from fourscale.assembly import SKIP_BAD
    from fourscale.documents import BadRow

    sizes = [source.total_bytes for source in opened]
    shares = weights if weights[0] is not None else [size or 1 for size in sizes] if all(sizes) else [1] * len(opened)
    waiting = [(0, number, source.chunks(None)) for number, source in enumerate(opened)]
    with bar_of(opened, what) as tick:
        while waiting:
            read, number, chunks = waiting[0]
            chunk = next(chunks, None)
            if chunk is None:
                heapq.heappop(waiting)
                continue
            heapq.heapreplace(waiting, (read + chunk.size / shares[number], number, chunks))
            for item in chunk.documents():
                if not isinstance(item, BadRow):
                    if item.text:
                        yield item
                elif not skip_bad:
                    raise InputError(f"{item.message}{SKIP_BAD}")
            tick(chunk.size, 0)


def threshold_of(cfg: PrepareConfig, documents: Callable[[str], Iterable[Document]]) -> int:
    """The threshold of the split: for a share of the documents, or for a number of them."""
    from fourscale.encoding import side_hash, threshold_for_count, threshold_for_share

    def before_the_limit() -> Iterator[Document]:
        """Those that stand before --max-tokens whatever the tokenizer: no token has less than a byte."""
        size = 0
        for document in documents("split"):
            yield document
            size += len(document.text.encode()) + 1
            if cfg.max_tokens is not None and size >= cfg.max_tokens:
                return

    if cfg.val_docs is None:
        return threshold_for_share(map(side_hash, before_the_limit()), cfg.val_fraction)
    say(f"choosing {cfg.val_docs} held-out documents")
    return threshold_for_count(map(side_hash, documents("hash")), cfg.val_docs)


def split_rule(cfg: PrepareConfig, threshold: int) -> dict[str, Any]:
    from fourscale import encoding

    what = f"field {cfg.group_field!r}" if cfg.group_field else f"text ({encoding.SAME_TEXT})"
    rule = f"held out if blake2b-64 of the {what}, keyed {encoding.HASH_KEY.decode()!r}, is below the threshold"
    wish = {"val_fraction": cfg.val_fraction} if cfg.val_docs is None else {"val_docs": cfg.val_docs}
    return {"rule": rule, "threshold": f"{threshold:#018x}"} | wish


def unigram_nats(work: Path, moves: list[tuple[str, str]], splits: dict[str, dict[str, Any]], vocab_size: int) -> float:
    """Held-out nats per token by add-one counts of single tokens (of the first UNIGRAM_TOKENS of the training side):
    the first bar for any model."""
    import numpy as np

    from fourscale import shards

    counts = {}
    where = {final: work / name for name, final in moves}
    for split, part in splits.items():
        counts[split], left = np.zeros(vocab_size, np.int64), UNIGRAM_TOKENS
        for shard in part["shards"]:
            ids = np.fromfile(where[shard["file"]], shards.token_dtype(vocab_size), count=left)
            counts[split] += np.bincount(ids, minlength=vocab_size)
            left -= len(ids)
            if not left:
                break
    seen = counts["train"] + 1
    return float(-(counts["val"] * np.log(seen / seen.sum())).sum() / counts["val"].sum())


def refuse_empty_side(
    cfg: PrepareConfig, named: Sequence[tuple[str, Fraction | None]], assembly: Assembly, journal: Journal
) -> None:
    """Raise InputError, with what would help, where a side or a source that has a share is without a token."""
    limits = [f"--max-{name}" for name in ("tokens", "docs") if getattr(cfg, f"max_{name}") is not None]
    taken, tokens = assembly.taken(), assembly.tokens()
    written = sum(each.documents for each in taken)
    problem = None
    for (spec, share), each, ours in zip(named, taken, tokens, strict=True):
        if each.bad and each.bad == each.rows:
            problem = f"{spec}: all of its {each.rows:,} rows are malformed, the first: {each.bad_rows[0]}"
        elif share is not None and not ours["train"]:
            problem = f"{spec}: its share comes to no training token; give it more text or a larger share"
    for side in ("train", "val"):
        if not sum(ours[side] for ours in tokens):
            help_ = f"raise {' or '.join(limits)}" if limits and written else "give more text"
            problem = problem or (
                f"{' '.join(cfg.dataset)}: no text for the {side} split, of {written:,} document(s) in all; {help_}, "
                "or hold out another share with --val-fraction, or divide plain text further with --doc-sep"
            )
    if problem:
        journal.table.pop("assembly", None)  # going on from here would end here
        raise InputError(f"--dataset {problem}")


def shared_licence(opened: Sequence[Source]) -> str | None:
    """The licences of all sources; None where one of them is unknown."""
    licences = [source.entry.get("license") for source in opened]
    return None if None in licences else ", ".join(dict.fromkeys(licences))


def entry_of(source: Source, weight: Fraction | None, taken: Any, tokens: dict[str, int]) -> dict[str, Any]:
    """A source's entry in the manifest: what it is, and what became of its rows."""
    share = {} if weight is None else {"weight": str(weight)}
    return source.entry | share | {"train_tokens": tokens["train"], "val_tokens": tokens["val"]} | asdict(taken)


# ---- what is said ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bar_of(
    opened: Sequence[Source], what: str, assembly: Assembly | None = None
) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes read, with tokens/s; yields the function that moves it by (bytes, tokens)."""
    import tqdm

    sizes = [source.total_bytes for source in opened]
    before = sum(taken.bytes for taken in assembly.taken()) if assembly else 0
    tokens = 0
    with tqdm.tqdm(
        desc=what,
        total=sum(sizes) if None not in sizes else None,
        initial=before,
        unit="B",
        unit_scale=True,
        mininterval=0.5 if sys.stderr.isatty() else 10.0,  # a log file wants few lines
        leave=False,
        delay=1,
    ) as bar:

        def tick(size: int, count: int) -> None:
            nonlocal tokens
            tokens += count
            if bar.update(size) and tokens:
                bar.set_postfix_str(f"{tokens / bar.format_dict['elapsed']:,.0f} tok/s", refresh=False)

        yield tick


def note_smaller_vocabulary(spec: str, tokenizer: Tokenizer) -> None:
    if tokenizer.kind == "bpe" and tokenizer.vocab_size < parse_count(spec.partition(":")[2]):
        say(f"note: the text has pairs for {tokenizer.vocab_size} ids only, not for --tokenizer {spec}")


def gigabytes(tokens: int, dtype: str) -> str:
    size = tokens * (2 if dtype == "uint16" else 4) / 1e9
    return f"{size:.3f} GB"


def say_published(out: Path, manifest: dict[str, Any]) -> None:
    tokens = sum(part["tokens"] for part in manifest["splits"].values())
    say(
        f"wrote {out}: {tokens:,} tokens ({gigabytes(tokens, manifest['dtype'])}), as an interrupted run had them ready"
    )


def report(cfg: PrepareConfig, manifest: dict[str, Any], tokenizer: Tokenizer, effort: str) -> None:
    """What was made: each source, both sides, windows to read, the shards, and the total in the last line."""
    from fourscale import shards

    splits, dtype = manifest["splits"], manifest["dtype"]
    all_train = splits["train"]["tokens"]
    for source in manifest["sources"]:
        share = source["train_tokens"] / all_train
        print(
            f"{printable(source['name'])}: {source['train_tokens']:,} training tokens ({share:.4%}"
            f"{' asked: ' + source['weight'] if 'weight' in source else ''}), {source['val_tokens']:,} held out | "
            f"rows read {source['rows']:,} = {accounts(source, cfg.dedup)}"
        )
        if source["documents"]:
            print(f"    longest document {source['longest'][0]:,} bytes, {printable(source['longest'][1])}")
        for message in source["bad_rows"]:
            print(f"    skipped: {printable(message)}")
        if (more := source["bad"] - len(source["bad_rows"])) > 0:
            print(f"    and {more:,} more")
        if source["train_tokens"] and not source["val_tokens"]:
            print(
                f"note: nothing of {printable(source['name'])} is held out, so the held-out loss will say nothing "
                "about it: raise --val-fraction"
            )
    for split, part in splits.items():
        print(
            f"{split:5s}  {part['documents']:,} documents | {part['tokens']:,} tokens | {part['text_bytes']:,} bytes | "
            f"{part['text_bytes'] / part['tokens']:.3f} bytes/token"
        )
    if cfg.max_tokens is not None and all_train < cfg.max_tokens:
        print(f"note: the text has {all_train:,} training tokens in these shares, fewer than --max-tokens asked for")
    for split, where in (("train", 0.0), ("train", 0.5), ("val", 0.5)):
        stream = shards.open_split(cfg.out, split)
        count = min(64, stream.total)
        first = int((stream.total - count) * where)
        print(f"{split} from token {first:,}:")
        for line in printable(tokenizer.decode(stream.read(first, count))).split("\n"):
            print(f"    {line}")
    for part in splits.values():
        listed = part["shards"]
        for i, shard in enumerate(listed):
            if len(listed) <= SHARDS_SHOWN or i < 2 or i >= len(listed) - 2:
                size = gigabytes(shard["tokens"], dtype)
                print(f"wrote {cfg.out / shard['file']}: {shard['tokens']:,} tokens ({size})")
            elif i == 2:
                print(f"... {len(listed) - 4} more of {listed[0]['tokens']:,} tokens")
    tokens = sum(part["tokens"] for part in splits.values())
    print(f"licence: {manifest['license'] or 'unknown'}")
    print(f"wrote {cfg.out}: {tokens:,} tokens ({gigabytes(tokens, dtype)}) in {effort}")


def accounts(source: dict[str, Any], dedup: bool) -> str:
    """'9 written + 1 empty', and what else there was, which adds up to the rows."""
    names = {
        "documents": "written",
        "empty": "empty",
        "bad": "malformed",
        "dropped": "duplicates",
        "crossing": "on the other side before",
    }
    terms = [f"{source[key]:,} {name}" for key, name in names.items() if source[key] or key == "documents"]
    kept = source["duplicates"] and not dedup
    return " + ".join(terms) + (f" ({source['duplicates']:,} duplicates kept; --dedup drops them)" if kept else "")


def printable(text: str) -> str:
    """Text that any terminal can show: control characters, and what its encoding lacks, become a mark."""
    text = text.replace("\r\n", "\n")
    visible = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    encoding = sys.stdout.encoding or "ascii"
    return visible.encode(encoding, "replace").decode(encoding)


if __name__ == "__main__":
    main()
