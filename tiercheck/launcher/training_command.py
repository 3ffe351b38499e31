"""Starts the processes of the training command: one, or one for each local rank.

torchrun ends all its ranks when the first one fails. If its options are understood, the launcher starts the
ranks itself, with torchrun's variables, so that each can be replaced alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from tiercheck.launcher import command as processes
from tiercheck.launcher.command import RelayedOutput
from tiercheck.launcher.environment import command_environment, locate
from tiercheck.launcher.recipe import recipe_of, without_rendezvous
from tiercheck.launcher.warm import WarmInterpreter
from tiercheck.protocol.local import Order
from tiercheck.protocol.names import ENV_PROCS_PER_WORKER


class CannotExecute(Exception):
    """The error for a command that cannot be executed, with the program and the OSError."""

    def __init__(self, program: str, error: OSError) -> None:
        super().__init__(program, error)
        self.program, self.error = program, error


class TrainingCommand:
    """The command's processes. `running`: pids by local rank, or by 0 if the command is one process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        command, taken = without_rendezvous(command)
        if taken:
            verb = "is" if len(taken) == 1 else "are"
            decides = "TierCheck decides ranks, rendezvous and restarts"
            print(
                f"tiercheck: torchrun's {', '.join(taken)} {verb} not used: {decides}",
                file=sys.stderr,
                flush=True,
            )
        recipe = recipe_of(command, environment, locate)
        self._makes_ranks = recipe is not None and recipe.each_rank
        self.environment = dict(environment)
        if self._makes_ranks and environment.get(ENV_PROCS_PER_WORKER, "1") != "1":
            self.environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        self.given = command
        self._each = recipe.command if recipe is not None and recipe.each_rank else self.given
        self.errors = RelayedOutput()
        """The output of the command to stderr."""
        self.warm = WarmInterpreter(self._each, recipe, self.environment, self.errors.writing)
        self.running: dict[int, int] = {}

    def places(self, order: Order) -> range:
        """Returns the local ranks that identify its processes."""
        return range(order.procs_per_worker if self._makes_ranks else 1)

    def ranks_of(self, local: int, order: Order) -> list[int]:
        """Returns the ranks that the process at this place runs."""
        size = order.procs_per_worker
        return [order.worker * size + each for each in ([local] if self._makes_ranks else range(size))]

    def start_missing(self, order: Order) -> None:
        """Starts the missing processes, the first in the warm interpreter. Raises CannotExecute."""
        for local in self.places(order):
            if local in self.running:
                continue
            if (pid := self.warm.release(self._environment_of(order, local))) is not None:
                self.running[local] = pid
            else:
                self.start(order, local)

    def start(self, order: Order, local: int) -> None:
        """Starts one process with a new interpreter. Raises CannotExecute."""
        self.running.pop(local, None)
        try:
            environment = self._environment_of(order, local)
            self.running[local] = processes.start(self._each, environment, errors=self.errors.writing)
        except OSError as error:
            raise CannotExecute(self._each[0], error) from error

    def _environment_of(self, order: Order, local: int) -> dict[str, str]:
        return command_environment(self.environment, order, local if self._makes_ranks else None)
