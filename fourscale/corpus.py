"""What --data names, opened to train on: prepared directories and foreign shards, alone or mixed by weight.

Opening checks at once what can be checked without reading the data; `Verification` reads it all and compares it with
the manifests' hashes, before training or while it goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from fourscale import audit, formats, shards, tokenization
from fourscale.cli import InputError
from fourscale.config import TrainConfig
from fourscale.order import Mixture
from fourscale.shards import MANIFEST, TokenStream
from fourscale.sources import shares

if TYPE_CHECKING:
    from fourscale.parallel import Topology
    from fourscale.tokenization import Tokenizer

POLL_S = 0.2  # ranks that wait for the verification tell each other so often how it goes
PATIENCE_S = 3.0  # the end of a run waits so long for a verification that needs no more
SLOW_DISK = 1e8  # bytes/s, expected of one where nothing has been read yet
SIDES = {"train": "training", "val": "held-out"}  # a split, as messages call it


@dataclass
class Part:
    """One data set of a corpus. manifest: None for foreign shards."""

    name: str  # short, for the console and metrics; no two of a corpus are equal
    path: str  # as --data has it, without the weight
    weight: Fraction  # share of the samples; of all parts, they sum to 1
    train: TokenStream
    val: TokenStream
    manifest: dict[str, Any] | None

    def digests(self) -> dict[str, str]:
        return {"train_digest": self.train.digest, "val_digest": self.val.digest}


@dataclass
class Corpus:
    """The data sets of a run. tokenizer: None where shards name none and the user neither; ids are then all there is.

    absolute: the flags that opened it, with absolute paths. notes: lines worth saying aloud.
    """

    parts: list[Part]
    tokenizer: Tokenizer | None
    vocab_size: int
    absolute: dict[str, Any]
    notes: list[str]

    @property
    def mixed(self) -> bool:
        return len(self.parts) > 1

    @property
    def eot_id(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.eot_id

    def order(self, ctx: int, seed: int, sampling: str) -> Mixture:
        """The order of training samples. Raises InputError where a part holds no window of ctx + 1 tokens on a side."""
        for part in self.parts:
            for split, side in SIDES.items():
                if (total := getattr(part, split).total) < ctx + 1:
                    raise InputError(
                        f"--data {part.path}: its {side} side holds {total:,} tokens, a window needs ctx + 1 = "
                        f"{ctx + 1:,}: lower --ctx or prepare more text"
                    )
        return Mixture([p.train.total for p in self.parts], [p.weight for p in self.parts], ctx, seed, sampling)

    def windows(self, parts: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
        """int64 [B, length]: training windows from `starts` of `parts`, int64 [B] each, as `Mixture.starts` has them.

        Raises InputError, naming the shard and the position in it, for an id outside the vocabulary.
        """
        if not self.mixed:
            return self.parts[0].train.windows(starts, length)
        out = np.empty((len(starts), length), np.int64)
        for k, part in enumerate(self.parts):
            out[parts == k] = part.train.windows(starts[parts == k], length)
        return out

    def contract(self) -> dict[str, Any]:
        """What a resume may not change about the data: the `data` table of run.json."""
        if not self.mixed:
            return self.parts[0].digests()
        return {"parts": {p.name: {"weight": str(p.weight)} | p.digests() for p in self.parts}}

    def baselines(self) -> dict[str, float | None]:
        """What a held-out loss is measured against, over the parts by weight; None where a manifest doesn't tell.

        unigram_nats: loss of counting single tokens. bytes_per_token: of held-out text.
        """
        weight = float(sum(part.weight for part in self.parts))
        totals = {"unigram_nats": 0.0, "bytes_per_token": 0.0}
        for part in self.parts:
            manifest = part.manifest or {}
            val = manifest.get("splits", {}).get("val", {})
            each = {"unigram_nats": manifest.get("unigram_nats")}
            each["bytes_per_token"] = val["text_bytes"] / val["tokens"] if val.get("text_bytes") else None
            for name, value in each.items():
                known = None not in (value, totals[name])
                totals[name] = totals[name] + float(part.weight) / weight * value if known else None
        return totals

    def told(self, epochs: list[float]) -> str:
        """Epochs for the first lines: ' = 1.20 epochs', of a mixture ', epochs 1.20 (a), 0.35 (b)'."""
        if not self.mixed:
            return f" = {epochs[0]:.2f} epochs"
        return ", epochs " + ", ".join(f"{e:.2f} ({part.name})" for e, part in zip(epochs, self.parts, strict=True))

    def by_name(self, values: Sequence[float]) -> dict[str, float]:
        """A value a part, by the parts' names."""
        return {part.name: value for part, value in zip(self.parts, values, strict=True)}


# ---- opening -------------------------------------------------------------------------------------------------------


def of_flags(flags: TrainConfig, run: dict[str, Any] | None = None) -> Corpus:
    """The corpus of train.py's flags; parts keep the names that they have in `run`, the run.json of a resume.

    Raises InputError, one line: for what isn't there, sizes that differ from the manifest's, a weight that is missing,
    parts of different tokenizers, the same tokens or files on both sides, and flags that don't fit the data.
    """
    names = list(run["data"].get("parts", {})) if run is not None else []
    return open_corpus(
        flags.data, flags.val_data, flags.data_dtype, flags.tokenizer, flags.model.vocab_size, names=names
    )


def of_run(run: dict[str, Any]) -> Corpus | None:
    """The corpus that a run (its run.json) was trained on; None where it's gone or has changed."""
    c = run["config"]
    specs = [c["data"]] if isinstance(c["data"], str) else c["data"]
    foreign = (c.get("val_data"), c.get("data_dtype", "auto"), c.get("tokenizer"))
    try:
        corpus = open_corpus(specs, *foreign, run["model"]["vocab_size"], names=list(run["data"].get("parts", {})))
    except (InputError, OSError):
        return None
    return corpus if corpus.contract() == run["data"] else None


def open_corpus(
    specs: Sequence[str],
    val_data: str | None = None,
    data_dtype: str = "auto",
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    names: Sequence[str] = (),
) -> Corpus:
    """Open the data sets of --data specs; the other arguments are the flags for shards without a manifest.

    names: of the parts, where there are as many. Raises InputError as `of_flags`.
    """
    weighted = shares(specs, "--data")
    paths = [path for path, _ in weighted]
    if len(paths) > 1 and any(weight is None for _, weight in weighted):
        example = " ".join(f"--data {path}:{share}" for path, share in zip(paths, _example(len(paths)), strict=True))
        raise InputError(f"--data: {len(paths)} data sets need their shares of the samples, as in {example}")
    foreign = [formats.is_foreign(path) for path in paths]
    refuse_needless(foreign, paths, val_data, data_dtype, tokenizer)
    notes: list[str] = []
    parts, tokenizers = [], []
    for path, (_, weight), name, alien in zip(paths, weighted, names_of(paths, names), foreign, strict=True):
        opener = _foreign if alien else open_prepared
        extra = (val_data, data_dtype, tokenizer, vocab_size, notes) if alien else ()
        train, val, manifest, its_tokenizer = opener(path, *extra)
        parts.append(Part(name, path, weight or Fraction(1), train, val, manifest))
        tokenizers.append(its_tokenizer)
    _refuse_differing(parts, tokenizers)
    _refuse_overlap(parts)
    if tokenizers[0] is None:
        notes.append(
            f"no tokenizer: ids below {vocab_size:,} are trained on as they are, and sample.py can't turn them into "
            "text (--tokenizer names one)"
        )
    if unhashed := [part.name for part in parts if part.manifest is None]:
        notes.append(f"{', '.join(unhashed)}: no manifest, so no hashes that the content could be verified with")
    own_file = tokenizer is not None and tokenization.kind_of(tokenizer) == "tokenizer.json"
    absolute = {
        "data": tuple(str(Path(p).resolve()) + spec.removeprefix(p) for p, spec in zip(paths, specs, strict=True)),
        "val_data": val_data and str(Path(val_data).resolve()),
        "tokenizer": str(tokenization.json_path(tokenizer).resolve()) if own_file else tokenizer,
    }
    return Corpus(parts, tokenizers[0], parts[0].train.vocab_size, absolute, notes)


def open_prepared(path: str | Path) -> tuple[TokenStream, TokenStream, dict[str, Any], Tokenizer]:
    """Training and held-out stream, manifest and tokenizer of a data directory. Raises InputError as `load_manifest`
    and `open_split`, and where the tokenizer is not what the manifest says."""
    path = Path(path)
    manifest = shards.load_manifest(path)
    train, val = (shards.open_split(path, split, manifest) for split in shards.SPLITS)
    entry = manifest["tokenizer"]
    try:
        tokenizer = tokenization.load(path, entry)
        its = {"vocab_size": tokenizer.vocab_size, "eot_id": tokenizer.eot_id}
    except InputError:
        raise
    except Exception as e:  # tokenizers and tiktoken raise bare ones
        why = f"{type(e).__name__}: {' '.join(str(e).split())}"
        raise InputError(f"{path / MANIFEST}: its tokenizer can't be made ({why}); {shards.remedy(path)}") from None
    for name, value in its.items():
        if entry.get(name, value) != value:
            raise InputError(
                f"{path / MANIFEST}: its tokenizer's {name} is {entry[name]!r}, by {entry['file']} {value}; "
                f"{shards.remedy(path)}"
            )
    return train, val, manifest, tokenizer


def _foreign(
    path: str, val_data: str | None, data_dtype: str, tokenizer: str | None, vocab_size: int | None, notes: list[str]
) -> tuple[TokenStream, TokenStream, None, Tokenizer | None]:
    found = formats.open_foreign(path, val_data, data_dtype, vocab_size)
    spec = tokenizer or found.tokenizer
    if spec is None and vocab_size is None:
        raise InputError(f"--data {path}: {found.ask}")
    built = None
    if spec is not None:
        if tokenization.kind_of(spec) in ("char", "bpe"):
            raise InputError(
                f"--tokenizer {spec}: is made from text, and shards hold none; name the tokenizer.json that made these "
                "ids, gpt2, another tiktoken name or byte"
            )
        built = tokenization.build(spec, lambda: iter(()))
    train, val = found.streams["train"], found.streams["val"]
    for stream in (train, val):
        stream.vocab_size = vocab_size if built is None else built.vocab_size
    notes += [f"{path}: {found.format} shards of {found.dtype}", *found.notes]
    return train, val, None, built


def refuse_needless(
    foreign: list[bool], paths: list[str], val_data: str | None, data_dtype: str, tokenizer: str | None
) -> None:
    """Flags for shards without a manifest are a mistake where there are none, or where they can't fit all of them."""
    given = {"--val-data": val_data, "--data-dtype": None if data_dtype == "auto" else data_dtype}
    for flag, value in (given | {"--tokenizer": tokenizer}).items():
        if value is not None and not any(foreign):
            raise InputError(f"{flag} {value}: known from the manifest of --data {paths[0]}; leave it out")
    if val_data is not None and sum(foreign) > 1:
        raise InputError(
            f"--val-data {val_data}: whose held-out shards, of {sum(foreign)} sets without a manifest? give each a "
            "directory of its own with train and val in the names of its files"
        )


def _refuse_differing(parts: list[Part], tokenizers: list[Tokenizer | None]) -> None:
    """One model, one vocabulary: all parts must be ids of the same tokenizer."""
    first, its = parts[0], tokenizers[0]
    for part, other in zip(parts[1:], tokenizers[1:], strict=True):
        same = its.sha256 == other.sha256 if its and other else its is other
        if not same or part.train.vocab_size != first.train.vocab_size:
            ours, theirs = (
                f"no tokenizer, {p.train.vocab_size:,} ids"
                if t is None
                else f"{t.kind}, {t.vocab_size:,} ids, sha256 {t.sha256[:8]}…"
                for p, t in ((first, its), (part, other))
            )
            raise InputError(
                f"--data {part.path}: its tokenizer ({theirs}) is not that of {first.path} ({ours}); prepare both with "
                "one, or name that of shards without a manifest with --tokenizer"
            )


def _refuse_overlap(parts: list[Part]) -> None:
    """Held-out tokens that are trained on, in whole: the same stream or the same file."""
    for trained in parts:
        files = {_identity(shard.path) for shard in trained.train.shards}
        for held in parts:
            whose = f"--data {trained.path}" + ("" if held is trained else f" and --data {held.path}")
            if trained.train.digest == held.val.digest:
                raise InputError(
                    f"{whose}: training and held-out shards hold the same tokens (sha256 {held.val.digest[:16]}…); the "
                    "held-out loss would be of training text: hold out other text"
                )
            if twice := [shard.path for shard in held.val.shards if _identity(shard.path) in files]:
                raise InputError(f"{whose}: {twice[0]} is on both sides, training and held-out; hold out other text")


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _example(count: int) -> list[str]:
    return ["0.7", "0.3"] if count == 2 else [str(Fraction(1, count))] * count


def names_of(paths: list[str], known: Sequence[str]) -> list[str]:
    """The last component of each path, and as much before it as tells it from the others; else a number."""
    if len(known) == len(paths):
        return list(known)
    resolved = [Path(path).resolve().parts for path in paths]
    short = {c: c[-1] for c in resolved}
    for depth in range(2, max(map(len, resolved)) + 1):
        taken = list(short.values())
        short = {c: "/".join(c[-depth:]) if taken.count(name) > 1 else name for c, name in short.items()}
    seen = [resolved[: i + 1].count(c) for i, c in enumerate(resolved)]
    return [short[c] if n == 1 else f"{short[c]}#{n}" for c, n in zip(resolved, seen, strict=True)]


# ---- verification --------------------------------------------------------------------------------------------------


class Verification:
    """The data's hashes compared with the manifests', by the first rank of each node: copies on its disk may differ.

    What is read are the streams that the run opened. A thread reads; in the background it has the lowest priority,
    `failed` goes into the loop's message of each update, and where it sums to more than 0 every rank calls `refuse`.
    """

    def __init__(
        self, corpus: Corpus, mode: str, topology: Topology, asked: Callable[[], bool] = lambda: False
    ) -> None:
        """mode: "first" (done when this returns), "background" (begun) or "off". Collective; raises as `refuse`.

        asked: whether this rank was asked to stop; once one of them was, "first" ends on all of them, unfinished.
        """
        prepared = [part for part in corpus.parts if part.manifest is not None]
        hashed = {(os.path.realpath(p.path), p.train.digest, p.val.digest): p for p in prepared}
        self._unhashed = [part.name for part in corpus.parts if part.manifest is None]
        self._parts = list(hashed.values())
        self._total = sum(s.total * s.dtype.itemsize for p in hashed.values() for s in (p.train, p.val))
        self._topology = topology
        self._mine = int(os.environ.get("LOCAL_RANK", "0")) == 0
        self._problem: str | None = None
        self._done = 0  # bytes
        self._finished, self._stop = not self._mine, threading.Event()
        self._began = time.monotonic()
        self._thread: threading.Thread | None = None
        self.active = mode != "off" and bool(hashed)
        if not self.active:
            return
        if self._mine:
            self._thread = threading.Thread(target=self._read, args=(mode,), name="verify-data", daemon=True)
            self._thread.start()
        if mode == "first":
            self._wait(asked)

    @property
    def failed(self) -> bool:
        """Whether this rank has found data that are not the manifest's."""
        return self._problem is not None

    def refuse(self) -> None:
        """Raise InputError, naming the shard, on every rank. Collective: all call it once one of them has `failed`."""
        problem = next(p for p in self._topology.gather(self._problem) if p is not None)
        raise InputError(
            f"{problem}; restore the data, then start again: checkpoints of this attempt are not gone on from"
        )

    def close(self, patient: bool) -> dict[str, Any]:
        """Fields for the receipt. Where `patient`, a verification that is nearly done may end. Collective; raises as
        `refuse`.

        data_verified: True if all was as the manifests say, False if it wasn't all read, None if there was nothing to
        compare with or --verify-data off; unhashed: names of parts without a manifest, where there are any.
        """
        fields = {"data_verified": None} | ({"unhashed": self._unhashed} if self._unhashed else {})
        if not self.active:
            return fields
        if self._thread is not None:
            rate = self._done / (time.monotonic() - self._began) if self._done else SLOW_DISK
            if patient and self._total - self._done <= PATIENCE_S * rate:
                self._thread.join(PATIENCE_S)
            self._stop.set()
            self._thread.join()
        failed, finished = self._topology.all_sum([self.failed, self._finished])
        if failed:
            self.refuse()
        return fields | {"data_verified": finished == self._topology.world_size}

    def _wait(self, asked: Callable[[], bool]) -> None:
        """Until all ranks have read all, one has `failed` or one is `asked` to stop."""
        bar = tqdm(
            desc="verifying data", total=self._total, unit="B", unit_scale=True, disable=not self._topology.main,
            leave=False, mininterval=0.2 if sys.stderr.isatty() else 10,
        )  # fmt: skip
        with bar:
            while True:
                if self._thread is not None:
                    self._thread.join(POLL_S)
                bar.update(self._done - bar.n)
                failed, finished, stop = self._topology.all_sum([self.failed, self._finished, asked()])
                if failed or stop or finished == self._topology.world_size:
                    break
        self._stop.set()
        if failed:
            self.refuse()

    def _read(self, mode: str) -> None:
        if mode == "background" and sys.platform == "linux":  # where priority belongs to a thread
            with contextlib.suppress(OSError):  # training keeps the cores that it needs
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            for part in self._parts:
                opened = part.manifest, {"train": part.train, "val": part.val}
                problems = audit.verify(
                    Path(part.path), on_bytes=self._count, stop=self._stop.is_set, first=True, opened=opened
                )
                if problems:
                    self._problem = problems[0]
                    return
            self._finished = True
        except audit.Stopped:
            return
        except (InputError, OSError) as e:
            self._problem = str(e)
        except BaseException as e:  # a thread that dies would do so in silence, and training go on
            why = f"{type(e).__name__}: {' '.join(str(e).split())}"
            self._problem = f"--data {part.path}: its verification broke down ({why})"

    def _count(self, size: int) -> None:
        self._done += size
