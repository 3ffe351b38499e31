"""Runs an unchanged script of which all ranks but the first stand still until they are hit.

`python SCRIPT ARGUMENT...` would run it; they stand still after the end of step AT in the first attempt, and
the first waits for them in the next step. So no test that hits it depends on speed.
"""

from __future__ import annotations

import os
import runpy
import sys
import time

from tiercheck import Checkpointer

AT = int(os.environ["AT"])
_end_step = Checkpointer.step


def step(self: Checkpointer, loss: float | None = None) -> None:
    _end_step(self, loss)
    while self.step_number == AT and os.environ["TIERCHECK_ATTEMPT"] == "1" and self.rank:
        time.sleep(0.05)


if __name__ == "__main__":
    Checkpointer.step = step  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
