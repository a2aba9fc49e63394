"""Sources: the same documents from every kind of file, nothing altered, whole from any chunk on, and faults named."""

import contextlib
import csv
import functools
import gzip
import heapq
import http.server
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT

from fourscale import documents, files, sources
from fourscale.cli import InputError, RunFailed
from fourscale.documents import BadRow, Document

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "slept", "naïve", "中文"]
SEPARATOR = "<|endoftext|>"
datasets.disable_progress_bars()


def stories(count=200):
    rng = random.Random(0)
    return [f"{i}. " + " ".join(rng.choices(WORDS, k=rng.randint(3, 40))) + "\n" for i in range(count)]


def zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as f:
        f.write(data)
    return sink.getvalue().to_pybytes()


def stored(name, data):
    """As the suffix says, in two members or frames."""
    compress = {".gz": functools.partial(gzip.compress, mtime=0), ".zst": zstd}.get(Path(name).suffix)
    return compress(data[: len(data) // 3]) + compress(data[len(data) // 3 :]) if compress else data


def write(path, texts, **columns):
    """`texts` as a file of the kind that `path` names, or as a save_to_disk directory; `columns` beside them."""
    name = str(path)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)] or [{}] * len(
        texts
    )
    if ".txt" in name:
        data = SEPARATOR.join(texts).encode()
    elif ".jsonl" in name:
        lines = [json.dumps({"n": i, "text": t} | rows[i], ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
        data = "".join(line + "\n" for line in lines).encode()
    elif ".csv" in name:
        f = io.StringIO(newline="")
        writer = csv.writer(f)
        writer.writerow(["n", "text", *columns])
        writer.writerows([i, t, *rows[i].values()] for i, t in enumerate(texts))
        data = f.getvalue().encode()
    else:
        table = {"n": list(range(len(texts))), "text": texts} | columns
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.table(table), path, row_group_size=max(17, len(texts) // 4))
        else:
            datasets.Dataset.from_dict(table).save_to_disk(path, num_shards=min(2, len(texts)))
        return path
    Path(path).write_bytes(stored(name, data))
    return path


PLAIN = ("a.txt", "a.jsonl", "a.csv", "a.parquet", "saved")
KINDS = ("a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.csv.gz", "a.csv.zst")
KINDS = (*KINDS, "a.parquet", "saved")


def opened(dataset, **options):
    return sources.open_source(str(dataset), doc_sep=SEPARATOR if ".txt" in str(dataset) else None, **options)


def texts_of(source):
    rows = list(source.documents())
    assert all(isinstance(row, Document) for row in rows), [row for row in rows if isinstance(row, BadRow)]
    return [row.text for row in rows]


def messages(source):
    return [row.message for row in source.documents() if isinstance(row, BadRow)]


def whole_from_everywhere(source):
    """Every chunk survives pickling, and from the end of each the remaining sequence is the same."""
    chunks = list(source.chunks(None))
    for i, chunk in enumerate(chunks):
        assert pickle.loads(pickle.dumps(chunk)) == chunk
        rest = list(source.chunks(json.loads(json.dumps(chunk.after))))
        assert [(c.args, c.after) for c in rest] == [(c.args, c.after) for c in chunks[i + 1 :]]
    return chunks


def shrink(monkeypatch):
    """Chunks of 64 bytes and units of 8, so that short texts reach every limit."""
    monkeypatch.setattr(files, "CHUNK_BYTES", 64)
    monkeypatch.setattr(files, "PARAGRAPHS", 24)
    monkeypatch.setattr(documents, "UNIT", 8)
    monkeypatch.setattr(documents, "LONGEST_PARAGRAPH", 24)


@pytest.fixture
def small(monkeypatch):
    shrink(monkeypatch)


ODD = [
    "\ufeffbom\r\nand\rlines\n",
    "nul \0 here",
    " \n ",
    'a "quoted", one\n"',
    "line\u2028sep\x85\x0b",
    "\n\n",
    '"',
    ",",
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_documents_from_every_kind_whole_from_any_chunk_on(small, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    texts = [*ODD, *stories(60), *ODD]
    source = opened(write(kind, texts))
    assert texts_of(source) == texts_of(source) == texts  # each pass starts anew
    chunks = whole_from_everywhere(source)
    assert len(chunks) > 5 and sum(chunk.size for chunk in chunks) == source.total_bytes
    assert source.entry["name"] == kind and source.entry["license"] is None
    assert str(tmp_path) not in json.dumps(source.entry)


def test_real_sizes_of_chunks(tmp_path):
    texts = [text * 40 for text in stories(1500)]
    for kind in KINDS:
        source = opened(write(tmp_path / kind, texts))
        chunks = list(source.chunks(None))
        assert 4 < len(chunks) < 18, kind
        assert max(len(pickle.dumps(chunk)) for chunk in chunks) < 2 * files.CHUNK_BYTES
        assert [d.text for chunk in chunks for d in chunk.documents()] == texts
        assert list(source.chunks(chunks[2].after)) == chunks[3:] or kind.endswith(("gz", "zst"))


def test_globs_urls_and_several_files(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = stories(90)
    Path("deep/er").mkdir(parents=True)
    write("deep/1.jsonl", texts[:30])
    write("deep/2.csv.gz", texts[30:31])
    write("deep/er/3.parquet", texts[31:])
    Path("deep/0.jsonl").touch()
    memory = fsspec.filesystem("memory")
    memory.put("deep/", "/corpus/", recursive=True)
    for pattern in ("deep/**/*.*", f"file://{tmp_path}/deep/**/*.*", "memory://corpus/**/*.*"):
        source = sources.open_source(pattern)
        assert texts_of(source) == texts
        whole_from_everywhere(source)
        assert source.entry["files"] == 4 and source.entry["formats"] == [".csv.gz", ".jsonl", ".parquet"]
    for i in random.Random(0).sample(range(90), 90):
        write(f"{i:02d}.jsonl", texts[i : i + 1])
    assert texts_of(sources.open_source("*.jsonl")) == texts
    assert texts_of(sources.open_source("memory://corpus/1.jsonl")) == texts[:30]
    before = sources.fingerprint("memory://corpus/1.jsonl")
    assert before == sources.fingerprint("memory://corpus/1.jsonl")
    memory.pipe("/corpus/1.jsonl", b'{"text": "other"}\n')
    assert before != sources.fingerprint("memory://corpus/1.jsonl")


def test_stdlib_is_this_pythons_own_sources():
    source = sources.open_source("stdlib")
    found = {Path(document.where).name: document.text for document in source.documents()}
    assert found["heapq.py"] == Path(heapq.__file__).read_bytes().decode()
    assert len(found) > 300 and source.total_bytes > 5_000_000 and all(found.values())
    assert not any(part in d.where for d in source.documents() for part in ("site-packages", "/test/", "idlelib"))
    assert source.entry["license"] == "PSF-2.0"
    assert sum(chunk.size for chunk in whole_from_everywhere(source)) == source.total_bytes


def test_modules_that_are_empty_or_not_utf8_are_passed_over(tmp_path):
    for name, content in (("a.py", b""), ("b.py", b"# caf\xe9"), ("c.py", b"# ok")):
        (tmp_path / name).write_bytes(content)
    rows = list(documents.parse_modules([str(tmp_path / name) for name in ("a.py", "b.py", "c.py")]))
    assert rows == [Document("# ok", str(tmp_path / "c.py"))]


# ---- fields and groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("a.csv", "a.parquet", "saved"))
def test_missing_columns_are_known_at_once(tmp_path, kind):
    path = write(tmp_path / kind, ["x", "y"])
    with pytest.raises(InputError, match=r"no field 'body'; there are n, text: choose with --text-field"):
        sources.open_source(str(path), text_field="body")
    with pytest.raises(InputError, match=r"no field 'url'; there are n, text: choose with --group-field"):
        sources.open_source(str(path), group_field="url")
    assert sources.open_source(str(path), group_field="n").entry["group_field"] == "n"


def test_the_last_of_many_files_is_asked_too(tmp_path):
    write(tmp_path / "1.parquet", ["x"])
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "2.parquet")
    with pytest.raises(InputError, match=r"2\.parquet: no field 'text'; there are body"):
        sources.open_source(str(tmp_path / "*.parquet"))
    (tmp_path / "b.csv").write_text("text,text\nx,y\n")
    with pytest.raises(InputError, match=r"b\.csv: more than one field 'text'"):
        sources.open_source(str(tmp_path / "*.csv"))
    (tmp_path / "b.csv").write_text("\ntext\nx\n")
    with pytest.raises(InputError, match=r"b\.csv: no field 'text'; there are none"):
        sources.open_source(str(tmp_path / "*.csv"))
    (tmp_path / "b.csv").write_text("")
    assert texts_of(sources.open_source(str(tmp_path / "*.csv"))) == []


@pytest.mark.parametrize("kind", ("a.jsonl", "a.csv", "a.parquet", "saved"))
def test_groups(tmp_path, kind):
    urls = [
        "https://www.Example.org:8080/a?b",
        "http://user@example.org",
        "HTTPS://EXAMPLE.ORG",
        "book 7",
        "http://[oops",
        "",
    ]
    texts = stories(len(urls))
    path = write(tmp_path / kind, texts, url=urls)
    rows = list(sources.open_source(str(path), group_field="url").documents())
    expected = ["example.org", "example.org", "example.org", "book 7", "http://[oops"]
    assert [row.group for row in rows[:5]] == expected and [row.text for row in rows[:5]] == texts[:5]
    assert "field 'url', asked for by --group-field, is empty" in rows[5].message
    assert [row.group for row in sources.open_source(str(path), group_field="n").documents()] == list("012345")
    assert all(row.group is None for row in sources.open_source(str(path)).documents())
    assert [row.group for row in sources.open_source(str(path), group_field="text").documents()] == texts
    if kind == "a.jsonl":
        path.write_text('{"text": "x", "url": null}\n{"text": "x"}\n{"text": "x", "url": "\\ud800"}\n')
        null, missing, surrogate = messages(sources.open_source(str(path), group_field="url"))
        assert "is empty" in null and "no field 'url'" in missing and "lone surrogate" in surrogate


# ---- what a spec may be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    (
        ("nothing", {}, "no such file; give stdlib, tinystories"),
        ("no/*.jsonl", {}, "no file matches"),
        ("no/such.txt", {}, "no file matches"),
        ("file:///no/such.txt", {}, "no file matches"),
        ("nosuch://x/y.txt", {}, "nosuch"),
        (".", {}, "a directory; name its files"),
        ("a.md", {}, r"can't read a\.md; readable are \.txt, \.txt\.gz"),
        ("stdlib", {"doc_sep": r"\n"}, "--doc-sep: only plain text"),
        ("tinystories", {"doc_sep": r"\n"}, "--doc-sep: only plain text"),
        ("a.txt", {"doc_sep": ""}, "an empty separator"),
        ("a.txt", {"doc_sep": "\\x"}, "not a valid escape"),
        ("a.txt", {"doc_sep": "\\ud800"}, "not a valid escape"),
        ("a.txt", {"group_field": "url"}, "--group-field url: plain text has no fields"),
        ("stdlib", {"group_field": "url"}, "--group-field url: plain text has no fields"),
        ("a.txt", {"name": "x"}, "--name: only a data set of the hub"),
        ("saved", {"revision": "x"}, "--revision: only a data set of the hub"),
        ("stdlib", {"split": "test"}, "--split test: only data sets have splits"),
        ("saved", {"split": "test"}, "--split test: saved is a single data set"),
        ("splits", {}, "--split train: splits has one, two"),
        ("owner/name:one", {"name": "two"}, "--name two: --dataset owner/name:one names another"),
    ),
)
def test_sources_and_flags_that_mean_nothing(tmp_path, monkeypatch, dataset, options, message):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    Path("a.md").write_text("text")
    write("saved", ["x"])
    datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": [k]}) for k in ("one", "two")}).save_to_disk("splits")
    with pytest.raises(InputError, match=message) as e:
        sources.open_source(dataset, **options)
    assert "\n" not in str(e.value)
    source = sources.open_source("splits", split="two")
    assert texts_of(source) == ["two"] and source.entry["split"] == "two"


def test_a_missing_backend_names_its_package():
    code = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from fourscale import sources\n"
        "try: sources.open_source('s3://bucket/a.jsonl')\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == (
        "InputError --dataset s3://bucket/a.jsonl: needs a package that is missing; pip install s3fs\n"
    ), done.stderr


def test_shares(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sources.shares(["a:0.7", "b:0.3"]) == [("a", Fraction(7, 10)), ("b", Fraction(3, 10))]
    assert sources.shares(["o/n:cfg:2", "./data:1e0"]) == [("o/n:cfg", Fraction(2, 3)), ("./data", Fraction(1, 3))]
    assert sources.shares(["a", "o/n:cfg", "s3://b/x"]) == [("a", None), ("o/n:cfg", None), ("s3://b/x", None)]
    assert sources.shares(["a:.5"]) == [("a", Fraction(1))]
    Path("odd:2").touch()
    assert sources.shares(["odd:2"]) == [("odd:2", None)]
    for specs, message in (
        (["a:0.5", "b"], "--data b: has no share though others have"),
        (["a:0", "b:1"], "--data a:0: the share must be above 0"),
        (["a:-1", "b:1"], "--data a:-1: the share must be above 0"),
        (["a:1", "a:2"], "--data a: given twice"),
    ):
        with pytest.raises(InputError, match=message):
            sources.shares(specs, "--data")


def test_fingerprints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a.jsonl", ["x"])
    write("saved", ["x"])
    assert (
        sources.fingerprint("a.jsonl") == sources.fingerprint("./a.jsonl") == sources.fingerprint(f"{tmp_path}/a.jso*")
    )
    assert sources.fingerprint("someone/some-set") is None and sources.fingerprint("stdlib") == sources.fingerprint(
        "stdlib"
    )
    for name, changed in (("a.jsonl", "a.jsonl"), ("saved", next(Path("saved").glob("*.arrow")))):
        before = sources.fingerprint(name)
        os.utime(changed, ns=(1, 1))
        assert sources.fingerprint(name) != before


# ---- the network -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(directory, cut=None):
    """A web server of files; those in `cut` break off in the middle."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(directory))

        def log_message(self, *args):
            pass

        def copyfile(self, source, out):
            data = source.read()
            out.write(data[: len(data) // 2] if cut and cut in self.path else data)

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def test_the_web(tmp_path):
    texts = stories(300)
    for kind in ("a.jsonl", "a.csv.zst", "a.txt.gz", "b.jsonl"):
        write(tmp_path / kind, texts)
    with server(tmp_path, cut="b.jsonl") as address:
        for url in (f"{address}/a.jsonl?download=true", f"{address}/a.csv.zst", f"{address}/a.txt.gz"):
            assert texts_of(opened(url)) == texts
        with pytest.raises(InputError, match=r"nothing\.jsonl: no file matches"):
            sources.open_source(f"{address}/nothing.jsonl")
        source = sources.open_source(f"{address}/b.jsonl")
        with pytest.raises(RunFailed, match=r"b\.jsonl: lost \(.*\); the same command goes on where it was"):
            list(source.documents())
    with pytest.raises(InputError, match=r"a\.jsonl: can't be reached \(.*\); check address and login"):
        sources.open_source(f"{address}/a.jsonl")


class Info:
    sha = "abc123"
    card_data = {"license": ["mit", "other"]}  # noqa: RUF012


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set in three files, streamed by `datasets`, as if `datasets` had been asked for one of the hub; what was
    asked for."""
    import huggingface_hub

    texts, real, asked = stories(2000), datasets.load_dataset, []
    for name, part in (("1", texts[:700]), ("2", texts[700:701]), ("3", texts[701:])):
        write(tmp_path / f"{name}.parquet", part)

    paths = [str(path) for path in sorted(tmp_path.glob("*.parquet"))]

    def load(repo, config, **options):
        asked.append((repo, config, options))
        return real("parquet", data_files=paths, split="train", streaming=True)

    def info(self, repo, revision, timeout):
        assert timeout <= 10
        if revision == "gone":
            raise huggingface_hub.errors.RevisionNotFoundError("404", response=Response())
        return Info

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # other tests set it for the process
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return texts, asked


class Response:
    headers, request = {}, None


def test_hub_rows_stream_from_one_revision_and_on_from_any_chunk(hub, monkeypatch):
    texts, asked = hub
    monkeypatch.setattr(files, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(sources, "HUB_ROWS", 30)
    with pytest.raises(InputError, match=r"someone/some-set:part: no field 'story'; there are n, text"):
        sources.open_source("someone/some-set:part", text_field="story")
    source = sources.open_source("someone/some-set", name="part", split="all", revision="v1")
    assert texts_of(source) == texts_of(source) == texts
    expected = {"split": "all", "streaming": True, "revision": "abc123"}
    assert len(asked) == 2 and all(call[:2] == ("someone/some-set", "part") for call in asked)
    assert asked[-1][2] == expected
    made = {"name": "someone/some-set", "config": "part", "split": "all", "revision": "abc123", "text_field": "text"}
    assert source.entry == made | {"license": "mit, other"}
    chunks = list(source.chunks(None))
    assert len(chunks) > 20
    overlapping = source.chunks(None)
    assert [next(overlapping) for _ in range(5)] + (list(source.chunks(None)) and list(overlapping)) == chunks
    for i, chunk in enumerate(chunks):  # the state may describe one and the same place in several ways
        rest = list(source.chunks(json.loads(json.dumps(chunk.after))))
        assert [(c.args, c.size) for c in rest] == [(c.args, c.size) for c in chunks[i + 1 :]]
    with pytest.raises(InputError, match=r"--revision gone: someone/some-set has no such branch, tag or commit"):
        sources.open_source("someone/some-set", revision="gone")


def test_named_sets_know_their_licence(hub):
    _, asked = hub
    assert sources.open_source("fineweb-edu").entry["license"] == "ODC-By-1.0"
    assert asked[0][:2] == ("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert sources.open_source("tinystories").entry["license"] == "CDLA-Sharing-1.0"


def test_a_hub_lost_midway_fails_the_run(hub, tmp_path):
    source = sources.open_source("someone/some-set")
    (tmp_path / "3.parquet").unlink()
    with pytest.raises(RunFailed, match=r"lost the hub after row \d+ \(.*\); the same command goes on where it was"):
        list(source.documents())


def test_the_hub_out_of_reach_is_one_quick_line(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def unreachable(self, repo, revision, timeout):
        assert timeout <= 10
        raise sources._http_error()("[Errno -2] Name or service not known\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    for dataset in ("tinystories", "someone/some-set"):
        with pytest.raises(InputError, match="the Hugging Face hub can't be reached") as e:
            sources.open_source(dataset)
        assert "\n" not in str(e.value)


def test_a_copy_in_the_cache_is_read_offline(tmp_path):
    """`datasets` names the directory of a cached copy by its commit; HF_HUB_OFFLINE counts when it's imported."""
    commit, texts = "a0" * 20, stories(300)
    write(tmp_path / "a.parquet", texts)
    datasets.load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "made"))
    (made,) = (tmp_path / "made").glob("parquet/*/*/*/dataset_info.json")
    copy = tmp_path / "cache" / "owner___name" / "default" / "0.0.0" / commit
    shutil.copytree(made.parent, copy)
    (copy / "parquet-train.arrow").rename(copy / "name-train.arrow")
    code = (
        "import json, sys\nfrom fourscale import files, sources\nfiles.CHUNK_BYTES = 5000\n"
        "try:\n"
        "    source = sources.open_source('owner/name', revision=sys.argv[1] if len(sys.argv) > 1 else None)\n"
        "    chunks = list(source.chunks(None))\n"
        "    assert len(chunks) > 3 and list(source.chunks(chunks[1].after)) == chunks[2:]\n"
        "    assert sum(chunk.size for chunk in chunks) == source.total_bytes\n"
        "    print(json.dumps([source.entry, [d.text for d in source.documents()]]))\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    ask = functools.partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True)
    done = ask([sys.executable, "-c", code])
    entry, read = json.loads(done.stdout)
    assert read == texts and entry["revision"] == commit and entry["rows"] == 300
    done = ask([sys.executable, "-c", code, "b1" * 20])
    assert done.stdout == f"InputError --revision {'b1' * 20}: HF_HUB_OFFLINE is set, and the cache holds {commit}\n"
