"""Which checkpoints a directory holds, and what is wrong with each. Nothing is locked nor written.

Findings are ("pass" | "FAIL" | "note", name, text); a FAIL's text ends with its remedy.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fourscale import checkpoint, durable, rundir
from fourscale.cli import InputError
from fourscale.model import GPT

Finding = tuple[str, str, str]
ADAMW_STATE = ("exp_avg", "exp_avg_sq", "step")
MUON_STATE = ("momentum",)


@dataclass(frozen=True)
class Place:
    """A directory to look into: a run's, with all its checkpoints, or one of them."""

    run_dir: Path
    steps: list[Path]  # complete checkpoints to look at, oldest first
    whole: bool  # the run was named, not one checkpoint


def locate(path: Path) -> Place:
    """What `path` is. Raises InputError for anything but a run directory or a step_N in one."""
    if not path.is_dir():
        raise InputError(f"{path}: no such directory; train.py writes one under --ckpt-dir")
    path = path.resolve()
    if re.fullmatch(r"step_\d+", path.name):
        if not (path / "step.json").is_file():
            raise InputError(f"{path}: has no step.json: half a copy; copy it again, or delete it")
        if not (path.parent / "run.json").is_file():
            raise InputError(f"{path}: no run.json beside it; copy it and tokenizer.json from the run too")
        return Place(path.parent, [path], whole=False)
    if ".tmp-" in path.name:
        raise InputError(f"{path}: an unfinished save, no checkpoint; the run's next start removes it")
    if not (path / "run.json").is_file():
        if rundir.step_dirs(path):
            raise InputError(f"{path}: holds checkpoints but no run.json; copy it and tokenizer.json from the run too")
        if runs := sorted(p.parent.name for p in path.glob("*/run.json")):
            raise InputError(f"{path}: holds runs, is none; name one, such as {path / runs[0]}")
        if (path / "manifest.json").is_file():
            raise InputError(f"{path}: a data directory, no run; python check.py data {path}")
        raise InputError(f"{path}: no run directory (no run.json); name what train.py had as --ckpt-dir")
    return Place(path, rundir.step_dirs(path), whole=True)


def size_text(n: int) -> str:
    """'31.2 KiB', '2.1 GiB'."""
    for unit in ("KiB", "MiB", "GiB"):
        n /= 1024
        if n < 1024:
            return f"{n:.1f} {unit}"
    return f"{n / 1024:.1f} TiB"


def listed(ckpt: rundir.Checkpoint) -> str:
    """A checkpoint in a line: tokens, held-out loss, size, files, when it was written."""
    step, files = ckpt.step, ckpt.step["files"]
    loss = "no held-out loss" if step.get("val_loss") is None else f"held-out loss {step['val_loss']:.4f}"
    size = size_text(sum(entry["size"] for entry in files.values()))
    written = datetime.datetime.fromtimestamp((ckpt.dir / "step.json").stat().st_mtime)
    return f"{step['tokens']:,} tokens, {loss}, {size} in {len(files)} files, written {written:%Y-%m-%d %H:%M}"


def checkpoint_faults(path: Path, deep: bool, read: Callable[[int], Any]) -> tuple[rundir.Checkpoint | None, list[str]]:
    """The checkpoint at step_N, None where it can't be opened, and everything that is wrong with it.

    read(n) is called after n bytes were read. Memory does not grow with the checkpoint: `deep` holds one piece of a
    tensor at a time.
    """
    try:
        ckpt = rundir.open_checkpoint(path)
    except InputError as e:
        return None, [str(e).removeprefix("--ckpt ")]
    faults = []
    files = ckpt.step["files"]
    for name in sorted(files):
        if fault := checkpoint.damage(path, files, [name]):
            faults.append(f"{fault}; restore the file from a copy, or delete {path.name}")
        read(files[name]["size"])
    if not faults:  # of files that aren't what was written nothing can be said
        faults += tensor_faults(ckpt)
        if deep and not faults:
            faults += content_faults(ckpt, read)
    return ckpt, faults


def recorded_bytes(path: Path) -> int:
    """Bytes of a checkpoint's files by its step.json; 0 where that can't be read."""
    with contextlib.suppress(InputError, AttributeError, KeyError, TypeError):
        return sum(entry["size"] for entry in durable.read_json(path / "step.json")["files"].values())
    return 0


def openable(paths: list[Path]) -> list[rundir.Checkpoint]:
    """The checkpoints that can be opened, without a look at their tensors."""
    out = []
    for path in paths:
        with contextlib.suppress(InputError):
            out.append(rundir.open_checkpoint(path))
    return out


def tensor_faults(ckpt: rundir.Checkpoint) -> list[str]:
    """Names and shapes in the checkpoint's metadata that are not those of the run's model and optimizer."""
    try:
        stored = checkpoint.SafeReader(ckpt.dir).read_metadata().state_dict_metadata
    except InputError as e:
        return [str(e)]
    with torch.device("meta"):
        expected = {f"model.{name}": tuple(p.shape) for name, p in GPT(ckpt.model).named_parameters()}
    muon = ckpt.run["training"].get("optimizer") == "muon"
    faults = []
    for name, shape in [] if "imported" in ckpt.run else list(expected.items()):
        bare = name.removeprefix("model.")
        has_momentum = muon and f"optim.momentum.{bare}" in stored
        for key in sorted(MUON_STATE if has_momentum else ADAMW_STATE):
            expected[f"optim.{key}.{bare}"] = () if key == "step" else shape
    for name, shape in expected.items():
        if name not in stored:
            faults.append(f"{ckpt.dir}: has no {name}")
        elif tuple(stored[name].size) != shape:
            faults.append(f"{ckpt.dir}: {name} is {tuple(stored[name].size)}, by run.json {shape}")
        elif sum(math.prod(chunk.sizes) for chunk in stored[name].chunks) != math.prod(shape):
            faults.append(f"{ckpt.dir}: {name} is not there in full")
    faults += [f"{ckpt.dir}: {name} has no place in the model of run.json" for name in stored if name not in expected]
    if len(faults) > 1:
        return [f"{faults[0]}, and {len(faults) - 1} more like it; it is another run's checkpoint"]
    return [f"{fault}; it is another run's checkpoint" for fault in faults]


def content_faults(ckpt: rundir.Checkpoint, read: Callable[[int], Any]) -> list[str]:
    """Pieces of tensors that can't be read, have another shape than the metadata say, or hold a non-finite number."""
    metadata = checkpoint.SafeReader(ckpt.dir).read_metadata()
    faults = []
    for index, where in metadata.storage_data.items():
        stored = metadata.state_dict_metadata[index.fqn]
        offset = index.offset if index.offset is not None else torch.Size([0] * len(stored.size))
        sizes = next((tuple(c.sizes) for c in stored.chunks if c.offsets == offset), None)
        if where.relative_path not in ckpt.step["files"]:
            faults.append(f"{ckpt.dir}: {index.fqn} is said to be in {where.relative_path}, no file of this checkpoint")
            continue
        try:
            with (ckpt.dir / where.relative_path).open("rb") as f:
                f.seek(where.offset)
                piece = torch.load(io.BytesIO(f.read(where.length)), map_location="cpu", weights_only=True)
        except Exception as e:  # torch.load can fail in any way on foreign bytes
            first = str(e).strip().splitlines()[0]
            faults.append(f"{ckpt.dir}: {index.fqn} can't be read from {where.relative_path} ({first})")
            continue
        if tuple(piece.shape) != sizes or piece.dtype != stored.properties.dtype:
            faults.append(f"{ckpt.dir}: a piece of {index.fqn} is {tuple(piece.shape)}, by .metadata {sizes}")
        elif not piece.isfinite().all():
            faults.append(f"{ckpt.dir}: {index.fqn} is not finite")
        read(where.length)
    return faults


def pointers(run_dir: Path) -> tuple[dict[str, list[str]], list[Finding]]:
    """Which checkpoints the files `latest` and `best` name: words by name of a step; and what is wrong with the files.

    Readers take the newest checkpoint whatever `latest` says, so a stale one (killed between two renames) is no fault.
    """
    words: dict[str, list[str]] = {}
    findings: list[Finding] = []
    names = [p.name for p in rundir.step_dirs(run_dir)]
    for word in ("latest", "best"):
        path = run_dir / word
        if not path.is_file():
            continue
        named = path.read_text(encoding="utf-8", errors="replace").strip()
        if named in names:
            words.setdefault(named, []).append(word)
        if word == "latest" and names and named != names[-1]:
            findings.append(("note", word, f"says {named[:40]!r}; the newest is {names[-1]}, which readers take"))
        elif word == "best" and named not in names:
            text = f"{path} says {named[:40]!r}, which is not there"
            if (run_dir / "DONE.json").is_file():
                findings.append(("FAIL", word, f"{text}; restore it or delete the file"))
            else:  # killed while a resume from an older step set the later ones aside
                findings.append(("note", word, f"{text}; the run's next start writes it anew"))
    return words, findings


def leftovers(run_dir: Path) -> Iterator[Finding]:
    """What stands beside the checkpoints and is none."""
    for path in sorted(run_dir.glob("*step_*")):
        if not path.is_dir():
            continue
        if ".tmp-" in path.name:
            text = "an unfinished save or purge; the run's next start removes it, nothing reads it"
        elif path.name.startswith("discarded-"):
            text = "set aside by a resume from an older step; delete it when it isn't missed"
        elif re.fullmatch(r"step_\d+", path.name) and not (path / "step.json").is_file():
            yield "FAIL", path.name, "has no step.json: half a copy; copy it again, or delete it"
            continue
        else:
            continue
        size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        yield "note", "leftover", f"{path.name} ({size_text(size)}): {text}"
