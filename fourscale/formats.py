"""Other people's shards: nanoGPT's train.bin, llm.c's and modded-nanogpt's headered .bin, datatrove's .ds.

    nanogpt    NAME.bin: little-endian ids and nothing else, so their width is asked for (--data-dtype)
    llm.c      NAME.bin: 256 int32 [magic, version, tokens, 0 ...], then ids. Magic 20240520 version 1: uint16, GPT-2's
               tokenizer (modded-nanogpt's too). Magic 20240801 version 7: uint32, Llama 3's. The magic names the
               tokenizer, so another --tokenizer is refused, unless --vocab-size says its size too
    datatrove  NAME.ds: ids. NAME.ds.metadata: "TOKENIZER|BYTES OF AN ID", newline, tokens. NAME.ds.index: the end of
               each document in tokens, uint64

What a file says of itself is read and compared with its size; what it doesn't say is asked for by the flag's name.
nanoGPT's meta.pkl is a pickle: opening one can run any code, so it is never opened.
"""

from __future__ import annotations

import glob
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fourscale.cli import InputError
from fourscale.shards import MANIFEST, SPLITS, Shard, TokenStream

SUFFIXES = (".bin", ".ds")
HEADER_BYTES = 1024
LLAMA3 = "Llama 3's"  # not a spec: its tokenizer.json isn't free to copy in
LLMC = {20240520: (1, "uint16", "gpt2"), 20240801: (7, "uint32", LLAMA3)}  # magic: version, dtype, tokenizer
LLMC_VOCABULARY = {"gpt2": 50_257, LLAMA3: 128_256}
LLMC_DATES = range(20240101, 20270101)  # llm.c's magic numbers are dates; those of its models and evals aren't tokens
GPT2_NAMES = ("gpt2", "openai-community/gpt2")  # on the Hugging Face hub
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 1 << 16
PROBE_BYTES = 1 << 15
WHOLE_BYTES = 1 << 26  # files up to this size are read in whole to find their highest id, larger ones in samples
IMPLAUSIBLE_ID = 1 << 24  # far above any vocabulary: two uint16 ids read as one uint32

_SIDE = re.compile(r"(?<![a-z])(train(?:ing)?|val(?:id(?:ation)?)?)(?![a-z])")


@dataclass(frozen=True)
class Foreign:
    """Shards without a manifest, opened.

    format: "nanogpt", "llm.c" or "datatrove". dtype: "uint16" or "uint32".
    streams: "train" and "val"; text_bytes None, digest as `sampled_digest`, vocab_size what `open_foreign` was given,
    else the dtype's range: set `stream.vocab_size` once a tokenizer tells it.
    tokenizer: spec for `tokenization.build` that the files themselves name (or a tokenizer.json beside them), or None.
    ask: what to tell a user who gave neither --tokenizer nor --vocab-size where `tokenizer` is None; one sentence.
    notes: lines worth saying aloud. named: whose ids the files say they are, "gpt2" or "Llama 3's", or None;
    vocab_size: of that tokenizer, or None.
    """

    format: str
    streams: dict[str, TokenStream]
    tokenizer: str | None
    dtype: str
    ask: str
    notes: list[str]
    named: str | None = None
    vocab_size: int | None = None

    def refuse_other(self, path: str, tokenizer: str, size: int, said: int | None = None) -> None:
        """Raise InputError where `tokenizer` (a spec) of `size` ids isn't the one that the files name.

        said: --vocab-size. Other ids under llm.c's header are rare, so it takes both flags: a `said` of `size` allows
        them. Llama 3's tokenizer may have tokens added to it, which these ids then don't use.
        """
        if self.vocab_size is None or size == self.vocab_size or size == said:
            return
        if self.named == LLAMA3 and size > self.vocab_size:
            return
        remedy = "leave the flag out" if self.tokenizer else "name Llama 3's tokenizer.json"
        raise InputError(
            f"--tokenizer {tokenizer}: has {size:,} ids, but the header of --data {path} says {self.named} "
            f"({self.vocab_size:,} ids); {remedy}, or if {tokenizer} did make these ids, add --vocab-size {size}"
        )


@dataclass(frozen=True)
class _Set:
    """What the files of one side say: their shards, and the format, dtype and tokenizer they share."""

    shards: list[Shard]
    format: str
    dtype: str
    tokenizer: str | None


def is_foreign(spec: str | Path) -> bool:
    """True for a directory without manifest.json that holds *.bin or *.ds (itself or one level down), and for a file or
    glob of such."""
    path = Path(spec)
    return not (path / MANIFEST).exists() and bool(_files(spec))


def open_foreign(
    spec: str, val_spec: str | None = None, data_dtype: str = "auto", vocab_size: int | None = None
) -> Foreign:
    """Open the shards that `spec` (--data) names: a directory, a file or a glob.

    A name that says train or val (of the file, else of its directory) tells the side; `val_spec` (--val-data) names the
    held-out files where names don't. Files of a side are one stream in order of their paths. data_dtype: "auto",
    "uint16" or "uint32" (--data-dtype). vocab_size: --vocab-size, None until known.

    Raises InputError, one line: for no files, an unknown or missing side, the same file on both sides, a header,
    metadata or index that doesn't fit the file, an unknown version, mixed formats or dtypes, and where the dtype can't
    be known or isn't the one asked for.
    """
    notes: list[str] = []
    sides = _sides(spec, val_spec, notes)
    _refuse_unfinished(sides["train"] + sides["val"])
    sets = {split: _describe(split, files, data_dtype, vocab_size, notes) for split, files in sides.items()}
    train, val = sets["train"], sets["val"]
    for what in ("format", "dtype", "tokenizer"):
        ours, theirs = getattr(train, what), getattr(val, what)
        if ours != theirs:
            raise InputError(
                f"--data {spec}: {sides['train'][0].name} has {what} {ours}, the held-out {sides['val'][0].name} "
                f"{theirs}; both sides must be of one kind"
            )
    dtype = np.dtype(train.dtype).newbyteorder("<")
    streams = {}
    for split, part in sets.items():
        stream = TokenStream(split, part.shards, dtype, vocab_size or 1 << (8 * dtype.itemsize), None, "")
        stream.digest = sampled_digest(stream)
        streams[split] = stream
    ask = _ask(train, sides, vocab_size)
    tokenizer = _tokenizer(train, sides["train"], notes)
    named = train.tokenizer if train.format == "llm.c" else None
    return Foreign(
        train.format, streams, tokenizer, train.dtype, ask, notes, named, LLMC_VOCABULARY[named] if named else None
    )


def sides_told(spec: str | Path) -> set[str]:
    """The sides, "train" or "val", that names of the shards `spec` names tell."""
    return {side for path in _files(spec) if (side := _side(path)) is not None}


def open_whole(spec: str, data_dtype: str = "auto", vocab_size: int | None = None) -> Foreign:
    """All shards that `spec` names as one stream, whatever side their names tell: streams has "all" alone. Arguments
    and InputErrors as `open_foreign`'s."""
    notes: list[str] = []
    files = _files(spec)
    _refuse_unfinished(files)
    part = _describe("all", files, data_dtype, vocab_size, notes)
    dtype = np.dtype(part.dtype).newbyteorder("<")
    stream = TokenStream("all", part.shards, dtype, vocab_size or 1 << (8 * dtype.itemsize), None, "")
    stream.digest = sampled_digest(stream)
    named = part.tokenizer if part.format == "llm.c" else None
    known = LLMC_VOCABULARY[named] if named else None
    return Foreign(part.format, {"all": stream}, _tokenizer(part, files, notes), part.dtype, "", notes, named, known)


def sampled_digest(stream: TokenStream) -> str:
    """ "sampled-" and the sha256 of dtype, tokens, and 64 evenly spread blocks of 64 KiB of the stream (all of a small
    one): it comes at once, for any size and any cut into files. Content between the blocks is not seen."""
    block = SAMPLE_BYTES // stream.dtype.itemsize
    sha = hashlib.sha256(f"{stream.dtype.name} {stream.total}\n".encode())
    if stream.total <= SAMPLE_BLOCKS * block:
        starts = range(0, stream.total, block)
    else:
        starts = [i * (stream.total - block) // (SAMPLE_BLOCKS - 1) for i in range(SAMPLE_BLOCKS)]
    for start in starts:
        ids = stream.read(start, min(block, stream.total - start))
        sha.update(ids.astype(stream.dtype).tobytes())
    return f"sampled-{sha.hexdigest()}"


# ---- which files, which side -----------------------------------------------------------------------------------------


def _files(spec: str | Path) -> list[Path]:
    """Files of a directory (and one level down), a glob, or the file itself: *.bin and *.ds, sorted by path."""
    path = Path(spec)
    if path.is_dir():
        here = glob.escape(str(path))
        found = [name for suffix in SUFFIXES for deep in ("", "*/") for name in glob.glob(f"{here}/{deep}*{suffix}")]
    elif path.exists():
        found = [str(spec)]
    else:
        found = glob.glob(str(spec), recursive=True)
    return sorted(p for p in map(Path, found) if p.suffix in SUFFIXES and p.is_file())


def _side(path: Path) -> str | None:
    for name in (path.name, path.absolute().parent.name):
        found = {"train" if word.startswith("train") else "val" for word in _SIDE.findall(name.lower())}
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def _sides(spec: str, val_spec: str | None, notes: list[str]) -> dict[str, list[Path]]:
    files = _files(spec)
    if not files:
        raise InputError(f"--data {spec}: no *.bin or *.ds there; name shards, or a directory that holds them")
    if val_spec is None:
        sides: dict[str | None, list[Path]] = {"train": [], "val": [], None: []}
        for path in files:
            sides[_side(path)].append(path)
        if sides["train"] and sides["val"] and sides[None]:
            notes.append(f"{spec}: {_count(sides[None])} left aside, whose names say neither train nor val")
        elif sides[None] and not sides["val"]:
            raise InputError(
                f"--data {spec}: {sides[None][0].name} says neither train nor val; name the held-out shards with "
                "--val-data FILES"
            )
        for split, other in (("train", "--data"), ("val", "--val-data")):
            if not sides[split]:
                what = "training" if split == "train" else "held-out"
                raise InputError(
                    f"--data {spec}: no {what} shards among {_count(files)} (no name says {split}); name them with "
                    f"{other} FILES"
                )
    else:
        held_out = _files(val_spec)
        if not held_out:
            raise InputError(f"--val-data {val_spec}: no *.bin or *.ds there; name the held-out shards")
        if Path(val_spec).is_dir() and any(_side(path) == "val" for path in held_out):
            held_out = [path for path in held_out if _side(path) == "val"]
        taken = {_identity(path) for path in held_out}
        rest = [path for path in files if _identity(path) not in taken]
        if not rest:
            raise InputError(f"--val-data {val_spec}: the same files as --data {spec}; hold out others")
        training = [path for path in rest if _side(path) != "val"]
        if not training:
            raise InputError(f"--data {spec}: the name of {rest[0].name} says it is held out; name training shards")
        if len(training) < len(rest):
            notes.append(f"{spec}: {_count([p for p in rest if p not in training])} named val left aside")
        sides = {"train": training, "val": held_out}
    both = {_identity(path) for path in sides["train"]} & {_identity(path) for path in sides["val"]}
    if both:
        twice = next(path for path in sides["val"] if _identity(path) in both)
        raise InputError(f"{twice}: the same file is on the training side of --data {spec}; hold out another")
    return {split: sides[split] for split in SPLITS}


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()  # links to one file have one identity
    return status.st_dev, status.st_ino


def _count(files: list[Path]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"


def _refuse_unfinished(files: list[Path]) -> None:
    """What prepare.py leaves where it was killed just before the manifest must not pass for nanoGPT's."""
    for path in files:
        if path.suffix == ".bin" and path.with_name(MANIFEST).exists():
            raise InputError(f"{path}: a shard of prepared data; name its directory, --data {path.parent}")
        if re.fullmatch(r"(train|val)_\d{3,}\.bin", path.name) and path.with_name("tokenizer.json").exists():
            raise InputError(
                f"{path.parent}: shards and tokenizer.json of prepare.py without {MANIFEST}, so unfinished; run the "
                "same prepare.py command again (for other shards, move tokenizer.json and name it with --tokenizer)"
            )


# ---- what a file says of itself --------------------------------------------------------------------------------------


def _describe(split: str, files: list[Path], data_dtype: str, vocab_size: int | None, notes: list[str]) -> _Set:
    """Read headers and metadata of one side's files, which must agree."""
    described: list[tuple[str, str, str | None]] = []
    shards: list[Shard] = []
    start = 0
    indexed = [path for path in files if path.suffix == ".ds" and _beside(path, ".index").exists()]
    for path in files:
        if path.suffix == ".ds":
            if indexed and path not in indexed:
                raise InputError(
                    f"{path}: no {path.name}.index, which datatrove writes last, so unfinished; run its pipeline again"
                )
            kind, tokens, offset = _datatrove(path, data_dtype)
        else:
            kind, tokens, offset = _llmc(path) or _headerless(path, data_dtype, vocab_size)
        if described and kind != described[0]:
            ours, theirs = (", ".join(str(part) for part in one if part) for one in (kind, described[0]))
            raise InputError(f"{path}: {ours}, but {files[0].name} is {theirs}; a side must be of one kind")
        described.append(kind)
        if tokens:  # a task of datatrove's without documents leaves an empty file
            shards.append(Shard(path, tokens, start, offset))
            start += tokens
    form, dtype, tokenizer = described[0]
    if data_dtype not in ("auto", dtype):
        raise InputError(f"--data-dtype {data_dtype}: {files[0]} says {dtype}; leave the flag out")
    if not start:
        raise InputError(f"{files[0].parent}: the {split} side is empty: {_count(files)} without a token")
    if form == "datatrove" and not indexed:
        notes.append(f"{_count(files)}: without .index, so a file that was never finished would not be noticed")
    if any(_beside(path, ".loss").exists() for path in files):
        notes.append(f"{_count(files)}: the loss mask (.ds.loss) is not used, every token is trained on")
    return _Set(shards, form, dtype, tokenizer)


def _llmc(path: Path) -> tuple[tuple[str, str, str | None], int, int] | None:
    """(format, dtype, tokenizer), tokens and offset of a file with llm.c's header; None without one."""
    with path.open("rb") as f:
        head = f.read(HEADER_BYTES)
    if len(head) < 12:
        return None
    magic, version, tokens = (int(i) for i in np.frombuffer(head[:12], "<i4"))
    if int(np.frombuffer(head[:4], ">i4")[0]) in LLMC:
        raise InputError(
            f"{path}: llm.c's header in big-endian order; write the shards anew on a little-endian machine"
        )
    if magic not in LLMC:
        if magic in LLMC_DATES and 0 < version < 100:
            raise InputError(
                f"{path}: an llm.c file of magic {magic}, which is not one of tokens "
                f"({' or '.join(map(str, LLMC))}); leave it out"
            )
        return None
    known, dtype, tokenizer = LLMC[magic]
    if version != known:
        raise InputError(f"{path}: llm.c magic {magic} version {version}, this code reads version {known}")
    size, expected = path.stat().st_size, HEADER_BYTES + tokens * np.dtype(dtype).itemsize
    if size != expected:
        raise InputError(
            f"{path}: {size:,} bytes, but its header has {tokens:,} tokens of {dtype} ({expected:,} bytes); "
            "the file was truncated: download or write it again"
        )
    return ("llm.c", dtype, tokenizer), tokens, HEADER_BYTES


def _headerless(path: Path, data_dtype: str, vocab_size: int | None) -> tuple[tuple[str, str, str | None], int, int]:
    size = path.stat().st_size
    with path.open("rb") as f:
        head = f.read(PROBE_BYTES)
    if data_dtype == "auto":
        if vocab_size is None and path.with_name("meta.pkl").exists():
            width = "uint32" if _misread(head, "uint16") else "uint16"
            raise InputError(f"{path}: {_about_pickle(path, sorted(path.parent.glob('*.bin')), width)}")
        raise InputError(
            f"{path}: no header, so its dtype can't be known; pass --data-dtype uint16 (nanoGPT's) or uint32"
        )
    tokens = _whole(path, size, data_dtype)
    if wrong := _misread(head, data_dtype):
        other = "uint32" if data_dtype == "uint16" else "uint16"
        raise InputError(f"{path}: read as {data_dtype}, {wrong}: these are {other}; pass --data-dtype {other}")
    return ("nanogpt", data_dtype, None), tokens, 0


def _misread(head: bytes, dtype: str) -> str | None:
    """What is plain to see where ids are read in the wrong width: high halves as ids of their own, or pairs as one."""
    ids = np.frombuffer(head[: len(head) // 4 * 4], np.dtype(dtype).newbyteorder("<"))
    if len(ids) < 64:
        return None
    if dtype == "uint16" and (ids[1::2] < 4).mean() > 0.99 and (ids[::2] >= 4).mean() > 0.5:
        return "every second id is about 0"
    if dtype == "uint32" and (ids >= IMPLAUSIBLE_ID).mean() > 0.5:
        return f"ids are about {int(np.median(ids)):,}"
    return None


def _datatrove(path: Path, data_dtype: str) -> tuple[tuple[str, str, str | None], int, int]:
    metadata, index = _beside(path, ".metadata"), _beside(path, ".index")
    size, dtype, tokenizer, stated = path.stat().st_size, data_dtype, None, None
    if metadata.exists():
        try:
            first, second = metadata.read_text(encoding="utf-8").splitlines()[:2]
            stated = int(second)
        except ValueError:
            raise InputError(
                f"{metadata}: not datatrove's metadata (TOKENIZER|BYTES, then the number of tokens); restore it, or "
                "remove it and pass --data-dtype"
            ) from None
        tokenizer, _, width = first.rpartition("|")
        if width in ("2", "4"):
            dtype = f"uint{8 * int(width)}"
        else:  # written before datatrove 0.2, which had no width
            tokenizer = first
    if dtype == "auto":
        raise InputError(
            f"{path}: no .metadata tells its dtype; pass --data-dtype uint16, or uint32 for a vocabulary above 65,536"
        )
    tokens = _whole(path, size, dtype)
    ends = {"metadata": stated}
    if index.exists():
        count = index.stat().st_size
        if count % 8:
            raise InputError(f"{index}: {count:,} bytes are no whole number of uint64; write the shards again")
        with index.open("rb") as f:
            f.seek(max(0, count - 8))
            ends["index"] = int.from_bytes(f.read(8), "little")
    for where, end in ends.items():
        if end is not None and end != tokens:
            raise InputError(
                f"{path}: {tokens:,} tokens of {dtype} ({size:,} bytes), but its .{where} says {end:,}; the file was "
                "truncated or is unfinished: write it again"
            )
    named = None if not tokenizer or tokenizer.startswith("Unknown Tokenizer") else tokenizer
    return ("datatrove", dtype, named), tokens, 0


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _whole(path: Path, size: int, dtype: str) -> int:
    width = np.dtype(dtype).itemsize
    if size % width:
        raise InputError(
            f"{path}: {size:,} bytes are no whole number of {dtype} ids ({width} bytes each); the file is damaged or "
            "of another dtype (--data-dtype)"
        )
    return size // width


# ---- whose tokens ----------------------------------------------------------------------------------------------------


def _tokenizer(part: _Set, files: list[Path], notes: list[str]) -> str | None:
    """The spec of a tokenizer.json beside the shards or above their directory, else the one that the files name."""
    folder = files[0].absolute().parent
    for path in (folder / "tokenizer.json", folder.parent / "tokenizer.json"):
        if part.format == "datatrove" and path.is_file():
            return str(path)
    named = None if part.tokenizer == LLAMA3 else part.tokenizer
    if named is None or named in GPT2_NAMES:
        return "gpt2" if named else None
    if Path(named).is_file():
        return named
    notes.append(f"the metadata names the tokenizer {named}, which is no file here")
    return None


def _ask(part: _Set, sides: dict[str, list[Path]], vocab_size: int | None) -> str:
    first = sides["train"][0]
    if part.format == "nanogpt" and vocab_size is None and first.with_name("meta.pkl").exists():
        return _about_pickle(first, [path for files in sides.values() for path in files], part.dtype)
    if part.tokenizer == LLAMA3:
        return "these are ids of Llama 3's tokenizer; pass --tokenizer PATH/tokenizer.json or --vocab-size 128256"
    return (
        "which tokenizer made these ids can't be known; pass --tokenizer gpt2 (or PATH/tokenizer.json), or "
        "--vocab-size N to train on bare ids"
    )


def _about_pickle(path: Path, files: list[Path], dtype: str) -> str:
    """What to do with nanoGPT's data of characters: `files`, all of them, of `dtype`, and `path` one of those."""
    text = path.with_name("input.txt")
    whose, where = (text, "") if text.exists() else ("TEXT", " (TEXT: what they were made from)")
    highest, whole = _highest(files, dtype)
    least = f"the highest is {highest:,}" if whole else f"the highest in samples is {highest:,}, so N may be larger"
    return (
        f"ids of characters, it seems; python prepare.py --dataset {whose} --tokenizer char --out NEW makes the same "
        f"ids with a tokenizer{where}, which sample.py and export_hf.py need; or --data-dtype {dtype} --vocab-size "
        f"{highest + 1} trains on bare ids ({least}). {path.with_name('meta.pkl')} is a pickle, which can run code, "
        "and isn't opened"
    )


def _highest(files: list[Path], dtype: str) -> tuple[int, bool]:
    """The highest id of headerless files, and whether all of them was read: blocks spread over each where not."""
    highest, width = 0, np.dtype(dtype).itemsize
    whole = sum(path.stat().st_size for path in files) <= WHOLE_BYTES
    for path in files:
        end = path.stat().st_size // width
        block = SAMPLE_BYTES // width
        spread = [i * max(0, end - block) // (SAMPLE_BLOCKS - 1) for i in range(SAMPLE_BLOCKS)]
        with path.open("rb") as f:
            for start in range(0, end, block) if whole else spread:
                f.seek(start * width)
                data = f.read(block * width)
                ids = np.frombuffer(data[: len(data) // width * width], np.dtype(dtype).newbyteorder("<"))
                highest = max(highest, int(ids.max(initial=0)))
    return highest, whole
