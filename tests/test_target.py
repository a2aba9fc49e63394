"""A target in the loop: what is said at evaluations, and when a run stops by itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import SMALL, one_error, rows, run

SHORT = (*SMALL, "--tokens", 80 * 12 * 32, "--warmup", 4, "--eval-every", 10, "--sample-tokens", 0)


def stopped(directory: Path) -> dict:
    assert not (directory / "DONE.json").exists()
    return json.loads((directory / "STOPPED.json").read_text())


def test_a_run_stops_where_the_target_is_reached(data: Path, tmp_path: Path):
    flags = ("--data", data, "--ckpt-dir", tmp_path / "run", *SHORT, "--target-loss", 20, "--stop-when", "reached")
    said = run("train.py", *flags, nproc=2).stdout
    assert stopped(tmp_path / "run")["update"] == 10 and (tmp_path / "run" / "step_10" / "step.json").is_file()
    assert "--stop-when reached" in stopped(tmp_path / "run")["by"] and "target 20" in said.splitlines()[-1]
    # Going on is going on: the same line is at its target again, another runs to its end as if it had never stopped.
    run("train.py", *flags, "--resume", "auto")
    assert stopped(tmp_path / "run")["update"] == 20
    run("train.py", "--ckpt-dir", tmp_path / "run", "--resume", "must", "--stop-when", "hopeless")
    assert [row["update"] for row in rows(tmp_path / "run")] == list(range(1, 81))
    assert (tmp_path / "run" / "DONE.json").is_file()


def test_a_run_stops_where_the_target_is_out_of_reach_for_two_evaluations(data: Path, tmp_path: Path):
    flags = ("--data", data, "--ckpt-dir", tmp_path / "run", *SHORT, "--target-loss", 0.01)
    said = run("train.py", *flags, "--stop-when", "hopeless", "--stop-when", "reached").stdout
    told = re.findall(
        r"step (\d+) \| (\w+) \| ends at ([\d.]+) \(([\d.]+) \.\. ([\d.]+)\) \| .*to beat the target", said
    )
    assert told and all(float(low) <= float(loss) <= float(high) for _, _, loss, low, high in told)
    receipt = stopped(tmp_path / "run")
    assert "--stop-when hopeless" in receipt["by"] and 20 <= receipt["update"] < 80
    assert "note: stalled: " in said and "health.py" in said


@pytest.mark.parametrize("given", [("--stop-when", "reached"), ("--stop-when", "sometime", "--target-loss", "3")])
def test_what_a_stop_needs_is_asked_for(given: tuple[str, ...], tmp_path: Path):
    done = run("train.py", *given, "--plan", "--ckpt-dir", tmp_path, code=2)
    assert "--stop-when" in one_error(done)
