"""Muon: what orthogonalising does to a spectrum, and that ranks which share it make the same step.

This file is also the program that such ranks run, by torchrun. What rank 0 prints as `result: JSON` is what the test
looks at.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conftest import SMALL, command, environment, one_error, run

from fourscale import budget, costs, muon, parallel
from fourscale.config import ModelConfig, TrainConfig
from fourscale.model import GPT
from fourscale.muon import QUINTICS, Muon, orthogonalise
from fourscale.optim import set_lr

MODEL = {"arch": "modern", "d_model": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ctx": 16, "vocab_size": 65}
SHAPES = [(64, 64), (48, 160), (160, 48)]


def with_spectrum(values: Tensor, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """fp64 ([m, n] of the m singular values, the nearest semi-orthogonal matrix)."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(k, len(values), generator=generator, dtype=torch.float64))[0]
        for k in (len(values), n)
    )
    return (left * values.double()) @ right.T, left @ right.T


def spectra(m: int) -> dict[str, Tensor]:
    return {
        "flat": torch.ones(m),
        "random": torch.linalg.svdvals(torch.randn(m, 2 * m, generator=torch.Generator().manual_seed(1))),
        "falling": 1 / torch.arange(1, m + 1),
        "half of the rank": torch.cat((torch.ones(m // 2), torch.zeros(m - m // 2))),
        "six decades": torch.logspace(0, -6, m),
        "rank one": torch.eye(m)[0],
    }


def force(monkeypatch: pytest.MonkeyPatch, on_gram: bool) -> None:
    """Steps on X X^T, or on X."""
    monkeypatch.setattr(muon, "orthogonalising_flops", lambda m, n, gram: 0.0 if gram == on_gram else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_spectrum_becomes_flat_and_the_direction_stays(dtype):
    torch.manual_seed(0)
    for shape in SHAPES:
        matrices = torch.randn(40, *shape)
        out = orthogonalise(1e-4 * matrices, dtype)
        assert out.dtype == torch.float32
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        values = torch.linalg.svdvals(out)
        assert values.median() > 0.75 and values.max() < 1.25, shape
        assert torch.nn.functional.cosine_similarity(out.flatten(1), (u @ v).flatten(1)).min() > 0.97, shape


def test_it_is_the_composed_polynomial_of_each_singular_value():
    for name, values in spectra(48).items():
        matrix, _ = with_spectrum(values, 160)
        x = values.double() / values.double().pow(8).sum().pow(1 / 8)
        for a, b, c in QUINTICS:
            x = a * x + b * x**3 + c * x**5
        kept = values.double() > 1e-3 * values.max()
        expected, _ = with_spectrum(torch.where(kept, x, 0), 160)
        (out,) = orthogonalise(matrix.float()[None])
        left = matrix @ torch.linalg.pinv(matrix, rtol=1e-3)  # the space of what is kept
        assert (left @ out.double() - expected).norm() < 1e-3 * expected.norm(), name
        assert x[kept].min() > (0.76 if name != "six decades" else 0.3) and x.max() < 1.22, name


def test_steps_on_the_gram_matrix_are_those_on_the_matrix(monkeypatch):
    for m, n in ((48, 160), (96, 128), (64, 64)):
        for name, values in spectra(m).items():
            matrix = with_spectrum(values, n)[0].float()[None]
            for scaled in (matrix, 1e-9 * matrix, 1e6 * matrix.mT):
                force(monkeypatch, False)
                plain = orthogonalise(scaled)
                force(monkeypatch, True)
                assert (orthogonalise(scaled) - plain).norm() < 2e-3 * plain.norm(), (m, n, name)
    monkeypatch.undo()
    assert len(QUINTICS) == budget.MUON_STEPS


def test_a_batch_is_its_matrices_one_by_one_and_nothing_becomes_of_nothing():
    torch.manual_seed(0)
    for shape in SHAPES:
        batch = torch.randn(5, *shape) * torch.tensor([1e-12, 1e-3, 1.0, 1e3, 0.0])[:, None, None]
        together = orthogonalise(batch)
        for alone, out in zip(batch, together, strict=True):
            assert (orthogonalise(alone[None])[0] - out).abs().max() < 1e-5
        assert together[:4].flatten(1).norm(dim=1).min() > 0.8 * math.sqrt(48)
        assert not together[4].any()


def test_a_step_is_torchs_but_for_its_polynomials():
    torch.manual_seed(0)
    start, grads = torch.randn(48, 96), [torch.randn(48, 96) for _ in range(3)]
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    a = Muon([ours], weight_decay=0.1)
    b = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    set_lr([a], 0.01)
    for grad in grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        a.step()
        b.step()
    # Their singular values come out at 0.7 .. 1.2 too, other ones of them at other ends.
    assert (ours - theirs).norm() < 0.25 * (theirs - start).norm()


def test_the_plan_knows_what_a_round_takes():
    model = GPT(ModelConfig(**MODEL, d_ff=96))
    model.init_weights(0)
    params = [p for p in model.blocks.parameters() if p.dim() == 2]
    gradients = [torch.randn_like(p) for p in params]
    optimizer = Muon(params, 0.1)
    peaks = []
    for _ in range(2):  # the first step makes the momentum
        for p, grad in zip(params, gradients, strict=True):
            p.grad = grad.clone()
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *(p.grad for p in params))
        with tracker:
            optimizer.step()
        peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    lasting = 4 * (sum(p.numel() for p in model.parameters()) + 2 * sum(p.numel() for p in params))
    taken = costs.muon_round(model.cfg, costs.Layout("ddp", 1, 1))
    assert peaks[1] - lasting == pytest.approx(taken, rel=0.05)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made meanwhile."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(t.nbytes for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))])
        return out


def test_no_more_than_a_rounds_matrices_are_handled_at_once(monkeypatch):
    def stepped() -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(32, 128)) for _ in range(11)]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = Muon(params, 0.1)
        set_lr([optimizer], 0.01)
        with Largest() as largest:
            optimizer.step()
        return largest.size, params

    one = 4 * 32 * 128
    size, together = stepped()
    assert size == 11 * one
    monkeypatch.setattr(muon, "ROUND_BYTES", 3 * one + 1)
    size, in_rounds = stepped()
    assert size == 3 * one
    monkeypatch.setattr(muon, "ROUND_BYTES", 1)
    assert stepped()[0] == one
    for a, b in zip(together, in_rounds, strict=True):
        assert (a - b).abs().max() < 1e-6


# ---- several ranks ---------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Collectives of this rank meanwhile, and the bytes that rings and exchanges send."""
    told = {"calls": 0, "sent": 0.0}
    before = muon._all_gather, dist.all_reduce, dist.all_to_all_single

    def gather(out: Tensor, part: Tensor, group: Any) -> None:
        told["sent"] += out.nbytes - part.nbytes
        call(0, out, part, group=group)

    def reduce(t: Tensor, group: Any) -> None:
        told["sent"] += 2 * t.nbytes * (1 - 1 / dist.get_world_size(group))
        call(1, t, group=group)

    def exchange(out: Tensor, part: Tensor, got: list[int], sent: list[int], group: Any) -> None:
        told["sent"] += part.element_size() * (sum(sent) - sent[dist.get_rank(group)])
        call(2, out, part, got, sent, group=group)

    def call(which: int, *args: Any, **kwargs: Any) -> None:
        told["calls"] += 1
        before[which](*args, **kwargs)

    muon._all_gather, dist.all_reduce, dist.all_to_all_single = gather, reduce, exchange
    try:
        yield told
    finally:
        muon._all_gather, dist.all_reduce, dist.all_to_all_single = before


def three_steps(model: GPT, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, float]]:
    """Whole matrices of the blocks, and their momentum, after steps of which the second is dropped; what the last one
    sent."""
    params = [p for p in model.blocks.parameters() if p.dim() == 2]
    optimizer = Muon(params, 0.1, dtype=dtype)
    set_lr([optimizer], 0.02)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            grad = torch.randn(p.shape, generator=generator)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
            if step == 1:
                p.grad.mul_(math.nan)
        optimizer.found_inf = torch.tensor(float(step == 1))
        with counted() as told:
            optimizer.step()
    out = [t for p in params for t in (p.detach(), optimizer.state[p]["momentum"])]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in out], told


def dealt_out() -> dict[str, Any]:
    """Of each topology and size of rounds: how far its steps are from those of a world of one, and what was sent."""
    plain = {}
    for d_ff in (95, 96):  # an odd number of rows, and one that can be dealt out evenly
        model = GPT(ModelConfig(**MODEL, d_ff=d_ff))
        model.init_weights(0)
        plain[d_ff], _ = three_steps(model)
    base = parallel.start(device="cpu", timeout_s=60)
    world, found = base.world_size, {}
    sizes = {"ddp": 1, "fsdp": world} | {f"hsdp {world // s}x{s}": s for s in (1, 2, 4) if world % s == 0}
    for (name, shards), d_ff, size in (
        (n, d, r) for n in sizes.items() for d in plain for r in (muon.ROUND_BYTES, 999)
    ):
        topology = dataclasses.replace(base, parallel=name.split()[0], shard_size=shards)
        with torch.device("meta"):
            model = GPT(ModelConfig(**MODEL, d_ff=d_ff))
        wrapped = parallel.build(model, lambda model=model: model.init_weights(0), topology)
        usual, muon.ROUND_BYTES = muon.ROUND_BYTES, size
        tensors, told = three_steps(model)
        muon.ROUND_BYTES = usual
        off = max((a - b).abs().max().item() for a, b in zip(tensors, plain[d_ff], strict=True))
        everyone = base.gather(told | {"off": off})
        flags = TrainConfig(model=ModelConfig(**MODEL, d_ff=d_ff), optimizer="muon", dtype="fp32", grad_accum=1)
        theory = costs.wire(flags, costs.Layout(topology.parallel, world, shards)).muon
        sent = sum(rank["sent"] for rank in everyone) / world
        calls = [rank["calls"] for rank in everyone]
        found[f"{name} {d_ff} {size}"] = {"off": max(r["off"] for r in everyone), "calls": calls}
        found[f"{name} {d_ff} {size}"] |= {"sent": sent, "theory": theory}
        del wrapped
    parallel.stop(base)
    return found


def test_ranks_that_share_the_matrices_make_the_same_step_and_send_what_the_plan_says():
    launch = command("tests/test_muon.py", nproc=4)
    done = subprocess.run(launch, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(done.stdout.split("result: ")[1])
    assert len(found) == 5 * 2 * 2
    shapes = 4  # qkv and attention's result, up and gate, down
    for name, told in found.items():
        kind, *groups, d_ff, size = name.split()
        assert told["off"] < 2e-6, name
        if int(size) > 999:
            across = groups not in ([], ["1x4"]) or kind == "ddp"
            within = kind == "fsdp" or groups in (["1x4"], ["2x2"])
            assert told["calls"] == [shapes * (across + 2 * within)] * 4, name
            assert told["sent"] == pytest.approx(told["theory"], rel=0.05 if d_ff == "95" else 1e-6), name


def test_bf16_products_are_part_of_what_a_run_is(data, tmp_path):
    flags = ("--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--arch", "modern", "--optimizer", "muon")
    run("train.py", *flags, "--muon-dtype", "bf16", "--stop-after", 5)
    assert json.loads((tmp_path / "ckpt" / "run.json").read_text())["training"]["muon_dtype"] == "bf16"
    error = one_error(run("train.py", *flags, "--muon-dtype", "fp32", "--resume", "must", code=2))
    assert "muon_dtype: was bf16, now fp32" in error


if __name__ == "__main__":
    result = dealt_out()
    if parallel.is_rank_zero():
        print("result:", json.dumps(result))
