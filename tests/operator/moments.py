"""Ends what must end at any moment: Python 3.11's `asyncio.wait_for` forgets a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

TURNS = range(6)
"""Turns of the event loop between the news and the end, more than it takes to hand the news over."""


class Woken(asyncio.Event):
    """Counts how often somebody began to wait for it."""

    waits = 0

    async def wait(self) -> Literal[True]:
        self.waits += 1
        return await super().wait()


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def ends(what: Coroutine[Any, Any, object] | asyncio.Task[Any]) -> None:
    """Raises what it raises. In a task of its own: the deadline's cancellation must not be what ends it."""
    task = asyncio.ensure_future(what)
    await asyncio.wait({task}, timeout=10)
    assert task.done(), "it goes on for ever"
    if not task.cancelled():
        task.result()


async def until(condition: Callable[[], object]) -> None:
    """Looks at every turn of the event loop, so that nothing has happened since it became true."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  what is waited for is a state, not an event of ours
            await asyncio.sleep(0)
