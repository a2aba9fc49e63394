"""Held-out loss: each target once, one denominator, the same figure for any batch size and number of ranks."""

import dataclasses
import json
import math
import tracemalloc

import numpy as np
import pytest
import torch
from conftest import ROOT, one_error, rows, run
from hypothesis import given, settings
from hypothesis import strategies as st

import eval_ppl
from fourscale import heldout, shards, tokenization
from fourscale.cli import InputError
from fourscale.config import ModelConfig
from fourscale.flags import EvalConfig
from fourscale.model import GPT
from fourscale.parallel import Topology

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

CPU = torch.device("cpu")
ALONE = Topology(0, 1, CPU, "fp32", "ddp", 1, cpu_group=None, publish_group=None, save_group=None)


class Stream:
    """Tokens in memory with the reading side of a split's shards."""

    def __init__(self, ids):
        self.ids, self.total = np.asarray(ids, np.int64), len(ids)

    def read(self, start, count):
        assert start >= 0 and start + count <= self.total
        return self.ids[start : start + count]

    def windows(self, starts, length):
        return np.stack([self.read(s, length) for s in starts])


def stream_of(total, seed=0):
    return Stream(np.random.default_rng(seed).integers(0, 65, total))


def model_of(arch="gpt2", seed=0, **more):
    cfg = ModelConfig(arch, 32, 2, 4, 4, 64, 16, 65, **more)
    model = GPT(cfg)
    model.init_weights(seed)
    with torch.no_grad():
        model.wte.weight.mul_(20)  # far from uniform, so that a wrong token shows
    return model


def scored(model, stream, ctx=16, max_tokens=None, local_bsz=4, topology=ALONE, stride=None):
    starts = heldout.eval_starts(stream.total, ctx, max_tokens, stride)
    return heldout.score(model, stream, ctx, starts, local_bsz, topology)


@pytest.mark.parametrize("total", (2, 3, 16, 17, 18, 33, 100))
def test_windows_cover_each_target_once(total):
    starts = heldout.eval_starts(total, 16)
    seen = np.zeros(total, int)
    stream = Stream(np.arange(total))
    for start in starts:
        idx, targets = heldout.window_batch(stream, np.array([start, -1]), 16)
        assert (targets[1] == -100).all()  # the padding row
        real = targets[0][targets[0] != -100]
        assert (real == idx[0, : len(real)] + 1).all()  # each target follows its input
        seen[real] += 1
    assert seen[0] == 0 and (seen[1:] == 1).all()
    assert heldout.window_lengths(starts, total, 16).sum() == total - 1


def test_a_subset_is_fixed_whole_and_evenly_spread():
    total, ctx = 16 * 1000 + 8, 16
    starts = heldout.eval_starts(total, ctx, 16 * 50 + 3)
    assert len(starts) == 50 and (starts % ctx == 0).all() and (starts + ctx < total).all()
    assert set(np.diff(starts)) == {20 * ctx} and starts[0] + starts[-1] == 1000 * ctx  # as far from both ends
    assert np.array_equal(starts, heldout.eval_starts(total, ctx, 16 * 50 + 3))
    uneven = heldout.eval_starts(total, ctx, 16 * 999)
    assert len(set(uneven)) == 999 and (np.diff(uneven) > 0).all()
    assert len(heldout.eval_starts(total, ctx, 1)) == 1  # never none
    assert np.array_equal(heldout.eval_starts(total, ctx, total), heldout.eval_starts(total, ctx))
    assert np.array_equal(heldout.eval_starts(10, ctx, 5), [0])  # a split without a whole window


@pytest.mark.parametrize("total", (0, 1))
def test_a_split_without_a_target_is_refused(total):
    with pytest.raises(InputError, match="held-out split"):
        heldout.eval_starts(total, 16)


@pytest.mark.parametrize("arch", ("gpt2", "modern"))
@pytest.mark.parametrize("total", (2, 10, 97, 100))
def test_equals_the_plain_sum_over_tokens(arch, total):
    model, stream = model_of(arch), stream_of(total)
    nats = 0.0
    with torch.no_grad():
        for t in range(1, total):  # one token at a time, with what its window shows before it
            start = (t - 1) // 16 * 16
            logits = model(torch.from_numpy(stream.ids[start:t])[None])[0, -1]
            nats -= logits.double().log_softmax(-1)[stream.ids[t]].item()
    for local_bsz in (1, 3, 4, 50):
        score = scored(model, stream, local_bsz=local_bsz)
        assert score.tokens == total - 1
        assert score.nats == pytest.approx(nats, rel=1e-6)
        assert score.loss == pytest.approx(nats / (total - 1), rel=1e-6)
        assert score.perplexity == pytest.approx(math.exp(nats / (total - 1)), rel=1e-5)


# ---- sliding windows


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(2, 120), st.integers(1, 24))
def test_sliding_windows_score_each_target_once_with_the_context_they_promise(draw, total, ctx):
    stride = draw.draw(st.integers(1, ctx))
    starts = heldout.eval_starts(total, ctx, stride=stride)
    assert (np.diff(starts) == stride).all() and starts[-1] < total - 1
    skip = heldout.already_scored(starts, ctx)
    stream, seen = Stream(np.arange(total)), np.zeros(total, int)
    for start, first in zip(starts, skip, strict=True):
        _, targets = heldout.window_batch(stream, np.array([start, -1]), ctx, np.array([first, 0]))
        assert (targets[1] == -100).all()
        real = targets[0][targets[0] != -100]
        assert len(real) and (np.diff(real) == 1).all()
        seen[real] += 1
        assert (real - start >= np.minimum(real, ctx - stride + 1)).all()
    assert seen[0] == 0 and (seen[1:] == 1).all()
    assert (heldout.window_lengths(starts, total, ctx) - skip).sum() == total - 1
    if stride == ctx:
        assert np.array_equal(starts, heldout.eval_starts(total, ctx))


@pytest.mark.parametrize("more", ({}, {"arch": "modern"}, {"doc_mask": True, "eot_id": 3}), ids=str)
@pytest.mark.parametrize("stride", (1, 5, 12))
def test_sliding_windows_equal_the_plain_sum_over_tokens(more, stride):
    model, stream, ctx = model_of(**more), stream_of(61), 16
    nats, at = [], 0
    with torch.no_grad():
        for t in range(1, stream.total):  # one token at a time, by the first window that holds it
            while t > at + ctx:
                at += stride
            logits = model(torch.from_numpy(stream.ids[at:t])[None])[0, -1]
            nats.append(-logits.double().log_softmax(-1)[stream.ids[t]].item())
    for local_bsz in (1, 3, 64):
        score = scored(model, stream, local_bsz=local_bsz, stride=stride)
        assert score.tokens == 60 and score.nats == pytest.approx(sum(nats), rel=1e-6)
        assert score.window_nats[0] == pytest.approx(sum(nats[:ctx]), rel=1e-5)
        assert score.window_nats[1] == pytest.approx(sum(nats[ctx : ctx + stride]), rel=1e-5)


def test_a_stride_of_ctx_is_the_plain_figure_to_the_bit():
    model, stream = model_of(), stream_of(150)
    plain = []
    with torch.no_grad():
        for first in range(0, 10, 4):  # windows as they were scored before there was a stride
            at = np.array([16 * w if w < 10 else -1 for w in range(first, first + 4)])
            batch = map(torch.from_numpy, heldout.window_batch(stream, at, 16))
            plain += model(*batch, per_window=True).tolist()
    for stride in (None, 16):
        score = scored(model, stream, stride=stride)
        assert score.window_nats.tolist() == plain[:10] and score.nats == math.fsum(plain[:10])


# ---- shards


def cut(directory, ids, lengths):
    """The ids as shards of these lengths."""
    directory.mkdir()
    found, start = [], 0
    for i, length in enumerate(lengths):
        path = directory / f"val_{i:03d}.bin"
        ids[start : start + length].astype("<u2").tofile(path)
        found.append(shards.Shard(path, length, start))
        start += length
    return shards.TokenStream("val", found, np.dtype("<u2"), 65, None, "digest")


@pytest.mark.parametrize("stride", (None, 5))
def test_the_cut_into_shards_changes_no_bit_of_the_total_and_shards_sum_to_it(tmp_path, stride):
    model, ids = model_of(), stream_of(150).ids
    whole = scored(model, cut(tmp_path / "one", ids, [150]), stride=stride)
    starts = heldout.eval_starts(150, 16, stride=stride)
    for name, lengths in {"even": [50, 50, 50], "odd": [1, 40, 3, 2, 103, 1], "empty": [70, 0, 80]}.items():
        stream = cut(tmp_path / name, ids, lengths)
        score = scored(model, stream, stride=stride)
        assert score.nats == whole.nats and np.array_equal(score.window_nats, whole.window_nats)
        parts = heldout.by_shard(score, starts, 16, stream.shards)
        assert sum(p.tokens for p in parts) == 149 and len(parts) == len(lengths)
        assert math.fsum(x for p in parts for x in p.window_nats) == whole.nats
        at = 1
        for part, shard in zip(parts, stream.shards, strict=True):
            if part.tokens:  # its windows begin to score within it
                assert shard.start <= at < shard.start + shard.tokens
                assert at + part.tokens - part.window_tokens[-1] < shard.start + shard.tokens
            at += part.tokens
    assert [p.tokens for p in parts] == ([80, 0, 69] if stride is None else [71, 0, 78])


class Counting(torch.nn.Module):
    """A nat for each scored target."""

    def forward(self, idx, targets, per_window):
        return (targets != -100).sum(1).float()


class Zeros(Stream):
    """So many tokens, held nowhere."""

    def __init__(self, total):
        self.total = total

    def windows(self, starts, length):
        return np.zeros((len(starts), length), np.int64)


def test_a_large_set_needs_no_python_object_a_window():
    count = 400_000
    tracemalloc.start()
    score = scored(Counting(), Zeros(count + 4), ctx=4, stride=1, local_bsz=4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(score.window_nats) == count and score.nats == score.tokens == count + 3 and score.standard_error == 0
    assert peak < 80 * count, peak / count  # bytes a window: a few arrays of 8; a float in a list alone takes 32


@pytest.mark.parametrize("total", (2, 65, 100, 160))
def test_uniform_logits_have_the_perplexity_of_the_true_vocabulary(total):
    model = model_of()
    torch.nn.init.zeros_(model.wte.weight)  # 65 ids in 128 rows: the padding must not count
    for local_bsz in (1, 2, 3, 64):
        assert scored(model, stream_of(total), local_bsz=local_bsz).perplexity == pytest.approx(65, rel=1e-6)


def test_mode_and_random_state_are_left_as_found():
    model = model_of()
    model.train()
    before = torch.get_rng_state()
    scored(model, stream_of(100))
    assert all(m.training for m in model.modules()) and torch.equal(torch.get_rng_state(), before)
    model.eval()
    scored(model, stream_of(100))
    assert not any(m.training for m in model.modules())


def test_dropout_is_off():
    model = model_of()
    plain = scored(model, stream_of(100)).nats
    model.cfg = dataclasses.replace(model.cfg, dropout=0.5)
    for block in model.blocks:
        block.dropout = block.attn.dropout = 0.5
    assert scored(model.train(), stream_of(100)).nats == plain


class OneOf(Topology):
    """One of several ranks, run alone: `all_sum` hands back what this rank would contribute."""

    def all_sum(self, values):
        return values


@pytest.mark.parametrize("world_size", (2, 3, 5, 16))
def test_ranks_share_the_windows_and_run_alike(world_size):
    model, stream = model_of(), stream_of(150)  # ten windows, the last of 5 targets
    whole = scored(model, stream).window_nats
    parts, shapes = [], []
    for rank in range(world_size):
        seen = []
        one = OneOf(rank, world_size, CPU, "fp32", "ddp", 1, cpu_group=None, publish_group=None, save_group=None)
        hook = model.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].shape))
        parts.append(scored(model, stream, topology=one).window_nats)
        hook.remove()
        shapes.append(seen)
    owners = np.stack([part != 0 for part in parts])
    assert (owners.sum(0) == 1).all()
    np.testing.assert_allclose(np.sum(parts, 0), whole, rtol=1e-5)
    assert all(s == shapes[0] for s in shapes)  # FSDP's collectives would hang otherwise


def test_standard_error_is_that_of_the_mean_for_equal_windows_and_counts_windows():
    s = np.random.default_rng(0).normal(50, 4, 400)
    equal = heldout.Score(s, np.full(400, 16))
    assert equal.standard_error == pytest.approx(s.std(ddof=1) / math.sqrt(400) / 16, rel=1e-6)
    assert math.isnan(heldout.Score(s[:1], np.array([16])).standard_error)
    exact = heldout.Score(np.array([32.0, 32.0, 10.0]), np.array([16, 16, 5]))  # the same loss in each
    assert exact.standard_error == 0


def test_a_diverged_model_has_no_finite_figure():
    for nats, expected in ((math.nan, math.isnan), (math.inf, math.isinf), (1e6, math.isinf)):
        score = heldout.Score(np.array([nats, 3.0]), np.array([16, 16]))
        assert expected(score.perplexity)


def test_bits_per_byte():
    assert heldout.bits_per_byte(8 * math.log(2) * 1000, 1000) == pytest.approx(8)


RANKS = """
import dataclasses, json, sys
import torch
from torch.distributed.tensor import DTensor
sys.path[:0] = sys.argv[1:3]
from fourscale import parallel
from fourscale.model import GPT, set_full
from test_heldout import model_of, scored, stream_of

ddp = parallel.start(parallel="ddp", backend="gloo")
figures = {}
for topology in (ddp, dataclasses.replace(ddp, parallel="fsdp", shard_size=ddp.world_size)):
    whole = model_of()
    with torch.device("meta"):
        model = GPT(whole.cfg)

    @torch.no_grad()
    def set_weights():
        for name, p in model.named_parameters():
            set_full(p, whole.get_parameter(name).detach())

    wrapped = parallel.build(model, set_weights, topology)
    for total in (2, 150, 161):
        for bsz in (1, 4):
            score = scored(wrapped, stream_of(total), local_bsz=bsz, topology=topology)
            figures[f"{topology.parallel} {total} {bsz}"] = [score.nats, score.tokens]
    if topology.parallel == "fsdp":  # or a checkpoint saved now would hold other tensors
        assert all(isinstance(p, DTensor) for p in model.parameters()), "an evaluation must leave parameters sharded"
    wrapped.train()
    idx = torch.arange(16)[None]
    wrapped(idx, idx).sum().backward()
    assert all(p.grad is not None for p in model.parameters()), "an evaluation must not cut off the gradients"
    del wrapped, model
if ddp.main:
    print(json.dumps(figures))
parallel.stop(ddp)
"""


def test_two_real_ranks_give_the_figure_of_one(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS, encoding="utf-8")
    done = run(script, ROOT, ROOT / "tests", nproc=2)
    figures = json.loads(done.stdout)
    assert len(figures) == 12
    for name, (nats, tokens) in figures.items():
        total = int(name.split()[1])
        assert tokens == total - 1
        assert nats == pytest.approx(scored(model_of(), stream_of(total)).nats, rel=1e-6), name


def test_the_door_gives_the_training_run_s_figure_on_one_rank_and_two(data, trained, tmp_path):
    ckpt = trained("--eval-tokens", 1_000_000)
    figures = []
    for nproc, bsz in ((None, 8), (2, 3)):
        out = tmp_path / f"{nproc}.json"
        flags = ("--data", data, "--ckpt", ckpt, "--backend", "gloo", "--local-bsz", bsz, "--json", out)
        shown = run("eval_ppl.py", *flags, nproc=nproc).stdout
        figures.append(json.loads(out.read_text(encoding="utf-8")))
        assert f"perplexity  {figures[-1]['perplexity']:.4f}" in shown
    one, two = figures
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["nats"] == pytest.approx(two["nats"], rel=1e-6)
    assert one["nats_per_token"] == pytest.approx(rows(ckpt)[-1]["val_loss"], rel=1e-6)

    ids = shards.open_split(data, "val")
    stream = ids.read(0, ids.total)
    assert one["tokens"] == len(stream) - 1 and one["windows"] == math.ceil((len(stream) - 1) / 32)
    assert one["text_bytes"] == (stream != 256).sum() - 1  # a byte a token, but end-of-text; and the first is no target
    assert one["bits_per_byte"] == pytest.approx(one["nats"] / math.log(2) / one["text_bytes"])
    assert one["perplexity"] == pytest.approx(math.exp(one["nats"] / one["tokens"]))


def test_text_of_another_tokenizer_is_refused_without_a_word_of_python(data, trained, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"word {i} " * 300 for i in range(12)), encoding="utf-8")
    run("prepare.py", "--dataset", text, "--tokenizer", "char", "--val-docs", 2, "--out", tmp_path / "other")
    flags = ("--ckpt", trained("--eval-tokens", 1_000_000), "--backend", "gloo")
    done = run("eval_ppl.py", "--data", tmp_path / "other", *flags, code=2)
    assert "its tokenizer (char, sha256 " in one_error(done)
    assert "33: the model has 32 learned positions" in one_error(
        run("eval_ppl.py", "--data", data, *flags, "--ctx", 33, code=2)
    )


def test_what_cannot_be_scored_is_refused_by_name(tmp_path):
    entry = {"kind": "byte", "sha256": "a", "vocab_size": 257}
    eval_ppl.check_tokenizer(entry, entry | {"kind": "tokenizer.json"}, "data")
    for change in ({"sha256": "b"}, {"vocab_size": 300}):
        with pytest.raises(InputError, match="--data data: its tokenizer"):
            eval_ppl.check_tokenizer(entry, entry | change, "data")
    gpt2, modern = model_of("gpt2").cfg, model_of("modern").cfg
    assert [eval_ppl.window_length(asked, gpt2) for asked in (None, 5, 16)] == [16, 5, 16]
    assert eval_ppl.window_length(99, modern) == 99
    with pytest.raises(InputError, match="--ctx 17"):
        eval_ppl.window_length(17, gpt2)
    for options in (
        {"ctx": 0},
        {"local_bsz": 0},
        {"stride": 0},
        {"stride": 17, "ctx": 16},
        {"json": tmp_path / "no" / "x.json"},
    ):
        with pytest.raises(InputError, match=f"--{next(iter(options)).replace('_', '-')} "):
            EvalConfig(**options).check()


def test_bytes_of_the_scored_text():
    tokenizer = tokenization.build("byte", lambda: iter(()))
    stream = stream_of(10)
    for first, missing in ((65, 1), (256, 0)):  # a text byte, or end-of-text, at the very start
        stream.ids[0], stream.text_bytes = first, 9
        assert eval_ppl.scored_bytes(stream, tokenizer) == 9 - missing
    stream.text_bytes = None  # data from elsewhere may not say
    assert eval_ppl.scored_bytes(stream, tokenizer) is None
