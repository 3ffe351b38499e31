"""Whatever a worker that was given up still writes, no decision is any different for it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.version import History, Version
from tiercheck_operator.planning.recovery.availability import Artifacts, JobInventory, RemoteInventory
from tiercheck_operator.planning.recovery.recovery import Recover, RecoveryProblem, decide_recovery


@st.composite
def histories(draw: st.DrawFn) -> tuple[History, int]:
    """Any line of attempts with rollbacks, and the newest attempt."""
    history, attempt = History(), 0
    for base in draw(st.lists(st.integers(0, 30), min_size=1, max_size=6)):
        attempt += draw(st.integers(1, 2))
        history = history.after(attempt, base if attempt > 1 else 0)
    return history, attempt


@st.composite
def fates(draw: st.DrawFn) -> tuple[RecoveryProblem, RecoveryProblem]:
    """What the accepted line left in memory and in the store; and the same with what stale workers have put
    there as well."""
    history, newest = draw(histories())
    versions = st.builds(Version, st.integers(1, 40), st.integers(1, newest))
    sets = st.sets(versions, max_size=12)
    ranks = 2
    drawn = {
        (place, kind): draw(sets)
        for place in ("own0", "own1", "at0", "at1")
        for kind in ("snapshots", "deltas")
    }
    remote = draw(sets)

    def situation(keep: bool) -> RecoveryProblem:
        def kept(found: set[Version]) -> frozenset[Version]:
            return frozenset(v for v in found if keep or history.accepts(v))

        def artifacts(place: str) -> Artifacts:
            return Artifacts(kept(drawn[place, "snapshots"]), kept(drawn[place, "deltas"]))

        inventories = (
            JobInventory(0, own={0: artifacts("own0")}, hosted={1: artifacts("at0")}),
            JobInventory(1, own={1: artifacts("own1")}, hosted={0: artifacts("at1")}),
        )
        return RecoveryProblem(
            ranks, 1, history, inventories, RemoteInventory(True, True, kept(remote)), last_step=40
        )

    return situation(keep=False), situation(keep=True)


@given(fates())
def test_versions_that_no_history_accepts_change_no_decision(
    fate: tuple[RecoveryProblem, RecoveryProblem],
) -> None:
    clean, soiled = fate
    expected, decided = decide_recovery(clean), decide_recovery(soiled)
    assert type(decided) is type(expected)
    if isinstance(decided, Recover):
        assert isinstance(expected, Recover)
        assert soiled.history.accepts(decided.version)
        assert (decided.version, decided.sources) == (expected.version, expected.sources)


@given(fates(), st.integers(1, 40), st.integers(1, 5))
def test_version_completed_by_an_attempt_after_it_was_over_is_never_chosen(
    fate: tuple[RecoveryProblem, RecoveryProblem], base: int, late: int
) -> None:
    """The next attempt begins from `base`; only then the last one completes a later step everywhere."""
    before, _ = fate
    over = before.history.attempt
    history = before.history.after(over + 1, base)
    stale = Version(base + late, over)
    everywhere = {rank: Artifacts((stale,)) for rank in range(2)}
    after = replace(
        before,
        history=history,
        inventories=(
            JobInventory(0, own=everywhere, hosted=everywhere),
            JobInventory(1, own=everywhere, hosted=everywhere),
        ),
        remote=RemoteInventory(True, True, (*before.remote.versions, stale)),
    )
    decided = decide_recovery(after)
    assert not isinstance(decided, Recover) or decided.version != stale
