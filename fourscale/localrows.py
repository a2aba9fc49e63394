"""Local rows for a task of lm-evaluation-harness: the task's own definition, its data set replaced by a file.

The file takes the place of the split that the task scores (test, else validation), in the columns of its data set.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fourscale.cli import InputError

BUILDER = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
KIND = {str: "text", bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object"}


def read(path: Path) -> list[tuple[int | None, dict[str, Any]]]:
    """Rows with the line that each stands on (None where they don't stand on lines).

    Raises InputError, naming the line, for what is no row, and for a row whose columns or their types are not those of
    the first: `datasets` would make its values null or fail in the midst.
    """
    rows = _parsed(path)
    if not rows:
        raise InputError(f"--offline-data {path}: no rows in it")
    at, first = rows[0]
    kinds: dict[str, tuple[str, str]] = {}
    for number, (line, row) in enumerate(rows, 1):
        where, before = place(path, line, number), f"line {at}" if at is not None else "row 1"
        if missing := [name for name in first if name not in row] or [name for name in row if name not in first]:
            lacks = f"no field {missing[0]!r}" if missing[0] in first else f"a field {missing[0]!r}"
            has = "has" if missing[0] in first else "has not"
            raise InputError(f"--offline-data {where}: {lacks}, which {before} {has}; all rows need the same fields")
        for name, value in row.items():
            if value is None:
                continue
            kind, seen = kinds.setdefault(name, (KIND[type(value)], where))
            if KIND[type(value)] != kind:
                raise InputError(
                    f"--offline-data {where}: {name!r} is {KIND[type(value)]}, at {seen} {kind}; "
                    "write a field alike in all rows"
                )
    return rows


def place(path: Path, line: int | None, number: int) -> str:
    """'FILE:LINE', or 'FILE, row N'."""
    return f"{path}, row {number}" if line is None else f"{path}:{line}"


def _parsed(path: Path) -> list[tuple[int | None, dict[str, Any]]]:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as e:
            raise InputError(f"--offline-data {path}: not readable parquet ({str(e).splitlines()[0]})") from None
        # One schema for all rows: only the count matters.
        return [(None, dict.fromkeys(table.column_names))] * len(table)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise InputError(f"--offline-data {path}: not UTF-8 at byte {e.start}; convert it") from None
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except json.JSONDecodeError as e:
            raise InputError(f"--offline-data {path}:{e.lineno}: not valid JSON: {e.msg}") from None
        for number, row in enumerate(listed, 1):
            if not isinstance(row, dict):
                raise InputError(f"--offline-data {path}, row {number}: {str(row)[:40]!r} is no JSON object")
        return [(None, row) for row in listed]
    rows: list[tuple[int | None, dict[str, Any]]] = []
    for line, one in enumerate(text.split("\n"), 1):
        if not one.strip():
            continue
        try:
            row = json.loads(one)
        except json.JSONDecodeError as e:
            raise InputError(
                f"--offline-data {path}:{line}: not valid JSON: {e.msg} (column {e.colno}); one object a line"
            ) from None
        if not isinstance(row, dict):
            raise InputError(
                f"--offline-data {path}:{line}: {one[:40]!r} is no JSON object; one a line, with the fields"
            )
        rows.append((line, row))
    return rows


def config_on(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """A task's configuration with `path` in place of its data set. Raises InputError.

    Splits that the file doesn't have are dropped. Worked examples then come from the scored rows, without the one that
    is asked (the harness leaves it out where the few-shot split is its test split, or both are unnamed), unless the
    task writes its own.
    """
    read(path)
    name = config["task"]
    side = next((side for side in ("test_split", "validation_split") if config.get(side)), None)
    if side is None:
        raise InputError(f"--offline-data {name}={path}: the task scores no split; name another task")
    split = config[side].partition("[")[0]
    shots = config.get("fewshot_config")
    if isinstance(shots, dict):
        shots = {key: value for key, value in shots.items() if key != "split"}
    written = isinstance(shots, dict) and shots.get("samples")
    return config | {
        "custom_dataset": None,
        "dataset_path": BUILDER[path.suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(path)}},
        "training_split": None,
        "validation_split": None,
        "test_split": None,
        "fewshot_split": split if side == "test_split" and not written else None,
        "fewshot_config": shots,
        side: split,
    }


def fault(config: dict[str, Any], path: Path, e: Exception) -> str:
    """What a task that failed on its rows found: the first row that fails alone, else the failure itself."""
    import datasets

    rows, process = read(path), config.get("process_docs")
    if process is not None and path.suffix != ".parquet":
        datasets.disable_progress_bars()
        for number, (line, row) in enumerate(rows, 1):
            try:
                list(process(datasets.Dataset.from_list([row])))
            except Exception as found:
                return f"--offline-data {place(path, line, number)}: {config['task']} can't use it: {described(found)}"
    fields = ", ".join(rows[0][1])
    return f"--offline-data {path}: {config['task']} can't use its rows (fields {fields}): {described(e)}"


def check_documents(task: Any, path: Path, count: int | None) -> None:
    """Raise InputError for the first scored document that the task can't phrase, or whose answer is no choice of it:
    the harness would fail later or count it as wrong."""
    rows, documents = read(path), task.eval_docs
    for number, document in enumerate(documents, 1):
        if count is not None and number > count:
            return
        line = rows[number - 1][0] if len(rows) == len(documents) else None
        where = place(path, line, number)
        try:
            text, gold = task.doc_to_text(document), task.doc_to_target(document)
            choices = task.doc_to_choice(document) if task.config.doc_to_choice else None
        except Exception as e:
            raise InputError(f"--offline-data {where}: {task.task_name} can't use it: {described(e)}") from None
        if task.OUTPUT_TYPE != "multiple_choice" or choices is None:
            continue
        gold = text if task.multiple_input else gold
        for one in gold if isinstance(gold, list) else [gold]:
            if one not in (range(len(choices)) if isinstance(one, int) else choices):
                raise InputError(
                    f"--offline-data {where}: the answer {one!r} is none of its {len(choices)} choices; "
                    "give the row its true label"
                )


def described(e: Exception) -> str:
    """An exception as one short line."""
    first = next((line.strip() for line in str(e).splitlines() if line.strip()), "")
    return f"{type(e).__name__}: {first[:200]}" if first else type(e).__name__
