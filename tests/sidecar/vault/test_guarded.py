"""What a lock guards is to be had under it only."""

from __future__ import annotations

import threading

import pytest

from tiercheck_sidecar.vault.slot_table import Guarded


def test_only_who_holds_the_lock_has_the_content() -> None:
    guarded: Guarded[list[str]] = Guarded([])

    def other() -> None:
        with guarded as content:
            content.append("other")

    thread = threading.Thread(target=other)
    with guarded as content:
        thread.start()
        with guarded as again:  # the same thread may
            assert again is content
        content.append("first")
    thread.join()
    assert content == ["first", "other"]


def test_lock_is_free_again_whatever_ended_the_block() -> None:
    guarded = Guarded(0)
    with pytest.raises(ValueError, match="nobody thought"), guarded:
        raise ValueError("nobody thought of it")
    held = threading.Thread(target=guarded.__enter__)
    held.start()
    held.join(10)
    assert not held.is_alive()
