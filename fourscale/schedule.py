"""The learning rate of each update. Imports no torch."""

from __future__ import annotations

import math

from fourscale.cli import InputError


def check_schedule(updates: int, warmup: int, peak: float, floor: float, schedule: str, decay_fraction: float) -> None:
    """Raise InputError where the schedule can't be carried out as asked."""
    if not 0 <= floor <= peak:
        raise InputError(f"--min-lr {floor:g}: must lie between 0 and --lr {peak:g}")
    if not 0 <= warmup < updates:
        raise InputError(f"--warmup {warmup}: must be below the {updates} updates of the run; lower it or train longer")
    if schedule == "cosine" and updates > 1 and updates - 1 - warmup < 1:
        raise InputError(
            f"--warmup {warmup}: of a run of {updates} updates it leaves none to decay over; train longer, "
            "lower --warmup or use --schedule constant"
        )
    if schedule == "sweep" and not floor > 0:
        raise InputError(f"--min-lr {floor:g}: a sweep multiplies it, so it must be above 0")
    if schedule == "wsd" and not 0 < decay_fraction <= 1:
        raise InputError(f"--decay-fraction {decay_fraction:g}: must be above 0 and at most 1")


def learning_rate(
    i: int, updates: int, warmup: int, peak: float, floor: float, schedule: str = "cosine", decay_fraction: float = 0.2
) -> float:
    """Rate of update i (zero-based): linear warmup, peak at i = warmup - 1; the floor is reached at i = updates - 1.

    cosine: floor + (peak - floor) / 2 * (1 + cos(pi (i - warmup) / (updates - 1 - warmup))) (Loshchilov and Hutter
    2016, arXiv:1608.03983). wsd: the peak, then a line to the floor over the last `decay_fraction` of the updates (Hu
    et al. 2024, arXiv:2404.06395). constant: the peak. sweep: floor (peak / floor)^((i - warmup) / (updates - 1 -
    warmup)) from the floor up, for --lr-find, where `warmup` is only where it begins.
    """
    if i < warmup:
        return peak * (i + 1) / warmup
    if schedule == "constant" or updates == 1:
        return peak
    if schedule == "sweep":
        return floor * (peak / floor) ** ((i - warmup) / (updates - 1 - warmup))
    if schedule == "wsd":
        start = max(warmup, updates - round(decay_fraction * updates)) - 1  # the last update at the peak
        return peak if i <= start else peak - (peak - floor) * (i - start) / (updates - 1 - start)
    return floor + (peak - floor) / 2 * (1 + math.cos(math.pi * (i - warmup) / (updates - 1 - warmup)))
