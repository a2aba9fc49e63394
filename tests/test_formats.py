"""Shards of nanoGPT, llm.c and datatrove: read as they are, and what doesn't fit or can't be known is one line."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import eval_ppl
from fourscale import formats, shards, tokenization
from fourscale.cli import InputError
from fourscale.flags import EvalConfig
from fourscale.formats import is_foreign, open_foreign, sampled_digest
from fourscale.shards import Shard, TokenStream

IDS = np.random.default_rng(0).integers(0, 50_257, 5000)


def llmc(path, ids, magic=20240520, version=1, dtype="<u2", count=None, order="<i4"):
    header = np.zeros(256, order)
    header[:3] = magic, version, len(ids) if count is None else count
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(ids).astype(dtype).tobytes())
    return path


def nanogpt(path, ids, dtype="<u2"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.asarray(ids).astype(dtype).tobytes())
    return path


def datatrove(path, ids, dtype="<u2", tokenizer="gpt2", stated=None, ends=None, metadata=True, index=True):
    nanogpt(path, ids, dtype)
    if metadata:
        count = len(ids) if stated is None else stated
        Path(f"{path}.metadata").write_text(f"{tokenizer}|{np.dtype(dtype).itemsize}\n{count}\n{count} T")
    if index:
        Path(f"{path}.index").write_bytes(np.array(ends or [7, len(ids)], "<u8").tobytes())
    return path


def refused(match, *args, **kwargs):
    with pytest.raises(InputError, match=match) as e:
        open_foreign(*(str(a) if isinstance(a, Path) else a for a in args), **kwargs)
    assert "\n" not in str(e.value)
    return str(e.value)


def whole(stream):
    return stream.read(0, stream.total)


# ---- what is read


def test_nanogpt(tmp_path):
    nanogpt(tmp_path / "train.bin", IDS)
    nanogpt(tmp_path / "val.bin", IDS[:100])
    assert is_foreign(tmp_path)
    found = open_foreign(str(tmp_path), None, "uint16")
    assert (found.format, found.dtype, found.tokenizer) == ("nanogpt", "uint16", None) and "--vocab-size" in found.ask
    train, val = found.streams["train"], found.streams["val"]
    assert np.array_equal(whole(train), IDS) and np.array_equal(whole(val), IDS[:100])
    assert (train.vocab_size, train.text_bytes) == (65_536, None)
    assert open_foreign(str(tmp_path), None, "uint16", 50_257).streams["val"].vocab_size == 50_257
    message = refused(r"train\.bin: no header", tmp_path)
    assert "--data-dtype uint16" in message
    (tmp_path / "val.bin").write_bytes(b"odd")
    refused(r"val\.bin: 3 bytes are no whole number of uint16", tmp_path, None, "uint16")


@pytest.mark.parametrize(("stored", "asked"), (("<u4", "uint16"), ("<u2", "uint32")))
def test_the_wrong_width_is_seen(tmp_path, stored, asked):
    for name in ("train.bin", "val.bin"):
        nanogpt(tmp_path / name, IDS, stored)
    right = "uint32" if asked == "uint16" else "uint16"
    refused(f"read as {asked}, .* pass --data-dtype {right}", tmp_path, None, asked)
    assert np.array_equal(whole(open_foreign(str(tmp_path), None, right).streams["train"]), IDS)


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


def test_meta_pkl_is_never_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    for name in ("train.bin", "val.bin"):
        nanogpt(tmp_path / name, IDS % 65)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    assert "--dataset TEXT" in refused(r"meta\.pkl is a pickle, which can run code, and isn't opened", tmp_path)
    (tmp_path / "input.txt").write_text("text")
    advice = f"python prepare.py --dataset {tmp_path}/input.txt --tokenizer char --out NEW makes the same ids"
    for line in (refused("meta.pkl", tmp_path), open_foreign(str(tmp_path), None, "uint16").ask):
        assert "isn't opened" in line
        assert 0 < line.index(advice) < line.index("sample.py") < line.index("--data-dtype uint16 --vocab-size 65 ")
    # once the number of ids is given, only what is still missing is asked for
    assert "vocab" not in refused("pass --data-dtype uint16", tmp_path, None, "auto", 65)
    assert not (tmp_path / "exploded").exists()
    pickle.loads((tmp_path / "meta.pkl").read_bytes())
    assert (tmp_path / "exploded").exists()  # it would have run code


@pytest.mark.parametrize("dtype", ("<u2", "<u4"))
def test_the_least_vocabulary_of_ids_with_a_pickle(tmp_path, monkeypatch, dtype):
    nanogpt(tmp_path / "train.bin", np.resize(np.arange(90), 100_000), dtype)
    nanogpt(tmp_path / "val.bin", np.r_[np.resize(np.arange(90), 50_000), 99], dtype)
    (tmp_path / "meta.pkl").write_bytes(b"")
    name = np.dtype(dtype).name
    assert f"--data-dtype {name} --vocab-size 100 trains" in refused("the highest is 99", tmp_path)
    monkeypatch.setattr(formats, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(formats, "SAMPLE_BYTES", 64)
    assert "--vocab-size 100 trains" in refused("in samples is 99, so N may be larger", tmp_path)


def test_llmc_and_modded_nanogpt(tmp_path):
    for i, part in enumerate(np.split(IDS[:4500], 3), 1):
        llmc(tmp_path / f"fineweb_train_{i:06d}.bin", part)
    llmc(tmp_path / "fineweb_val_000000.bin", IDS[4500:])
    found = open_foreign(str(tmp_path))
    assert (found.format, found.dtype, found.tokenizer) == ("llm.c", "uint16", "gpt2")
    assert np.array_equal(whole(found.streams["train"]), IDS[:4500])
    assert np.array_equal(whole(found.streams["val"]), IDS[4500:])
    windows = found.streams["train"].windows(np.array([1490, 2999]), 20)  # across files
    assert np.array_equal(windows, [IDS[1490:1510], IDS[2999:3019]])
    globbed = open_foreign(f"{tmp_path}/fineweb_train_*.bin", f"{tmp_path}/fineweb_val_000000.bin")
    assert {k: s.digest for k, s in globbed.streams.items()} == {k: s.digest for k, s in found.streams.items()}
    refused("--data-dtype uint32: .* says uint16", tmp_path, None, "uint32")
    assert open_foreign(str(tmp_path), None, "uint16").dtype == "uint16"


def test_llama3_shards_ask_for_the_tokenizer(tmp_path):
    for name in ("t_train.bin", "t_val.bin"):
        llmc(tmp_path / name, IDS + 70_000, 20240801, 7, "<u4")
    found = open_foreign(str(tmp_path))
    assert (found.dtype, found.tokenizer) == ("uint32", None) and "--vocab-size 128256" in found.ask
    assert np.array_equal(whole(found.streams["train"]), IDS + 70_000)


@pytest.mark.parametrize(
    ("magic", "named", "fits", "others", "remedy"),
    (
        ((20240520, 1, "<u2"), "gpt2", (50_257,), (257, 50_304, 128_256), "leave the flag out"),
        ((20240801, 7, "<u4"), "Llama 3's", (128_256, 128_264), (257, 50_257), "name Llama 3's tokenizer.json"),
    ),
)
def test_the_header_names_the_tokenizer(tmp_path, magic, named, fits, others, remedy):
    for name in ("train.bin", "val.bin"):
        llmc(tmp_path / name, IDS, *magic)
    found = open_foreign(str(tmp_path))
    assert (found.named, found.vocab_size) == (named, fits[0])
    for size in fits:
        found.refuse_other("DIR", "x", size)
    for size in others:
        with pytest.raises(InputError, match=rf"--tokenizer x: has {size:,} ids, .* says {named} .*{remedy}"):
            found.refuse_other("DIR", "x", size, fits[0])
        found.refuse_other("DIR", "x", size, size)  # said with --vocab-size too
    for path in tmp_path.iterdir():
        nanogpt(path, IDS)
    open_foreign(str(tmp_path), None, "uint16").refuse_other("DIR", "x", 257)  # names none


@pytest.mark.parametrize(
    ("how", "message"),
    (
        ({"version": 2}, "magic 20240520 version 2, this code reads version 1"),
        ({"count": 5001}, r"11,024 bytes, but its header has 5,001 tokens of uint16 \(11,026 bytes\)"),
        ({"order": ">i4"}, "big-endian"),
        ({"magic": 20240326, "version": 3}, "magic 20240326, which is not one of tokens"),
        ({"magic": 20240801, "version": 7, "dtype": "<u4"}, "uint32, Llama 3's, but train_0.bin is llm.c, uint16"),
    ),
)
def test_headers_that_do_not_fit(tmp_path, how, message):
    for name in ("train_0.bin", "train_1.bin", "val_0.bin"):
        llmc(tmp_path / name, IDS)
    llmc(tmp_path / "train_1.bin", IDS, **how)
    assert "train_1.bin" in refused(message, tmp_path)


@pytest.mark.parametrize("dtype", ("<u2", "<u4"))
def test_datatrove(tmp_path, dtype):
    ids = IDS if dtype == "<u2" else IDS + 70_000
    datatrove(tmp_path / "train" / "00000.ds", ids[:3000], dtype)
    datatrove(tmp_path / "train" / "00001.ds", [], dtype, ends=[0])  # a task without documents
    datatrove(tmp_path / "train" / "00002.ds", ids[3000:], dtype)
    datatrove(tmp_path / "val" / "00000.ds", ids[:50], dtype)
    found = open_foreign(str(tmp_path))
    assert (found.format, found.tokenizer, found.notes) == ("datatrove", "gpt2", [])
    assert found.dtype == {"<u2": "uint16", "<u4": "uint32"}[dtype]
    assert np.array_equal(whole(found.streams["train"]), ids) and np.array_equal(whole(found.streams["val"]), ids[:50])
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_foreign(str(tmp_path)).tokenizer == str(tmp_path / "tokenizer.json")


def test_datatrove_metadata_that_does_not_fit_or_is_missing(tmp_path):
    train, val = tmp_path / "train.ds", tmp_path / "val.ds"
    datatrove(val, IDS)
    for how, message in (
        ({"stated": 4999}, r"5,000 tokens of uint16 \(10,000 bytes\), but its \.metadata says 4,999"),
        ({"ends": [7, 5001]}, r"its \.index says 5,001"),
        ({"index": False}, r"no train\.ds\.index, which datatrove writes last"),
    ):
        Path(f"{train}.index").unlink(missing_ok=True)
        datatrove(train, IDS, **how)
        if how == {"index": False}:
            datatrove(tmp_path / "train2.ds", IDS)
        assert "train.ds" in refused(message, tmp_path)
    (tmp_path / "train2.ds.metadata").unlink()
    for path in (tmp_path / "train2.ds", tmp_path / "train2.ds.index"):
        path.unlink()
    for path in (train, val):
        Path(f"{path}.index").unlink(missing_ok=True)
        Path(f"{path}.metadata").unlink()
    refused("no .metadata tells its dtype; pass --data-dtype", tmp_path)
    found = open_foreign(str(tmp_path), None, "uint16")
    assert found.tokenizer is None and any("without .index" in note for note in found.notes)
    datatrove(train, IDS, tokenizer="Unknown Tokenizer|2", index=False)
    datatrove(val, IDS[:9], tokenizer="Unknown Tokenizer|2", index=False)
    assert open_foreign(str(tmp_path)).tokenizer is None
    Path(f"{train}.metadata").write_text("nonsense")
    refused(r"train\.ds\.metadata: not datatrove's metadata", tmp_path)


# ---- which side


def test_sides_that_names_do_not_tell(tmp_path):
    for i in range(3):
        llmc(tmp_path / f"part_{i}.bin", IDS[i * 1000 : i * 1000 + 1000])
    refused("says neither train nor val; name the held-out shards with --val-data", tmp_path)
    found = open_foreign(str(tmp_path), str(tmp_path / "part_1.bin"))
    assert np.array_equal(whole(found.streams["train"]), np.r_[IDS[:1000], IDS[2000:3000]])
    assert np.array_equal(whole(found.streams["val"]), IDS[1000:2000])
    refused("no held-out shards among part_train.bin", llmc(tmp_path / "x" / "part_train.bin", IDS))
    refused("--val-data .*nothing: no .*bin", tmp_path, tmp_path / "nothing")
    refused("no .*bin or .*ds there", tmp_path / "nothing")


def test_one_file_on_both_sides(tmp_path):
    path = llmc(tmp_path / "train.bin", IDS)
    refused("the same files as --data", path, path)
    os.link(path, tmp_path / "val.bin")
    refused(r"val\.bin: the same file is on the training side", tmp_path)


def test_mixed_kinds(tmp_path):
    llmc(tmp_path / "train.bin", IDS)
    nanogpt(tmp_path / "val.bin", IDS)
    refused(r"has format llm\.c, the held-out val\.bin nanogpt", tmp_path, None, "uint16")


def test_prepared_data_is_not_foreign_and_unfinished_data_never_trained_on(tmp_path):
    nanogpt(tmp_path / "train_000.bin", IDS)
    nanogpt(tmp_path / "val_000.bin", IDS[:99])
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(r"without manifest\.json, so unfinished", tmp_path, None, "uint16")
    shards.write_manifest(tmp_path, {})
    assert not is_foreign(tmp_path) and not is_foreign(tmp_path / "absent")
    refused("a shard of prepared data; name its directory", tmp_path / "train_000.bin", tmp_path / "val_000.bin")


# ---- eval_ppl.py


class Ckpt:
    """What eval_ppl.open_data asks of a model, and of the checkpoint that it comes from."""

    def __init__(self, data, vocab_size=257, tokenizer="byte", **config):
        self.cfg, self.ckpt = type("Model", (), {"vocab_size": vocab_size}), self
        self.tokenizer_entry = tokenizer and tokenization.build(tokenizer, lambda: iter(())).entry()
        self.run = {"config": {"data": data, **config}, "data": {}}


def test_eval_ppl_knows_how_the_runs_own_shards_were_opened(tmp_path):
    nanogpt(tmp_path / "a.bin", IDS % 257)
    nanogpt(tmp_path / "b.bin", IDS[:100] % 257)
    flags = {"val_data": str(tmp_path / "b.bin"), "data_dtype": "uint16"}
    own, mixed = (Ckpt(data, **flags) for data in ([str(tmp_path)], [f"{tmp_path}:0.7", "/elsewhere:0.3"]))
    for ckpt in (own, mixed):
        stream, _ = eval_ppl.open_data(f"{tmp_path}/../{tmp_path.name}", EvalConfig(), ckpt)
        assert np.array_equal(whole(stream), IDS[:100] % 257)
    stream, _ = eval_ppl.open_data(str(tmp_path), EvalConfig(data_dtype="uint32"), own)
    assert stream.dtype == np.uint32  # what is said counts
    (tmp_path / "meta.pkl").write_bytes(b"")
    with pytest.raises(InputError, match="pass --data-dtype uint16") as e:
        eval_ppl.open_data(str(tmp_path), EvalConfig(val_data=flags["val_data"]), Ckpt(["/elsewhere"], **flags))
    assert "--vocab-size" not in str(e.value)


def test_eval_ppl_compares_the_headers_tokenizer(tmp_path):
    for name in ("train.bin", "val.bin"):
        llmc(tmp_path / name, IDS % 257)
    with pytest.raises(InputError, match=r"its tokenizer \(gpt2.* is not that of the checkpoint"):
        eval_ppl.open_data(str(tmp_path), EvalConfig(), Ckpt(["/elsewhere"]))
    trained_on = Ckpt([str(tmp_path)])  # with --tokenizer byte --vocab-size 257
    trained_on.run["data"] = {"val_digest": open_foreign(str(tmp_path)).streams["val"].digest}
    eval_ppl.open_data(str(tmp_path), EvalConfig(), trained_on)
    for name in ("train.bin", "val.bin"):
        llmc(tmp_path / name, IDS % 257, 20240801, 7, "<u4")
    with pytest.raises(InputError, match=r"header says Llama 3's 128,256 ids, the checkpoint's tokenizer has 257"):
        eval_ppl.open_data(str(tmp_path), EvalConfig(), Ckpt(["/elsewhere"]))


# ---- digest


def test_the_digest_names_the_content_for_any_cut(tmp_path, monkeypatch):
    def stream(*parts):
        pieces, start = [], 0
        for i, part in enumerate(parts):
            pieces.append(Shard(nanogpt(tmp_path / f"{len(parts)}_{i}.bin", part), len(part), start))
            start += len(part)
        return TokenStream("train", pieces, np.dtype("<u2"), 50_257, None, "")

    large = np.resize(IDS, 3_000_000)
    for ids in (IDS, large):
        digest = sampled_digest(stream(ids))
        assert digest.startswith("sampled-") and sampled_digest(stream(*np.split(ids, [7, 1234]))) == digest
        for position in (0, len(ids) - 1):
            other = ids.copy()
            other[position] ^= 1
            assert sampled_digest(stream(other)) != digest
        assert sampled_digest(stream(ids[:-1])) != digest


def test_the_notes_are_json(tmp_path):
    datatrove(tmp_path / "train.ds", IDS, tokenizer="somebody/some-tokenizer")
    datatrove(tmp_path / "val.ds", IDS[:99], tokenizer="somebody/some-tokenizer")
    found = open_foreign(str(tmp_path))
    assert found.tokenizer is None and "somebody/some-tokenizer" in json.dumps(found.notes)
