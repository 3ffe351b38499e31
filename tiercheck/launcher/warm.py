"""Keeps the next attempt's interpreter ready: importing torch is most of a restart in place.

It is a child of the launcher as the command is, and *becomes* the command: same session, same inherited
output, same signal when the launcher dies. Whatever goes wrong with it, the command is started the ordinary
way.
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
"""0: every attempt starts with a new interpreter."""
ENV_WARM_AFTER_SECONDS = "TIERCHECK_WARM_AFTER_SECONDS"
"""How long the command runs before the next interpreter is made ready beside it; 10 if not set."""

_ENTRY = Path(__file__).resolve().parent.parent / "warm" / "entry.py"
_ANSWER_SECONDS = 120.0
_MOST_DEATHS = 3
_MOST_PASSES = 100
"""Over the threads of one: a kernel that does not do what it says must not keep the launcher."""


class WarmInterpreter:
    """At most one at a time. `release` hands it over as the command; it is not this object's any more
    then.
    """

    def __init__(
        self,
        command: Sequence[str],
        recipe: Recipe | None,
        environment: Mapping[str, str],
        errors: int | None = None,
    ) -> None:
        """`command`: what a cold start executes; `recipe`: how to become it."""
        self._command = list(command)
        self._errors = errors
        self._environment = dict(environment)
        self._recipe = recipe if environment.get(ENV_WARM, "1") != "0" else None
        self._channel: socket.socket | None = None
        self._received = b""
        self._deaths = 0
        self.pid: int | None = None
        """Of the interpreter that waits."""
        self.released: int | None = None
        """Of the one that was told to become the command and has not said yet that it does."""
        self._deadline = 0.0

    @property
    def wanted(self) -> bool:
        """Whether one should be made ready: there is none, and it would be of use."""
        return self._recipe is not None and self._channel is None

    @property
    def waiting(self) -> set[int]:
        """The pid of the one that waits."""
        return set() if self.pid is None else {self.pid}

    @property
    def channel(self) -> socket.socket | None:
        """For a selector, while there is an interpreter that may say something."""
        return self._channel

    def prepare(self) -> None:
        """Start one; it imports on its own. A failure only means that there is none."""
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
            self._recipe = None  # the start of the command itself will say why
            return
        finally:
            theirs.close()
        _yield_to_others(self.pid, True)
        ours.setblocking(False)
        self._channel = ours
        self._received = b""

    def release(self, environment: Mapping[str, str]) -> int | None:
        """Let it become the command with `environment`, and return its pid; None if there is none that
        can.
        """
        if self.pid is None or self._channel is None:
            return None
        order = json.dumps(dict(environment)).encode() + b"\n"
        _yield_to_others(self.pid, False)  # first: once told, it may run the command before we get on
        try:
            self._channel.settimeout(5.0)
            self._channel.sendall(order)
            self._channel.setblocking(False)
        except OSError:
            os.kill(self.pid, signal.SIGKILL)  # its channel is closed by the loop, which reads its end
            self.pid = None
            return None
        self.released, self.pid = self.pid, None
        self._deadline = time.monotonic() + _ANSWER_SECONDS
        return self.released

    def listen(self) -> None:
        """Read what it says; call it when its channel is readable."""
        if self._channel is None:
            return
        try:
            piece = self._channel.recv(65536)
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
        """A child has ended. Returns whether it was to become the command, but never did."""
        if pid == self.released:
            self.listen_to_the_end()
        unanswered = pid == self.released
        if unanswered or pid == self.pid:
            self._deaths += 1
            if self._deaths >= _MOST_DEATHS:
                self._recipe = None
            self.pid = self.released = None
        return unanswered

    def listen_to_the_end(self) -> None:
        """What an interpreter that has ended still had to say."""
        while self._channel is not None:
            self.listen()

    def check(self) -> None:
        """End one that was told to become the command, and does not answer."""
        if self.released is not None and time.monotonic() >= self._deadline:
            os.kill(self.released, signal.SIGKILL)

    def close(self) -> None:
        """End the one that waits."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)  # a child that is not reaped yet: the number is still its own
            self.pid = None
        self._forget()

    def _forget(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _yield_to_others(pid: int, yielding: bool) -> None:
    """As batch work while it prepares itself. Niceness would be for good: only the privileged may take it
    back."""
    policy = os.SCHED_BATCH if yielding else os.SCHED_OTHER
    try:
        for _ in range(_MOST_PASSES):  # a thread that begins while the list is read is as its parent was then
            tasks = map(int, os.listdir(f"/proc/{pid}/task"))
            if not any([_schedule(task, policy) for task in tasks]):
                return
    except OSError:
        return  # it is a courtesy


def _schedule(task: int, policy: int) -> bool:
    """Returns whether the thread had another policy."""
    try:
        if os.sched_getscheduler(task) == policy:
            return False
        os.sched_setscheduler(task, policy, os.sched_param(0))
    except ProcessLookupError:
        return False  # it has ended
    return True
