"""Remembers what the API server refused of a job, so that one refused action holds up no other.

Each action is asked for again by itself, with growing pauses, as long as decisions want it. A restarted
operator has forgotten all of it, asks at once, and gets the same answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tiercheck_operator.kubernetes.client import BACKOFF, ApiFailure, NameTaken
from tiercheck_operator.model.actions import NEEDED_BY_PODS, PODS, Action, SavePlacement, subject_of
from tiercheck_operator.model.observed import Refusal

_NAMES = 64
"""Names of others' pods that are remembered; who takes more of them makes his own job wait."""
PATIENT_FAILURES = 3
"""Failures in a row that are not worth a word where the server did not refuse, but failed or was away."""


class RefusalMemory:
    """Of one job. Times are unix seconds."""

    def __init__(self) -> None:
        self.known: Mapping[int | str, Refusal] = {}
        self.names_taken: frozenset[str] = frozenset()

    def due(self, actions: Iterable[Action], now: float) -> list[Action]:
        """Those that are not to wait after a refusal; no pod is made while what it needs waits."""
        held = {subject for subject, refusal in self.known.items() if refusal.again_at > now}
        alone = not held & {kind.__name__ for kind in NEEDED_BY_PODS}
        return [
            action
            for action in actions
            if subject_of(action) not in held and (alone or not isinstance(action, PODS))
        ]

    def note(
        self, wanted: Sequence[Action], failures: Iterable[tuple[Action, ApiFailure]], now: float
    ) -> bool:
        """Takes in how a look went. `wanted`: all that it asked for, due or not. Returns whether there is
        something new to tell."""
        before = self.known
        # What rests on the placement is not written without it, so that it is asked for at every look.
        failed = {
            subject_of(action): error for action, error in failures if not isinstance(action, SavePlacement)
        }
        tried = {subject_of(action) for action in self.due(wanted, now)}
        known = {
            subject: before[subject]
            for subject in map(subject_of, wanted)
            if subject in before and subject not in tried
        }
        for subject, error in failed.items():
            tries = before[subject].tries + 1 if subject in before else 1
            pause = max(BACKOFF[min(tries, len(BACKOFF)) - 1], error.retry_after or 0.0)
            if isinstance(error, NameTaken) and len(self.names_taken) < _NAMES:
                self.names_taken |= {error.name}
                pause = 0.0  # the next name is tried at once
            broken = tries > PATIENT_FAILURES and error.status > 0
            told = error.refused or isinstance(error, NameTaken) or broken
            known[subject] = Refusal(str(error), now + pause, tries, told)
        self.known = known
        return _told(before) != _told(known)

    def seconds_to_next_try(self, now: float) -> float | None:
        """None: nothing is refused."""
        return min((max(0.0, refusal.again_at - now) for refusal in self.known.values()), default=None)


def _told(known: Mapping[int | str, Refusal]) -> dict[int | str, str]:
    return {subject: refusal.sentence for subject, refusal in known.items() if refusal.told}
