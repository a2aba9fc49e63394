"""The arithmetic of a run: counts, FLOPs, peaks of cards, disk, wire, time, money; the figures people know by heart."""

import dataclasses
import datetime
import math

import pytest
import torch

from fourscale import budget, checkpoint, costs, optim
from fourscale.budget import exact_flops, mfu, peak_flops, price_of, shapes, size_model, tokens_per_s, updates_for
from fourscale.cli import InputError
from fourscale.config import ModelConfig, TrainConfig
from fourscale.costs import Layout, hours, money
from fourscale.model import GPT

M, B, T = 10**6, 10**9, 10**12
TINY = ModelConfig(d_model=64, ctx=128)
GPT2 = size_model(ModelConfig(), 50_257, "cuda")


def planned(world: int = 1, model: ModelConfig = TINY, **flags: object) -> budget.Plan:
    return budget.plan(TrainConfig(model=model, **flags), 257, world, "cpu", "fp32")


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_hours_and_money():
    assert hours(2e9, 24_000) == pytest.approx(23.148, abs=5e-4)
    assert money(23.148, 1.10) == pytest.approx(25.46, abs=5e-3)
    assert money(hours(2e9, 24_000), 1.10) == pytest.approx(25.46, abs=5e-3)


@pytest.mark.parametrize("peak, share, found", [(312 * T, 0.40, 5.0), (165 * T, 0.35, 10.7)])
def test_hours_of_gpt2_on_3e9_tokens(peak, share, found):
    assert hours(3e9, tokens_per_s(share, 6 * 124 * M, peak, 1)) == pytest.approx(found, abs=0.05)


def test_utilisation_of_the_peak():
    of_1300m = mfu(140_000, 6 * 1.3 * B, 312 * T, 8)
    assert of_1300m == pytest.approx(0.44, abs=0.005)
    assert of_1300m / mfu(140_000, 6 * 124 * M, 312 * T, 8) == pytest.approx(10.5, abs=0.05)  # the wrong model's size
    assert mfu(170_000, 6 * 124 * M, 312 * T, 1) == pytest.approx(0.405, abs=5e-4)
    assert tokens_per_s(of_1300m, 6 * 1.3 * B, 312 * T, 8) == pytest.approx(140_000)


def test_three_and_ten_times_the_model():
    tokens = [2 * B, 6 * B, 20 * B]
    assert [updates_for(n, 262_144)[0] for n in tokens] == [7_630, 22_889, 76_294]
    assert updates_for(2 * B, 262_144) == (7_630, 103_424)
    compute = [6 * size * n for size, n in zip((124 * M, 3 * 124 * M, 10 * 124 * M), tokens, strict=True)]
    assert [c / compute[0] for c in compute] == pytest.approx([1, 9, 100])


# ---- parameters and FLOPs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("extra", [{}, {"arch": "modern", "n_kv_heads": 2, "qk_norm": True, "d_head": 24}])
def test_shapes_are_the_models_own(extra, tie):
    cfg = size_model(ModelConfig(d_model=96, n_layers=2, n_heads=4, ctx=32, tie=tie, **extra), 257, "cpu")
    with torch.device("meta"):
        model = GPT(cfg)
    assert list(shapes(cfg).items()) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    size, params = budget.count_parameters(cfg), list(model.parameters())
    assert size.decayed == sum(p.numel() for p in params if p.dim() > 1)
    assert size.not_decayed == sum(p.numel() for p in params if p.dim() < 2)
    tables = [m for m in (model.wte, model.wpe, model.head) if m is not None]
    assert size.embedding == sum(m.weight.numel() for m in tables)


@pytest.mark.parametrize("extra", [{}, {"arch": "modern", "n_kv_heads": 2}])
def test_the_exact_count_is_what_torch_counts(extra):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    cfg = size_model(ModelConfig(d_model=96, n_layers=2, n_heads=4, ctx=32, **extra), 257, "cpu")
    for act_ckpt in ("none", "block", "selective"):
        model = GPT(cfg, act_ckpt)
        model.init_weights(0)
        ids = torch.zeros(3, 32, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # product by product
            model(ids, ids).sum().backward()
        want = budget.with_recomputation(cfg, act_ckpt).total
        assert counter.get_total_flops() / (3 * 32) == pytest.approx(want, rel=1e-6)


def test_recomputation_costs_a_third_and_mfu_stays_on_6_n():
    flops, again = exact_flops(GPT2), budget.with_recomputation(GPT2, "block")
    assert (again.blocks + again.scores) / (flops.blocks + flops.scores) == pytest.approx(8 / 6, rel=0.1)
    assert again.head == flops.head
    assert budget.with_recomputation(GPT2, "selective") == flops
    assert budget.flops_per_token(GPT2) == 6 * 124_475_904


# ---- cards, prices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, dtype, tflops",
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "fp16", 362),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI250X/MI250", "bf16", 191.5),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "fp32", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),  # another chip under the same number
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),  # a seventh of one
        ("NVIDIA GeForce GTX 1080", "bf16", None),
        ("cpu", "bf16", None),
        ("NVIDIA H800 PCIe", "bf16", 756),
    ],
)
def test_peaks_of_cards(name, dtype, tflops):
    assert peak_flops(name, dtype) == (None if tflops is None else pytest.approx(tflops * T))


def test_a_peak_that_is_told_wins():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16", 312) == 312 * T
    assert peak_flops("cpu", "fp32", 0.5) == 5e11


@pytest.mark.parametrize(
    "typed, card",
    [
        ("h100", "H100"),
        ("H100 SXM", "H100"),
        ("h100-pcie", "H100 PCIE"),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("RTX A6000", "A6000"),
        ("a100-80gb", "A100"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 TI"),
    ],
)
def test_cards_as_people_write_them(typed, card):
    assert budget.card_asked(typed) == card


def test_an_unknown_card_names_the_nearest():
    with pytest.raises(InputError, match=r"--gpu H10O: not in the table.*H100.*--peak-tflops") as e:
        planned(gpu="H10O")
    assert "\n" not in str(e.value)
    with pytest.raises(InputError, match=r"--gpu toaster: .*it has V100.*B200"):
        planned(gpu="toaster")


def test_a_price_carries_its_date():
    price = price_of("2.50@2026-11-30" if datetime.date.today() >= datetime.date(2026, 11, 30) else "2.50@2025-11-30")
    assert (price.per_hour, price.date.month, price.date.day) == (2.5, 11, 30)
    ahead = datetime.date.today() + datetime.timedelta(days=40)
    for text, words in (
        ("2.50", "prices age; add the day.*2.50@"),
        ("2.50@", "write the price of a device-hour and its day"),
        ("2.50@yesterday", "write the price"),
        ("two@2025-01-01", "write the price"),
        ("-1@2025-01-01", "finite number, 0 or more"),
        ("nan@2025-01-01", "finite number, 0 or more"),
        (f"2@{ahead}", "lies ahead"),
    ):
        with pytest.raises(InputError, match=f"--price {text}: .*{words}") as e:
            planned(price=text)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"peak_tflops": 0.0}, "--peak-tflops 0: must be"),
        ({"expect_tokens_per_s": -5.0}, "--expect-tokens-per-s -5: must be"),
        ({"expect_mfu": 40.0}, "--expect-mfu 40: is a share"),
        ({"peak_tflops": 312e12}, "--peak-tflops 3.12e.14: is in TFLOP/s of one device, as in 312"),
    ],
)
def test_expectations_that_mean_nothing_are_refused(flags, words):
    with pytest.raises(InputError, match=words):
        planned(**flags)


# ---- disk ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, saved, kept",
    [
        ({"ckpt_every": 1000}, 3, 3),  # 1000, 2000, 2500
        ({"ckpt_every": 0}, 1, 1),
        ({"ckpt_every": 500}, 5, 5),  # the end is one of them
        ({"ckpt_every": 100, "keep": 2, "eval_every": 0}, 25, 2),
        ({"ckpt_every": 100, "keep": 2}, 25, 3),  # the best may be an older one
        ({"ckpt_every": 100, "keep": 2, "keep_every": 1000}, 25, 5),
        ({"ckpt_every": 1000, "save_best": True, "eval_every": 250}, 10, 10),
        ({"ckpt_every": 300, "save_best": True, "eval_every": 200, "keep": 3}, 17, 4),  # 600, 1200, ... are of both
        ({"ckpt_every": 300, "save_best": True, "eval_every": 200, "keep": 3, "keep_every": 400}, 17, 9),
    ],
)
def test_checkpoints_over_a_run(flags, saved, kept):
    plan = planned(steps=2500, **flags)
    d = costs.disk(plan)
    assert (d.saved, d.kept) == (saved, kept)
    assert d.kept_bytes == kept * d.checkpoint
    assert d.most_bytes == d.kept_bytes + (d.checkpoint if kept < saved else 0)  # while the next one is written


def test_checkpoints_of_a_run_beyond_all_bounds_are_counted_at_once():
    d = costs.disk(planned(steps=10**15, ckpt_every=1, keep=10**9, keep_every=7))
    assert d.saved == 10**15 and d.kept == 10**9 + (10**15 - 10**9) // 7 + 1
    with pytest.raises(InputError, match="--n-layers 1000000000: must be at most 10,000"):
        planned(model=ModelConfig(n_layers=10**9))


def test_checkpoints_by_the_clock():
    assert costs.disk(planned(steps=2500, ckpt_every=0, ckpt_minutes=30.0), minutes=300).saved == 11
    assert costs.disk(planned(steps=2500, ckpt_every=0, ckpt_minutes=30.0)).saved == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoints_size(optimizer, tmp_path):
    plan = planned(model=dataclasses.replace(TINY, n_layers=2), optimizer=optimizer)
    model = GPT(plan.cfg.model)
    model.init_weights(0)
    optimizers = optim.build(model, optimizer, 0.1, 0.9, 0.95)
    tensors = checkpoint.model_tensors(model) | checkpoint.optimizer_tensors(model, optimizers)
    files = checkpoint.write(tmp_path, tensors, 0, None)
    d = costs.disk(plan)
    assert d.weights + d.optimizer == sum(t.nbytes for t in tensors.values())
    assert d.checkpoint == pytest.approx(sum(entry["size"] for entry in files.values()), rel=0.05)


# ---- wire ------------------------------------------------------------------------------------------------------------


def test_bytes_on_the_wire():
    plan = planned(world=8, global_bsz=8 * 8 * 3)
    cfg, n = plan.cfg, 4 * budget.count_parameters(plan.cfg.model).total
    ddp = costs.wire(cfg, Layout("ddp", 8, 1))
    assert (ddp.total, ddp.reduce) == (round(2 * 7 / 8 * n),) * 2
    every = costs.wire(dataclasses.replace(cfg, grad_sync="every"), Layout("ddp", 8, 1))
    assert every.total == pytest.approx(3 * ddp.total, abs=2)
    fsdp = costs.wire(cfg, Layout("fsdp", 8, 8))
    assert fsdp.reduce == 0
    last = costs.wire(dataclasses.replace(cfg, grad_sync="last"), Layout("fsdp", 8, 8))
    assert (last.gather, last.scatter) == (fsdp.gather, pytest.approx(fsdp.scatter / 3, abs=1))
    hsdp = costs.wire(cfg, Layout("hsdp", 8, 4))
    assert hsdp.gather == pytest.approx(fsdp.gather * (3 / 4) / (7 / 8), rel=0.01)
    assert hsdp.reduce == pytest.approx(n / 4, rel=0.01)  # 2 (2 - 1) / 2 of a fourth
    assert costs.wire(cfg, Layout("ddp", 1, 1)).total == 0


def ring_bytes_that_leave(groups: list[list[int]], node: int, nodes: int) -> float:
    """Edges of rings over groups of ranks that lead to another node, a node on average."""
    edges = [(a, b) for group in groups if len(group) > 1 for a, b in zip(group, [*group[1:], group[0]], strict=True)]
    return sum(a // node != b // node for a, b in edges) / nodes


@pytest.mark.parametrize(
    "world, shards, node",
    [
        *[(16, 16, 8), (16, 8, 8), (16, 4, 8), (16, 1, 8), (32, 16, 8), (24, 8, 8), (8, 8, 8), (8, 4, 8)],
        *[(12, 4, 6), (12, 3, 2), (24, 6, 4), (4, 2, 1), (2, 2, 1), (2, 1, 1)],
    ],
)
def test_edges_of_rings_that_leave_a_node(world, shards, node):
    groups = [list(range(k, k + shards)) for k in range(0, world, shards)]
    across = [list(range(p, world, shards)) for p in range(shards)]
    edges = costs.leaving(Layout("hsdp", world, shards), node)
    nodes = world // node
    assert edges.within == pytest.approx(ring_bytes_that_leave(groups, node, nodes))
    assert edges.between == pytest.approx(ring_bytes_that_leave(across, node, nodes))
    pairs = [(a, b) for group in groups for a in group for b in group if a // node != b // node]
    assert costs.exchanged(Layout("hsdp", world, shards), node) == pytest.approx(len(pairs) / shards / nodes)


def test_bytes_between_nodes():
    plan = planned(world=16, global_bsz=16 * 8)
    cfg, n = plan.cfg, 4 * budget.count_parameters(plan.cfg.model).total
    assert costs.wire(cfg, Layout("ddp", 16, 1), 8).total == round(2 * 15 / 16 * n)  # one ring, left once
    hsdp = costs.wire(cfg, Layout("hsdp", 16, 8), 8)
    assert (hsdp.gather, hsdp.scatter) == (0, 0) and hsdp.total == pytest.approx(n, rel=0.01)
    fsdp, rank = costs.wire(cfg, Layout("fsdp", 16, 16), 8), costs.wire(cfg, Layout("fsdp", 16, 16))
    assert fsdp == rank  # all that a rank passes on, the last one of a node passes to another node
    assert costs.wire(cfg, Layout("fsdp", 8, 8), 8).total == 0
    muon = dataclasses.replace(cfg, optimizer="muon")
    owned = [costs.wire(muon, layout, 8).muon for layout in (Layout("fsdp", 16, 16), Layout("hsdp", 16, 8))]
    hidden = (math.prod(s) for n, s in shapes(cfg.model).items() if n.startswith("blocks.") and len(s) > 1)
    # fsdp: a node has half of all rows, of which half go to the other and as many come back as results. hsdp: a copy is
    # a node's, which orthogonalises half of the matrices and tells the other.
    assert owned == [pytest.approx(4 * sum(hidden) / 2, rel=0.01)] * 2
