"""What a tokenizer.json made elsewhere may do that ours don't: take text for control tokens, and change text.

No file is refused for what it does to text: people bring BERT's or Llama's knowingly. It is said in one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

# Where pre-tokenizers differ, it's in contractions, runs of whitespace, digits, cases and marks.
PROBE = (
    "I'm they'LL DON'T \u017fo  two   tabs\t\t\r\n\r\n  x = [1, 22, 333, 4444] # !!\n \n  \n\ncamelCase HTTPd\u00bd"
    "\u4e2d\u6587\u3001 \u0440\u0443 \u0939\u093f e\u0301 \u00a0\u2003 \U0001f469\u200d <|endoftext|> a/b?d=e   "
)

# With each byte that UTF-8 has.
TRIAL = PROBE + "".join(chr(c) for c in [*range(2048), *range(2048, 1114112, 2048)] if c != 0xD800) + "  "
# What stands before TRIAL after a round trip, where 0, 1 and 2 spaces stood.
LEADING = {
    ("", " ", "  "): "",
    ("", "", " "): "one leading space is taken off",
    ("", "", ""): "leading spaces are taken off",
    (" ", " ", "  "): "a leading space is added where there is none",
    (" ", "  ", "   "): "a leading space is added",
}

BLOCK = "\u2581"  # how sentencepiece spells a space
HARMLESS = {"Prepend", "ByteLevel", f"Replace ' ' by '{BLOCK}'"}  # steps whose loss, if any, TRIAL shows

# Added tokens that steer a model, by their looks: text never becomes one, even where their file calls them ordinary.
CONTROL = re.compile(r"<[|｜].*[|｜]>|</?s>|<(?:bos|eos|eot|pad|unk|mask|sep|cls)>|\[[A-Z]+\]", re.DOTALL)  # noqa: RUF001


def without_controls(spec: dict[str, Any], eot_token: str) -> dict[str, Any]:
    """The tokenizer.json that encodes text: the ids of `spec`, but text never becomes a control token.

    Those its author calls ordinary are made special, as `encode_special_tokens` reads special ones as text. A model
    that looks whole words up (T5's Unigram has `</s>`) would still find them: there they get names that are no text.
    """
    model, added = spec["model"], [dict(token) for token in spec["added_tokens"]]
    for token in added:
        token["special"] |= token["content"] == eot_token or CONTROL.fullmatch(token["content"]) is not None
    if model.get("type") in ("Unigram", "WordLevel", "WordPiece"):
        words = dict(model["vocab"])
        hidden = {token["content"] for token in added if token["special"]} | {eot_token}
        hidden &= words.keys() - {model.get("unk_token")}  # which the model looks up by its name
        renamed = [(f"\uffff{word}\ufdd0" if word in hidden else word, value) for word, value in words.items()]
        model = model | {"vocab": renamed if model["type"] == "Unigram" else dict(renamed)}
        added = [token for token in added if token["content"] not in hidden]  # which took no ids of their own
    return spec | {"model": model, "added_tokens": added}


def normalisation(spec: dict[str, Any], there_and_back: Callable[[str], str]) -> str:
    """What a tokenizer does to text, as in "by the tokenizer: NFKC, Lowercase; not reversible", or "none".

    spec: its tokenizer.json. there_and_back: encodes and decodes; what it loses of TRIAL and of the added tokens is
    the loss, but a normalizer whose effect TRIAL need not show is never called reversible.
    """

    def back(text: str) -> str:
        try:
            return there_and_back(text)
        except Exception:  # no unknown token, or one that ends documents; tokenizers raises bare Exception
            return ""

    added = (token["content"] for token in spec["added_tokens"])  # some take the spaces beside them off
    trial = TRIAL + "".join(f" {content} " for content in added if BLOCK not in content)
    front = tuple(back(" " * n + trial).removesuffix(trial) for n in range(3))
    steps = _steps(spec.get("normalizer"))
    if front not in LEADING or set(steps) - HARMLESS:
        lost = "not reversible"
    else:
        block = "" if BLOCK in back(f"a{BLOCK}b") else "U+2581 becomes a space"
        lost = ", ".join(filter(None, [LEADING[front], block]))
    return "by the tokenizer: " + "; ".join(filter(None, [", ".join(steps), lost])) if lost else "none"


def _steps(part: dict[str, Any] | None) -> list[str]:
    """What a normalizer does, a step each."""
    if not part or part["type"] == "Sequence":
        return [step for each in (part or {}).get("normalizers", []) for step in _steps(each)]
    if part["type"] == "Replace":
        return [f"Replace {next(iter(part['pattern'].values()))!r} by {part['content']!r}"]
    return [" ".join([part["type"], *(option for option, value in part.items() if value is True)])]
