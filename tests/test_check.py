"""check.py data: what is right passes, each kind of damage fails by name, on prepared and on foreign shards."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from conftest import one_error, run

from fourscale import audit, shards, tokenization
from fourscale.audit import Stopped, Survey, verify
from fourscale.cli import InputError

BYTE = tokenization.build("byte", lambda: iter(()))
RNG = np.random.default_rng(0)
WORDS = [bytes(RNG.integers(97, 123, n, np.uint8)) for n in RNG.integers(2, 9, 3000)]


def text(words, seed):
    picked = np.random.default_rng(seed).integers(0, len(WORDS), words)
    return np.frombuffer(b" ".join(WORDS[i] for i in picked), np.uint8)


def prepared(directory, train, val, shard_tokens=40_000, tokenizer=BYTE, **manifest):
    """A data directory of documents (uint8 text) as train and val."""
    directory.mkdir(parents=True)
    splits = {}
    for split, documents in (("train", train), ("val", val)):
        stream = np.concatenate([np.append(d, tokenizer.eot_id) for d in documents]).astype("<u2")
        ends = np.cumsum([len(d) + 1 for d in documents])
        entries = []
        for i, start in enumerate(range(0, len(stream), shard_tokens)):
            ids = stream[start : start + shard_tokens]
            name = shards.shard_name(split, i)
            (directory / name).write_bytes(ids.tobytes())
            inside = (ends > start) & (ends <= start + len(ids))
            entries.append(
                {
                    "file": name,
                    "tokens": len(ids),
                    "documents": int(inside.sum()),
                    "text_bytes": sum(len(d) for d, i in zip(documents, inside, strict=True) if i),
                    "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
                }
            )
        sums = {key: sum(e[key] for e in entries) for key in ("tokens", "documents", "text_bytes")}
        splits[split] = sums | {"stream_sha256": hashlib.sha256(stream.tobytes()).hexdigest(), "shards": entries}
    shards.write_manifest(
        directory,
        {"dtype": "uint16", "tokenizer": tokenizer.save(directory), "splits": splits, "license": "MIT"} | manifest,
    )
    return directory


def good(directory, **how):
    return prepared(directory, [text(3000, s) for s in range(8)], [text(1000, s) for s in (100, 101)], **how)


def edit(directory, change):
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def checks(directory, *flags, code=0, tmp_path=None):
    """Run the door; the lines that are no pass, as (status, name, text)."""
    out = directory.parent / f"{directory.name}.json"
    done = run("check.py", "data", directory, "--json", out, *flags, code=code)
    table = json.loads(out.read_text())
    assert table[0]["ok"] is (code == 0)
    if code:
        assert "failed:" in one_error(done)
    return {(c["status"], c["name"]): c["text"] for c in table[0]["checks"]}, table[0], done.stdout


# ---- the door


def test_good_data_pass(tmp_path):
    found, table, out = checks(good(tmp_path / "d"))
    assert {name for status, name in found if status == "pass"} == {
        *("hashes", "documents", "length", "sides", "overlap", "shards", "tokenizer")
    }
    assert "nothing failed" in out and "8 windows decode" in out
    figures = table["figures"]
    assert figures["overlap"]["found"] == 0 < figures["overlap"]["windows"]
    assert sum(s["eots"] for s in figures["shards"] if s["split"] == "train") == 8


def test_every_damage_fails_by_name(tmp_path):
    data = good(tmp_path / "d")
    shard = data / "train_001.bin"
    content = bytearray(shard.read_bytes())
    content[100:102] = (300).to_bytes(2, "little")
    shard.write_bytes(content)
    (data / "stray.bin").write_bytes(b"12")
    edit(data, lambda m: m["splits"]["val"].update(documents=7))
    found, _, out = checks(data, "--ctx", 1_000_000, code=2)
    assert ("note", "files") in found and "stray.bin" in found["note", "files"]
    for words in (
        "train_001.bin: its content has changed",
        "train_001.bin: id 300 is outside the vocabulary of 257",
        "the val split has 7 documents, its shards 2",
        "val: 2 end-of-text tokens, but the manifest has 7 documents",
        "--ctx 1000000 needs one more",
    ):
        assert words in out, words


def test_usage(tmp_path):
    assert "what can be checked is: data" in one_error(run("check.py", "dota", code=2))
    assert "name what to check" in one_error(run("check.py", "data", code=2))
    assert "check.py data" in run("check.py", "--help").stdout
    out = run("check.py", "data", tmp_path / "absent", code=2)
    assert "no such data directory" in out.stdout and "open" in one_error(out)
    data = good(tmp_path / "d")
    assert "--tokenizer gpt2: known from the manifest" in one_error(
        run("check.py", "data", data, "--tokenizer", "gpt2", code=2)
    )


def test_foreign_shards(tmp_path):
    ids = {"train": text(6000, 1), "val": text(500, 2)}
    for split, part in ids.items():
        part.astype("<u2").tofile(tmp_path / f"{split}.bin")
    found, _, _ = checks(tmp_path, "--data-dtype", "uint16")
    assert "--vocab-size is at least 123" in found["note", "ids"] and "--tokenizer" in found["note", "tokenizer"]
    found, _, _ = checks(tmp_path, "--data-dtype", "uint16", "--tokenizer", "byte")
    assert ("pass", "tokenizer") in found and ("pass", "ids") in found
    found, _, _ = checks(tmp_path, "--data-dtype", "uint16", "--vocab-size", 100, code=2)
    assert "outside the vocabulary of 100" in found["FAIL", "ids"]
    # a tokenizer of enough ids that isn't theirs
    found, _, _ = checks(tmp_path, "--data-dtype", "uint16", "--tokenizer", "gpt2", code=2)
    assert "another tokenizer" in found["FAIL", "tokenizer"]
    _, _, out = checks(tmp_path, code=2)
    assert "pass --data-dtype" in out


def test_a_tokenizer_that_the_manifest_does_not_describe_fails(tmp_path):
    """Its file is right and so are all hashes: nothing else tells."""
    data = good(tmp_path / "d")
    edit(data, lambda m: m["tokenizer"].pop("eot_token"))
    found, _, out = checks(data, code=2)
    assert "its tokenizer can't be made (KeyError: 'eot_token')" in found["FAIL", "hashes"]
    assert "Traceback" not in out


def test_a_name_that_is_not_utf8_ends_no_check(tmp_path):
    data = good(tmp_path / "d", sources=[{"name": "caf\udce9"}])
    data = data.rename(tmp_path / "caf\udce9")
    out = tmp_path / "out.json"
    run("check.py", "data", data, "--json", out)
    assert json.loads(out.read_text(encoding="utf-8"))[0]["data"] == str(data)


# ---- held-out text in the training set


def brute_force(train, val, length):
    seen = {w.tobytes() for w in np.lib.stride_tricks.sliding_window_view(train, length)}
    starts = range(0, len(val) - length + 1, len(val) // (len(val) // length))
    return sum(val[s : s + length].tobytes() in seen for s in starts)


@pytest.mark.parametrize("block", (512, 1 << 18))
def test_overlap_is_exact_at_any_alignment(tmp_path, monkeypatch, block):
    monkeypatch.setattr(audit, "BLOCK", block)  # windows that cross blocks
    train, val = text(4000, 1).copy(), text(1500, 2)
    train[1003:2000] = val[64 : 64 + 997]  # crosses blocks and shards
    train[5001:5101] = val[3000:3100]
    data = prepared(tmp_path / "d", [train], [val], 700)
    streams = {split: shards.open_split(data, split) for split in ("train", "val")}
    survey = Survey(streams, 64, 256)
    assert verify(data, visit=survey.visit) == []
    survey.close()
    expected = brute_force(np.append(train, 0), np.append(val, 0), 64)
    assert survey.overlap.found == expected >= 15
    held_out, trained = survey.overlap.example
    assert np.array_equal(streams["val"].read(held_out, 64), streams["train"].read(trained, 64))


def test_overlap_beyond_the_limit_fails(tmp_path):
    documents = [text(3000, s) for s in range(6)]
    data = prepared(tmp_path / "d", documents, [documents[3], text(1000, 9)])
    found, table, _ = checks(data, code=2)
    assert "stand in the training set" in found["FAIL", "overlap"]
    assert 0.6 < table["figures"]["overlap"]["found"] / table["figures"]["overlap"]["windows"] < 0.9
    found, _, _ = checks(data, "--max-overlap", 0.9)
    assert ("note", "overlap") in found
    same = prepared(tmp_path / "same", documents, documents)
    found, _, _ = checks(same, code=2)
    assert "the same" in found["FAIL", "sides"] and found["FAIL", "overlap"].startswith("100.00%")


# ---- degenerate shards


def surveyed(tmp_path, *parts, val=None):
    """The survey of training shards, one a part."""
    pieces, start = [], 0
    for i, part in enumerate(parts):
        (tmp_path / f"{i}.bin").write_bytes(part.astype("<u2").tobytes())
        pieces.append(shards.Shard(tmp_path / f"{i}.bin", len(part), start))
        start += len(part)
    held_out = text(500, 77)
    held_out.astype("<u2").tofile(tmp_path / "val.bin")
    val = shards.TokenStream(
        "val", [shards.Shard(tmp_path / "val.bin", len(held_out), 0)], np.dtype("<u2"), 257, None, "v"
    )
    train = shards.TokenStream("train", pieces, np.dtype("<u2"), 257, None, "t")
    survey = Survey({"train": train, "val": val}, 64, None)
    survey.read()
    survey.close()
    return audit.degenerate(survey.facts)


def test_degenerate_shards_are_named(tmp_path):
    fine = [text(6000, s) for s in range(4)]
    assert surveyed(tmp_path, *fine) == ([], [])
    padded = np.where(np.arange(len(fine[3])) % 100 < 70, 0, fine[3])
    block = np.tile(text(40, 5), 200)
    twice = np.concatenate([text(9000, 6), text(9000, 6)])
    poor = np.random.default_rng(0).integers(0, 2, 20_000)
    short = np.zeros(20)
    problems, _ = surveyed(tmp_path, *fine[:3], np.zeros(20_000), padded, block, twice, poor, fine[1], short)
    assert [p.split(": ")[0].split("/")[-1] for p in problems] == [f"{i}.bin" for i in range(3, 10)]
    reasons = ("all its ids are 0", "70% of its ids are 0", "over and over", "50% of its windows", "nats")
    for problem, words in zip(problems, (*reasons, "the same tokens as", "all its ids"), strict=True):
        assert words in problem
    _, notes = surveyed(tmp_path, *fine, np.concatenate([text(9000, 6), text(9000, 6)[:45_000], text(9000, 8)]))
    assert len(notes) == 1 and "of its windows stand in it before" in notes[0]


# ---- verify


def test_verify_stops_and_counts_bytes(tmp_path):
    data = good(tmp_path / "d")
    read = []
    assert verify(data, on_bytes=read.append) == []
    assert sum(read) == sum(p.stat().st_size for p in data.glob("*.bin"))
    with pytest.raises(Stopped):
        verify(data, stop=lambda: len(read) > 0)


@pytest.mark.parametrize(
    "change",
    (
        lambda m: m.pop("tokenizer"),
        lambda m: m.update(tokenizer=[]),
        lambda m: m.pop("splits"),
        lambda m: m.update(splits=3),
        lambda m: m["splits"]["train"].pop("shards"),
        lambda m: m["splits"]["train"]["shards"][0].pop("tokens"),
        lambda m: m["splits"]["train"]["shards"][0].pop("sha256"),
        lambda m: m["splits"]["train"].update(documents="many"),
        lambda m: m["splits"]["train"].update(stream_sha256="0"),
        lambda m: m.update(dtype="uint7"),
    ),
)
def test_a_malformed_manifest_is_a_line(tmp_path, change):
    data = good(tmp_path / "d")
    edit(data, change)
    try:
        problems = verify(data)
    except InputError as e:
        problems = [str(e)]
    assert problems and all("\n" not in p for p in problems)


def test_a_truncated_shard_and_a_missing_tokenizer(tmp_path):
    data = good(tmp_path / "d")
    shutil.copytree(data, tmp_path / "e")
    (data / "tokenizer.json").unlink()
    (data / "train_000.bin").write_bytes(b"")
    problems = verify(data)
    assert any("tokenizer.json: missing" in p for p in problems) and any("train_000.bin" in p for p in problems)
    _, _, out = checks(data, code=2)
    assert "Traceback" not in out
