"""Leaves steps in the middle, as at the loss of another rank, and begins again in the same process.

STRIKES: numbers of steps, in this order; negative ones are left in their evaluation. Without any, nothing
happens.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

from tiercheck.trainer.inprocess.half_step import collect_half_step, free_graph


@functools.cache
def left() -> list[int]:
    """Those that are to come."""
    return [int(each) for each in os.environ.get("STRIKES", "").split(",") if each]


class Struck(BaseException):
    pass


def strike(step: int) -> None:
    if left()[:1] == [step]:
        print(json.dumps({"struck": left().pop(0)}), flush=True)
        raise Struck


def reenter(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """As `tiercheck.reenter` where nobody else is."""
    holder = function.__self__  # type: ignore[attr-defined]
    while True:
        try:
            return function(*arguments, **named)
        except Struck as struck:
            free_graph(struck.__traceback__)
        checkpointer = holder.checkpointer
        checkpointer._pause()
        collect_half_step()
        checkpointer._folder = getattr(holder, "_folder", None)  # nobody asks for it in a cluster
        checkpointer._enter_again(is_made_anew=hasattr(holder, "accelerator"))
