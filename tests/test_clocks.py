"""Clocks and counts: rates of every interval, phases, what was spent over attempts, the first loss, the bar."""

import math
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL, rows, run

from fourscale import budget, metrics, telemetry
from fourscale.config import ModelConfig
from fourscale.model import GPT
from fourscale.parallel import Topology

ALONE = Topology(0, 1, torch.device("cpu"), "fp32", "ddp", 1, cpu_group=None, publish_group=None, save_group=None)


def meter_in(directory, **kwargs):
    return telemetry.Meter(directory, ALONE, 100, 6.0, 1e3, lambda name, **fields: True, lambda: None, **kwargs)


def add(meter, first, last, count=10, **kwargs):
    for i in range(first, last + 1):
        figures = [torch.tensor(x) for x in (2.0, 20.0, 1.0, 0.0)]
        tokens = 10 * (i - 1) + count
        meter.add(telemetry.Pending(i, tokens, count, 1e-3, {"": 0.1}, (0, 12), 0.5, 1.0, *figures, **kwargs))


@pytest.fixture
def wait(monkeypatch):
    """A clock that moves by what is waited alone; the process began with it."""
    now = [1000.0]
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(telemetry, "PROCESS_BEGAN", 1000.0)

    def wait(seconds):
        now[0] += seconds

    return wait


def test_rates_are_those_of_the_interval_whether_first_short_last_or_resumed(tmp_path, monkeypatch, wait):
    meter = meter_in(tmp_path)
    wait(3.0)  # start-up
    meter.begin(0, 0)
    wait(0.5)
    add(meter, 1, 1)
    meter.flush(aloud=False)
    wait(3.0)
    add(meter, 2, 4)
    meter.flush(aloud=False)
    with meter.off_the_clock("eval"):
        wait(7.0)
    # What the device has yet to do is awaited before the clock is read: it belongs to the interval.
    monkeypatch.setattr(telemetry.Meter, "_settle", lambda self: wait(0.25))
    add(meter, 5, 5, count=4)  # a budget's tail
    meter.flush(aloud=False)
    first, *_, fourth, last = rows(tmp_path)
    assert (first["ms"], first["tokens_per_s"]) == (500, 20)
    assert (fourth["ms"], fourth["tokens_per_s"]) == (1000, 10)
    assert (last["ms"], last["tokens_per_s"]) == (250, 16)
    assert all(row["mfu"] == pytest.approx(row["tokens_per_s"] * 6 / 1e3) for row in (first, fourth, last))
    monkeypatch.undo()


def test_a_device_is_awaited_before_the_clock_of_a_beginning_is_read(tmp_path, monkeypatch, wait):
    meter = meter_in(tmp_path)
    awaited = []
    monkeypatch.setattr(telemetry.Meter, "_settle", lambda self: awaited.append(wait(2.0)))
    meter.begin(0, 0)  # start-up may have left work there
    assert awaited
    monkeypatch.setattr(telemetry.Meter, "_settle", lambda self: None)
    wait(0.5)
    add(meter, 1, 1)
    meter.flush(aloud=False)
    assert rows(tmp_path)[0]["ms"] == 500


def test_rates_from_end_to_end_are_of_this_attempt_with_all_that_took_time(tmp_path, wait):
    resumed = meter_in(tmp_path)
    wait(4.0)
    resumed.begin(5, 44)
    wait(1.0)
    add(resumed, 6, 7)
    with resumed.off_the_clock("eval"):
        wait(2.0)
    resumed.flush({"val_loss": 3.0}, aloud=False)
    with resumed.off_the_clock("save"):
        wait(3.0)
    wait(0.5)
    add(resumed, 8, 8)
    resumed.flush(aloud=False)
    told = rows(tmp_path)
    assert [r["elapsed_s"] for r in told] == [4.5, 7.0, 10.5], "update 6 had ended before the evaluation"
    assert [r["end_to_end_tokens_per_s"] for r in told] == [
        round(t / s, 1) for t, s in ((16, 4.5), (26, 7), (36, 10.5))
    ]
    assert [r["tokens_per_s"] for r in told] == [20, 20, 20]
    assert [(r.get("eval_s"), r.get("save_s")) for r in told] == [(None, None), (2.0, None), (None, 3.0)]


def test_elapsed_counts_from_the_start_of_the_process():
    """Not from the import of torch, which takes seconds."""
    code = "import time; t = time.monotonic(); time.sleep(0.5); from fourscale import telemetry as x; "
    code += "now = time.monotonic(); print(now - x.PROCESS_BEGAN, now - t)"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    age, since_first_line = map(float, done.stdout.split())
    if sys.platform == "linux":
        assert since_first_line <= age < time.monotonic() - began


def test_phases_are_those_between_the_instants_of_an_update(tmp_path):
    meter = meter_in(tmp_path)
    meter.begin(0, 0)
    instants = [meter.instant("rest")]
    for pause in (0.03, 0.01):
        time.sleep(pause)
        instants.append(meter.instant("rest"))
    add(meter, 1, 1, instants=tuple(instants))
    add(meter, 2, 2)
    meter.flush(aloud=False)
    row, other = rows(tmp_path)
    assert 30 <= row["fwd_bwd_ms"] < 60 and 10 <= row["optim_ms"] < 30 and row["data_ms"] == 0.5
    assert "fwd_bwd_ms" not in other
    resident = int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1])  # noqa: SIM115
    assert row["peak_memory"] == pytest.approx(1024 * resident, rel=0.05)


def test_what_was_spent_goes_on_over_attempts_and_counts_updates_done_again(tmp_path):
    meter = meter_in(tmp_path, price=2.0)
    meter.spent = telemetry.spent_before(tmp_path, 2.0)
    assert meter.spent == telemetry.Spent()
    meter.begin(0, 0)
    add(meter, 1, 8)
    meter.flush(aloud=False)
    first = rows(tmp_path)[-1]
    assert first["flops"] == 6.0 * 80 and first["device_hours"] == pytest.approx(first["elapsed_s"] / 3600, abs=2e-6)
    assert first["cost"] == pytest.approx(2.0 * first["device_hours"], abs=3e-6)
    for again in (1, 2):  # killed after update 8, resumed from 5; and once more
        spent = telemetry.spent_before(tmp_path, 2.0)
        metrics.rewind(tmp_path, 5)
        assert telemetry.spent_before(tmp_path, 2.0) == spent, "whether or not a kill came after the rewind"
        meter = meter_in(tmp_path, price=3.0)
        meter.spent = spent
        meter.begin(5, 50)
        add(meter, 6, 8)
        meter.flush(aloud=False)
        last = rows(tmp_path)[-1]
        assert last["flops"] == 6.0 * (80 + 30 * again)
        hours = last["elapsed_s"] / 3600
        assert last["device_hours"] == pytest.approx(spent.device_hours + hours, abs=2e-6)
        assert last["cost"] == pytest.approx(spent.cost + 3.0 * hours, abs=6e-6)
    # Attempts without a price cost what the price of now makes of their hours.
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "flops": 5.0, "device_hours": 4.0}\n')
    (tmp_path / "metrics.discarded.jsonl").unlink()
    assert telemetry.spent_before(tmp_path, 2.5) == telemetry.Spent(5.0, 4.0, 10.0)
    assert telemetry.spent_before(tmp_path, None) == telemetry.Spent(5.0, 4.0, 0.0)


@pytest.mark.parametrize("arch", ("gpt2", "modern"))
@pytest.mark.parametrize("tie", (True, False))
def test_no_model_of_random_weights_is_called_implausible(arch, tie):
    for width, layers in ((64, 1), (64, 4), (256, 1), (512, 3), (2048, 1)):
        shape = ModelConfig(arch=arch, tie=tie, d_model=width, n_layers=layers, ctx=32)
        model = GPT(budget.size_model(shape, 257, "cpu"))
        model.init_weights(0)
        ids = torch.randint(257, (4, 33), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            loss = float(model(ids[:, :-1], ids[:, 1:]).sum()) / 128
        assert telemetry.first_loss_fault(loss, 257, False) is None, (width, layers, loss)
        assert telemetry.first_loss_fault(loss, 1_000, False) and telemetry.first_loss_fault(loss + 2.2, 257, False)


def test_a_first_loss_too_low_is_as_wrong_as_one_too_high():
    fault = telemetry.first_loss_fault(math.log(1000), 50_257, False)
    assert fault.startswith("first loss 6.91, random weights over 50,257 ids give about ln 50,257 = 10.82; too low, ")
    assert "as 1,000 equally likely ids" in fault
    assert "too high" in telemetry.first_loss_fault(14.0, 50_257, False)
    assert "first loss nan" in telemetry.first_loss_fault(math.nan, 50_257, False)
    assert telemetry.first_loss_fault(0.0, 50_257, False) and telemetry.first_loss_fault(math.inf, 65, False)
    assert telemetry.first_loss_fault(10.9, 50_257, False) is None
    for loss in (3.0, math.nan):
        assert telemetry.first_loss_fault(loss, 50_257, True) is None


LOUD = """
import sys

sys.path.insert(0, sys.argv.pop(1))
import torch
from fourscale.model import GPT

init_weights = GPT.init_weights

@torch.no_grad()
def loud(self, seed):
    init_weights(self, seed)
    self.wte.weight *= 20

GPT.init_weights = loud
import train

train.main()
"""


@pytest.mark.slow
def test_an_implausible_first_loss_is_noted_live_and_a_bar_leaves_the_lines_whole(data, tmp_path):
    script = tmp_path / "loud.py"
    script.write_text(LOUD)
    flags = ("--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--progress", "--stop-after", 11)
    shown = run(script, ROOT, *flags, nproc=2)
    lines = shown.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("step 1 | loss "))
    assert re.fullmatch(
        r"note: step 1: first loss [\d.]+, random weights over 257 ids .*; too high: .*", lines[first + 1]
    )
    assert sum(line.startswith("note: step 1") for line in lines) == 1
    assert [int(m[1]) for m in re.finditer(r"^step\s+(\d+)\s+\|\s+loss\s+([\d.]+)", shown.stdout, re.M)] == [
        1,
        5,
        10,
        11,
    ]
    bars = [line for line in shown.stderr.splitlines() if "update" in line and "/20" in line]
    assert any("loss=" in line and "skipped=" in line for line in bars) and "11/20" in shown.stderr
    assert "\r" not in shown.stdout
    # On a resume the bar begins where the run goes on; and a loss that was trained on needs no plausibility.
    again = run("train.py", *flags[:-2], "--resume", "must")
    assert "first loss" not in again.stdout
    counts = [int(n) for n in re.findall(r"(\d+)/20 ", again.stderr)]
    assert counts and min(counts) >= 11 and "step 20 | loss " in again.stdout
