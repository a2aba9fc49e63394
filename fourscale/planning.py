"""--plan: gathers what is known of a run before it starts, or measures it, and prints it. `show` imports no torch,
unless a checkpoint or a model is to be gone on from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fourscale import budget, schedule
from fourscale.budget import Origin
from fourscale.cli import InputError, is_rank_zero, say
from fourscale.config import TrainConfig
from fourscale.plantext import Clock, Facts, Machine, Measured, Text, lines

if TYPE_CHECKING:
    from fourscale.parallel import Topology
    from fourscale.trials import Train

GPT2_IDS, GPT2_EOT = 50_257, 50_256
NODE = 8  # ranks of a node, where nothing tells


def show(flags: TrainConfig) -> None:
    """Print the plan of `flags`, on rank 0 of a torchrun alone. Raises InputError where the run itself would refuse."""
    if is_rank_zero():
        say("\n".join(lines(gather(flags))))


def measured(flags: TrainConfig, topology: Topology, train: Train) -> int:
    """Make --measure updates here in a scratch directory, then print the plan with what they took. Collective."""
    from fourscale import telemetry, trials

    facts = gather(flags, topology)
    begun, n = facts.done.update, flags.measure
    if begun >= facts.plan.updates:
        raise InputError(
            f"--measure {n}: the run in {flags.ckpt_dir} has made all of its {begun:,} updates; leave it out"
        )
    trials.check_room(facts.plan, topology)
    before = telemetry.peak_memory(topology.device)
    with trials.scratch(flags, topology) as directory:
        # A save before the last update is counted in its row; the held-out loss comes at the end.
        extra = {"ckpt_every": begun + n - 1} if n > 1 else {}
        extra |= {"eval_every": begun + n} if flags.eval_every else {}
        trial = trials.run(flags, topology, train, directory / "run", n, **extra)
        size = topology.from_main(lambda: sum(p.stat().st_size for p in trial.checkpoint.iterdir()))
    if topology.main:
        rows = trial.rows
        warm = rows[1:] or rows  # the first update also pays for what is allocated and tuned once
        facts.measured = Measured(
            updates=len(warm),
            ms=statistics.median(row["ms"] for row in warm),
            eval_s=sum(row.get("eval_s", 0) for row in rows) or None,
            save_s=sum(row.get("save_s", 0) for row in rows) or None,
            checkpoint=size,
            memory=rows[-1].get("peak_memory"),
            before=before,
        )
        say("\n".join(lines(facts)))
    return 0


def gather(flags: TrainConfig, topology: Topology | None = None) -> Facts:
    """Everything that is known of a run before it starts. Raises InputError where the run itself would refuse."""
    notes: list[str] = []
    if flags.resume == "must" and not any(flags.ckpt_dir.glob("step_*")):
        raise InputError(f"--resume must: no complete checkpoint in {flags.ckpt_dir}; use --resume auto to start")
    clock, origin = Clock(), Origin()
    if _begins_elsewhere(flags):
        flags, clock, origin = _recalled(flags, topology)
    machine = _here(flags, topology) if topology is not None else _machine(flags, notes)
    text = _text(flags, notes)
    plan = budget.plan(flags, text.vocab_size, machine.world, machine.device_type, machine.dtype, text.eot_id, origin)
    cfg = plan.cfg
    schedule.check_schedule(plan.updates, cfg.warmup, cfg.lr, cfg.min_lr, cfg.schedule, cfg.decay_fraction)
    if flags.model.d_model is None and topology is None:
        notes.append(f"the model: sized to {machine.device_type}, since --d-model doesn't say")
    return Facts(plan, machine, text, clock, notes=notes)


def _begins_elsewhere(flags: TrainConfig) -> bool:
    resumes = flags.resume != "never" and any(flags.ckpt_dir.glob("step_*"))
    return resumes or flags.branch_from is not None or flags.init_from is not None


def _recalled(flags: TrainConfig, topology: Topology | None) -> tuple[TrainConfig, Clock, Origin]:
    """Flags, clock and origin of a run that goes on, branches or begins with a model at hand. Imports torch."""
    from fourscale import origins, rundir

    if topology is None:
        flags = origins.recall(flags)
    steps = rundir.step_dirs(flags.ckpt_dir) if flags.resume != "never" else []
    if flags.resume_step is not None:
        steps = [p for p in steps if p.name == f"step_{flags.resume_step}"]
    ckpt = rundir.open_checkpoint(steps[-1]) if steps else None
    parent = rundir.open_checkpoint(flags.branch_from) if flags.branch_from is not None and ckpt is None else None
    start = ckpt or parent
    clock = Clock(start.step["update"], start.step["tokens"]) if start is not None else Clock()
    return flags, clock, origins.origin_of(ckpt, parent)


def _here(flags: TrainConfig, topology: Topology) -> Machine:
    from fourscale import parallel

    name, dtype = parallel.device_name(topology.device), topology.dtype
    if flags.gpu is not None and budget.card_asked(flags.gpu) != budget.card_of(name):
        raise InputError(f"--gpu {flags.gpu}: --measure measures what is here, {name}; leave one of the two out")
    node = topology.shard_size if topology.parallel == "hsdp" else _node(topology.world_size)
    peak = budget.peak_flops(name, dtype, flags.peak_tflops)
    return Machine(topology.world_size, node, topology.device.type, dtype, budget.card_of(name), peak)


def _machine(flags: TrainConfig, notes: list[str]) -> Machine:
    """The machine that flags and environment speak of, without asking torch."""
    world = flags.expect_world_size
    if world is None:
        world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
        if "RANK" not in os.environ:
            notes.append("ranks: 1, since neither --expect-world-size nor torchrun says otherwise")
    if world < 1:
        raise InputError(f"--expect-world-size {world}: must be at least 1")
    node, told = _node(world), "LOCAL_WORLD_SIZE" in os.environ
    if not told and flags.parallel == "hsdp" and flags.shard_size and world > flags.shard_size <= NODE:
        node = flags.shard_size
    if world > node and not told and (flags.parallel != "hsdp" or flags.shard_size):
        notes.append(f"nodes of {node} ranks" + (", by --shard-size" if node == flags.shard_size else ""))
    if flags.parallel != "hsdp" or flags.shard_size is not None:
        budget.shard_size_of(flags.parallel, flags.shard_size, world)
    elif world > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        notes.append(f"hsdp: {node} ranks share a copy, as on nodes of {node} devices (--shard-size says otherwise)")
    card = budget.card_asked(flags.gpu) if flags.gpu is not None else None
    device_type, seen = _device_type(flags, notes)
    if card is None and device_type == "cuda" and seen is not None:
        card = budget.card_of(seen)
        notes.append(f"the card: {seen}, which is in this machine (--gpu NAME for another)")
    dtype = flags.dtype if flags.dtype != "auto" else "bf16" if device_type == "cuda" else "fp32"
    return Machine(world, node, device_type, dtype, card, budget.peak_flops(card or "", dtype, flags.peak_tflops))


def _node(world: int) -> int:
    """Ranks of a node: the launcher's, or the most up to 8 that divide the ranks."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return local if local and world % local == 0 else max(n for n in range(1, NODE + 1) if world % n == 0)


def _device_type(flags: TrainConfig, notes: list[str]) -> tuple[str, str | None]:
    """(cuda, mps or cpu, the name of the card that is here), by the flags, else by what this machine shows."""
    on_cpu = "--device cpu" if flags.device == "cpu" else "--backend gloo" if flags.backend == "gloo" else None
    if on_cpu and flags.device in ("cpu", "auto"):
        if flags.gpu is not None:
            raise InputError(f"--gpu {flags.gpu} and {on_cpu}: a plan for a card and one for the CPU; leave one out")
        return "cpu", None
    if flags.device == "mps" and flags.gpu is not None:
        raise InputError(f"--gpu {flags.gpu} and --device mps: a plan for a card and one for a Mac; leave one out")
    if flags.device != "auto":
        return flags.device, None if flags.gpu else _card_here()
    if flags.backend == "nccl" or flags.gpu is not None or flags.peak_tflops is not None:
        return "cuda", None
    if (seen := _card_here()) is not None:
        return "cuda", seen
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = "mps" if sys.platform == "darwin" and platform.machine() == "arm64" and world == 1 else "cpu"
    notes.append(f"the device: {device}, since no NVIDIA card shows here (--gpu NAME or --device cuda plans for one)")
    return device, None


def _card_here() -> str | None:
    """The name of this machine's first NVIDIA card; None where there is none that an installed torch would use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        if "+cpu" in importlib.metadata.version("torch"):
            return None
    except importlib.metadata.PackageNotFoundError:
        pass
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.removeprefix("Model:").strip()
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, timeout=2, check=True).stdout.split("\n")
        return names[0].strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _text(flags: TrainConfig, notes: list[str]) -> Text:
    """Vocabulary and size of the data, from their manifests; assumed where they aren't here."""
    from fourscale import formats, shards
    from fourscale.sources import shares

    paths = [path for path, _ in shares(flags.data, "--data")]
    if all(Path(path).exists() for path in paths):
        if len(paths) > 1 or formats.is_foreign(paths[0]):
            from fourscale import corpus

            opened = corpus.of_flags(flags)
            parts = {p.name: (p.train.total, float(p.weight)) for p in opened.parts}
            return Text(opened.vocab_size, opened.eot_id, parts, sum(p.val.total for p in opened.parts))
        manifest = shards.load_manifest(Path(paths[0]))
        train, val = (manifest["splits"][side]["tokens"] for side in shards.SPLITS)
        tokenizer = manifest["tokenizer"]
        return Text(tokenizer["vocab_size"], tokenizer.get("eot_id"), {paths[0]: (train, 1.0)}, val)
    missing = next(path for path in paths if not Path(path).exists())
    if (asked := flags.model.vocab_size) is not None:
        notes.append(f"the data: {missing} isn't here; a vocabulary of {asked:,} by --vocab-size")
        return Text(asked, flags.model.eot_id if flags.model.eot_id is not None else asked - 1)
    notes.append(f"the vocabulary: gpt2's {GPT2_IDS:,} ids, since {missing} isn't here (--vocab-size says otherwise)")
    return Text(GPT2_IDS, GPT2_EOT)
