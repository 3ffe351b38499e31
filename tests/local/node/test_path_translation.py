"""Container paths in text become host paths, and nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck_local.node.environment import PathTranslation

MOUNTS = {
    "/tiercheck/memory": "/dev/shm/p",
    "/tiercheck/run": "/tmp/r",
    "/data": "/host/d",
    "/data/sub": "/host/s",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/tiercheck/memory", "/dev/shm/p"),
        ("/tiercheck/memory/slot-0", "/dev/shm/p/slot-0"),
        ("--directory=/data", "--directory=/host/d"),
        ("/tiercheck/run:/opt/lib:/data/x", "/tmp/r:/opt/lib:/host/d/x"),
        ("echo x > /data/out; cat '/data/out'", "echo x > /host/d/out; cat '/host/d/out'"),
        ("file:///data/x", "file:///host/d/x"),
        ('{"path":"/data"}', '{"path":"/host/d"}'),
        ("/data/sub/y /data/subway", "/host/s/y /host/d/subway"),
        ("see /data.", "see /host/d."),
    ],
)
def test_mount_path_is_replaced_wherever_it_begins_a_path(text: str, expected: str) -> None:
    assert PathTranslation(MOUNTS)(text) == expected


@pytest.mark.parametrize(
    "text", ["/database", "/srv/data", "/data-2", "/data.bak", "./data", "data", "~/data", "/tiercheck"]
)
def test_what_only_looks_like_a_mount_path_stays(text: str) -> None:
    assert PathTranslation(MOUNTS)(text) == text


def test_without_mounts_nothing_changes() -> None:
    assert PathTranslation({})("/data") == "/data"


@given(st.text(alphabet="ab/:=. -", max_size=40))
def test_text_without_mount_path_is_unchanged(text: str) -> None:
    assert PathTranslation({"/mnt/volume": "/host"})(text) == text


segment = st.text(alphabet="abcxyz0", min_size=1, max_size=6)


@given(st.lists(st.lists(segment, max_size=3), min_size=1, max_size=4))
def test_every_entry_of_a_path_list_is_translated(tails: list[list[str]]) -> None:
    def joined(root: str) -> str:
        return ":".join("/".join([root, *tail]) for tail in tails)

    assert PathTranslation({"/mnt/v": "/host/v"})(joined("/mnt/v")) == joined("/host/v")


@given(st.dictionaries(segment.map("/m/{}".format), segment.map("/m/{}".format), min_size=1, max_size=4))
def test_result_is_not_translated_again(mounts: dict[str, str]) -> None:
    translate = PathTranslation(mounts)
    assert all(translate(path) == host for path, host in mounts.items())
