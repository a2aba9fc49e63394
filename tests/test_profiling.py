"""train.py --profile: the trace, the table by phase, and what collectives sent, against fourscale.costs.

matrix.py makes several runs in one torchrun.
"""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest
from conftest import SMALL, one_error, rows, run

from fourscale import costs, traces

# 4 layers: Muon's matrices are shared out evenly over 2 ranks. 8 updates, of which 4 and 5 are profiled.
SHORT = [*SMALL, "--n-layers", 4, "--local-bsz", 3, "--eval-every", 0, "--tokens", 3_072, "--verify-data", "off"]
PROFILE = ["--profile", 2]


def cells(out: Path, data: Path, nproc: int | None, each: dict[str, tuple]) -> subprocess.CompletedProcess[str]:
    """Run {name: (parallel, shard_size, dtype, more flags)} in one group of ranks, each in OUT and the
    first word of NAME."""
    out.mkdir(parents=True, exist_ok=True)
    told = [
        {
            "name": f"{name}.told",
            "directory": name.split()[0],
            "argv": [str(x) for x in (*SHORT, "--data", data, "--parallel", mode, *more)],
            "parallel": mode,
            "shard_size": shards,
            "dtype": dtype,
            "backend": "aot_eager",
        }
        for name, (mode, shards, dtype, *more) in each.items()
    ]
    (out / "cells.json").write_text(json.dumps(told))
    return run("tests/matrix.py", out / "cells.json", out, nproc=nproc)


def profile(run_dir: Path) -> dict:
    """profile.json of a run, once its other files were looked at."""
    directory = run_dir / "profile"
    assert sorted(p.name for p in directory.iterdir()) == ["profile.json", "rank0.json.gz", "table.txt"]
    trace = json.loads(gzip.decompress((directory / "rank0.json.gz").read_bytes()))
    names = {e["name"] for e in trace["traceEvents"] if e.get("ph") == "X"}
    for phase in ("data wait", "forward", "head + loss", "backward", "clip", "optimizer", "rest"):
        assert traces.MARK + phase in names, phase
    found = json.loads((directory / "profile.json").read_text())
    assert sum(found["phases_ms"].values()) == pytest.approx(found["ms"], rel=1e-6)
    assert all(ms > 0 for ms in found["phases_ms"].values())
    updates = [e for e in trace["traceEvents"] if e.get("name") == traces.MARK + "optimizer"]
    assert len(updates) >= found["updates"]
    text = (directory / "table.txt").read_text()
    for line in ("head + loss", "optimizer", "operators, by their own time", "aten::"):
        assert line in text
    return found


def check_wire(found: dict) -> None:
    """What the run sent is what the plan says, column by column, within 2%."""
    assert sum(found["planned_bytes"].values()) > 0
    for column, said in found["planned_bytes"].items():
        assert found["sent_bytes"][column] == pytest.approx(said, rel=0.02), column
    # What costs.wire leaves out: the update's message, the gradients' norm, the loss.
    assert found["small_messages_bytes"] < 1_000


@pytest.fixture(scope="module")
def two(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("two")
    cells(
        out,
        data,
        2,
        {
            "ddp": ("ddp", 1, "fp32", "--optimizer", "muon"),
            "ddp-profiled": ("ddp", 1, "fp32", "--optimizer", "muon", *PROFILE),
            "fsdp": ("fsdp", 2, "bf16", "--compile"),
            "fsdp-profiled": ("fsdp", 2, "bf16", "--compile", *PROFILE),
            "fsdp-last": ("fsdp", 2, "fp32", "--optimizer", "muon", "--grad-sync", "last", *PROFILE),
        },
    )
    return out


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_profile_changes_no_loss(two, mode):
    plain, profiled = rows(two / mode), rows(two / f"{mode}-profiled")
    for key in ("loss", "preclip_norm", "tokens", "lr"):
        assert [r[key] for r in plain] == [r[key] for r in profiled], key
    # The rows of an interval, here up to 5, share its pace, and with it what slowed it.
    assert [bool(r.get("profiled")) for r in profiled] == [False] + [True] * 4 + [False] * 3
    assert not any("profiled" in r for r in plain)
    assert not (two / mode / "profile").exists()


@pytest.mark.parametrize("name", ["ddp-profiled", "fsdp-profiled", "fsdp-last"])
def test_what_crosses_the_wire_is_what_the_plan_says(two, name):
    found = profile(two / name)
    assert found["updates"] == 2
    check_wire(found)
    assert found["collectives_in_flight_ms"] >= found["phases_ms"]["collectives"] > 0


def test_calls_of_an_update(two):
    ddp, fsdp, last = (profile(two / f"{n}")["calls"] for n in ("ddp-profiled", "fsdp-profiled", "fsdp-last"))
    assert ddp["reduce all_reduce"] >= 1
    assert not any(name.startswith(("gather", "scatter")) for name in ddp)
    # 2 micro-batches: blocks in forward and backward, the root once.
    assert fsdp["gather all_gather"] == 2 * (2 * 4 + 1)
    assert fsdp["scatter reduce_scatter"] == 2 * (4 + 1)
    assert last["scatter reduce_scatter"] == 4 + 1


def test_copies_of_shards(data, tmp_path):
    """hsdp on 4 ranks: gathers and scatters within pairs, sums between them."""
    cells(tmp_path, data, 4, {"hsdp": ("hsdp", 2, "bf16", "--optimizer", "muon", *PROFILE)})
    check_wire(found := profile(tmp_path / "hsdp"))
    assert found["calls"]["reduce all_reduce"] == 4 + 1


def test_short_runs_resumes_and_disks_that_refuse(data, tmp_path):
    one = ("--local-bsz", 12)  # micro-batch
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "profile").write_text("a file where the directory should be")
    done = cells(
        tmp_path,
        data,
        None,
        {
            "short": ("ddp", 1, "fp32", *one, "--profile", 9, "--eval-every", 4),
            "none": ("ddp", 1, "fp32", *one, "--profile", 9, "--stop-after", 3),
            "refused": ("ddp", 1, "fp32", *one, *PROFILE),
            "resumed": ("ddp", 1, "fp32", *one, "--stop-after", 2),
            "resumed again": ("ddp", 1, "fp32", *one, "--resume", "auto", *PROFILE),
        },
    )
    found = profile(tmp_path / "short")
    assert found["updates"] == 5  # of 8
    assert found["phases_ms"]["eval"] > 0
    assert found["planned_bytes"] == found["sent_bytes"] == dict.fromkeys(("gather", "scatter", "reduce", "muon"), 0)
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: --profile")]
    assert notes == [
        "note: --profile 9: this run makes 8 more updates and the first 3 settle; 5 are profiled",
        "note: --profile 9: this run makes 3 more updates and the first 3 settle; nothing is profiled",
        f"note: --profile: {tmp_path / 'refused' / 'profile'} could not be written "
        f"({tmp_path / 'refused' / 'profile'}: file exists); training goes on",
    ]
    assert not (tmp_path / "none" / "profile").exists()
    assert (tmp_path / "refused" / "DONE.json").is_file()
    losses = [[r["loss"] for r in rows(tmp_path / name)] for name in ("short", "refused", "resumed")]
    assert losses[0] == losses[1] == losses[2]
    assert profile(tmp_path / "resumed")["updates"] == 2
    assert [bool(r.get("profiled")) for r in rows(tmp_path / "resumed")][-1]


# ---- a GPU's trace, by hand ------------------------------------------------------------------------------------------


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "pid": 1, "args": args}


def launch(correlation: int, ts: float, tid: int = 1) -> dict:
    return event("cudaLaunchKernel", "cuda_runtime", ts, 1, tid, correlation=correlation)


def kernel(name: str, correlation: int, ts: float, dur: float, cat: str = "kernel", stream: int = 7) -> dict:
    return event(name, cat, ts, dur, stream, correlation=correlation)


def test_kernels_count_for_the_phase_that_launched_them():
    """One update of 100 us on the host, in microseconds; the device is behind it, and ends at 140."""
    marks = {"data wait": (0, 10), "rest": (10, 20), "forward": (20, 50), "backward": (50, 80), "optimizer": (80, 100)}
    nccl = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16"}
    events = [
        *(event(traces.MARK + name, "user_annotation", a, b - a) for name, (a, b) in marks.items()),
        *(launch(1, 15), kernel("Memcpy HtoD (Pinned -> Device)", 1, 16, 4, "gpu_memcpy")),
        *(launch(2, 25), kernel("gemm", 2, 52, 8)),  # of the forward, though the backward has begun
        *(launch(3, 55, tid=2), kernel("gemm", 3, 60, 40)),  # autograd's thread: 60 .. 100
        *(launch(4, 60, tid=2), kernel("ncclDevKernel_AllReduce_Sum_bf16", 4, 80, 40, stream=9)),  # 80 .. 120
        *(launch(5, 90), kernel("adam", 5, 110, 30)),  # 110 .. 140, 10 of them while NCCL ends
        event("c10d::allreduce_", "cpu_op", 58, 4, 2, **{"Input Dims": [[[1000]]], "Input type": ["TensorList"]}),
        event("record_param_comms", "cpu_op", 59, 2, 2, **nccl, **{"Group size": 8}),
    ]
    read = traces.read({"traceEvents": events}, updates=1)
    assert read.ms == pytest.approx(0.140)
    want = {"host to device": 4, "forward": 8, "backward": 40, "optimizer": 30, "collectives": 10, "idle": 48}
    assert read.phases == pytest.approx({name: us / 1e3 for name, us in want.items()})
    assert read.host == pytest.approx({name: (b - a) / 1e3 for name, (a, b) in marks.items()})
    assert read.in_flight == pytest.approx(0.040)
    # NCCL tells of the call that the operator is too: counted once, with its own group.
    assert read.collectives == (traces.Collective("all_reduce", "backward", 2000, 8),)
    sent, other, _ = traces.wire(read, costs.Layout("ddp", 8, 1))
    assert (sent.reduce, other) == (3500, 0)  # 2 x 7/8 x 2000


def test_a_trace_without_updates_is_no_profile():
    with pytest.raises(ValueError, match="no update"):
        traces.read({"traceEvents": [event("aten::mm", "cpu_op", 0, 1)]}, 1)


def test_no_updates_are_no_profile():
    done = run("train.py", "--profile", 0, "--plan", code=2)
    assert one_error(done) == "error: --profile 0: must be at least 1, or left out"
