"""Decoding: cached logits, filters and greedy texts equal transformers', a text depends on its seed and index alone."""

import dataclasses
import gc
import math
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fourscale import hf
from fourscale.cli import InputError, RunFailed
from fourscale.config import ModelConfig
from fourscale.flags import SampleConfig
from fourscale.generate import (
    Decoding,
    Text,
    choose,
    filter_logits,
    generate,
    penalize,
    sample_generator,
    window_start,
)
from fourscale.model import GPT, Cache

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

EOT = 64
PLAIN = Decoding()
FAMILIES = {
    "gpt2": {"arch": "gpt2", "n_kv_heads": 4},
    "llama": {"arch": "modern", "n_kv_heads": 2, "rope_scaling": "llama3:4,1,4,8", "rope_theta": 100.0},
    "qwen3": {"arch": "modern", "n_kv_heads": 2, "qk_norm": True, "d_head": 12},
}
DOCUMENTS = {"gpt2 with doc_mask": "gpt2", "llama with doc_mask": "llama"}
SHAPES = [*FAMILIES, *DOCUMENTS]


def model_of(shape="llama", seed=0, **changes):
    """A model of large random weights: what it attends to and where shows in its logits."""
    table = FAMILIES[DOCUMENTS.get(shape, shape)]
    if shape in DOCUMENTS:
        table = table | {"doc_mask": True, "eot_id": EOT}
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 64, "ctx": 16, "vocab_size": 65, "tie": False}
    model = GPT(ModelConfig(**(sizes | table | changes)))
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.15)
    return model.eval()


def ids_of(n, seed=0, vocab=65):
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def made(model, prompts, n=12, how=PLAIN, seed=0, samples=1, first=0, **options):
    """The finished texts of some samples of each prompt."""
    texts = [Text(p, sample_generator(seed, p, k)) for p in prompts for k in range(first, first + samples)]
    for _ in generate(model, texts, n, how, **options):
        pass
    return texts


@torch.no_grad()
def recomputed(model, prompt, n, how=PLAIN, seed=0, index=0):
    """The text by the definition: all that is seen is read anew for each token. No cache, no batch."""
    ids, generator = list(prompt), sample_generator(seed, prompt, index)
    for _ in range(n):
        seen = torch.tensor([ids[window_start(len(ids), model.cfg.ctx) :]])
        ids.append(choose(model(seen)[:, -1], how, [generator], [ids]).item())
    return ids


# ---- the cache -------------------------------------------------------------------------------------------------------


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_cached_logits_are_those_of_the_whole_text(shape):
    """Rows of other lengths, some read in one pass and some token by token, then together, one token a step."""
    model = model_of(shape)
    rows = [ids_of(16, k) for k in range(4)]
    rows[1][3] = rows[1][11] = rows[2][0] = EOT  # with doc_mask: within what is read at once, and after it
    cache, lengths = Cache(model.cfg, 6, 16, torch.device("cpu")), [1, 9, 5, 6]
    for k, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        if k == 3:
            for t in range(n):
                logits = model(torch.tensor([row[t : t + 1]]), cache=cache[k : k + 1])
        else:
            logits = model(torch.tensor([row[:n]]), cache=cache[k : k + 1])[:, -1:]
        close(logits[0, -1], model(torch.tensor([row[:n]]))[0, -1])
    for _ in range(7):
        logits = model(torch.tensor([[row[n]] for row, n in zip(rows, lengths, strict=True)]), cache=cache[:4])
        lengths = [n + 1 for n in lengths]
        assert cache.lengths.tolist() == [*lengths, 0, 0]
        for row, n, one in zip(rows, lengths, logits, strict=True):
            close(one[-1], model(torch.tensor([row[:n]]))[0, -1])


@torch.no_grad()
def test_rows_are_copied_and_forgotten():
    model = model_of("llama with doc_mask")
    cache, row = Cache(model.cfg, 2, 16, torch.device("cpu")), [3, 1, EOT, 4, 1, 5]
    model(torch.tensor([row]), cache=cache[:1])
    cache.copy_row(0, 1)
    cache[:1].clear()
    logits = model(torch.tensor([[7], [7]]), cache=cache)
    close(logits[0, 0], model(torch.tensor([[7]]))[0, 0])
    close(logits[1, 0], model(torch.tensor([[*row, 7]]))[0, -1])


@torch.no_grad()
def test_a_cache_takes_no_second_passage_and_is_not_for_training():
    model = model_of()
    cache = Cache(model.cfg, 1, 16, torch.device("cpu"))
    model(torch.tensor([[1, 2]]), cache=cache)
    with pytest.raises(ValueError, match="one token a row"):
        model(torch.tensor([[3, 4]]), cache=cache)
    with pytest.raises(ValueError, match="evaluation mode"):
        model.train()(torch.tensor([[3]]), cache=cache)


@torch.no_grad()
def test_the_cache_has_the_dtype_of_attention():
    model = model_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = Cache(model.cfg, 1, 16, torch.device("cpu"))
        assert cache.kv.dtype == torch.bfloat16
        row = ids_of(10)
        model(torch.tensor([row[:9]]), cache=cache)
        cached, whole = model(torch.tensor([row[9:]]), cache=cache)[0, -1], model(torch.tensor([row]))[0, -1]
    torch.testing.assert_close(cached, whole, rtol=0.1, atol=0.05 * whole.abs().max().item())
    assert len(made(model, [[1, 2]], 3)[0].new) == 3


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_are_those_of_recomputing_far_past_the_context(shape):
    """Prompts shorter and longer than the context, in one batch with fewer places than texts."""
    model, prompts = model_of(shape), [ids_of(n, n) for n in (1, 15, 16, 17, 40)]
    for how in (Decoding(0), Decoding(0.9, 20, 0.95, 0.01, 1.2)):
        texts = made(model, prompts, 28, how, batch_size=3)
        for prompt, text in zip(prompts, texts, strict=True):
            assert text.ids == recomputed(model, prompt, 28, how)
            assert text.finish == "length" and text.new == text.ids[len(prompt) :]


@pytest.mark.parametrize("ctx", (1, 2, 5, 16))
def test_what_is_seen_follows_from_the_length_alone(ctx):
    starts = [window_start(n, ctx) for n in range(1, 8 * ctx)]
    assert starts[:ctx] == [0] * ctx and starts == sorted(starts)
    for n, start in enumerate(starts, 1):
        assert (1 if n <= ctx else ctx // 2 + 1) <= n - start <= ctx
    assert window_start(ctx + 1, ctx) == ctx - ctx // 2  # the older half is gone
    model = model_of(ctx=ctx)
    assert made(model, [[1, 2, 3]], 4 * ctx)[0].ids == recomputed(model, [1, 2, 3], 4 * ctx)


def read_by(model, act):
    """Tokens that the model reads, padding included, while act() runs."""
    count = [0]
    hook = model.register_forward_pre_hook(lambda _, args: count.__setitem__(0, count[0] + args[0].numel()))
    act()
    hook.remove()
    return count[0]


def test_each_token_is_read_once():
    """The cache at work, counted: a prompt once for all samples, nothing after a text's end, half a full context."""
    model = model_of(ctx=64)
    assert read_by(model, lambda: made(model, [ids_of(20)], 30)) == 19 + 30
    assert read_by(model, lambda: made(model, [ids_of(20)], 30, samples=5)) == 19 + 5 * 30
    free = made(model, [[1, 2]], 30, samples=4, seed=3)
    eot = free[1].new[4]
    ended = made(model, [[1, 2]], 30, samples=4, seed=3, eot_ids=(eot,))
    spent = sum(len(text.new) for text in ended)
    assert spent < 4 * 30
    assert read_by(model, lambda: made(model, [[1, 2]], 30, samples=4, seed=3, eot_ids=(eot,))) == 1 + spent
    # from 20 tokens to 20 + 120, of a context of 64: full when 64 are seen, then again every 32
    assert read_by(model, lambda: made(model, [ids_of(20)], 120)) == 19 + 120 + 32 * math.ceil((20 + 119 - 64) / 32)


class Largest(TorchDispatchMode):
    """Bytes of the largest new tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes, self.known = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in inputs:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def live_bytes():
    gc.collect()
    # Plain ones: torch.compile in other tests of this process leaves tensors without memory behind.
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("shape", ("gpt2", "llama"))
def test_memory_does_not_grow_beyond_the_cache(shape):
    model = model_of(shape, ctx=512)
    prompts, seen, largest = [ids_of(480, k) for k in range(4)], [], Largest()
    whole = Cache(model.cfg, 4, 512, torch.device("cpu")).kv.nbytes
    before = live_bytes()
    steps = generate(model, [Text(p, sample_generator(0, p, 0)) for p in prompts], 10_000, Decoding(0))
    for i, _ in zip(range(4 * 52), steps, strict=False):
        if i % 4 == 3 and i // 4 in (1, 30, 50):  # 50: past the context, half of it was read again
            seen.append(live_bytes())
        if i == 4 * 10:
            largest.__enter__()
        if i == 4 * 20:
            largest.__exit__(None, None, None)
    assert max(seen) - min(seen) < 20_000 and max(seen) - before < 1.1 * whole
    assert 0 < largest.bytes < whole / 8  # a step copies half of no layer's keys, of two layers


def test_no_memory_for_the_cache_is_said():
    text = Text([1], sample_generator(0, [1], 0))
    with pytest.raises(RunFailed, match=r"^--batch-size 1: no memory for the keys and values of 1 texts of 1,0"):
        next(generate(model_of(ctx=10**12), [text], 10**12, Decoding()))


@pytest.mark.slow
def test_sampling_by_the_cache_is_much_faster_than_recomputing():
    """In CPU time, alternated in one run: a few tokens after a long prompt."""
    model, n = model_of("gpt2", d_model=256, d_ff=1024, n_layers=4, ctx=512, vocab_size=512), 40
    prompt = ids_of(400, vocab=512)
    seconds = {True: [], False: []}
    for cached in (True, False) * 3:
        started = time.process_time()
        made(model, [prompt], n) if cached else recomputed(model, prompt, n)
        seconds[cached].append(time.process_time() - started)
    assert min(seconds[False]) > 4 * min(seconds[True])


# ---- transformers ----------------------------------------------------------------------------------------------------


def theirs_of(model):
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf.hf_config(model.cfg, 0)))
    theirs.load_state_dict(hf.to_hf(model.state_dict(), model.cfg), strict=model.cfg.tie is False)
    return theirs.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_200_greedy_tokens_are_those_of_transformers(family):
    model = model_of(family, ctx=256)
    theirs, prompts = theirs_of(model), [ids_of(n, n) for n in (1, 30)]
    for penalty in (1.0, 1.3):
        texts = made(model, prompts, 200, Decoding(0, repetition_penalty=penalty))
        for prompt, text in zip(prompts, texts, strict=True):
            options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "repetition_penalty": penalty}
            idx = torch.tensor([prompt])
            ids = theirs.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=200, **options)
            assert text.ids == ids[0].tolist()
        assert len(set(texts[0].new)) > 5


@pytest.mark.parametrize(
    "options",
    (
        {"temperature": 0.7},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.5, "temperature": 2.0},
        {"top_k": 5, "temperature": 0.7},
        {"top_p": 0.6, "temperature": 1.5},
        {"min_p": 0.2, "temperature": 1.5},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3, "repetition_penalty": 1.2},
        {"top_k": 8, "top_p": 0.5, "min_p": 0.3, "temperature": 3.0, "repetition_penalty": 1.5},
    ),
    ids=str,
)
def test_distributions_and_their_order_are_those_of_generate(options):
    """The logits and the distribution of each step as transformers' generate reports both."""
    theirs, prompt = theirs_of(model_of(ctx=64)), [5, 6, 7, 7]
    torch.manual_seed(0)
    out = theirs.generate(
        torch.tensor([prompt, prompt]),
        max_new_tokens=20,
        do_sample=True,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **({"top_k": 0, "eos_token_id": None, "pad_token_id": 0} | options),
    )
    how = Decoding(**options)
    for t, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        seen = out.sequences[:, : len(prompt) + t].tolist()
        ours = filter_logits(penalize(logits, seen, how.repetition_penalty), how).softmax(-1)
        assert torch.equal(ours > 0, scores > -math.inf)
        torch.testing.assert_close(ours, scores.softmax(-1))


@pytest.mark.parametrize("temperature", (0.7, 1.0, 2.5))
@pytest.mark.parametrize("top_k", (None, 1, 5, 65, 1000))
@pytest.mark.parametrize("top_p", (None, 0.1, 0.5, 0.93, 1.0))
@pytest.mark.parametrize("min_p", (None, 0.0, 0.1, 1.0))
def test_filters_agree_with_transformers(temperature, top_k, top_p, min_p):
    logits = torch.randn(6, 65, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 7] = logits[0, 3] = logits[0].max() + 1  # a tie at the top
    ours = filter_logits(logits, Decoding(temperature, top_k, top_p, min_p)).softmax(-1)
    theirs = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    if top_k is not None:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p is not None and top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    if min_p is not None:
        theirs = MinPLogitsWarper(min_p)(None, theirs)
    theirs = theirs.softmax(-1)
    rows = slice(None) if top_p is None and min_p != 1 else slice(1, None)  # which of two tied goes is up to sorting
    assert torch.equal(ours[rows] > 0, theirs[rows] > 0)
    torch.testing.assert_close(ours[rows], theirs[rows])


def test_filters_agree_on_a_large_vocabulary():
    logits = torch.randn(2, 50_257, generator=torch.Generator().manual_seed(0)) * 4
    for top_p in (0.5, 0.9, 0.99):
        ours = filter_logits(logits, Decoding(top_p=top_p, min_p=0.001)) > -math.inf
        assert torch.equal(ours, MinPLogitsWarper(0.001)(None, TopPLogitsWarper(top_p)(None, logits)) > -math.inf)


@pytest.mark.parametrize("penalty", (0.4, 1.0, 1.3))
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    logits = torch.randn(2, 65, generator=torch.Generator().manual_seed(0))
    before, seen = logits.clone(), [[1, 2, 2, 9], [64, 0, 3, 3]]
    ours = penalize(logits, seen, penalty)
    assert torch.equal(ours, RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(seen), logits))
    assert torch.equal(logits, before)
    assert torch.equal(penalize(logits, [[900], []], penalty), before)  # an id that has no logit, and no ids


# ---- one token -------------------------------------------------------------------------------------------------------


def generators(n, seed=0):
    return [sample_generator(seed, [1], k) for k in range(n)]


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    for top_p, kept in ((0.4, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.91, 4), (1.0, 4)):
        assert (filter_logits(logits, Decoding(top_p=top_p)) > -math.inf).sum() == kept


def test_min_p_keeps_what_is_likely_beside_the_most_likely():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    for min_p, kept in ((0.0, 4), (0.19, 4), (0.21, 3), (0.31, 2), (0.51, 1), (1.0, 1)):
        assert (filter_logits(logits, Decoding(min_p=min_p)) > -math.inf).sum() == kept


def test_temperature_zero_is_argmax_and_tiny_ones_come_near_it():
    logits = torch.randn(5, 65, generator=torch.Generator().manual_seed(1))
    for temperature in (0, 1e-9):
        assert torch.equal(choose(logits, Decoding(temperature), generators(5)), logits.argmax(-1))
    assert filter_logits(logits, Decoding(0)).argmax(-1).equal(logits.argmax(-1))
    tied = torch.zeros(1, 65)
    assert choose(tied, Decoding(0), generators(1)).item() == 0


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.2, 1e-30]).log()
    generator = generators(1)
    drawn = torch.cat([choose(logits[None], Decoding(), generator) for _ in range(4000)])
    shares = drawn.bincount(minlength=4) / 4000
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.2, 0]), atol=0.03)  # 4 standard errors


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"num_samples": 0}, "--num-samples 0: must be at least 1"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0: must be at least 1"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"temperature": -0.1}, "--temperature -0.1: "),
        ({"temperature": math.nan}, "--temperature nan: "),
        ({"temperature": math.inf}, "--temperature inf: "),
        ({"temperature": 0.5, "greedy": True}, "--greedy with --temperature 0.5: "),
        ({"top_k": 0}, "--top-k 0: "),
        ({"top_p": 0.0}, "--top-p 0.0: "),
        ({"top_p": 1.5}, "--top-p 1.5: "),
        ({"top_p": math.nan}, "--top-p nan: "),
        ({"min_p": -0.1}, "--min-p -0.1: "),
        ({"min_p": math.nan}, "--min-p nan: "),
        ({"repetition_penalty": 0.0}, "--repetition-penalty 0.0: "),
        ({"repetition_penalty": math.nan}, "--repetition-penalty nan: "),
        ({"stop": ("a", "")}, "--stop '': "),
        ({"stop": ("\udc80",)}, "--stop: not valid UTF-8"),
        ({"prompt": ("a", "\udc80")}, "--prompt: not valid UTF-8"),
        ({"prompt": ("-",), "prompts_file": "-"}, "standard input can be read once"),
        ({"prompt": ("-", "-")}, "standard input can be read once"),
        ({"interactive": True, "prompts_file": "-"}, "standard input can be read once"),
        ({"interactive": True, "prompt": ("a",)}, "--interactive asks for prompts .* leave --prompt out"),
        ({"interactive": True, "prompts_file": "x"}, "--interactive asks for prompts .* leave --prompts-file out"),
        ({"interactive": True, "json": "-"}, "--interactive asks for prompts .* leave --json out"),
        ({"json": "/no/such/place.jsonl"}, "--json /no/such/place.jsonl: no such directory"),
        ({"json": "x", "prompts_file": "x"}, "--json x: is the file of the prompts"),
    ),
    ids=str,
)
def test_impossible_options_are_refused_by_name(options, words):
    with pytest.raises(InputError, match=f"^{words}"):
        SampleConfig(**options).check()


def test_possible_options_are_not_refused():
    SampleConfig(temperature=0.0, greedy=True, top_p=1.0, min_p=0.0, prompt=("-", ""), json="-").check()
    SampleConfig(prompts_file="-", stop=("\n",), repetition_penalty=0.5).check()


@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_logits_that_are_not_finite_are_an_error(bad):
    logits = torch.zeros(2, 65)
    logits[1, 3] = bad
    for temperature in (0, 1):
        with pytest.raises(RunFailed, match="not finite"):
            choose(logits, Decoding(temperature), generators(2))
    model = model_of()
    with torch.no_grad():
        model.blocks[0].mlp.down.weight[3, 4] = bad
    with pytest.raises(RunFailed, match="weights are damaged or the run diverged"):
        made(model, [[1, 2]])


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_a_text_depends_on_its_seed_prompt_and_index_alone():
    model, prompts = model_of(), [[1, 2, 3], [4], ids_of(30)]
    options = {"seed": 7, "n": 20, "how": Decoding(1.0, top_p=0.95)}
    all_of = [text.ids for text in made(model, prompts, samples=3, **options)]
    assert len({tuple(ids) for ids in all_of}) == 9
    for batch_size in (1, 4):
        assert [t.ids for t in made(model, prompts, samples=3, batch_size=batch_size, **options)] == all_of
    assert [t.ids for t in made(model, prompts[1:], samples=3, **options)] == all_of[3:]
    assert [t.ids for t in made(model, prompts[::-1], samples=3, **options)] == all_of[6:] + all_of[3:6] + all_of[:3]
    for k in range(3):
        assert made(model, prompts[:1], first=k, **options)[0].ids == all_of[k]
    assert made(model, prompts[:1], **(options | {"seed": 8}))[0].ids != all_of[0]


def test_streams_of_prompts_and_samples_are_independent():
    first = [sample_generator(s, p, k).initial_seed() for s in (0, 1) for p in ([1], [2], [1, 2]) for k in range(9)]
    assert len(set(first)) == len(first)


def test_the_global_random_state_is_neither_read_nor_moved():
    model = model_of()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    once = [t.ids for t in made(model, [[1]], samples=2)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert [t.ids for t in made(model, [[1]], samples=2)] == once


def test_end_of_text_ends_a_text_and_not_the_others():
    model = model_of()
    free = made(model, [[1, 2], [3]], samples=4, n=25, seed=3)
    eot = free[1].new[4]
    for batch_size in (8, 3):  # 3: others take the places of those that ended
        stopped = made(model, [[1, 2], [3]], samples=4, n=25, seed=3, eot_ids=(eot,), batch_size=batch_size)
        for ended, other in zip(stopped, free, strict=True):
            has = eot in other.new
            assert ended.new == other.new[: other.new.index(eot) + 1 if has else None]
            assert ended.finish == ("eot" if has else "length")
    assert {text.finish for text in stopped} == {"eot", "length"}


def test_the_reader_may_end_a_text():
    model = model_of()
    whole = made(model, [[1, 2]], samples=3)
    texts = [Text([1, 2], sample_generator(0, [1, 2], k)) for k in range(3)]
    yielded = []
    for text in generate(model, texts, 12, Decoding(), batch_size=2):
        yielded.append(text)
        if text is texts[1] and len(text.new) == 4:
            text.finish = "stop"
    assert [len(text.new) for text in texts] == [12, 4, 12]
    assert [text.finish for text in texts] == ["length", "stop", "length"]
    assert all(a.ids == b.ids[: len(a.ids)] for a, b in zip(texts, whole, strict=True))
    assert len(yielded) == 28  # once for each token


def test_no_new_tokens_no_texts_and_no_prompt():
    text = made(model_of(), [[1]], n=0)[0]
    assert (text.new, text.finish) == ([], "length")
    assert list(generate(model_of(), [], 5, Decoding())) == []
    with pytest.raises(InputError, match="--prompt"):
        Text([], generators(1)[0])


def test_padded_ids_are_never_drawn():
    model = model_of()
    with torch.no_grad():
        model.head.weight[65:] = 1e3  # would win every draw
    assert max(i for text in made(model, [[1]], samples=4, n=20) for i in text.ids) < 65


def test_ids_that_the_tokenizer_lacks_are_never_drawn():
    texts = made(model_of(), [[1]], samples=4, n=30, how=Decoding(2.0), vocab_size=20)
    assert max(max(text.new) for text in texts) == 19


def test_autograd_and_the_model_are_left_as_they_were():
    model = model_of()
    before = {name: p.clone() for name, p in model.named_parameters()}
    steps = generate(model, [Text([1], generators(1)[0])], 3, Decoding())
    next(steps)
    assert torch.is_grad_enabled()  # between two tokens
    list(steps)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert dataclasses.asdict(model.cfg) == dataclasses.asdict(model_of().cfg)
