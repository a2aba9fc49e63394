"""Killed at any instant, a run resumes from its last checkpoint to the same bits; see kills.py, which has the long one.

Also here: many short runs in a row that all must end with code 0, since teardown of a group fails now and then.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from conftest import SMALL, run
from kills import DEAD_S, VICTIMS, campaign, launch, processes, wait_gone


def judge(result: dict) -> None:
    broken = [(told["run"], told["broken"]) for told in result["table"] if told["broken"]]
    assert not broken and result["bit_equal"] == result["runs"], result["table"]
    assert result["kills"] >= result["runs"], "most kills came too late to test anything"


@pytest.mark.slow
def test_runs_that_are_killed_end_bit_equal(data: Path, tmp_path: Path) -> None:
    judge(campaign(2, 9, 2, "ddp", tmp_path / "runs", data))


@pytest.mark.slow
def test_more_runs_that_are_killed_end_bit_equal(data: Path, tmp_path: Path) -> None:
    result = campaign(6, 10, 2, "fsdp", tmp_path / "runs", data)
    judge(result)
    assert set(result["by_victim"]) == set(VICTIMS)
    assert result["by_moment"]["saving"] >= 2 and result["left_unfinished_saves"] >= 1


@pytest.mark.slow
def test_thirty_short_runs_in_a_row_end_with_code_0(data: Path, tmp_path: Path) -> None:
    for number in range(30):
        flags = (*SMALL[:10], "--steps", 2, "--eval-every", 0, "--backend", "gloo")
        parallel = ("ddp", "fsdp")[number % 2]
        run("train.py", "--data", data, "--ckpt-dir", tmp_path / str(number), "--parallel", parallel, *flags, nproc=2)


def test_ranks_die_with_a_launcher_that_is_killed_while_they_start(data: Path, tmp_path: Path) -> None:
    """Before they could ask to, and while they import torch: orphans would wait for the job's store for minutes."""
    for number, wait_s in enumerate((0, 0.2, 1)):
        job = launch(data, tmp_path / str(number), 2, "ddp")
        while not any(processes(tmp_path / str(number)).values()):
            time.sleep(0.002)
        time.sleep(wait_s)
        job.kill()
        wait_gone(job, tmp_path / str(number), DEAD_S)
