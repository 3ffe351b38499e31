"""Settings and stores that break a promise are found before a job has to rely on them.

A job goes on with a store that ignores conditions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.sidecar.remote.remote_places import DirectoryPlace, Place, S3Place
from tests.sidecar.remote.s3.faulty_proxy import (
    BUSY,
    DEAF,
    EMPTY_LIST,
    FORBIDDEN,
    Fault,
    Proxy,
    Seen,
    refusal,
)
from tests.sidecar.remote.test_remote_two_jobs import Opener, restored
from tests.sidecar.stations import config_of
from tests.sidecar.world import MakeWorld, until
from tiercheck.protocol.version import Manifest, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.offload import RemoteListing
from tiercheck_sidecar.remote import RemoteConfigError, StoreFinding, examine_place, open_store, preflight
from tiercheck_sidecar.remote.directory import DirectoryObjects
from tiercheck_sidecar.remote.objects import Stored
from tiercheck_sidecar.remote.preflight import CHUNK, examine
from tiercheck_sidecar.remote.s3 import s3

# Settings


S3 = {"bucket": "b", "prefix": "p", "region": "eu-west-1", "endpoint": "https://127.0.0.1:9000"}
SPECIAL_BUCKETS = (
    "b--use1-az4--x-s3",
    "a--use1-az4--xa-s3",
    "m1.mrap",
    "o--ol-s3",
    "o--op-s3",
    "t--table-s3",
)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("{", "cannot be read"),
        ({}, "exactly one of s3 and directory"),
        ({"s3": S3, "directory": {"path": "/x"}}, "exactly one of s3 and directory"),
        ({"s3": {"prefix": "p"}}, "bucket"),
        ({"s3": {**S3, "bucket": ""}}, "bare name"),
        ({"s3": {**S3, "bucket": "s3://b"}}, "bare name"),
        *(({"s3": {"bucket": name}}, "general purpose") for name in SPECIAL_BUCKETS),
        ({"s3": {**S3, "endpoint": "127.0.0.1:9000"}}, "http:// or https://"),
        ({"s3": {**S3, "prefix": "a/../b"}}, '".."'),
        ({"s3": {**S3, "prefix": "a\nb"}}, "control characters"),
        ({"s3": {**S3, "bucket": 7}}, "str"),
        ({"s3": {**S3, "addressing": "path"}}, "addressing"),
        ({"s3": {**S3, "encryption": {"type": "SSE-C"}}}, "encryption"),
        ({"s3": {**S3, "storageClass": "DEEP_ARCHIVE"}}, "archive"),
        ({"directory": {"path": "relative"}}, "absolute"),
        ({"directory": {}}, "path"),
        ({"directory": {"path": "/x", "subPath": "../y"}}, "subPath"),
    ],
)
def test_unusable_settings_are_refused_with_a_sentence(settings: object, sentence: str) -> None:
    text = settings if isinstance(settings, str) else json.dumps(settings)
    with pytest.raises(RemoteConfigError, match=sentence):
        open_store(text, "research/gpt")


def test_names_that_only_aws_reserves_are_taken_at_another_endpoint_and_aliases_everywhere() -> None:
    for usable in ({**S3, "bucket": SPECIAL_BUCKETS[0]}, {"bucket": "access-point-0f9a-s3alias"}):
        open_store(json.dumps({"s3": usable}), "research/gpt").close()


@pytest.mark.parametrize("job", ["gpt", "/gpt", "research/", "a/b/c", ""])
def test_job_must_have_a_namespace(job: str) -> None:
    with pytest.raises(RemoteConfigError, match="namespace/name"):
        open_store(json.dumps({"s3": S3}), job)


def test_fields_of_a_newer_operator_are_ignored_and_absent_ones_may_be_null() -> None:
    settings = {
        "s3": {**S3, "region": None, "endpoint": None, "caBundle": None, "colour": "red"},
        "directory": None,
    }
    store = open_store(json.dumps(settings), "research/gpt")
    assert store.location == "s3://b/p/research/gpt"
    store.close()


def test_starting_a_sidecar_does_not_load_the_s3_clients() -> None:
    code = (
        "import sys; from tiercheck_sidecar.remote import open_store; "
        f"open_store({json.dumps(json.dumps({'s3': S3}))}, 'research/gpt'); "
        "print([name for name in ('boto3', 'botocore', 'obstore', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Stores


ALL = [
    "access",
    "conditional create",
    "upload in parts",
    "ranged reads",
    "listing after write",
    "clock",
    "delete",
]
VERSION = Version(10, 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(s3, "PART", 5 * CHUNK)  # the least that S3 allows
    monkeypatch.setattr(preflight, "SIZE", 6 * CHUNK)


@pytest.mark.parametrize("kind", ["s3", "directory"])
def test_good_place_passes_and_is_left_as_it_was(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place: Place = DirectoryPlace(tmp_path / "shared")
    if kind == "s3":
        place = S3Place(request.getfixturevalue("s3_endpoint"), request.getfixturevalue("s3_client"))
    findings = list(examine_place(place.settings()))
    assert [(each.name, each.ok) for each in findings] == [(name, True) for name in ALL], findings
    assert place.names() == set()
    assert place.unfinished() == 0


def listing(seen: Seen) -> bool:
    return seen.method == "GET" and "list-type" in seen.path and "/check" in seen.path.replace("%2F", "/")


FAULTS: dict[str, tuple[str, Callable[[Seen], Fault | None]]] = {
    "ignores conditions": ("conditional create", lambda seen: DEAF),
    "knows no conditions": (
        "conditional create",
        lambda seen: (
            Fault(answer=refusal("NotImplemented", 501)) if "if-none-match" in seen.headers else None
        ),
    ),
    "takes no parts": ("upload in parts", lambda seen: FORBIDDEN if "uploads" in seen.path else None),
    "gives other ranges": (
        "ranged reads",
        lambda seen: (
            Fault(answer=(206, b"x" * 10)) if seen.headers.get("range", "bytes=0-").find("=0-") < 0 else None
        ),
    ),
    "lists late": (
        "listing after write",
        lambda seen: Fault(answer=(200, EMPTY_LIST)) if listing(seen) else None,
    ),
    "may not delete": ("delete", lambda seen: FORBIDDEN if seen.method == "DELETE" else None),
    "does not delete": ("delete", lambda seen: Fault(answer=(204, b"")) if seen.method == "DELETE" else None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_promise_that_is_not_kept_is_named_with_what_to_do(proxy: Proxy, s3_client: Any, fault: str) -> None:
    name, proxy.rule = FAULTS[fault]
    findings = {each.name: each for each in examine_place(S3Place(proxy.url, s3_client).settings())}
    assert not findings[name].ok
    assert len(findings[name].message) > 60, "a sentence, and advice"
    assert not findings[name].passing
    assert findings["access"].ok


def test_place_that_cannot_be_used_at_all_has_one_finding(proxy: Proxy, s3_client: Any) -> None:
    proxy.rule = lambda seen: FORBIDDEN
    (finding,) = examine_place(S3Place(proxy.url, s3_client).settings())
    assert (finding.name, finding.ok, finding.passing) == ("access", False, False)
    assert "allow these credentials" in finding.message


def test_trouble_that_passes_is_told_from_a_broken_promise(
    proxy: Proxy, s3_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.rule = lambda seen: BUSY if "partNumber" in seen.path else None
    found = {each.name: each for each in examine_place(S3Place(proxy.url, s3_client).settings())}[
        "upload in parts"
    ]
    assert (found.ok, found.passing) == (False, True)
    missing = json.dumps({"directory": {"path": str(tmp_path / "not-mounted")}})
    (finding,) = examine_place(missing)
    assert (finding.ok, finding.passing) == (False, True)


def test_clock_that_is_wrong_is_named(tmp_path: Path) -> None:
    class Behind(DirectoryObjects):
        def list(self, prefix: str) -> list[Stored]:
            return [Stored(each.key, each.size, each.modified - 400) for each in super().list(prefix)]

    findings: dict[str, StoreFinding] = {each.name: each for each in examine(Behind(str(tmp_path), "f"))}
    assert [name for name, each in findings.items() if not each.ok] == ["clock"]
    assert re.search("(399|400) s behind this machine", findings["clock"].message)


def test_of_two_writers_of_a_manifest_one_wins_where_conditions_are_ignored(
    proxy: Proxy, s3_client: Any, tmp_path: Path
) -> None:
    proxy.rule = lambda seen: DEAF
    jobs = Opener(S3Place(proxy.url, s3_client), tmp_path)
    one, other = jobs(None), jobs(None)
    ours, theirs = jobs.put(one, VERSION, b"ours"), jobs.put(other, VERSION, b"theirs")
    assert one.commit(Manifest("ml/llama", "uid", VERSION, 1, (ours,), 1.0))
    assert not other.commit(Manifest("ml/llama", "uid", VERSION, 1, (theirs,), 1.0))
    assert restored(other, VERSION) == b"ours"
    jobs.close()


def test_job_on_a_store_that_ignores_conditions_says_so_and_goes_on(
    proxy: Proxy, s3_client: Any, make_world: MakeWorld
) -> None:
    proxy.rule = lambda seen: DEAF
    world = make_world()
    world.remote = S3Place(proxy.url, s3_client).settings()
    world.start()
    until(
        lambda: [each.reason for each in world.report(0).problems] == ["RemoteNotSafe"],
        "it is said before training begins",
    )
    assert "If-None-Match" in world.report(0).problems[0].message
    world.policy = world.policy.__class__(snapshot_every=1, remote_every=1, remote_keep=2)
    world.begin()
    with world.ranks() as (rank,):
        rank.save(10)
        world.reach("remote", VERSION)
    assert [each.reason for each in world.report(0).problems] == ["RemoteNotSafe"], "it lasts"


def test_examination_that_was_cut_short_is_repeated_and_blames_nobody(tmp_path: Path) -> None:
    class Store:
        shortcomings: ClassVar[dict[str, str]] = {}
        examined = 0

        def examine(self) -> list[StoreFinding]:
            self.examined += 1
            return [
                StoreFinding("access", True, "well"),
                StoreFinding("delete", False, "it is busy", passing=self.examined == 1),
            ]

    state, store = SidecarState(config_of(tmp_path)), Store()
    inventory = RemoteListing(state, lambda _: None)
    inventory._examine(store)  # type: ignore[arg-type]
    assert state.problems == ()
    inventory._examine(store)  # type: ignore[arg-type]
    assert [each.reason for each in state.problems] == ["RemoteNotSafe"]
    state.withdraw("Remote", but="RemoteNotSafe")
    assert state.problems, "it lasts, whatever comes and goes"
