"""Proves a resume by comparing steps trained again with the journal of the previous process.

An exactly restored state gives the same losses and updates again, bit for bit. State that is in no version,
such as a batch that was fetched ahead or a tensor that the script left out, shows in the first repeated step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise, takewhile
from pathlib import Path

from tiercheck.protocol.local import ReportResume
from tiercheck.protocol.report import Exact
from tiercheck.trainer.proof.fingerprints import CAPACITY, WORDS, Fingerprints, Journal, StepRecord

PAGE = "docs/use/resume-proof.md"
_AROUND = 3
"""The number of steps on each side of a restored version for which draws are counted."""
SOON = 10
"""The number of equal steps after which a resume counts as proven, even if more can be compared."""
FIELDS = (
    "nothing",
    "torch's random generators",
    "the generators of Python or numpy",
    "the data position",
    "hyper-parameters",
    "the loss",
    "what the step wrote",
)
"""The things that can differ first, in the order of use in a step. A journal stores the number."""
_GENERATORS, _OTHERS, _POSITION, _HYPER, _LOSS, _UPDATE = range(1, len(FIELDS))


OTHER_HISTORY = (
    "what was restored is not what the journal has of that step: it is of another history, or the model has "
    "other tensors"
)


def first_difference(then: StepRecord, now: StepRecord) -> int:
    """Returns the number in `FIELDS` of the first difference between two runs of a step; 0 if equal.

    They differ if torch's generators, the loss or the update do. The other fields only locate the difference:
    other libraries draw from Python's generator too, and a script may keep the time of day in its `state`.
    """
    differs = {
        _GENERATORS: then.generators != now.generators,
        _OTHERS: then.others != now.others,
        _POSITION: then.position != now.position,
        _HYPER: then.hyper_parameters != now.hyper_parameters,
        _LOSS: _bits(then.loss) != _bits(now.loss),
        _UPDATE: None not in (then.update, now.update) and then.update != now.update,
    }
    if not (differs[_GENERATORS] or differs[_LOSS] or differs[_UPDATE]):
        return 0
    return next(field for field, other in differs.items() if other)


def describe(then: StepRecord, now: StepRecord, first: int) -> str:
    same = _bits(then.loss) == _bits(now.loss)
    loss = "its loss is the same" if same else f"its loss is {now.loss!r}, it was {then.loss!r}"
    return f"{loss}; what differs first: {FIELDS[first]}"


def count_draws(before: int, after: int) -> tuple[int, int]:
    """Returns the draws between two values of `StepRecord.drawn`, modulo a block and modulo 2 ** 22."""
    return ((after & 1023) - (before & 1023)) % WORDS, ((after >> 10) - (before >> 10)) % 2**22


class Resume:
    """Writes a rank's journal and compares a resume with it. For the training thread; raises nothing."""

    def __init__(
        self, fingerprints: Fingerprints, report: Callable[..., None], warn: Callable[[str, str], None]
    ) -> None:
        """`report`: called with each verdict. `warn`: as `WarnOnce`."""
        self._fingerprints = fingerprints
        self._report, self._warn = report, warn
        self._journal: Journal | None = None
        self._before: dict[int, StepRecord] = {}
        """The previous process's records of steps that are still to be compared."""
        self._drawn: list[int] = []
        """The values of `StepRecord.drawn` around the restored step, if no step is trained again."""
        self._step = self._newest = self._equal = 0

    def begin(self, path: Path | None, training: int, world_size: int, step: int) -> ReportResume | None:
        """Opens the journal at `path`. Training continues after `step`; 0 is a fresh start.

        Returns a verdict if nothing can be compared; None: something can, or nothing was restored."""
        self._step = self._newest = step
        why = "no journal is kept here"
        try:
            if path is not None:
                self._journal = Journal(path, training, world_size)
                why = self._journal.other or self._expect(self._journal, step)
        except Exception as error:  # invariant: no error of TierCheck stops training
            self._warn("Journal", f"no resume can be proven: {path}: {error!r}")
            why = "the journal cannot be read"
        return ReportResume(step, Exact.NOT_COMPARABLE, message=why) if step and why else None

    @property
    def ended(self) -> int:
        """Returns the step at which an earlier process was finished; 0: none was."""
        return 0 if self._journal is None else self._journal.header.ended

    def note(
        self, step: int, loss: float | None, *, suspected: bool = False, begins_epoch: bool = False
    ) -> bool:
        """Records the ending step, and compares it if it was trained before.

        `suspected`: the step will be repeated, and all of its state compared then. `begins_epoch`: it draws
        more than others. Returns whether it gave the same bits as when it was suspected before."""
        journal, self._newest = self._journal, step
        if begins_epoch:
            self._drawn = []
        if journal is None:
            return False
        try:
            record, then = self._fingerprints.take(step, loss), self._before.get(step)
            if then is not None and not then.whole:
                then = None
            if suspected or then is not None:
                whole = self._fingerprints.of_whole(record)
                if then is not None:
                    self._compare(journal, whole)
                if suspected:
                    journal.write(whole)
                    return then is not None and not first_difference(then, whole)
            journal.write(record)
            if not self._fingerprints.late:
                self._compare(journal, record)
                return False
            self._fingerprints.fetch_update(record)
            self._add_updates(journal)
        except Exception as error:  # invariant: no error of TierCheck stops training
            self._journal = None
            self._warn("Journal", f"the resume after this one cannot be proven: {error!r}")
        return False

    def end(self, finished: bool) -> None:
        """Closes the journal. `finished`: the script has nothing left to do."""
        journal, self._journal = self._journal, None
        if journal is None:
            return
        try:
            self._add_updates(journal, wait=finished)
            if self._before and 0 < self._equal < SOON:
                self._report(self._proven())
            if self._before and self._newest == self._step and finished:  # an evaluation, or a wrong length
                why = f"the script made no step, and the life before made step {min(self._before)}"
                self._report(ReportResume(self._step, Exact.NOT_COMPARABLE, message=why))
            else:
                journal.change_header(ended=self._newest if finished else 0)
            journal.close()
        except Exception as error:  # invariant: no error of TierCheck stops training
            self._warn("Journal", f"the journal cannot be closed: {error!r}")

    def _expect(self, journal: Journal, step: int) -> str:
        """Finds the steps to compare. Returns the reason if there are none."""
        if not step:
            journal.clear()
            return ""
        then, now = journal.read(step), self._fingerprints.take(step, None)
        if self._fingerprints.late:
            self._fingerprints.fetch_update(now)
            (now,) = self._fingerprints.arrived(wait=True)
        if then is not None and None not in (then.update, now.update) and then.update != now.update:
            return OTHER_HISTORY
        self._before = {record.step: record for record in journal.after(step)}
        if self._before:
            return ""
        newest = [journal.read(step - _AROUND + number) for number in range(1, _AROUND + 1)]
        self._drawn = [record.drawn for record in newest if record is not None]
        return "no step is trained again"

    def _add_updates(self, journal: Journal, *, wait: bool = False) -> None:
        for record in self._fingerprints.arrived(wait=wait):
            journal.write(record)
            self._compare(journal, record)

    def _compare(self, journal: Journal, now: StepRecord) -> None:
        then = self._before.pop(now.step, None) if self._before else None
        if then is None:
            if len(self._drawn) >= _AROUND:
                self._compare_draws(journal, now)
            return
        if first := first_difference(then, now):
            self._before.clear()
            differs = "was suspected, and differs from" if then.whole else "differs from"
            message = f"step {now.step} {differs} the life before: {describe(then, now, first)}"
            # The same difference at each resume means that the script's steps are not reproducible: one
            # warning is enough.
            again = journal.header.differed == first
            journal.change_header(differed=first)
            exact = Exact.NOT_COMPARABLE if again else Exact.DIFFERS
            suspected = then.whole and exact is Exact.DIFFERS
            self._report(ReportResume(self._step, exact, self._equal, message, suspected))
            return
        self._equal += 1
        if self._equal == SOON or (not self._before and self._equal < SOON):
            journal.change_header(differed=0)
            self._report(self._proven())

    def _compare_draws(self, journal: Journal, now: StepRecord) -> None:
        """Reports a first step that drew another number of random numbers than the steps around it.

        If no step is trained again, this is the only trace of a batch that was fetched ahead. But a step
        before may have drawn as many: the first of an epoch draws the order of its batches."""
        self._drawn.append(now.drawn)
        if len(self._drawn) < 2 * _AROUND:
            return
        drawn, self._drawn = self._drawn, []
        draws = [count_draws(*pair) for pair in pairwise(drawn)]
        first = draws.pop(_AROUND - 1)
        if (
            any(draws[0])
            and draws.count(draws[0]) == len(draws)
            and first != draws[0]
            and first not in self._draws_before(journal)
        ):
            message = (
                f"no step was trained again, but step {self._step + 1} drew another number of random numbers "
                "than the steps before and after it; was a batch fetched ahead, or drawn after restore?"
            )
            self._report(ReportResume(self._step, Exact.NOT_COMPARABLE, message=message), is_suspicious=True)

    def _draws_before(self, journal: Journal) -> set[tuple[int, int]]:
        """Returns the draws of each step before the restored one that the journal has."""
        newest_first = map(journal.read, range(self._step, max(0, self._step - CAPACITY), -1))
        drawn = [record.drawn for record in takewhile(bool, newest_first) if record is not None]
        return {count_draws(before, after) for after, before in pairwise(drawn)}

    def _proven(self) -> ReportResume:
        return ReportResume(self._step, Exact.PROVEN, self._equal)


def _bits(loss: float | None) -> bytes:
    return b"" if loss is None else struct.pack("<d", loss)
