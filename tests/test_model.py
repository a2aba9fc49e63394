"""What the model promises: exact counts, causality, a masked vocabulary, one init for all, and that it can learn."""

import math

import pytest
import torch

from fourscale.budget import count_parameters
from fourscale.cli import InputError
from fourscale.config import ModelConfig
from fourscale.model import GPT, IGNORE, gelu, rotary_tables
from fourscale.optim import parameter_groups

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

ARCHS = ("gpt2", "modern")


def tiny(arch="gpt2", **changes):
    """A filled-in shape of a few thousand parameters; 65 ids pad to 128 rows."""
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 64, "ctx": 16, "vocab_size": 65}
    shape |= {"n_kv_heads": 4 if arch == "gpt2" else 2} | changes
    return ModelConfig(arch=arch, **shape)


def built(cfg, seed=0):
    model = GPT(cfg)
    model.init_weights(seed)
    return model.eval()


def random_ids(cfg, rows, length, seed=0):
    return torch.randint(cfg.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


GPT2_124M = ModelConfig("gpt2", 768, 12, 12, 12, 3072, 1024, 50_304)
MODERN_100M = ModelConfig("modern", 768, 12, 12, 4, 2048, 1024, 32_000)
COUNTS = {
    "gpt2-124m": (GPT2_124M, 124_475_904, 124_354_560, 121_344),
    "modern-100m": (MODERN_100M, 100_092_672, 100_073_472, 19_200),
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_parameter_counts(name):
    cfg, total, decayed, not_decayed = COUNTS[name]
    with torch.device("meta"):
        model = GPT(cfg)
    assert sum(p.numel() for p in model.parameters()) == total
    groups = parameter_groups(model, 0.1)
    assert [sum(p.numel() for p in g["params"]) for g in groups] == [decayed, not_decayed]
    counted = count_parameters(cfg)
    assert (counted.total, counted.decayed, counted.not_decayed) == (total, decayed, not_decayed)


@pytest.mark.parametrize("tie", (True, False))
@pytest.mark.parametrize(
    "shape", ({"arch": "gpt2"}, {"arch": "modern"}, {"arch": "modern", "qk_norm": True, "d_head": 10}), ids=str
)
def test_counts_and_groups_of_any_shape(shape, tie):
    cfg = tiny(**shape, tie=tie)
    model = GPT(cfg)
    groups = parameter_groups(model, 0.1)
    ids = [id(p) for g in groups for p in g["params"]]
    assert len(ids) == len(set(ids))  # disjoint, and the tied embedding once
    assert set(ids) == {id(p) for p in model.parameters()}  # covering
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all(p.dim() >= 2 for p in groups[0]["params"]) and all(p.dim() == 1 for p in groups[1]["params"])
    counted = count_parameters(cfg)
    assert [sum(p.numel() for p in g["params"]) for g in groups] == [counted.decayed, counted.not_decayed]


@pytest.mark.parametrize("scaling", (None, "linear:4", "llama3:8,1,4,32"))
def test_rotary_tables_are_those_of_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cfg = tiny("modern", d_head=64, rope_theta=100.0, rope_scaling=scaling)
    kind, numbers = cfg.rope_stretch() or ("default", ())
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rope = {"rope_type": kind, "rope_theta": 100.0} | dict(zip(names, numbers, strict=False))
    if kind == "llama3":
        rope["original_max_position_embeddings"] = int(numbers[3])
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, rope_parameters=rope, max_position_embeddings=256))
    cos, sin = theirs(torch.zeros(1), torch.arange(100)[None])
    ours = rotary_tables(100, cfg, torch.device("cpu"))
    torch.testing.assert_close(ours, (cos[0], sin[0]), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "changes, word",
    (
        ({"rope_scaling": "yarn:4"}, "llama3:32,1,4,8192"),
        ({"rope_scaling": "llama3:8,4,1,32"}, "LOW must be below HIGH"),
        ({"arch": "gpt2", "rope_scaling": "linear:2"}, "--arch modern"),
        ({"arch": "gpt2", "d_head": 8}, "--arch modern"),
        ({"d_head": 7}, "even head width"),
    ),
)
def test_impossible_shapes_are_named(changes, word):
    with pytest.raises(InputError, match=word):
        tiny(**{"arch": "modern"} | changes).check()


@pytest.mark.parametrize("arch", ARCHS)
def test_first_loss_is_near_that_of_a_guess(arch):
    cfg = tiny(arch)
    idx, targets = random_ids(cfg, 8, 16), random_ids(cfg, 8, 16, seed=1)
    loss = built(cfg)(idx, targets).sum().item() / targets.numel()
    assert abs(loss - math.log(65)) < 0.05


@pytest.mark.parametrize("arch", ARCHS)
def test_the_loss_of_a_window_is_the_sum_of_its_supervised_tokens(arch):
    cfg = tiny(arch)
    model, idx, targets = built(cfg), random_ids(cfg, 3, 16), random_ids(cfg, 3, 16, seed=1)
    targets[0, 5:], targets[2] = IGNORE, IGNORE
    sums = model(idx, targets, per_window=True)
    nll = -model(idx).log_softmax(-1)
    for row in range(3):
        plain = sum(nll[row, t, targets[row, t]].item() for t in range(16) if targets[row, t] != IGNORE)
        assert sums[row].item() == pytest.approx(plain, rel=1e-5, abs=1e-6)
    assert sums.dtype == torch.float32 and sums[2] == 0
    assert model(idx, targets).item() == pytest.approx(sums.sum().item(), rel=1e-6)


@pytest.mark.parametrize("arch", ARCHS)
def test_no_token_sees_the_future(arch):
    cfg = tiny(arch)
    model, idx = built(cfg), random_ids(cfg, 2, 16)
    before = model(idx)
    for t in range(15):
        changed = idx.clone()
        changed[:, t + 1] = (changed[:, t + 1] + 1) % cfg.vocab_size
        after = model(changed)
        assert torch.equal(after[:, : t + 1], before[:, : t + 1])  # to the bit
        assert not torch.equal(after[:, t + 1], before[:, t + 1])  # the change is seen from then on
    assert torch.allclose(model(idx, last_only=True), before[:, -1:], atol=1e-6)


@pytest.mark.parametrize("tie", (True, False))
@pytest.mark.parametrize("arch", ARCHS)
def test_padded_ids_take_no_part(arch, tie):
    cfg = tiny(arch, tie=tie)
    model, idx, targets = built(cfg), random_ids(cfg, 2, 16), random_ids(cfg, 2, 16, seed=1)
    head = model.wte.weight if tie else model.head.weight
    assert head.shape[0] == 128 and model(idx).shape[-1] == 65
    loss = model(idx, targets)
    loss.sum().backward()
    assert head.grad[:65].abs().min() > 0 and head.grad[65:].abs().max() == 0
    with torch.no_grad():
        head[65:] = 100.0
        assert torch.equal(model(idx, targets), loss)
        head[64] = 100.0  # a real row, as a control
        assert not torch.equal(model(idx, targets), loss)


def test_grouped_heads_equal_repeated_ones():
    grouped = built(tiny("modern", n_kv_heads=2))
    full = built(tiny("modern", n_kv_heads=4), seed=1)
    state = grouped.state_dict()
    for name, w in state.items():
        if name.endswith("qkv.weight"):  # rows: 4 query, 2 key and 2 value heads of width 8
            q, k, v = w.view(8, 8, 32).split((4, 2, 2))
            state[name] = torch.cat((q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0))).view(-1, 32)
    full.load_state_dict(state)
    idx = random_ids(grouped.cfg, 2, 16)
    assert torch.allclose(grouped(idx), full(idx), atol=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_seed_is_one_initialisation(arch):
    cfg = tiny(arch, tie=False)
    a, b, other = (built(cfg, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert all(torch.equal(a[name], other[name]) == (a[name].dim() == 1) for name in a)  # norms and biases are constant


@pytest.mark.parametrize("arch", ARCHS)
def test_initial_scales(arch):
    cfg = tiny(arch, d_model=128, d_ff=256, n_layers=8, tie=False)
    for name, p in built(cfg).named_parameters():
        if p.dim() == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
            continue
        onto_residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(2 * 8) if onto_residual else 0.02
        assert p.std().item() == pytest.approx(std, rel=0.06), name  # 2,048 values at least: 4 standard errors
        assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name


@pytest.mark.parametrize("arch", ARCHS)
def test_bf16_autocast_keeps_an_fp32_loss_near_that_of_fp32(arch):
    cfg = tiny(arch)
    model, idx, targets = built(cfg), random_ids(cfg, 2, 16), random_ids(cfg, 2, 16, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = model(idx, targets)
    assert sums.dtype == torch.float32
    assert torch.allclose(sums, model(idx, targets), rtol=2e-3)


def fit(cfg, idx, targets, updates=150, lr=1e-2):
    """Train on one batch; returns (model, loss on it in nats per token)."""
    model = built(cfg).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(updates):
        optimizer.zero_grad()
        (model(idx, targets).sum() / targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, mean_loss(model, idx, targets)


@torch.no_grad()
def mean_loss(model, idx, targets):
    return model.eval()(idx, targets).sum().item() / targets.numel()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_fixed_batch_is_learnt_and_only_from_the_right_labels(arch):
    cfg = tiny(arch)
    ids = random_ids(cfg, 4, 17)
    idx, targets = ids[:, :-1], ids[:, 1:]
    _, loss = fit(cfg, idx, targets)
    assert loss < 0.01

    _, still = fit(cfg, idx, targets, updates=3, lr=0.0)  # the update disabled
    assert still == mean_loss(built(cfg), idx, targets) > 4

    order = torch.randperm(targets.numel(), generator=torch.Generator().manual_seed(2))
    wrong = {
        "shuffled": targets.flatten()[order].view_as(targets),
        "unshifted": idx,
        "shifted twice": ids.roll(-2, 1)[:, :-1],
    }
    for name, labels in wrong.items():  # all of them can be memorised: a falling loss alone proves little
        fooled, memorised = fit(cfg, idx, labels)
        assert memorised < 0.01, name
        assert mean_loss(fooled, idx, targets) > math.log(65), name


@pytest.mark.parametrize("dropout", (0.0, 0.2))
@pytest.mark.parametrize("arch", ARCHS)
def test_activation_checkpointing_keeps_less_and_changes_no_gradient(arch, dropout):
    cfg = tiny(arch, dropout=dropout, doc_mask=True, eot_id=3, tie=False)
    idx, targets = random_ids(cfg, 4, 16), random_ids(cfg, 4, 16, seed=1)
    grads, kept = {}, {}
    for act_ckpt in ("none", "selective", "block"):
        model = GPT(cfg, act_ckpt)
        model.init_weights(0)
        torch.manual_seed(7)
        sizes: dict[int, int] = {}

        def keep(t: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            if not isinstance(t, torch.nn.Parameter):
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = model(idx, targets).sum()
        loss.backward()
        kept[act_ckpt] = sum(sizes.values())
        grads[act_ckpt] = [p.grad for p in model.parameters()]
        with torch.no_grad():
            model.eval()
            assert torch.equal(model(idx), built(cfg)(idx))
    assert all(torch.equal(a, b) for a, b in zip(grads["none"], grads["block"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads["none"], grads["selective"], strict=True))
    assert kept["block"] < 0.7 * kept["none"], kept


def test_gelu_as_compiled_code_has_it_is_that_of_torch():
    x = torch.linspace(-12, 12, 4001, requires_grad=True)
    found = {}
    for name, f in (("ours", torch.compile(gelu, backend="aot_eager", fullgraph=True)), ("torch", gelu)):
        y = f(x)
        found[name] = (y.detach(), torch.autograd.grad(y.sum(), x)[0])
    for ours, theirs in zip(found["ours"], found["torch"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=3e-6)
        assert not torch.equal(ours, theirs)  # two formulas, or nothing was compared
