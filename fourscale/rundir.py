"""A run as its directory tells it: the contract, what a resume may change, and how a reader finds a checkpoint.

run.json  metrics.jsonl  loss.png  tokenizer.json  latest  step_N/{step.json, tensors}  DONE.json | STOPPED.json
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fourscale import checkpoint, schedule
from fourscale.budget import Origin, Plan, count_parameters
from fourscale.cli import InputError
from fourscale.config import ModelConfig, TrainConfig, model_from_dict
from fourscale.durable import read_json
from fourscale.model import GPT
from fourscale.records import Digests, ImportedRun, Run, Shape, Step, misfit
from fourscale.tokenization import Tokenizer
from fourscale.tokenization import load as load_saved_tokenizer

FORMAT = 1
STEP_NAME = re.compile(r"step_[0-9]+")


# ---- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint and the run that it belongs to."""

    dir: Path  # step_N
    run_dir: Path
    run: dict[str, Any]  # run.json: model, tokenizer, data, training, config, attempts
    step: dict[str, Any]  # step.json: update, tokens, samples_seen, applied, skipped, val_loss, guard, scaler, files
    model: ModelConfig

    @property
    def clock(self) -> Origin:
        """How far the run had come."""
        return Origin(self.step["update"], self.step["samples_seen"], self.step["tokens"])


def step_dirs(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [p for p in run_dir.glob("step_*") if STEP_NAME.fullmatch(p.name) and (p / "step.json").is_file()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a step_N directory, a run directory (its newest), or the file `best` or `latest` of
    one. Its tensor files are not looked at. Raises InputError."""
    if path.name in ("best", "latest") and path.is_file():
        path = path.parent / _pointed(path)
    if not path.is_dir():
        what = (
            "a file; name its directory"
            if path.is_file()
            else "no such directory; train.py writes one under --ckpt-dir"
        )
        raise InputError(f"--ckpt {path}: {what}")
    if (path / "step.json").is_file():
        found = path
    elif steps := step_dirs(path):
        found = steps[-1]
    else:
        hint = "; a step_N.tmp-* directory is an unfinished save" if ".tmp-" in path.name else ""
        raise InputError(f"--ckpt {path}: no complete checkpoint (step_N with a step.json) there{hint}")
    directory = found.resolve()
    if not (directory.parent / "run.json").is_file():
        raise InputError(
            f"--ckpt {path}: no run.json beside {directory.name}; copy it and tokenizer.json from the run too"
        )
    run, step = read_run(directory.parent), read_step(found)
    return Checkpoint(directory, directory.parent, run, step, model_from_dict(run["model"]))


def _pointed(path: Path) -> str:
    """The name of the checkpoint in the file `best` or `latest`."""
    try:
        name = path.read_bytes().decode(errors="replace").strip()
    except OSError as e:
        raise InputError(f"--ckpt {path}: {e.strerror.lower()}; name a step_N instead") from None
    if not STEP_NAME.fullmatch(name):
        raise InputError(f"--ckpt {path}: holds {name[:40]!r}, not the name of a checkpoint; name a step_N instead")
    return name


def seal(step: dict[str, Any]) -> str:
    """sha256 hex over all of step.json but its field sha256, as JSON with sorted names and no spaces."""
    rest = {name: value for name, value in step.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_step(directory: Path) -> dict[str, Any]:
    """step.json of a checkpoint, whole and in its own place. Raises InputError.

    It must fit its sha256, which those from before that field lack; a directory named step_N must hold update N.
    """
    path, way = directory / "step.json", "use another checkpoint"
    step = read_json(path, way)
    if "sha256" in step and step["sha256"] != seal(step):
        raise InputError(f"{path} is damaged: its sha256 is not the recorded one; restore it or {way}")
    if fault := misfit(step, Step):
        raise InputError(f"{path}: {fault}; restore it or {way}")
    if not checkpoint.well_formed(step["files"]):
        raise InputError(f"{path}: its table of files is not as train.py writes it; restore it or {way}")
    for name in {directory.name, directory.resolve().name}:  # under a link's name too
        if STEP_NAME.fullmatch(name) and int(name[5:]) != step["update"]:
            raise InputError(f"{directory}: its step.json is that of step_{step['update']}; rename or restore it")
    return step


def read_run(run_dir: Path) -> dict[str, Any]:
    """run.json, with every field that is read of it in its type; of an imported model, tables of its training are
    empty. Raises InputError."""
    path, way = run_dir / "run.json", "restore it or start in another directory"
    run = read_json(path)
    if run.get("format") != FORMAT:
        raise InputError(f"{path}: format {run.get('format')}, this version reads {FORMAT}; {way}")
    if "imported" in run:
        fault = misfit(run, ImportedRun)
        run = {"data": {"parts": {}}, "training": {}, "config": {}, "attempts": []} | run
    else:
        fault = misfit(run, Run)
        if not fault and "parts" not in run["data"]:
            fault = misfit(run["data"], Digests, "data")
        if not fault and not run["attempts"]:
            fault = "attempts is empty"
    if fault := fault or misfit(run["model"], Shape, "model"):
        raise InputError(f"{path}: {fault}; {way}")
    try:
        model_from_dict(run["model"]).check()
    except InputError as e:
        raise InputError(f"{path}: model: {e}; {way}") from None
    return run


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
    if ckpt.run["tokenizer"] is None and "imported" in ckpt.run:
        raise InputError(
            f"{ckpt.run_dir}: has no tokenizer, since {ckpt.run['imported']['source']} had none when it was imported; "
            "put its tokenizer.json there and import it again"
        )
    if ckpt.run["tokenizer"] is None:
        raise InputError(
            f"{ckpt.run_dir}: this run has no tokenizer: it was trained on bare ids, which are no text without one; "
            "train with --tokenizer for that"
        )
    return load_saved_tokenizer(ckpt.run_dir, ckpt.run["tokenizer"])


# ---- the contract --------------------------------------------------------------------------------------------------

CONTRACT = ("model", "tokenizer", "data", "training")  # tables of run.json that a resume may not change
LENGTH = {"updates", "token_budget"}  # of `training`: a resume may change these where no past rate depends on them
# What a run from before a field of `training` was added had been doing.
BEFORE: dict[str, Any] = {"skip_spikes": 0.0, "skip_limit": 10, "muon_dtype": "fp32"}
# Fields of an attempt that are no part of the experiment: a resume may change them, and says so.
LAUNCH = (
    *("world_size", "parallel", "shard_size", "local_bsz", "grad_accum", "grad_sync", "act_ckpt", "compile"),
    *("device", "torch", "code"),
)


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
        else:
            a, b = BEFORE | a, BEFORE | b
        out += [f"{k}: was {a.get(k)}, now {b.get(k)}" for k in sorted({*a, *b}) if a.get(k) != b.get(k)]
    return out


def reconcile(run_dir: Path, ckpt: Checkpoint, new: dict[str, Any]) -> list[str]:
    """What a resume changes about the run and may, in words: its length, its launch.

    Raises InputError naming all that it may not change. The length is free where the rate of each update that was made
    stays what it was and the budget didn't end within one of them.
    """
    old, done = ckpt.run, ckpt.step["update"]
    if diff := differences(old, new):
        names = {line.split(":")[0] for line in diff}
        before, now = BEFORE | old["training"], new["training"]
        whole = done < min(before["updates"], now["updates"])
        kept = names <= LENGTH and all(_rate(before, i) == _rate(now, i) for i in range(done))
        if not (whole and kept):
            raise InputError(
                f"--resume: {run_dir} is another experiment ({', '.join(diff)}); leave out the flags that changed, or "
                f"start a new run in another --ckpt-dir, from this state with --branch-from {ckpt.dir}"
            )
    past, present = old["attempts"][-1], new["attempts"][-1]
    masks = [k for k in ("world_size", "local_bsz", "compile", "device") if past[k] != present[k]]
    if (p := new["model"]["dropout"]) > 0 and masks:
        changed = ", ".join(f"{k}: was {past[k]}, now {present[k]}" for k in masks)
        raise InputError(f"--dropout {p}: masks belong to ranks, micro-batches, kernels; resume as before ({changed})")
    _refuse_damaged(ckpt)
    derived = {"local_bsz", "grad_accum"}  # told in one line, below
    if "hsdp" not in (past["parallel"], present["parallel"]):
        derived.add("shard_size")
    names = [k for k in LAUNCH if k in past and past[k] != present[k] and k not in derived]
    launch = [f"{k}: was {past[k]}, now {present[k]}" for k in names]
    if past["world_size"] != present["world_size"] or past["local_bsz"] != present["local_bsz"]:
        launch.append(f"{split(new['training']['global_bsz'], present)} (were {split(None, past)})")
    return diff + launch


def _refuse_damaged(ckpt: Checkpoint) -> None:
    """Raise InputError where the attempt that made this checkpoint ended since its data were damaged."""
    update = ckpt.step["update"]
    maker = next((a for a in reversed(ckpt.run["attempts"]) if a["from_update"] < update), {})
    if "damaged_data" in maker:
        begun = maker["from_update"]
        way = f"--resume-step {begun} goes on from before it" if begun else "start again in another --ckpt-dir"
        raise InputError(f"{ckpt.dir}: may have learnt from damaged data ({maker['damaged_data']}); {way}")


def headline(plan: Plan, attempt: dict[str, Any], asked: ModelConfig, epochs: str) -> str:
    """What this attempt trains, on what, and for how long: two lines. `asked` is the model as the flags had it."""
    cfg, device = plan.cfg, attempt["device"]
    sized = "" if asked.d_model else f" (sized to {device if device in ('cpu', 'mps') else 'cuda'})"
    return (
        f"{cfg.model.arch} {cfg.model.n_layers} layers x {cfg.model.d_model} wide, "
        f"{count_parameters(cfg.model).total:,} parameters{sized} | "
        f"{attempt['world_size']} x {device}, {cfg.parallel}, {cfg.dtype}\n"
        f"{split(cfg.global_bsz, attempt)} | x {cfg.model.ctx} = {plan.tokens_per_update:,} tokens | "
        f"{plan.updates:,} updates, {plan.token_budget:,} tokens{epochs}"
    )


def split(global_bsz: int | None, attempt: dict[str, Any]) -> str:
    """'12 windows an update = 2 ranks x 5 windows x 2 micro-batches, 8 of weight 0'."""
    ranks, rows, micro = (attempt[k] for k in ("world_size", "local_bsz", "grad_accum"))
    if global_bsz is None:
        return f"{ranks} x {rows} x {micro}"
    empty = ranks * rows * micro - global_bsz
    padding = f", {empty} of weight 0" if empty else ""
    of = (
        f"{n} {what}{'' if n == 1 else end}"
        for n, what, end in ((ranks, "rank", "s"), (rows, "window", "s"), (micro, "micro-batch", "es"))
    )
    return f"{global_bsz} windows an update = {' x '.join(of)}{padding}"


def _rate(training: dict[str, Any], i: int) -> float:
    names = ("updates", "warmup", "lr", "min_lr", "schedule")
    return schedule.learning_rate(i, *(training[n] for n in names), training.get("decay_fraction", 0.2))


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


def as_table(cfg: TrainConfig) -> dict[str, Any]:
    """A TrainConfig as plain JSON values."""
    table = dataclasses.asdict(cfg)
    return {k: str(v) if isinstance(v, Path) else v for k, v in table.items()}
