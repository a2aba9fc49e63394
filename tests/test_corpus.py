"""Data at training time: mixtures as free of topology as one set, foreign shards, refusals, verification."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, SMALL, command, environment, one_error, rows, run

import check
import eval_ppl
from fourscale import audit, corpus, durable, parallel, rundir, shards, tokenization
from fourscale.budget import plan
from fourscale.cli import InputError
from fourscale.config import ModelConfig, TrainConfig
from fourscale.flags import CheckDataConfig, EvalConfig
from fourscale.pretrained import open_pretrained

BYTE = tokenization.build("byte", lambda: iter(()))
# Runs of train.py one after the other in one process group: name -> flags. A line of JSON an argument list.
CELLS = """
import dataclasses, gc, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import train
from fourscale import parallel, origins
from fourscale.cli import parse
from fourscale.config import TrainConfig

topology = parallel.start("ddp", "gloo")
for line in Path(sys.argv[2]).read_text().splitlines():
    sys.argv = ["train.py", *json.loads(line)]
    flags = origins.recall(parse(TrainConfig))
    train.pretrain(flags, dataclasses.replace(topology, parallel=flags.parallel))
    gc.collect()  # and with the run its lock
parallel.stop(topology)
"""


def text_of(*names: str) -> list[str]:
    """Documents: paragraphs of modules of the standard library."""
    source = Path(os.__file__).parent
    return [p for name in names for p in (source / name).read_text(encoding="utf-8").split("\n\n")]


def write(directory: Path, texts: list[str], held_out: list[str], tokenizer=BYTE, shard_tokens=20_000) -> Path:
    """A data directory as prepare.py leaves it."""
    directory.mkdir(parents=True)
    splits = {}
    for split, documents in (("train", texts), ("val", held_out)):
        writer = shards.ShardWriter(directory, split, tokenizer.vocab_size, shard_tokens)
        ids, ends = tokenizer.encode_documents(documents)
        writer.add(ids, ends, np.array([len(d.encode()) for d in documents]))
        splits[split] = shards.split_entry(writer.finish(), writer.stream_sha.hexdigest())
    source = {"name": directory.name, "license": "PSF-2.0", "weight": 1}
    facts = {"dtype": writer.dtype.name, "sources": [source], "license": "PSF-2.0", "unigram_nats": 3.2}
    shards.write_manifest(directory, facts | {"tokenizer": tokenizer.save(directory), "splits": splits})
    return directory


def llmc(path: Path, ids: np.ndarray) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    """web and code: prepared alike; other: by another tokenizer; nanogpt, llmc, datatrove: the ids of web."""
    work = tmp_path_factory.mktemp("sets")
    web = text_of("argparse.py", "ast.py", "calendar.py"), text_of("csv.py", "shlex.py")
    write(work / "web", *web)
    write(work / "code", text_of("heapq.py", "statistics.py"), text_of("textwrap.py"))
    write(work / "other", *web, tokenizer=tokenization.build("char", lambda: iter(web[0] + web[1])))
    for name in ("nanogpt", "llmc", "datatrove"):
        (work / name).mkdir()
    for split in ("train", "val"):
        stream = shards.open_split(work / "web", split)
        ids = stream.read(0, stream.total)
        ids.astype("<u2").tofile(work / "nanogpt" / f"{split}.bin")
        llmc(work / "llmc" / f"fineweb_{split}_000000.bin", ids)
        (work / "datatrove" / split).mkdir()
        ids.astype("<u2").tofile(work / "datatrove" / split / "000_tokens.ds")
        ends = np.flatnonzero(ids == BYTE.eot_id) + 1
        ends.astype("<u8").tofile(work / "datatrove" / split / "000_tokens.ds.index")
        meta = f"{work / 'web' / 'tokenizer.json'}|2\n{len(ids)}\n"
        (work / "datatrove" / split / "000_tokens.ds.metadata").write_text(meta)
    return work


def train_cells(work: Path, cells: list[tuple[str, tuple[object, ...]]], nproc: int | None = None) -> str:
    """Train each cell into work/NAME, in one start of the processes; what they said."""
    lines = [json.dumps([*map(str, ("--ckpt-dir", work / name, *SMALL, *flags))]) for name, flags in cells]
    (work / f"cells{nproc}.jsonl").write_text("\n".join(lines))
    (work / "cells.py").write_text(CELLS)
    return run(work / "cells.py", ROOT, work / f"cells{nproc}.jsonl", nproc=nproc).stdout


def start_by_hand(world: int, script: str | Path, *args: object) -> list[subprocess.Popen[str]]:
    """The ranks of a door, which torchrun would turn each exit code of into 1."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    ranks = []
    for rank in range(world):
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(
            subprocess.Popen(
                command(str(script), *args),
                env=environment(**where),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                stdin=subprocess.DEVNULL,
            )
        )
    return ranks


def mixture(sets: Path) -> tuple[object, ...]:
    return ("--data", f"{sets / 'web'}:0.7", "--data", f"{sets / 'code'}:0.3")


@pytest.fixture(scope="module")
def runs(sets, tmp_path_factory) -> Path:
    """Run directories by name, and what the single process said in said.txt; nothing below changes them."""
    work, mixed = tmp_path_factory.mktemp("runs"), mixture(sets)
    fsdp = ("--local-bsz", 3, "--parallel", "fsdp")
    two = [
        ("ddp2", (*mixed, "--local-bsz", 6)),
        ("ddp2x5", (*mixed, "--local-bsz", 5)),
        ("fsdp2", (*mixed, *fsdp)),
        ("resumed2", (*mixed, *fsdp, "--stop-after", 7)),
        ("resumed2", ("--resume", "must", *fsdp)),
        ("resumed1", (*mixed, *fsdp, "--stop-after", 7)),
    ]
    nano = ("--data", sets / "nanogpt", "--data-dtype", "uint16")
    one = [
        ("plain", (*mixed, "--local-bsz", 12)),
        ("padded5", (*mixed, "--local-bsz", 5)),
        ("resumed1", ("--resume", "must", "--parallel", "ddp", "--local-bsz", 12)),
        ("web", ("--data", sets / "web")),
        ("nanogpt", (*nano, "--tokenizer", "byte")),
        ("bare", (*nano, "--vocab-size", 257)),
        ("datatrove", ("--data", sets / "datatrove", "--verify-data", "first")),
        ("llmc", ("--data", sets / "llmc", "--tokenizer", "byte", "--verify-data", "off")),
        ("with", ("--data", f"{sets / 'llmc'}:0.3", "--data", f"{sets / 'web'}:0.7", "--tokenizer", "byte")),
    ]
    train_cells(work, two, nproc=2)
    (work / "said.txt").write_text(train_cells(work, one))
    return work


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded5", "ddp2", "ddp2x5", "fsdp2", "resumed1"])
def test_a_mixture_computes_the_same_updates_on_every_topology(runs, name):
    reference, other = rows(runs / "plain"), rows(runs / name)
    assert len(reference) == len(other) == 20
    for a, b in zip(reference, other, strict=True):
        assert (b["tokens"], b["epochs"]) == (a["tokens"], a["epochs"])
        assert b["loss"] == pytest.approx(a["loss"], abs=5e-5)
        assert ("val_losses" in a) == ("val_losses" in b) == (a["update"] in (10, 20))
        if "val_losses" in a:
            assert b["val_loss"] == pytest.approx(a["val_loss"], abs=5e-5)
            assert b["val_losses"] == pytest.approx(a["val_losses"], abs=5e-5)
    assert reference[-1]["loss"] < reference[0]["loss"] - 0.5


def test_a_mixture_resumes_bit_for_bit(runs):
    def hashes(name):
        files = json.loads((runs / name / "step_20" / "step.json").read_text())["files"]
        return {n: entry["sha256"] for n, entry in files.items() if n != ".metadata"}

    assert hashes("resumed2") == hashes("fsdp2")
    keys = ("update", "loss", "preclip_norm", "epochs", "val_loss", "val_losses")
    pick = [[{k: r.get(k) for k in keys} for r in rows(runs / name)] for name in ("resumed2", "fsdp2")]
    assert pick[0] == pick[1]


def test_the_loss_of_a_mixture_has_one_denominator(sets, runs):
    last = rows(runs / "plain")[-1]
    # 2,000 held-out tokens by weight: 1,400 and 600 of them, in whole windows of 32.
    windows = {"web": 43, "code": 18}
    pooled = sum(n * last["val_losses"][name] for name, n in windows.items()) / sum(windows.values())
    assert last["val_loss"] == pytest.approx(pooled, abs=1e-6)
    step, receipt = (json.loads((runs / "plain" / f).read_text()) for f in ("step_20/step.json", "DONE.json"))
    for table in (step, receipt):
        assert (table["val_loss"], table["val_losses"]) == (last["val_loss"], last["val_losses"])
    totals = {name: shards.open_split(sets / name, "train").total for name in windows}
    for name, share in (("web", 0.7), ("code", 0.3)):
        n = (totals[name] - 1) // 32 - 1
        assert last["epochs"][name] == pytest.approx(240 * share / n, abs=1e-6)
    parts = json.loads((runs / "plain" / "run.json").read_text())["data"]["parts"]
    assert {name: part["weight"] for name, part in parts.items()} == {"web": "7/10", "code": "3/10"}


@pytest.mark.parametrize("name", ["nanogpt", "bare", "datatrove", "llmc"])
def test_foreign_shards_train_as_the_same_ids_prepared(runs, name):
    for a, b in zip(rows(runs / "web"), rows(runs / name), strict=True):
        assert (b["loss"], b.get("val_loss")) == (a["loss"], a.get("val_loss"))
    contract = json.loads((runs / name / "run.json").read_text())
    assert (contract["tokenizer"] is None) == (name == "bare") == (not (runs / name / "tokenizer.json").exists())
    assert json.loads((runs / name / "DONE.json").read_text())["data_verified"] is None


def test_the_receipt_says_what_was_verified(runs):
    assert json.loads((runs / "web" / "DONE.json").read_text())["data_verified"] is True
    mixed = json.loads((runs / "with" / "DONE.json").read_text())
    assert (mixed["data_verified"], mixed["unhashed"]) == (True, ["llmc"])


def test_a_run_on_bare_ids_says_so_to_its_readers(sets, runs):
    said = (runs / "said.txt").read_text()
    assert "note: no tokenizer: ids below 257 are trained on as they are, and sample.py can't" in said
    words = "this run has no tokenizer"
    assert words in one_error(run("sample.py", "--ckpt", runs / "bare", code=2))
    with pytest.raises(InputError, match=words):  # all readers ask here
        rundir.load_tokenizer(rundir.open_checkpoint(runs / "bare"))
    with pytest.raises(InputError, match="the run was trained on bare ids"):
        eval_ppl.check_tokenizer(None, BYTE.entry(), "data")
    named = run("sample.py", "--ckpt", runs / "nanogpt", "--prompt", "def ", "--max-new-tokens", 4).stdout
    assert named.startswith("def ")


@pytest.mark.slow
def test_eval_ppl_shows_a_table_and_its_pool(sets, runs, tmp_path):
    flags = ("--backend", "gloo", "--data-dtype", "uint16", "--json", tmp_path / "x.json")
    data = ("--data", sets / "web", "--data", sets / "code", "--data", sets / "nanogpt")
    shown = run("eval_ppl.py", "--ckpt", runs / "plain", *data, *flags, nproc=2).stdout
    web, code, foreign, pooled = table = json.loads((tmp_path / "x.json").read_text())
    assert pooled["nats_per_token"] == pytest.approx(
        sum(f["nats"] for f in table[:3]) / sum(f["tokens"] for f in table[:3])
    )
    assert foreign["nats"] == pytest.approx(web["nats"], rel=1e-6)  # the same ids
    assert foreign["bits_per_byte"] == pytest.approx(web["bits_per_byte"], rel=1e-6)  # bytes counted by its tokens
    assert None not in [f["bits_per_byte"] for f in table]
    assert [f["unigram_perplexity"] is None for f in table] == [False, False, True, True]
    assert code["data"] == str(sets / "code")
    assert f"note: --data {sets / 'nanogpt'}: shards without a manifest" in shown
    assert shown.splitlines()[-1].startswith("pooled")
    assert f"{pooled['perplexity']:.4f}" in shown.splitlines()[-1]
    shown = run("eval_ppl.py", "--ckpt", runs / "bare", *data[-2:], *flags).stdout
    assert "bits/byte   n/a" in shown
    assert json.loads((tmp_path / "x.json").read_text())["nats_per_token"] > 0


def test_the_first_lines_and_the_console_of_a_mixture(sets, runs, tmp_path):
    said, table = (runs / "said.txt").read_text(), rows(runs / "plain")[-1]
    losses = " | ".join(f"{name} {loss:.4f}" for name, loss in table["val_losses"].items())
    assert f"step 20 | val loss {table['val_loss']:.4f} | val ppl {np.exp(table['val_loss']):.2f} | {losses}\n" in said
    web, code = table["epochs"].values()
    assert f"7,400 tokens, epochs {web * 7_400 / 7_680:.2f} (web), {code * 7_400 / 7_680:.2f} (code) | {runs}" in said


def test_a_resume_on_other_weights_is_told_in_a_line(sets, runs, tmp_path):
    shutil.copytree(runs / "plain", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "DONE.json").unlink()
    again = ("--ckpt-dir", tmp_path / "ckpt", "--resume", "must", "--backend", "gloo")
    weights = one_error(run("train.py", "--data", f"{sets / 'web'}:3", "--data", f"{sets / 'code'}:2", *again, code=2))
    assert "(weight of --data web: was 7/10, now 3/5, weight of --data code: was 3/10, now 2/5)" in weights


# ---- opening --------------------------------------------------------------------------------------------------------


def opened(*specs: object, **flags: object) -> corpus.Corpus:
    return corpus.open_corpus([str(s) for s in specs], **flags)


def refused(words: str, *specs: object, **flags: object) -> None:
    with pytest.raises(InputError, match=words) as e:
        opened(*specs, **flags)
    assert "\n" not in str(e.value)


def test_what_does_not_fit_together_is_refused_by_name(sets, tmp_path):
    web, code, other = sets / "web", sets / "code", sets / "other"
    refused(rf"--data: 2 data sets need their shares .*--data {web}:0.7 --data {code}:0.3", web, code)
    refused(rf"--data {other}: its tokenizer \(char, .* is not that of {web} \(byte, 257 ids", f"{web}:1", f"{other}:1")
    refused("no such data directory", sets / "nowhere")
    refused(r"a shard of prepared data; name its directory", sets)
    (tmp_path / "empty").mkdir()
    refused(r"no manifest\.json", tmp_path / "empty")
    for flag in ({"val_data": "x"}, {"data_dtype": "uint16"}, {"tokenizer": "byte"}):
        name = "--" + next(iter(flag)).replace("_", "-")
        refused(rf"^{name} .*: known from the manifest of --data {web}; leave it out", web, **flag)


def test_foreign_shards_are_asked_for_what_they_do_not_say(sets, tmp_path):
    nano, llm = sets / "nanogpt", sets / "llmc"
    refused("--data-dtype uint16", nano)
    refused("--vocab-size N", nano, data_dtype="uint16")
    refused(r"--tokenizer char: is made from text", nano, data_dtype="uint16", tokenizer="char")
    refused(r"--tokenizer bpe:300: is made from text", nano, data_dtype="uint16", tokenizer="bpe:300")
    refused(r"--val-data x: whose held-out shards, of 2", f"{nano}:1", f"{llm}:1", val_data="x", data_dtype="uint16")
    # Named shards bring their tokenizer: llm.c's is gpt2, which these aren't mixed with.
    refused(r"is not that of .*web", f"{sets / 'web'}:1", f"{llm}:1")
    refused(r"no tokenizer, 257 ids", f"{sets / 'web'}:1", f"{nano}:1", data_dtype="uint16", vocab_size=257)
    shutil.copy(nano / "train.bin", tmp_path / "a.bin")
    shutil.copy(nano / "val.bin", tmp_path / "b.bin")
    both = opened(tmp_path / "a.bin", val_data=str(tmp_path / "b.bin"), data_dtype="uint16", vocab_size=257)
    assert both.absolute["val_data"] == str(tmp_path / "b.bin") and both.tokenizer is None
    assert both.parts[0].val.total == shards.open_split(sets / "web", "val").total


def test_text_of_both_sides_is_refused(sets, tmp_path):
    leak = write(tmp_path / "leak", text_of("csv.py", "shlex.py"), text_of("csv.py", "shlex.py"), shard_tokens=9_000)
    refused(rf"--data {leak}: training and held-out shards hold the same tokens", leak)
    # Trained on by one set, held out by another.
    refused(rf"--data {leak} and --data {sets / 'web'}: .*the same tokens", f"{sets / 'web'}:1", f"{leak}:1")
    linked = tmp_path / "linked"
    shutil.copytree(sets / "web", linked)
    (linked / "val_000.bin").unlink()
    os.link(linked / "train_000.bin", linked / "val_000.bin")
    manifest = json.loads((linked / "manifest.json").read_text())
    entry = manifest["splits"]["val"]["shards"]
    entry[:] = [entry[0] | {"tokens": 20_000}]
    (linked / "manifest.json").write_text(json.dumps(manifest))
    refused("val_000.bin is on both sides", linked)


@pytest.mark.parametrize(
    "harm",
    [
        lambda m: "[]",
        lambda m: "{",
        lambda m: json.dumps(m | {"splits": None}),
        lambda m: json.dumps(m | {"dtype": "str"}),
        lambda m: json.dumps(m | {"dtype": "no"}),
        lambda m: json.dumps(m | {"tokenizer": m["tokenizer"] | {"sha256": None}}),
        lambda m: json.dumps(m | {"dtype": "int16"}),
        lambda m: json.dumps(m | {"dtype": "uint32"}),
        lambda m: json.dumps(m | {"tokenizer": m["tokenizer"] | {"vocab_size": "257"}}),
        lambda m: json.dumps(m | {"tokenizer": m["tokenizer"] | {"vocab_size": 300}}),  # not that of tokenizer.json
        lambda m: json.dumps(m | {"tokenizer": m["tokenizer"] | {"eot_id": 5}}),
        lambda m: json.dumps(m | {"tokenizer": m["tokenizer"] | {"kind": 5}}),
        lambda m: json.dumps(m | {"tokenizer": m["tokenizer"] | {"eot_token": ["a"]}}),
        lambda m: json.dumps({k: v for k, v in m.items() if k != "tokenizer"}),
        lambda m: json.dumps(m | {"tokenizer": {k: v for k, v in m["tokenizer"].items() if k != "eot_token"}}),
        lambda m: json.dumps(m | {"splits": m["splits"] | {"val": {"shards": 3}}}),
        lambda m: json.dumps(m | {"splits": m["splits"] | {"val": m["splits"]["val"] | {"stream_sha256": None}}}),
        lambda m: json.dumps(m | {"splits": {s: {"shards": [{"file": 1, "tokens": "x"}]} for s in ("train", "val")}}),
    ],
)  # fmt: skip
def test_a_malformed_manifest_is_one_line(sets, tmp_path, harm):
    broken = tmp_path / "broken"
    shutil.copytree(sets / "code", broken)
    manifest = json.loads((broken / "manifest.json").read_text())
    (broken / "manifest.json").write_text(harm(manifest))
    refused(rf"{broken}/manifest\.json: .*delete {broken} and run prepare\.py again", broken)
    report = check.check_data(str(broken), CheckDataConfig((str(broken),)))
    lines = [line["text"] for line in report.checks if line["status"] == "FAIL"]
    assert lines and all("manifest.json: " in line and "\n" not in line for line in lines)


@pytest.mark.parametrize(
    "change", [{"dtype": "int16"}, {"tokenizer": 3}, {"splits": {}}, {"unigram_nats": "3"}], ids=lambda c: next(iter(c))
)
def test_eval_ppl_says_what_is_malformed_in_a_line(sets, runs, tmp_path, change):
    shutil.copytree(sets / "code", tmp_path / "code")
    path = tmp_path / "code" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    words = r"manifest\.json: (its|lacks).*; restore it, or delete"
    with pytest.raises(InputError, match=words) as e:
        eval_ppl.open_data(str(tmp_path / "code"), EvalConfig(), open_pretrained(runs / "web"))
    assert "\n" not in str(e.value)
    if "dtype" in change:
        done = run("eval_ppl.py", "--data", tmp_path / "code", "--ckpt", runs / "web", "--backend", "gloo", code=2)
        assert str(e.value) in one_error(done)
        flags = ("--data", tmp_path / "code", "--ckpt-dir", tmp_path / "ckpt", *SMALL)
        assert str(e.value) in one_error(run("train.py", *flags, code=2))


def test_both_sides_hold_a_window_or_are_refused(sets, tmp_path):
    short = write(tmp_path / "short", text_of("csv.py"), ["few words"])
    data = opened(short)
    with pytest.raises(InputError, match=r"--data .*short: its held-out side holds 10 tokens, .* ctx \+ 1 = 33: lower"):
        data.order(32, 0, "epoch")
    data.order(9, 0, "epoch")
    with pytest.raises(InputError, match=r"its training side holds [\d,]+ tokens"):
        opened(sets / "web").order(1_000_000, 0, "epoch")


def test_an_id_outside_the_vocabulary_names_the_shard(sets, tmp_path):
    shutil.copytree(sets / "code", tmp_path / "code")
    with (tmp_path / "code" / "train_001.bin").open("r+b") as f:
        f.seek(2 * 17)
        f.write((999).to_bytes(2, "little"))
    data = opened(f"{sets / 'web'}:1", f"{tmp_path / 'code'}:1")
    parts, starts = np.array([0, 1, 0, 1]), np.array([0, 0, 40, 20_000])
    with pytest.raises(InputError, match=r"code/train_001\.bin: id 999 at token 17 is outside the vocabulary of 257"):
        data.windows(parts, starts, 33)
    starts[3] = 100
    out = data.windows(parts, starts, 33)
    for k, part in enumerate(data.parts):
        assert np.array_equal(out[parts == k], part.train.windows(starts[parts == k], 33))


def test_parts_have_names_that_tell_them_apart(sets, tmp_path):
    shutil.copytree(sets / "web", tmp_path / "web")
    assert [p.name for p in opened(f"{sets / 'web'}:1", f"{sets / 'code'}:1").parts] == ["web", "code"]
    both = opened(f"{sets / 'web'}:1", f"{tmp_path / 'web'}:3")
    assert [p.name for p in both.parts] == [f"{sets.name}/web", f"{tmp_path.name}/web"]
    assert [p.weight for p in both.parts] == [Fraction(1, 4), Fraction(3, 4)]
    assert both.absolute["data"] == (f"{sets / 'web'}:1", f"{tmp_path / 'web'}:3")
    (tmp_path / "link").symlink_to(sets / "web")
    same = opened(f"{sets / 'web'}:1", f"{tmp_path / 'link'}:1")
    assert [p.name for p in same.parts] == ["web", "web#2"]
    kept = corpus.open_corpus([str(sets / "web")], names=["as in the run"])
    assert kept.parts[0].name == "as in the run"


def test_a_run_finds_its_data_again(sets, runs):
    for name in ("plain", "bare", "web", "with"):
        contract = durable.read_json(runs / name / "run.json")
        assert corpus.of_run(contract).contract() == contract["data"]
    changed = json.loads(json.dumps(contract).replace('"val_digest": "', '"val_digest": "0'))
    assert corpus.of_run(changed) is None
    old = durable.read_json(runs / "web" / "run.json")
    old["config"] = {"data": str(sets / "web")}  # as runs before mixtures wrote it
    assert corpus.of_run(old) is not None


def test_document_masks_know_the_end_of_text(sets):
    its = opened(sets / "web").eot_id

    def filled(of_data=its, **flags):
        cfg = TrainConfig(model=ModelConfig(d_model=32, n_layers=1, n_heads=2, ctx=32, **flags))
        return plan(cfg, 257, 1, "cpu", "fp32", of_data).cfg.model.eot_id

    assert filled(doc_mask=True) == filled(doc_mask=True, eot_id=256) == 256
    assert filled(None, doc_mask=True, eot_id=10) == 10
    for other in (0, 5):
        with pytest.raises(
            InputError, match=f"^--eot-id {other}: the data's tokenizer ends documents with id 256; leave"
        ):
            filled(doc_mask=True, eot_id=other)
    assert filled() is filled(eot_id=10) is None  # no part of the contract where it has no effect
    with pytest.raises(InputError, match=r"--doc-mask: .*--eot-id"):
        plan(TrainConfig(model=ModelConfig(doc_mask=True)), 257, 1, "cpu", "fp32", None)


def test_a_run_from_before_a_flag_existed_is_the_same_experiment(runs):
    old, new = durable.read_json(runs / "web" / "run.json"), durable.read_json(runs / "web" / "run.json")
    for name in ("doc_mask", "eot_id"):
        del old["model"][name]
    assert rundir.differences(old, new) == []
    new["model"]["doc_mask"] = True
    assert rundir.differences(old, new) == ["doc_mask: was False, now True"]


def test_other_data_and_another_tokenizer_are_short_lines(runs):
    web, mixed, bare = (durable.read_json(runs / name / "run.json") for name in ("web", "plain", "bare"))
    other = json.loads(json.dumps(web)) | {"data": {"train_digest": "ab" * 32, "val_digest": web["data"]["val_digest"]}}
    was = web["data"]["train_digest"][:8]
    assert rundir.differences(web, other) == [
        f"--data is another data set: train tokens differ (sha256 {was}… then, abababab… now)"
    ]
    assert rundir.differences(mixed, web)[0] == "--data is another mixture: of 2 data sets then, 1 now"
    assert rundir.differences(bare, web)[2].startswith("the data's tokenizer: was none, now sha256 ")
    changed = json.loads(json.dumps(mixed))
    changed["data"]["parts"]["code"] |= {"val_digest": "cd" * 32, "weight": "1/2"}
    first, second = rundir.differences(mixed, changed)
    assert first.startswith("--data code is another data set: held-out tokens differ") and "cdcdcdcd… now" in first
    assert second == "weight of --data code: was 3/10, now 1/2"


# ---- verification ---------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """One bit, so that the id stays within the vocabulary."""
    content = bytearray(path.read_bytes())
    content[len(content) // 4 * 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def alone():
    topology = parallel.start("ddp", "gloo")
    yield topology
    parallel.stop(topology)


def test_verification_reads_everything_first_in_the_background_or_not(sets, tmp_path, alone):
    data = opened(f"{sets / 'web'}:1", f"{sets / 'code'}:1")
    for mode, expected in (("first", True), ("background", True), ("off", None)):
        verification = corpus.Verification(data, mode, alone)
        assert not verification.failed
        assert verification.close(patient=True) == {"data_verified": expected}
    shutil.copytree(sets / "code", tmp_path / "code")
    flip(tmp_path / "code" / "train_001.bin")
    data = opened(f"{sets / 'web'}:1", f"{tmp_path / 'code'}:1")  # sizes are right: nothing is seen at once
    words = r"code/train_001\.bin: its content has changed since it was written \(sha256\).*restore"
    with pytest.raises(InputError, match=words):
        corpus.Verification(data, "first", alone)
    verification = corpus.Verification(data, "background", alone)
    with pytest.raises(InputError, match=words):
        verification.close(patient=True)
    assert verification.failed


def replace(directory: Path, other: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(other, directory)


@pytest.mark.parametrize("mode", ["first", "background"])
@pytest.mark.parametrize("when", ["before", "while"])
def test_valid_data_that_were_put_in_place_are_not_those_of_the_run(sets, tmp_path, alone, monkeypatch, mode, when):
    shutil.copytree(sets / "web", tmp_path / "web")
    data = opened(f"{sets / 'code'}:1", f"{tmp_path / 'web'}:1")
    data.parts[1].train.read(0, 9)  # a file that stays open
    words = rf"^{tmp_path / 'web'}: was replaced by other data since the run began;"
    if when == "before":
        replace(tmp_path / "web", sets / "code")
    else:
        read = audit.blocks

        def blocks(stream, shard, *rest):
            yield from read(stream, shard, *rest)
            if shard is data.parts[1].train.shards[-1]:  # the last block: the files are right to the end
                replace(tmp_path / "web", sets / "code")

        monkeypatch.setattr(audit, "blocks", blocks)
    with pytest.raises(InputError, match=words):
        corpus.Verification(data, mode, alone).close(patient=True)


def test_one_directory_opened_twice_is_compared_twice(sets, tmp_path, alone):
    shutil.copytree(sets / "web", tmp_path / "web")
    old, new = opened(tmp_path / "web"), None
    replace(tmp_path / "web", sets / "code")
    new = opened(tmp_path / "web")
    both = corpus.Corpus([*old.parts, *new.parts], old.tokenizer, 257, {}, [])
    with pytest.raises(InputError, match="was replaced by other data"):
        corpus.Verification(both, "first", alone)


def test_what_the_run_reads_is_verified_not_what_was_put_in_its_place(sets, tmp_path, alone):
    shutil.copytree(sets / "web", tmp_path / "web")
    shard = tmp_path / "web" / "train_001.bin"
    good = shard.read_bytes()
    flip(shard)
    data = opened(tmp_path / "web")
    data.parts[0].train.read(20_000, 9)
    (tmp_path / "good.bin").write_bytes(good)
    (tmp_path / "good.bin").replace(shard)  # the run keeps on reading the damaged file
    with pytest.raises(InputError, match=r"train_001\.bin: its content has changed"):
        corpus.Verification(data, "first", alone)


@pytest.mark.parametrize("mode", ["first", "background"])
def test_a_verification_that_breaks_down_is_a_problem(sets, alone, monkeypatch, mode):
    def broken(*_, **__):
        raise RecursionError("two\nlines")

    monkeypatch.setattr(audit, "verify", broken)
    words = rf"^--data {sets / 'web'}: its verification broke down \(RecursionError: two lines\);"
    with pytest.raises(InputError, match=words):
        corpus.Verification(opened(sets / "web"), mode, alone).close(patient=True)


def test_a_thread_that_may_not_lower_its_priority_still_reads(sets, alone, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "not permitted")

    monkeypatch.setattr(os, "setpriority", refuse, raising=False)
    verification = corpus.Verification(opened(sets / "web"), "background", alone)
    assert verification.close(patient=True) == {"data_verified": True}


# train.py with a verification that reads on until it is told to stop, and says that it does.
ENDLESS = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
import train
from fourscale import audit

def verify(data_dir, on_bytes, stop, first, opened):
    Path(sys.argv[0]).with_suffix(".reads").touch()
    while not stop():
        on_bytes(1)
        time.sleep(0.01)
    raise audit.Stopped

audit.verify = verify
train.main()
"""


@pytest.mark.parametrize(
    ("number", "world", "whom"),
    [(signal.SIGTERM, 1, [0]), (signal.SIGINT, 2, [0, 1]), (signal.SIGUSR1, 2, [1])],  # rank 1 reads nothing
)
def test_a_stop_while_data_are_verified_first_is_answered_at_once(sets, tmp_path, number, world, whom):
    (tmp_path / "endless.py").write_text(ENDLESS)
    flags = ("--data", sets / "web", "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--verify-data", "first")
    ranks = start_by_hand(world, tmp_path / "endless.py", ROOT, *flags)
    deadline = time.monotonic() + 60
    while not (tmp_path / "endless.reads").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert [r.poll() for r in ranks] == [None] * world
    for rank in whom:
        ranks[rank].send_signal(number)
    try:
        errs = [r.communicate(timeout=30)[1] for r in ranks]
    finally:
        for r in ranks:
            r.kill()
    assert [r.returncode for r in ranks] == [130] * world, errs  # there is no checkpoint
    stopped = json.loads((tmp_path / "ckpt" / "STOPPED.json").read_text())
    assert (stopped["update"], stopped["data_verified"]) == (0, False)
    assert stopped["by"] == (signal.Signals(number).name if 0 in whom else "a signal to another rank")
    assert not list((tmp_path / "ckpt").glob("step_*"))


def test_an_end_does_not_wait_for_a_long_verification(sets, tmp_path, alone):
    slow = write(tmp_path / "slow", ["x" * 1_000] * 20_000, ["y" * 1_000] * 2, shard_tokens=10**8)
    verification = corpus.Verification(opened(slow), "background", alone)
    assert verification.close(patient=False)["data_verified"] in (True, False)
    assert not verification._thread.is_alive()
    interrupted = corpus.Verification(opened(slow), "off", alone)
    interrupted.active, interrupted._thread = True, None
    interrupted._finished = False
    assert interrupted.close(patient=True) == {"data_verified": False}


def test_a_flipped_bit_ends_the_run_on_every_rank_and_saves_nothing(sets, tmp_path):
    shutil.copytree(sets / "web", tmp_path / "web")
    flip(tmp_path / "web" / "train_001.bin")
    flags = ("--data", tmp_path / "web", "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--tokens", 10**9, "--eval-every", 0)
    ranks = start_by_hand(2, "train.py", *flags)
    errs = [r.communicate(timeout=120)[1] for r in ranks]
    assert [r.returncode for r in ranks] == [2, 2], errs
    message = [line for line in errs[0].splitlines() if line.startswith("error: ")]
    assert len(message) == 1 and "train_001.bin: its content has changed" in message[0] and "restore" in message[0]
    assert "error" not in errs[1]
    assert not list((tmp_path / "ckpt").glob("step_*")) and not list((tmp_path / "ckpt").glob("[DS]*.json"))


def test_verified_first_nothing_is_written_for_bad_data(sets, tmp_path):
    shutil.copytree(sets / "web", tmp_path / "web")
    flip(tmp_path / "web" / "val_000.bin")
    flags = ("--data", tmp_path / "web", "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--verify-data", "first")
    assert "val_000.bin: its content has changed" in one_error(run("train.py", *flags, code=2))
    assert not list((tmp_path / "ckpt").glob("*.json"))
