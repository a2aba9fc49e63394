"""The judgement of a curve while its run goes on: a line at each evaluation, and when to stop."""

from __future__ import annotations

from pathlib import Path

from fourscale import curves, verdict
from fourscale.cli import InputError, say
from fourscale.forecast import until
from fourscale.parallel import Topology

ALARMING = ("diverging", "suspicious")
SLIM = 0.05  # chance of reaching the target below which a run is given up


class Target:
    """--target-loss and --stop-when of a run, judged on rank 0 from what it has put on record.

    loss: to beat, nats a held-out token; None where there is none: then only what is alarming is told, once.
    """

    def __init__(self, run_dir: Path, topology: Topology, loss: float | None, stop_when: tuple[str, ...]):
        self.run_dir, self.topology = run_dir, topology
        self.loss, self.stop_when = loss, () if "never" in stop_when else stop_when
        self.reading = curves.Reading()  # a long run has more rows than should be read anew at each evaluation
        self.before: str | None = None  # the verdict at the evaluation before

    def look(self, update: int) -> str | None:
        """Judge the run at `update` by what is on record, its newest evaluation too; why to stop, or None. Collective.

        Hopeless is what two evaluations in a row say: a curve's noise should end no run.
        """
        return self.topology.from_main(lambda: self._look(update))

    def _look(self, update: int) -> str | None:
        try:
            record = curves.read(self.run_dir, self.reading)
        except (InputError, OSError) as e:  # what watches a run must not end it
            say(f"note: step {update} was not judged: {e}")
            return None
        curve = record.curve
        if not len(curve.val_loss):
            return None
        found = verdict.judge(curve, record.course, self.loss)
        name, before, self.before = found.verdict, self.before, found.verdict
        if self.loss is not None or (name in ALARMING and name != before):
            say(f"step {update} | {name} | {found.reasons[0] if found.reasons else found.remedy}")
            if name not in ("healthy", "undecided") and name != before:
                say(f"note: {name}: {found.remedy}; python health.py {self.run_dir}")
        if self.loss is None:
            return None
        newest = float(curve.val_loss[-1])
        if "reached" in self.stop_when and newest <= self.loss:
            return f"--stop-when reached (held-out loss {newest:.4f}, target {self.loss:g})"
        if "hopeless" in self.stop_when and _is_lost(found) and len(curve.val_update) > 1:
            earlier = verdict.judge(until(curve, int(curve.val_update[-2])), record.course, self.loss)
            if _is_lost(earlier):
                return f"--stop-when hopeless ({name} at two evaluations, target {self.loss:g})"
        return None


def _is_lost(found: verdict.Judgement) -> bool:
    return found.verdict == "diverging" or (found.chance is not None and found.chance <= SLIM)
