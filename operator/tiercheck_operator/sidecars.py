"""Reads the reports of one job's sidecars and sends them directives.

The operator is the client, each sidecar a server. One long poll per pod keeps the newest report at hand; a
new one wakes the job. The list of holdings is most of a report, changes at every step and matters only in a
recovery, so it is requested only then. With many workers polls last longer and pause between two answers, so
that a job takes a bounded part of the processor. What a report means is decided elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import aiohttp
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.json import Decoder

from tiercheck.clocks import ClockSkew
from tiercheck.protocol import names, signing
from tiercheck.protocol.directive import Directive, Restore, SourceTable
from tiercheck.protocol.names import endpoint, join_address
from tiercheck.protocol.plain_json import Malformed, decode_with
from tiercheck.protocol.report import Holding, Report
from tiercheck_operator.manifests.owned import Credentials
from tiercheck_operator.model.observed import HostProbe, WorkerReport
from tiercheck_operator.report_bounds import clamp_report, to_operator_clock, without_lists

log = logging.getLogger(__name__)

_BREATH = 0.05
"""Seconds between two answers of one sidecar. Bounds the work for one that changes at every step."""
_ANSWERS_PER_SECOND = 4000
"""The most answers a second of all sidecars of a job, if their reports change all the time."""
_POLLS_PER_SECOND = 400
"""The most polls a second of all sidecars of a job, if no report changes."""
_RETRIES_PER_SECOND = 200
"""The most calls a second to all silent sidecars of a job."""
_CALLS = 128
"""The most short calls at the same time. A handshake takes a millisecond or two of this process: with more,
the last ones would time out before their turn, and be tried again."""
_BEGUN = 32
"""The most handshakes of all jobs at the same time. A handshake takes four times the memory of its
connection, and an operator that starts calls every sidecar."""
_TURN = 0.2
"""Seconds until the next handshake begins although this one has not ended."""
_KEPT = 60.0
"""Seconds that a second connection stays open for the next call of a recovery: the request for holdings, the
directive to restore, the release. Each takes some 40 KiB; a handshake takes a millisecond or two."""
_MOST_KEPT = 512
"""The most such connections of all jobs: beyond, their memory costs more than handshakes do."""
_RETRY = 1.0
"""Seconds between calls to a sidecar that has stopped answering."""
_FIRST_RETRY = 0.2
"""Seconds between calls to a sidecar that has never answered: it is probably starting."""
_AT_ONCE = 2.0
"""Seconds for a sidecar to answer a short call. Then its host is probed."""
_KNOCK = 1.0
"""Seconds that a host may take to accept or refuse a connection."""
_MOST_BODY = 1024 * 1024
"""Bytes of an answer. A report has some 100 KiB at most, and this process serves all teams' jobs."""
_SMALL_BODY, _LARGE_AT_ONCE = 64 * 1024, 2
"""Bytes of an answer that is always read, and the number of larger ones of a job read at the same time."""
_OF_JOB, _OF_SIDECAR = 2 * 1024 * 1024, 128 * 1024
"""Bytes of a job's newest answers kept in memory: a fixed part, and one for each sidecar."""
_PIECE = 32 * 1024
"""Bytes of a directive that are encrypted at a time. TLS keeps a buffer of that size while the connection
lives; for a whole table of sources it would exceed everything else kept for a worker."""
_REPORT = Decoder(Report)
_BARE = {"holdings": "no"}
"""The query for a report without holdings."""


def _only(credentials: Credentials) -> aiohttp.Fingerprint:
    """Returns the fingerprint of the job's one certificate, the only one that its authority ever issued.
    It is compared before anything of a request is sent. So one TLS context without authorities serves all
    jobs, and no connection keeps a parsed certificate."""
    certificate = ssl.PEM_cert_to_DER_cert(credentials.certificate.decode())
    return aiohttp.Fingerprint(hashlib.sha256(certificate).digest())


class Signer:
    """Signs for one job. Ed25519 is deterministic, so a signature is checked by making it again."""

    def __init__(self, job_uid: str, key: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(key)
        self.sign_attempt = lru_cache(maxsize=8)(
            lambda attempt: self._key.sign(signing.attempt_statement(job_uid, attempt)).hex()
        )

    def sign_pod(self, uid: str) -> str:
        return self._key.sign(signing.pod_statement(uid)).hex()

    def without_hearsay(self, report: Report) -> Report:
        """Returns `report`, without its newest attempt unless that is signed."""
        claimed, given = report.newest_attempt, report.newest_signature
        true = claimed > 0 and self.sign_attempt(claimed) == given
        return replace(report, newest_attempt=claimed if true else 0, newest_signature="")


class SidecarError(Exception):
    """The sidecar did not answer, or not as a sidecar of this job; the message is a sentence."""

    def __init__(self, message: str, failure: str = "not answered by a sidecar of this job") -> None:
        """`failure`: a clause that completes "calls to it are ..."."""
        super().__init__(message)
        self.failure = failure
        self.sign: HostProbe | None = None
        """The host's reaction to a probe during the call; None: not probed."""


_FAILURES: tuple[tuple[str, tuple[type[BaseException], ...]], ...] = (
    ("refused", (ConnectionRefusedError,)),
    ("broken by TLS", (ssl.SSLError, ssl.CertificateError, aiohttp.ServerFingerprintMismatch)),
    ("reset", (ConnectionError, aiohttp.ServerDisconnectedError)),
    ("timed out", (TimeoutError,)),
)


def _failure_of(error: BaseException | None) -> str:
    """Returns how a call failed, as a clause, by the innermost error of a known kind."""
    while error is not None:
        for clause, kinds in _FAILURES:
            if isinstance(error, kinds):
                return clause
        error = getattr(error, "os_error", None) or error.__cause__
    return "failing"


class Lines:
    """Shares one HTTP session, the limit on handshakes and the kept connections among all jobs."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_BEGUN)
        self.kept: set[str] = set()
        """The hosts to which a second connection stays open."""

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        """The session, created in the event loop that first uses it."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @contextlib.asynccontextmanager
    async def take_turn(self) -> AsyncIterator[None]:
        """Waits for a turn, which ends with the block, and after `_TURN` seconds in any case."""
        await self._free.acquire()
        with contextlib.ExitStack() as turn:
            turn.callback(self._free.release)
            late = asyncio.get_running_loop().call_later(_TURN, turn.close)
            try:
                yield
            finally:
                late.cancel()

    async def close(self) -> None:
        """Closes the session, which must not be in use any more."""
        if "session" in vars(self):
            await self.session.close()


_UNHEARD = WorkerReport(None, None, None)


@dataclass(eq=False)
class FollowedSidecar:
    """The sidecar of one pod: its newest report, and the calls to it under way."""

    uid: str
    host: str
    signature: str
    """The operator's signature of the pod."""
    known: WorkerReport = _UNHEARD
    again: bool = False
    """True if it is to be called at once."""
    size: int = 0
    """Bytes of its newest answer that are kept."""
    listening: asyncio.Task[None] | None = None
    asking: asyncio.Task[None] | None = None
    waiting: asyncio.Timeout | None = None
    """The timeout of the long poll under way. It expires when a short call has failed."""


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
        lines: Lines | None = None,
    ) -> None:
        self._job_uid = job_uid
        self._wake = wake
        self._poll, self._call, self._clock = poll_seconds, call_seconds, clock
        self._believed, self._token = _only(credentials), f"Bearer {credentials.token}"
        self._signer = Signer(job_uid, credentials.operator_key)
        self._lines, self._shares_lines = lines or Lines(), lines is not None
        self._skew = ClockSkew()
        self._directives = DirectiveEncoder()
        self._followed: dict[str, FollowedSidecar] = {}
        """The followed sidecars, by pod UID."""
        self._silent: set[str] = set()
        self._gate, self._gate_of_silent = asyncio.Semaphore(_CALLS), asyncio.Semaphore(_CALLS)
        self._holdings = True
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._snapshot = 0
        """Bytes of the largest snapshot that any worker has reported."""

    @property
    def reports(self) -> Mapping[str, WorkerReport]:
        """The newest report of each followed pod, by UID."""
        return {uid: each.known for uid, each in self._followed.items()}

    def follow(self, hosts: Mapping[str, str], keep: Collection[str] = ()) -> None:
        """Polls exactly these pods from now on: UID to address (`protocol.address`).
        Those with a UID in `keep` are polled further if they were."""
        hosts = {**{uid: each.host for uid, each in self._followed.items() if uid in keep}, **hosts}
        for each in [each for each in self._followed.values() if hosts.get(each.uid) != each.host]:
            for task in (each.listening, each.asking):
                if task is not None:
                    task.cancel()
            self._skew.forget(each.host)
            self._lines.kept.discard(each.host)
            self._silent.discard(each.uid)
            del self._followed[each.uid]
        for uid, host in hosts.items():
            if uid not in self._followed:
                each = self._followed[uid] = FollowedSidecar(uid, host, self._signer.sign_pod(uid))
                if len(self._lines.kept) < _MOST_KEPT:
                    self._lines.kept.add(host)
                each.listening = asyncio.create_task(self._listen(each), name=f"sidecar {host}")

    def want_holdings(self, wanted: bool) -> None:
        """Sets whether reports include holdings; then sidecars without a current list are called."""
        if wanted == self._holdings:
            return
        self._holdings = wanted
        for each in self._followed.values():
            known = each.known
            if wanted and known.holdings_at is None:
                self.probe(each.uid)
            elif not wanted and known.report is not None and known.report.holdings:
                each.known = replace(known, report=_without_holdings(known.report), held_at=None)

    def probe(self, uid: str) -> None:
        """Requests a report now, beside the long poll. Silent sidecars are called repeatedly in any case."""
        each = self._followed.get(uid)
        if each is not None and uid not in self._silent:
            each.again = True
            if each.asking is None:
                each.asking = asyncio.create_task(self._ask(each))

    async def push(self, uid: str, directive: Directive) -> None:
        """Sends the sidecar its directive. Raises SidecarError.
        A first attempt goes to all workers at once and can afford another handshake, so its connections
        close."""
        each = self._followed.get(uid)
        if each is None:
            raise SidecarError(f"pod {uid} is not followed")
        signed = replace(directive, signature=self._signer.sign_attempt(directive.attempt))
        body, keeps = self._directives.encode(signed), directive.attempt > 1
        self._record_report(each, await self._request(each, _BARE, self._call, body=body, keeps=keeps))

    async def close(self) -> None:
        """Stops polling."""
        tasks = [task for each in self._followed.values() for task in (each.listening, each.asking) if task]
        self.follow({})
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._shares_lines:
            await self._lines.close()

    async def _listen(self, each: FollowedSidecar) -> None:
        serial, wait = -1, 0.0
        while True:
            due = self._clock() + wait
            try:
                report = await self._poll_unless_in_vain(each, serial, wait)
                if report is not None:
                    self._record_report(each, report)
                    if wait == 0:
                        self._wake()  # a reconcile waits for this answer even if nothing changed
                    serial, (wait, pause) = report.serial, self._pace()
                    del report  # else it stays in memory, with all holdings, during the next poll
                else:
                    serial, wait, pause = -1, 0.0, _RETRY
            except SidecarError as error:
                now = self._clock()
                due = max(due, now - self._call)  # before that the call may have waited for its turn
                self._record_silence(each, error, min(due, now), error.sign or await _knock(each.host))
                retry = _FIRST_RETRY if each.known.answered_at is None else _RETRY
                pause = max(retry, len(self._silent) / _RETRIES_PER_SECOND)
                serial, wait = -1, 0.0
            await asyncio.sleep(pause)

    def _pace(self) -> tuple[float, float]:
        """Returns the seconds of a long poll, and until the next one. Both grow with the workers."""
        many = len(self._followed)
        return max(self._poll, many / _POLLS_PER_SECOND), max(_BREATH, many / _ANSWERS_PER_SECOND)

    async def _poll_unless_in_vain(self, each: FollowedSidecar, serial: int, wait: float) -> Report | None:
        """Returns the next report; None if a short call failed in the meantime."""
        if wait == 0:
            return await self._get_all(each, polls=True)
        query = {"after": str(serial), "wait": f"{wait:g}", **self._query(each.known)}
        try:
            async with asyncio.timeout(None) as each.waiting:
                return await self._request(each, query, wait + self._call, polls=True)
        except TimeoutError:
            return None
        finally:
            each.waiting = None

    async def _ask(self, each: FollowedSidecar) -> None:
        """Requests reports one after the other, as long as another one was requested by `probe`."""
        try:
            while each.again:
                each.again = False
                asked = self._clock()
                try:
                    self._record_report(each, await self._get_all(each))
                    self._wake()
                except SidecarError as error:
                    # The call may have waited for its turn before.
                    asked = max(asked, self._clock() - min(_AT_ONCE, self._call))
                    self._record_silence(each, error, asked, error.sign or await _knock(each.host))
                    if each.waiting is not None:
                        each.waiting.reschedule(0)
                        each.waiting = None
        finally:
            each.asking = None

    async def _get_all(self, each: FollowedSidecar, polls: bool = False) -> Report:
        """Returns the current report. Calls take turns; silent sidecars have turns of their own."""
        query = {"after": "-1", "wait": "0", **self._query(each.known)}
        seconds = min(_AT_ONCE, self._call)
        async with contextlib.AsyncExitStack() as turn:
            if each.uid in self._silent:
                await turn.enter_async_context(self._gate_of_silent)
            else:
                await turn.enter_async_context(self._gate)
                await turn.enter_async_context(self._lines.take_turn())
            request = asyncio.ensure_future(self._request(each, query, seconds, polls=polls))
            knock: asyncio.Task[HostProbe] | None = None
            try:
                # Probed while the answer is late, not afterwards: a recovery may wait for the result.
                if not (await asyncio.wait([request], timeout=max(0.0, seconds - _KNOCK)))[0]:
                    knock = asyncio.create_task(_knock(each.host))
                return await request
            except SidecarError as error:
                error.sign = await knock if knock is not None else None
                raise
            finally:
                for task in (request, knock):
                    if task is not None:
                        task.cancel()

    def _query(self, known: WorkerReport) -> Mapping[str, str]:
        """Returns the query of a request for a report.
        It names the holdings that are known, or that none are wanted; and to a sidecar without snapshots,
        such as a spare's, the size of the other workers' snapshots."""
        report, query = known.report, dict(_BARE)
        if self._holdings:
            is_known = report is not None and known.holdings_at is not None
            query = {"held": f"{report.instance}.{report.held}"} if is_known and report is not None else {}
        if self._snapshot and (report is None or not report.memory.snapshot):
            query["snapshot"] = str(self._snapshot)
        return query

    async def _request(
        self,
        each: FollowedSidecar,
        query: Mapping[str, str],
        seconds: float,
        *,
        body: Sequence[bytes] = (),
        polls: bool = False,
        keeps: bool = True,
    ) -> Report:
        """Requests a report, or sends a directive. `body`: the directive, in parts. Raises SidecarError.
        `polls`: uses the connection of long polls. `keeps`: another connection may stay open for more
        calls."""
        host, length = each.host, sum(map(len, body))
        method, path = ("PUT", "/v1/directive") if body else ("GET", "/v1/report")
        url = f"https://{join_address(*endpoint(host, names.CONTROL_PORT))}{path}"
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=self._call)
        headers = {"Authorization": self._token, signing.HEADER: each.signature}
        if not polls and not (keeps and host in self._lines.kept):
            headers["Connection"] = "close"
        if body:
            headers |= {"Content-Type": "application/json", "Content-Length": str(length)}
        try:
            async with self._lines.session.request(
                method,
                url,
                ssl=self._believed,
                data=in_pieces(body) if length > _PIECE else b"".join(body) or None,
                params=query,
                timeout=limits,
                server_hostname=names.TLS_SERVER_NAME,
                headers=headers,
                allow_redirects=False,
            ) as response:
                text = await _body(response, host, self._large)
                ahead = self._skew.measure(host, response.headers.get("Date"), self._clock())
                if response.status != 200:
                    raise SidecarError(
                        f"{host} answered {response.status}: {text[:300].decode(errors='replace')}",
                        f"answered with {response.status}",
                    )
        except SidecarError:
            raise
        except Exception as error:  # whatever a sidecar answers, it is called again
            what = f"{host} does not answer: {type(error).__name__} {error}"
            raise SidecarError(what, _failure_of(error)) from error
        return self._accept(each, text, ahead)

    def _accept(self, each: FollowedSidecar, text: bytes, ahead: float) -> Report:
        """Returns the report in an answer, without lists if the job's are too large. Raises SidecarError."""
        try:
            report = read_report(text)
        except Malformed as error:
            raise SidecarError(f"{each.host} sent no report: {error}") from error
        if report.job_uid != self._job_uid:
            raise SidecarError(f"{each.host} belongs to another job")
        report = clamp_report(to_operator_clock(self._signer.without_hearsay(report), ahead))
        each.size = 0
        size = len(text) + sum(other.size for other in self._followed.values())
        allowed = _OF_JOB + _OF_SIDECAR * len(self._followed)
        if size <= allowed:
            each.size = len(text)
            return report
        return without_lists(
            report,
            f"The sidecars of this job report {size} bytes together, {allowed} are the most; "
            f"the lists of worker {report.worker} are not used. See what it keeps or delete it.",
        )

    def _record_report(self, each: FollowedSidecar, report: Report) -> None:
        if self._followed.get(each.uid) is not each:
            return
        known, now = each.known, self._clock()
        before = known.report
        if report.pod_uid != each.uid:
            other = SidecarError("another pod answers at this address", "answered by another pod")
            self._record_silence(each, other, now, HostProbe.NOTHING)
            return
        same = before is not None and before.instance == report.instance
        if before is not None and same and report.serial < before.serial:
            return  # the answer to a long poll, overtaken by that to a short call
        if not self._holdings and report.holdings:
            report = _without_holdings(report)  # requested while they were still wanted
        held_at = None
        if before is not None and same and self._holdings and not report.has_holdings:
            known_at = known.holdings_at
            held_at = now if known_at is not None and report.held == before.held else known_at
            report = replace(report, holdings=before.holdings, held=before.held)
        self._silent.discard(each.uid)
        self._snapshot = max(self._snapshot, report.memory.snapshot)
        stepped = now if _stepped(before, report) else known.stepped_at
        each.known = WorkerReport(report, now, None, stepped_at=stepped, held_at=held_at)
        if before != report or known.silent_since is not None:
            self._wake()

    def _record_silence(
        self, each: FollowedSidecar, why: SidecarError, since: float, sign: HostProbe
    ) -> None:
        """Records a failed call. `since`: when an answer was due; `sign`: its host's reaction to a probe."""
        if self._followed.get(each.uid) is not each:
            return
        known = each.known
        self._silent.add(each.uid)
        failing = replace(known, host=sign, failure=why.failure)
        if known.silent_since is None:
            level = logging.INFO if known.answered_at else logging.DEBUG
            log.log(level, "sidecar of pod %s is silent: %s", each.uid, why)
            failing = replace(failing, silent_since=since)
        if failing != known:
            each.known = failing
            self._wake()


class DirectiveEncoder:
    """Encodes directives. A table of sources that many share is encoded once and never copied."""

    def __init__(self) -> None:
        self._table: SourceTable | None = None
        self._written = b""

    def encode(self, directive: Directive) -> tuple[bytes, ...]:
        """Returns the JSON of `to_json`, but for the order of fields, in parts."""
        restore = directive.restore
        if restore is None or not restore.world_size:  # each has a table of its own
            return (msgspec.json.encode(directive),)
        if restore.table is not self._table:
            self._table, self._written = restore.table, msgspec.json.encode(restore.table)
        outer, inner = _fields(directive, "restore"), _fields(restore, "table")
        before = b'%s,"restore":%s,"table":' % (outer[:-1], inner[:-1])
        return before, self._written, b"}}"


def _fields(message: Directive | Restore, without: str) -> bytes:
    """Returns the other fields as a JSON object."""
    return msgspec.json.encode(
        {field.name: getattr(message, field.name) for field in fields(message) if field.name != without}
    )


def read_report(text: bytes) -> Report:
    """Decodes a report. Raises Malformed, and nothing else."""
    report = decode_with(_REPORT.decode, text, _MOST_BODY)
    _share_equal_parts(report.holdings)
    return report


def _without_holdings(report: Report) -> Report:
    return replace(report, holdings=(), has_holdings=False)


def _share_equal_parts(holdings: Iterable[Holding]) -> None:
    """Replaces equal parts by one object, in place: ranks of a worker hold the same few versions."""
    same: dict[object, Any] = {}
    known, put = same.setdefault, object.__setattr__
    for each in holdings:
        version = each.version
        put(each, "version", known((version.step, version.attempt), version))
        put(each, "rank", known(each.rank, each.rank))
        put(each, "bytes", known(each.bytes, each.bytes))


async def in_pieces(parts: Iterable[bytes]) -> AsyncIterator[memoryview]:
    for part in parts:
        for at in range(0, len(part), _PIECE):
            yield memoryview(part)[at : at + _PIECE]


async def _body(response: aiohttp.ClientResponse, host: str, large: asyncio.Semaphore) -> bytes:
    """Reads a bounded number of bytes, not decompressed. Raises SidecarError."""
    found = bytearray()
    async with contextlib.AsyncExitStack() as turn:
        async for piece in response.content.iter_any():
            if len(found) <= _SMALL_BODY < len(found) + len(piece):
                await turn.enter_async_context(large)
            found += piece
            if len(found) > _MOST_BODY:
                raise SidecarError(f"{host} answers with more than {_MOST_BODY} bytes")
    return bytes(found)


async def _knock(address: str) -> HostProbe:
    """Probes the control port: the kernel refuses for an ended process and accepts for a busy one."""
    try:
        async with asyncio.timeout(_KNOCK):
            _, writer = await asyncio.open_connection(*endpoint(address, names.CONTROL_PORT))
    except ConnectionRefusedError:
        return HostProbe.REFUSED
    except (TimeoutError, OSError):
        return HostProbe.NOTHING
    writer.close()
    return HostProbe.ACCEPTED


def _stepped(before: Report | None, after: Report) -> bool:
    """Returns whether the trainer made a step. A restarted sidecar's first step is an old one."""
    if before is None or before.attempt != after.attempt or before.trainer.step is None:
        return False
    return (after.trainer.step or 0) > before.trainer.step
