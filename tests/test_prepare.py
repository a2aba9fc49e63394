"""prepare.py: sources, the split, the directory, and what happens when it's stopped or misused."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare
from fourscale import assembly, audit, encoding, journal, shards, sources, tokenization
from fourscale.cli import InputError, RunFailed
from fourscale.flags import PrepareConfig

DOOR = str(Path(prepare.__file__).resolve())
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "slept", "naïve", "中文"]


def stories(count=300, seed=0):
    rng = random.Random(seed)
    return [f"{i}. " + " ".join(rng.choices(WORDS, k=rng.randint(3, 40))) + "\n" for i in range(count)]


def jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text, "n": i}) + "\n" for i, text in enumerate(texts)))
    return path


def run(monkeypatch, *args):
    """The door's main in this process, raising what it would print."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, args)])
    prepare.main.__wrapped__()


def launch(*args, cwd=None):
    return subprocess.run([sys.executable, DOOR, *map(str, args)], capture_output=True, text=True, cwd=cwd, timeout=120)


def split_texts(out, split):
    """The documents of a split, back from its shards."""
    tokenizer = tokenization.load(out, shards.load_manifest(out)["tokenizer"])
    stream = shards.open_split(out, split)
    ids = stream.read(0, stream.total).tolist()
    texts, start = [], 0
    for end, token in enumerate(ids):
        if token == tokenizer.eot_id:
            texts.append(tokenizer.decode(ids[start:end]))
            start = end + 1
    assert start == len(ids)  # the stream ends with a document
    return texts


def digests(out):
    return [shards.open_split(out, split).digest for split in shards.SPLITS]


# ---- end to end


@pytest.mark.parametrize("tokenizer", ("bpe:512", "byte", "char", "gpt2"))
def test_stdlib_end_to_end(tmp_path, monkeypatch, capsys, tokenizer):
    some = sources._stdlib_paths()[::23]
    monkeypatch.setattr(sources, "_stdlib_paths", lambda: some)
    out = tmp_path / "data"
    run(monkeypatch, "--tokenizer", tokenizer, "--out", out, "--shard-tokens", "30_000", "--val-fraction", 0.2)
    train, val = split_texts(out, "train"), split_texts(out, "val")
    expected = [document.text for document in sources.open_source("stdlib").documents()]
    assert sorted(train + val) == sorted(expected) and len(val) > 0 and len(train) > len(val)
    assert [t for t in expected if t in set(train)] == train  # in the order of the source

    manifest = shards.load_manifest(out)
    assert manifest["license"] == "PSF-2.0" and [each["name"] for each in manifest["sources"]] == ["stdlib"]
    assert (manifest["normalisation"], manifest["deduplication"]) == ("none", "none")
    assert manifest["tokenizer"]["padded_vocab_size"] % 64 == 0 and manifest["code"]
    assert len(manifest["splits"]["train"]["shards"]) > 1
    for split, texts in (("train", train), ("val", val)):
        part = manifest["splits"][split]
        assert part["documents"] == len(texts) and part["text_bytes"] == sum(len(t.encode()) for t in texts)
        assert shards.open_split(out, split).text_bytes == part["text_bytes"]
    assert audit.verify(out) == []
    assert not list(out.glob("*unfinished*"))
    said = capsys.readouterr().out
    total = sum(part["tokens"] for part in manifest["splits"].values())
    assert f"wrote {out}: {total:,} tokens ({total * 2 / 1e9:.3f} GB)" in said and "licence: PSF-2.0" in said


def test_text_is_left_as_it_is(tmp_path, monkeypatch, capsys):
    texts = [
        "\ufeffbom\r\nand\rlines\n",
        "nul \0 here",
        "a <|endoftext|> b",
        " \n ",
        "e\u0301 \u00e9 ﬁ",
        *stories(40),
    ]
    for tokenizer in ("byte", "bpe:300", "char", "gpt2"):
        out = tmp_path / tokenizer
        odd = jsonl(tmp_path / "odd.jsonl", [*texts[:3], "", *texts[3:]])
        run(monkeypatch, "--dataset", odd, "--out", out, "--tokenizer", tokenizer)
        assert sorted(split_texts(out, "train") + split_texts(out, "val")) == sorted(texts)
    said = capsys.readouterr().out
    assert "the licence of the text is unknown; --license NAME" in said and f"{len(texts)} written + 1 empty" in said


def test_the_door_from_another_directory(tmp_path):
    jsonl(tmp_path / "corpus.jsonl", stories())
    done = launch("--dataset", "corpus.jsonl", "--tokenizer", "byte", "--license", "CC0-1.0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote data: " in done.stdout and "licence: CC0-1.0" in done.stdout
    assert shards.load_manifest(tmp_path / "data")["license"] == "CC0-1.0"
    again = launch("--dataset", "corpus.jsonl", "--tokenizer", "byte", "--license", "CC0-1.0", cwd=tmp_path)
    assert again.returncode == 0 and "nothing to do" in again.stdout
    for args, message in (
        (("--tokenizer", "char"), "already holds data made with --tokenizer byte (now char)"),
        (("--shard-tokens", "few"), "expected a whole number"),
        (("--dataset", "*.txt"), "no file matches"),
        (("--tokeniser", "byte"), "did you mean --tokenizer"),
    ):
        failed = launch("--dataset", "corpus.jsonl", "--license", "CC0-1.0", *args, cwd=tmp_path)
        assert failed.returncode == 2 and failed.stdout == "", failed.stderr
        assert failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1 and message in failed.stderr


def test_help_imports_nothing_heavy():
    for args in (["--help"], ["--nonsense"]):
        done = subprocess.run([sys.executable, "-X", "importtime", DOOR, *args], capture_output=True, text=True)
        loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
        assert "tyro" in loaded
        assert not loaded & {"numpy", "torch", "tiktoken", "tokenizers", "datasets", "transformers"}


# ---- the split


def prepared(tmp_path, monkeypatch, name, texts, *args):
    out = tmp_path / f"{name}-data"
    run(monkeypatch, "--dataset", jsonl(tmp_path / f"{name}.jsonl", texts), "--out", out, "--tokenizer", "byte", *args)
    return out


def test_held_out_does_not_depend_on_shards_order_or_duplicates(tmp_path, monkeypatch):
    texts = stories(400)
    mixed = texts + texts[::3] + texts[::7]
    random.Random(1).shuffle(mixed)
    a = prepared(tmp_path, monkeypatch, "a", texts, "--val-fraction", 0.1)
    b = prepared(tmp_path, monkeypatch, "b", mixed, "--val-fraction", 0.1, "--shard-tokens", 777)
    train, val = split_texts(a, "train"), split_texts(a, "val")
    assert 15 < len(val) < 75
    assert set(split_texts(b, "train")) == set(train) and set(split_texts(b, "val")) == set(val)
    assert not set(train) & set(val) and len(train) + len(val) == 400
    c = prepared(tmp_path, monkeypatch, "c", texts, "--val-fraction", 0.1, "--shard-tokens", 777)
    assert digests(c) == digests(a) and len(list(c.glob("train_*.bin"))) > 10
    assert "threshold" in shards.load_manifest(a)["split"]


@pytest.mark.parametrize("count", (1, 2, 37, 399))
def test_val_docs_is_exact_whatever_the_order(tmp_path, monkeypatch, count):
    texts = stories(400)
    a = prepared(tmp_path, monkeypatch, "a", texts, "--val-docs", count)
    b = prepared(tmp_path, monkeypatch, "b", texts[::-1] + texts[:50], "--val-docs", count)
    assert len(split_texts(a, "val")) == count
    assert set(split_texts(a, "val")) == set(split_texts(b, "val"))
    assert not set(split_texts(b, "val")) & set(split_texts(b, "train"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50)), st.integers(1, 12))
def test_the_threshold_is_that_of_the_smallest_hashes(hashes, count):
    distinct = sorted(set(hashes))
    if len(distinct) <= count:
        with pytest.raises(InputError, match=f"has {len(distinct)} distinct documents"):
            encoding.threshold_for_count(hashes, count)
    else:
        threshold = encoding.threshold_for_count(hashes, count)
        assert [h for h in distinct if h < threshold] == distinct[:count]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.sampled_from((0.001, 0.02, 0.5)))
def test_a_share_holds_out_at_least_one(hashes, share):
    threshold = encoding.threshold_for_share(hashes, share)
    below = {h for h in hashes if h < share * 2**64}
    assert {h for h in hashes if h < threshold} == (below or {min(hashes)} if hashes else set())


def test_the_tokenizer_learns_from_the_training_side(tmp_path, monkeypatch):
    texts = [*stories(60), "zqzqzqzqzqzq " * 500]
    held = [t for t in texts if encoding.text_hash(t) < encoding.text_hash(texts[-1]) + 1]
    out = prepared(tmp_path, monkeypatch, "a", texts, "--val-docs", len(held), "--tokenizer", "bpe:400")
    tokenizer = tokenization.load(out, shards.load_manifest(out)["tokenizer"])
    assert len(tokenizer.encode("zqzqzqzq")) == 8
    assert len(tokenizer.encode("slept")) < 5


def test_a_character_of_the_held_out_side_has_an_id(tmp_path, monkeypatch):
    odd = next(c for c in map(chr, range(0x4E00, 0x9FFF)) if encoding.text_hash(c) < 2**57)
    out = prepared(tmp_path, monkeypatch, "a", [odd, *stories(60)], "--tokenizer", "char")
    assert odd in split_texts(out, "val")


@pytest.mark.parametrize(
    ("texts", "args", "message"),
    (
        (["alone\n"], (), "no text for the train split, of 1 document(s) in all"),
        (["same\n"] * 9, (), "no text for the train split, of 9 document(s) in all"),
        ([], (), "no text for the train split, of 0 document(s) in all"),
        (["same\n"] * 9, ("--val-docs", 1), "the corpus has 1 distinct documents, which leaves none to train on"),
        (stories(30), ("--val-docs", 30), "the corpus has 30 distinct documents"),
        (stories(30), ("--val-docs", 0), "--val-docs 0: hold out at least 1"),
        (stories(30), ("--val-fraction", 1), "--val-fraction 1.0: give a share above 0 and below 1"),
        (stories(30), ("--val-fraction", "0.999999"), "no text for the train split, of 30 document(s) in all"),
        (stories(30), ("--shard-tokens", 0), "--shard-tokens 0"),
    ),
)
def test_an_empty_side_is_refused(tmp_path, monkeypatch, texts, args, message):
    with pytest.raises(InputError) as e:
        prepared(tmp_path, monkeypatch, "a", texts, *args)
    assert message in str(e.value) and "\n" not in str(e.value)
    assert not [p for p in tmp_path.glob("a-data/*") if p.name != ".lock"]  # nothing stays


def test_one_plain_text_file_has_two_sides(tmp_path, monkeypatch):
    paragraphs = [" ".join(stories(4, seed)) for seed in range(800)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    run(monkeypatch, "--dataset", tmp_path / "book.txt", "--out", tmp_path / "data", "--tokenizer", "byte")
    units = [d.text for d in sources.open_source(str(tmp_path / "book.txt")).documents()]
    assert "".join(units) == "\n\n".join(paragraphs)
    assert all(4096 <= len(unit.encode()) < 6000 and unit.endswith("\n\n") for unit in units[:-1])
    assert set(split_texts(tmp_path / "data", "train")) | set(split_texts(tmp_path / "data", "val")) == set(units)


def test_offline_reads_the_cache_or_says_so(tmp_path):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    args = [sys.executable, DOOR, "--dataset", "tinystories", "--out", str(tmp_path / "data")]
    done = subprocess.run(args, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2 and "HF_HUB_OFFLINE is set, and the cache holds no copy" in done.stderr


# ---- the directory


def test_a_finished_directory_is_not_touched(tmp_path, monkeypatch, capsys):
    out = prepared(tmp_path, monkeypatch, "a", stories())
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    args = ["--dataset", tmp_path / "a.jsonl", "--out", out, "--tokenizer", "byte"]
    run(monkeypatch, *args)
    assert "already made by this very command; nothing to do" in capsys.readouterr().out
    for change, named in (
        (("--tokenizer", "char"), "--tokenizer byte (now char)"),
        (("--val-docs", "5"), "--val-docs None (now 5)"),
        (("--shard-tokens", "5"), "--shard-tokens 100000000 (now 5)"),
        (("--license", "MIT"), "--license None (now MIT)"),
    ):
        with pytest.raises(InputError) as e:
            run(monkeypatch, *args, *change)
        assert named in str(e.value) and "choose another --out, or delete" in str(e.value)
    jsonl(tmp_path / "a.jsonl", stories()[:-1])
    with pytest.raises(InputError, match="input files have changed since"):
        run(monkeypatch, *args)
    (out / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="choose another --out, or delete"):
        run(monkeypatch, *args)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before | {"manifest.json": b"{"}


def test_a_changed_tokenizer_file_is_another_command(tmp_path, monkeypatch, capsys):
    tokenization.build("byte", lambda: iter(())).save(tmp_path)
    args = ["--dataset", jsonl(tmp_path / "a.jsonl", stories()), "--out", tmp_path / "data", "--tokenizer", tmp_path]
    run(monkeypatch, *args)
    run(monkeypatch, *args)
    assert "nothing to do" in capsys.readouterr().out
    with (tmp_path / "tokenizer.json").open("a") as f:
        f.write("\n")
    with pytest.raises(InputError, match="input files have changed since"):
        run(monkeypatch, *args)


def files_of(out):
    """Every file of a finished directory but the lock."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}  # a directory would raise


def children_of(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def journal_of(out):
    with contextlib.suppress(OSError):
        return json.loads((out / journal.UNFINISHED / "journal.json").read_text())
    return {}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_ten_times_it_ends_with_the_same_bytes(tmp_path):
    """SIGKILL at random moments, while the tokenizer is trained and while two processes encode."""
    rng = random.Random(7)
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "re", "tu") for b in range(150)]
    for name, seed in (("a", 1), ("b", 2)):
        draw = random.Random(seed)
        texts = [f"{i} {' '.join(draw.choices(words, k=150))}" for i in range(9_000)]
        jsonl(tmp_path / f"{name}.jsonl", [*texts, *texts[:100]])
    args = ["--dataset", f"{tmp_path}/a.jsonl:0.6", "--dataset", f"{tmp_path}/b.jsonl:0.4", "--tokenizer", "bpe:2000"]
    args += ["--shard-tokens", "300_000", "--workers", "2", "--dedup", "--val-fraction", "0.05"]
    started = time.monotonic()
    clean = launch(*args, "--out", tmp_path / "clean")
    assert clean.returncode == 0, clean.stderr
    took = time.monotonic() - started

    out, phases = tmp_path / "data", []
    reached = {
        "before": lambda table: True,
        "tokenizer": lambda t: "threshold" in t,
        "encoding": lambda t: "tokenizer" in t,
    }
    for wanted in ("before", *["tokenizer"] * 3, *["encoding"] * 6):
        child = subprocess.Popen(
            [sys.executable, DOOR, *map(str, args), "--out", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while child.poll() is None and not reached[wanted](journal_of(out)):
            time.sleep(0.01)
        time.sleep(rng.random() * (took / 8 if wanted == "encoding" else 0.5))
        if child.poll() is not None:
            break
        workers = children_of(child.pid)
        child.send_signal(signal.SIGKILL)
        child.wait()
        table = journal_of(out)
        phases.append("encoding" if "tokenizer" in table else "tokenizer" if "threshold" in table else "before")
        with pytest.raises(InputError, match=r"no such data directory|no finished data"):
            shards.open_split(out, "train")
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in workers):
            assert time.monotonic() < deadline, "a worker outlived its parent"
            time.sleep(0.05)
    assert len(phases) >= 5 and {"tokenizer", "encoding"} <= set(phases), phases
    done = launch(*args, "--out", out)
    assert done.returncode == 0, done.stderr
    assert files_of(out) == files_of(tmp_path / "clean") and audit.verify(out) == []


def test_the_output_does_not_depend_on_the_number_of_processes(tmp_path):
    corpus = jsonl(tmp_path / "a.jsonl", stories(30_000))
    made = []
    for workers in (1, 2, 3):
        out = tmp_path / f"w{workers}"
        done = launch("--dataset", corpus, "--tokenizer", "bpe:400", "--out", out, "--workers", workers)
        assert done.returncode == 0, done.stderr
        made.append(files_of(out))
    assert made[0] == made[1] == made[2]


def test_a_worker_that_dies_is_told(tmp_path):
    corpus = jsonl(tmp_path / "a.jsonl", stories(60_000) * 4)
    args = [sys.executable, DOOR, "--dataset", str(corpus), "--out", str(tmp_path / "data"), "--workers", "2"]
    child = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    spawned = []
    while child.poll() is None and not spawned:
        for pid in children_of(child.pid):
            with contextlib.suppress(OSError):
                if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
                    spawned.append(pid)
        time.sleep(0.01)
    os.kill(spawned[-1], signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert child.returncode == 1 and len(lines) == 1 and "run the same command to go on" in lines[0], err
    assert "Traceback" not in err


def test_another_command_does_not_touch_unfinished_work(tmp_path, monkeypatch):
    corpus = jsonl(tmp_path / "a.jsonl", stories())
    args = ["--dataset", corpus, "--tokenizer", "byte", "--out", tmp_path / "data"]

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(assembly.Assembly, "run", stop)
        run(patch, *args)
    with pytest.raises(
        InputError, match=r"unfinished work of a command with --val-docs None \(now 5\); give that again"
    ):
        run(monkeypatch, *args, "--val-docs", 5)
    jsonl(corpus, stories(299))
    with pytest.raises(InputError, match="input files have changed since this work was begun"):
        run(monkeypatch, *args)
    jsonl(corpus, stories())
    monkeypatch.setattr(journal, "VERSIONS", "fourscale 9.9")
    with pytest.raises(InputError, match=r"input files have changed|was begun by fourscale"):
        run(monkeypatch, *args)


@pytest.mark.parametrize("at", range(8))
def test_stopped_while_publishing(tmp_path, monkeypatch, at):
    """At any of its renames, the manifest's the last of them; or when only rubbish is left to remove."""
    corpus = jsonl(tmp_path / "a.jsonl", stories())
    args = ["--dataset", corpus, "--tokenizer", "byte", "--shard-tokens", 10_000, "--out"]
    run(monkeypatch, *args, tmp_path / "clean")
    out, moved, replace, remove = tmp_path / "data", [], Path.replace, shutil.rmtree
    assert len(files_of(tmp_path / "clean")) == 7

    def counted(path, target):
        if Path(target).parent == out:
            if len(moved) == at:
                raise KeyboardInterrupt
            moved.append(target)
        return replace(path, target)

    def stopped(path, *args, **kw):
        if Path(path).name == journal.UNFINISHED:
            raise KeyboardInterrupt
        return remove(path, *args, **kw)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", counted)
        patch.setattr(shutil, "rmtree", stopped)
        run(patch, *args, out)
    assert len(moved) == at
    if at < 7:
        with pytest.raises(InputError, match="no finished data"):
            shards.open_split(out, "train")
    run(monkeypatch, *args, out)
    assert files_of(out) == files_of(tmp_path / "clean") and audit.verify(out) == []


def test_shards_of_unknown_origin_are_left_alone(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train_000.bin").write_bytes(b"mine")
    args = ["--dataset", jsonl(tmp_path / "a.jsonl", stories()), "--tokenizer", "byte", "--out", tmp_path / "data"]
    with pytest.raises(InputError, match=r"holds train_000\.bin but no manifest; to train on shards of other origin"):
        run(monkeypatch, *args)
    assert (tmp_path / "data" / "train_000.bin").read_bytes() == b"mine"


def test_two_at_once_in_one_directory(tmp_path, monkeypatch):
    args = ["--dataset", jsonl(tmp_path / "a.jsonl", stories()), "--tokenizer", "byte", "--out", tmp_path / "data"]
    (tmp_path / "data").mkdir()
    held = filelock.FileLock(tmp_path / "data" / ".lock")
    with held, pytest.raises(InputError, match=r"another prepare\.py is at work here"):
        run(monkeypatch, *args)
    run(monkeypatch, *args)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.ShardWriter, "add", full)
    args = ["--dataset", jsonl(tmp_path / "a.jsonl", stories()), "--tokenizer", "byte", "--out", tmp_path / "data"]
    with pytest.raises(RunFailed, match=r"data: no space left on device; .* is not finished"):
        run(monkeypatch, *args)


def test_any_terminal_can_show_any_text(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert prepare.printable("a\x1b[2J\0中\n\té") == "a?[2J??\n\t?"


def test_defaults_are_those_of_the_docs():
    cfg = PrepareConfig()
    assert (cfg.shard_tokens, cfg.tokenizer, cfg.val_docs, str(cfg.out)) == (100_000_000, "gpt2", None, "data")


def test_the_unigram_bar_is_that_of_the_written_tokens(tmp_path, monkeypatch):
    import numpy as np

    text = "\n\n".join(f"unit {i} " + "some words here and there " * 160 for i in range(40))
    (tmp_path / "t.txt").write_text(text)
    flags = ("--tokenizer", "byte", "--val-docs", 5, "--out", tmp_path / "d")
    run(monkeypatch, "--dataset", tmp_path / "t.txt", *flags)
    manifest = shards.load_manifest(tmp_path / "d")
    streams = {s: shards.open_split(tmp_path / "d", s) for s in ("train", "val")}
    train, val = (np.bincount(s.read(0, s.total), minlength=257) for s in streams.values())
    share = (train + 1) / (train + 1).sum()
    assert manifest["unigram_nats"] == pytest.approx(-(val * np.log(share)).sum() / val.sum())
