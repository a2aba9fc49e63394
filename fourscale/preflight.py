"""Checks of everything that a run rests on, in seconds: `train.py --preflight`.

Real updates of the real loop in a scratch directory; --ckpt-dir is only read. A line is a `pass`, a `FAIL` with its
remedy, or a `note`.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fourscale import budget, checkpoint, generate, inspection, parallel, rundir, telemetry, trials
from fourscale.cli import InputError, RunFailed, say
from fourscale.inspection import Probe, Setting, verdict
from fourscale.model import GPT
from fourscale.steps import Finding, size_text

if TYPE_CHECKING:
    from fourscale.config import TrainConfig
    from fourscale.parallel import Topology
    from fourscale.trials import Train, Trial

UPDATES = 4  # of the run that isn't interrupted; the other one is, in the middle
SLOW_MS = 3000.0  # an update that takes longer is not made so often: see `_smaller`
SMALL_BSZ = 2  # windows of a rank and micro-batch, and micro-batches, of the update that is made in its place
LONG_S = 10.0  # an update that would take longer is not made at all: see `_fewer_windows`
NEW_TOKENS = 16
MEMORY_SHARE = 0.95  # of a device's memory: beyond it the next longer document or larger bucket may not fit


@dataclass
class Report:
    """The lines, printed by rank 0 as they come."""

    topology: Topology
    failed: list[str] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        status, name, text = finding
        if status == "FAIL":
            self.failed.append(name)
        if self.topology.main:
            say(f"{status}  {name:10s} {text}")

    def section(self, name: str, fn: Callable[[], Iterable[Finding]]) -> bool:
        """Print what `fn` finds; an error that all ranks meet is a FAIL of that name. False where there was one."""
        try:
            for finding in fn():
                self.add(finding)
        except (InputError, RunFailed) as e:
            if hasattr(e, "speaks") and self.topology.world_size > 1:  # met by this rank alone: the others can't go on
                raise
            self.add(("FAIL", name, str(e)))
            return False
        return True


def check(flags: TrainConfig, topology: Topology, train: Train) -> int:
    """Print all checks; 1 if one failed, else 0. Collective."""
    started = time.monotonic()
    report = Report(topology)
    try:
        _check(flags, topology, train, report)
    except torch.OutOfMemoryError as e:
        gone = RunFailed(
            f"rank {topology.rank}: out of memory ({str(e).splitlines()[0]}); lower --local-bsz (--grad-accum makes up "
            "for it), try --act-ckpt block or --parallel fsdp"
        )
        gone.speaks = True
        raise gone from None
    failed = topology.from_main(lambda: report.failed)
    seconds = f"{time.monotonic() - started:.1f} s of checks"
    if topology.main:
        say(f"preflight: {len(failed)} failed ({', '.join(failed)}), {seconds}" if failed else f"preflight: {seconds}")
    return 1 if failed else 0


def _check(flags: TrainConfig, topology: Topology, train: Train, report: Report) -> None:
    report.section("machine", lambda: _machine(topology))
    report.section("directory", lambda: _directory(flags, topology))
    if flags.resume != "never" and topology.from_main((flags.ckpt_dir / "DONE.json").is_file):
        return report.add(("note", "left out", "all else: there is nothing to go on with"))
    box: list[Setting] = []
    if not report.section("setup", lambda: _setup(flags, topology, box)):
        return report.add(("note", "left out", "all else, which needs what the line above asks for"))
    run = box[0]
    readable = True
    for name, look in (
        ("shards", inspection.shards),
        ("masks", inspection.masks),
        ("ids", inspection.ids),
        ("batch", inspection.text),
    ):
        readable &= report.section(name, lambda look=look: look(run))
    if not readable:
        return report.add(("note", "left out", "model and updates, which need data that can be read"))
    if not report.section("memory", lambda: _room(run)):
        return report.add(("note", "left out", "model and updates, which need it"))
    seen = _Seen(run)
    report.section("model", lambda: _model(run, seen))
    trials.release(topology)
    if seen.tried is not run:
        flags = dataclasses.replace(flags, **_fewer_windows(run))

    def tried() -> list[Finding]:
        with trials.scratch(flags, topology) as directory:
            _updates(flags, run, seen, train, directory, report)
        return []

    report.section("directory", tried)


@dataclass
class _Seen:
    """What was seen of the model before its first update."""

    tried: Setting  # the run, or where its updates would take too long one of fewer windows
    loss: float | None = None  # of the first update of `tried`


# ---- before the first update -----------------------------------------------------------------------------------------


def _machine(topology: Topology) -> list[Finding]:
    name = parallel.device_name(topology.device)
    peak = budget.peak_flops(name, topology.dtype)
    backend = torch.distributed.get_backend_config().replace("cpu:gloo,cuda:gloo", "gloo")
    hosts = len(set(topology.gather(parallel.host_name())))
    known = f"peak {peak / 1e12:,.0f} TFLOP/s a device" if peak else "peak unknown, so MFU is n/a"
    where = f"{topology.world_size} x {name} on {_counted(hosts, 'host')}, {backend}"
    how = f"{topology.parallel}, {topology.dtype}, {known}; torch {torch.__version__}"
    return [("note", "machine", f"{where}, {how}")]


def _directory(flags: TrainConfig, topology: Topology) -> list[Finding]:
    """Whether a run with these flags would find --ckpt-dir as it needs it."""

    def look() -> Finding:
        path, steps = flags.ckpt_dir, rundir.step_dirs(flags.ckpt_dir)
        problem = None
        if flags.resume == "never" and steps:
            problem = f"{path} holds {steps[-1].name} of an earlier run; --resume auto goes on, or choose another"
        elif flags.resume != "never" and (path / "DONE.json").is_file():
            problem = f"{path} holds a finished run; --branch-from goes on from it in another --ckpt-dir"
        elif flags.resume == "must" and not steps:
            problem = f"{path} holds no complete checkpoint to go on from; --resume auto starts anew"
        elif flags.resume_step is not None and not any(p.name == f"step_{flags.resume_step}" for p in steps):
            problem = f"--resume-step {flags.resume_step}: there is no complete step of that number in {path}"
        if problem is None and (path / ".writer.json").is_file():
            return "note", "directory", f"{path}: a run is writing there, or was killed; a second one is kept out"
        begins = (
            f"goes on from {steps[-1].name}"
            if steps
            else f"begins from {flags.branch_from or flags.init_from or 'scratch'}"
        )
        return verdict("directory", problem, f"{path}: the run {begins}")

    return [topology.from_main(look)]


def _setup(flags: TrainConfig, topology: Topology, box: list[Setting]) -> list[Finding]:
    run = inspection.setting(flags, topology)
    box.append(run)
    plan, cfg = run.plan, run.plan.cfg
    shape = f"{cfg.model.arch}, {cfg.model.n_layers} layers x {cfg.model.d_model} wide, ctx {cfg.model.ctx:,}"
    split = {"world_size": topology.world_size, "local_bsz": cfg.local_bsz, "grad_accum": cfg.grad_accum}
    epochs = run.data.told(run.order.epochs(plan.token_budget / cfg.model.ctx))
    length = f"{plan.updates:,} updates, {plan.token_budget:,} tokens{epochs}"
    notes: list[Finding] = [("note", "data", note) for note in run.data.notes]
    return [*notes, ("note", "run", f"{shape}; {rundir.split(cfg.global_bsz, split)}; {length}")]


def _room(run: Setting) -> list[Finding]:
    """Nothing to tell where there is enough: how much it is will be measured."""
    trials.check_room(run.plan, run.topology)
    return []


def _model(run: Setting, seen: _Seen) -> Iterable[Finding]:
    probe = Probe(run)
    yield from probe.parameters()
    seconds = probe.update_seconds()
    fewer = _fewer_windows(run)
    if seconds > LONG_S and fewer["global_bsz"] < run.plan.cfg.global_bsz:
        seen.tried = run.of_windows(fewer["global_bsz"])
        yield (
            "note",
            "left out",
            f"whole updates, which would take about {seconds:.0f} s each: those below are of {fewer['global_bsz']} "
            f"windows, not {run.plan.cfg.global_bsz:,}; memory is that of a micro-batch, so the same",
        )
    probe.run = seen.tried
    seen.loss = probe.first_loss()
    yield from probe.next_tokens()
    yield from probe.fit()


def _fewer_windows(run: Setting) -> dict[str, Any]:
    """Changes that leave few micro-batches of an update."""
    cfg = run.plan.cfg
    windows = min(cfg.global_bsz, run.topology.world_size * cfg.local_bsz * SMALL_BSZ)
    return {"global_bsz": windows, "grad_accum": None}


# ---- real updates ----------------------------------------------------------------------------------------------------


def _updates(flags: TrainConfig, run: Setting, seen: _Seen, train: Train, directory: Path, report: Report) -> None:
    def slow(rows: list[dict[str, Any]]) -> bool:
        return len(rows) > 1 and rows[-1]["ms"] > SLOW_MS  # the first warms up

    made: list[Trial] = []

    def make() -> Iterable[Finding]:
        halfway = run.begun + UPDATES // 2
        made.append(
            trials.run(flags, run.topology, train, directory / "whole", UPDATES, until=slow, ckpt_every=halfway)
        )
        yield from _first(seen.tried, made[0], seen.loss)

    if not report.section("updates", make):
        return report.add(("note", "left out", "saving, resuming, memory, disk and time, which need an update"))
    whole = made[0]
    report.section("resume", lambda: _contract(flags, run, whole))
    report.section("repeat", lambda: _repeats(flags, seen.tried, train, directory, whole))
    report.section("generation", lambda: _generation(run, whole))
    report.section("memory", lambda: _memory(run, whole))
    report.section("disk", lambda: _disk(flags, run, whole, directory))
    report.section("time", lambda: _ahead(run, seen.tried, whole))


def _first(run: Setting, whole: Trial, expected: float | None) -> Iterable[Finding]:
    """The first update of the loop itself: its loss, and that it read what is shown above."""
    row, cfg = whole.rows[0], run.plan.cfg
    loss = math.nan if row["loss"] is None else row["loss"]
    trained = run.before is not None or run.source is not None
    fault = telemetry.first_loss_fault(loss, cfg.model.vocab_size, trained)
    passed = f"{loss:.4f} nats; ln {cfg.model.vocab_size:,} = {math.log(cfg.model.vocab_size):.4f} of random weights"
    if trained:
        passed = f"{loss:.4f} nats, of weights that were trained before"
    yield verdict("first loss", fault, passed)
    tokens = row["tokens"] - run.plan.tokens(run.begun)
    supposed = run.plan.tokens(run.begun + 1) - run.plan.tokens(run.begun)
    problem = None
    if tokens != supposed:
        problem = f"the first update counted {tokens:,} tokens, by the plan {supposed:,}; a bug: report it"
    elif (
        expected is not None and cfg.model.dropout == 0 and not abs(loss - expected) <= inspection.EQUAL_LOSS[cfg.dtype]
    ):
        problem = (
            f"the loop's first loss is {loss:.4f}, that of the batch above with the same weights {expected:.4f}: it "
            "reads or computes something else; look at train.py's load and loop"
        )
    yield verdict("loop", problem, f"its first update is of the batch above: {tokens:,} tokens, the same loss")
    skipped = whole.rows[-1]["skipped"] - (run.before.step["skipped"] if run.before else 0)
    if skipped and cfg.dtype != "fp16":
        yield (
            "FAIL",
            "updates",
            f"{skipped} of {len(whole.rows)} were dropped by the guard; lower --lr or look at the data",
        )
    else:
        norms = ", ".join("not finite" if r["preclip_norm"] is None else f"{r['preclip_norm']:.2f}" for r in whole.rows)
        yield (
            "pass",
            "updates",
            f"{len(whole.rows)} made, gradient norms {norms}"
            + (f"; {skipped} dropped while the loss scale settles" if skipped else ""),
        )


def _contract(flags: TrainConfig, run: Setting, whole: Trial) -> Iterable[Finding]:
    """What a resume would refuse or tell; how a branch or start from weights differs from where it begins."""
    if run.before is not None and run.before.run_dir == flags.ckpt_dir.resolve():
        asked = whole.run | {"training": run.plan.training_table()}
        changed = run.topology.from_main(lambda: rundir.reconcile(run.before.run_dir, run.before, asked))
        yield "pass", "resume", f"{run.before.dir} fits these flags" + (f": {'; '.join(changed)}" if changed else "")
        return
    for note in whole.notes:
        if note not in run.data.notes:
            yield "note", "run", note
    for name, title in (("origin", "branch"), ("init", "weights")):
        if name in whole.run:
            entry = whole.run[name]
            yield "note", title, f"of {entry['from']}" + ("" if entry["differences"] else ": nothing differs")


def _smaller(run: Setting) -> dict[str, Any]:
    """Changes that make an update cheap: few windows, in more than one micro-batch where the run has more."""
    cfg = run.plan.cfg
    local_bsz = min(cfg.local_bsz, SMALL_BSZ)
    windows = min(cfg.global_bsz, run.topology.world_size * local_bsz * min(cfg.grad_accum, SMALL_BSZ))
    return {"local_bsz": local_bsz, "global_bsz": windows, "grad_accum": None}


def _repeats(flags: TrainConfig, run: Setting, train: Train, directory: Path, whole: Trial) -> Iterable[Finding]:
    """The same updates again, interrupted, saved, loaded and gone on with: bit for bit the same?"""
    topology, changes, half, what = run.topology, {}, UPDATES // 2, ""
    if len(whole.rows) < min(UPDATES, run.plan.updates - run.begun):  # it was stopped as too slow
        changes, half = _smaller(run), 1
        what = f" (of {changes['global_bsz']} windows, since whole ones take {whole.rows[-1]['ms'] / 1e3:.1f} s)"
        whole = trials.run(flags, topology, train, directory / "whole small", 2, ckpt_every=run.begun + 1, **changes)
    again = trials.run(flags, topology, train, directory / "parts", half, **changes)
    one = _digest(topology, whole.checkpoint.parent / again.checkpoint.name), _digest(topology, again.checkpoint)
    step = again.checkpoint
    loaded = topology.from_main(lambda: checkpoint.damage(step, rundir.open_checkpoint(step).step["files"]))
    size = size_text(_size(step))
    yield verdict(
        "save", loaded and f"{loaded}; look at the disk", f"{step.name} of {size} is as it was written, by its hashes"
    )
    same = [_figures(r) for r in whole.rows[: len(again.rows)]] == [_figures(r) for r in again.rows]
    problem = None
    if one[0] != one[1] or not same:
        pairs = zip(whole.rows, again.rows, strict=False)
        where = [(a, b) for a, b in pairs if _figures(a) != _figures(b)]
        told = "the losses agree, the weights do not"
        if where:
            told = f"update {where[0][0]['update']}: loss {where[0][0]['loss']}, then {where[0][1]['loss']}"
        problem = (
            f"the same updates twice are not bit-equal ({told}); something depends on chance or time: look for kernels "
            "that add in any order (another --dtype or attention), a random number without a seed, --data that change"
        )
    yield verdict(
        "repeat", problem, f"{_counted(len(again.rows), 'update')} twice{what}: bit-equal, digest {one[0][:8]}"
    )
    if run.begun + half >= run.plan.updates:
        return
    on = trials.run(flags, topology, train, directory / "parts", half, **changes)
    two = _digest(topology, whole.checkpoint), _digest(topology, on.checkpoint)
    made = f"{len(again.rows)} + {len(on.rows)} updates, saved and loaded between"
    if two[0] != two[1] and problem is None:
        problem = (
            f"{made}, are not {len(whole.rows)} in one go (digest {two[1][:8]}, not {two[0][:8]}): a resume would go "
            "another way; look at what a checkpoint leaves out"
        )
    elif problem is not None:
        problem = "can't be told while a plain repeat isn't bit-equal"
    yield verdict("resume", problem, f"{made}, equal {len(whole.rows)} in one go bit for bit, digest {two[0][:8]}")


def _figures(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["update"], row["loss"], row["preclip_norm"], row["lr"], row["tokens"]


def _digest(topology: Topology, step: Path) -> str:
    return topology.from_main(lambda: rundir.digest(rundir.open_checkpoint(step)))


def _size(directory: Path) -> int:
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())


def _generation(run: Setting, whole: Trial) -> Iterable[Finding]:
    """What was saved, read as sample.py does, writes a bounded text, and stops where it is told."""
    cfg = run.plan.cfg
    needed, room = 4 * budget.count_parameters(cfg.model).total, checkpoint.available_memory()
    if run.topology.from_main(lambda: room is not None and needed > room // 2):
        yield (
            "note",
            "generation",
            f"left out: a whole model of {size_text(needed)} beside this is too much for one host",
        )
        return
    yield run.topology.from_main(lambda: _generated(run, whole))


def _generated(run: Setting, whole: Trial) -> Finding:
    model: GPT = rundir.load_model(rundir.open_checkpoint(whole.checkpoint))
    prompt = [run.data.eot_id if run.data.eot_id is not None else 0]

    def written(stops: set[int]) -> generate.Text:
        text = generate.Text(prompt, generate.sample_generator(0, prompt, 0))
        how = generate.Decoding(temperature=1.0)
        for _ in generate.generate(model, [text], NEW_TOKENS, how, eot_ids=stops, vocab_size=run.data.vocab_size):
            if len(text.new) > NEW_TOKENS:
                break
        return text

    free = written(set())
    stop = free.new[NEW_TOKENS // 2]
    cut = written({stop})
    expected = free.new[: free.new.index(stop) + 1]
    problem = None
    if len(free.new) != NEW_TOKENS or max(free.new) >= run.data.vocab_size:
        problem = f"{NEW_TOKENS} tokens were asked for, {len(free.new)} came, the highest id {max(free.new)}"
    elif cut.new != expected:
        problem = f"told to stop at id {stop}, it wrote {cut.new} and not {expected}"
    shown = "" if run.data.tokenizer is None else f": {run.data.tokenizer.decode(free.new)!r}"
    name = whole.checkpoint.name
    passed = f"{name} loads and writes {NEW_TOKENS} tokens{shown}; a stop id ends it at token {len(cut.new)}"
    return verdict("generation", problem and f"{problem}; look at fourscale/generate.py", passed)


# ---- what lies ahead -------------------------------------------------------------------------------------------------


def _memory(run: Setting, whole: Trial) -> Iterable[Finding]:
    topology = run.topology
    peak = whole.rows[-1].get("peak_memory")
    if not peak:
        yield "note", "memory", "this system doesn't tell the peak"
    elif topology.device.type == "cuda":
        room = torch.cuda.get_device_properties(topology.device).total_memory
        problem = None
        if peak > MEMORY_SHARE * room:
            problem = (
                f"peak {size_text(peak)} of {size_text(room)}: too close; lower --local-bsz or try --act-ckpt block"
            )
        yield verdict("memory", problem, f"peak {size_text(peak)} a device, of {size_text(room)}")
    else:
        free = checkpoint.available_memory()
        beside = f"; {size_text(free)} more are available on this host" if free is not None else ""
        yield (
            "pass",
            "memory",
            f"peak {size_text(peak)} a process, of {topology.world_size}, torch itself included{beside}",
        )


def _kept(flags: TrainConfig, run: Setting) -> tuple[int, str]:
    """Checkpoints that stand on the disk at the same time, at most, and how that comes about."""
    updates = run.plan.updates
    count = 1
    if flags.ckpt_every:
        count = updates // flags.ckpt_every - run.begun // flags.ckpt_every + bool(updates % flags.ckpt_every)
    count = max(count, 1)
    if flags.keep is None:
        return count, "all are kept"
    kept = min(count, max(1, flags.keep) + 1) + 1  # while one is written, and the best
    if flags.keep_every:
        kept += updates // flags.keep_every - run.begun // flags.keep_every
    return kept, f"--keep {flags.keep}, one being written and the best"


def _disk(flags: TrainConfig, run: Setting, whole: Trial, directory: Path) -> Iterable[Finding]:
    def look() -> Finding:
        size, tried = _size(whole.checkpoint), _size(directory)
        count, how = _kept(flags, run)
        free = shutil.disk_usage(directory).free + tried
        what = f"{_counted(count, 'checkpoint')} of {size_text(size)} ({how})"
        told = f"{what}: {size_text(count * size)}, {size_text(free)} are free"
        problem = f"{told}; make room, save more rarely (--ckpt-every) or keep fewer (--keep)"
        return verdict("disk", problem if count * size > free else None, told)

    yield run.topology.from_main(look)


def _ahead(run: Setting, tried: Setting, whole: Trial) -> Iterable[Finding]:
    """How long it will take, and what ends it."""
    plan, cfg = run.plan, run.plan.cfg
    left = plan.updates - run.begun
    each = statistics.median([r["ms"] for r in whole.rows[1:] or whole.rows]) / 1e3
    each *= plan.tokens_per_update / tried.plan.tokens_per_update
    training = left * each
    evaluations = left // cfg.eval_every + bool(left % cfg.eval_every) if cfg.eval_every else 0
    # A forward is a third of an update's work.
    scored = min(cfg.eval_tokens, sum(p.val.total for p in run.data.parts))
    scoring = evaluations * each / 3 * scored / plan.tokens_per_update
    rate, timed = plan.tokens_per_update / each, len(whole.rows[1:] or whole.rows)
    whole_time, parts = telemetry.clock(training + scoring), [telemetry.clock(t) for t in (training, scoring)]
    text = f"about {whole_time}: {_counted(left, 'update')} {parts[0]} ({1e3 * each:,.0f} ms each, median of {timed}; "
    text += (
        f"{rate:,.0f} tokens/s), {_counted(evaluations, 'evaluation')} {parts[1]} (estimated); saves are not counted"
    )
    yield "note", "time", text
    ends = [f"after update {plan.updates:,} ({plan.token_budget:,} tokens)"]
    if cfg.stop_after and cfg.stop_after < plan.updates:
        ends.insert(0, f"saved and stopped after update {cfg.stop_after:,} (--stop-after)")
    if cfg.target_loss is not None and cfg.stop_when:
        ends += [f"when held-out loss {cfg.target_loss:g} is {' or '.join(cfg.stop_when)} (--stop-when)"]
    ends += [
        f"on {cfg.skip_limit} dropped updates in a row (--skip-limit)",
        f"on {cfg.max_save_failures + 1} failed saves in a row",
        "on SIGTERM, SIGINT or SIGUSR1, with a save",
    ]
    yield "note", "ends", "; ".join(ends)


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
