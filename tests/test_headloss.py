"""Head and loss in chunks: the losses and gradients of full logits, in a part of their memory, in every mode."""

import re

import pytest
import torch
import torch.nn.functional as F
from conftest import run
from test_model import built, random_ids, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourscale import budget, headloss
from fourscale.headloss import IGNORE, summed_loss, token_losses

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def chunked(monkeypatch):
    """Let even small logits be computed in chunks of so many tokens."""

    def cut(size: int) -> None:
        monkeypatch.setattr(headloss, "SMALL_LOGITS", 0)
        monkeypatch.setattr(headloss, "head_chunk", lambda tokens, rows, device_type: size)

    return cut


def full_loss(x, head, targets, vocab_size, reduction="sum"):
    """As autograd does it, all logits at once."""
    logits = F.linear(x, head)[..., :vocab_size].float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction=reduction)


def case(vocab_size, ignored):
    """x [3, 16, 32], a head of 128 rows, targets with some or all IGNORE."""
    generator = torch.Generator().manual_seed(vocab_size)
    x, head = torch.randn(3, 16, 32, generator=generator), torch.randn(128, 32, generator=generator) / 2
    targets = torch.randint(vocab_size, (3, 16), generator=generator)
    if ignored == "some":
        targets[0, 5:], targets[2, ::3] = IGNORE, IGNORE
    elif ignored == "all":
        targets[:] = IGNORE
    return x, head, targets


def gradients(loss_of, x, head, *rest, dtype="fp32", scale=1 / 64):
    """(loss, gradients of x and the head, divided by scale), the loss made under autocast."""
    x, head = x.clone().requires_grad_(), head.clone().requires_grad_()
    with torch.autocast("cpu", dtype=DTYPES[dtype], enabled=dtype != "fp32"):
        loss = loss_of(x, head, *rest)
    (loss * scale).backward()
    return loss.detach(), x.grad / scale, head.grad / scale


def near(found, want, off):
    """Each of `found` is fp32, and as far from `want` as rounding explains, of its largest value."""
    for a, b in zip(found, want, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() <= off * b.abs().max().clamp(min=1e-12)


@pytest.mark.parametrize("ignored", ("none", "some", "all"))
@pytest.mark.parametrize("size", (7, 48, 100))
@pytest.mark.parametrize("vocab_size", (65, 128))
def test_losses_and_gradients_are_those_of_full_logits(chunked, vocab_size, size, ignored):
    x, head, targets = case(vocab_size, ignored)
    chunked(size)
    for dtype, off in (("fp32", 1e-6), ("bf16", 8e-3), ("fp16", 1e-3)):
        want = gradients(full_loss, x, head, targets, vocab_size, dtype=dtype)
        for loss_of in (summed_loss, lambda *args: token_losses(*args).sum()):
            found = gradients(loss_of, x, head, targets, vocab_size, dtype=dtype)
            near(found, want, off)
            assert found[2][vocab_size:].abs().max() == 0 if vocab_size < 128 else True
    with torch.no_grad():
        each = token_losses(x, head, targets, vocab_size)
        torch.testing.assert_close(each.flatten(), full_loss(x, head, targets, vocab_size, "none"))
        torch.testing.assert_close(summed_loss(x, head, targets, vocab_size), each.sum())


def test_sixteen_bits_lose_no_more_in_chunks_than_in_full(chunked):
    """Partial gradients of the head add up in fp32: of many chunks, the sum is as near to fp32's as that of one."""
    x, head, targets = case(65, "none")
    exact = gradients(full_loss, x, head, targets, 65)[2]
    off = {}
    for dtype in ("bf16", "fp16"):
        for size in (1, 48):
            chunked(size)
            made = gradients(summed_loss, x, head, targets, 65, dtype=dtype)[2]
            off[dtype, size] = (made - exact).norm() / exact.norm()
        assert off[dtype, 1] < 1.1 * off[dtype, 48]
    assert off["fp16", 48] < 1e-3 < off["bf16", 48]


def test_fp16_gradients_are_made_at_the_scale_they_are_asked_for(chunked):
    """A GradScaler's: at a scale of 1, the smallest probabilities of a large vocabulary are 0 in fp16."""
    chunked(16)
    x, head, targets = case(128, "none")
    targets[:], x[:], head[:100], head[100:] = 0, 1, 0, -11 / 32  # of the last rows, a probability of 1.7e-7
    exact = gradients(full_loss, x, head, targets, 128)[2][100:]
    made = gradients(summed_loss, x, head, targets, 128, dtype="fp16", scale=2.0**12)[2][100:]
    near([made], [exact], 1e-2)


@pytest.mark.parametrize("tie", (True, False))
@pytest.mark.parametrize("arch", ("gpt2", "modern"))
def test_a_models_gradients_are_those_of_its_logits(chunked, arch, tie):
    cfg = tiny(arch, tie=tie)
    idx, targets = random_ids(cfg, 3, 16), random_ids(cfg, 3, 16, seed=1)
    targets[1, 4:] = IGNORE
    plain, ours = built(cfg), built(cfg)
    logits = plain(idx)
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    want.backward()
    chunked(10)
    loss = ours(idx, targets)
    (loss / 3).backward()
    assert loss.shape == () and loss.item() == pytest.approx(want.item(), rel=1e-6)
    for (name, p), (_, q) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(3 * p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        each = ours(idx, targets, per_window=True)
    assert each.shape == (3,) and each.sum().item() == pytest.approx(want.item(), rel=1e-6)
    assert each[1].item() == pytest.approx(ours(idx[1:2, :16], targets[1:2]).item(), rel=1e-6)


def test_only_gradients_that_are_wanted_are_made_and_once(chunked):
    chunked(10)
    x, head, targets = case(65, "none")
    want = gradients(full_loss, x, head, targets, 65)
    for frozen in (0, 1):
        inputs = [x.clone(), head.clone()]
        inputs[1 - frozen].requires_grad_()
        loss = summed_loss(*inputs, targets, 65)
        loss.backward(retain_graph=True)
        assert inputs[frozen].grad is None
        near([inputs[1 - frozen].grad], [want[2 - frozen]], 1e-6)
        with pytest.raises(RuntimeError, match="handed out by an earlier backward"):
            loss.backward()


class Largest(TorchDispatchMode):
    """The most numbers that one tensor made meanwhile holds."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.size = max(self.size, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)), 0)
        return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_logits_never_stand_in_memory(chunked, dtype):
    """In training and in held-out loss: no tensor of more than a chunk's logits."""
    tokens, rows, width = 2_100, 20_096, 8
    if dtype == "fp16":  # whose products a CPU makes slowly
        tokens, rows = 400, 512
        chunked(100)
    chunk = headloss.head_chunk(tokens, rows, "cpu") * rows
    assert 4 * chunk <= 128 << 20 and 2 * chunk <= tokens * rows
    x, head = torch.randn(tokens, width, requires_grad=True), torch.randn(rows, width, requires_grad=True)
    targets = torch.randint(rows - 85, (tokens,))
    with Largest() as largest, torch.autocast("cpu", dtype=DTYPES[dtype], enabled=dtype != "fp32"):
        with torch.no_grad():
            token_losses(x, head, targets, rows - 85)
        loss = summed_loss(x, head, targets, rows - 85)
        loss.backward()
    assert chunk * 0.9 < largest.size <= chunk, (largest.size, chunk)


@pytest.mark.parametrize("device_type", ("cpu", "cuda"))
def test_chunks_are_even_where_they_can_be(device_type):
    for tokens, rows in ((4096, 50_304), (65_536, 50_304), (12_288, 152_064), (1, 128), (2_048, 128), (4_099, 50_304)):
        size = budget.head_chunk(tokens, rows, device_type)
        most = max(256, (1 << 30 if device_type == "cuda" else 128 << 20) // (4 * rows))
        assert 1 <= size <= min(most, tokens)
        assert tokens % size == 0 or tokens == 4_099  # a prime number
        assert size == tokens or size > most / 2 - 1 or tokens == 4_099


def test_compiled_it_is_the_same_and_compiled_once(chunked):
    """Under inductor, for chunks of one shape: eager's losses and gradients to rounding."""
    seen = []

    def backend(graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        seen.append(graph)
        return compile_fx(graph, inputs)

    torch.compiler.reset()
    fused = torch.compile(headloss.softmax_gradient, dynamic=False, fullgraph=True, backend=backend)
    chunked(12)
    x, head, targets = case(65, "some")
    want = gradients(summed_loss, x, head, targets, 65, dtype="bf16")
    for _ in range(2):
        near(gradients(summed_loss, x, head, targets, 65, fused, dtype="bf16"), want, 8e-3)
    assert len(seen) == 1
    torch.compiler.reset()


def test_two_ranks_of_every_mode_compute_what_one_does():
    """fsdp, hsdp and ddp, tied and untied, in fp32 and bf16, with micro-batches and checkpointed blocks."""
    done = run("tests/head_program.py", nproc=2)
    cells = dict(re.findall(r"^(\S+) ([\d.e-]+)$", done.stdout, re.M))
    assert len(cells) == 8
    for name, off in cells.items():
        assert float(off) < (2e-2 if "bf16" in name else 2e-5), name
