"""Parameter groups and the clock of the learning rate."""

import itertools
import math

import pytest
import torch

from fourscale.budget import size_model
from fourscale.cli import InputError
from fourscale.config import ModelConfig
from fourscale.model import GPT
from fourscale.optim import Guard, build, parameter_groups, set_lr, step
from fourscale.schedule import check_schedule, learning_rate

TINY = {"d_model": 32, "n_layers": 2, "n_heads": 4, "ctx": 16}


@pytest.mark.parametrize("flags", [{}, {"arch": "modern", "n_kv_heads": 2, "qk_norm": True}, {"tie": False}])
def test_groups_are_disjoint_covering_and_hold_the_tied_embedding_once(flags):
    model = GPT(size_model(ModelConfig(**TINY, **flags), 65, "cpu"))
    decayed, rest = parameter_groups(model, 0.1)
    ids = [id(p) for group in (decayed, rest) for p in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in model.parameters()}
    assert sum(p is model.wte.weight for p in decayed["params"]) == 1
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert all(p.dim() < 2 for p in rest["params"])


def test_cosine_at_its_corners():
    lr = [learning_rate(i, updates=100, warmup=10, peak=1.0, floor=0.1) for i in range(100)]
    assert lr[0] == pytest.approx(0.1)  # never 0: the first update counts
    assert lr[9] == lr[10] == 1.0
    assert lr[99] == pytest.approx(0.1)
    assert lr[10 + 89 // 2] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 44 / 89)))
    assert all(a > b for a, b in itertools.pairwise(lr[10:]))


def test_no_warmup_starts_at_the_peak():
    assert learning_rate(0, updates=2, warmup=0, peak=3.0, floor=1.0) == 3.0
    assert learning_rate(1, updates=2, warmup=0, peak=3.0, floor=1.0) == pytest.approx(1.0)


def test_wsd_is_flat_then_a_line_to_the_floor():
    lr = [learning_rate(i, 100, 10, 1.0, 0.0, "wsd", 0.2) for i in range(100)]
    assert lr[9:80] == [1.0] * 71
    assert lr[80] == pytest.approx(0.95)
    assert lr[99] == 0.0
    assert [learning_rate(i, 1000, 10, 1.0, 0.0, "wsd", 0.2) for i in range(80)] == lr[:80]  # a longer run: same start


def test_constant():
    assert {learning_rate(i, 50, 5, 2.0, 0.1, "constant") for i in range(5, 50)} == {2.0}


@pytest.mark.parametrize(
    "updates,warmup,peak,floor,schedule,words",
    [
        (10, 10, 1.0, 0.1, "cosine", "--warmup 10"),
        (10, 9, 1.0, 0.1, "cosine", "decay"),
        (2, 1, 1.0, 0.1, "cosine", "decay"),
        (10, 2, 1.0, 2.0, "cosine", "--min-lr 2"),
    ],
)
def test_impossible_schedules_are_refused(updates, warmup, peak, floor, schedule, words):
    with pytest.raises(InputError, match=words):
        check_schedule(updates, warmup, peak, floor, schedule, 0.2)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_non_finite_gradient_moves_nothing(kind):
    model = GPT(size_model(ModelConfig(**TINY), 65, "cpu"))
    model.init_weights(0)
    optimizers = build(model, kind, 0.1, 0.9, 0.95)
    set_lr(optimizers, 0.1)
    guard = Guard(torch.device("cpu"), 0.0)
    idx = torch.arange(16).view(1, 16)

    def attempt(scale: float) -> float:
        model.zero_grad()
        (model(idx, idx).sum() * scale).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        skipped = guard.judge(torch.tensor(1.0), norm)
        step(optimizers, skipped)
        return skipped.item()

    def everything() -> list[torch.Tensor]:
        states = [t.clone() for o in optimizers for s in o.state.values() for t in s.values()]
        return [p.detach().clone() for p in model.parameters()] + states

    assert attempt(1.0) == 0
    before = everything()
    assert attempt(math.nan) == attempt(math.inf) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert attempt(1.0) == 0
    assert not torch.equal(before[0], everything()[0])


def judge(guard: Guard, loss: float, norm: float = 1.0) -> float:
    return guard.judge(torch.tensor(loss), torch.tensor(norm)).item()


def test_a_spike_is_dropped_and_stays_out_of_the_baseline():
    guard = Guard(torch.device("cpu"), 4.0)
    assert guard.mean() is None
    assert judge(guard, math.nan) == judge(guard, 5.0, math.inf) == 1  # neither sets the baseline
    assert guard.mean() is None
    assert judge(guard, 5.0) == 0  # the first accepted one does
    assert guard.mean() == 5.0
    assert judge(guard, 20.1) == 1
    assert guard.mean() == 5.0
    assert judge(guard, 19.9) == 0
    assert guard.mean() == pytest.approx(0.99 * 5.0 + 0.01 * 19.9)
    resumed = Guard(torch.device("cpu"), 4.0, guard.mean())
    for loss in (3.0, 30.0, 4.0):
        assert judge(resumed, loss) == judge(guard, loss)
        assert resumed.mean() == guard.mean()  # to the bit, through a JSON number
    off = Guard(torch.device("cpu"), 0.0, 1.0)
    assert judge(off, 1e6) == 0
    assert judge(off, math.nan) == 1


def test_each_parameter_has_one_optimizer_and_muon_the_blocks_matrices():
    model = GPT(size_model(ModelConfig(**TINY, arch="modern", tie=False), 65, "cpu"))
    muon, adamw = build(model, "muon", 0.1, 0.9, 0.95)
    theirs = [{id(p) for g in o.param_groups for p in g["params"]} for o in (muon, adamw)]
    assert theirs[0] == {id(p) for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2}
    assert not theirs[0] & theirs[1]
    assert theirs[0] | theirs[1] == {id(p) for p in model.parameters()}
