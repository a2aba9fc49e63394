"""A target in the loop: what is said at evaluations, and when a run stops by itself."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, one_error, rows, run

from fourscale import curves

SHORT = (*SMALL, "--tokens", 80 * 12 * 32, "--warmup", 4, "--eval-every", 10, "--sample-tokens", 0)


def stopped(directory: Path) -> dict:
    assert not (directory / "DONE.json").exists()
    return json.loads((directory / "STOPPED.json").read_text())


def test_a_run_stops_where_the_target_is_reached(data: Path, tmp_path: Path):
    flags = ("--data", data, "--ckpt-dir", tmp_path / "run", *SHORT, "--target-loss", 20, "--stop-when", "reached")
    said = run("train.py", *flags, nproc=2).stdout
    assert stopped(tmp_path / "run")["update"] == 10 and (tmp_path / "run" / "step_10" / "step.json").is_file()
    assert "--stop-when reached" in stopped(tmp_path / "run")["by"] and "target 20" in said.splitlines()[-1]
    # The same line again, as a queue gives it, trains no further; another runs to the end as if it had never stopped.
    assert "after 10 updates" in run("train.py", *flags, "--resume", "auto").stdout
    assert stopped(tmp_path / "run")["update"] == 10
    run("train.py", "--ckpt-dir", tmp_path / "run", "--resume", "must", "--stop-when", "never")
    assert [row["update"] for row in rows(tmp_path / "run")] == list(range(1, 81))
    assert (tmp_path / "run" / "DONE.json").is_file()


def test_a_run_stops_where_the_target_is_out_of_reach_for_two_evaluations(data: Path, tmp_path: Path):
    flags = ("--data", data, "--ckpt-dir", tmp_path / "run", *SHORT, "--target-loss", 0.01)
    said = run("train.py", *flags, "--stop-when", "hopeless", "--stop-when", "reached").stdout
    line = (
        r"step (\d+) \| (\w+) \| forecast of the end ([\d.]+), 90% within ([\d.]+) to ([\d.]+): .* to beat the target"
    )
    told = re.findall(line, said)
    assert told and all(float(low) <= float(loss) <= float(high) for _, _, loss, low, high in told)
    receipt = stopped(tmp_path / "run")
    assert "--stop-when hopeless" in receipt["by"] and 20 <= receipt["update"] < 80
    assert "note: stalled: " in said and "health.py" in said
    again = run("train.py", "--ckpt-dir", tmp_path / "run", "--resume", "must").stdout
    assert f"hopeless (stalled at two evaluations, target 0.01) after {receipt['update']} updates" in again


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--stop-when", "reached"), "--stop-when reached: needs the loss"),
        (("--stop-when", "sometime", "--target-loss", "3"), "--stop-when"),
        (("--stop-when", "reached", "--target-loss", "-1"), "--target-loss -1.0: must be above 0"),
        (("--target-loss", "nan"), "--target-loss nan: must be above 0"),
        (("--stop-when", "reached", "--target-loss", "3", "--eval-every", "0"), "--eval-every"),
    ],
    ids=range(5),
)
def test_what_a_stop_needs_is_asked_for(given: tuple[str, ...], named: str, tmp_path: Path):
    done = run("train.py", *given, "--plan", "--ckpt-dir", tmp_path, code=2)
    assert named in one_error(done)


def test_the_last_evaluation_is_judged_too(data: Path, tmp_path: Path):
    flags = ("--data", data, "--ckpt-dir", tmp_path / "run", *SMALL, "--sample-tokens", 0, "--target-loss", 20)
    said = run("train.py", *flags, "--eval-every", 20, "--stop-when", "reached").stdout
    assert re.search(r"^step 20 \| healthy \| .*it ended at [\d.]+, [\d.]+ below the target 20$", said, re.M), said
    assert (tmp_path / "run" / "DONE.json").is_file()


def test_a_run_that_is_watched_is_read_on_and_reads_as_anew(trained, tmp_path: Path):
    whole = (trained() / "metrics.jsonl").read_text().splitlines(keepends=True)
    shutil.copy(trained() / "run.json", tmp_path)
    metrics, reading = tmp_path / "metrics.jsonl", curves.Reading()
    for n in (5, 11, 12, 20):
        metrics.write_text("".join(whole[:n]) + "torn"[: n % 5 and 4])
        again, anew = curves.read(tmp_path, reading), curves.read(tmp_path)
        for name in ("update", "loss", "lr", "norm", "skipped", "tokens", "val_update", "val_loss"):
            assert np.array_equal(getattr(again.curve, name), getattr(anew.curve, name), equal_nan=True), (n, name)
        assert (again.rows, again.notes) == (anew.rows, anew.notes) and again.rows == n
    metrics.write_text("".join(["#" * (len(line) - 1) + "\n" for line in whole]) + whole[0])
    assert curves.read(tmp_path, reading).rows == 1, "what was read once isn't read again"
