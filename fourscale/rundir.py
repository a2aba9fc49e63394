"""A run's directory: its contract, who may write, how a checkpoint is published, and how a reader finds one.

    run.json  metrics.jsonl  loss.png  tokenizer.json  latest  step_N/{step.json, tensors}  DONE.json | STOPPED.json

A checkpoint is written under a temporary name, hashed, made durable and only then renamed to step_N: a directory of
that name is complete, whenever the writer died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import filelock
import torch
from torch import Tensor

from fourscale import checkpoint, optim
from fourscale.cli import InputError, RunFailed, flag, from_toml, is_rank_zero, parse
from fourscale.config import ModelConfig, TrainConfig, model_from_dict
from fourscale.model import GPT
from fourscale.parallel import Topology, host_name
from fourscale.tokenization import Tokenizer
from fourscale.tokenization import load as load_saved_tokenizer

FORMAT = 1
SHARED_WAIT_S = 90  # a new file on NFS can stay unseen by other nodes for a minute


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; InputError where it is missing or isn't one."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"{path}: {e.strerror.lower()}") from None
    except ValueError as e:
        raise InputError(f"{path}: not valid JSON ({e}); restore it or start in another directory") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: holds no JSON object; restore it or start in another directory")
    return table


def write_json(path: Path, table: dict[str, Any]) -> None:
    """Replace a JSON file whole: a reader sees the old one or the new one, also after a crash."""
    replace(path, json.dumps(table, indent=2, sort_keys=False) + "\n")


def replace(path: Path, text: str) -> None:
    """Replace a text file atomically and durably."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    checkpoint.fsync(path.parent)


# ---- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint and the run that it belongs to."""

    dir: Path  # step_N
    run_dir: Path
    run: dict[str, Any]  # run.json: model, tokenizer, data, training, config, attempts
    step: dict[str, Any]  # step.json: update, tokens, samples_seen, applied, skipped, val_loss, files
    model: ModelConfig


def step_dirs(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [p for p in run_dir.glob("step_*") if p.name[5:].isdigit() and (p / "step.json").is_file()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a step_N directory, or a run directory (its latest). Raises InputError."""
    if not path.is_dir():
        raise InputError(f"--ckpt {path}: no such directory; train.py writes one under --ckpt-dir")
    if (path / "step.json").is_file():
        directory = path.resolve()
    elif steps := step_dirs(path):
        directory = steps[-1].resolve()
    else:
        hint = "; a step_N.tmp-* directory is an unfinished save" if ".tmp-" in path.name else ""
        raise InputError(f"--ckpt {path}: no complete checkpoint (step_N with a step.json) there{hint}")
    if not (directory.parent / "run.json").is_file():
        raise InputError(
            f"--ckpt {path}: no run.json beside {directory.name}; copy it and tokenizer.json from the run too"
        )
    run = read_json(directory.parent / "run.json")
    if run.get("format") != FORMAT:
        raise InputError(f"{directory.parent / 'run.json'}: format {run.get('format')}, this version reads {FORMAT}")
    step = read_json(directory / "step.json")
    lacking = [k for k in (*CONTRACT, "config", "attempts") if k not in run]
    lacking += [k for k in ("update", "tokens", "skipped", "files") if k not in step]
    if lacking:
        raise InputError(f"{directory}: its run.json or step.json lacks {lacking[0]}; restore it or use another step")
    return Checkpoint(directory, directory.parent, run, step, model_from_dict(run["model"]))


def load_model(ckpt: Checkpoint, device: torch.device | str = "cpu") -> GPT:
    """The whole model in this process, in evaluation mode; every file is verified first. Raises InputError."""
    if fault := checkpoint.damage(ckpt.dir, ckpt.step["files"]):
        raise InputError(f"{fault}; use another checkpoint")
    with torch.device("meta"):
        model = GPT(ckpt.model)
    model.to_empty(device=device)
    checkpoint.load(ckpt.dir, checkpoint.model_tensors(model), group=None)
    return model.eval()


def digest(ckpt: Checkpoint) -> str:
    """sha256 hex over the hashes of a checkpoint's tensor files: equal for bit-equal states of one topology.

    DCP's .metadata is left out, since it names the directory and the hour of the save.
    """
    tensors = {name: entry["sha256"] for name, entry in ckpt.step["files"].items() if name != ".metadata"}
    return hashlib.sha256("".join(f"{name} {tensors[name]}\n" for name in sorted(tensors)).encode()).hexdigest()


def load_tokenizer(ckpt: Checkpoint) -> Tokenizer:
    """The tokenizer that the run was trained with. Raises InputError where it had none, or its file is missing or
    changed."""
    if ckpt.run["tokenizer"] is None:
        raise InputError(
            f"{ckpt.run_dir}: this run has no tokenizer: it was trained on bare ids, which are no text without one; "
            "train with --tokenizer for that"
        )
    return load_saved_tokenizer(ckpt.run_dir, ckpt.run["tokenizer"])


# ---- the contract --------------------------------------------------------------------------------------------------

CONTRACT = ("model", "tokenizer", "data", "training")  # tables of run.json that a resume may not change


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names and values that differ between the contracts of two run.json, as 'lr: was 0.001, now 0.003'."""
    out = [*_data_differences(old["data"], new["data"])]
    before, now = (_tokenizer_name(run["tokenizer"]) for run in (old, new))
    if before != now:
        out.append(f"the data's tokenizer: was {before}, now {now}")
    for table in ("model", "training"):
        a, b = old[table], new[table]
        if table == "model":  # a run from before a field was added had its default
            a, b = (dataclasses.asdict(model_from_dict(t)) for t in (a, b))
        out += [f"{k}: was {a.get(k)}, now {b.get(k)}" for k in sorted({*a, *b}) if a.get(k) != b.get(k)]
    return out


def data_parts(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Digests, and of a mixture weights, of each data set by name, from run.json's `data`; a single one is named ""."""
    return table.get("parts", {"": table})


def _data_differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    parts = [list(data_parts(table).items()) for table in (old, new)]
    if len(parts[0]) != len(parts[1]):
        yield f"--data is another mixture: of {len(parts[0])} data sets then, {len(parts[1])} now"
        return
    for (name, a), (_, b) in zip(*parts, strict=True):
        label = f"--data {name}" if name else "--data"
        for split, side in (("train", "train"), ("val", "held-out")):
            before, now = (t[f"{split}_digest"].removeprefix("sampled-")[:8] for t in (a, b))
            if a[f"{split}_digest"] != b[f"{split}_digest"]:
                yield f"{label} is another data set: {side} tokens differ (sha256 {before}… then, {now}… now)"
        if a.get("weight") != b.get("weight"):
            yield f"weight of {label}: was {a.get('weight')}, now {b.get('weight')}"


def _tokenizer_name(entry: dict[str, Any] | None) -> str:
    """What identifies a tokenizer; its kind doesn't, since a saved file may be named as one."""
    if entry is None:
        return "none"
    return f"sha256 {entry['sha256'][:16]}… of {entry['vocab_size']:,} ids"


def config_of(run: dict[str, Any], flags: TrainConfig) -> TrainConfig:
    """The run's own flags, as the defaults of a resume, with what belongs to this launch taken from `flags`.

    grad_accum is left open: it is derived from the run's global batch for the ranks there are.
    """
    table = dict(run["config"])
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    if unknown := sorted(set(table) - known):
        raise InputError(f"run.json: config has unknown fields {', '.join(unknown)}; written by a newer version?")
    for name, value in table.items():
        if isinstance(getattr(flags, name), Path) and value is not None:
            table[name] = Path(value)
    table["data"] = (table["data"],) if isinstance(table["data"], str) else tuple(table["data"])
    table["model"] = model_from_dict(table["model"])
    launch = {"grad_accum": None, "stop_after": None, "config": None}
    return TrainConfig(**(table | launch | {"ckpt_dir": flags.ckpt_dir, "resume": flags.resume}))


def recall(flags: TrainConfig) -> TrainConfig:
    """The flags of this launch: on a resume the run's own, then the recipe's, then the command line's."""
    steps = step_dirs(flags.ckpt_dir) if flags.resume != "never" else []
    if not steps:
        return flags
    run = open_checkpoint(steps[-1]).run
    merged = own = config_of(run, flags)
    if flags.config is not None:
        merged = from_toml(TrainConfig, flags.config, merged)
    merged = dataclasses.replace(parse(TrainConfig, default=merged), grad_accum=None)  # follows from the ranks
    if merged.steps and merged.tokens:
        length, given = (f"--steps {own.steps}", "--tokens") if own.steps else (f"--tokens {own.tokens}", "--steps")
        raise InputError(f"{given}: the length of this run is {length}; leave {given} out, or start another --ckpt-dir")
    return merged if merged.dtype != "auto" else dataclasses.replace(merged, dtype=run["training"]["dtype"])


def as_table(cfg: TrainConfig) -> dict[str, Any]:
    """A TrainConfig as plain JSON values."""
    table = dataclasses.asdict(cfg)
    return {k: str(v) if isinstance(v, Path) else v for k, v in table.items()}


# ---- writing -------------------------------------------------------------------------------------------------------


class RunDir:
    """The directory as its one writer, all ranks together, sees it. Public methods are collective."""

    def __init__(self, path: Path, topology: Topology):
        self.path = path.resolve()
        self.topology = topology
        self.attempt = topology.from_main(lambda: secrets.token_hex(4))
        self._lock: filelock.BaseFileLock | None = None
        self._published: int | None = None
        topology.from_main(self._claim)
        self._check_shared()

    def _claim(self) -> None:
        """Rank 0: make the directory, become its one writer, and clear what a dead writer left unfinished."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(self.path / ".lock", timeout=0)
            with contextlib.suppress(NotImplementedError):  # a file system without locks
                self._lock.acquire()
            for leftover in self.path.glob("step_*.tmp-*"):
                shutil.rmtree(leftover)
            replace(self.path / ".attempt", self.attempt)
        except filelock.Timeout:
            raise InputError(
                f"--ckpt-dir {self.path}: another run is writing there; wait for it or choose another"
            ) from None
        except OSError as e:
            raise InputError(f"--ckpt-dir {self.path}: {e.strerror.lower()}; choose a writable directory") from None

    def _check_shared(self) -> None:
        """Every rank must see what rank 0 wrote, or shards of a checkpoint would end up on different disks."""
        deadline = time.monotonic() + SHARED_WAIT_S
        while True:
            with contextlib.suppress(OSError):
                if (self.path / ".attempt").read_text(encoding="utf-8") == self.attempt:
                    break
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        seen = (self.path / ".attempt").is_file() and (self.path / ".attempt").read_text() == self.attempt
        blind = [host for host, ok in self.topology.gather((host_name(), seen)) if not ok]
        if blind:
            raise InputError(
                f"--ckpt-dir {self.path}: {blind[0]} does not see what rank 0 wrote there; "
                "name a directory that all nodes share"
            )

    def resume_point(self, resume: str) -> Checkpoint | None:
        """Where to go on from, None for a fresh run. Raises InputError for a directory that `resume` doesn't fit."""

        def find() -> Path | None:
            steps = step_dirs(self.path)
            if not steps:
                if resume == "must":
                    raise InputError(
                        f"--resume must: no complete checkpoint in {self.path}; use --resume auto to start"
                    )
                return None
            if resume == "never":
                raise InputError(
                    f"--ckpt-dir {self.path}: holds {steps[-1].name} of an earlier run; "
                    "add --resume auto to go on from it or choose another directory"
                )
            return steps[-1]

        found = self.topology.from_main(find)
        if found is None:
            return None
        ckpt = open_checkpoint(found)
        files = sorted(ckpt.step["files"])
        mine = files[self.topology.rank :: self.topology.world_size]
        faults = [f for f in self.topology.gather(checkpoint.damage(ckpt.dir, ckpt.step["files"], mine)) if f]
        if faults:
            older = [p.name for p in step_dirs(self.path)[:-1]]
            way = f"remove {found.name} to go on from {older[-1]}" if older else "start again in another directory"
            raise InputError(f"{faults[0]}; {way}")
        self._published = ckpt.step["update"]
        return ckpt

    def write_contract(self, run: dict[str, Any], tokenizer: Tokenizer | None) -> None:
        """Publish run.json; on a fresh run also the tokenizer's file. Earlier receipts of this directory end here."""

        def write() -> None:
            if tokenizer is not None:
                tokenizer.save(self.path)
            write_json(self.path / "run.json", run)
            for receipt in ("STOPPED.json", "DONE.json"):
                (self.path / receipt).unlink(missing_ok=True)

        self.topology.from_main(write)

    def publish(
        self, tensors: dict[str, Tensor], step: dict[str, Any], keep: int | None, keep_every: int | None
    ) -> bool:
        """Write step_N so that it exists whole or not at all, move `latest`, then drop what retention allows.

        `step` holds plain scalars, `update` among them; False where that update is the last one published. Raises
        RunFailed where the disk refuses; older checkpoints stay.
        """
        update = step["update"]
        if update == self._published:
            return False
        final, temporary = self.path / f"step_{update}", self.path / f"step_{update}.tmp-{self.attempt}"
        topology = self.topology
        fault = None
        broken = [n for n, t in tensors.items() if not optim.local(t).isfinite().all()]
        if topology.all_sum([len(broken)])[0]:
            name = next(n for names in topology.gather(broken[:1]) for n in names)
            raise RunFailed(
                f"step_{update}: {name} is not finite, not saved; the older checkpoints are intact: lower --lr"
            )
        try:
            topology.from_main(lambda: self._make(temporary))
            checkpoint.save(temporary, tensors, topology.cpu_group)
            mine = checkpoint.seal(temporary, topology.rank)
        except OSError as e:
            free = shutil.disk_usage(self.path).free
            mine, fault = {}, f"step_{update}: could not be written, {free:,} bytes are free on its disk ({e})"
        parts = topology.gather((mine, fault))
        faults = [f for _, f in parts if f]

        def commit() -> None:
            if faults:
                shutil.rmtree(temporary, ignore_errors=True)
                raise RunFailed(f"{faults[0]}; free the disk and go on with --resume auto from the last checkpoint")
            files = {name: entry for table, _ in parts for name, entry in sorted(table.items())}
            try:
                write_json(temporary / "step.json", step | {"files": files})
                checkpoint.fsync(temporary)
                if final.exists():  # left damaged by hand: a complete one would have been resumed from
                    shutil.rmtree(final)
                os.rename(temporary, final)
                checkpoint.fsync(self.path)
                replace(self.path / "latest", final.name + "\n")
            except OSError as e:
                raise RunFailed(f"{final}: {e.strerror}; the older checkpoints are intact") from None
            self._retain(keep, keep_every)

        topology.from_main(commit)
        self._published = update
        return True

    def _make(self, directory: Path) -> None:
        try:
            directory.mkdir()
        except OSError as e:
            raise RunFailed(f"{directory}: {e.strerror}; the older checkpoints are intact") from None

    def _retain(self, keep: int | None, keep_every: int | None) -> None:
        """Rank 0: remove all but the newest `keep` checkpoints and the multiples of `keep_every`."""
        if keep is None:
            return
        for old in step_dirs(self.path)[: -max(1, keep)]:
            if keep_every and int(old.name[5:]) % keep_every == 0:
                continue
            doomed = old.with_name(f"{old.name}.tmp-purge")  # never half a checkpoint under its own name
            os.rename(old, doomed)
            shutil.rmtree(doomed)

    def receipt(self, name: str, table: dict[str, Any]) -> None:
        """Write DONE.json or STOPPED.json."""
        self.topology.from_main(lambda: write_json(self.path / name, table))


# ---- being asked to stop -------------------------------------------------------------------------------------------


class StopRequest:
    """Set by SIGTERM, SIGINT or SIGUSR1 on this rank; the loop lets all ranks agree on the update to stop at."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.first = 0.0
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # One Ctrl-C arrives twice under torchrun, from the terminal and passed on; a second one by hand comes later.
        if self.name is not None and number == signal.SIGINT and time.monotonic() - self.first > 1:
            os._exit(130)
        if self.name is None:
            self.name, self.first = signal.Signals(number).name, time.monotonic()
            if is_rank_zero():  # not print: the signal may have come in the middle of one
                os.write(2, f"{self.name}: saving and stopping after this update\n".encode())


def refuse_differences(run_dir: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise InputError naming everything that a resume would change about the experiment."""
    if diff := differences(old, new):
        names = ", ".join(diff)
        raise InputError(
            f"--resume: {run_dir} is another experiment ({names}); leave out the flags that changed "
            f"or start a new run in another {flag('ckpt_dir')}"
        )
