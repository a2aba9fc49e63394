"""Flags, recipe files and the arithmetic that follows from them."""

import pytest

from fourscale.budget import count_parameters, peak_flops, plan, size_model
from fourscale.cli import InputError, from_toml, parse
from fourscale.config import ModelConfig, TrainConfig


@pytest.mark.parametrize("flag", ["--local-bsz", "--local_bsz"])
@pytest.mark.parametrize("text,value", [("2e3", 2000), ("100_000", 100_000), ("1,000", 1000), ("12", 12)])
def test_counts_are_written_as_people_write_them(flag, text, value):
    assert parse(TrainConfig, [flag, text]).local_bsz == value


def test_short_names():
    cfg = parse(TrainConfig, ["--d", "64", "--h", "2"])
    assert (cfg.model.d_model, cfg.model.n_heads) == (64, 2)


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--stepz", "3"], "did you mean --steps"),
        (["--lr", "fast"], "--lr.*expected a number, got 'fast'"),
        (["--steps", "2.5"], "--steps.*whole number.*'2.5'"),
        (["--steps", "-3"], "--steps"),
        (["--arch", "rnn"], "'rnn'.*'gpt2'"),
        (["--lr"], "--lr"),
        (["stray"], "stray"),
    ],
)
def test_usage_errors_are_one_line(argv, words):
    with pytest.raises(InputError, match=words) as e:
        parse(TrainConfig, argv)
    assert "\n" not in str(e.value)


def test_a_resumed_runs_values_are_defaults():
    born = TrainConfig(lr=1e-4, steps=77)
    assert parse(TrainConfig, ["--log-every", "3"], default=born).lr == 1e-4
    assert parse(TrainConfig, ["--lr", "2e-4"], default=born).lr == 2e-4


def test_toml_is_checked_like_flags(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('d_model = 128\ntokens = 2e9\nlr = 6e-4\ntie = false\nparallel = "fsdp"\n')
    cfg = from_toml(TrainConfig, path, TrainConfig())
    assert (cfg.model.d_model, cfg.tokens, cfg.lr, cfg.model.tie, cfg.parallel) == (128, 2 * 10**9, 6e-4, False, "fsdp")
    for text, words in (
        ("lr = 'x'", "r.toml.*--lr"),
        ("nope = 1", "r.toml.*nope"),
        ("a = ", "not valid TOML"),
        ("[t]\na = 1", r"\[t\]"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            from_toml(TrainConfig, path, TrainConfig())


def test_without_flags_the_model_fits_the_device():
    gpu = size_model(ModelConfig(), 50_257, "cuda")
    assert (gpu.d_model, gpu.n_layers, gpu.n_heads, gpu.ctx, gpu.padded_vocab) == (768, 12, 12, 1024, 50_304)
    assert count_parameters(gpu).total == 124_475_904
    for vocab in (65, 257, 4_096, 8_192, 50_257):
        assert 9e6 < count_parameters(size_model(ModelConfig(), vocab, "cpu")).total < 12.5e6


def test_derived_heads_fit_what_was_asked():
    assert size_model(ModelConfig(d_model=200), 65, "cpu").n_heads == 2
    cfg = size_model(ModelConfig(arch="modern", n_kv_heads=2), 65, "cpu")
    assert (cfg.d_model, cfg.n_heads) == (384, 6)
    assert size_model(ModelConfig(arch="modern", n_kv_heads=5), 65, "cpu").n_heads == 5


@pytest.mark.parametrize(
    "flags,words",
    [
        ({"d_model": 100, "n_heads": 3}, "--n-heads 3 does not divide"),
        ({"d_model": 96, "n_heads": 4, "n_kv_heads": 3, "arch": "modern"}, "--n-kv-heads 3 does not divide"),
        ({"d_model": 96, "n_heads": 4, "n_kv_heads": 2}, "--arch modern"),
        ({"qk_norm": True}, "--arch modern"),
        ({"d_model": 12, "n_heads": 4, "arch": "modern"}, "even"),
        ({"dropout": 1.0}, "--dropout"),
        ({"vocab_size": 64}, "--vocab-size 64"),
    ],
)
def test_impossible_shapes_name_the_flag(flags, words):
    with pytest.raises(InputError, match=words):
        size_model(ModelConfig(**flags), 65, "cpu")


def derive(world: int = 1, **flags: object):
    model = ModelConfig(d_model=32, n_layers=1, n_heads=2, ctx=1024)
    return plan(TrainConfig(model=model, **flags), 65, world, "cpu", "fp32")


def test_the_plan_derives_what_was_left_open():
    p = derive(local_bsz=8, grad_accum=40, steps=9_000)
    assert (p.cfg.global_bsz, p.tokens_per_update, p.token_budget) == (320, 327_680, 2_949_120_000)
    assert derive(world=8, local_bsz=4, global_bsz=256, steps=10).cfg.grad_accum == 8
    assert derive(world=3, local_bsz=4, global_bsz=256, steps=10).cfg.grad_accum == 22  # 264 rows, 8 of weight 0
    assert derive(world=8, local_bsz=32, global_bsz=60, steps=10).cfg.local_bsz == 8  # not 256 rows, of which 196 empty
    p = derive(local_bsz=256, tokens=2 * 10**9)
    assert (p.updates, p.token_budget) == (7_630, 2 * 10**9)
    assert (p.cfg.warmup, derive(steps=50).cfg.warmup) == (100, 5)
    assert p.cfg.min_lr == pytest.approx(p.cfg.lr / 10)


@pytest.mark.parametrize(
    "flags,words",
    [
        ({"steps": 5, "tokens": 5}, "--steps and --tokens"),
        ({"grad_accum": 3, "global_bsz": 8}, "--grad-accum 3"),
        ({"local_bsz": 0}, "--local-bsz 0"),
        ({"steps": 0}, "--steps 0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"weight_decay": -1.0}, "--weight-decay"),
        ({"beta2": 1.0}, "--beta2"),
    ],
)
def test_contradictions_name_the_flag(flags, words):
    with pytest.raises(InputError, match=words):
        derive(**flags)


def test_the_peak_is_the_cards_own_or_none():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA GeForce RTX 4090", "bf16") == 165.2e12
    assert peak_flops("NVIDIA A10G", "bf16") == 70e12
    assert peak_flops("Somebody's Card", "bf16") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") is None
    assert peak_flops("cpu", "bf16") is None
