"""Keeps an interpreter ready for the next attempt: importing torch is most of a restart in place.

The interpreter is a child of the launcher, as the command is, and *becomes* the command: same session, same
inherited output, same signal when the launcher dies. If it fails, the command is started in the ordinary way.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tiercheck.launcher import command as processes
from tiercheck.launcher.recipe import Recipe

ENV_WARM = "TIERCHECK_WARM"
"""The variable that disables warm interpreters: if it is 0, every attempt starts with a new one."""
ENV_WARM_AFTER_SECONDS = "TIERCHECK_WARM_AFTER_SECONDS"
"""Seconds that the command runs before the next interpreter is prepared beside it; 10 if not set."""

_ENTRY = Path(__file__).resolve().parent.parent / "warm" / "entry.py"
_ANSWER_SECONDS = 120.0
_MOST_DEATHS = 3
_MOST_PASSES = 100
"""The most passes over a process's threads, so that no kernel can keep the launcher in the loop."""


class WarmInterpreter:
    """Holds at most one waiting interpreter. After `release` it is the command, and not held here."""

    def __init__(
        self,
        command: Sequence[str],
        recipe: Recipe | None,
        environment: Mapping[str, str],
        errors: int | None = None,
    ) -> None:
        """`command`: the command line of a cold start; `recipe`: the recipe to become it."""
        self._command = list(command)
        self._errors = errors
        self._environment = dict(environment)
        self._recipe = recipe if environment.get(ENV_WARM, "1") != "0" else None
        self.channel: socket.socket | None = None
        """The socket, for a selector, while an interpreter is connected."""
        self._received = b""
        self._deaths = 0
        self.pid: int | None = None
        self.released: int | None = None
        """The pid of the interpreter that was ordered to become the command and has not confirmed yet."""
        self._deadline = 0.0

    @property
    def wanted(self) -> bool:
        """Returns whether one should be prepared: there is none, and it could be used."""
        return self._recipe is not None and self.channel is None

    @property
    def waiting(self) -> set[int]:
        return set() if self.pid is None else {self.pid}

    def prepare(self) -> None:
        """Starts an interpreter, which then imports torch. A failure only means that there is none."""
        recipe = self._recipe
        assert recipe is not None
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), json.dumps(asdict(recipe)), json.dumps(self._command)]
        try:
            self.pid = processes.start(
                [recipe.interpreter, *recipe.flags, str(_ENTRY), *arguments],
                self._environment,
                [theirs.fileno()],
                errors=self._errors,
            )
        except OSError:
            ours.close()
            self._recipe = None  # starting the command will report the reason
            return
        finally:
            theirs.close()
        _yield_to_others(self.pid, True)
        ours.setblocking(False)
        self.channel = ours
        self._received = b""

    def release(self, environment: Mapping[str, str]) -> int | None:
        """Makes it the command with `environment`, and returns its pid; None if none is usable."""
        if self.pid is None or self.channel is None:
            return None
        order = json.dumps(dict(environment)).encode() + b"\n"
        _yield_to_others(self.pid, False)  # first: the command may start as soon as the order is sent
        try:
            self.channel.settimeout(5.0)
            self.channel.sendall(order)
            self.channel.setblocking(False)
        except OSError:
            os.kill(self.pid, signal.SIGKILL)  # the loop reads end of file and closes the channel
            self.pid = None
            return None
        self.released, self.pid = self.pid, None
        self._deadline = time.monotonic() + _ANSWER_SECONDS
        return self.released

    def listen(self) -> None:
        """Reads messages from the interpreter; call when its channel is readable."""
        if self.channel is None:
            return
        try:
            piece = self.channel.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        *lines, self._received = (self._received + piece).split(b"\n")
        for line in lines:
            word, _, why = line.decode(errors="replace").partition(" ")
            if word in ("warm", "cold"):
                self.released = None
            if word == "never":
                self._recipe = None
            if word in ("cold", "never"):
                print(f"tiercheck: started cold, because {why}", file=sys.stderr, flush=True)
        if not piece:
            self._forget()

    def ended(self, pid: int) -> bool:
        """Handles the end of a child. Returns whether it was to become the command, but never confirmed."""
        if pid == self.released:
            while self.channel is not None:  # what it said last
                self.listen()
        unanswered = pid == self.released
        if unanswered or pid == self.pid:
            self._deaths += 1
            if self._deaths >= _MOST_DEATHS:
                self._recipe = None
            self.pid = self.released = None
        return unanswered

    def check(self) -> None:
        """Kills an interpreter that did not confirm in time that it became the command."""
        if self.released is not None and time.monotonic() >= self._deadline:
            os.kill(self.released, signal.SIGKILL)

    def close(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)  # the child is not reaped yet, so the pid is still its own
            self.pid = None
        self._forget()

    def _forget(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def _yield_to_others(pid: int, yielding: bool) -> None:
    """Schedules a process as batch work while it prepares, or normally again.

    Niceness would be permanent, because only privileged processes may lower it."""
    policy = os.SCHED_BATCH if yielding else os.SCHED_OTHER
    try:
        for _ in range(_MOST_PASSES):  # a thread started during the listing inherits the old policy
            tasks = map(int, os.listdir(f"/proc/{pid}/task"))
            if not any([_schedule(task, policy) for task in tasks]):
                return
    except OSError:
        return  # the policy is optional


def _schedule(task: int, policy: int) -> bool:
    """Returns whether the thread had another policy."""
    try:
        if os.sched_getscheduler(task) == policy:
            return False
        os.sched_setscheduler(task, policy, os.sched_param(0))
    except ProcessLookupError:
        return False  # it has ended
    return True
