"""Whether this process still does its work: hears what it watches, and comes to an end with what it begins.

`/healthz` says no when it does not, and Kubernetes starts it anew. A stuck event loop answers nothing at all, which is as good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tiercheck_operator.watched import Difference


class Hearing:
    """Judges the watch of one kind by what listings show and it has not. `grace`: seconds that it may be late."""

    def __init__(self, kind: str, grace: float) -> None:
        self.kind, self._grace = kind, grace
        self._missed: dict[str, tuple[int, float]] = {}
        """UID to the version that is being missed, and since when."""

    def compared(self, difference: Difference, now: float) -> None:
        """The outcome of a listing at `now`."""
        self._missed = {uid: self._missed.get(uid, (version, now)) for uid, version in difference.unseen.items()}

    def heard(self, uid: str, version: int) -> None:
        """By the watch."""
        missed = self._missed.get(uid)
        if missed is not None and missed[0] <= version:
            del self._missed[uid]

    def forgotten(self, uid: str) -> None:
        self._missed.pop(uid, None)

    @property
    def complete(self) -> bool:
        """Whether everything that the last listing showed has been heard of."""
        return not self._missed

    def trouble(self, now: float) -> str:
        """A sentence; empty: none."""
        late = [since for _, since in self._missed.values() if now - since > self._grace]
        if not late:
            return ""
        return (
            f"the watch of {self.kind} is deaf: {len(late)} objects have been different for {now - min(late):.0f} s "
            "without a word of it"
        )


def stuck(begun: Mapping[str, float], now: float, limit: float) -> str:
    """Of jobs (by name) whose reconcile began at a time and has not ended; empty: none for longer than `limit` seconds."""
    late = {name: now - since for name, since in begun.items() if now - since > limit}
    if not late:
        return ""
    worst = max(late, key=lambda name: late[name])
    return f"{len(late)} jobs are stuck in a reconcile; {worst} for {late[worst]:.0f} s"


def verdict(sentences: Iterable[str]) -> str:
    """All that is wrong, a line each; empty: nothing."""
    return "\n".join(sentence for sentence in sentences if sentence)
