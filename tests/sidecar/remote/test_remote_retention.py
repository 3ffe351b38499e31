"""What may be deleted: never the version that a restore would choose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.version import Version
from tiercheck_sidecar.remote.retention import orphans, to_delete, upload_is_dead

versions = st.builds(Version, st.integers(1, 20), st.integers(1, 4))
committed = st.dictionaries(versions, st.floats(0, 100))


@given(committed, st.integers(-1, 5), st.sets(versions))
def test_newest_and_protected_are_never_deleted(when: dict[Version, float], keep: int, protect: set[Version]) -> None:
    doomed = set(to_delete(when, keep, protect))
    left = set(when) - doomed
    assert doomed <= set(when)
    assert not doomed & protect
    if when:
        assert max(when) in left
        assert max(when.values()) in {when[version] for version in left}
        assert len(left) >= min(len(when), max(keep, 1))
        # No more is kept than was asked for, the highest step, and what is protected.
        assert len(left - protect - {max(when)}) <= max(keep, 1)


def test_after_a_rollback_the_versions_of_the_new_attempt_are_the_newest() -> None:
    when = {Version(400, 1): 1.0, Version(500, 1): 2.0, Version(200, 2): 3.0, Version(300, 2): 4.0}
    assert to_delete(when, 2, set()) == (Version(400, 1),)  # 500 stays too: it has the highest step


def test_recreated_job_keeps_its_own_lower_versions() -> None:
    when = {Version(900, 7): 1.0, Version(1000, 7): 2.0, Version(100, 1): 50.0}
    assert to_delete(when, 1, set()) == (Version(900, 7),)


@given(committed, st.dictionaries(versions, st.floats(0, 100)), st.sets(versions))
def test_only_artifacts_older_than_every_kept_manifest_are_orphans(
    touched: dict[Version, float], kept: dict[Version, float], protect: set[Version]
) -> None:
    found = set(orphans(touched, kept, protect))
    assert not found & protect
    assert all(touched[version] < when for version in found for when in kept.values())
    if not kept:
        assert found == set()


def test_upload_of_the_running_attempt_is_never_taken_for_dead() -> None:
    kept = {Version(500, 2): 100.0}
    assert upload_is_dead(Version(400, 2), 50.0, kept, set())
    assert upload_is_dead(Version(900, 1), 50.0, kept, set())
    assert not upload_is_dead(Version(400, 2), 50.0, kept, {Version(400, 2)})
    assert not upload_is_dead(Version(400, 2), 150.0, kept, set())  # begun after the manifest
    assert not upload_is_dead(Version(600, 2), 50.0, kept, set())  # newer step, whatever time the server reports
    assert not upload_is_dead(Version(100, 3), 50.0, kept, set())  # newer attempt after a rollback
    assert not upload_is_dead(Version(400, 2), 50.0, {}, set())


@given(committed, st.integers(1, 5), st.floats(0, 100))
def test_young_versions_are_kept_however_many_they_are(
    when: dict[Version, float], keep: int, keep_seconds: float
) -> None:
    by_count = set(to_delete(when, keep, set()))
    doomed = set(to_delete(when, keep, set(), keep_seconds))
    assert doomed <= by_count, "age only ever keeps more"
    for version in by_count:
        young = max(when.values()) - when[version] <= keep_seconds
        assert (version in doomed) is not young
