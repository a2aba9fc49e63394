"""What run.json and step.json hold, as types, and the check that a file holds it.

A field that only some versions write is optional; one that only a later version knows is let be.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

from fourscale.config import ModelConfig, TrainConfig


class _StepRequired(TypedDict):
    update: int
    tokens: int
    samples_seen: int
    skipped: int
    files: dict[str, Any]


class Step(_StepRequired, total=False):
    applied: int
    skipped_in_a_row: int
    val_loss: float | None
    val_losses: dict[str, float | None] | None
    guard: float | None
    scaler: dict[str, float] | None


class Shape(TypedDict):  # a run's model is filled in
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    ctx: int
    vocab_size: int


class Tokenizer(TypedDict):
    kind: str
    file: str
    sha256: str
    vocab_size: int
    eot_token: str | None


class Digests(TypedDict):
    train_digest: str
    val_digest: str


class Part(Digests):
    weight: str


class Data(TypedDict, total=False):
    parts: dict[str, Part]


class _TrainingRequired(TypedDict):
    updates: int
    token_budget: int
    global_bsz: int
    warmup: int
    lr: float
    min_lr: float
    schedule: str
    optimizer: str
    dtype: str
    sampling: str
    seed: int
    data_seed: int
    eval_tokens: int


class Training(_TrainingRequired, total=False):
    decay_fraction: float
    muon_dtype: str
    skip_spikes: float
    skip_limit: int


class _AttemptRequired(TypedDict):
    from_update: int
    world_size: int
    local_bsz: int
    grad_accum: int
    device: str
    compile: bool


class Attempt(_AttemptRequired, total=False):
    attempt: str
    started: str
    code: str
    torch: str
    host: str
    parallel: str
    data: list[str] | str
    damaged_data: str
    job: str


Origin = TypedDict(
    "Origin",
    {"from": str, "digest": str, "update": int, "samples_seen": int, "tokens": int, "differences": list[str]},
)


Init = TypedDict("Init", {"named": str, "from": str, "digest": str, "update": int | None, "differences": list[str]})


class _RunRequired(TypedDict):
    model: ModelConfig
    tokenizer: Tokenizer | None
    data: Data
    training: Training
    config: TrainConfig
    attempts: list[Attempt]


class Run(_RunRequired, total=False):
    baselines: dict[str, float | None]
    origin: Origin
    init: Init


class _ImportedRequired(TypedDict):
    source: str
    digest: str


class Imported(_ImportedRequired, total=False):
    revision: str | None
    dtype: str
    special_ids: dict[str, Any]
    stop_ids: list[int]
    adds: str
    logits: dict[str, Any]


class ImportedRun(TypedDict):  # of import_hf.py: weights that nobody trained here
    model: ModelConfig
    tokenizer: Tokenizer | None
    imported: Imported


_WORDS = {int: "a count", float: "a number", str: "text", bool: "true or false", type(None): "null", Any: "a value"}


def misfit(value: Any, hint: Any, at: str = "") -> str | None:
    """The first fault of a JSON value against a type: 'training.updates is missing', 'config.data is 5, not a list'.

    A dataclass stands for the table that as_table makes of it; its fields may be missing, and others be there.
    """
    if get_origin(hint) in (Union, UnionType):
        faults = [misfit(value, h, at) for h in get_args(hint)]
        within = [f for f in faults if f and not f.startswith(f"{at} is ")]  # the right kind, with a fault inside
        return None if None in faults else (within or [f"{_shown(at, value)}, not {_words(hint)}"])[0]
    if not _of_kind(value, hint):
        return f"{_shown(at, value)}, not {_words(hint)}"
    within = {}
    if is_typeddict(hint) or dataclasses.is_dataclass(hint):
        within = get_type_hints(hint)
        if lacking := [name for name in getattr(hint, "__required_keys__", ()) if name not in value]:
            return f"{at}{'.' * bool(at)}{min(lacking, key=list(within).index)} is missing"
    elif get_origin(hint) is dict:
        within = dict.fromkeys(value, get_args(hint)[1])
    elif get_origin(hint) in (list, tuple) and isinstance(value, list):
        within = dict.fromkeys(range(len(value)), get_args(hint)[0])
    for key, inner in within.items():
        place = f"{at}[{key}]" if isinstance(value, list) else f"{at}{'.' * bool(at)}{key}"
        if (isinstance(value, list) or key in value) and (fault := misfit(value[key], inner, place)):
            return fault
    return None


def _of_kind(value: Any, hint: Any) -> bool:
    """The outermost type only; a tuple of texts may stand as one text."""
    kind = get_origin(hint) or hint
    if kind is Any:
        return True
    if kind is Literal:
        return value in get_args(hint)
    if kind in (int, float):
        number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        return number and (kind is float or value >= 0)
    if kind in (list, tuple):
        return isinstance(value, list) or (kind is tuple and isinstance(value, str))
    if kind is dict or is_typeddict(kind) or dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    return isinstance(value, str if kind is Path else kind)


def _words(hint: Any) -> str:
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_words, get_args(hint))))
    if kind is Literal:
        return " or ".join(map(str, get_args(hint)))
    if kind in (list, tuple):
        return "a list"
    return _WORDS.get(str if kind is Path else kind, "a table")


def _shown(at: str, value: Any) -> str:
    text = json.dumps(value)
    return f"{at} is {text if len(text) <= 40 else text[:37] + '...'}"
