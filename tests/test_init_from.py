"""A new run from weights at hand: they arrive bit for bit on any topology, and what doesn't fit them is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import SMALL, one_error, rows, run

from fourscale import origins, rundir
from fourscale.pretrained import open_pretrained

os.environ["HF_HUB_OFFLINE"] = "1"

STILL = ("--lr", 0, "--min-lr", 0, "--stop-after", 1)  # one update that changes nothing
RUN = tuple(
    x for x in zip(SMALL[::2], SMALL[1::2], strict=True) if x[0] not in ("--d-model", "--n-layers", "--n-heads")
)
SHAPELESS = tuple(x for pair in RUN for x in pair)


def weights(run_dir):
    return open_pretrained(run_dir).model().state_dict()


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """The small run as a Hugging Face directory."""
    out = tmp_path_factory.mktemp("hf") / "model"
    run("export_hf.py", "--ckpt", trained(), "--out", out)
    return out


def test_weights_of_a_checkpoint_begin_a_run_of_their_own(trained, data, tmp_path):
    source, out = trained(), tmp_path / "ckpt"
    done = run("train.py", "--init-from", source, "--data", data, "--ckpt-dir", out, *SHAPELESS, *STILL)
    assert f"weights of {source / 'step_20'}" in done.stdout
    assert_same(weights(source), weights(out))
    assert [r["update"] for r in rows(out)] == [1] and rows(out)[0]["loss"] < rows(source)[0]["loss"] - 1
    init = json.loads((out / "run.json").read_text())["init"]
    assert init["digest"] == rundir.digest(rundir.open_checkpoint(source)) and init["differences"] == []
    assert (init["named"], init["from"], init["update"]) == (str(source), str(source / "step_20"), 20)
    told = run("check.py", "run", out).stdout
    assert f"began with the weights of {source / 'step_20'}" in told

    # The same line again goes on; another beginning is not taken for this one's.
    line = ("--data", data, "--ckpt-dir", out, "--resume", "auto", "--stop-after", 2)
    assert "resumed from step_1" in run("train.py", "--init-from", source, *line).stdout
    assert "init" in json.loads((out / "run.json").read_text())
    assert "began with the weights of" in one_error(run("train.py", "--init-from", data, *line, code=2))


def test_a_hugging_face_directory_begins_a_run_on_any_topology(trained, exported, data, tmp_path):
    ours = weights(trained())
    for name, nproc, more in (("one", None, ()), ("sharded", 2, ("--parallel", "fsdp"))):
        out = tmp_path / name
        line = ("--init-from", exported, "--data", data, "--ckpt-dir", out, *SHAPELESS, *STILL, *more)
        run("train.py", *line, nproc=nproc)
        theirs = weights(out)
        size = 257  # the padded rows don't leave, and come in as zeros
        for table in (theirs, ours):
            table["wte.weight"] = table["wte.weight"][:size]
        assert_same(ours, theirs)
    a, b = (rows(tmp_path / name)[0]["loss"] for name in ("one", "sharded"))
    assert abs(a - b) < 5e-5


def test_a_shorter_context_and_other_dropout_are_recorded(trained, data, tmp_path):
    out = tmp_path / "ckpt"
    flags = [x for pair in RUN if pair[0] != "--ctx" for x in pair]
    changes = ("--ctx", 16, "--dropout", 0.1)
    run("train.py", "--init-from", trained(), "--data", data, "--ckpt-dir", out, *flags, *STILL, *changes)
    ours, theirs = weights(trained()), weights(out)
    assert torch.equal(theirs["wpe.weight"], ours["wpe.weight"][:16])
    init = json.loads((out / "run.json").read_text())["init"]
    assert init["differences"] == ["ctx: was 32, now 16", "dropout: was 0.0, now 0.1"]


@pytest.fixture(scope="module")
def other_data(tmp_path_factory):
    work = tmp_path_factory.mktemp("other")
    (work / "a.txt").write_text("the cat sat on the mat\n\n" * 400)
    run("prepare.py", "--dataset", work / "a.txt", "--tokenizer", "char", "--val-docs", 1, "--out", work / "data")
    return work / "data"


def test_what_does_not_fit_the_weights_is_refused(trained, data, other_data, tmp_path):
    source = trained()
    line = ("--init-from", source, "--data", data, "--ckpt-dir", tmp_path / "ckpt", *SHAPELESS)
    for more, words in (
        (("--d-model", 64), f"--d-model 64: the model of --init-from {source} has 32; leave the flag out"),
        (("--no-tie",), "--tie False: the model of"),
        (("--ctx", 64), "32 learned positions"),
        (("--branch-from", source), "--branch-from and --init-from"),
        (("--init-from", tmp_path / "nowhere"), "--init-from"),
        (("--data", other_data), "its tokenizer is not that of --init-from"),
    ):
        args = [*line, *more] if more[0] != "--data" else ["--init-from", source, *line[4:], *more]
        assert words in one_error(run("train.py", *args, code=2))
    assert not list((tmp_path / "ckpt").glob("step_*"))


def test_a_damaged_source_is_refused(trained, data, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained(), copy)
    victim = next((copy / "step_20").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    line = ("--init-from", copy, "--data", data, "--ckpt-dir", tmp_path / "ckpt", *SHAPELESS)
    assert "is damaged" in one_error(run("train.py", *line, code=2))


def test_a_restart_may_name_its_beginning_in_other_words_but_no_other():
    step, model = Path("/runs/a/step_20"), Path("/models/a")
    same = [(step, step), ("/runs/a", step), ("/runs/a/best", step), ("/runs/a/latest", step), (model, model)]
    other = [("/runs/a/step_10", step), ("/runs/b", step), ("/runs", step), ("/models/b", model), ("/models", model)]
    assert all(origins._names(Path(path), place) for path, place in same)
    assert not any(origins._names(Path(path), place) for path, place in other)
