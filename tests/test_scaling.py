"""The model of many GPUs: what it must agree with by hand, and how it must lean."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from fourscale import budget, costs, scaling
from fourscale.scaling import ETHERNET, Links

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {"gpt2-124m": 1, "1.3b": 8, "7b": 16}
H100 = 0.4 * 989e12
MODES = ("ddp", "fsdp", "hsdp")


@pytest.fixture(scope="module")
def recipes():
    return {name: scaling.recipe(ROOT / "launch" / f"{name}.toml", gpus) for name, gpus in RECIPES.items()}


def test_the_example_of_the_docstring():
    """1 GB summed over 8 ranks of a node: 2 x 7/8 GB a rank at 0.8 x 450 GB/s."""
    assert Links().seconds(1.75e9, 0) == pytest.approx(4.861e-3, abs=1e-6)
    # The same leaving a node by 400 GB/s: the slower link sets the pace.
    assert Links().seconds(1.75e9, 1.75e9) == pytest.approx(1.75 / 320)


def test_latency_by_hand():
    links = Links()
    assert links.latency(1, 1, tree=True) == 0
    assert links.latency(8, 1, tree=False) == pytest.approx((10 + 7) * 1e-6)  # 7 hops within the node
    assert links.latency(64, 1, tree=False) == pytest.approx((10 + 56 + 8 * 5) * 1e-6)
    assert links.latency(8, 8, tree=True) == pytest.approx((10 + 2 * 3 * 5) * 1e-6)  # a rank of each of 8 nodes


def test_ddp_by_hand(recipes):
    """124M on 16 GPUs over Ethernet: the all-reduce of 497.9 MB, 1.875 of it a node, at 0.8 x 12.5 GB/s takes 93.4 ms;
    the backward of the last micro-batch, two thirds of 15.5 ms, hides all of it but the first of its 19 buckets."""
    cfg = recipes["gpt2-124m"]
    found = scaling.estimate(cfg, costs.Layout("ddp", 16, 1), ETHERNET, H100)
    numbers = budget.count_parameters(cfg.model).total
    tree = (10 + 2 * (7 * 1 + 1 * 5)) * 1e-6
    sending = 4 * numbers * 2 * 15 / 16 / (0.8 * 12.5e9) + 19 * tree
    micro = budget.flops_per_token(cfg.model) * 8 * 1024 / H100
    assert math.ceil(4 * numbers / 25 / 2**20) == 19
    assert found.compute == pytest.approx(40 * micro)
    assert found.sending == pytest.approx(sending + 3 * tree, rel=1e-4)
    assert found.exposed == pytest.approx(sending - micro * 2 / 3 * 18 / 19 + 3 * tree, rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RECIPES)
def test_how_it_leans(recipes, name, mode):
    cfg = recipes[name]
    one = [scaling.efficiency(cfg, 1, mode, Links(), H100, strong) for strong in (False, True)]
    assert one == [1.0, 1.0]  # nothing is sent
    for strong in (False, True):
        each = [scaling.efficiency(cfg, n, mode, Links(), H100, strong) for n in (1, 8, 64, 512)]
        assert all(0 < e <= 1 for e in each)
        assert each == sorted(each, reverse=True)
    for slower in (
        dataclasses.replace(Links(), node_gbit_s=400),
        dataclasses.replace(Links(), net_us=50),
        dataclasses.replace(Links(), link_gbyte_s=45),
    ):
        assert scaling.efficiency(cfg, 64, mode, slower, H100) < scaling.efficiency(cfg, 64, mode, Links(), H100)
    # A faster GPU has less to hide behind.
    assert scaling.efficiency(cfg, 64, mode, Links(), 2 * H100) < scaling.efficiency(cfg, 64, mode, Links(), H100)


def test_hsdp_spares_the_network(recipes):
    """Between nodes hsdp sends a shard's gradients, fsdp all weights and gradients, in each micro-batch."""
    for cfg in recipes.values():
        whole, copies = (costs.wire(cfg, scaling.on(cfg, 64, m, Links(), False)[1], 8).total for m in ("fsdp", "hsdp"))
        assert copies < whole / 2
        assert scaling.efficiency(cfg, 64, "hsdp", ETHERNET, H100) > scaling.efficiency(cfg, 64, "fsdp", ETHERNET, H100)


def test_more_gpus_than_windows_are_idle(recipes):
    found = scaling.efficiency(recipes["7b"], 512, "hsdp", Links(), H100, strong=True)
    assert found < 192 / 512  # of the recipe's windows


def test_what_does_not_fit_is_no_figure(recipes):
    found = scaling.figures({"7b": recipes["7b"]}, Links(), H100, memory=80)
    assert len(found) == 3 * 2 * 3
    assert {f["parallel"] for f in found if f["efficiency"] is None} == {"ddp"}
    lines = scaling.table({"7b": recipes["7b"]}, Links(), H100, memory=80)
    assert lines[2].split() == ["7b", "ddp", "-", "-", "-", "|", "-", "-", "-"]
    assert sum(line.startswith("  assumed: ") for line in lines) == len(scaling.assumptions(Links(), H100, 80))
