"""Runs one container of a pod: its processes, its probes, and the state that is reported about it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp

from tiercheck_local import markers
from tiercheck_local.node.process import BackOff, CannotStart, HostProcess, go_duration
from tiercheck_operator.model.status import rfc3339

# Until its first success a probe runs every 0.2 s instead of every `periodSeconds`, so that a pod is ready as
# soon as it can be; the time until a failing probe gives up is not shortened by that.
Probe = Mapping[str, Any]
Exec = Callable[[list[str]], Awaitable[bool]]
"""Runs a command in the container; cancelled when the probe's time is up."""

_EAGER = 0.2


async def watch_probe(
    probe: Probe,
    host: str,
    ports: Mapping[str, int],
    run: Exec,
    *,
    report: Callable[[bool], None],
    once: bool = False,
) -> None:
    """Probes for ever (with `once`: until the first verdict) and reports every verdict.

    A verdict is a threshold of successes or failures in a row."""
    period = float(probe.get("periodSeconds") or 10)
    needed, allowed = int(probe.get("successThreshold") or 1), int(probe.get("failureThreshold") or 3)
    await asyncio.sleep(float(probe.get("initialDelaySeconds") or 0))
    good = bad = 0
    succeeded_before = False
    next_failure = time.monotonic() + period
    while True:
        if await ask_probe(probe, host, ports, run):
            good, bad, succeeded_before = good + 1, 0, True
            if good >= needed:
                report(True)
                if once:
                    return
        else:
            good = 0
            if succeeded_before or time.monotonic() >= next_failure:
                bad += 1
                next_failure = time.monotonic() + period
            if bad >= allowed:
                report(False)
                if once:
                    return
        await asyncio.sleep(period if succeeded_before and good >= needed else min(_EAGER, period))


async def ask_probe(probe: Probe, host: str, ports: Mapping[str, int], run: Exec) -> bool:
    """Returns the result of one probe of at most `timeoutSeconds`."""
    timeout = float(probe.get("timeoutSeconds") or 1)
    try:
        async with asyncio.timeout(timeout):
            if "httpGet" in probe:
                return await _http(probe["httpGet"], host, ports)
            if "tcpSocket" in probe:
                target = probe["tcpSocket"]
                _, writer = await asyncio.open_connection(
                    target.get("host") or host, _port(target["port"], ports)
                )
                writer.close()
                return True
            if "exec" in probe:
                return await run(list(probe["exec"]["command"]))
    except (OSError, TimeoutError, aiohttp.ClientError):
        pass
    return False


async def _http(target: Mapping[str, Any], host: str, ports: Mapping[str, int]) -> bool:
    scheme = str(target.get("scheme") or "HTTP").lower()
    url = f"{scheme}://{target.get('host') or host}:{_port(target['port'], ports)}{target.get('path') or '/'}"
    headers = {entry["name"]: entry["value"] for entry in target.get("httpHeaders") or []}
    connector = aiohttp.TCPConnector(ssl=False, force_close=True)  # a kubelet does not verify either
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(url, headers=headers, allow_redirects=False) as answer,
    ):
        with contextlib.suppress(aiohttp.ClientPayloadError):
            await answer.read()
        return 200 <= answer.status < 400


def _port(port: int | str, ports: Mapping[str, int]) -> int:
    return ports[port] if isinstance(port, str) and port in ports else int(port)


_TAIL = 2048
_LOOK_AT_HOLD = 0.05

NO_IMAGE = "no-such-image"
"""An image with this in its name cannot be pulled."""

HOLD = "hold-"
"""The prefix, before a container's name, of the file that holds back processes of such containers."""

OUT_OF_MEMORY = ".oom-killed"
"""The suffix, in place of the log's, of the file that marks a container as killed for lack of memory."""


class ContainerKind(Enum):
    INIT = "init"
    SIDECAR = "sidecar"
    MAIN = "main"


@dataclass(frozen=True)
class ContainerRecipe:
    """The resolved, expanded and translated inputs for starting a container."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: Path
    termination_message: Path
    out_of_memory: Path
    """A file that is made just before a simulated OOM kill."""
    hold: Path
    """A file; while it exists, the container runs without its process, as on a very slow node."""
    translate: Callable[[str], str]
    """The path translation for commands that are run in the container later: probes."""


class Container:
    """A container. `changed` is called after every change of state; `pod` is the pod's name in messages."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        kind: ContainerKind,
        pod_ip: str,
        changed: Callable[[], None],
        *,
        pod: str,
        back_off: BackOff,
    ) -> None:
        self.spec, self.kind = spec, kind
        self._pod, self._back_off = pod, back_off
        self.name: str = spec["name"]
        self.state: dict[str, Any] = {
            "waiting": {"reason": "PodInitializing" if kind is ContainerKind.MAIN else "ContainerCreating"}
        }
        self.last_state: dict[str, Any] = {}
        self.restarts = 0
        self.finished = False
        """True once it has ended and will not be started again."""
        self.started = asyncio.Event()
        self.probed_ready = False
        self._pod_ip, self._changed = pod_ip, changed
        self._process: HostProcess | None = None
        self._exec_numbers = itertools.count()
        self._stopping = False

    @property
    def running(self) -> bool:
        return "running" in self.state

    @property
    def ready(self) -> bool:
        if self.kind is ContainerKind.INIT:
            return self.finished and self.exit_code == 0
        return (
            self.running
            and self.started.is_set()
            and (self.probed_ready or "readinessProbe" not in self.spec)
        )

    @property
    def is_sidecar(self) -> bool:
        return self.kind is ContainerKind.SIDECAR

    @property
    def is_started(self) -> bool:
        return self.running and self.started.is_set()

    @property
    def exit_code(self) -> int | None:
        return self.state["terminated"]["exitCode"] if "terminated" in self.state else None

    def wait_with(self, reason: str, message: str = "") -> None:
        """Reports why the container does not run."""
        self.state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        self._changed()

    async def run(self, recipe: ContainerRecipe, policy: str) -> int:
        """Starts it, restarts it by `policy` (Always, OnFailure, Never), and returns the last exit code.

        Cancelling leaves a running process alone: `stop` ends it.
        """
        while True:
            began = time.monotonic()
            code = await self._run_once(recipe)
            if self._stopping or policy == "Never" or (policy == "OnFailure" and code == 0):
                self.finished = True
                self._changed()
                return code
            pause = self._back_off.after(time.monotonic() - began)
            self.last_state = self.state
            if pause:
                whose = f"container={self.name} pod={self._pod}"
                self.wait_with("CrashLoopBackOff", f"back-off {go_duration(pause)} restarting failed {whose}")
                await asyncio.sleep(pause)
            self.restarts += 1

    async def stop(self, grace: float) -> None:
        """Sends SIGTERM, then SIGKILL after `grace` seconds; prevents restarts."""
        self._stopping = True
        if self._process is not None and not self._process.exited.done():
            await self._pre_stop(grace)
            await self._process.stop(grace)
        self.finished = True
        self._changed()

    def lose(self) -> None:
        """Marks the container as ended: its process is dead already, and will not be started again."""
        self._stopping = self.finished = True
        if "terminated" not in self.state:
            started = self.state.get("running", {}).get("startedAt")
            self.state = _terminated(137, "Error", started, "")

    async def _run_once(self, recipe: ContainerRecipe) -> int:
        self.started.clear()
        self.probed_ready = False
        recipe.termination_message.unlink(missing_ok=True)
        if recipe.hold.exists():
            self.state = {"running": {"startedAt": rfc3339(time.time())}}
            self._changed()
            while recipe.hold.exists() and not self._stopping:  # noqa: ASYNC110  a fault has only files
                await asyncio.sleep(_LOOK_AT_HOLD)
            if self._stopping:
                self.state = _terminated(137, "Error", None, "")
                return 137
        try:
            process = HostProcess(recipe.argv, recipe.env, recipe.cwd, recipe.log)
        except CannotStart as error:
            self.state = _terminated(128, "StartError", None, str(error))
            self._changed()
            return 128
        self._process = process
        started_at = rfc3339(time.time())
        self.state = {"running": {"startedAt": started_at}}
        if "startupProbe" not in self.spec:
            self.started.set()
        process.exited.add_done_callback(lambda exited: self._record_exit(exited, started_at, recipe))
        self._changed()
        watching = asyncio.create_task(self._watch_health(recipe))
        try:
            return await asyncio.shield(process.exited)
        finally:
            watching.cancel()

    def _record_exit(self, exited: asyncio.Future[int], started_at: str, recipe: ContainerRecipe) -> None:
        if exited.cancelled() or self.finished:
            return
        code = exited.result()
        reason = "Completed" if code == 0 else "Error"
        if code != 0 and recipe.out_of_memory.exists():
            recipe.out_of_memory.unlink()
            reason = "OOMKilled"
        self.state = _terminated(code, reason, started_at, self._termination_message(recipe, code))
        self.probed_ready = False
        self._changed()

    def _termination_message(self, recipe: ContainerRecipe, code: int) -> str:
        with contextlib.suppress(OSError):
            return recipe.termination_message.read_bytes()[-4096:].decode(errors="replace")
        if code != 0 and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            with contextlib.suppress(OSError):
                return recipe.log.read_bytes()[-_TAIL:].decode(errors="replace")
        return ""

    async def _watch_health(self, recipe: ContainerRecipe) -> None:
        def set_ready(good: bool) -> None:
            if good != self.probed_ready:
                self.probed_ready = good
                self._changed()

        def set_started(good: bool) -> None:
            if good:
                self.started.set()
                self._changed()
            else:
                self._kill_softly()

        def kill_if_dead(good: bool) -> None:
            if not good:
                self._kill_softly()

        ports = {
            each["name"]: each["containerPort"] for each in self.spec.get("ports") or [] if "name" in each
        }
        run = self._exec(recipe)
        if "startupProbe" in self.spec:
            await watch_probe(
                self.spec["startupProbe"], self._pod_ip, ports, run, report=set_started, once=True
            )
        async with asyncio.TaskGroup() as group:
            for name, report in (("readinessProbe", set_ready), ("livenessProbe", kill_if_dead)):
                if name in self.spec:
                    group.create_task(watch_probe(self.spec[name], self._pod_ip, ports, run, report=report))

    def _kill_softly(self) -> None:
        process = self._process
        if process is not None and not process.exited.done():
            process.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(2.0, process.signal, signal.SIGKILL)

    async def _pre_stop(self, grace: float) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        if hook and "sleep" in hook:
            await asyncio.sleep(min(grace, float(hook["sleep"]["seconds"])))

    def _exec(self, recipe: ContainerRecipe) -> Exec:
        async def run(command: list[str]) -> bool:
            env = {**recipe.env, markers.POD: f"{recipe.env[markers.POD]}/exec-{next(self._exec_numbers)}"}
            try:
                process = HostProcess(
                    [recipe.translate(word) for word in command], env, recipe.cwd, recipe.log
                )
            except CannotStart:
                return False
            try:
                return await asyncio.shield(process.exited) == 0
            finally:
                process.kill()

        return run


def _terminated(code: int, reason: str, started_at: str | None, message: str) -> dict[str, Any]:
    state: dict[str, Any] = {"exitCode": code, "reason": reason, "finishedAt": rfc3339(time.time())}
    if started_at:
        state["startedAt"] = started_at
    if message:
        state["message"] = message
    return {"terminated": state}
