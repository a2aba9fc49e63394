"""The course of a run so far and to come, and a forecast of the loss it will end at. numpy alone.

The priors below were set on development runs of 0.2M to 2.7M parameters (characters and BPE, gpt2 and modern, rates
over four decades) before the runs that tests/verdicts.py scores were started.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from fourscale.schedule import learning_rate

MIN_POINTS = 12  # updates with a finite loss below which nothing is forecast

# ---- priors of the forecast: L(S) = floor + A S^-alpha - c (1 - lr / peak), S the sum of rates so far --------------

ALPHAS = ((0.1, 1.0), (0.25, 1.0), (0.5, 1.0), (0.8, 1.0), (1.2, 0.5))  # exponent, prior weight
ANNEAL = (0.085, 0.035)  # gain of a full decay as a share of the loss: mean, standard deviation,
ANNEALS = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.18)  # on this grid
DROP = (0.12, 0.03)  # drop a unit of ln S at the present point, as a share of the loss: mean, standard deviation
WANDER = 0.024  # share of the loss a run leaves its law by over one unit of ln S, standard deviation
TURN = (0.25, 0.15, 0.06)  # weight of a turn for the better ahead, its drop a unit of ln S as a share of the loss, sd
USUAL = 4.0  # times above or below the rate that fits to many runs call best, within which a turn is as likely as ever;
UNUSUAL = 12.0  # and beyond which it is left with UNLIKELY of its weight
UNLIKELY = 0.2
TURN_LEVELS = (0.58, 0.66)  # loss over unigram level at which turns have become impossible, and possible as ever
GAP_SD = 0.01  # share of the loss by which held-out minus training loss drifts


@dataclass(frozen=True)
class Curve:
    """A run so far. update, tokens int64 [n]; loss (nats a token, nan where not finite), lr, norm (pre-clip, nan where
    unknown) float64 [n]; skipped bool [n] (updates that were dropped); val_update int64 [m], val_loss float64 [m]."""

    update: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    lr: np.ndarray
    norm: np.ndarray
    skipped: np.ndarray
    val_update: np.ndarray
    val_loss: np.ndarray


def until(curve: Curve, update: int) -> Curve:
    """The curve as it stood after that update."""
    seen, scored = curve.update <= update, curve.val_update <= update
    return Curve(*(getattr(curve, f.name)[scored if "val" in f.name else seen] for f in fields(curve)))


@dataclass(frozen=True)
class Course:
    """What a run is to be: its schedule, and what its loss is measured against. None where it isn't known.

    lr: the peak. unigram_nats: loss of counting single tokens. trained_before: it began with weights that weren't
    random, so that its first loss and the unigram level tell nothing.
    """

    updates: int | None = None
    warmup: int = 0
    lr: float | None = None
    min_lr: float | None = None
    schedule: str | None = None
    decay_fraction: float = 0.2
    vocab_size: int | None = None
    unigram_nats: float | None = None
    bytes_per_token: float | None = None
    clip: float | None = None
    trained_before: bool = False
    global_bsz: int | None = None
    ctx: int | None = None
    n_parameters: int | None = None


@dataclass(frozen=True)
class Forecast:
    """The final held-out loss in nats a token, and its central 90% interval."""

    loss: float
    low: float
    high: float


def spread(loss: np.ndarray) -> float:
    """Standard deviation of single updates about a slow curve, from differences of neighbours, robustly."""
    steps = np.diff(loss)
    return float(1.4826 * np.median(np.abs(steps - np.median(steps))) / math.sqrt(2)) if len(steps) > 3 else 0.0


def _rates(course: Course) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Updates done, float64 [g], from 0 to the end; the sum of rates by then over the peak; 1 - rate / peak there."""
    done = np.unique(np.linspace(0, course.updates, min(course.updates, 2000) + 1).astype(np.int64))
    peak = course.lr or 1.0
    floor = 0.1 * peak if course.min_lr is None else course.min_lr
    kind = course.schedule or "constant"
    of = [
        learning_rate(max(0, int(d) - 1), course.updates, course.warmup, peak, floor, kind, course.decay_fraction)
        for d in done
    ]
    share = np.array(of) / peak
    total = np.concatenate(([0.0], np.cumsum(share[1:] * np.diff(done))))
    return done.astype(float), total, np.where(done < course.warmup, 0.0, 1 - share)


def _held_out_gap(curve: Curve, update: np.ndarray, loss: np.ndarray) -> tuple[float, float]:
    """Held-out minus training loss: of late, and how much it has grown since the sum of updates was half."""
    if not len(curve.val_update):
        return 0.0, 0.0

    def gap(where: int) -> float:
        near = np.argsort(np.abs(update - curve.val_update[where]), kind="stable")[: max(5, len(loss) // 20)]
        return float(curve.val_loss[where] - np.median(loss[near]))

    late = [gap(i) for i in range(len(curve.val_update))[-3:]]
    half = np.flatnonzero(curve.val_update <= curve.val_update[-1] / 2)
    now = float(np.median(late))
    return now, now - float(np.median([gap(int(i)) for i in half[-3:]])) if len(half) >= 2 else 0.0


def forecast(curve: Curve, course: Course) -> Forecast | None:
    """The final held-out loss in nats a token; None before the warmup is over or where the length isn't known."""
    found = predictive(curve, course)
    if found is None:
        return None
    low, middle, high = (max(0.0, _quantile(*found, q)) for q in (0.05, 0.5, 0.95))
    return Forecast(middle, low, high)


def predictive(curve: Curve, course: Course) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """What is believed of the final held-out loss: a mixture of normals; mean, standard deviation, weight float64 [m].

    A law in the sum of learning rates with a gain from annealing (Tissue et al. 2024, arXiv:2408.11029, without the
    momentum of its second term): L = floor + A S^-alpha - c (1 - lr / peak), about which the run wanders at random in
    ln S. Over a grid of alpha and c, level and A have a closed form (Gaussian priors, generalised least squares); the
    grid's predictions are mixed by prior times likelihood. The training loss is fitted, and the held-out loss put on
    top by the gap of late. Above about two thirds of the unigram level a turn for the better (see `_turn`) is mixed in.
    Without a known schedule the rate counts as constant.
    """
    sound = np.isfinite(curve.loss) & ~curve.skipped
    update, loss = curve.update[sound], curve.loss[sound]
    if course.updates is None or len(loss) < MIN_POINTS or update[-1] <= course.warmup:
        return None
    done, total, cooled = _rates(course)
    at = np.maximum(1e-9, np.interp(update, done, total))
    u = np.log(at / at[-1])  # 0 now, below 0 before
    ahead = math.log(max(total[-1] / at[-1], 1.0))
    edges = np.flatnonzero(u >= -1.2)
    k = max(5, len(edges) // 12)
    spans = [edges[max(0, len(edges) - k * (j + 1)) : len(edges) - k * j] for j in range(len(edges) // k)]
    if len(spans) < 2:
        spans = [np.arange(len(u) - 5, len(u)), np.arange(len(u) - 10, len(u) - 5)]
    x, y = np.array([u[s].mean() for s in spans]), np.array([np.median(loss[s]) for s in spans])
    h = np.array([np.interp(update[s], done, cooled).mean() for s in spans])
    level, noise = float(y[0]), max(spread(loss[edges]), 1e-4 * float(y[0]))
    observed = np.array([(1.2533 * noise) ** 2 / len(s) for s in spans])
    wander = WANDER * level
    covariance = np.diag(observed) + wander**2 * np.minimum(-x[:, None], -x[None, :])
    means, sds, weights = [], [], []
    for alpha, alpha_weight in ALPHAS:
        design = np.stack((np.ones_like(x), np.expm1(-alpha * x)), axis=1)  # of level and A
        prior = np.array((level, DROP[0] * level / alpha))
        prior_covariance = np.diag((level**2, (DROP[1] * level / alpha) ** 2))
        total_covariance = covariance + design @ prior_covariance @ design.T
        gain = prior_covariance @ design.T @ np.linalg.inv(total_covariance)
        posterior = prior_covariance - gain @ design @ prior_covariance
        end = np.array((1.0, math.expm1(-alpha * ahead)))
        for c in ANNEALS:
            off = y + c * level * h - design @ prior
            fit = prior + gain @ off
            means.append(float(end @ fit) - c * level * float(cooled[-1]))
            sds.append(math.sqrt(max(float(end @ posterior @ end), 0.0) + wander**2 * ahead))
            evidence = -0.5 * (off @ np.linalg.solve(total_covariance, off) + np.linalg.slogdet(total_covariance)[1])
            weights.append(math.log(alpha_weight) - 0.5 * ((c - ANNEAL[0]) / ANNEAL[1]) ** 2 + float(evidence))
    gap, growth = _held_out_gap(curve, update, loss)
    growing = growth if growth > 2 * GAP_SD * level else 0.0
    steps = ahead / math.log(2)
    shift = gap + growing * steps
    mean, weight = np.array(means) + shift, np.exp(np.array(weights) - max(weights))
    variance = np.array(sds) ** 2 + (GAP_SD * level) ** 2 + (0.5 * growing * steps) ** 2
    weight /= weight.sum()
    if turn := _turn(course, level):
        mean = np.concatenate((mean, mean - TURN[1] * level * ahead))
        variance = np.concatenate((variance, variance + (TURN[2] * level * ahead) ** 2))
        weight = np.concatenate(((1 - turn) * weight, turn * weight))
    return mean, np.sqrt(variance), weight


def _turn(course: Course, level: float) -> float:
    """Probability that the run has a turn for the better ahead.

    Losses dwell near the level of counting pairs of tokens until attention has formed, then fall faster than before
    (Olsson et al. 2022, arXiv:2209.11895); no law fitted to the dwelling knows of it.
    """
    unigram = course.unigram_nats or (0.8 * math.log(course.vocab_size) if course.vocab_size else None)
    if course.trained_before or not unigram:
        return 0.0
    low, high = TURN_LEVELS
    return TURN[0] * _at_usual_rate(course) * min(1.0, max(0.0, (level / unigram - low) / (high - low)))


def usual_rate(n_parameters: int, n_tokens: float) -> float:
    """AdamW's best peak rate for so many parameters and tokens: 1.79 N^-0.713 D^0.307 (Li et al. 2025, "Predictable
    scale", arXiv:2503.04715). Fitted to far larger runs than those of the tests; good to a factor of a few there."""
    return 1.79 * n_parameters**-0.713 * n_tokens**0.307


def _at_usual_rate(course: Course) -> float:
    """Share of a turn's weight that the run's rate leaves: turns come with the sum of rates, to sound runs."""
    if not (course.lr and course.n_parameters and course.updates and course.global_bsz and course.ctx):
        return 1.0
    usual = usual_rate(course.n_parameters, float(course.updates) * course.global_bsz * course.ctx)
    off = abs(math.log(course.lr / usual))
    near, far = math.log(USUAL), math.log(UNUSUAL)
    return 1.0 - (1.0 - UNLIKELY) * min(1.0, max(0.0, (off - near) / (far - near)))


def chance(curve: Curve, course: Course, target: float) -> float | None:
    """Probability that the final held-out loss is at `target` (nats a token) or below; None where `forecast` is."""
    found = predictive(curve, course)
    return None if found is None else _below(*found, target)


def _below(mean: np.ndarray, sd: np.ndarray, weight: np.ndarray, x: float) -> float:
    """Of a mixture of normals, the probability up to x."""
    of = zip(mean, sd, weight, strict=True)
    return min(1.0, float(sum(w * (1 + math.erf((x - m) / (s * math.sqrt(2)))) / 2 for m, s, w in of)))


def _quantile(mean: np.ndarray, sd: np.ndarray, weight: np.ndarray, q: float) -> float:
    """Of a mixture of normals, by bisection."""
    low, high = float((mean - 8 * sd).min()), float((mean + 8 * sd).max())
    for _ in range(36):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(mean, sd, weight, middle) < q else (low, middle)
    return (low + high) / 2
