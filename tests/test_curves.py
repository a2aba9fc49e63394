"""Curves read from run directories, files and console logs: whole, half written, gone back, very long."""

from __future__ import annotations

import json
import math
import tracemalloc

import numpy as np
import pytest
from conftest import SMALL, rows, run

from fourscale import curves, page, thinning, verdict
from fourscale.cli import InputError

TRAINING = {
    **{"updates": 500, "token_budget": 500_000, "global_bsz": 10, "warmup": 20, "lr": 3e-3, "min_lr": 3e-4},
    **{"schedule": "cosine", "optimizer": "adamw", "dtype": "fp32", "sampling": "epoch", "seed": 0, "data_seed": 1},
    **{"eval_tokens": 1000, "clip": 1.0, "decay_fraction": 0.2},
}
RUN = {
    "format": 1,
    "model": {"vocab_size": 66, "ctx": 100},
    "training": TRAINING,
    "baselines": {"unigram_nats": 3.3, "bytes_per_token": 1.0},
    "config": {"target_loss": 1.75},
}

WIDTHS = ("d_model", "n_heads", "n_kv_heads", "d_ff", "ctx")


def row(update, **changed):
    loss = 1.5 + 2.7 / (1 + update / 30) ** 0.6
    fields = {"update": update, "tokens": 1000 * update, "loss": loss, "lr": 3e-3, "preclip_norm": 0.5}
    return fields | {"tokens_per_s": 900.0, "skipped": 0} | changed


def written(directory, lines, run=RUN):
    directory.mkdir(parents=True, exist_ok=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    if run is not None:
        (directory / "run.json").write_text(json.dumps(run))
    return directory


@pytest.fixture(scope="module")
def real(data, tmp_path_factory):
    """A run of train.py and what it printed."""
    out = tmp_path_factory.mktemp("real") / "ckpt"
    said = run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, "--target-loss", 3.25, "--seed", 7).stdout
    return out, said


def test_a_run_and_its_console_log_hold_the_same_curve(real, tmp_path):
    out, said = real
    record = curves.read(out)
    (tmp_path / "console.log").write_text(said)
    log = curves.read(tmp_path / "console.log")
    assert (record.name, record.target, record.state, record.complete) == ("ckpt", 3.25, "finished", True)
    assert (record.course.updates, record.course.warmup, record.course.lr) == (20, 4, 3e-3)
    assert (record.course.ctx, record.course.global_bsz, record.course.vocab_size) == (32, 12, 257)
    assert 1 < record.course.unigram_nats < math.log(257) and record.course.bytes_per_token == pytest.approx(1, rel=0.1)
    assert record.curve.update.tolist() == list(range(1, 21)) and record.rows == 20
    assert record.curve.loss.tolist() == [r["loss"] for r in rows(out)]
    assert record.curve.tokens[-1] == 7_400 and record.curve.val_update.tolist() == [10, 20]
    assert log.curve.update.tolist() == [1, 5, 10, 15, 20]
    same = np.isin(record.curve.update, log.curve.update)
    for name, tolerance in (("tokens", 0), ("loss", 6e-5), ("lr", 6e-6), ("norm", 6e-3)):
        np.testing.assert_allclose(getattr(log.curve, name), getattr(record.curve, name)[same], atol=tolerance)
    np.testing.assert_allclose(log.curve.val_loss, record.curve.val_loss, atol=6e-5)
    assert log.curve.val_update.tolist() == [10, 20] and np.isfinite(log.rate).all()
    assert (log.course.updates, log.course.ctx, log.course.global_bsz, log.target) == (20, 32, 12, None)
    assert log.course.lr is None and log.complete


def test_a_run_that_lives_is_read_up_to_its_last_whole_row(tmp_path):
    lines = [row(u) for u in range(1, 51)]
    run_dir = written(tmp_path / "live", [*lines, json.dumps(row(51))[:40]])
    record = curves.read(run_dir)
    assert record.update == 50 and record.notes == ()
    written(run_dir, [*lines, "\0" * 30 + "\n", '{"update": "x"}\n', {"update": 52}, row(53)])
    record = curves.read(run_dir)
    assert record.curve.update[-2:].tolist() == [50, 53]
    assert record.notes == ("3 lines of metrics.jsonl held no row and were left out",)


def test_rows_done_again_take_the_place_of_the_old_ones(tmp_path):
    old = [row(u, loss=9.0, skipped=2, **({"val_loss": 9.5} if u % 10 == 0 else {})) for u in range(1, 41)]
    new = [row(u, loss=1.0, skipped=1, **({"val_loss": 1.5} if u % 10 == 0 else {})) for u in range(25, 36)]
    record = curves.read(written(tmp_path / "again", [*old, *new]))
    assert record.curve.update.tolist() == list(range(1, 36)) and record.rows == 35
    assert record.curve.loss.tolist() == [9.0] * 24 + [1.0] * 11
    assert record.curve.val_update.tolist() == [10, 20, 30] and record.curve.val_loss.tolist() == [9.5, 9.5, 1.5]


def test_skipped_and_non_finite_updates_are_known_as_such(tmp_path):
    lines = [row(1, skipped=1, loss=None), row(2, skipped=1), row(3, skipped=2, loss=8.0), row(4, skipped=2)]
    lines += [row(5, skipped=2, loss=None), row(6, skipped=2, loss=float("nan"), preclip_norm=None, val_loss=None)]
    record = curves.read(written(tmp_path / "a", lines))
    assert record.curve.skipped.tolist() == [True, False, True, False, False, False]
    assert np.isnan(record.curve.loss).tolist() == [True, False, False, False, True, True]
    assert np.isnan(record.curve.norm[-1]) and np.isnan(record.curve.val_loss[-1])
    # The first row of a branch begins with the count of its origin: none of its own was dropped.
    record = curves.read(written(tmp_path / "b", [row(u, skipped=5) for u in range(101, 120)], RUN | {"origin": {}}))
    assert not record.curve.skipped.any() and record.course.trained_before


def test_a_long_run_is_thinned_in_bounded_memory_and_judged_alike(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).normal(0, 0.03, 12_001)
    long_run = RUN | {"training": TRAINING | {"updates": 20_000}}
    lines = [row(u, loss=1.5 + 2.7 / (1 + u / 30) ** 0.3 + noise[u]) for u in range(1, 12_001)]
    for u in (501, 4_999, 11_997):
        lines[u - 1]["loss"] = None
    for u in range(200, 12_001, 200):
        lines[u - 1]["val_loss"] = lines[u - 1]["loss"] + 0.02
    run_dir = written(tmp_path / "long", lines, long_run)
    whole = curves.read(run_dir)
    assert whole.rows == len(whole.curve.update) == 12_000
    monkeypatch.setattr(thinning, "POINTS", 1000)
    monkeypatch.setattr(thinning, "ODD_POINTS", 100)
    tracemalloc.start()
    thin = curves.read(run_dir)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 700_000, "a few columns of two thousand points; those of 12,000 take more"
    assert len(thin.curve.update) <= 1002 and thin.rows == 12_000
    assert {501, 4_999, 11_997, 12_000} <= set(thin.curve.update.tolist())
    assert np.array_equal(thin.curve.val_update, whole.curve.val_update), "no held-out loss is left out"
    assert thin.notes == (f"12,000 updates were thinned to {len(thin.curve.update):,} points before they were judged",)
    kept = np.isin(whole.curve.update, thin.curve.update)
    assert np.array_equal(whole.curve.loss[kept], thin.curve.loss, equal_nan=True), "sampled, not averaged"
    found = [verdict.judge(r.curve, r.course, 1.9) for r in (whole, thin)]
    assert found[0].verdict == found[1].verdict and found[0].crossed == found[1].crossed
    assert found[0].forecast.loss == pytest.approx(found[1].forecast.loss, abs=0.02)


def test_a_million_broken_updates_do_not_fill_the_memory_either(tmp_path, monkeypatch):
    monkeypatch.setattr(thinning, "POINTS", 1000)
    monkeypatch.setattr(thinning, "ODD_POINTS", 100)
    record = curves.read(written(tmp_path / "nan", [row(u, loss=None) for u in range(1, 9001)]))
    assert len(record.curve.update) <= 1002 and record.update == 9000 and np.isnan(record.curve.loss).all()


LOG = """\
[rank0]: fourscale 0.1.0 | gpt2 2 layers x 32 wide, 43,000 parameters | 2 x cpu, ddp, fp32
12 windows an update = 2 ranks x 6 windows x 1 micro-batch | x 32 = 384 tokens | 100 updates, 38,300 tokens = 1 epochs
2026-11-30 12:00:01 step 1 | loss 5.5607 | gnorm 8.27 | lr 7.50e-04 | 40.1 ms/step | 9,576 tok/s | mfu n/a | eta 0:04
  3%|###      | 3/100\rstep 9 | loss 4.2\rstep 10 | loss 4.1 | gnorm 1.62 | lr 3e-03 | 40.0 ms/step | 9,600 tok/s\r
step 20 | val loss 3.9000 | val ppl 49.40
step 13 | skipped: loss not finite on rank 1; samples 144 .. 155
step 17 | skipped: loss 88.5 is a spike; samples 192 .. 203
step 20 | loss 3.8000 | gnorm 0.90 | lr 2.99e-03 | 41.0 ms/step | 9,366 tok/s | mfu n/a | eta 0:03 | 2 skipped
step 30 | loss nan | gnorm nan | lr 2.90e-03 | 41.0 ms/step | 9,366 tok/s | mfu n/a | eta 0:03
resumed from step_20: 7,680 tokens seen
step 30 | val loss 3.7000 | val ppl 40.44
step 30 | loss 3.6000 | gnorm 0.80 | lr 2.90e-03 | 41.0 ms/step | 9,366 tok/s | mfu n/a | eta 0:03
step 100 | val loss 3.0000 | val ppl 20.1
step 100 | loss 2.9000 | gnorm 0.70 | lr 3.00e-04 | 41.0 ms/step | 9,366 tok/s | mfu n/a | eta 0:00
"""


def test_a_scraped_log_with_prefixes_a_progress_bar_skips_and_a_resume(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(LOG)
    record = curves.read(path)
    assert record.curve.update.tolist() == [1, 9, 10, 13, 17, 20, 30, 100]
    assert record.curve.skipped.tolist() == [False, False, False, True, True, False, False, False]
    np.testing.assert_equal(record.curve.loss, [5.5607, 4.2, 4.1, math.nan, 88.5, 3.8, 3.6, 2.9])
    assert record.curve.tokens[-1] == 38_300, "the last update is cut to the budget"
    assert record.curve.tokens[2] == 3_840 and record.rate[2] == 9600.0
    assert record.curve.val_update.tolist() == [20, 30, 100] and record.curve.val_loss.tolist() == [3.9, 3.7, 3.0]
    assert record.course == verdict.Course(updates=100, ctx=32, global_bsz=12) and record.complete
    path.write_text(LOG[: LOG.index("step 30 | val loss")])
    assert curves.read(path).update == 20, "resumed: what the attempt before did beyond is being done again"
    # Without the line that says so, updates that are counted anew say it.
    path.write_text(LOG.replace("resumed from step_20: 7,680 tokens seen\n", ""))
    again = curves.read(path)
    assert again.curve.update.tolist() == record.curve.update.tolist()
    np.testing.assert_equal(again.curve.loss, record.curve.loss)


def test_the_log_of_nanogpt(tmp_path):
    path = tmp_path / "nanogpt.txt"
    lines = ["tokens per iteration will be: 491,520", "step 0: train loss 10.9912, val loss 10.9899"]
    lines += [f"iter {i}: loss {9 - i / 100:.4f}, time 123.45ms, mfu 30.00%" for i in range(0, 251, 10)]
    lines[-1:-1] = ["step 250: train loss 6.5000, val loss 6.5100", "saving checkpoint to out"]
    path.write_text("\n".join(lines) + "\n")
    record = curves.read(path)
    assert record.curve.update[:3].tolist() == [1, 11, 21], "iter 0 is the first update"
    assert record.curve.tokens[0] == 491_520 and record.tokens_known
    assert record.curve.val_update.tolist() == [250] and record.curve.val_loss.tolist() == [6.51]
    assert record.course.updates is None and "nothing can be forecast" in record.notes[0]
    path.write_text("step 250: train loss 6.5000, val loss 6.5100\nstep 500: train loss 5.5, val loss 5.6\n")
    record = curves.read(path)
    assert record.curve.loss.tolist() == [6.5, 5.5] and not record.tokens_known
    assert record.curve.tokens.tolist() == record.curve.update.tolist()


def test_what_is_no_run_is_one_line(tmp_path):
    (tmp_path / "binary.pt").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / "step.json").write_text("{}")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n')
    written(tmp_path / "imported", [], {"format": 1, "imported": {}})
    with pytest.raises(InputError, match=r"nowhere: no such file or directory; name a run directory"):
        curves.read_all((str(tmp_path / "nowhere"),))
    with pytest.raises(InputError, match=r"step_5: a checkpoint; name its run directory "):
        curves.read_all((str(tmp_path / "step_5"),))
    with pytest.raises(InputError, match=r"binary.pt: has no line such as 'step 10 \| loss 4.2'"):
        curves.read(tmp_path / "binary.pt")
    with pytest.raises(InputError, match=r"bad.jsonl: holds no row of metrics"):
        curves.read(tmp_path / "bad.jsonl")
    with pytest.raises(InputError, match=r"imported: imported weights"):
        curves.read(tmp_path / "imported")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: no metrics.jsonl in it or in a directory of it"):
        curves.read_all((str(tmp_path / "empty"),))


@pytest.mark.parametrize("damage", ["missing", "cut", "no table", "wrong"])
def test_without_a_sound_contract_the_curve_is_judged_and_that_is_said(tmp_path, damage):
    run_dir = written(tmp_path / "run", [row(u) for u in range(1, 60)], None)
    text = {"cut": json.dumps(RUN)[:90], "no table": json.dumps(RUN | {"model": 5})}
    text["wrong"] = json.dumps(RUN | {"training": TRAINING | {"updates": "many"}})
    if damage != "missing":
        (run_dir / "run.json").write_text(text[damage])
    record = curves.read(run_dir)
    assert record.course == verdict.Course() and record.update == 59
    assert len(record.notes) == 1 and "schedule" in record.notes[0]


def test_a_directory_of_runs_and_names_that_tell_them_apart(tmp_path):
    for name in ("x/ckpt", "y/ckpt", "race/a", "race/b"):
        written(tmp_path / name, [row(1)])
    (tmp_path / "race" / "data").mkdir()
    specs = (str(tmp_path / "x" / "ckpt"), str(tmp_path / "y" / "ckpt"), str(tmp_path / "race"))
    records = curves.read_all((*specs, str(tmp_path / "race" / "a")))
    assert [r.name for r in records] == ["x/ckpt", "y/ckpt", "a", "b"], "each once"


def test_names_differ_however_deep_the_directories_are_that_tell_them_apart(tmp_path):
    for name in ("a/x/run", "b/x/run", "c/run"):
        written(tmp_path / name, [row(1)])
    records = curves.read_all(tuple(str(tmp_path / name) for name in ("a/x/run", "b/x/run", "c/run")))
    assert [r.name for r in records] == ["a/x/run", "b/x/run", "c/run"]


@pytest.mark.parametrize(
    "rubbish",
    [
        {"training": TRAINING | {"updates": 10**400, "warmup": 10**400}},
        {"training": TRAINING | {"warmup": 499}},
        {"training": TRAINING | {"lr": math.nan}},
        {"training": TRAINING | {"lr": math.inf, "schedule": "sinus"}},
        {"training": TRAINING | {"decay_fraction": -1.0, "schedule": "wsd"}},
        {"model": {"vocab_size": -5, "ctx": "many"}},
        {"model": {**dict.fromkeys(WIDTHS, 8), "n_heads": 0, "n_layers": 1, "vocab_size": 9}},
        {"model": {**dict.fromkeys(WIDTHS, 8), "n_layers": 10**15, "vocab_size": 9}},
        {"baselines": {"unigram_nats": math.inf, "bytes_per_token": -1}},
        {"attempts": 5, "data": {"parts": {"a": 5}}},
        {"config": {"target_loss": -3.0, "model": [], "data": 7}},
    ],
    ids=range(11),
)
def test_no_figure_of_a_damaged_contract_ends_the_judgement(tmp_path, rubbish):
    rows = [row(u, **({"val_loss": 2.0} if u % 20 == 0 else {})) for u in range(1, 101)]
    record = curves.read(written(tmp_path / "run", rows, RUN | rubbish))
    run = curves.Judged(record, record.target, verdict.judge(record.curve, record.course, record.target))
    words = " ".join(words for _, words in page.findings(run))
    assert "nan" not in words and "inf" not in words
    json.dumps(page.entry(run), allow_nan=False)
    page.render([run], b"", b"")


@pytest.mark.parametrize("tokens", [1e30, -5, math.nan, "many", 1 << 63])
def test_tokens_that_no_run_can_have_count_as_unknown(tmp_path, tokens):
    record = curves.read(written(tmp_path / "run", [row(u, tokens=tokens) for u in range(1, 60)]))
    assert not record.tokens_known and record.curve.tokens[-1] == 59


def test_a_count_of_tokens_that_stands_still_is_borne(tmp_path):
    record = curves.read(written(tmp_path / "run", [row(u, tokens=1) for u in range(1, 100)]))
    with np.errstate(all="raise"):
        verdict.judge(record.curve, record.course, 1.75)


def test_a_log_with_numbers_too_long_for_any_count(tmp_path):
    log = tmp_path / "log"
    many = "9" * 6000
    log.write_text(
        f"x 8 = {many} tokens | {many} updates, {many} tokens\nstep {many} | loss 4.0\niter {many}: loss 3.0\n"
        f"tokens per iteration will be: {'9' * 20}\n" + "".join(f"step {u} | loss 4.0\n" for u in range(1, 20))
    )
    record = curves.read(log)
    assert record.update == 19 and record.curve.tokens[-1] == 1 << 62


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "utf-8-sig"])
def test_a_log_in_another_encoding(tmp_path, encoding):
    log = tmp_path / "train.log"
    text = "caf\xe9\r\n" + "".join(f"step {u} | loss 4.0 | gnorm 0.50 | lr 1.00e-03\r\n" for u in range(1, 20_000))
    log.write_bytes(text.encode(encoding))
    record = curves.read(log)
    assert record.rows == 19_999 and np.all(record.curve.loss == 4.0) and np.all(record.curve.norm == 0.5)


def test_a_log_may_begin_with_a_brace(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("{'learning_rate': 0.1}\n" + "".join(f"iter {u}: loss 4.0, time 3ms\n" for u in range(20)))
    assert curves.read(log).update == 20


def test_a_run_before_its_first_row(tmp_path):
    record = curves.read(written(tmp_path / "new", []))
    assert record.update == 0 and not record.complete
    assert verdict.judge(record.curve, record.course).verdict == "undecided"


def test_smoothing_neither_smears_the_start_nor_shows_a_spike():
    loss = np.concatenate([np.linspace(10, 4, 16), np.full(400, 4.0)])
    loss[200], loss[300] = 50.0, math.nan
    smooth = curves.smoothed(loss)
    assert smooth[0] == 10 and abs(smooth[8] - loss[8]) < 0.5
    assert smooth[200] == 4.0 and math.isnan(smooth[300]) and smooth[-1] == 4.0
    line = np.arange(1000.0)
    np.testing.assert_allclose(curves.smoothed(line)[:-26], line[:-26], atol=0.5)
    assert len(curves.smoothed(loss[:0])) == 0
