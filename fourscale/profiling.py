"""train.py --profile: some updates of a run under torch.profiler, as a Chrome trace and a table by phase."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from fourscale import costs, traces
from fourscale.cli import say
from fourscale.config import TrainConfig
from fourscale.durable import naming, replace, write_json
from fourscale.parallel import Topology
from fourscale.telemetry import Meter

# Updates before those that are profiled: some that allocate and tune, one in which the profiler itself warms up.
SETTLING, WARMING = 2, 1
OPERATORS = 15
RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


def attach(
    cfg: TrainConfig,
    left: int,
    meter: Meter,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    topology: Topology,
    run_dir: Path,
) -> None:
    """Let rank 0 profile `cfg.profile` updates of the `left` that this attempt makes, after a few that settle.

    cfg: filled in. model: as wrapped. The loop's phases are told to `meter`; those within a forward, and the
    optimizer's step, come by hooks, which are gone with the profile. It computes nothing and changes no loss.
    """
    if not cfg.profile or not topology.main:
        return
    updates = min(cfg.profile, left - SETTLING - WARMING)
    if updates < cfg.profile:
        what = f"{updates} are profiled" if updates > 0 else "nothing is profiled"
        say(
            f"note: --profile {cfg.profile}: this run makes {max(left, 0)} more updates and the first "
            f"{SETTLING + WARMING} settle; {what}"
        )
    if updates > 0:
        meter.profiler = Profiler(cfg, updates, meter, model, optimizers, topology, run_dir)


class Profiler:
    """Cuts the loop into ranges of torch.profiler; `touched`, whether it slowed an update since that was last asked."""

    def __init__(
        self,
        cfg: TrainConfig,
        updates: int,
        meter: Meter,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        topology: Topology,
        run_dir: Path,
    ):
        self.cfg, self.updates, self.meter, self.topology = cfg, updates, meter, topology
        self.directory = run_dir / "profile"
        self.touched = False
        self._seen = self._made = 0  # updates that have begun; those that were recorded to their step
        self._range: record_function | None = None
        self._recording = False
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it tells stderr that it starts and stops
        activities = [ProfilerActivity.CPU]
        if topology.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = profile(
            activities=activities,
            schedule=schedule(wait=SETTLING, warmup=WARMING, active=updates, repeat=1),
            on_trace_ready=self._export,
            record_shapes=True,  # what collectives send is read from it
        )
        raw = getattr(model, "module", model)  # what DDP wraps
        self._hooks = [
            # Before and after FSDP's own hooks, so that its gathering counts with the forward.
            model.register_forward_pre_hook(lambda *_: self._within("forward"), prepend=True),
            raw.blocks[-1].register_forward_hook(lambda *_: self._within("head + loss")),
            model.register_forward_hook(lambda *_: self._within("backward")),
            *(o.register_step_pre_hook(lambda *_: self.mark("optimizer")) for o in optimizers),
        ]

    def mark(self, phase: str) -> None:
        """Here `phase` begins, a key of traces.PHASES, and the one before ends. "data wait" begins an update."""
        if self._profile is None:
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if phase == "data wait":
            self._next_update()
        self._made += self._recording and phase == "clip"  # which each update has once
        if self._recording:
            self._range = record_function(traces.MARK + phase)
            self._range.__enter__()

    def _within(self, phase: str) -> None:
        if torch.is_grad_enabled():  # not in a held-out loss
            self.mark(phase)

    def _next_update(self) -> None:
        self._seen += 1
        if self._seen == 1:
            return self._profile.start()
        if self._seen == SETTLING + WARMING + 1 and self.topology.device.type == "cuda":
            torch.cuda.synchronize(self.topology.device)  # kernels of the update before are not to be in the trace
        if self._seen > SETTLING + WARMING + self.updates:
            return self.end()
        self._profile.step()
        self.touched |= self._seen > SETTLING
        self._recording = self._profile.current_action in RECORDING

    def end(self) -> None:
        """Write what was profiled; also where a run ends before all of it is there."""
        if self._profile is None:
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        running, self._profile, self._recording = self._profile, None, False
        for hook in self._hooks:
            hook.remove()
        if self._seen:
            with self.meter.off_the_clock("profile"):
                running.stop()
        if self._made == 0:
            say(f"note: --profile {self.cfg.profile}: the run ended before it; nothing is profiled")

    def _export(self, done: profile) -> None:
        """Write the trace, what is read from it, and the tables. What a disk refuses is told, and the run goes on."""
        trace_file, plain = self.directory / "rank0.json.gz", self.directory / ".rank0.json"
        if self._made == 0:
            return
        try:
            with naming(self.directory):
                self.directory.mkdir(exist_ok=True)
                done.export_chrome_trace(str(plain))
                trace = json.loads(plain.read_text(encoding="utf-8", errors="replace"))
                read = traces.read(trace, self._made)
                with plain.open("rb") as whole, gzip.open(self.directory / ".rank0.json.gz", "wb", 5) as small:
                    shutil.copyfileobj(whole, small, 1 << 20)
                os.replace(self.directory / ".rank0.json.gz", trace_file)
            layout = costs.Layout(self.cfg.parallel, self.topology.world_size, self.topology.shard_size)
            theory = costs.wire(self.cfg, layout)
            text = [*traces.lines(read, layout, theory), "", *self._operators(done)]
            found, other, calls = traces.wire(read, layout)
            figures = {"updates": read.updates, "ms": read.ms, "phases_ms": read.phases, "host_ms": read.host}
            figures |= {"collectives_in_flight_ms": read.in_flight, "calls": calls, "small_messages_bytes": other}
            figures |= {"sent_bytes": vars(found), "planned_bytes": vars(theory)}
            write_json(self.directory / "profile.json", figures)
            replace(self.directory / "table.txt", "\n".join(text) + "\n")
            say("\n".join([*text, f"profile: {trace_file} (chrome://tracing, ui.perfetto.dev), table.txt beside it"]))
        except Exception as e:  # a trace of another torch may look otherwise; no run is to end for a profile
            why = f"{e.filename}: {e.strerror.lower()}" if isinstance(e, OSError) and e.strerror else str(e) or repr(e)
            say(f"note: --profile: {self.directory} could not be written ({why.splitlines()[0]}); training goes on")
        finally:
            with contextlib.suppress(OSError):
                for left in (plain, self.directory / ".rank0.json.gz"):
                    left.unlink(missing_ok=True)

    def _operators(self, done: profile) -> list[str]:
        """The operators that took most, of an update: on a GPU by the time of their kernels."""
        cuda = self.topology.device.type == "cuda"
        name = "self_device_time_total" if cuda else "self_cpu_time_total"
        each = [e for e in done.key_averages() if not e.is_user_annotation and not e.key.startswith("ProfilerStep")]
        total = sum(getattr(e, name) for e in each) or 1.0
        out = [f"{'operators, by their own time':<48}{'ms':>11}{'share':>8}{'calls':>9}"]
        for e in sorted(each, key=lambda e: -getattr(e, name))[:OPERATORS]:
            own = getattr(e, name)
            if own:
                ms = 1e-3 * own / self._made
                out.append(f"  {e.key[:45]:<46}{ms:>11.3f}{own / total:>8.1%}{e.count / self._made:>9,.0f}")
        return out
