"""Promise: a copy that is shared by threads is whole when it is joined, whoever did which piece."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from tiercheck.trainer.save.staging import Crew, copy_tensor

DEADLINE = 20.0


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(1000), torch.randn(1000)) for _ in range(count)]


def test_thread_that_waits_takes_over_what_the_other_has_not_begun() -> None:
    work = pairs(10)
    held, begun = threading.Event(), threading.Event()
    done_by: list[str] = []

    def copy(target: Tensor, source: Tensor) -> None:
        me = threading.current_thread().name
        if me == "saver":
            begun.set()
            held.wait(DEADLINE)
        copy_tensor(target, source)
        done_by.append(me)

    crew = Crew(work, copy)
    saver = threading.Thread(target=crew.join, name="saver")
    saver.start()
    assert begun.wait(DEADLINE)
    crew.help()
    assert len(done_by) == 9, "all but the piece that the saver is at"
    held.set()
    saver.join(DEADLINE)
    assert done_by.count("saver") == 1
    assert all(torch.equal(target, source) for target, source in work)


def test_join_waits_for_the_piece_that_a_helper_is_at() -> None:
    work = pairs(2)
    held, begun = threading.Event(), threading.Event()

    def copy(target: Tensor, source: Tensor) -> None:
        if threading.current_thread().name == "helper":
            begun.set()
            held.wait(DEADLINE)
        copy_tensor(target, source)

    crew = Crew(work, copy)
    helper = threading.Thread(target=crew.help, name="helper")
    helper.start()
    assert begun.wait(DEADLINE)
    joined = threading.Thread(target=crew.join)
    joined.start()
    assert not torch.equal(*work[0])
    held.set()
    joined.join(DEADLINE)
    assert not joined.is_alive()
    assert all(torch.equal(target, source) for target, source in work)
    helper.join(DEADLINE)


def test_failure_of_a_helper_is_told_to_the_one_that_joins() -> None:
    def copy(target: Tensor, source: Tensor) -> None:
        raise RuntimeError("no such memory")

    crew = Crew(pairs(3), copy)
    crew.help()
    with pytest.raises(RuntimeError, match="no such memory"):
        crew.join()
