"""How a tokenizer.json is written, and the tiktoken Encoding that gives the ids of one in a fifth of the time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import tiktoken
import tokenizers

EOT = "<|endoftext|>"

# Radford et al. 2019, as in OpenAI's encoder.py, with possessive quantifiers for speed (the splits are the same).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def _byte_to_char() -> dict[int, str]:
    """The alphabet in which byte-level BPE spells bytes (GPT-2's encoder.py): printable ones as themselves."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


BYTE_TO_CHAR = _byte_to_char()
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}


def spelled(token: bytes) -> str:
    return "".join([BYTE_TO_CHAR[b] for b in token])


def spelled_bytes(token: str) -> bytes | None:
    return bytes([CHAR_TO_BYTE[c] for c in token]) if all(c in CHAR_TO_BYTE for c in token) else None


def byte_level_json(
    vocab: dict[str, int], merges: Iterable[Iterable[str]], specials: dict[str, int], split=True, ignore_merges=False
) -> bytes:
    """Byte-level BPE. split: True for GPT-2's pattern, False for none, or a pattern in Ruby's dialect."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is True}
    before: dict[str, Any] = level
    if isinstance(split, str):
        cut = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        before = {"type": "Sequence", "pretokenizers": [cut, level]}
    # Special tokens stand in the vocabulary too, or loading would number them anew from its end.
    model = {"type": "BPE", "ignore_merges": ignore_merges, "vocab": vocab | specials, "merges": [*map(list, merges)]}
    return _json(model, before, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}, specials)


def char_json(texts: Iterator[str]) -> bytes:
    seen: set[str] = set()
    for text in texts:
        seen.update(text)
    vocab = {c: i for i, c in enumerate(sorted(seen))}
    specials = {EOT: len(vocab)}
    # The unknown token is in no vocabulary: other loaders then raise for an unknown character, as we do.
    model = {"type": "WordLevel", "vocab": vocab | specials, "unk_token": "<unk>"}
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    return _json(model, split, {"type": "Fuse"}, specials)


def _json(model: dict[str, Any], before: dict[str, Any], decoder: dict[str, Any], specials: dict[str, int]) -> bytes:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": c, **plain} for c, i in sorted(specials.items(), key=lambda item: item[1])]
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    tail = {"pre_tokenizer": before, "post_processor": None, "decoder": decoder, "model": model}
    return json.dumps(head | tail, ensure_ascii=False).encode("utf-8")


# ---- tiktoken's speed for a tokenizer.json ---------------------------------------------------------------------------


def fast_encoding(spec: dict, backend: tokenizers.Tokenizer, kind: str, eot: str) -> tiktoken.Encoding | None:
    """A tiktoken Encoding with the same ids for ordinary text, or None where the tokenizer isn't such a byte-level BPE.

    tiktoken merges by id and looks whole words up first. A BPE by merge list does the same if merges stand in order of
    their results' ids, one for each token, and each token is what its own spelling merges to.
    """
    model, added = spec["model"], {eot, *(token["content"] for token in spec.get("added_tokens", []))}
    pattern = _pattern(spec.get("pre_tokenizer") or {}, kind)
    if model.get("type") != "BPE" or pattern is None or spec.get("normalizer"):
        return None
    if any(model.get(k) for k in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")):
        return None
    words = {token: i for token, i in model["vocab"].items() if token not in added}
    spelled = {token: spelled_bytes(token) for token in words}
    if None in spelled.values() or not all(c in words for c in CHAR_TO_BYTE):
        return None
    if kind != "gpt2" and not kind.startswith("tiktoken:"):
        if not all(token.get("special") for token in spec.get("added_tokens", [])):
            return None
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        made = [words.get("".join(pair), -1) for pair in pairs]
        if len(made) != len(words) - 256 or any(a >= b for a, b in zip([-1, *made], made, strict=False)):
            return None
        if any([part.value for part in backend.model.tokenize(token)] != [token] for token in words):
            return None
    ranks = {spelled[token]: i for token, i in words.items()}
    return tiktoken.Encoding(kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def _pattern(before: dict[str, Any], kind: str) -> str | None:
    if before.get("type") == "ByteLevel" and not before.get("add_prefix_space") and before.get("use_regex", True):
        return GPT2_PATTERN
    if kind.startswith("tiktoken:"):  # written by `byte_level_json`
        return before["pretokenizers"][0]["pattern"]["Regex"]
    return None  # a foreign pattern may mean something else to tiktoken's engine
