"""The recipe for a cluster: datatrove's pipeline writes what train.py's reader opens, and its ids are the text."""

import gzip
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment, run

from fourscale import tokenization
from fourscale.formats import open_foreign

pytest.importorskip("datatrove")
DOCUMENTS = [f"Document {i} says <|endoftext|> in plain words.\n{'x' * (i % 7)} \u4e2d {i * i}" for i in range(60)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three files of documents; some twice, one empty."""
    folder = tmp_path_factory.mktemp("corpus")
    for k in range(3):
        rows = [{"text": t} for t in [*DOCUMENTS[k::3], *DOCUMENTS[:5], ""]]
        with gzip.open(folder / f"{k}.jsonl.gz", "wt", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    tokenization.build("byte", lambda: iter(())).save(folder)
    return folder


def recipe(corpus, out, *args, code=0, path=None):
    command = [sys.executable, ROOT / "launch" / "datatrove_tokenize.py", "--input", corpus, "--glob", "*.jsonl.gz"]
    extra = {"PATH": f"{path}:{os.environ['PATH']}"} if path else {}
    done = subprocess.run(
        [*map(str, command), "--tokenizer", str(corpus / "tokenizer.json"), "--out", str(out), *map(str, args)],
        capture_output=True, text=True, env=environment(**extra), timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def texts(out):
    found = open_foreign(str(out))
    tokenizer = tokenization.build(found.tokenizer, lambda: iter(()))
    sides = {}
    for side, stream in found.streams.items():
        ids = stream.read(0, stream.total).tolist()
        assert ids[-1] == tokenizer.eot_id
        sides[side], document = [], []
        for i in ids:
            if i == tokenizer.eot_id:
                sides[side].append(tokenizer.decode(document))
                document = []
            else:
                document.append(i)
    return sides


def content(out):
    return {p.relative_to(out): p.read_bytes() for side in ("train", "val") for p in (out / side).glob("*.ds")}


def test_the_output_is_the_documents(corpus, tmp_path):
    done = recipe(corpus, tmp_path / "a", "--tasks", 3, "--workers", 2, "--val-fraction", 0.2)
    assert "wrote" in done.stdout
    sides = texts(tmp_path / "a")
    everything = [t for k in range(3) for t in [*DOCUMENTS[k::3], *DOCUMENTS[:5]]]
    assert sorted(sides["train"] + sides["val"]) == sorted(everything)
    assert not set(sides["train"]) & set(sides["val"]) and 3 < len(sides["val"]) < 30
    assert sides["train"] == [t for t in everything if t in set(sides["train"])]  # in order of the files
    checked = run("check.py", "data", tmp_path / "a")
    assert "datatrove, uint16" in checked.stdout and "pass  tokenizer" in checked.stdout
    # neither the number of workers nor a second call changes anything; other flags are refused
    recipe(corpus, tmp_path / "b", "--tasks", 3, "--val-fraction", 0.2)
    assert content(tmp_path / "b") == content(tmp_path / "a")
    again = recipe(corpus, tmp_path / "b", "--tasks", 3, "--val-fraction", 0.2)
    assert again.stderr == "" and again.stdout.startswith("nothing to do: ") and again.stdout.count("\n") == 1
    assert "left out 3 rows: 3 text is empty" in again.stdout
    assert content(tmp_path / "b") == content(tmp_path / "a")
    assert "begun with other flags" in recipe(corpus, tmp_path / "b", "--tasks", 2, code=2).stderr


BAD = {
    "not JSON": ['{"text": "cut o', '{"text": "\\ud800"}'],
    "list, not an object": ["[1]"],
    "without the field text": ['{"body": "b"}', "{}"],
    "text is null": ['{"text": null}'],
    "text is int, not text": ['{"text": 5}', '{"text": 6}', '{"text": 7}'],
    "text is empty": ['{"text": ""}'],
}


def one_error(done):
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "Traceback" not in done.stderr
    return last


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_without_text_are_passed_over_and_counted(corpus, tmp_path, workers):
    good = [json.dumps({"text": t, "metadata": None, "media": None}, ensure_ascii=False) for t in DOCUMENTS]
    lines = [*good[:30], "", *(line for bad in BAD.values() for line in bad), *good[30:]]
    data = "\r\n".join(lines).encode().replace(b"Document 1 says", b"Document \xff says")  # no UTF-8
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.jsonl").write_bytes(b"\xef\xbb\xbf" + data)
    (tmp_path / "in" / "1.jsonl").write_text("\n".join(BAD["text is null"]))
    out = tmp_path / "out"
    flags = ("--input", tmp_path / "in", "--glob", "*.jsonl", "--val-fraction", 0.2, "--tasks", 2, "--workers", workers)
    done = recipe(corpus, out, *flags)
    sides = texts(out)
    assert sorted(sides["train"] + sides["val"]) == sorted(d for d in DOCUMENTS if "Document 1 says" not in d)
    for side, documents in sides.items():
        assert f"{side} {len(documents)} documents, " in done.stdout
    left = next(line for line in done.stdout.splitlines() if line.startswith("left out "))
    more = {"not JSON": 1, "text is null": 1}
    counts = {reason: len(bad) + more.get(reason, 0) for reason, bad in BAD.items()}
    assert left.startswith(f"left out {sum(counts.values())} rows: ")
    assert all(f"{n} {reason}" in left for reason, n in counts.items())
    log = (out / "logs" / "train" / "logs" / "task_00000.log").read_text()
    assert "0.jsonl: left out: text is int, not text (row 38)" in log and "0.jsonl, line 32: left out: not JSON" in log


def test_parquet_rows(corpus, tmp_path):
    pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": [*DOCUMENTS, None, ""], "n": range(62)}), tmp_path / "in" / "0.parquet")
    flags = ("--input", tmp_path / "in", "--glob", "*.parquet", "--kind", "parquet", "--val-fraction", 0.2)
    done = recipe(corpus, tmp_path / "out", *flags)
    assert "left out 2 rows: 1 text is null, 1 text is empty" in done.stdout
    assert sum(map(len, texts(tmp_path / "out").values())) == 60


def test_nothing_made_is_a_line_and_leaves_the_directory_free(corpus, tmp_path):
    out = tmp_path / "out"
    none = one_error(recipe(corpus, out, "--text-field", "body", "--tasks", 3, code=2))
    assert "--text-field body: no row of" in none and none.endswith("name one of those there are: text")
    small = one_error(recipe(corpus, out, "--val-fraction", 1e-9, "--tasks", 3, code=2))
    assert "--val-fraction 1e-09: the val side gets none of 75 documents; raise it" in small
    assert "left out 3 rows" in recipe(corpus, out, "--val-fraction", 0.2).stdout  # of one task: no count of before
    assert sum(map(len, texts(out).values())) == 75


def test_a_damaged_file_is_named(corpus, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.jsonl.gz").write_bytes((corpus / "0.jsonl.gz").read_bytes()[:-20])
    done = recipe(corpus, tmp_path / "out", "--input", tmp_path / "in", code=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: a task failed (ValueError: 0.jsonl.gz: damaged or unreadable after line ")


def test_what_is_refused(corpus, tmp_path):
    for flags, message in (
        (("--input", tmp_path / "nowhere"), "no files"),
        (("--val-fraction", 0), "--val-fraction 0.0"),
        (("--tokenizer", "bpe:4096"), "is made from the text"),
    ):
        done = recipe(corpus, tmp_path / "out", *flags, code=2)
        assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_slurm_jobs_do_the_same(corpus, tmp_path):
    """What is submitted to sbatch, run here by a shell that stands in for the scheduler."""
    fake = tmp_path / "bin"
    fake.mkdir()
    scripts = {
        "sbatch": f"""#!{sys.executable}
import os, re, subprocess, sys
text = open(sys.argv[-1]).read()
tasks = int(re.search(r"--array=0-(\\d+)", text)[1]) + 1
given = os.environ | {{"SLURM_JOB_ID": "1", "SLURM_NODELIST": "n", "SLURM_CPUS_PER_TASK": "1"}}
given |= {{"SLURM_MEM_PER_CPU": "1024", "SLURM_JOB_NUM_NODES": "1"}}
for task in range(tasks):
    one = given | {{"SLURM_ARRAY_TASK_ID": str(task)}}
    subprocess.run(["bash", sys.argv[-1]], check=True, stdout=sys.stderr, env=one)
print("Submitted batch job 1")
""",
        "scontrol": "#!/bin/bash\necho localhost\n",
        "srun": '#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done\nexec "$@"\n',
    }
    for name, script in scripts.items():
        (fake / name).write_text(script)
        (fake / name).chmod((fake / name).stat().st_mode | stat.S_IXUSR)
    (fake / "launch_pickled_pipeline").symlink_to(Path(sys.executable).parent / "launch_pickled_pipeline")
    done = recipe(
        corpus, tmp_path / "s", "--tasks", 3, "--val-fraction", 0.2, "--executor", "slurm", "--partition", "cpu",
        path=fake,
    )  # fmt: skip
    assert "submitted" in done.stdout
    again = recipe(corpus, tmp_path / "s", "--tasks", 3, "--val-fraction", 0.2)
    assert again.stdout.startswith("nothing to do: ") and "left out 3 rows: 3 text is empty" in again.stdout
    sides = texts(tmp_path / "s")
    assert len(sides["train"] + sides["val"]) == len(DOCUMENTS) + 15 and set(DOCUMENTS) == {
        *sides["train"],
        *sides["val"],
    }
