"""Shards: one stream whatever their size, read exactly, and no damage goes unnoticed."""

import json
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourscale import shards
from fourscale.audit import verify
from fourscale.cli import InputError
from fourscale.shards import ShardWriter, load_manifest, open_split

VOCAB = 300
AGAIN = r"; restore it, or delete .* and run prepare\.py again$"  # prepare.py finds nothing to do beside a manifest


def write(directory, documents, shard_tokens=100, vocab_size=VOCAB, **manifest):
    """A data directory with `documents` (lists of ids) as its train split, and a val split of one document."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text("{}")
    splits = {}
    for split, docs in (("train", documents), ("val", [[1, 2, 3]])):
        writer = ShardWriter(directory, split, vocab_size, shard_tokens)
        for batch in (docs[:2], docs[2:]):
            add(writer, batch)
        splits[split] = shards.split_entry(writer.finish(), writer.stream_sha.hexdigest())
        assert (splits[split]["tokens"], splits[split]["documents"]) == (writer.tokens, writer.documents)
    entry = {
        "file": "tokenizer.json",
        "vocab_size": vocab_size,
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }
    shards.write_manifest(
        directory, {"dtype": writer.dtype.name, "tokenizer": entry, "splits": splits, "license": None} | manifest
    )
    return directory


def add(writer, docs):
    """Documents (lists of ids), each as if it stood for two bytes of text a token."""
    lengths = np.array([len(ids) for ids in docs], np.int64)
    writer.add(np.array([i for ids in docs for i in ids], np.int64), np.cumsum(lengths), 2 * lengths)


def documents(total=1000, seed=0, vocab_size=VOCAB):
    ids = np.random.default_rng(seed).integers(0, vocab_size, total)
    return [part.tolist() for part in np.split(ids, sorted({*range(7, total, 61), *range(100, total, 250)}))]


def edit_manifest(directory, change):
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


# ---- writing


@settings(max_examples=40, deadline=None)
@given(
    docs=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=12),
    shard_tokens=st.integers(1, 40),
)
def test_shard_size_changes_nothing_but_the_files(tmp_path_factory, docs, shard_tokens):
    many = write(tmp_path_factory.mktemp("many"), docs, shard_tokens)
    one = write(tmp_path_factory.mktemp("one"), docs, 10**6)
    flat = [i for doc in docs for i in doc]
    a, b = open_split(many, "train"), open_split(one, "train")
    assert a.read(0, a.total).tolist() == b.read(0, b.total).tolist() == flat
    assert (a.digest, a.text_bytes, a.vocab_size) == (b.digest, b.text_bytes, VOCAB) == (b.digest, 2 * len(flat), VOCAB)
    listed = load_manifest(many)["splits"]["train"]
    sizes = [shard["tokens"] for shard in listed["shards"]]
    assert sizes[:-1] == [shard_tokens] * (len(sizes) - 1) and 0 < sizes[-1] <= shard_tokens
    for key in ("tokens", "documents", "text_bytes"):
        assert sum(shard[key] for shard in listed["shards"]) == listed[key]
    assert listed["documents"] == len(docs)
    assert verify(many) == [] == verify(one)


def test_other_tokens_have_another_digest(tmp_path):
    docs = documents()
    digest = open_split(write(tmp_path / "a", docs), "train").digest
    docs[3][0] ^= 1
    assert open_split(write(tmp_path / "b", docs), "train").digest != digest


def test_names_and_bytes(tmp_path):
    data = write(tmp_path, [[1, 2, 258]], 2)
    assert sorted(p.name for p in data.glob("*.bin")) == [
        "train_000.bin",
        "train_001.bin",
        "val_000.bin",
        "val_001.bin",
    ]
    assert (data / "train_000.bin").read_bytes() + (data / "train_001.bin").read_bytes() == b"\1\0\2\0\2\1"
    assert shards.shard_name("train", 1000) == "train_1000.bin"


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), ((257, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (65_472, "<u2"), (200_019, "<u4"))
)
def test_dtype_follows_the_padded_vocabulary(tmp_path, vocab_size, dtype):
    data = write(tmp_path, [[0, vocab_size - 1]], 1, vocab_size)
    assert load_manifest(data)["dtype"] == {"<u2": "uint16", "<u4": "uint32"}[dtype]
    assert np.frombuffer((data / "train_001.bin").read_bytes(), dtype).tolist() == [vocab_size - 1]
    assert open_split(data, "train").read(0, 2).tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("bad", (VOCAB, 70_000, -1))
def test_an_id_outside_the_vocabulary_is_never_written(tmp_path, bad):
    writer = ShardWriter(tmp_path, "train", VOCAB, 100)
    with pytest.raises(InputError, match=f"train: id {bad} is outside the vocabulary of 300"):
        add(writer, [[5, bad, 6]])
    assert writer.tokens == 0 and not list(tmp_path.iterdir())


@settings(max_examples=60, deadline=None)
@given(
    docs=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=12),
    shard_tokens=st.integers(1, 20),
    commits=st.sets(st.integers(0, 11), max_size=4),
)
def test_a_writer_goes_on_from_its_last_commit(tmp_path_factory, docs, shard_tokens, commits):
    """However much was written after it, and lost or not."""
    whole = ShardWriter(tmp_path_factory.mktemp("whole"), "train", VOCAB, shard_tokens)
    add(whole, docs)
    directory = tmp_path_factory.mktemp("parts")
    writer, start = ShardWriter(directory, "train", VOCAB, shard_tokens), 0
    for at in sorted(commits):
        add(writer, docs[start:at])
        state = json.loads(json.dumps(writer.commit()))
        add(writer, docs[at : at + 3])  # lost
        writer._file and writer._file.flush()
        writer, start = ShardWriter(directory, "train", VOCAB, shard_tokens, state), at
    add(writer, docs[start:])
    assert writer.finish() == whole.finish() and writer.finished == whole.finished
    assert (writer.tokens, writer.documents, writer.text_bytes) == (whole.tokens, whole.documents, whole.text_bytes)
    assert writer.stream_sha.hexdigest() == whole.stream_sha.hexdigest()
    for shard in whole.finish():
        assert (directory / shard["file"]).read_bytes() == (whole.directory / shard["file"]).read_bytes()


@pytest.mark.parametrize("damage", ("flip", "cut", "remove"))
@pytest.mark.parametrize("shard", ("train_000.bin", "train_002.bin"))
def test_a_writer_refuses_shards_that_are_not_its_own(tmp_path, shard, damage):
    writer = ShardWriter(tmp_path, "train", VOCAB, 10)
    add(writer, documents(25))
    state = writer.commit()
    path = tmp_path / shard
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:] if damage == "flip" else data[:-1])
    if (shard, damage) == ("train_002.bin", "flip"):
        return  # not complete, so not hashed yet
    with pytest.raises(
        InputError, match=rf"{shard}: not what an interrupted run wrote; delete {tmp_path.parent} to start over$"
    ):
        ShardWriter(tmp_path, "train", VOCAB, 10, state)


# ---- reading


@pytest.mark.parametrize("max_open", (1, 256))
@pytest.mark.parametrize("shard_tokens", (1, 7, 100, 5000))
def test_reads_and_windows_cross_shards(tmp_path, shard_tokens, max_open, monkeypatch):
    monkeypatch.setattr(shards, "MAX_OPEN_FILES", max_open)
    docs = documents(400)
    flat = np.array([i for doc in docs for i in doc])
    stream = open_split(write(tmp_path, docs, shard_tokens), "train")
    assert stream.total == 400
    opened = len(os.listdir("/dev/fd"))
    for start, count in ((0, 400), (0, 1), (399, 1), (99, 2), (93, 107), (400, 0), (0, 0), (7, 7)):
        got = stream.read(start, count)
        assert got.dtype == np.int64 and np.array_equal(got, flat[start : start + count])
    starts = np.array([0, 83, 99, 100, 383], np.int64)
    windows = stream.windows(starts, 17)
    assert windows.dtype == np.int64 and windows.shape == (5, 17)
    assert np.array_equal(windows, np.stack([flat[s : s + 17] for s in starts]))
    assert stream.windows(np.array([], np.int64), 17).shape == (0, 17)
    if max_open == 1 and shard_tokens < 400:
        assert len(os.listdir("/dev/fd")) <= opened
    for start, count in ((-1, 2), (0, 401), (400, 1), (384, 17)):
        with pytest.raises(IndexError):
            stream.read(start, count)
    with pytest.raises(IndexError):
        stream.windows(np.array([0, 384]), 17)


def read_in_child(stream, queue):
    queue.put(stream.windows(np.arange(0, 900, 50), 60).tolist())


@pytest.mark.parametrize("method", ("fork", "spawn"))
def test_threads_and_processes_share_a_stream(tmp_path, method):
    stream = open_split(write(tmp_path, documents(), 13), "train")
    expected = stream.windows(np.arange(0, 900, 50), 60).tolist()  # files are open now
    assert pickle.loads(pickle.dumps(stream)).windows(np.arange(0, 900, 50), 60).tolist() == expected
    fresh = open_split(tmp_path, "train")
    with ThreadPoolExecutor(8) as pool:
        for rows in pool.map(lambda _: fresh.windows(np.arange(0, 900, 50), 60).tolist(), range(24)):
            assert rows == expected
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=read_in_child, args=(stream, queue))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(60)
    assert stream.windows(np.arange(0, 900, 50), 60).tolist() == expected  # the child closed nothing of ours


# ---- damage


def one_line(error):
    return "\n" not in str(error.value)


def test_no_directory_no_manifest_another_version(tmp_path):
    with pytest.raises(InputError, match=r"no such data directory; make it with python prepare\.py") as e:
        open_split(tmp_path / "absent", "train")
    assert one_line(e)
    (tmp_path / "train_000.bin").write_bytes(b"\0\0")
    with pytest.raises(InputError, match=r"no manifest\.json, so no finished data; run python prepare\.py") as e:
        open_split(tmp_path, "train")
    write(tmp_path / "a", documents())
    edit_manifest(tmp_path / "a", lambda m: m.update(version=3))
    with pytest.raises(InputError, match="version 3, this code reads fourscale-shards version 2"):
        load_manifest(tmp_path / "a")
    edit_manifest(tmp_path / "a", lambda m: (m.update(version=1), m["splits"].pop("val")))
    with pytest.raises(InputError, match=r"lacks 'splits\.val'"):
        open_split(tmp_path / "a", "val")
    for broken in ("{", "[]", ""):
        (tmp_path / "a" / "manifest.json").write_text(broken)
        with pytest.raises(InputError, match=r"manifest\.json: ") as e:
            load_manifest(tmp_path / "a")
        assert one_line(e)


def test_an_empty_split(tmp_path):
    with pytest.raises(InputError, match="train split is empty"):
        open_split(write(tmp_path, []), "train")


def test_missing_and_truncated_shards_are_named(tmp_path):
    data = write(tmp_path, documents())
    victim = data / "train_004.bin"
    whole = victim.read_bytes()
    stream = open_split(data, "train")
    for size in (0, len(whole) - 1, len(whole) + 2):
        victim.write_bytes((whole + b"\0\0")[:size])
        with pytest.raises(InputError, match=rf"train_004\.bin: .* bytes, the manifest has 100 tokens.*{AGAIN}") as e:
            open_split(data, "train")
        assert one_line(e)
    # cut short after the check at the start, as by a full disk or a second writer
    stream.read(400, 10)
    for size in (0, 19, 101):
        os.truncate(victim, size)
        with pytest.raises(InputError, match=rf"train_004\.bin: ends before token .* was truncated.*{AGAIN[1:]}") as e:
            stream.windows(np.array([0, 380]), 90)
        assert e.value.speaks  # only the rank that reads it knows
    stream.read(380, 20)  # the rest is still there
    victim.unlink()
    with pytest.raises(InputError, match=rf"train_004\.bin: missing{AGAIN}"):
        open_split(data, "train")
    fresh = pickle.loads(pickle.dumps(stream))
    with pytest.raises(InputError, match=rf"train_004\.bin: missing{AGAIN}"):
        fresh.read(450, 1)
    (data / "manifest.json").rename(data / "kept")  # as of foreign shards, which prepare.py did not make
    with pytest.raises(InputError, match=r"train_004\.bin: missing; restore it$"):
        fresh.read(450, 1)
    (data / "kept").rename(data / "manifest.json")
    problems = verify(data)
    assert len(problems) == 1 and "train_004.bin: missing" in problems[0]


def test_an_id_outside_the_vocabulary_is_found_on_reading(tmp_path):
    data = write(tmp_path, documents())
    with (data / "train_002.bin").open("r+b") as f:
        f.seek(2 * 31)
        f.write((300).to_bytes(2, "little"))
    stream = open_split(data, "train")
    with pytest.raises(InputError, match=r"train_002\.bin: id 300 at token 31 is outside the vocabulary of 300") as e:
        stream.windows(np.array([0, 220]), 20)
    assert e.value.speaks
    problems = verify(data)
    assert len(problems) == 3 and "sha256" in problems[0] and "id 300" in problems[1] and "stream" in problems[2]


def test_verify_sees_a_flipped_bit_and_another_tokenizer(tmp_path):
    data = write(tmp_path, documents())
    assert verify(data) == []
    content = bytearray((data / "val_000.bin").read_bytes())
    content[2] ^= 1
    (data / "val_000.bin").write_bytes(content)
    (data / "tokenizer.json").write_text("{ }")
    problems = verify(data)
    assert [Path(p.split(": ")[0]).name for p in problems] == ["tokenizer.json", "val_000.bin", data.name]


def test_the_manifest_replaces_itself_whole(tmp_path):
    write(tmp_path, documents())
    assert not list(tmp_path.glob("*.tmp"))
    assert load_manifest(tmp_path)["format"] == "fourscale-shards"


def test_the_manifest_holds_any_string(tmp_path):
    names = {"source": "caf\udce9.txt", "\udce9": ["\\\udce9\\", "\ud800", "é", "\U0001f600", "\\u0041"]}
    write(tmp_path, documents(), odd=names)
    assert load_manifest(tmp_path)["odd"] == names
    assert "é" in (tmp_path / "manifest.json").read_text(encoding="utf-8")  # readable where it can be


def harmed(*where, to):
    """A change of a manifest: the value at a path of keys."""

    def change(m):
        for key in where[:-1]:
            m = m[key]
        if to is None:
            del m[where[-1]]
        else:
            m[where[-1]] = to

    return change


SHARD = ("splits", "train", "shards", 1)
MALFORMED = {
    "tokenizer.vocab_size is 300.0, not": harmed("tokenizer", "vocab_size", to=300.0),
    'tokenizer.vocab_size is "300", not': harmed("tokenizer", "vocab_size", to="300"),
    "tokenizer.vocab_size is true, not": harmed("tokenizer", "vocab_size", to=True),
    "tokenizer.vocab_size is 0, not": harmed("tokenizer", "vocab_size", to=0),
    "lacks 'tokenizer.vocab_size'": harmed("tokenizer", "vocab_size", to=None),
    "tokenizer.file is .*, not": harmed("tokenizer", "file", to="../tokenizer.json"),
    "tokenizer.sha256 is 1, not": harmed("tokenizer", "sha256", to=1),
    "tokenizer is .300., not": harmed("tokenizer", to=[300]),
    "lacks 'tokenizer'": harmed("tokenizer", to=None),
    "dtype is .int16., not 'uint16'": harmed("dtype", to="int16"),
    "dtype is .uint32., not 'uint16', as ids of a vocabulary of 300": harmed("dtype", to="uint32"),
    "dtype is .float16., not": harmed("dtype", to="float16"),
    "dtype is .a.nb., not": harmed("dtype", to="a\nb"),
    "dtype is 3, not": harmed("dtype", to=3),
    "lacks 'dtype'": harmed("dtype", to=None),
    "dtype is .uint16., not 'uint32'": harmed("tokenizer", "vocab_size", to=70_000),
    "splits is .., not": harmed("splits", to=[]),
    "splits.val is 1, not": harmed("splits", "val", to=1),
    "lacks 'splits.train.stream_sha256'": harmed("splits", "train", "stream_sha256", to=None),
    "splits.train.text_bytes is 1.5, not": harmed("splits", "train", "text_bytes", to=1.5),
    "splits.train.documents is .many., not": harmed("splits", "train", "documents", to="many"),
    "splits.train.shards is .*, not a list": harmed("splits", "train", "shards", to={"0": 1}),
    r"splits.train.shards is \[7\], not a list of": harmed("splits", "train", "shards", to=[7]),
    r"shards\[1\].tokens is 100.0, not": harmed(*SHARD, "tokens", to=100.0),
    r"shards\[1\].tokens is .100., not": harmed(*SHARD, "tokens", to="100"),
    r"shards\[1\].tokens is -100, not": harmed(*SHARD, "tokens", to=-100),
    r"shards\[1\].tokens is 10{56}\.\.\., not": harmed(*SHARD, "tokens", to=10**400),
    r"shards\[1\].sha256 is false, not": harmed(*SHARD, "sha256", to=False),
    r"lacks 'splits.train.shards\[1\].file'": harmed(*SHARD, "file", to=None),
    r"shards\[1\].file is .*/train_001.bin., not": harmed(*SHARD, "file", to="../a/train_001.bin"),
    r"shards\[1\].file is ./etc/passwd., not": harmed(*SHARD, "file", to="/etc/passwd"),
    r"shards\[1\].file is .a..b., not": harmed(*SHARD, "file", to="a\\b"),
    r"shards\[1\].file is ...., not": harmed(*SHARD, "file", to=".."),
    r"shards\[1\].file is .a.u0000., not": harmed(*SHARD, "file", to="a\0"),
    r"shards\[1\].file is .a.ud800., not": harmed(*SHARD, "file", to="a\ud800"),
    r"unigram_nats is .3., not": harmed("unigram_nats", to="3"),
    r"command is .., not": harmed("command", to=[]),
    r"sources is .*, not": harmed("sources", to=["a"]),
}


@pytest.mark.parametrize("words", MALFORMED)
def test_a_malformed_manifest_is_named_in_a_line(tmp_path, words):
    write(tmp_path, documents())
    edit_manifest(tmp_path, MALFORMED[words])
    for reader in (load_manifest, verify, lambda d: open_split(d, "train")):
        with pytest.raises(InputError, match=rf"manifest\.json: .*{words}.*{AGAIN}") as e:
            reader(tmp_path)
        assert one_line(e)


def test_a_manifest_of_nothing_but_brackets_is_a_line(tmp_path):
    write(tmp_path, documents())
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"manifest\.json: can't be read") as e:
        load_manifest(tmp_path)
    assert one_line(e)


@pytest.mark.parametrize("dtype", ("int16", "<i4", "uint64", "float32", ">u2"))
def test_ids_are_unsigned(dtype):
    with pytest.raises(ValueError, match=r"train: ids of .*, not of uint16 or uint32"):
        shards.TokenStream("train", [], np.dtype(dtype), VOCAB, None, "")
