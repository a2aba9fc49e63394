"""Where a run begins: its flags on a resume, a branch or from a model at hand, and the state that it takes over."""

from __future__ import annotations

import dataclasses
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fourscale import checkpoint, code_version, parallel, rundir, tokenization
from fourscale.budget import Origin, Plan
from fourscale.cli import InputError, flag
from fourscale.config import TrainConfig, layered, model_from_dict
from fourscale.corpus import Corpus
from fourscale.parallel import Topology
from fourscale.pretrained import Pretrained, open_pretrained
from fourscale.rundir import Checkpoint
from fourscale.tokenization import Tokenizer

# Fields of the model that its weights fix; the others may be set anew with --init-from.
FIXED = ("arch", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "vocab_size", "tie", "qk_norm")


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
    table["data"] = [table["data"]] if isinstance(table["data"], str) else table["data"]
    table |= {name: tuple(value) for name, value in table.items() if isinstance(value, list)}  # of repeated flags
    table["model"] = model_from_dict(table["model"])
    table = {k: v for k, v in rundir.BEFORE.items() if k not in table} | table
    launch = ("grad_accum", "stop_after", "config", "resume_step", "branch_from", "expect_world_size", "profile")
    here = {k: getattr(flags, k) for k in ("ckpt_dir", "resume", "branch_from", "init_from")}
    return TrainConfig(**(table | dict.fromkeys(launch) | here))


def recall(flags: TrainConfig) -> TrainConfig:
    """The flags of this launch: on a resume the run's own, then the recipe's, then the command line's; on a branch, in
    place of the run's own, those of the run that it leaves; with --init-from, the model's shape is that of its source.
    """
    if flags.branch_from is not None and flags.init_from is not None:
        raise InputError("--branch-from and --init-from: the one takes over a whole state, the other weights; give one")
    if flags.resume_step is not None and flags.resume == "never":
        raise InputError(f"--resume-step {flags.resume_step}: goes with --resume auto or must")
    steps = rundir.step_dirs(flags.ckpt_dir) if flags.resume != "never" else []
    if steps:
        run = rundir.read_run(flags.ckpt_dir)  # the newest checkpoint may be damaged, and --resume-step name another
    elif flags.branch_from is not None:
        run = _parent(flags.branch_from).run
    else:
        return flags if flags.init_from is None else _shaped_by(flags.init_from)
    if "imported" in run:
        place = flags.ckpt_dir if steps else flags.branch_from
        raise InputError(
            f"{'--resume' if steps else '--branch-from'}: {place} holds an imported model, which has no run to go on "
            f"with; start one from its weights with --init-from {place} in another --ckpt-dir"
        )
    own = config_of(run, flags)
    merged = layered(own)
    if steps:
        _same_beginning(flags, run)
        _same_model(flags.ckpt_dir, own, merged)
        merged = dataclasses.replace(merged, grad_accum=None)  # follows from the ranks
    # What the run had derived itself follows what is asked for now.
    if merged.lr != own.lr and merged.min_lr == own.min_lr == own.lr / 10:
        merged = dataclasses.replace(merged, min_lr=None)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fits = merged.parallel == "hsdp" and merged.shard_size and world % merged.shard_size == 0
    if merged.shard_size == own.shard_size and not fits:
        merged = dataclasses.replace(merged, shard_size=None)
    if any(int(os.environ.get(f"{launcher}_RESTART_COUNT") or 0) for launcher in ("TORCHELASTIC", "SLURM")):
        merged = dataclasses.replace(merged, resume_step=None)  # the same command again: it has gone back once
    return merged if merged.dtype != "auto" else dataclasses.replace(merged, dtype=run["training"]["dtype"])


def _shaped_by(named: str) -> TrainConfig:
    """The flags of a new run with the model at `named`. Raises InputError for one that its weights don't fit."""
    source = open_pretrained(named, "--init-from").cfg
    merged = layered(TrainConfig(model=source))
    for name in FIXED:
        asked, has = getattr(merged.model, name), getattr(source, name)
        if asked != has and not (name == "d_head" and merged.model.head_dim == source.head_dim):
            raise InputError(f"{flag(name)} {asked}: the model of --init-from {named} has {has}; leave the flag out")
    if source.arch == "gpt2" and merged.model.ctx > source.ctx:
        raise InputError(
            f"--ctx {merged.model.ctx}: the model of --init-from {named} has {source.ctx} learned positions; ask for "
            "at most as many"
        )
    return merged


def _same_beginning(flags: TrainConfig, run: dict[str, Any]) -> None:
    """A restart may repeat --branch-from or --init-from as it was; a run that began elsewhere isn't made one by it."""
    branched, begun = run.get("origin", {}).get("from"), run.get("init", {})
    for name, named, came_from in (
        ("--branch-from", flags.branch_from, branched),
        ("--init-from", flags.init_from, begun.get("from")),
    ):
        if named is None or str(named) == begun.get("named"):
            continue
        if came_from is None or not _names(Path(named).resolve(), Path(came_from)):
            how = "was started from scratch"
            if branched or begun:
                how = f"branched from {branched}" if branched else f"began with the weights of {begun['from']}"
            raise InputError(
                f"{name} {named}: the run in {flags.ckpt_dir} {how}; leave the flag out to go on with it, or choose "
                "another --ckpt-dir"
            )


def _same_model(run_dir: Path, own: TrainConfig, asked: TrainConfig) -> None:
    """Another recipe's shape laid over the run's own would be neither: say so before anyone checks what came out."""
    was, now = (dataclasses.asdict(cfg.model) for cfg in (own, asked))
    if diff := [f"{name}: was {was[name]}, now {now[name]}" for name in sorted(was) if was[name] != now[name]]:
        raise InputError(
            f"--resume: {run_dir} is another experiment ({', '.join(diff)}); leave out the flags that changed, or "
            "start a new run in another --ckpt-dir"
        )


def _names(path: Path, place: Path) -> bool:
    """True where `path` is `place`; for a run's step, also its directory, and `best` or `latest` there."""
    if path == place or rundir.STEP_NAME.fullmatch(place.name) is None:
        return path == place
    return path == place.parent or (path.parent == place.parent and path.name in ("best", "latest"))


def _parent(path: Path) -> Checkpoint:
    try:
        return rundir.open_checkpoint(path)
    except InputError as e:
        raise InputError(str(e).replace("--ckpt", "--branch-from", 1)) from None


def branch_point(flags: TrainConfig, topology: Topology) -> Checkpoint | None:
    """The checkpoint that a new run begins from, verified; None without --branch-from. Collective."""
    if flags.branch_from is None:
        return None
    directory = topology.from_main(lambda: _parent(flags.branch_from).dir)
    ckpt, fault = None, None
    try:  # another node may not see it
        ckpt = rundir.open_checkpoint(directory)
        fault = _damage(ckpt, topology)
    except InputError as e:
        fault = str(e)
    if faults := [f for f in topology.gather(fault) if f]:
        raise InputError(f"--branch-from: {faults[0]}; name another checkpoint")
    return ckpt


def _damage(ckpt: Checkpoint, topology: Topology) -> str | None:
    """The first fault among this rank's share of the files."""
    return checkpoint.damage(
        ckpt.dir, ckpt.step["files"], sorted(ckpt.step["files"])[topology.rank :: topology.world_size]
    )


def start_point(flags: TrainConfig, topology: Topology) -> Pretrained | None:
    """The model whose weights a new run begins with, verified where it is a checkpoint; None without --init-from.
    Collective."""
    if flags.init_from is None:
        return None
    path = topology.from_main(lambda: str(open_pretrained(flags.init_from, "--init-from").path))
    source, fault = None, None
    try:
        source = open_pretrained(path, "--init-from")
        fault = _damage(source.ckpt, topology) if source.ckpt else None
    except InputError as e:
        fault = str(e)
    if faults := [f for f in topology.gather(fault) if f]:
        raise InputError(f"{faults[0]}; name another model with --init-from")
    return source


def origin_of(ckpt: Checkpoint | None, parent: Checkpoint | None) -> Origin:
    """The clock at which the run began: the parent's of a new branch, what run.json says on a resume, else zeros."""
    if parent is not None:
        return parent.clock
    entry = ckpt.run.get("origin") if ckpt is not None else None
    return Origin(entry["update"], entry["samples_seen"], entry["tokens"]) if entry else Origin()


def origin_entry(ckpt: Checkpoint, run: dict[str, Any]) -> dict[str, Any]:
    """run.json's `origin` of a branch: where it comes from and what differs. Raises InputError for what a branch can't
    change, since weights or optimizer state would mean something else."""
    diff = rundir.differences(ckpt.run, run)
    for fixed in ("the data's tokenizer", "optimizer"):
        if found := next((line for line in diff if line.startswith(f"{fixed}:")), None):
            raise InputError(f"--branch-from {ckpt.dir}: {found}; a branch keeps it: start a new run without the flag")
    place = {"from": str(ckpt.dir), "digest": rundir.digest(ckpt)}
    clock = {"update": ckpt.clock.update, "samples_seen": ckpt.clock.samples, "tokens": ckpt.clock.tokens}
    return place | clock | {"differences": diff}


def init_entry(source: Pretrained, flags: TrainConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """run.json's `init` of a run with the weights of `source`: what that is, and in what the model differs from it.

    tokenizer: the data's. Raises InputError where it isn't the one that the weights were trained with.
    """
    named = flags.init_from
    if tokenizer is not None and source.tokenizer_entry is not None:
        if diff := tokenization.difference(source.tokenizer(), tokenizer):
            raise InputError(
                f"--data: its tokenizer is not that of --init-from {named} ({diff}); prepare the text with "
                f"--tokenizer {source.path if source.ckpt is None else source.ckpt.run_dir}"
            )
        diff = []
    else:
        lacks = "the model" if source.tokenizer_entry is None else "--data"
        diff = [f"whether the data's ids are those of the weights is unknown: {lacks} has no tokenizer"]
    old, new = (dataclasses.asdict(m) for m in (source.cfg, flags.model))
    diff += [f"{k}: was {old[k]}, now {new[k]}" for k in old if k not in FIXED and old[k] != new[k]]
    about = source.about
    place = {"named": named, "from": about["ckpt"], "digest": about["digest"], "update": about["update"]}
    return place | {"differences": diff}


def attempt_entry(name: str, plan: Plan, data: Corpus, topology: Topology, from_update: int) -> dict[str, Any]:
    """An entry of run.json's `attempts`: by what code, on which data, where and how the run goes on from an update."""
    cfg = plan.cfg
    return {
        "attempt": name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_update": from_update,
        "code": code_version(),
        "torch": torch.__version__,
        "host": parallel.host_name(),
        "data": data.absolute["data"],
        "device": parallel.device_name(topology.device),
        **{k: getattr(cfg, k) for k in ("parallel", "local_bsz", "grad_accum", "grad_sync", "act_ckpt", "compile")},
        "shard_size": topology.shard_size,
        "world_size": topology.world_size,
        **_job(),
    }


def _job() -> dict[str, str]:
    """Under Slurm, the job and which start of it this is, from 0, as "4242.0"; launch/train.sbatch reads it."""
    job = os.environ.get("SLURM_JOB_ID")
    return {"job": f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"} if job else {}
