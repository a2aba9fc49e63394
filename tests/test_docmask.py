"""--doc-mask: within a window each document is computed as if it stood alone, on every path and every topology."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from conftest import ROOT, SMALL, one_error, rows, run
from torch.nn.attention import flex_attention as flex

from fourscale import heldout, shards
from fourscale import model as models
from fourscale.cli import InputError
from fourscale.config import ModelConfig
from fourscale.generate import Decoding, Text, generate, sample_generator, window_start
from fourscale.model import GPT, IGNORE, document_mask, document_starts, visible_from
from fourscale.rundir import load_model, open_checkpoint

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

EOT = 64
SHAPES = {
    "gpt2": {"arch": "gpt2", "n_kv_heads": 4},
    "modern": {"arch": "modern", "n_kv_heads": 4},
    "grouped": {"arch": "modern", "n_kv_heads": 2, "qk_norm": True, "tie": False},
}
# Windows of 24 tokens; a document is opened by EOT, but for the one that the window begins within.
DOCUMENTS = {
    "several": ([3, 1, 4, 1, 5], [EOT, 9, 2, 6, 5, 3, 5], [EOT, 8, 9, 7], [EOT, 9, 3, 2, 3, 8, 4, 6]),
    "from the start": ([EOT, *range(11)], [EOT, *range(20, 31)]),
    "empty ones": ([7, 7, 1], [EOT], [EOT], [EOT, *range(17)], [EOT]),
    "only boundaries": tuple([EOT] for _ in range(24)),
}


def built(shape="gpt2", doc_mask=True, **changes):
    """A model with weights large enough that what it attends to shows."""
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 96, "ctx": 24, "vocab_size": 65}
    model = GPT(ModelConfig(**(SHAPES[shape] | sizes | {"doc_mask": doc_mask, "eot_id": EOT} | changes)))
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model.eval()


def twin(model, **changes):
    """The same weights under another config."""
    other = GPT(dataclasses.replace(model.cfg, **changes))
    other.load_state_dict(model.state_dict())
    return other.eval()


def window(name):
    return torch.tensor([[t for document in DOCUMENTS[name] for t in document]])


def gradients(model, *batches):
    """(sum of losses, gradients by name) over batches of (idx, targets)."""
    model.zero_grad(set_to_none=True)
    loss = sum(model(idx, targets).sum() for idx, targets in batches)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(a, b, tolerance=1e-5):
    assert a[0] == pytest.approx(b[0], rel=tolerance)
    largest = max(g.abs().max().item() for g in b[1].values())
    for name, g in a[1].items():
        torch.testing.assert_close(g, b[1][name], rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_is_the_sum_of_its_documents(shape, name):
    model, idx = built(shape), window(name)
    targets = idx.roll(-1, 1)  # the last token of a document predicts the end-of-text token, which opens the next
    targets[0, -1] = 5
    sizes = [len(document) for document in DOCUMENTS[name]]
    alone = list(zip(idx.split(sizes, 1), targets.split(sizes, 1), strict=True))
    together = gradients(model, (idx, targets))
    assert_same(together, gradients(model, *alone))
    torch.testing.assert_close(model(idx), torch.cat([model(part) for part, _ in alone], 1), rtol=1e-5, atol=1e-5)
    if name != "only boundaries":  # as the control: without the mask they see each other
        assert abs(gradients(twin(model, doc_mask=False), (idx, targets))[0] - together[0]) > 1e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_no_token_of_one_document_reaches_another(shape):
    model, idx = built(shape), window("several")
    free = twin(model, doc_mask=False)
    before, seen = model(idx), free(idx)
    for t in range(5):
        changed = idx.clone()
        changed[0, t] = 30 + t
        after = model(changed)
        assert torch.equal(after[:, 5:], before[:, 5:])  # to the bit
        assert not torch.equal(after[:, t:5], before[:, t:5])
        assert not torch.equal(free(changed)[:, 5:], seen[:, 5:])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_of_one_document_is_as_without_a_mask(shape):
    model = built(shape)
    free = twin(model, doc_mask=False)
    idx = torch.randint(EOT, (3, 24), generator=torch.Generator().manual_seed(1))
    idx[2, 0] = EOT  # at the very start it opens the first document
    torch.testing.assert_close(model(idx), free(idx), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(model(window("several")), free(window("several")), atol=1e-2)
    inert = twin(model, doc_mask=False, eot_id=None)
    assert torch.equal(inert(window("several")), free(window("several")))  # the id alone changes nothing


def test_starts_and_mask_by_hand():
    idx = torch.tensor([[1, 2, EOT, 3, EOT, EOT], [EOT, 1, 2, 3, 4, EOT]])
    starts = document_starts(idx, EOT)
    assert starts.tolist() == [[0, 0, 2, 2, 4, 5], [0, 0, 0, 0, 0, 5]]
    mask = document_mask(starts, head_dim=16, dropout=0.0)
    assert mask.dtype == torch.float32 and set(mask.unique().tolist()) == {0, -math.inf}
    mask = mask == 0
    document = (idx == EOT).cumsum(1)
    same = document[:, None, :, None] == document[:, None, None, :]
    assert torch.equal(mask, same & torch.ones(6, 6, dtype=torch.bool).tril())
    assert torch.equal(mask, flex.create_mask(visible_from(starts), 2, 1, 6, 6, device="cpu"))


@pytest.mark.parametrize("shape", ("gpt2", "grouped"))
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same(shape, monkeypatch):
    """The GPU's path by its uncompiled kernel: logits, losses and gradients of windows of more than one block."""
    model = built(shape, ctx=200)
    idx = torch.randint(65, (2, 200), generator=torch.Generator().manual_seed(2))  # an EOT every 65 tokens
    idx[1, 128:] = 3
    targets = idx.roll(-1, 1)
    dense = gradients(model, (idx, targets))
    made = []

    def build(*args, **kwargs):
        made.append(flex.create_block_mask(*args, **kwargs))
        return made[-1]

    # torch refuses gradients on a CPU, where no compiled kernel has them; its reference in plain operations does.
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(models, "fits_flex", lambda *_: True)
    monkeypatch.setattr(models, "compiled_flex", lambda: (build, flex.flex_attention))
    assert_same(gradients(model, (idx, targets)), dense)
    assert len(made) == 1 and made[0].shape == (2, 1, 200, 200)  # once a forward, not once a block


def test_flex_attention_is_for_training_on_a_gpu_alone(monkeypatch):
    class OnGPU:
        is_cuda, shape = True, (2, 128)

    assert models.fits_flex(OnGPU, 64, 0.0)
    assert not models.fits_flex(OnGPU, 64, 0.1) and not models.fits_flex(OnGPU, 8, 0.0)
    assert not models.fits_flex(torch.zeros(2, 128), 64, 0.0)
    with torch.no_grad():
        assert not models.fits_flex(OnGPU, 64, 0.0)


def test_where_flex_attention_does_not_compile_the_mask_takes_its_place(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("it compiles here")
    monkeypatch.setattr(models, "fits_flex", lambda *_: True)
    models.compiled_flex.cache_clear()
    model, idx = built(), window("several")
    logits = model(idx)
    model(idx)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("note: --doc-mask without flex_attention")
    monkeypatch.undo()
    models.compiled_flex.cache_clear()
    assert torch.equal(model(idx), logits)


@pytest.mark.parametrize("shape", ("gpt2", "grouped"))
def test_bf16_and_dropout_keep_documents_apart(shape):
    model, idx = built(shape, dropout=0.2), window("several")
    changed = idx.clone()
    changed[0, 2] = 30
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = model(idx), model(changed)
    assert torch.equal(a[:, 5:], b[:, 5:]) and not torch.equal(a[:, :5], b[:, :5])
    torch.testing.assert_close(a, model(idx), rtol=0.1, atol=0.1)
    model.train()
    outputs = []
    for tokens in (idx, changed):
        torch.manual_seed(0)
        outputs.append(model(tokens))
    assert torch.equal(outputs[0][:, 5:], outputs[1][:, 5:])
    x, mask = torch.randn(1, 24, 64), document_mask(document_starts(idx, EOT), 16, 0.2)
    assert not torch.equal(*(model.blocks[0].attn(x, None, mask) for _ in range(2)))  # on attention too


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_mask_is_kept_once_for_all_blocks(dtype):
    """A boolean mask would be turned into one of the queries' dtype by each block, and each kept for the backward."""

    def kept(model):
        """Bytes of the distinct tensors that the backward needs."""
        storages = {}

        def pack(t):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        idx = torch.randint(65, (2, 256), generator=torch.Generator().manual_seed(0))
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with hooks, torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(idx, idx).sum()
        assert loss.isfinite()
        return sum(storages.values())

    model = built(ctx=256, n_layers=6).train()
    mask = 2 * 256 * 256 * dtype.itemsize
    assert kept(model) - kept(twin(model, doc_mask=False).train()) < 2 * mask


def test_the_id_must_be_known_and_in_the_vocabulary():
    cfg = built().cfg
    cfg.check()
    dataclasses.replace(cfg, eot_id=0).check()
    dataclasses.replace(cfg, eot_id=99, doc_mask=False).check()  # inert
    for eot_id, words in ((None, "--doc-mask: .* --eot-id"), (65, "--eot-id 65"), (-1, "--eot-id -1")):
        with pytest.raises(InputError, match=words):
            dataclasses.replace(cfg, eot_id=eot_id).check()


@pytest.mark.parametrize("shape", SHAPES)
def test_generation_reads_a_prompt_as_training_did(shape):
    """What stands before an end-of-text token of the prompt has no influence; a window's start is a start."""
    model = built(shape)

    def greedy(prompt, n, of=model):
        return [text.ids[-1] for text in generate(of, [Text(prompt, sample_generator(0, prompt, 0))], n, Decoding(0))]

    document = [EOT, 5, 6, 7]
    texts = [greedy([*before, *document], 8) for before in ([], [1, 2, 3], [9] * 11)]
    assert texts[0] == texts[1] == texts[2]
    free = twin(model, doc_mask=False)
    assert greedy([EOT], 6) == greedy([EOT], 6, free)  # an empty prompt: one document
    ids = [EOT, *range(40)]
    for token in greedy(ids, 10):
        idx = torch.tensor([ids[window_start(len(ids), 24) :]])
        starts = document_starts(idx, EOT)[0, -1]
        assert model(idx)[0, -1].argmax() == token
        torch.testing.assert_close(model(idx)[:, -1], free(idx[:, starts:])[:, -1], rtol=1e-5, atol=1e-5)
        ids.append(token)


@pytest.mark.slow
def test_compiled_blocks_are_compiled_once_for_all_batches():
    from torch._dynamo.utils import counters

    model = built("grouped")
    idx = torch.cat([window(name) for name in ("several", "empty ones", "from the start")])
    targets = idx.roll(-1, 1).masked_fill(idx == 9, IGNORE)
    eager = gradients(model, (idx, targets))
    torch._dynamo.reset()
    counters.clear()
    for block in model.blocks:
        block.compile()
    assert_same(gradients(model, (idx, targets)), eager)
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shift in range(1, 4):
            gradients(model, (idx.roll(shift, 1), targets))
    assert counters["stats"]["unique_graphs"] == graphs == 1 and not counters["graph_break"]


@pytest.mark.slow
def test_compiled_flex_attention_is_compiled_once_for_all_batches():
    """On a CPU it has no backward: the forward, and the block masks of new documents, without a new compilation."""
    from torch._dynamo.utils import counters

    build, attend = (torch.compile(f, dynamic=False) for f in (flex.create_block_mask, flex.flex_attention))
    torch._dynamo.reset()
    counters.clear()
    q, k, v = (torch.randn(2, heads, 200, 16) for heads in (4, 2, 2))
    with torch.no_grad():
        for seed in range(4):
            idx = torch.randint(65, (2, 200), generator=torch.Generator().manual_seed(seed))
            starts = document_starts(idx, EOT)
            y = attend(q, k, v, block_mask=build(visible_from(starts), 2, None, 200, 200, "cpu"), enable_gqa=True)
            mask = document_mask(starts, 16, 0.0)
            dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            torch.testing.assert_close(y, dense, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


# ---- real runs -----------------------------------------------------------------------------------------------------

# 12 windows an update; the last topology pads its batches with rows of weight 0.
TOPOLOGIES = {
    "plain": (("--local-bsz", 12), None),
    "ddp2": (("--local-bsz", 3), 2),
    "fsdp2": (("--local-bsz", 5, "--parallel", "fsdp"), 2),
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Bytes of real text, each line a document: a window of 32 holds about two."""
    work = tmp_path_factory.mktemp("lines")
    text = "".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "fourscale").glob("[b-o]*.py")))
    documents = [line for line in text.splitlines() if line.strip()]
    (work / "lines.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents), encoding="utf-8")
    made = ("--tokenizer", "byte", "--val-fraction", 0.1, "--out", work / "data")
    run("prepare.py", "--dataset", work / "lines.jsonl", *made)
    return work / "data"


def launch(lines, out, topology, *extra, **kwargs):
    flags, nproc = TOPOLOGIES[topology]
    return run("train.py", "--data", lines, "--ckpt-dir", out, *SMALL, *flags, *extra, nproc=nproc, **kwargs)


@pytest.fixture(scope="module")
def masked(lines, tmp_path_factory):
    """The same run with --doc-mask on each topology: {name: run directory}."""
    runs = {name: tmp_path_factory.mktemp(name) / "ckpt" for name in TOPOLOGIES}
    for name, out in runs.items():
        launch(lines, out, name, "--doc-mask")
    return runs


@pytest.mark.slow
def test_every_topology_computes_the_same_updates(masked):
    reference, *others = (rows(masked[name]) for name in TOPOLOGIES)
    assert len(reference) == 20 and reference[-1]["loss"] < reference[0]["loss"] - 0.5
    for other in others:
        for a, b in zip(reference, other, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], abs=5e-5)
            assert b.get("val_loss", 0) == pytest.approx(a.get("val_loss", 0), abs=5e-5)


def test_the_held_out_loss_is_that_of_each_document_alone(masked, lines):
    model = load_model(open_checkpoint(masked["fsdp2"]))
    assert model.cfg.doc_mask and model.cfg.eot_id == 256
    contract = json.loads((masked["fsdp2"] / "run.json").read_text())["model"]
    assert contract["doc_mask"] is True and contract["eot_id"] == 256
    free, stream = twin(model, doc_mask=False), shards.open_split(lines, "val")
    nats = tokens = documents = 0
    with torch.no_grad():
        for start in heldout.eval_starts(stream.total, 32, 2_000):
            ids = torch.from_numpy(stream.windows(torch.tensor([start]).numpy(), 33))
            inputs, targets = ids[:, :-1], ids[:, 1:]
            cuts = (inputs[0] == 256).nonzero().flatten().tolist()
            for part, labels in zip(inputs.tensor_split(cuts, 1), targets.tensor_split(cuts, 1), strict=True):
                if part.numel():
                    nats, documents = nats + free(part, labels).item(), documents + 1
            tokens += 32
    assert documents > 1.3 * tokens / 32  # pieces a window
    assert rows(masked["fsdp2"])[-1]["val_loss"] == pytest.approx(nats / tokens, abs=2e-5)


@pytest.mark.slow
def test_a_resume_is_bit_equal_and_keeps_the_mask(masked, lines, tmp_path):
    def files(out):
        table = json.loads((out / "step_20" / "step.json").read_text())["files"]
        return {name: entry["sha256"] for name, entry in table.items() if name != ".metadata"}

    out = tmp_path / "ckpt"
    launch(lines, out, "plain", "--doc-mask", "--stop-after", 7)
    shutil.copytree(out, tmp_path / "changed")
    launch(lines, out, "plain", "--resume", "must")  # the run knows its mask
    assert files(out) == files(masked["plain"])
    assert [r["loss"] for r in rows(out)] == [r["loss"] for r in rows(masked["plain"])]
    error = one_error(launch(lines, tmp_path / "changed", "plain", "--no-doc-mask", "--resume", "must", code=2))
    assert "doc_mask: was True, now False" in error
