"""Perplexity of any text by any model: transformers' figure, text as prepare.py's shards, windows, shards and ranks."""

import gzip
import json
import math
import os
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, one_error, run
from test_export import FAMILIES, model_of, tokenizer_of
from test_heldout import ALONE, stream_of

import eval_ppl
import export_hf
from fourscale import encoding, foreign, heldout, rawtext, shards, sources, tokenization
from fourscale.cli import InputError, RunFailed
from fourscale.pretrained import open_pretrained

BYTE = tokenization.build("byte", lambda: iter(()))
TEXT = (
    "One line.\n\nAnother, of na\u00efve text: 1, 2.\n" + "A paragraph that goes on and on. \n" * 300 + "\n\nThe end."
)


def figures(capsys, monkeypatch, tmp_path, *flags):
    """(figures, what was said) of the door, in this process."""
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["eval_ppl.py", "--backend", "gloo", "--json", str(out), *map(str, flags)])
    capsys.readouterr()
    try:
        eval_ppl.main.__wrapped__()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return json.loads(out.read_text(encoding="utf-8")), capsys.readouterr().out


@pytest.fixture
def door(capsys, monkeypatch, tmp_path):
    return lambda *flags: figures(capsys, monkeypatch, tmp_path, *flags)


@pytest.fixture(scope="module")
def ckpt(trained):
    return trained("--eval-tokens", 1_000_000)  # the flags of test_heldout.py's run, so that it is made once


# ---- transformers


def guide(model, ids, max_length, stride):
    """(nats, targets) as Hugging Face's guide "Perplexity of fixed-length models" computes them, by the model's own
    loss; its sums are of token losses, where the guide takes a mean of means."""
    total = ids.shape[1]
    previous_end, nats, targets = 0, 0.0, 0
    for begin in range(0, total, stride):
        end = min(begin + max_length, total)
        fresh = end - previous_end
        labels = ids[:, begin:end].clone()
        labels[:, :-fresh] = -100
        with torch.no_grad():
            loss = model(ids[:, begin:end], labels=labels).loss
        count = int((labels[:, 1:] != -100).sum())  # the model shifts them by one
        nats, targets = nats + loss.double().item() * count, targets + count
        previous_end = end
        if end == total:
            return nats, targets
    raise AssertionError


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_figure(tmp_path, family):
    tokenizer, model = tokenizer_of("byte"), model_of(family, vocab_size=257)
    export_hf.publish(tmp_path / "hf", model, tokenizer, "")
    theirs, _ = export_hf.load_as_user(tmp_path / "hf")
    ids = torch.from_numpy(stream_of(333).ids)[None]
    stream = stream_of(333)
    loaded = open_pretrained(tmp_path / "hf").model()
    for ctx, stride in ((23, 23), (23, 22), (23, 7), (12, 1), (12, 12)):  # the guide's max_length is ctx + 1 <= 24
        nats, targets = guide(theirs, ids, ctx + 1, stride)
        assert nats / targets > 1
        for ours in (model, loaded):
            starts = heldout.eval_starts(stream.total, ctx, stride=stride)
            score = heldout.score(ours, stream, ctx, starts, 8, ALONE)
            if stride < ctx + 1:
                assert score.tokens == targets == 332
            assert score.loss == pytest.approx(nats / targets, abs=1e-4 * score.loss, rel=0)
    # The whole context: transformers takes no label beyond its input but by shift_labels.
    starts = heldout.eval_starts(stream.total, 24)
    nats = 0.0
    for at in range(len(starts)):
        idx, wanted = map(torch.from_numpy, heldout.window_batch(stream, starts[at : at + 1], 24))
        with torch.no_grad():
            loss = theirs(idx, labels=wanted, shift_labels=wanted).loss
        nats += loss.double().item() * int((wanted != -100).sum())
    assert heldout.score(model, stream, 24, starts, 8, ALONE).nats == pytest.approx(nats, rel=1e-5)


def test_a_hugging_face_directory_has_the_figure_of_the_checkpoint_that_it_was_made_from(
    door, data, ckpt, tmp_path, monkeypatch
):
    pretrained = open_pretrained(ckpt)
    export_hf.publish(tmp_path / "hf", pretrained.model(), pretrained.tokenizer(), "")
    own, said = door("--data", data, "--ckpt", ckpt, "--stride", 16)
    assert "other val tokens" not in said and "(update 20)" in said and "windows of 32, 16 apart" in said
    theirs, said = door("--data", data, "--ckpt", tmp_path / "hf", "--stride", 16)
    assert theirs["nats"] == pytest.approx(own["nats"], rel=1e-6)
    assert theirs["bits_per_byte"] == pytest.approx(own["bits_per_byte"], rel=1e-6)
    assert theirs["update"] is None and len(theirs["ckpt_digest"]) == 64 != own["ckpt_digest"]
    assert f"checkpoint  {tmp_path / 'hf'}\n" in said
    assert {"ctx": 32, "stride": 16, "world_size": 1}.items() <= own.items() and own["torch"] == torch.__version__
    (tmp_path / "hf" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"ids of the tokenizer byte, but .*hf holds none"):
        door("--data", data, "--ckpt", tmp_path / "hf")


# ---- text


def prepared(path, tokenizer, **options):
    """The ids that prepare.py makes of a source, and their bytes of text."""
    parts = [
        encoding.encode_chunk(c, tokenizer, 0, False) for c in sources.open_source(str(path), **options).chunks(None)
    ]
    assert not any(part.fault for part in parts)
    ids = np.concatenate([part.parts["train"].ids for part in parts])
    return ids, sum(int(part.parts["train"].text_bytes.sum()) for part in parts)


def test_text_has_the_ids_that_prepare_makes_of_it(tmp_path):
    rows = "".join(json.dumps({"body": text, "n": 1}) + "\n" for text in ("one", "", "tw\u00f6\n\n", "three"))
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "c.jsonl").write_text(rows, encoding="utf-8")
    (tmp_path / "d.csv").write_text('body,n\n"a ""word""",1\nb,2\n', encoding="utf-8")
    bpe = tokenization.build("bpe:300", lambda: iter((TEXT,)))
    for tokenizer in (BYTE, bpe):
        for name, options in (("a.txt", {}), ("[ab].txt*", {"doc_sep": "."}), ("[cd].*", {"text_field": "body"})):
            stream = rawtext.read_text(str(tmp_path / name), tokenizer, tokenizer.vocab_size, **options)
            ids, text_bytes = prepared(tmp_path / name, tokenizer, **options)
            assert np.array_equal(stream.read(0, stream.total), ids) and stream.text_bytes == text_bytes
            assert sum(shard.tokens for shard in stream.shards) == len(ids)
            assert np.array_equal(stream.windows(np.array([3, 0]), 5), [ids[3:8], ids[:5]])
    stream = rawtext.read_text(str(tmp_path / "[cd].*"), BYTE, 257, text_field="body")
    assert [(s.path.name, s.start, s.tokens) for s in stream.shards] == [("c.jsonl", 0, 17), ("d.csv", 17, 11)]
    assert (stream.documents, stream.text_bytes) == (5, 23)


def test_whole_files_are_documents(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT * 20, encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n', encoding="utf-8")
    stream = rawtext.read_text(f"{tmp_path}/*", BYTE, 257, whole_files=True)
    whole = [*(TEXT * 20).encode(), 256]
    assert stream.read(0, stream.total).tolist() == [*whole, *whole, ord("x"), 256, ord("y"), 256]
    assert stream.documents == 4 and [s.start for s in stream.shards] == [0, len(whole), 2 * len(whole)]
    assert rawtext.read_text(f"{tmp_path}/a.txt", BYTE, 257).documents > 2


def test_text_that_cannot_be_scored_is_refused_by_its_place(tmp_path):
    char = tokenization.build("char", lambda: iter(("abc \n",)))
    bad = tmp_path / "bad.txt"
    bad.write_text("abc\n" * 2000 + "\n\ncab\nd\n", encoding="utf-8")
    with pytest.raises(InputError) as e:
        rawtext.read_text(str(bad), char, char.vocab_size)
    assert str(e.value).startswith(f"{bad}:") and "character 'd' (U+0064" in str(e.value) and "\n" not in str(e.value)
    assert "only on text that its tokenizer spells" in str(e.value)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"body": "b"}\n', encoding="utf-8")
    for spec, words in (
        (rows, r"rows\.jsonl:2: no field 'text'; there are body: choose with --text-field"),
        (tmp_path / "none*.txt", r"--data .*none\*\.txt: no file matches"),
        (ROOT / "README.md", r"--data .*: can't read .*README\.md; readable are \.txt"),
    ):
        with pytest.raises(InputError, match=words):
            rawtext.read_text(str(spec), BYTE, 257)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="holds no text"):
        rawtext.read_text(str(tmp_path / "empty.txt"), BYTE, 257)
    with pytest.raises(InputError, match=r"id 256 by the model's tokenizer, the model only 200 ids"):
        rawtext.read_text(str(bad), BYTE, 200)
    assert rawtext.names_text("gone.txt") and rawtext.names_text(f"{tmp_path}/*")
    assert not rawtext.names_text(str(tmp_path)) and not rawtext.names_text("./data")


@pytest.fixture
def text(tmp_path):
    for i in range(3):
        (tmp_path / f"part{i}.txt").write_text(TEXT[i * 2500 : (i + 1) * 2500 + 1], encoding="utf-8")
    return f"{tmp_path}/part*.txt"


def test_the_door_scores_text_with_a_line_for_each_file(door, ckpt, text, tmp_path):
    found, said = door("--data", text, "--ckpt", ckpt, "--by-shard", "--split", "val", "--whole-files")
    files = sorted(tmp_path.glob("part*.txt"))
    size = sum(f.stat().st_size for f in files)
    assert found["text_bytes"] == size - 1 and found["tokens"] == size + 3 - 1  # three end-of-texts; the first unscored
    assert found["bits_per_byte"] == pytest.approx(found["nats"] / math.log(2) / (size - 1))
    assert [row["shard"] for row in found["shards"]] == [f.name for f in files]
    for name in ("tokens", "text_bytes", "windows"):
        assert sum(row[name] for row in found["shards"]) == found[name]
    assert math.fsum(row["nats"] for row in found["shards"]) == pytest.approx(found["nats"], rel=1e-12)
    assert f"note: --split val: --data {text} has no sides" in said and "text, encoded by the model's tokenizer" in said
    lines = [line.split() for line in said.splitlines() if line.startswith("  part")]
    for row, line in zip(found["shards"], lines, strict=True):
        assert line[:2] == [row["shard"], f"{row['nats_per_token']:.4f}"] and line[-1] == f"{row['tokens']:,}"
        assert line[-2] == f"{row['bits_per_byte']:.4f}"


def test_any_cut_of_the_shards_has_the_figure_to_the_bit(door, data, ckpt, tmp_path):
    own = shards.open_split(data, "val")
    ids = own.read(0, own.total).astype("<u2")
    plain, _ = door("--data", data, "--ckpt", ckpt)
    for name, at in (("two", [1000]), ("many", [1, 40, 2000, 2001, own.total - 1])):
        (tmp_path / name).mkdir()
        for i, part in enumerate(np.split(ids, at)):
            part.tofile(tmp_path / name / f"{i}.bin")
        flags = ("--ckpt", ckpt, "--data-dtype", "uint16", "--by-shard")
        cut, said = door("--data", f"{tmp_path / name}/*.bin", *flags)
        assert [cut[k] for k in ("nats", "tokens", "standard_error", "text_bytes", "bits_per_byte")] == [
            plain[k] for k in ("nats", "tokens", "standard_error", "text_bytes", "bits_per_byte")
        ]
        assert f"names don't tell two sides, all {len(at) + 1} are scored" in said
        assert sum(row["text_bytes"] for row in cut["shards"]) == plain["text_bytes"]
        assert sum(row["tokens"] for row in cut["shards"]) == plain["tokens"]
    assert [row["perplexity"] is None for row in cut["shards"]] == [True, False, False, True, False, True]
    sliding = [
        door("--data", d, "--ckpt", ckpt, "--stride", 8, *f)[0]
        for d, f in ((data, ()), (tmp_path / "many", flags[2:4]))
    ]
    assert sliding[0]["nats"] == sliding[1]["nats"] != plain["nats"]
    table, said = door("--data", data, "--data", tmp_path / "many", *flags)
    assert [len(f.get("shards", [])) for f in table] == [len(own.shards), 6, 0]
    assert table[2]["nats"] == pytest.approx(2 * plain["nats"], rel=1e-12)
    assert len([line for line in said.splitlines() if line.startswith("  ")]) == len(own.shards) + 6 + 1  # and the head


def test_names_that_tell_one_side_are_no_reason_to_score_the_other(tmp_path):
    for name in ("train.bin", "fineweb_val_0.bin", "x.bin"):
        np.zeros(9, "<u2").tofile(tmp_path / name)
    one = str(tmp_path / "train.bin")
    assert not eval_ppl.scored_whole(str(tmp_path), None)  # both sides: --split chooses
    (tmp_path / "fineweb_val_0.bin").unlink()
    assert not eval_ppl.scored_whole(str(tmp_path), None)  # a directory without held-out shards
    assert not eval_ppl.scored_whole(one, "val")
    assert eval_ppl.scored_whole(one, None) and eval_ppl.scored_whole(str(tmp_path), "train")
    assert eval_ppl.scored_whole(str(tmp_path / "x.bin"), "val")


def test_flags_for_other_data_and_impossible_windows_are_refused(door, data, ckpt, text):
    for flags, words in (
        (("--data", data, "--whole-files"), "--whole-files: is for text, and"),
        (("--data", data, "--text-field", "body"), "--text-field: is for text, and"),
        (("--data", data, "--data-dtype", "uint16"), "--data-dtype uint16: known from the manifest"),
        (("--data", text, "--data-dtype", "uint16"), r"--data-dtype: is for shards .* is text"),
        (("--data", text, "--doc-sep", "x", "--whole-files"), "--doc-sep 'x': divides what --whole-files"),
        (("--data", text, "--stride", 33), "--stride 33: leaves tokens out between windows of 32; use at most 32"),
        (("--data", text, "--ctx", 64), "--ctx 64: the model has 32 learned positions"),
    ):
        with pytest.raises(InputError, match=words):
            door(*flags, "--ckpt", ckpt)


def test_a_longer_context_of_rotary_positions_is_scored_with_a_warning(door, text, tmp_path):
    export_hf.publish(tmp_path / "hf", model_of("llama", vocab_size=257), BYTE, "")
    found, said = door("--data", text, "--ckpt", tmp_path / "hf", "--ctx", 40)
    assert "note: --ctx 40 is longer than the 24 tokens that the model was trained on" in said and found["ctx"] == 40


def test_the_same_tokenizer_in_another_file_is_the_same(tmp_path):
    spec = json.loads(BYTE._data) | {"truncation": None, "padding": None}
    twin = tokenization.Tokenizer("tokenizer.json", json.dumps(spec, indent=1).encode(), BYTE.eot_token)
    assert twin.sha256 != BYTE.sha256 and eval_ppl.same_ids(twin, BYTE)
    eval_ppl.check_tokenizer(twin.entry(), BYTE.entry(), "data", lambda: eval_ppl.same_ids(twin, BYTE))
    vocab = spec["model"]["vocab"]
    spec["model"]["vocab"] = {token: {65: 66, 66: 65}.get(i, i) for token, i in vocab.items()}  # A for B
    other = tokenization.Tokenizer("tokenizer.json", json.dumps(spec).encode(), BYTE.eot_token)
    assert not eval_ppl.same_ids(other, BYTE) and not eval_ppl.same_ids(tokenizer_of("bpe:300"), BYTE)
    bpe = tokenization.build("bpe:300", lambda: iter((TEXT,)))
    a, b = [i for i in range(bpe.vocab_size) if i not in {bpe.eot_id, *bpe.encode(foreign.TRIAL)}][:2]
    swapped = json.loads(bpe._data)  # two tokens that the trial text doesn't use
    swapped["model"]["vocab"] = {t: {a: b, b: a}.get(i, i) for t, i in swapped["model"]["vocab"].items()}
    rare = tokenization.Tokenizer("tokenizer.json", json.dumps(swapped).encode(), bpe.eot_token)
    assert rare.encode(foreign.TRIAL) == bpe.encode(foreign.TRIAL) and not eval_ppl.same_ids(rare, bpe)
    with pytest.raises(InputError, match="its tokenizer"):
        eval_ppl.check_tokenizer(other.entry(), BYTE.entry(), "data", lambda: eval_ppl.same_ids(other, BYTE))


def test_too_little_memory_is_a_line_and_not_a_trace():
    class Full(torch.nn.Module):
        def forward(self, idx, targets, per_window):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    with pytest.raises(RunFailed, match="out of memory with 4 windows of 16 tokens at once; lower --local-bsz"):
        eval_ppl.scored(Full(), stream_of(100), 16, 16, 4, ALONE)


# ---- ranks


def test_two_ranks_agree_with_one_on_text_and_shards(door, data, ckpt, text, tmp_path):
    flags = ("--data", text, "--data", data, "--ckpt", ckpt, "--stride", 8, "--by-shard")
    one, _ = door(*flags)
    out = tmp_path / "two.json"
    run("eval_ppl.py", *flags, "--backend", "gloo", "--json", out, "--local-bsz", 3, nproc=2)
    two = json.loads(out.read_text(encoding="utf-8"))
    assert [f["world_size"] for f in two] == [2] * 3
    for a, b in zip(one, two, strict=True):
        for x, y in zip([a, *a.get("shards", [])], [b, *b.get("shards", [])], strict=True):
            assert x["nats"] == pytest.approx(y["nats"], rel=1e-6) and x["tokens"] == y["tokens"] > 0
            assert x["bits_per_byte"] == pytest.approx(y["bits_per_byte"], rel=1e-6)


APART = """
import os, sys
sys.path.insert(0, sys.argv[1])
os.chdir(sys.argv[2 if os.environ["RANK"] == "0" else 3])  # as on a node with other disks
sys.argv = ["eval_ppl.py", *sys.argv[4:]]
import eval_ppl
eval_ppl.main()
"""


def test_a_rank_that_does_not_see_the_data_is_told_by_rank_0_in_one_line(data, ckpt, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "apart.py").write_text(APART, encoding="utf-8")
    flags = ("--data", data.name, "--ckpt", os.path.relpath(ckpt, data.parent), "--backend", "gloo")
    done = run(tmp_path / "apart.py", ROOT, data.parent, tmp_path / "elsewhere", *flags, nproc=2, code=1)
    assert one_error(done).startswith(f"error: rank 1: {data.name}: no such data directory")
