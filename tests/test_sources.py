"""Sources: the same documents from every kind of file, nothing altered, and bad rows named by file and line."""

import gzip
import heapq
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourscale import sources
from fourscale.config import InputError, RunFailed

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "slept", "naïve", "中文"]


def stories(count=200):
    rng = random.Random(0)
    return [f"{i}. " + " ".join(rng.choices(WORDS, k=rng.randint(3, 40))) + "\n" for i in range(count)]


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"body": text, "n": i}) + "\n" for i, text in enumerate(texts)))
    return path


def texts_of(source):
    return [document.text for document in source.documents()]


def test_the_same_documents_from_every_kind_of_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = ["\ufeffbom\r\nand\rlines\n", "nul \0 here", " \n ", *stories()]
    lines = jsonl(Path("a.jsonl"), texts).read_text()
    Path("a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    Path("b.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.replace("\n", "\r\n\r\n").encode())
    Path("a.txt").write_bytes("<|endoftext|>".join(texts).encode())
    Path("a.txt.gz").write_bytes(gzip.compress("<|endoftext|>".join(texts).encode()))
    pyarrow.parquet.write_table(pyarrow.table({"n": [0] * len(texts), "body": texts}), "a.parquet", row_group_size=33)
    jsonl(Path("half2.jsonl"), texts[90:])
    jsonl(Path("half1.jsonl"), texts[:90])
    for name in ("a.jsonl", "a.jsonl.gz", "b.jsonl", "a.parquet", "a.txt", "a.txt.gz", "half?.jsonl"):
        source = sources.open_source(name, "body", r"\x3c|endoftext|\u003e" if ".txt" in name else None)
        assert texts_of(source) == texts_of(source) == texts  # each pass starts anew
        assert source.entry["name"] == name and source.entry["license"] is None


def test_stdlib_is_this_pythons_own_sources():
    source = sources.open_source("stdlib")
    found = {Path(document.where).name: document.text for document in source.documents()}
    assert found["heapq.py"] == Path(heapq.__file__).read_bytes().decode()
    assert len(found) > 300 and source.total_bytes > 5_000_000 and all(found.values())
    assert not any(part in d.where for d in source.documents() for part in ("site-packages", "/test/", "idlelib"))
    assert source.entry["license"] == "PSF-2.0"


def contents():
    alphabet = st.sampled_from(
        ["a", "é", "中", "😀", " ", "\t", "\n", "\n\n", "\r\n", "\r", "\0", "<>", "<", "\u2028", "x" * 9]
    )
    return st.lists(alphabet, max_size=60).map("".join)


@pytest.fixture
def tiny_limits(monkeypatch):
    """Limits so small that a few characters reach them."""
    monkeypatch.setattr(sources, "UNIT", 8)
    monkeypatch.setattr(sources, "LONGEST_PARAGRAPH", 24)
    monkeypatch.setattr(sources, "LONGEST_LINE", 16)


def test_units_join_to_the_file_and_separated_text_splits_like_python(tiny_limits, tmp_path):
    path = tmp_path / "x.txt"

    @settings(max_examples=300, deadline=None)
    @given(contents())
    def check(text):
        path.write_bytes(text.encode())
        documents = list(sources.read_units(path))
        assert "".join(d.text for d in documents) == text
        assert all(d.text for d in documents) and max((len(d.text) for d in documents), default=0) <= 24 + 16
        separated = [d.text for d in sources.read_separated(path, "<>")]
        assert separated == [part for part in text.split("<>") if part]
        position = 0
        for document in documents:
            assert document.where == f"{path}:{text[:position].count(chr(10)) + 1}"
            position += len(document.text)

    check()


def test_a_file_that_is_one_endless_line(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("中x" * 1_500_000)
    sizes = [len(d.text) for d in sources.read_units(path)]
    assert sum(sizes) == 3_000_000 and max(sizes) <= sources.LONGEST_LINE


@pytest.mark.parametrize(
    ("name", "content", "message"),
    (
        ("a.jsonl", b'{"text": "ok"}\n{"text": "oh\n', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", b'{"text": "ok"}\n\n[1]\n', "a.jsonl:3: a JSON list, not an object"),
        ("a.jsonl", b'{"text": "ok"}\n{"body": "x", "n": 1}\n', "a.jsonl:2: no field 'text'; there are body, n"),
        ("a.jsonl", b'{"text": null}\n', "a.jsonl:1: field 'text' is null"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: field 'text' is int"),
        ("a.jsonl", b'{"text": "\\ud83d\\ude00"}\n{"text": "x\\udc80"}\n', r"a.jsonl:2: \udc80 is a lone surrogate"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "caf\xe9"}\n', "a.jsonl:2: byte 14 of the line (0xe9) is not UTF-8"),
        ("a.txt", b"one\ntwo\ncaf\xe9\n", "a.txt:3: byte 4 of the line (0xe9) is not UTF-8"),
        ("a.txt", b"one\ntwo \xe4\xb8", "a.txt:2: byte 5 of the line (0xe4) is not UTF-8"),
        ("a.txt.gz", gzip.compress(b"lines\n" * 9000)[:-40], "a.txt.gz:"),
        ("a.jsonl.gz", b'{"text": "not gzip"}', "a.jsonl.gz:1: damaged gzip data"),
        ("a.parquet", b"PAR1 not really PAR1", "a.parquet: not a readable Parquet file"),
        ("a.csv", b"text\nhello\n", "can't read"),
    ),
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as e:
        texts_of(sources.open_source(str(tmp_path / name)))
    assert message in str(e.value) and "\n" not in str(e.value)


def test_parquet_columns_and_rows_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x", None], "n": [1, 2]}), path)
    with pytest.raises(InputError, match=r"a\.parquet: no field 'text'; there are body, n: choose with --text-field"):
        list(sources.open_source(str(path)).documents())
    with pytest.raises(InputError, match=r"a\.parquet: row 2: field 'body' is null"):
        list(sources.open_source(str(path), "body").documents())


@pytest.mark.parametrize(
    ("dataset", "doc_sep", "message"),
    (
        ("nothing", None, "no such file; give stdlib, tinystories"),
        ("no/*.jsonl", None, "no file matches"),
        ("no/such.txt", None, "no file matches"),
        (".", None, "a directory; name its files"),
        ("stdlib", r"\n", "--doc-sep: only plain text"),
        ("tinystories", r"\n", "--doc-sep: only plain text"),
        ("a.txt", "", "an empty separator"),
        ("a.txt", "\\x", "not a valid escape"),
    ),
)
def test_sources_that_are_none(tmp_path, monkeypatch, dataset, doc_sep, message):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    with pytest.raises(InputError, match=message) as e:
        sources.open_source(dataset, doc_sep=doc_sep)
    assert "\n" not in str(e.value)


class Info:
    sha = "abc123"
    card_data = {"license": ["mit", "other"]}  # noqa: RUF012


class Rows:
    """What `datasets.load_dataset` returns, as far as it's used."""

    column_names = None

    def __init__(self, texts, fails_at=None):
        self.texts, self.fails_at = texts, fails_at

    def iter(self, batch_size):
        for i in range(0, len(self.texts), batch_size):
            if self.fails_at is not None and i >= self.fails_at:
                raise ConnectionError("reset by peer")
            yield {"story": self.texts[i : i + batch_size], "n": [0] * batch_size}


def test_hub_rows_stream_from_one_revision(monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # other tests set it for the process
    texts, asked = stories(700), []
    rows = Rows(texts)

    def load(repo, config, **options):
        asked.append((repo, config, options))
        return rows

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, repo, timeout: Info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(InputError, match=r"someone/some-set:part: no field 'text'; there are story, n"):
        texts_of(sources.open_source("someone/some-set:part"))
    source = sources.open_source("someone/some-set:part", "story")
    assert texts_of(source) == texts_of(source) == texts
    expected = {"split": "train", "streaming": True, "revision": "abc123"}
    assert len(asked) > 3 and all(call == ("someone/some-set", "part", expected) for call in asked)
    assert source.entry["revision"] == "abc123" and source.entry["license"] == "mit, other"
    assert sources.fingerprint("someone/some-set") is None

    asked.clear()
    source = sources.open_source("fineweb-edu", "story")
    assert asked[0][:2] == ("HuggingFaceFW/fineweb-edu", "sample-10BT") and source.entry["license"] == "ODC-By-1.0"
    assert sources.open_source("tinystories", "story").entry["license"] == "CDLA-Sharing-1.0"
    rows = Rows(texts, fails_at=300)
    with pytest.raises(RunFailed, match=r"lost the hub after row 512 \(reset by peer\); run the command again"):
        texts_of(source)


def test_the_hub_out_of_reach_is_one_quick_line(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def unreachable(self, repo, timeout):
        assert timeout <= 10
        raise sources._http_error()("[Errno -2] Name or service not known\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    for dataset in ("tinystories", "someone/some-set"):
        with pytest.raises(InputError, match="the Hugging Face hub can't be reached") as e:
            sources.open_source(dataset)
        assert "\n" not in str(e.value)
