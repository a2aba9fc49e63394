"""run.json, step.json, latest and best as somebody left them: one line that names file and field, and no traceback."""

import json
import re
import shutil

import pytest
from conftest import one_error, run

from fourscale import rundir
from fourscale.cli import InputError

GARBAGE = b"\xff\xfe\x00\x81step\n\n_1"


@pytest.fixture(scope="module")
def whole(trained):
    """A run that was stopped at update 10 of 20, with checkpoints of 5 and 10."""
    return trained("--ckpt-every", 5, "--stop-after", 10)


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "ckpt")


def put(path, *keys, to=None):
    """Change a field of a JSON file, or drop it where `to` is None; step.json then is one from before its sha256."""
    table = json.loads(path.read_text())
    if path.name == "step.json":
        del table["sha256"]
    here = table
    for key in keys[:-1]:
        here = here[key]
    if to is None:
        del here[keys[-1]]
    else:
        here[keys[-1]] = to
    path.write_text(json.dumps(table))


def refused(path, words):
    with pytest.raises(InputError) as e:
        rundir.open_checkpoint(path)
    message = str(e.value)
    assert words in message and "\n" not in message, message
    return message


# ---- step.json -------------------------------------------------------------------------------------------------------


def test_any_change_of_a_sealed_step_is_found(copy):
    path = copy / "step_10" / "step.json"
    table = json.loads(path.read_text())
    assert table["sha256"] == rundir.seal(table)
    path.write_text(json.dumps(table, sort_keys=True))  # the same table in another order
    assert rundir.open_checkpoint(copy).step == table
    for name in table.keys() - {"sha256"}:
        path.write_text(json.dumps({k: v for k, v in table.items() if k != name}))
        refused(copy, "step_10/step.json is damaged: its sha256 is not the recorded one; restore it or use another")
        if isinstance(table[name], int):
            path.write_text(json.dumps(table | {name: table[name] + 1}))
            refused(copy / "step_10", "is damaged: its sha256 is not the recorded one")
    del table["sha256"]
    path.write_text(json.dumps(table))  # from before the field
    assert rundir.open_checkpoint(copy).step == table


@pytest.mark.parametrize(
    ("keys", "to", "words"),
    [
        (("update",), "12", 'update is "12", not a count'),
        (("update",), True, "update is true, not a count"),
        (("tokens",), 1.5, "tokens is 1.5, not a count"),
        (("tokens",), -1, "tokens is -1, not a count"),
        (("samples_seen",), [120], "samples_seen is [120], not a count"),
        (("skipped",), None, "skipped is missing"),
        (("skipped_in_a_row",), "0", 'skipped_in_a_row is "0", not a count'),
        (("guard",), "x", 'guard is "x", not a number or null'),
        (("scaler",), 7, "scaler is 7, not a table or null"),
        (("scaler",), {"scale": "2"}, 'scaler.scale is "2", not a number'),
        (("val_loss",), "low", 'val_loss is "low", not a number or null'),
        (("update",), 11, "step_10: its step.json is that of step_11; rename or restore it"),
        (("files",), 5, "files is 5, not a table"),
        (("files",), {}, "its table of files is not as train.py writes it"),
        (("files", ".metadata"), None, "its table of files is not"),
        (("files", "__0_0.distcp"), None, "its table of files is not"),
        (("files", "__0_0.distcp", "size"), "1", "its table of files is not"),
        (("files", "__0_0.distcp", "size"), True, "its table of files is not"),
        (("files", "__0_0.distcp", "sha256"), 5, "its table of files is not"),
        (("files", "../run.json"), {"size": 1, "sha256": ""}, "its table of files is not"),
    ],
)
def test_a_step_from_before_the_seal_is_looked_at_field_by_field(copy, keys, to, words):
    put(copy / "step_10" / "step.json", *keys, to=to)
    message = refused(copy, words)
    assert message.endswith(("; restore it or use another checkpoint", "; rename or restore it"))
    assert rundir.open_checkpoint(copy / "step_5").step["update"] == 5


def test_what_is_no_json_object(copy):
    step, contract = copy / "step_10" / "step.json", copy / "run.json"
    sound = contract.read_bytes()
    for content, words in (
        (b"", "not valid JSON"),
        (GARBAGE, "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"5", "holds no JSON object"),
    ):
        step.write_bytes(content)
        assert refused(copy, f"step.json: {words}").endswith("restore it or use another checkpoint")
        contract.write_bytes(content)
        assert refused(copy, f"run.json: {words}").endswith("restore it or start in another directory")
        contract.write_bytes(sound)


def test_a_copy_under_another_number_is_none(copy):
    """As `cp -r` and as a link; under a name without a number it is what it was."""
    shutil.copytree(copy / "step_10", copy / "step_15")
    refused(copy, "step_15: its step.json is that of step_10; rename or restore it")
    shutil.rmtree(copy / "step_15")
    (copy / "step_15").symlink_to(copy / "step_10")
    refused(copy, "step_15: its step.json is that of step_10; rename or restore it")
    (copy / "step_15").rename(copy / "discarded-step_15")
    shutil.copytree(copy / "step_5", copy / "mine")
    (copy / "step_²").mkdir()
    (copy / "step_²" / "step.json").write_text("{}")
    opened = [rundir.open_checkpoint(copy / name).clock.update for name in ("discarded-step_15", "mine", ".")]
    assert opened == [10, 5, 10]


# ---- latest and best -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [GARBAGE, b"", b"/etc\n", b"../x", b"step_\xc2\xb2", b"s" * 9_000, b"step_10\nstep_5"]
)
def test_pointers_that_name_nothing(copy, content):
    for name in ("latest", "best"):
        assert rundir.open_checkpoint(copy / name).step["update"] in (5, 10)
        (copy / name).write_bytes(content)
        message = refused(copy / name, f"{name}: holds ")
        assert message.endswith(", not the name of a checkpoint; name a step_N instead")
    assert rundir.open_checkpoint(copy).step["update"] == 10  # which doesn't look at them


# ---- run.json --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "to", "words"),
    [
        (("format",), 9, "format 9, this version reads 1"),
        (("training",), None, "training is missing"),
        (("training",), 5, "training is 5, not a table"),
        (("training", "updates"), None, "training.updates is missing"),
        (("training", "lr"), "fast", 'training.lr is "fast", not a number'),
        (("training", "skip_limit"), 2.5, "training.skip_limit is 2.5, not a count"),
        (("attempts",), [], "attempts is empty"),
        (("attempts",), [5], "attempts[0] is 5, not a table"),
        (("attempts", 0, "world_size"), None, "attempts[0].world_size is missing"),
        (("attempts", 0, "local_bsz"), "8", 'attempts[0].local_bsz is "8", not a count'),
        (("model",), [None], "model is [null], not a table"),
        (("model", "d_model"), None, "model.d_model is missing"),
        (("model", "d_model"), "wide", 'model.d_model is "wide", not a count'),
        (("model", "arch"), "rnn", 'model.arch is "rnn", not gpt2 or modern'),
        (("model", "n_heads"), 0, "model: --n-heads 0: must be at least 1"),
        (("model", "tie"), "no", 'model.tie is "no", not true or false'),
        (("model", "colour"), "red", "model has unknown fields colour"),
        (("config",), "x", 'config is "x", not a table'),
        (("config", "data"), 5, "config.data is 5, not a list"),
        (("config", "data"), [5], "config.data[0] is 5, not text"),
        (("config", "ckpt_dir"), 5, "config.ckpt_dir is 5, not text"),
        (("config", "lr"), "x", 'config.lr is "x", not a number or null'),
        (("config", "model"), {"d_model": []}, "config.model.d_model is [], not a count or null"),
        (("tokenizer",), 5, "tokenizer is 5, not a table or null"),
        (("tokenizer", "file"), 5, "tokenizer.file is 5, not text"),
        (("tokenizer", "sha256"), None, "tokenizer.sha256 is missing"),
        (("data",), [], "data is [], not a table"),
        (("data", "train_digest"), None, "data.train_digest is missing"),
        (("data",), {"parts": {"web": {"weight": "1"}}}, "data.parts.web.train_digest is missing"),
        (("origin",), {"from": "x"}, "origin.digest is missing"),
    ],
)
def test_fields_of_the_contract(copy, keys, to, words):
    put(copy / "run.json", *keys, to=to)
    message = refused(copy, words)
    assert message.startswith((f"{copy / 'run.json'}: ", "run.json: "))
    with pytest.raises(InputError, match=re.escape(words)):
        rundir.read_run(copy)


def test_null_is_no_table(copy):
    table = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(table | {"model": None}))
    refused(copy, "run.json: model is null, not a table; restore it or start in another directory")


# ---- through the door ------------------------------------------------------------------------------------------------


def resume(copy, code):
    return run("train.py", "--ckpt-dir", copy, "--resume", "auto", "--stop-after", 11, code=code)


def test_a_resume_passes_over_pointers_and_names_the_sound_checkpoint(copy):
    (copy / "latest").write_bytes(GARBAGE)
    (copy / "best").write_bytes(GARBAGE)
    shutil.copytree(copy / "step_10", copy / "step_15")
    message = one_error(resume(copy, 2))
    assert "step_15: its step.json is that of step_10" in message
    assert message.endswith("--resume-step 10 goes on from step_10, the newest undamaged one")
    shutil.rmtree(copy / "step_15")
    resume(copy, 0)
    assert (copy / "latest").read_text() == "step_11\n" and (copy / "best").read_text() == "step_10\n"


def test_a_resume_from_a_changed_step(copy):
    path = copy / "step_10" / "step.json"
    path.write_text(path.read_text().replace('"tokens": 3840', '"tokens": 3841'))
    message = one_error(resume(copy, 2))
    assert "step.json is damaged: its sha256 is not the recorded one" in message
    assert message.endswith("--resume-step 5 goes on from step_5, the newest undamaged one")


def test_a_resume_under_a_changed_contract(copy):
    put(copy / "run.json", "training", "updates")
    message = one_error(resume(copy, 2))
    assert message.endswith("run.json: training.updates is missing; restore it or start in another directory")
