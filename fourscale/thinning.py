"""A curve of any length in bounded memory: points, thinned while they are added. Imports no torch."""

from __future__ import annotations

import bisect
import math
from array import array
from typing import Any

import numpy as np

from fourscale.forecast import Curve

POINTS = 20_000  # of a curve, at most; of a longer run, updates that are multiples of 2, 4, 8, ...
ODD_POINTS = 4_000  # skipped and non-finite updates beside them, at most


class Points:
    """Points in the order of updates, thinned while they are added: every 2nd, 4th, 8th, ... update of a long run.

    Sampled, not averaged, so that noise and spikes keep their size; skipped and non-finite updates stay.
    """

    COLUMNS = ("update", "tokens", "loss", "lr", "norm", "rate", "skipped")

    def __init__(self) -> None:
        self.columns = {name: array("q" if name in ("update", "tokens") else "d") for name in self.COLUMNS}
        self.val_update, self.val_loss = array("q"), array("d")
        self.rows = self.newest = 0
        self.tokens_known = True
        self._stride = self._odd_stride = 1
        self._odd = 0
        self._last: tuple[float, ...] | None = None  # the newest point, where it was left out

    def rewind(self, update: int, held_out: int) -> None:
        """Forget points after `update` and held-out losses after `held_out`: they are being done again."""
        if self.newest > update:
            keep = bisect.bisect_right(self.columns["update"], update)
            self.rows = max(keep, self.rows - (self.newest - update))
            for column in self.columns.values():
                del column[keep:]
            self._last = None
            self.newest = self.columns["update"][-1] if keep else 0
        if self.val_update and self.val_update[-1] > held_out:
            keep = bisect.bisect_right(self.val_update, held_out)
            del self.val_update[keep:], self.val_loss[keep:]

    def add(
        self, update: int, tokens: float | None, loss: float, lr: float, norm: float, rate: float, skipped: bool
    ) -> None:
        self.rows += 1
        self.newest = update
        self.tokens_known = self.tokens_known and tokens is not None
        point = (update, int(tokens or 0), loss, lr, norm, rate, float(skipped))
        odd = skipped or not math.isfinite(loss)
        self._odd += odd
        if self._odd % self._odd_stride if odd else update % self._stride and len(self.columns["update"]):
            self._last = point
            return
        self._append(point)
        if len(self.columns["update"]) > 2 * POINTS:
            self._thin()

    def add_held_out(self, update: int, loss: float) -> None:
        self.val_update.append(update)
        self.val_loss.append(loss)

    def mark_skipped(self, skips: dict[int, float], tokens: Any) -> None:
        """Mark updates as skipped, and put those in that have no point: a log has a line an interval."""
        for update, loss in sorted(skips.items()):
            at = bisect.bisect_left(self.columns["update"], update)
            if at < len(self.columns["update"]) and self.columns["update"][at] == update:
                self.columns["skipped"][at] = 1.0
                continue
            point = (update, tokens(update) or 0, loss, math.nan, math.nan, math.nan, 1.0)
            for column, value in zip(self.columns.values(), point, strict=True):
                column.insert(at, value)
            self.newest = max(self.newest, update)

    def _append(self, point: tuple[float, ...]) -> None:
        self._last = None
        for column, value in zip(self.columns.values(), point, strict=True):
            column.append(value)

    def _thin(self) -> None:
        update, loss, skipped = (np.array(self.columns[k]) for k in ("update", "loss", "skipped"))
        odd = ~np.isfinite(loss) | (skipped > 0)
        while np.count_nonzero(odd) > ODD_POINTS:
            self._odd_stride *= 2
            odd[np.flatnonzero(odd)[1::2]] = False
        plain = np.isfinite(loss) & (skipped == 0)
        while np.count_nonzero(plain) > POINTS - ODD_POINTS:
            self._stride *= 2
            plain &= update % self._stride == 0
        plain[0] = True
        for name, column in self.columns.items():
            self.columns[name] = array(column.typecode, np.array(column)[plain | odd].tolist())

    def curve(self) -> tuple[Curve, np.ndarray]:
        """The curve, and tokens per second beside its updates, float64 [n]."""
        if self._last is not None:
            self._append(self._last)
        if len(self.columns["update"]) > POINTS:
            last = tuple(column[-1] for column in self.columns.values())
            self._thin()
            if self.columns["update"][-1] != last[0]:
                self._append(last)
        got = {k: np.array(column) for k, column in self.columns.items()}
        curve = Curve(
            update=got["update"],
            tokens=got["tokens"] if self.tokens_known else got["update"].copy(),
            loss=got["loss"],
            lr=got["lr"],
            norm=got["norm"],
            skipped=got["skipped"] > 0,
            val_update=np.array(self.val_update),
            val_loss=np.array(self.val_loss),
        )
        return curve, got["rate"]
