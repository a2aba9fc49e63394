"""prepare.py: shares, limits, malformed rows, names and text that are odd; and what strangers found."""

import gzip
import json
import os
import random
import subprocess
import sys

import pytest
from conftest import run as door
from test_prepare import DOOR, files_of, journal_of, jsonl, launch, prepared, run, split_texts, stories

from fourscale import assembly, audit, journal, shards
from fourscale.cli import InputError

# ---- several sources, limits, malformed rows


def test_shares_through_the_door(tmp_path, monkeypatch, capsys):
    a, b = jsonl(tmp_path / "a.jsonl", stories(400, 1)), jsonl(tmp_path / "b.jsonl", stories(400, 2))
    args = ["--dataset", f"{a}:0.7", "--dataset", f"{b}:0.3", "--tokenizer", "byte", "--val-fraction", 0.1]
    run(monkeypatch, *args, "--max-tokens", "10_001", "--out", tmp_path / "cut", "--shard-tokens", 3000)
    manifest = shards.load_manifest(tmp_path / "cut")
    assert [source["train_tokens"] for source in manifest["sources"]] == [7001, 3000]
    assert manifest["splits"]["train"]["tokens"] == 10_001 and audit.verify(tmp_path / "cut") == []
    assert [shard["tokens"] for shard in manifest["splits"]["train"]["shards"]] == [3000, 3000, 1001, 3000]
    said = capsys.readouterr().out
    assert "a.jsonl: 7,001 training tokens (70.0030% asked: 7/10)" in said
    total = sum(part["tokens"] for part in manifest["splits"].values())
    assert f"wrote {tmp_path / 'cut'}: {total:,} tokens (0.000 GB) in" in said.splitlines()[-1]
    run(monkeypatch, *args, "--out", tmp_path / "all")
    tokens = [source["train_tokens"] for source in shards.load_manifest(tmp_path / "all")["sources"]]
    assert abs(tokens[1] * 7 - tokens[0] * 3) <= 7 and sum(tokens) > 20_000
    run(monkeypatch, *args, "--max-tokens", "1e6", "--out", tmp_path / "short")
    assert f"note: the text has {sum(tokens):,} training tokens in these shares, fewer than" in capsys.readouterr().out


def test_a_malformed_row_stops_and_skip_bad_goes_on_from_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(assembly, "COMMIT_SECONDS", 0.0)
    texts = stories(30_000)
    corpus = jsonl(tmp_path / "a.jsonl", texts)
    lines = corpus.read_text().splitlines(keepends=True)
    lines[25_000] = '{"text": 3}\n'
    lines[27_000] = '{"text": "cut off\n'
    corpus.write_text("".join(lines))
    args = ["--dataset", corpus, "--tokenizer", "byte", "--out", tmp_path / "data"]
    with pytest.raises(InputError, match=r"a\.jsonl:25001: "):
        run(monkeypatch, *args)
    assert "assembly" in journal_of(tmp_path / "data")
    run(monkeypatch, *args, "--skip-bad")
    said = capsys.readouterr().out
    assert "going on where an interrupted run was, after" in said and "skipped: " in said and "a.jsonl:27001: " in said
    assert "rows read 30,000 = 29,998 written + 2 malformed" in said
    run(monkeypatch, *args[:-1], tmp_path / "at once", "--skip-bad")
    assert files_of(tmp_path / "data") == files_of(tmp_path / "at once")


def test_groups_and_duplicates_are_on_record(tmp_path, monkeypatch, capsys):
    rows = [{"text": t, "url": f"https://www.s{i % 20}.org/{i}"} for i, t in enumerate([*stories(200), *stories(30)])]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["--dataset", tmp_path / "a.jsonl", "--tokenizer", "byte", "--group-field", "url", "--val-fraction", 0.2]
    run(monkeypatch, *args, "--dedup", "--out", tmp_path / "data")
    manifest = shards.load_manifest(tmp_path / "data")
    assert manifest["deduplication"].startswith("first of texts that are") and "'url'" in manifest["split"]["rule"]
    train, val = split_texts(tmp_path / "data", "train"), split_texts(tmp_path / "data", "val")
    assert sorted(train + val) == sorted(stories(200)) and val
    site = {row["text"]: row["url"].split("/")[2] for row in rows[:200]}
    assert not {site[t] for t in train} & {site[t] for t in val}
    assert "rows read 230 = 200 written + " in capsys.readouterr().out
    run(monkeypatch, *args, "--out", tmp_path / "kept")
    assert "duplicates kept; --dedup drops them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    (
        (("--dataset", "a.jsonl", "--dataset", "b.jsonl", "--max-docs", 5), "--max-docs: counts the documents of one"),
        (("--dataset", "a.jsonl:1", "--dataset", "b.jsonl:2", "--val-docs", 5), "--val-docs: chosen from all"),
        (("--dataset", "a.jsonl", "--val-docs", 5, "--group-field", "n"), "--val-docs: chosen from all of the corpus"),
        (("--dataset", "a.jsonl:0.5", "--dataset", "b.jsonl"), "--dataset"),
        (("--dataset", "a.jsonl:0", "--dataset", "b.jsonl:1"), "--dataset"),
        (("--dataset", "a.jsonl", "--max-tokens", 0), "--max-tokens 0: must be at least 1"),
        (("--dataset", "a.jsonl", "--workers", 0), "--workers 0: must be at least 1"),
        (("--dataset", "a.jsonl", "--group-field", "site"), "no field 'site'"),
        (("--dataset", "a.jsonl", "--text-field", "body"), "no field 'body'"),
    ),
)
def test_what_cannot_be_meant_is_refused_and_leaves_nothing(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", stories(50)), jsonl(tmp_path / "b.jsonl", stories(50, 1))
    with pytest.raises(InputError) as e:
        run(monkeypatch, *args, "--tokenizer", "byte")
    assert message in str(e.value) and "\n" not in str(e.value)
    assert not (tmp_path / "data").exists()


def test_a_plain_locale_and_odd_text(tmp_path):
    """LC_ALL=C, names and text beyond ASCII, a line of 10 MB, CRLF, NUL and a byte order mark: all of it comes back."""
    texts = ["naïve " * 1_500_000, "\ufeffmark\r\nCRLF \0 \u2028 中", *stories(50)]
    jsonl(tmp_path / "größe.jsonl", texts)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))} | {"LC_ALL": "C"}
    args = [sys.executable, DOOR, "--dataset", str(tmp_path / "größe.jsonl"), "--tokenizer", "bpe:300"]
    done = subprocess.run([*args, "--out", str(tmp_path / "d")], capture_output=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(split_texts(tmp_path / "d", "train") + split_texts(tmp_path / "d", "val")) == sorted(texts)
    assert b"longest document 10,500,000 bytes" in done.stdout


@pytest.mark.slow
def test_a_wide_vocabulary_from_text_to_a_resumed_run(tmp_path):
    """Above 65,536 ids shards are uint32, and nothing on the way to a sample wraps an id."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(5, 9))) for _ in range(60_000)]
    texts = [" ".join(words[i : i + 50]) for i in range(0, len(words), 50)]
    corpus = jsonl(tmp_path / "wide.jsonl", [f"{text} {i}" for i, text in enumerate(texts * 2)])
    data, ckpt = tmp_path / "data", tmp_path / "ckpt"
    door("prepare.py", "--dataset", corpus, "--tokenizer", "bpe:131072", "--out", data)
    manifest = shards.load_manifest(data)
    assert manifest["dtype"] == "uint32" and manifest["tokenizer"]["vocab_size"] > 100_000
    stream = shards.open_split(data, "train")
    assert stream.read(0, stream.total).max() > 65_535 and audit.verify(data) == []
    assert set(split_texts(data, "train")) <= {f"{text} {i}" for i, text in enumerate(texts * 2)}
    shape = ("--d-model", 16, "--n-layers", 1, "--n-heads", 2, "--ctx", 32, "--global-bsz", 8, "--steps", 6)
    flags = ("--data", data, "--ckpt-dir", ckpt, *shape, "--eval-tokens", 300, "--backend", "gloo", "--resume", "auto")
    door("train.py", *flags, "--stop-after", 3)
    door("train.py", *flags)
    assert (ckpt / "DONE.json").is_file()
    door("sample.py", "--ckpt", ckpt, "--prompt", words[0], "--max-new-tokens", 8, "--temperature", 0)


def test_files_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch):
    corpus, real = jsonl(tmp_path / "a.jsonl", stories()), assembly.Assembly.run

    def change(self, *args):
        real(self, *args)
        jsonl(corpus, stories(301))

    args = ["--dataset", corpus, "--tokenizer", "byte", "--out", tmp_path / "data"]
    with monkeypatch.context() as patch, pytest.raises(InputError, match="files have changed while they were read"):
        patch.setattr(assembly.Assembly, "run", change)
        run(patch, *args)
    assert not (tmp_path / "data").exists()
    run(monkeypatch, *args)


# ---- what strangers found


@pytest.mark.parametrize("workers", (1, 2))
def test_what_lies_beyond_a_limit_stops_nothing(tmp_path, workers):
    """Neither a malformed row of the same chunk nor a damaged file that is read ahead."""
    lines = jsonl(tmp_path / "1.jsonl", stories(300)).read_text()
    (tmp_path / "1.jsonl").write_text(lines + '{"text": 5}\n')
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-50])
    args = ("--dataset", tmp_path / "*.jsonl*", "--tokenizer", "byte", "--val-fraction", 0.2, "--workers", workers)
    done = launch(*args, "--max-docs", 200, "--out", tmp_path / "docs")
    assert done.returncode == 0 and "rows read 200 = 200 written" in done.stdout, done.stderr
    done = launch(*args, "--max-tokens", 5000, "--out", tmp_path / "tokens")
    assert done.returncode == 0, done.stderr
    done = launch(*args, "--out", tmp_path / "all")
    assert (
        done.returncode == 2 and "1.jsonl:301: field 'text' is int" in done.stderr and "(or --skip-bad)" in done.stderr
    )
    done = launch(*args, "--skip-bad", "--out", tmp_path / "all")
    assert done.returncode == 0 and "2 malformed" in done.stdout and "damaged .jsonl.gz" in done.stdout, done.stderr


@pytest.mark.parametrize("flags", ((), ("--dedup",), ("--max-docs", 700), ("--max-docs", 700, "--dedup")))
def test_val_docs_is_exact_with_limits_and_duplicates(tmp_path, monkeypatch, flags):
    texts = [*stories(400), *stories(400)[::-1], *stories(300, 5)]
    out = prepared(tmp_path, monkeypatch, "a", texts, "--val-docs", 20, *flags)
    assert len(set(split_texts(out, "val"))) == 20


def test_a_limit_still_holds_something_out(tmp_path, monkeypatch, capsys):
    out = prepared(tmp_path, monkeypatch, "a", stories(3000), "--max-tokens", 2000)
    assert shards.open_split(out, "train").total == 2000 and split_texts(out, "val")
    a, b = jsonl(tmp_path / "x.jsonl", stories(900, 1)), jsonl(tmp_path / "y.jsonl", stories(2, 2))
    run(monkeypatch, "--dataset", a, "--dataset", b, "--tokenizer", "byte", "--out", tmp_path / "two")
    said = capsys.readouterr().out
    assert f"note: nothing of {b} is held out, so the held-out loss will say nothing about it" in said
    with pytest.raises(InputError, match=r"no text for the train split, of 1 document\(s\) in all; raise --max-docs"):
        prepared(tmp_path, monkeypatch, "b", stories(3000), "--max-docs", 1)


def test_a_source_that_gives_nothing_is_named(tmp_path, monkeypatch):
    a, empty = jsonl(tmp_path / "a.jsonl", stories()), jsonl(tmp_path / "b.jsonl", [])
    args = ["--tokenizer", "byte", "--out", tmp_path / "data"]
    with pytest.raises(InputError, match=r"b\.jsonl: its share comes to no training token"):
        run(monkeypatch, "--dataset", f"{a}:0.5", "--dataset", f"{empty}:0.5", *args)
    with pytest.raises(InputError, match=r"a\.jsonl: its share comes to no training token"):
        run(monkeypatch, "--dataset", f"{a}:1e-9", "--dataset", f"{jsonl(tmp_path / 'c.jsonl', stories(9))}:1", *args)
    with pytest.raises(InputError, match=r"a\.jsonl: all of its 300 rows are malformed, the first: .*no field 'body'"):
        run(monkeypatch, "--dataset", a, "--text-field", "body", "--skip-bad", *args)
    assert not (tmp_path / "data").exists()


def test_links_that_lead_nowhere_are_told(tmp_path, monkeypatch):
    jsonl(tmp_path / "a.jsonl", stories())
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "lost mount" / "b.jsonl")
    with pytest.raises(InputError, match=r"b\.jsonl: no readable file \(a broken link\?\)"):
        run(monkeypatch, "--dataset", tmp_path / "*.jsonl", "--out", tmp_path / "data")


def test_one_file_in_two_spellings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", stories())
    run(monkeypatch, "--dataset", "a.jsonl", "--tokenizer", "byte")
    run(monkeypatch, "--dataset", tmp_path / "a.jsonl", "--tokenizer", "byte")
    assert "already made by this very command; nothing to do" in capsys.readouterr().out
    with pytest.raises(InputError, match="given twice"):
        run(monkeypatch, "--dataset", "a.jsonl:1", "--dataset", "./a.jsonl:2", "--tokenizer", "byte")


def test_a_lost_shard_is_no_finished_directory(tmp_path, monkeypatch):
    out = prepared(tmp_path, monkeypatch, "a", stories())
    (out / "val_000.bin").unlink()
    with pytest.raises(InputError, match=r"val_000\.bin: missing; .*delete .* and run prepare\.py again"):
        prepared_again = ["--dataset", tmp_path / "a.jsonl", "--out", out, "--tokenizer", "byte"]
        run(monkeypatch, *prepared_again)


def test_publishing_sees_a_shard_that_is_gone(tmp_path, monkeypatch):
    args = ["--dataset", jsonl(tmp_path / "a.jsonl", stories()), "--tokenizer", "byte", "--out", tmp_path / "data"]

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "write_manifest", stop)
        run(patch, *args)
    (tmp_path / "data" / "train_000.bin").unlink()
    with pytest.raises(InputError, match=r"train_000\.bin: gone since it was made; delete"):
        run(monkeypatch, *args)


@pytest.mark.parametrize("damage", ("[]", '{"lanes": []}', "{", "tokenizer"))
def test_a_tampered_journal_is_one_line(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(assembly, "COMMIT_SECONDS", 0.0)
    args = [
        "--dataset",
        jsonl(tmp_path / "a.jsonl", stories(20_000)),
        "--tokenizer",
        "byte",
        "--out",
        tmp_path / "data",
    ]

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(assembly.Assembly, "entries", stop)
        run(patch, *args)
    path = tmp_path / "data" / journal.UNFINISHED / "journal.json"
    if damage == "tokenizer":
        path.with_name("tokenizer.json").unlink()
    elif damage.startswith('{"'):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"assembly": json.loads(damage)}))
    else:
        path.write_text(damage)
    with pytest.raises(InputError, match=r"delete .* to start over"):
        run(monkeypatch, *args)


def test_names_that_no_terminal_or_utf8_can_hold(tmp_path):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    with open(folder + b"/\xe9.jsonl", "wb") as f:
        f.write(b'{"text": "one two"}\n{"\\ud800": 1}\n{"text": "three"}\n{"text": "four"}\n')
    args = [
        sys.executable,
        DOOR,
        "--dataset",
        folder + b"/*.jsonl",
        "--tokenizer",
        "byte",
        "--skip-bad",
        "--val-docs",
        "1",
    ]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*args, "--out", os.fsencode(tmp_path) + b"/d\xc3\xbc"], capture_output=True, env=env, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert b"1 malformed" in done.stdout and audit.verify(tmp_path / "dü") == []


def test_a_tokenizer_that_changes_text_is_said_aloud(tmp_path, monkeypatch, capsys):
    import tokenizers

    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"[UNK]": 0, "[EOS]": 1, "the": 2, "cat": 3}, unk_token="[UNK]")
    )
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["[EOS]"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[EOS]"}')
    out = prepared(tmp_path, monkeypatch, "a", stories(), "--tokenizer", tmp_path)
    told = shards.load_manifest(out)["normalisation"]
    assert told.startswith("by the tokenizer: Lowercase") and "not reversible" in told
    assert f"changes the text; {told}" in capsys.readouterr().out
