"""Healthy, stalled, diverging or suspicious: the judgement of a curve, with reasons. numpy alone.

The thresholds below were set on development runs of 0.2M to 2.7M parameters (characters and BPE, gpt2 and modern, rates
over four decades, broken data) before the runs that tests/verdicts.py scores were started.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import numpy as np

from fourscale.forecast import MIN_POINTS, Course, Curve, Forecast, chance, forecast, spread

# ---- thresholds ----------------------------------------------------------------------------------------------------

DROPPED_SHARE = 0.2  # of the latest updates dropped or not finite: diverging
RISE_SE = 4.0  # standard errors that the smoothed loss must lie above its own minimum,
RISE_SHARE = 0.02  # and share of that minimum, to have risen
OVERFIT_SHARE = 0.02  # rise of the held-out loss above its own minimum, as a share of it, while training still falls
BAND = 0.15  # half-width of the band around the unigram level, in units of ln(vocabulary) - unigram level
DWELL = 3.0  # tokens now over tokens at entry into that band: sound runs have left it by then
STEADY = 0.1  # fall with a doubling of tokens, in the same units, above which something is being learnt
SPIKE_SD = 8.0  # of the batch noise that a single update's loss must lie above the lowest before it,
SPIKE_SHARE = 0.03  # and share of the loss, to be a jump
ROUGH = 0.3  # noise of one window (an update's times the root of its windows) as a share of the loss
HOT_WARMUPS = 1.5  # times the warmup, after which a rate that is borne has the loss below the unigram level
EASY_START = 0.75  # share of ln(vocabulary) below which the first loss of random weights is too good
EMPTY_UNIGRAM = 0.15  # unigram level as a share of ln(vocabulary) below which the data are degenerate
LIKELY = 0.8  # chance of beating the target from which a run is healthy
SLIGHT = 0.1  # and down from which it is stalled: to give up a sound run costs more than to wait
PLAIN_LEVEL = 0.15  # nats a token, where bytes a token aren't known: no text is that easy


@dataclass(frozen=True)
class Judgement:
    """verdict: healthy, stalled, diverging, suspicious or undecided. crossed: the first evaluated update whose held-out
    loss was at the target or below. chance: of ending there, where that is what decided."""

    verdict: str
    reasons: tuple[str, ...]
    remedy: str
    forecast: Forecast | None
    crossed: int | None
    chance: float | None = None


# ---- the curve, smoothed -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Smooth:
    """Medians of the loss over windows that grow with the run (a tenth of what went before, at least 5 points).

    tokens (at the window's start), level, error (standard error of level) float64 [k], oldest first. noise: standard
    deviation of one update's loss about the curve, of late. rough: the largest noise of one window as a share of the
    loss since the start, 0 where the batch isn't known. spikes: tokens, float64, of updates whose loss jumped above the
    lowest before.
    """

    tokens: np.ndarray
    level: np.ndarray
    error: np.ndarray
    noise: float
    rough: float
    spikes: np.ndarray

    def slope(self) -> float:
        """Change of the level with a doubling of tokens, over about the last doubling; 0 of a single window."""
        if len(self.level) < 2:
            return 0.0
        back = np.log2(self.tokens[-1] / self.tokens[:-1])
        j = int(np.argmin(np.abs(back - 1)))
        return float((self.level[-1] - self.level[j]) / back[j]) if back[j] > 0 else 0.0  # a record may lack tokens


def smooth(tokens: np.ndarray, loss: np.ndarray, global_bsz: int | None = None) -> Smooth:
    """The curve of finite losses, at least 5 of them, oldest first."""
    n = len(loss)
    ends = [n]
    while ends[-1] >= 10:
        ends.append(ends[-1] - max(5, ends[-1] // 10))
    edges = [0, *reversed(ends)] if ends[-1] >= 5 else [0, *reversed(ends[:-1])]
    spans = list(itertools.pairwise(edges))
    noise = spread(loss[-max(20, n // 4) :])
    level = np.array([np.median(loss[a:b]) for a, b in spans])
    error = np.array([1.2533 * noise / math.sqrt(b - a) for a, b in spans])
    starts = range(0, max(1, n - 19), 10)
    share = max(spread(loss[a : a + 20]) / max(1e-9, float(np.median(loss[a : a + 20]))) for a in starts)
    # A run that is coming apart is not its own measure: its noise counts as that of sound data at the most.
    usual = min(noise, ROUGH * float(level[-1]) / math.sqrt(global_bsz)) if global_bsz else noise
    jump = loss[1:] - np.minimum.accumulate(loss)[:-1]
    high = np.flatnonzero(jump > np.maximum(SPIKE_SD * usual, SPIKE_SHARE * loss[1:])) + 1
    return Smooth(
        np.maximum(1.0, tokens[[a for a, _ in spans]]),
        level,
        error,
        noise,
        share * math.sqrt(global_bsz or 0),
        tokens[high].astype(float),
    )


# ---- the judgement -------------------------------------------------------------------------------------------------

WAIT = "wait: it is too early to tell"
FINISH = "let it finish"
DONE = "nothing to do: it is finished"
MORE = "a larger peak rate, more updates, or a larger model or more data; more patience alone won't do it"
COOLER = "a smaller peak rate, longer warmup, or tighter clipping"
LOWER = "a smaller peak rate or longer warmup: the rate is above what this model bears; more patience won't do it"
NO_ORDER = (
    "nothing beyond token frequencies is being learnt, so the targets carry no order or don't belong to the inputs: "
    "look at a batch (train.py --preflight)"
)
READ = "read a batch (train.py --preflight): a leak, a wrong shift of the targets, or a degenerate shard"
OVERFITTED = "stop here and keep the best checkpoint (--save-best); more or other data, a smaller model, or dropout"


def easiest(n_bytes: float) -> float:
    """Bits a byte below which a model that has read this many bytes of text can't honestly be.

    Two thirds to a third of what the best compressors, which learn while they read, as a run does, need for text of
    that length (about 2 bits a byte of 1 MB, 1.2 of 100 MB, 0.9 of 1 GB).
    """
    return min(2.0, 1.25 * (max(n_bytes, 1.0) / 1e6) ** -0.2)


def judge(curve: Curve, course: Course, target: float | None = None) -> Judgement:
    """Judge a run by what it has shown so far; once finished, by its outcome. target: held-out loss, nats a token."""
    hits = curve.val_update[curve.val_loss <= target] if target is not None else curve.val_update[:0]
    crossed = int(hits[0]) if len(hits) else None

    def verdict(
        name: str, reasons: list[str], remedy: str, ahead: Forecast | None = None, share: float | None = None
    ) -> Judgement:
        return Judgement(name, tuple(reasons), remedy, ahead, crossed, share)

    n = len(curve.update)
    if n == 0:
        return verdict("undecided", ["no update is recorded yet"], WAIT)
    sound = np.isfinite(curve.loss) & ~curve.skipped
    late = slice(-max(5, n // 10), None)
    lost = int((~sound[late]).sum())
    if n >= 5 and lost > max(2, DROPPED_SHARE * len(sound[late])):
        what = f"{lost} of the latest {len(sound[late])} updates were dropped or had no finite loss"
        return verdict("diverging", [what], f"{COOLER}; events.jsonl says which were dropped, and why")
    values = curve.val_loss[-1:]
    if len(values) and not np.isfinite(values[0]):
        return verdict("diverging", [f"the held-out loss at update {curve.val_update[-1]} is not finite"], COOLER)
    seen = np.isfinite(curve.val_loss)  # the run may have come back from one that was not
    curve = dataclasses.replace(curve, val_update=curve.val_update[seen], val_loss=curve.val_loss[seen])
    update, tokens, loss = curve.update[sound], curve.tokens[sound], curve.loss[sound]
    if len(loss) and (reasons := _too_good(curve, course, update, tokens, loss)):
        return verdict("suspicious", reasons, READ)
    now = int(curve.update[-1])
    finished = course.updates is not None and now >= course.updates
    known = finished and len(curve.val_update) > 0 and curve.val_update[-1] >= now
    if len(loss) < MIN_POINTS:
        few = f"{len(loss)} update{'s' * (len(loss) != 1)} with a finite loss; {MIN_POINTS} are needed"
        if not finished:
            return verdict("undecided", [few], WAIT)
        if not len(loss):
            return verdict("diverging", [f"none of its {n} updates had a finite loss"], COOLER)
        if known and target is not None:  # the outcome needs no curve
            end = Forecast(*[float(curve.val_loss[-1])] * 3)
            name, remedy = ("healthy", DONE) if end.loss <= target else ("stalled", MORE)
            return verdict(name, [_outcome(end.loss, target)], remedy, end, float(end.loss <= target))
        return verdict("undecided", [few], "nothing to do: it is finished, and too short to be judged")
    if now <= course.warmup and (course.updates is None or now < course.updates):
        return verdict("undecided", [f"update {now} of {course.warmup} of the warmup"], WAIT)

    s = smooth(tokens, loss, course.global_bsz)
    signs = _signs(curve, course, s)
    ahead = forecast(curve, course)
    if known:
        ahead = Forecast(*[float(curve.val_loss[-1])] * 3)
    if known and target is not None and ahead.loss <= target:  # whatever the curve looked like on its way
        return verdict("healthy", [_outcome(ahead.loss, target), *signs], DONE, ahead, 1.0)
    end = ahead if finished else None  # of a run that is coming apart no law tells the end
    if reasons := _risen(curve, s):
        return verdict("diverging", reasons + signs, COOLER, end)
    hot = _too_hot(s)
    if stuck := _at_unigram(course, s, tokens):
        # A rate too high jumps before the loss gets there; where nothing can be learnt it comes down smoothly, and
        # jumps, if at all, later, when Adam has made gradients of mere noise large.
        what, came, flat = stuck
        if jumps := _too_hot(s, until=came):
            return verdict("diverging", [what, *jumps, *signs], COOLER, end)
        if flat:
            return verdict("stalled", [what, *signs], NO_ORDER, ahead)
    if (hot or finished) and now >= HOT_WARMUPS * course.warmup and (above := _above_unigram(course, s)):
        if hot:
            return verdict("diverging", [above, *hot, *signs], COOLER, end)
        return verdict("stalled", [above, *signs], MORE, ahead)
    if reasons := _overfitted(curve, s):
        return verdict("stalled", reasons + signs, OVERFITTED, ahead)
    if target is None:
        return verdict("healthy", signs, DONE if finished else FINISH, ahead)
    if ahead is None:
        if crossed is not None:
            return verdict("healthy", [f"the target {target:.4g} was reached at update {crossed}", *signs], FINISH)
        why = "the run's length isn't known" if course.updates is None else "there is no forecast yet"
        return verdict("undecided", [f"{why}, so the target {target:.4g} can't be compared with its end", *signs], WAIT)
    if known:
        share, what = 0.0, _outcome(ahead.loss, target)
    else:
        share = chance(curve, course, target)
        what = (
            f"forecast of the end {_loss(ahead.loss)}, 90% within {_loss(ahead.low)} to {_loss(ahead.high)}: "
            f"a chance of {share:.0%} to beat the target {target:.4g}"
        )
    reasons = [what, *signs]
    if share >= LIKELY:
        return verdict("healthy", reasons, DONE if finished else FINISH, ahead, share)
    if share <= SLIGHT:
        return verdict("stalled", reasons[:1] + hot + signs, LOWER if hot else MORE, ahead, share)
    return verdict(
        "undecided", reasons, "let it run on: the target is neither surely in reach nor out of it", ahead, share
    )


def _loss(x: float, places: int = 3) -> str:
    """A loss or a difference of losses; they may be 1e30."""
    return f"{x:.{places}f}" if abs(x) < 1e4 else f"{x:.3g}"


def _outcome(end: float, target: float) -> str:
    side = "below" if end <= target else "above"
    return f"it ended at {_loss(end, 4)}, {_loss(abs(end - target), 4)} {side} the target {target:.4g}"


def _too_good(curve: Curve, course: Course, update: np.ndarray, tokens: np.ndarray, loss: np.ndarray) -> list[str]:
    """Reasons why the loss is lower than honest data allow."""
    reasons = []
    uniform = math.log(course.vocab_size) if course.vocab_size and course.vocab_size > 1 else None
    if not course.trained_before and uniform:
        if update[0] == 1 and loss[0] < EASY_START * uniform:
            reasons.append(f"the first loss is {loss[0]:.2f}, far below ln(vocabulary) {uniform:.2f}")
        if course.unigram_nats is not None and course.unigram_nats < EMPTY_UNIGRAM * uniform:
            reasons.append(
                f"counting single tokens gives {course.unigram_nats:.3f} nats: the data are nearly one token"
            )
    if len(loss) < 5:
        return reasons
    level = float(np.median(loss[-5:]))
    of, what = level, "training"
    if len(curve.val_loss) and curve.val_loss[-1] < level:
        of, what = float(curve.val_loss[-1]), "held-out"
    size = course.bytes_per_token
    counted = tokens[-1] > update[-1]  # else tokens stand for updates: nobody knows how much was read
    if size is None and course.vocab_size and counted:
        size = max(1.0, math.log2(course.vocab_size) / 4)
    n_bytes = 1e12 if course.trained_before else float(tokens[-1]) * (size or 1.0)
    if size is None or not counted:
        if of < PLAIN_LEVEL:
            reasons.append(f"the {what} loss is {of:.3f} nats a token: no text is that easy")
    elif (bits := of / math.log(2) / size) < (least := _least(course, size, n_bytes)):
        about = "" if course.bytes_per_token else "about "
        memorised = what == "training" and _learnt_by_heart(curve, course, size, least)
        if not memorised:
            reasons.append(
                f"the {what} loss {of:.3f} is {about}{bits:.2f} bits a byte; the best compressors don't come near "
                f"{least:.2f}" + ("" if course.trained_before else f" after {n_bytes:.2g} bytes")
            )
    return reasons


def _least(course: Course, size: float, n_bytes: float) -> float:
    """`easiest`, or half of what equal odds on all tokens cost: few letters, as DNA has, need few bits at once."""
    return min(easiest(n_bytes), 0.5 * math.log2(course.vocab_size) / size if course.vocab_size else math.inf)


def _learnt_by_heart(curve: Curve, course: Course, size: float, least: float) -> bool:
    """Whether the held-out loss is an honest one that first fell well below the unigram level: a small text read many
    times over, not a broken batch."""
    if len(curve.val_loss) < 3 or curve.val_loss[-1] / math.log(2) / size < least:
        return False
    level = course.unigram_nats or (0.8 * math.log(course.vocab_size) if course.vocab_size else math.inf)
    return bool(np.nanmin(curve.val_loss) < 0.9 * level)


def _risen(curve: Curve, s: Smooth) -> list[str]:
    """The smoothed training loss lies above its own earlier minimum by more than noise."""
    if len(s.level) < 3:
        return []
    i = int(np.argmin(s.level[:-1]))
    rise, low = float(s.level[-1] - s.level[i]), float(s.level[i])
    error = math.hypot(s.error[-1], s.error[i])
    if rise <= max(RISE_SE * error, RISE_SHARE * low):
        return []
    return [
        f"the smoothed loss {_loss(s.level[-1])} lies {_loss(rise)} above its minimum {_loss(low)} at "
        f"{s.tokens[i]:,.0f} tokens ({_loss(rise / max(error, 1e-9), 0)} standard errors)"
    ]


def _too_hot(s: Smooth, until: float = math.inf) -> list[str]:
    """Signs, up to so many tokens, of a rate above what the model bears: jumps of the loss, noise beyond sampling's."""
    reasons = []
    if n := int((s.spikes <= until).sum()):
        reasons.append(
            f"{n} update{'s' if n > 1 else ''} jumped above the lowest loss before by more than "
            f"{SPIKE_SD:.0f} times the noise, first at {s.spikes[0]:,.0f} tokens"
        )
    if s.rough > ROUGH and until == math.inf:
        reasons.append(f"noise of a single window up to {100 * s.rough:.0f}% of the loss")
    return reasons


def _at_unigram(course: Course, s: Smooth, tokens: np.ndarray) -> tuple[str, float, bool] | None:
    """The loss came to the unigram level and is there long after sound runs have left it: that in words, by how many
    tokens it came, and whether it has ceased to fall."""
    if course.trained_before or course.unigram_nats is None or not course.vocab_size:
        return None
    width = BAND * (math.log(course.vocab_size) - course.unigram_nats)
    entered = np.flatnonzero(s.level <= course.unigram_nats + width)
    if not len(entered) or width <= 0 or s.level[-1] < course.unigram_nats - width:
        return None
    came = float(s.tokens[entered[0]])
    dwell = float(tokens[-1]) / came
    if dwell < DWELL:
        return None
    what = (
        f"the loss came to the level of single token frequencies ({course.unigram_nats:.3f}) by {came:,.0f} tokens "
        f"and at {dwell:.1f} times that is still {_loss(s.level[-1])}"
    )
    return what, came, s.slope() > -STEADY * width / BAND


def _above_unigram(course: Course, s: Smooth) -> str | None:
    """That in words."""
    if course.trained_before or course.unigram_nats is None or s.level[-1] <= course.unigram_nats:
        return None
    return f"the loss {_loss(s.level[-1])} is above the level of single token frequencies, {course.unigram_nats:.3f}"


def _overfitted(curve: Curve, s: Smooth) -> list[str]:
    """The held-out loss has left its minimum while the training loss goes on falling."""
    if len(curve.val_loss) < 4:
        return []
    i = int(np.nanargmin(curve.val_loss))
    now = float(np.median(curve.val_loss[-2:]))
    low = float(curve.val_loss[i])
    if i >= len(curve.val_loss) - 2 or now - low <= OVERFIT_SHARE * low:
        return []
    then = np.interp(curve.val_update[i], curve.update, curve.tokens)
    if s.level[-1] >= s.level[max(0, int(np.searchsorted(s.tokens, then, side="right")) - 1)]:
        return []
    return [
        f"the held-out loss {now:.3f} lies {now - low:.3f} above its minimum {low:.3f} at update "
        f"{curve.val_update[i]}, while the training loss falls ({s.level[-1]:.3f}): the data are being learnt by heart"
    ]


def _signs(curve: Curve, course: Course, s: Smooth) -> list[str]:
    """What else the figures say, the same for each verdict."""
    signs = []
    if len(s.level) >= 3:
        slope = f"{'+' * (s.slope() >= 0)}{_loss(s.slope())}"
        signs.append(
            f"smoothed loss {_loss(s.level[-1])}, {slope} with the last doubling of tokens, noise {_loss(s.noise)}"
        )
    norm = curve.norm[np.isfinite(curve.norm)]
    if len(norm) >= MIN_POINTS:
        early, late = (float(np.median(x)) for x in (norm[: max(5, len(norm) // 4)], norm[-max(5, len(norm) // 10) :]))
        clipped = f", {100 * np.mean(norm > course.clip):.0f}% clipped" if course.clip else ""
        signs.append(f"pre-clip norm {_loss(late, 2)}, {_loss(early, 2)} early{clipped}")
    if curve.skipped.any():
        signs.append(f"{int(curve.skipped.sum())} updates dropped")
    return signs
