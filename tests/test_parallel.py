"""Ranks that agree: on sizes before they start, on overflows and micro-batches, on whether to compile.

This file is also the program that such ranks run: test_parallel.py CASE .., by torchrun. What rank 0 prints as
`result: JSON` is what the test looks at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conftest import ROOT, command, environment

from fourscale import optim, parallel
from fourscale.cli import InputError
from fourscale.config import ModelConfig
from fourscale.model import GPT, Block
from fourscale.parallel import Topology

SHAPE = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 64, "ctx": 16, "vocab_size": 65}
WINDOWS, MICRO = 2, 3  # a rank's windows in a micro-batch; micro-batches of an update


def config(arch: str = "gpt2", **changes: Any) -> ModelConfig:
    return ModelConfig(arch=arch, **(SHAPE | {"n_kv_heads": 4 if arch == "gpt2" else 2} | changes))


def topologies(base: Topology) -> dict[str, Topology]:
    """Every way to deal a model out to these ranks, by name."""
    world = base.world_size
    sizes = {"ddp": 1, "fsdp": world} | {f"hsdp {world // s}x{s}": s for s in (1, 2, 4) if world % s == 0}
    return {n: dataclasses.replace(base, parallel=n.split()[0], shard_size=s) for n, s in sizes.items()}


def made(topology: Topology, cfg: ModelConfig, act_ckpt: str = "none") -> tuple[GPT, nn.Module]:
    with torch.device("meta"):
        model = GPT(cfg, act_ckpt)
    return model, parallel.build(model, lambda: model.init_weights(0), topology)


def ids(cfg: ModelConfig, rank: int, micro: int) -> torch.Tensor:
    """int64 [WINDOWS, ctx + 1]."""
    generator = torch.Generator().manual_seed(100 * rank + micro)
    return torch.randint(cfg.vocab_size, (WINDOWS, cfg.ctx + 1), generator=generator)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def gradients(model: GPT, wrapped: nn.Module, topology: Topology, grad_sync: str = "auto") -> dict[str, torch.Tensor]:
    """Whole gradients of one update, as the loop computes them."""
    cfg = model.cfg
    wrapped.zero_grad(set_to_none=True)
    for micro in range(MICRO):
        if cfg.dropout > 0:
            parallel.seed_dropout(topology, 0, 0, micro)
        batch = ids(cfg, topology.rank, micro)
        with parallel.accumulate(wrapped, micro == MICRO - 1, topology, grad_sync):
            with topology.autocast():
                loss = wrapped(batch[:, :-1], batch[:, 1:]).sum()
            (loss / (WINDOWS * MICRO * cfg.ctx)).backward()
    return {name: whole(p.grad).clone() for name, p in model.named_parameters()}


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of any element, relative to the largest of its tensor."""
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1e-6)).item() for n in b)


# ---- what the ranks do ---------------------------------------------------------------------------------------------


def sync(base: Topology) -> dict[str, Any]:
    """How far any way of accumulating is from a plain process that holds all batches, and the reductions it took."""
    cfg = config()
    alone = GPT(cfg)
    alone.init_weights(0)
    for rank in range(base.world_size):
        for micro in range(MICRO):
            batch = ids(cfg, rank, micro)
            count = base.world_size * WINDOWS * MICRO * cfg.ctx
            (alone(batch[:, :-1], batch[:, 1:]).sum() / count).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    out: dict[str, Any] = {}
    for name, topology in topologies(base).items():
        for grad_sync in ("auto", "every", "last"):
            model, wrapped = made(topology, cfg)
            gradients(model, wrapped, topology, grad_sync)  # what only a first update does is behind it
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                found = gradients(model, wrapped, topology, grad_sync)
            # gloo's reduce-scatter is an all-reduce too.
            reductions = sum(e.count for e in profile.key_averages() if e.key == "gloo:all_reduce")
            out[f"{name} {grad_sync}"] = (furthest(found, expected), reductions)
            del model, wrapped
    return out


def checkpointing(base: Topology) -> dict[str, Any]:
    """Whether gradients are the same, to the bit, with and without activation checkpointing."""
    out = {}
    shapes = {
        "gpt2": config(),
        "gpt2 dropout": config(dropout=0.2),
        "modern masked": config("modern", qk_norm=True, tie=False, doc_mask=True, eot_id=3),
        "modern masked dropout": config("modern", doc_mask=True, eot_id=3, dropout=0.2),
    }
    for name, topology in topologies(base).items():
        for dtype in ("fp32", "bf16", "fp16"):
            there = dataclasses.replace(topology, dtype=dtype)
            for shape, cfg in shapes.items():
                plain, *others = (gradients(*made(there, cfg, a), there) for a in ("none", "block", "selective"))
                same = [all(torch.equal(o[n], plain[n]) for n in plain) for o in others]
                out[f"{name} {dtype} {shape}"] = same
    return out


def overflow(base: Topology) -> dict[str, Any]:
    """fp16 where a gradient of one rank alone is not finite: who skips, what moves, what becomes of the scale."""
    out = {}
    for name, topology in topologies(base).items():
        topology = dataclasses.replace(topology, dtype="fp16")
        model, wrapped = made(topology, config())
        optimizers = optim.build(model, "adamw", 0.1, 0.9, 0.95)
        optim.set_lr(optimizers, 1e-3)
        scaler = optim.gradient_scaler("fp16", topology.device, topology.world_size, {})
        guard = optim.Guard(topology.device, 4.0, None)
        history = []
        for update, bad in enumerate((0.0, float("inf"), float("nan"), 0.0)):
            before = [whole(p).detach().clone() for p in model.parameters()]
            wrapped.zero_grad(set_to_none=True)
            batch = ids(model.cfg, topology.rank, update)
            with topology.autocast():
                loss = wrapped(batch[:, :-1], batch[:, 1:]).sum() / (WINDOWS * model.cfg.ctx)
            worse = 1.0 + (bad if topology.rank == topology.world_size - 1 else 0.0)
            scaler.scale(loss * worse).backward()
            optim.unscale(scaler, optimizers)
            norm = parallel.clip_gradients(wrapped, 1.0)
            mean = topology.sum_on_device(loss.detach().clone()) / topology.world_size
            skipped = guard.judge(mean, norm)
            optim.step(optimizers, skipped)
            scaler.update()
            moved = any(not torch.equal(whole(p).detach(), b) for p, b in zip(model.parameters(), before, strict=True))
            history.append(topology.gather((skipped.item(), moved, scaler.get_scale())))
        step = whole(next(iter(optimizers[0].state.values()))["step"]).item()
        out[name] = {"history": history, "step": step, "state": optim.scaler_state(scaler, topology.world_size)}
    return out


def compiling(base: Topology) -> dict[str, Any]:
    """A graph break on one rank only: nobody compiles, and all train as before."""
    cfg = config()
    expected = gradients(*made(base, cfg), base)
    plain = Block.plain_forward
    if base.rank == base.world_size - 1:

        @functools.wraps(plain)
        def broken(self: Block, *args: Any) -> torch.Tensor:
            torch._dynamo.graph_break()
            return plain(self, *args)

        Block.plain_forward = broken
    backend = functools.partial(torch.compile, backend="eager")  # whether code can be made is not the question here
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, torch, "compile", torch.compile)
        torch.compile = backend
        with torch.device("meta"):
            model = GPT(cfg)
        done, told = parallel.compile_blocks(model, base, WINDOWS)
    wrapped = parallel.build(model, lambda: model.init_weights(0), base)
    found = gradients(model, wrapped, base)
    same = all(torch.equal(found[n], expected[n]) for n in expected)
    compiled = any("train_forward" in vars(block) for block in model.blocks)
    return {"ranks": base.gather((done, told, same, compiled))}


def no_compiler(base: Topology) -> dict[str, Any]:
    """The last rank's machine has no C++ compiler."""
    with torch.device("meta"):
        model = GPT(config())
    done, told = parallel.compile_blocks(model, base, WINDOWS)
    return {"ranks": base.gather((done, told))}


CASES = {f.__name__: f for f in (sync, checkpointing, overflow, compiling, no_compiler)}
TOGETHER = ("sync", "overflow", "compiling")

# ---- what the tests look at ----------------------------------------------------------------------------------------


def ranks(case: str, nproc: int | None, **env: str) -> Any:
    """What ranks told of a case; those that may share a torchrun do."""
    return started(nproc, TOGETHER if case in TOGETHER else (case,), tuple(env.items()))[case]


@functools.cache
def started(nproc: int | None, cases: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    launch = command("tests/test_parallel.py", *cases, nproc=nproc)
    done = subprocess.run(launch, capture_output=True, text=True, env=environment(**dict(env)), timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.split("result: ")[1])


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_cross_the_ranks_when_told_and_are_those_of_one_process(nproc):
    found = ranks("sync", nproc)
    assert len(found) == 3 * (2 + (2 if nproc == 2 else 3))
    units = 1 + SHAPE["n_layers"]  # of FSDP: each block, and the root
    for name, (off, reductions) in found.items():
        assert off < 2e-5, name
        kind, *groups, grad_sync = name.split()
        each = MICRO if grad_sync == "every" or (grad_sync == "auto" and kind != "ddp") else 1
        across = MICRO if grad_sync == "every" else 1
        if kind == "ddp":
            expected = each
        elif kind == "fsdp" or groups == [f"1x{nproc}"]:
            expected = each * units + (across * units if groups else 0)
        elif groups == [f"{nproc}x1"]:
            expected = across * units
        else:
            expected = (each + across) * units
        assert reductions == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [None, 2])
def test_activation_checkpointing_changes_no_gradient(nproc):
    found = ranks("checkpointing", nproc)
    assert len(found) >= 12 * 3
    assert not [name for name, same in found.items() if same != [True, True]]


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_overflows_on_one_rank_is_skipped_by_all(nproc):
    for name, told in ranks("overflow", nproc).items():
        scales = [2.0**n / nproc for n in (16, 15, 14, 14)]
        for update, scale, skip in zip(told["history"], scales, (0, 1, 1, 0), strict=True):
            assert update == [[skip, not skip, scale]] * nproc, name
        assert told["step"] == 2, name  # what is skipped isn't counted
        assert told["state"]["scale"] == 2.0**14, name  # as a world of one has it


def test_a_graph_break_on_one_rank_keeps_all_from_compiling():
    for done, told, same, compiled in ranks("compiling", 2)["ranks"]:
        assert not done and same and not compiled
        assert told.startswith("note: --compile: not on rank 1 (") and "\n" not in told


@pytest.mark.slow
def test_a_machine_without_a_compiler_trains_without(tmp_path):
    env = {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    for done, told in ranks("no_compiler", 2, **env)["ranks"]:
        assert not done and told.startswith("note: --compile: not on rank 0 (") and "\n" not in told


@pytest.mark.parametrize(
    "parallel_, asked, world, node, size",
    [
        ("ddp", None, 8, 4, 1),
        ("fsdp", None, 8, 4, 8),
        ("hsdp", None, 8, 4, 4),
        ("hsdp", 2, 8, 4, 2),
        ("hsdp", None, 1, None, 1),
    ],
)
def test_how_many_ranks_share_a_copy(monkeypatch, parallel_, asked, world, node, size):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if node:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
    assert parallel.shard_size_of(parallel_, asked, world) == size


@pytest.mark.parametrize(
    "parallel_, asked, node, words",
    [
        ("hsdp", 3, 4, r"--shard-size 3: 8 ranks are not a multiple of it; give --shard-size a divisor of 8"),
        ("hsdp", None, 3, r"--parallel hsdp: 3 ranks a node: 8 ranks are not a multiple"),
        ("hsdp", None, None, r"--parallel hsdp: the launcher doesn't tell the ranks of a node; give --shard-size"),
        ("ddp", 2, 4, r"--shard-size 2: goes with --parallel hsdp"),
        ("fsdp", 2, 4, r"--shard-size 2: goes with --parallel hsdp"),
    ],
)
def test_groups_that_do_not_fit_are_refused(monkeypatch, parallel_, asked, node, words):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if node:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
    with pytest.raises(InputError, match=words):
        parallel.shard_size_of(parallel_, asked, 8)


def test_a_world_that_is_not_the_expected_one_is_refused_before_any_rank_waits(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="--expect-world-size 16: there is 1 rank; start it with torchrun"):
        parallel.start(expect_world_size=16)
    with pytest.raises(InputError, match="--timeout 0: must be at least 1 second"):
        parallel.start(timeout_s=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--expect-world-size 16: there are 2 ranks; look at --nnodes"):
        parallel.start(expect_world_size=16)
    assert not dist.is_initialized()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_of_a_large_model_goes_back():
    program = """
import sys, types, torch
from fourscale import parallel
del [torch.ones(31 << 20, dtype=torch.uint8)][:]  # from now on glibc keeps what is smaller
parallel.return_large_blocks(types.SimpleNamespace(device=torch.device("cpu")), int(sys.argv[1]))
blocks = [torch.ones(6 << 20, dtype=torch.uint8) for _ in range(17)]
def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])
before = resident()
del blocks[:-1]  # the last one keeps the heap from being cut
print(before - resident() >> 20)
"""
    freed = [
        int(subprocess.check_output([sys.executable, "-c", program, str(size)], env=environment(), cwd=ROOT))
        for size in (1 << 20, 64 << 20)
    ]
    assert freed[0] < 10 and freed[1] > 90, freed


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    here = parallel.start(device="cpu", timeout_s=60)
    results = {case: CASES[case](here) for case in sys.argv[1:]}
    if here.main:
        print("result:", json.dumps(results), flush=True)
    parallel.stop(here)
