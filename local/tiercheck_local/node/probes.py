"""Asks a container how it is: httpGet, tcpSocket and exec, with a kubelet's thresholds.

Until its first success a probe asks every 0.2 s instead of every `periodSeconds`, so that a pod is ready as
soon as it can be; the time until a failing probe gives up is not shortened by that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

Probe = Mapping[str, Any]
Exec = Callable[[list[str]], Awaitable[bool]]
"""Runs a command in the container; cancelled when the probe's time is up."""

_EAGER = 0.2


async def watch(
    probe: Probe,
    host: str,
    ports: Mapping[str, int],
    run: Exec,
    *,
    report: Callable[[bool], None],
    once: bool = False,
) -> None:
    """Probe for ever (with `once`: until the first verdict) and report every verdict: threshold successes or
    failures in a row."""
    period = float(probe.get("periodSeconds") or 10)
    needed, allowed = int(probe.get("successThreshold") or 1), int(probe.get("failureThreshold") or 3)
    await asyncio.sleep(float(probe.get("initialDelaySeconds") or 0))
    good = bad = 0
    succeeded_before = False
    next_failure = time.monotonic() + period
    while True:
        if await ask(probe, host, ports, run):
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


async def ask(probe: Probe, host: str, ports: Mapping[str, int], run: Exec) -> bool:
    """One question, at most `timeoutSeconds` long."""
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
