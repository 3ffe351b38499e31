"""Listens to the sidecars of one job and tells them what is wanted.

The controller calls, the sidecar answers.

One long poll per pod keeps the newest report at hand; news wakes the job. What a report means is decided
elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import aiohttp
from msgspec.json import Decoder

from tiercheck.protocol import names
from tiercheck.protocol.directive import Directive
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.names import endpoint, join_address
from tiercheck.protocol.plain_json import Malformed, decode_with
from tiercheck.protocol.report import Report
from tiercheck_operator.manifests.owned import Credentials
from tiercheck_operator.model.observed import HostSign, WorkerReport
from tiercheck_operator.plausible import ClockSkew, by_our_clock, make_plausible

log = logging.getLogger(__name__)

_BREATH = 0.05
"""Seconds between two answers of one sidecar, so that one with news at every step does not keep us busy."""
_RETRY = 1.0
"""Seconds between calls to a sidecar that does not answer any more."""
_FIRST_RETRY = 0.2
"""The same for one that has never answered: it is probably starting, and somebody waits for it."""
_AT_ONCE = 2.0
"""Seconds that a sidecar may take to answer a call that waits for nothing. Its host is knocked at before it
is called silent."""
_KNOCK = 1.0
"""Seconds that a host may take to accept or refuse a connection."""
_MOST_BODY = 4 * 1024 * 1024
"""Bytes of an answer. A report has some 100 KiB at most; sidecars of all teams answer this one process."""
_REPORT = Decoder(Report)


class SidecarError(Exception):
    """The sidecar did not answer, or not as one of ours; the message is a sentence."""


def _url(address: str, path: str) -> str:
    return f"https://{join_address(*endpoint(address, names.CONTROL_PORT))}{path}"


class JobSidecars:
    """The sidecars of one job. Use inside a running event loop; `close` ends all calls."""

    def __init__(
        self,
        job_uid: str,
        credentials: Credentials,
        wake: Callable[[], None],
        *,
        poll_seconds: float = 5.0,
        call_seconds: float = 3.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._job_uid = job_uid
        self._wake = wake
        self._poll, self._call, self._clock = poll_seconds, call_seconds, clock
        self._tls = ssl.create_default_context(cadata=credentials.ca.decode())
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls, limit=0),
            headers={"Authorization": f"Bearer {credentials.token}", "Accept-Encoding": "identity"},
            auto_decompress=False,
        )
        self._skew = ClockSkew()
        self._hosts: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, asyncio.Event] = {}
        self._reports: dict[str, WorkerReport] = {}

    @property
    def reports(self) -> Mapping[str, WorkerReport]:
        """By pod UID, of the pods that are followed."""
        return dict(self._reports)

    def follow(self, hosts: Mapping[str, str]) -> None:
        """Listen to exactly these pods: UID to address (`protocol.address`)."""
        for uid in [uid for uid, host in self._hosts.items() if hosts.get(uid) != host]:
            self._tasks.pop(uid).cancel()
            self._skew.forget(self._hosts[uid])
            for table in (self._hosts, self._asked, self._reports):
                table.pop(uid, None)
        for uid, host in hosts.items():
            if uid not in self._hosts:
                self._hosts[uid] = host
                self._asked[uid] = asyncio.Event()
                self._reports[uid] = WorkerReport(None, None, None)
                self._tasks[uid] = asyncio.create_task(self._listen(uid, host), name=f"sidecar {host}")

    def probe(self, uid: str) -> None:
        """Ask now, whatever long poll is under way."""
        if uid in self._asked:
            self._asked[uid].set()

    async def push(self, uid: str, directive: Directive) -> None:
        """Tell the sidecar what is wanted. Raises SidecarError."""
        host = self._hosts.get(uid)
        if host is None:
            raise SidecarError(f"pod {uid} is not followed")
        self._heard(
            uid,
            await self._request(
                "PUT", host, "/v1/directive", body=to_json(directive), query={}, seconds=self._call
            ),
        )

    async def close(self) -> None:
        """Stop listening."""
        tasks = list(self._tasks.values())
        self.follow({})
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._session.close()

    async def _listen(self, uid: str, host: str) -> None:
        serial, wait = -1, 0.0
        while True:
            asked, due = self._asked[uid], self._clock() + wait
            try:
                report = await self._poll_unless(asked, host, serial, wait)
                if report is not None:
                    self._heard(uid, report)
                    if wait == 0:
                        self._wake()  # somebody waits for this very answer, even if it brings no news
                    serial, wait = report.serial, self._poll
                    pause = _BREATH
                else:
                    asked.clear()
                    serial, wait, pause = -1, 0.0, 0.0
            except SidecarError as error:
                since = min(due, self._clock())
                self._not_heard(uid, str(error), since, await _knock(host))
                known = self._reports.get(uid)
                never = known is None or known.answered_at is None
                serial, wait, pause = -1, 0.0, _FIRST_RETRY if never else _RETRY
            if pause:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await asked.wait()

    async def _poll_unless(self, asked: asyncio.Event, host: str, serial: int, wait: float) -> Report | None:
        """The next report; None if somebody asked for one at once in the meantime."""
        query = {"after": str(serial), "wait": f"{wait:g}"}
        seconds = wait + self._call if wait else min(_AT_ONCE, self._call)
        call = asyncio.create_task(
            self._request("GET", host, "/v1/report", body=None, query=query, seconds=seconds)
        )
        if wait == 0:
            asked.clear()
        interrupt = asyncio.create_task(asked.wait())
        try:
            await asyncio.wait({call, interrupt}, return_when=asyncio.FIRST_COMPLETED)
            if call.done() or wait == 0:
                return await call
            return None
        finally:
            for task in (call, interrupt):
                task.cancel()
            await asyncio.gather(call, interrupt, return_exceptions=True)

    async def _request(
        self,
        method: str,
        host: str,
        path: str,
        *,
        body: bytes | None,
        query: Mapping[str, str],
        seconds: float,
    ) -> Report:
        url = _url(host, path)
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=self._call)
        try:
            async with self._session.request(
                method,
                url,
                data=body,
                params=query,
                timeout=limits,
                server_hostname=names.TLS_SERVER_NAME,
                headers={"Content-Type": "application/json"} if body is not None else None,
                allow_redirects=False,
            ) as response:
                text = await _body(response, host)
                ahead = self._skew.heard(host, response.headers.get("Date"), self._clock())
                if response.status != 200:
                    raise SidecarError(
                        f"{host} answered {response.status}: {text[:300].decode(errors='replace')}"
                    )
        except SidecarError:
            raise
        except (
            Exception
        ) as error:  # whatever it may be: nothing that a sidecar answers ends the listening to it
            raise SidecarError(f"{host} does not answer: {type(error).__name__} {error}") from error
        try:
            report = read_report(text)
        except Malformed as error:
            raise SidecarError(f"{host} sent no report: {error}") from error
        if report.job_uid != self._job_uid:
            raise SidecarError(f"{host} belongs to another job")
        return make_plausible(by_our_clock(report, ahead))

    def _heard(self, uid: str, report: Report) -> None:
        known = self._reports.get(uid)
        if known is None:
            return
        now = self._clock()
        if report.pod_uid != uid:
            self._not_heard(uid, "another pod answers at this address", now, HostSign.NOTHING)
            return
        stepped = now if _stepped(known.report, report) else known.stepped_at
        self._reports[uid] = WorkerReport(report, now, None, stepped_at=stepped)
        if known.report != report or known.silent_since is not None:
            self._wake()

    def _not_heard(self, uid: str, why: str, since: float, sign: HostSign) -> None:
        """`since`: when it ought to have answered; `sign`: what came back from its host."""
        known = self._reports.get(uid)
        if known is None:
            return
        if known.silent_since is None:
            log.log(
                logging.INFO if known.answered_at else logging.DEBUG,
                "sidecar of pod %s is silent: %s",
                uid,
                why,
            )
            self._reports[uid] = replace(known, silent_since=since, host=sign)
            self._wake()
        elif known.host is not sign:
            self._reports[uid] = replace(known, host=sign)
            self._wake()


def read_report(text: bytes) -> Report:
    """Raises Malformed, and nothing else."""
    return decode_with(_REPORT.decode, text, _MOST_BODY)


async def _body(response: aiohttp.ClientResponse, host: str) -> bytes:
    """As it was sent: not decompressed, and never more than what an honest sidecar says. Raises
    SidecarError.
    """
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) > _MOST_BODY:
            raise SidecarError(f"{host} answers with more than {_MOST_BODY} bytes")
    return bytes(found)


async def _knock(address: str) -> HostSign:
    """Kernels refuse for processes that are gone, and accept for those that have no time."""
    try:
        async with asyncio.timeout(_KNOCK):
            _, writer = await asyncio.open_connection(*endpoint(address, names.CONTROL_PORT))
    except ConnectionRefusedError:
        return HostSign.REFUSED
    except (TimeoutError, OSError):
        return HostSign.NOTHING
    writer.close()
    return HostSign.ACCEPTED


def _stepped(before: Report | None, after: Report) -> bool:
    """Whether its trainer has made a step between the two. A sidecar that was started again learns of old
    ones."""
    if before is None or before.attempt != after.attempt or before.trainer.step is None:
        return False
    return (after.trainer.step or 0) > before.trainer.step
