"""Decoding: filters equal transformers', samples depend on (seed, index) alone, end-of-text and the context's end."""

import math

import pytest
import torch
from conftest import one_error, run
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fourscale import tokenization
from fourscale.cli import InputError, RunFailed
from fourscale.config import ModelConfig, SampleConfig
from fourscale.generate import Decoding, choose, filter_logits, generate, next_logits, sample_generators
from fourscale.model import GPT
from sample import SEPARATOR, continuation, encode_prompt

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other


def model_of(arch="modern", seed=0):
    model = GPT(ModelConfig(arch, 32, 2, 4, 4, 64, 16, 65, tie=False))
    model.init_weights(seed)
    with torch.no_grad():
        model.head.weight.mul_(20)  # logits of standard deviation 2.3
    return model.eval()


def texts(model, prompt, seed, first, count, n=12, how=None, eot_id=None):
    """The tokens of samples first .. first + count - 1, None left out."""
    steps = list(generate(model, prompt, sample_generators(seed, first, count), n, how or Decoding(), eot_id))
    return [[step[k] for step in steps if step[k] is not None] for k in range(count)]


@pytest.mark.parametrize("temperature", (0.7, 1.0, 2.5))
@pytest.mark.parametrize("top_k", (None, 1, 5, 65, 1000))
@pytest.mark.parametrize("top_p", (None, 0.1, 0.5, 0.93, 1.0))
def test_filters_agree_with_transformers(temperature, top_k, top_p):
    logits = torch.randn(6, 65, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 7] = logits[0, 3] = logits[0].max() + 1  # a tie at the top
    ours = filter_logits(logits, Decoding(temperature, top_k, top_p)).softmax(-1)
    theirs = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    if top_k is not None:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p is not None and top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    theirs = theirs.softmax(-1)
    assert torch.equal(ours[1:] > 0, theirs[1:] > 0)
    torch.testing.assert_close(ours[1:], theirs[1:])
    if top_p is None:  # which of two tied tokens top-p drops is a matter of sorting
        torch.testing.assert_close(ours[0], theirs[0])


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    for top_p, kept in ((0.4, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.91, 4), (1.0, 4)):
        assert (filter_logits(logits, Decoding(top_p=top_p)) > -math.inf).sum() == kept


def test_temperature_zero_is_argmax_and_tiny_ones_come_near_it():
    logits = torch.randn(5, 65, generator=torch.Generator().manual_seed(1))
    for temperature in (0, 1e-9):
        assert torch.equal(choose(logits, Decoding(temperature), sample_generators(0, 0, 5)), logits.argmax(-1))
    tied = torch.zeros(1, 65)
    assert choose(tied, Decoding(0), sample_generators(0, 0, 1)).item() == 0


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.2, 1e-30]).log()
    generator = sample_generators(0, 0, 1)
    drawn = torch.cat([choose(logits[None], Decoding(), generator) for _ in range(4000)])
    shares = drawn.bincount(minlength=4) / 4000
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.2, 0]), atol=0.03)  # 4 standard errors


@pytest.mark.parametrize(
    ("options", "flag"),
    (
        ({"num_samples": 0}, "--num-samples"),
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": math.nan}, "--temperature"),
        ({"temperature": math.inf}, "--temperature"),
        ({"top_k": 0}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.5}, "--top-p"),
        ({"top_p": math.nan}, "--top-p"),
    ),
)
def test_impossible_options_are_refused_by_name(options, flag):
    with pytest.raises(InputError, match=f"^{flag} "):
        SampleConfig(**options).check()


@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_logits_that_are_not_finite_are_an_error(bad):
    logits = torch.zeros(2, 65)
    logits[1, 3] = bad
    with pytest.raises(RunFailed, match="not finite"):
        choose(logits, Decoding(), sample_generators(0, 0, 2))


def test_a_sample_depends_on_its_seed_and_index_alone():
    model = model_of()
    four = texts(model, [1, 2, 3], 7, 0, 4)
    assert len({tuple(t) for t in four}) == 4
    for k in range(4):
        assert texts(model, [1, 2, 3], 7, k, 1) == [four[k]]
    assert texts(model, [1, 2, 3], 7, 2, 2) == four[2:]
    assert texts(model, [1, 2, 3], 7, 0, 4) == four
    assert texts(model, [1, 2, 3], 8, 0, 1) != four[:1]


def test_the_global_random_state_is_neither_read_nor_moved():
    model = model_of()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    once = texts(model, [1], 0, 0, 2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert texts(model, [1], 0, 0, 2) == once


def test_end_of_text_ends_a_sample_and_not_the_others():
    model = model_of()
    free = texts(model, [1, 2], 3, 0, 4)
    eot = free[1][4]
    stopped = texts(model, [1, 2], 3, 0, 4, eot_id=eot)
    for with_eot, without in zip(stopped, free, strict=True):
        assert with_eot == without[: without.index(eot) + 1 if eot in without else None]
    assert len(stopped[1]) == free[1].index(eot) + 1 <= 5
    steps = list(generate(model, [1, 2], sample_generators(3, 1, 1), 12, Decoding(), eot))
    assert len(steps) == len(stopped[1])  # nothing is computed after the last sample's end


@pytest.mark.parametrize("arch", ("gpt2", "modern"))
def test_past_the_context_the_window_slides(arch):
    model = model_of(arch)
    prompt = torch.randint(65, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    greedy = texts(model, prompt, 0, 0, 1, n=30, how=Decoding(0))[0]
    assert len(greedy) == 30
    ids = list(prompt)
    for token in greedy:  # each token is the best after the last 16, read from position 0
        with torch.no_grad():
            assert model(torch.tensor([ids[-16:]]))[0, -1].argmax() == token
        ids.append(token)
    with torch.no_grad():
        ids = torch.tensor([prompt])
        assert torch.equal(next_logits(model, ids, 16), next_logits(model, ids[:, -16:], 16))


def test_no_new_tokens_and_no_prompt():
    assert texts(model_of(), [1], 0, 0, 2, n=0) == [[], []]
    with pytest.raises(InputError, match="--prompt"):
        next(generate(model_of(), [], sample_generators(0, 0, 1), 1, Decoding()))


def test_padded_ids_are_never_drawn():
    model = model_of()
    with torch.no_grad():
        model.head.weight[65:] = 1e3  # would win every draw
    assert max(t for text in texts(model, [1], 0, 0, 4, n=20) for t in text) < 65


def test_ids_that_the_tokenizer_lacks_are_never_drawn():
    rows = list(generate(model_of(), [1], sample_generators(0, 0, 4), 30, Decoding(2.0), vocab_size=20))
    assert max(max(row) for row in rows) == 19


def tokenizer_of(spec):
    return tokenization.build(spec, lambda: iter(["na\u00efve caf\u00e9 \u6771\u4eac \U0001f40d\n"]))


@pytest.mark.parametrize("spec", ("byte", "char", "bpe:260"))
def test_streamed_pieces_are_whole_characters_and_add_up(spec):
    tokenizer = tokenizer_of(spec)
    text = "caf\u00e9 \u6771\u4eac \U0001f40d na\u00efve\n"
    prompt = tokenizer.encode("na\u00efve ")
    pieces = list(continuation(tokenizer, prompt, tokenizer.encode(text)))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 5  # it does come in pieces


def test_bytes_that_are_no_character_are_shown_as_such():
    tokenizer = tokenizer_of("byte")
    broken = [0xE6, 0x9D, ord("a"), 0xFF, ord("b"), 0xC3]  # cut short, invalid, cut short at the end
    assert "".join(continuation(tokenizer, [], broken)) == "\ufffda\ufffdb\ufffd"
    assert list(continuation(tokenizer, tokenizer.encode("x"), [])) == [""]


def test_a_prompt_of_unknown_characters_is_refused():
    with pytest.raises(InputError, match="--prompt: character 'o'"):
        encode_prompt(tokenizer_of("char"), "fox")


def test_the_door_prints_the_prompt_and_the_same_first_sample_however_many(trained):
    ckpt = trained("--eval-tokens", 1_000_000)
    flags = ("--ckpt", ckpt, "--prompt", "def caf\u00e9", "--max_new_tokens", 40, "--top_k", 50)
    one = run("sample.py", *flags).stdout
    assert one.startswith("def caf\u00e9") and len(one.encode("utf-8")) > 40
    three = run("sample.py", *flags, "--num-samples", 3).stdout
    parts = three.split(SEPARATOR + "\n")
    assert parts[0] == one and len(set(parts[:3])) == 3 and parts[3] == ""
    long = run("sample.py", "--ckpt", ckpt, "--prompt", "x" * 40, "--max-new-tokens", 2)
    assert long.stdout.startswith("x" * 40)
    assert "40 tokens; the model sees the last 32" in long.stderr
    assert one_error(run("sample.py", "--ckpt", ckpt, "--top-p", 2, code=2)).startswith("error: --top-p 2.0: ")
