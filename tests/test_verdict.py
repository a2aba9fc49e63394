"""The judgement of a curve: made-up curves of each kind, and the recorded runs of tests/verdicts.py."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import verdicts
from conftest import ROOT, environment

from fourscale.forecast import Course, Curve, chance, forecast, usual_rate
from fourscale.schedule import learning_rate
from fourscale.verdict import Judgement, easiest, judge, smooth

COURSE = Course(
    updates=400,
    warmup=20,
    lr=3e-3,
    min_lr=3e-4,
    schedule="cosine",
    vocab_size=66,
    unigram_nats=3.313,
    bytes_per_token=1.0,
    clip=1.0,
    global_bsz=32,
    ctx=64,
)
PER_UPDATE = 2048
FLOOR, SIZE, EXPONENT = 1.5, 5.0, 0.45  # of the curve that `falling` draws


def rates(course: Course = COURSE) -> np.ndarray:
    kind = (course.updates, course.warmup, course.lr, course.min_lr, course.schedule, course.decay_fraction)
    return np.array([learning_rate(i, *kind) for i in range(course.updates)])


def falling(course: Course = COURSE, noise: float = 0.025, seed: int = 0) -> np.ndarray:
    """A sound run, float64 [n]: from ln(vocabulary) down a power law in the sum of rates, less what decay gives."""
    share = rates(course) / course.lr
    law = FLOOR + SIZE * (np.cumsum(share) + 6) ** -EXPONENT
    law -= np.where(np.arange(course.updates) < course.warmup, 0, 0.06 * law * (1 - share))
    return np.minimum(law, math.log(66)) + noise * np.random.default_rng(seed).normal(size=course.updates)


def curve(loss: np.ndarray, course: Course = COURSE, until: int | None = None, held_out: Any = None) -> Curve:
    """loss, and held-out losses at each 20th update: of the same curve smoothed, or as given."""
    n = until or len(loss)
    at = np.arange(20, n + 1, 20)
    if held_out is None:
        held_out = np.array([np.median(loss[max(0, i - 9) : i]) for i in at])
    return Curve(
        update=np.arange(1, n + 1),
        tokens=PER_UPDATE * np.arange(1, n + 1),
        loss=loss[:n],
        lr=rates(course)[:n] if course.lr else np.full(n, np.nan),
        norm=np.full(n, 0.6),
        skipped=np.zeros(n, bool),
        val_update=at,
        val_loss=np.asarray(held_out, float)[: len(at)],
    )


def of(loss: np.ndarray, until: int | None = None, target: float | None = None, **course: Any) -> Judgement:
    return judge(curve(loss, until=until), dataclasses.replace(COURSE, **course), target)


# ---- each verdict --------------------------------------------------------------------------------------------------


def test_a_sound_run_is_healthy_and_told_to_finish():
    for until in (60, 100, 200, 399):
        found = of(falling(), until)
        assert found.verdict == "healthy" and "finish" in found.remedy
        assert found.forecast.low < found.forecast.loss < found.forecast.high
    assert "nothing" in of(falling()).remedy  # it is finished


def test_the_target_decides_between_healthy_stalled_and_undecided():
    end = float(np.median(falling()[-10:]))
    far = of(falling(), 200, target=end - 0.6)
    assert far.verdict == "stalled" and "not" not in far.remedy.split(",")[0] and "larger" in far.remedy
    assert "forecast" in far.reasons[0] and f"{end - 0.6:.4g}" in far.reasons[0]
    assert of(falling(), 200, target=end + 0.6).verdict == "healthy"
    assert of(falling(), 200, target=end + 0.01).verdict == "undecided"


def test_a_finished_run_is_judged_by_its_end():
    loss = falling()
    c = curve(loss)
    end = float(c.val_loss[-1])
    beat, missed = judge(c, COURSE, end + 0.001), judge(c, COURSE, end - 0.001)
    assert (beat.verdict, missed.verdict) == ("healthy", "stalled")
    assert beat.forecast.loss == beat.forecast.low == beat.forecast.high == end
    assert beat.crossed == int(c.val_update[np.flatnonzero(c.val_loss <= end + 0.001)[0]])


def test_crossed_is_the_first_evaluated_update_at_or_below_the_target():
    c = curve(falling())
    target = float(c.val_loss[11])
    first = int(c.val_update[np.flatnonzero(c.val_loss <= target)[0]])
    assert judge(c, COURSE, target).crossed == first and first <= 240


def test_a_loss_above_its_own_minimum_is_diverging_though_its_slope_is_flat():
    loss = falling()
    loss[80:] = loss[79] + 0.5 + 0.03 * np.random.default_rng(1).normal(size=320)
    found = of(loss, 160)
    assert found.verdict == "diverging" and "above its minimum" in found.reasons[0] and "smaller peak" in found.remedy


def test_a_spike_that_heals_is_not_diverging():
    loss = falling()
    loss[150:155] += 1.5
    assert of(loss, 200).verdict == "healthy"


@pytest.mark.parametrize("what", ["nan", "skipped", "held-out"])
def test_losses_that_are_not_finite_are_diverging(what):
    loss, held_out = falling(), None
    if what == "nan":
        loss[90:100] = np.nan
    c = curve(loss, until=100, held_out=[3.0, 2.9, 2.8, 2.7, math.nan] if what == "held-out" else held_out)
    if what == "nan":
        c = dataclasses.replace(c, val_loss=np.array([3.0, 2.9, 2.8, 2.7, 2.6]))
    if what == "skipped":
        c.skipped[90:] = True
    found = judge(c, COURSE)
    assert found.verdict == "diverging" and ("events.jsonl" in found.remedy) is (what != "held-out")


def test_a_few_dropped_updates_are_borne_and_told():
    c = curve(falling(), until=200)
    c.skipped[[50, 120]] = True
    c.loss[120] = np.nan
    found = judge(c, COURSE)
    assert found.verdict == "healthy" and any("2 updates dropped" in r for r in found.reasons)


def plateau(jumpy: bool) -> np.ndarray:
    """Down to the unigram level in some 25 updates, and there it stays."""
    i = np.arange(400)
    loss = 3.33 + 0.86 * np.exp(-i / 8) + 0.025 * np.random.default_rng(2).normal(size=400)
    if jumpy:
        loss[[6, 7, 9]] += (3.0, 1.2, 0.9)
    return loss


def test_flat_at_the_unigram_level_is_stalled_where_it_came_there_smoothly():
    found = of(plateau(jumpy=False), 200)
    assert found.verdict == "stalled" and "order" in found.remedy and "batch" in found.remedy
    assert "3.313" in found.reasons[0]


def test_flat_at_the_unigram_level_is_diverging_where_the_loss_had_jumped():
    found = of(plateau(jumpy=True), 200)
    assert found.verdict == "diverging" and "smaller peak rate" in found.remedy


def test_a_low_rate_on_its_slow_way_through_the_unigram_level_is_not_taken_for_shuffled_targets():
    tokens = np.arange(1, 401)
    loss = 3.55 - 0.1 * np.log2(tokens / 40) + 0.01 * np.random.default_rng(3).normal(size=400)
    found = of(np.minimum(loss, 4.2), 320)
    assert found.verdict == "healthy", found


def test_an_update_counted_from_0_is_borne():
    c = curve(falling(), until=200)
    c = dataclasses.replace(c, update=c.update - 1, tokens=c.tokens - PER_UPDATE)
    with np.errstate(divide="raise", invalid="raise"):
        assert judge(c, COURSE).verdict == judge(c, Course()).verdict == "healthy"


def test_weights_trained_before_know_no_unigram_level_and_no_first_loss():
    assert of(plateau(jumpy=False), 200, trained_before=True).verdict == "healthy"
    low = falling() - 1.2
    assert of(low, 200, trained_before=True).verdict == "healthy"
    assert of(np.full(400, 2.0), 60).verdict == "suspicious"  # the first loss is that of a model that knows
    assert of(np.full(400, 2.0), 60, trained_before=True).verdict == "healthy"


@pytest.mark.parametrize("known", ["bytes", "vocabulary", "nothing"])
def test_a_loss_that_falls_to_nothing_is_suspicious(known):
    loss = 4.19 * np.exp(-np.arange(400) / 15) + 0.001
    lacking = {"bytes": {}, "vocabulary": {"bytes_per_token": None}}.get(
        known, {"bytes_per_token": None, "vocab_size": None, "unigram_nats": None}
    )
    found = of(loss, 80, **lacking)
    assert found.verdict == "suspicious" and "batch" in found.remedy and "shard" in found.remedy
    assert of(loss, 80, target=1.0, **lacking).verdict == "suspicious"  # a target reached by a leak isn't reached


def test_suspicion_comes_within_a_tenth_and_before_the_warmup_ends():
    loss = 4.19 * np.exp(-np.arange(400) / 9)
    assert of(loss, 18).verdict == "suspicious"


def test_no_honest_curve_is_called_too_easy():
    """Published and usual figures: bits a byte against bytes read."""
    for bits, n_bytes in ((2.34, 4.1e6), (1.06, 1e7), (0.93, 4e10), (0.45, 2e9), (0.35, 2e11), (3.5, 3e5)):
        assert bits > easiest(n_bytes), (bits, n_bytes)
    assert easiest(1) == 2.0 and easiest(1e5) > easiest(1e6) > easiest(1e9) > 0


def test_few_letters_need_few_bits():
    """DNA: 2 bits a byte from the start, and hardly less later."""
    loss = 1.61 - 0.35 * (1 - np.exp(-np.arange(400) / 10))
    assert of(loss, 40, vocab_size=5, unigram_nats=1.38).verdict != "suspicious"
    leak = np.where(np.arange(400) < 5, 1.61, 0.4)
    assert of(leak, 40, vocab_size=5, unigram_nats=1.38).verdict == "suspicious"


def test_a_text_learnt_by_heart_is_stalled_with_its_own_remedy():
    i = np.arange(400)
    loss = falling()
    loss[150:] = loss[149] * np.exp(-(i[150:] - 149) / 90)
    at = np.arange(20, 401, 20)
    held_out = np.where(at < 160, [np.median(loss[j - 10 : j]) for j in at], 2.0 + (at - 160) / 300)
    found = judge(curve(loss, until=340, held_out=held_out), COURSE, 1.2)
    assert found.verdict == "stalled" and "by heart" in found.reasons[0] and "--save-best" in found.remedy


def test_nothing_is_said_too_early():
    assert judge(curve(falling(), until=19), COURSE).verdict == "undecided"  # in the warmup
    assert "warmup" in judge(curve(falling(), until=19), COURSE).reasons[0]
    assert of(falling(), 5, warmup=0).verdict == "undecided"
    empty = Curve(*(np.empty(0, t) for t in (int, int, float, float, float, bool, int, float)))
    assert judge(empty, Course()).verdict == "undecided"


def test_without_a_known_course_what_can_be_judged_is():
    blank = Course()
    c = dataclasses.replace(curve(falling(), until=200), norm=np.full(200, np.nan), lr=np.full(200, np.nan))
    assert judge(c, blank).verdict == "healthy" and judge(c, blank).forecast is None
    aimed = judge(c, blank, 1.0)
    assert aimed.verdict == "undecided" and "length" in aimed.reasons[0]
    assert judge(c, blank, float(c.val_loss[-1]) + 0.01).verdict == "healthy"  # reached already
    loss = falling()
    loss[120:] += 1.0
    assert judge(curve(loss, until=200), blank).verdict == "diverging"


def test_a_console_log_that_tells_each_tenth_update_can_be_judged():
    whole = curve(falling())
    tenth = {k: getattr(whole, k)[9:200:10] for k in ("update", "tokens", "loss", "lr", "norm", "skipped")}
    c = Curve(**tenth, val_update=whole.val_update[:10], val_loss=whole.val_loss[:10])
    found = judge(c, COURSE)
    assert found.verdict == "healthy" and abs(found.forecast.loss - whole.val_loss[-1]) < 0.2
    counted = dataclasses.replace(c, tokens=c.update)  # tokens unknown: no bits a byte can be told
    assert judge(counted, dataclasses.replace(COURSE, bytes_per_token=None)).verdict == "healthy"


# ---- the forecast --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_the_forecast_of_a_law_holds_its_end_and_narrows(schedule):
    course = dataclasses.replace(COURSE, schedule=schedule)
    loss = falling(course)
    end = float(np.median(falling(course, noise=0)[-3:]))
    widths = []
    for until in (60, 120, 240, 380):
        f = forecast(curve(loss, course, until), course)
        assert f.low <= end <= f.high, (until, f, end)
        widths.append(f.high - f.low)
    assert widths == sorted(widths, reverse=True) and widths[-1] < 0.15


def test_the_forecast_counts_on_the_decay_ahead():
    cosine, constant = (dataclasses.replace(COURSE, schedule=s) for s in ("cosine", "constant"))
    flat = 2.2 + 0.02 * np.random.default_rng(0).normal(size=400)  # in the rates' plateau, all alike
    short = forecast(curve(flat, cosine, 60), dataclasses.replace(cosine, updates=70, warmup=2))
    long = forecast(curve(flat, constant, 60), dataclasses.replace(constant, updates=4000))
    assert long.high - long.low > short.high - short.low


def test_the_forecast_is_of_the_held_out_loss():
    loss = falling()
    at = np.arange(20, 201, 20)
    plain = forecast(curve(loss, until=200), COURSE)
    above = [np.median(loss[max(0, i - 9) : i]) + 0.3 for i in at]
    assert forecast(curve(loss, until=200, held_out=above), COURSE).loss == pytest.approx(plain.loss + 0.3, abs=0.02)


def test_a_million_updates_are_judged_at_once():
    n, course = 20_000, dataclasses.replace(COURSE, updates=1_000_000, warmup=2_000)
    update = np.arange(1, n + 1) * 25
    loss = 2.5 + 30 * update**-0.4 + 0.03 * np.random.default_rng(0).normal(size=n)
    nothing = np.empty(0)
    c = Curve(update, update * 2048, loss, np.full(n, 3e-3), np.full(n, 0.5), np.zeros(n, bool), nothing, nothing)
    found = judge(c, course)
    assert found.verdict == "healthy" and 2.4 < found.forecast.loss < 2.7


def test_the_smoothed_curve_follows_and_its_error_is_told():
    loss = falling()
    s = smooth(PER_UPDATE * np.arange(1, 401), loss, 32)
    true = falling(noise=0)
    middle = [
        np.median(true[int(a) // PER_UPDATE : int(b) // PER_UPDATE])
        for a, b in zip(s.tokens, s.tokens[1:], strict=False)
    ]
    z = (s.level[:-1] - middle) / s.error[:-1]
    assert abs(z).mean() < 1.5 and s.noise == pytest.approx(0.025, rel=0.35)


def test_it_needs_neither_torch_nor_matplotlib():
    code = "import sys, fourscale.verdict; print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# ---- runs really trained -------------------------------------------------------------------------------------------

STORE = ROOT / "tests" / "verdict_runs.jsonl.gz"
TABLES = ROOT / "tests" / "verdict_runs.md"


def test_curves_are_stored_as_they_are_scored(tmp_path):
    c = verdicts.unpacked(verdicts.packed(curve(falling())))
    run = verdicts.Scored("one", c, COURSE, 2.0, "missed")
    verdicts.store([run], tmp_path / "runs.jsonl.gz")
    [again] = verdicts.stored(tmp_path / "runs.jsonl.gz")
    for field in dataclasses.fields(Curve):
        assert np.array_equal(getattr(again.curve, field.name), getattr(c, field.name), equal_nan=field.name == "loss")
    assert (again.name, again.course, again.target, again.truth) == ("one", COURSE, 2.0, "missed")
    assert verdicts.tables([again]) == verdicts.tables([run])


def test_truth_is_the_end_of_a_run():
    c = curve(falling())
    end = float(c.val_loss[-1])
    assert verdicts.truth(c, COURSE, end + 0.01, ended=False) == "beat"
    assert verdicts.truth(c, COURSE, end - 0.01, ended=False) == "missed"
    assert verdicts.truth(c, COURSE, end + 0.01, ended=True) == "broken"
    assert verdicts.truth(curve(np.linspace(4.2, 3.4, 400)), COURSE, 3.0, ended=False) == "missed"
    flat = curve(np.where(np.arange(400) < 30, 4.0, 3.4))
    assert verdicts.truth(flat, COURSE, 5.0, ended=False) == "broken"  # above 3.313, and not on its way down
    loss = falling()
    loss[200:] = 3.0
    assert verdicts.truth(curve(loss), COURSE, 5.0, ended=False) == "broken"


def test_the_published_tables_come_out_again():
    assert verdicts.tables(verdicts.stored(STORE)) == TABLES.read_text(encoding="utf-8").strip()


def test_a_run_that_beat_its_target_is_healthy_whatever_its_way():
    loss = np.concatenate((np.linspace(6.0, 4.0, 40), np.full(360, 4.0) + 0.01 * np.sin(np.arange(360))))
    course = dataclasses.replace(COURSE, unigram_nats=4.0)
    c = curve(loss)
    assert judge(c, course, target=3.0).verdict == "stalled"
    beat = judge(c, course, target=float(c.val_loss[-1]) + 0.01)
    assert (beat.verdict, beat.chance) == ("healthy", 1.0) and "below the target" in beat.reasons[0]


def test_chances_decide_and_lie_between_the_quantiles():
    c = curve(falling(), until=200)
    ahead = forecast(c, COURSE)
    for loss, share in ((ahead.low, 0.05), (ahead.loss, 0.5), (ahead.high, 0.95)):
        assert chance(c, COURSE, loss) == pytest.approx(share, abs=0.01)
        found = judge(c, COURSE, target=loss)
        assert found.chance == pytest.approx(share, abs=0.01) and f"{found.chance:.0%}" in found.reasons[0]
    assert judge(c, COURSE, ahead.low).verdict == "stalled" and judge(c, COURSE, ahead.loss).verdict == "undecided"


def test_a_turn_for_the_better_is_expected_of_usual_rates():
    # 1.79 N^-0.713 D^0.307: 2.7e6 parameters, 4.1e6 tokens.
    assert usual_rate(2_700_000, 4.1e6) == pytest.approx(0.0050, abs=0.0002)
    flat = np.linspace(3.0, 2.9, 400)
    course = dataclasses.replace(COURSE, unigram_nats=3.3, n_parameters=2_700_000, global_bsz=64, ctx=128)
    usual, tiny = (chance(curve(flat, until=100), dataclasses.replace(course, lr=lr), 2.5) for lr in (3e-3, 1e-4))
    assert usual > 2 * tiny


def test_a_held_out_loss_that_was_not_finite_once_is_left_out():
    loss = falling()
    held = np.array([np.median(loss[max(0, at - 9) : at]) for at in range(20, 201, 20)])
    held[[3, 8]] = np.nan
    broken = curve(loss, until=200, held_out=held)
    kept = np.isfinite(held)
    whole = dataclasses.replace(broken, val_update=broken.val_update[kept], val_loss=held[kept])
    assert judge(broken, COURSE, 1.7) == judge(whole, COURSE, 1.7)
    assert judge(broken, COURSE, 1.7).forecast.low > 0


@pytest.mark.parametrize("updates", [1, 4, 11])
def test_a_finished_run_too_short_for_a_curve_is_judged_by_its_end(updates):
    course = dataclasses.replace(COURSE, updates=updates, warmup=0)
    short = dataclasses.replace(
        curve(falling()[:updates], course), val_update=np.array([updates]), val_loss=np.array([3.0])
    )
    assert judge(short, course, 3.1).verdict == "healthy" and "0.1000 below" in judge(short, course, 3.1).reasons[0]
    assert judge(short, course, 2.9).verdict == "stalled"
    plain = judge(short, course)
    assert plain.verdict == "undecided" and plain.remedy.startswith("nothing to do")
    lost = dataclasses.replace(short, loss=np.full(updates, np.nan), val_loss=np.array([np.nan]))
    assert judge(lost, course).verdict == "diverging"
    lost = dataclasses.replace(lost, val_update=short.val_update[:0], val_loss=short.val_loss[:0])
    assert judge(lost, course).verdict == "diverging"
    assert judge(short, dataclasses.replace(course, updates=50), 3.1).verdict == "undecided", "it goes on"


def test_enormous_losses_are_told_in_few_digits():
    loss = np.where(np.arange(400) < 30, 4.0, 1e30)
    for found in (of(loss, until=200), of(loss, target=3.0)):
        assert found.verdict == "diverging"
        assert max(len(word) for reason in found.reasons for word in reason.split()) < 16, found.reasons
