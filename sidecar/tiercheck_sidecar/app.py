"""Runs a sidecar: takes inventory, serves, follows directives, finishes uploads, ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from aiohttp import web

from tiercheck.connections import UnauthenticatedClients
from tiercheck.protocol import names
from tiercheck.protocol.directive import Directive, Phase
from tiercheck.protocol.report import SPARE
from tiercheck.redaction import log_redacted
from tiercheck_sidecar.control.api import ControlApi, CoordinatorServer, GuardedPort, server_context
from tiercheck_sidecar.control.report import Reporter, own_credentials, render
from tiercheck_sidecar.exchange.addresses import OwnAddress, own_addresses
from tiercheck_sidecar.exchange.channel import why_no_ucx
from tiercheck_sidecar.exchange.handshake import Identity
from tiercheck_sidecar.exchange.server import ExchangeServer, HeartbeatSender
from tiercheck_sidecar.model.config import ConfigError, SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.watches import named_addresses
from tiercheck_sidecar.node_memory import FolderClaim, entries, sweep_job
from tiercheck_sidecar.offload import JobStore, RemoteListing, RemoteSource, Uploader
from tiercheck_sidecar.pacing import EVERY, ThrottleWatch, read_cpu_stat, spare_hands
from tiercheck_sidecar.parity.holder import ParityHolder, ParitySession
from tiercheck_sidecar.rehearsal.rehearser import Rehearser
from tiercheck_sidecar.remote import authority_file
from tiercheck_sidecar.replicate.replicate import ParitySender, Replicator
from tiercheck_sidecar.restore.restore import Restorer
from tiercheck_sidecar.restore.sources import FOLDER, RestoreSources
from tiercheck_sidecar.trainer.pod_socket import TrainerSocket
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault.stock import MemoryStock
from tiercheck_sidecar.versions.coordinator import Coordinator
from tiercheck_sidecar.versions.reclaim import Reclaimer
from tiercheck_sidecar.versions.tier_line import PATH
from tiercheck_sidecar.versions.tiers import TierClient
from tiercheck_sidecar.versions.watermark import may_go

log = logging.getLogger(__name__)

_HAND_OVER = 10.0
"""Seconds of the pod's grace for the last copies."""
_LAST_REQUEST = 2.0
"""Seconds for the controller to request the last report."""
_MOST_STRANGERS = 256
"""The limit of unauthenticated connections to an HTTP port, from addresses that no directive names."""

_COLLECT_AFTER = 100_000
"""The number of objects made and not freed, after which garbage is collected."""

_BESIDE = {"offload", "sweep", "heartbeat", "throttling", "rehearse"}
"""Loops that are worth less than what this process holds and serves: their failures never end it."""


class Sidecar:
    """All parts of one sidecar process, wired together."""

    def __init__(
        self, config: SidecarConfig, interfaces: Callable[[], Sequence[OwnAddress]] = own_addresses
    ) -> None:
        """`interfaces` returns the addresses by which the pod's networks are found."""
        self.config = config
        self.state = SidecarState(config)
        hands = spare_hands(config.cgroup_dir)
        self.vault = Vault(
            config.vault_dir,
            config.memory_limit,
            config.ranks,
            self.state.bump,
            self.state.tagger,
            hands=hands,
        )
        self.reporter = Reporter(self.state, self.vault)
        self.reclaimer = Reclaimer(self.state, self.vault)
        self.identity = Identity(
            config.job_uid,
            config.worker,
            config.token,
            config.pod_ip,
            lambda: self.state.policy.peer_encrypted,
            lambda: self.state.policy.peer_ucx and not why_no_ucx(),
        )
        self.exchange = ExchangeServer(
            self.state, self.vault, self.identity, config.exchange_port, interfaces
        )
        self.replicator = Replicator(self.state, self.vault, self.identity, names.EXCHANGE_PORT)
        self.coordinator = Coordinator(self.state)
        self.heartbeat = HeartbeatSender(self.state, self.identity, names.EXCHANGE_PORT)
        self.stores = JobStore(config)
        inventory = RemoteListing(self.state, self.coordinator.stored)
        self.uploader = Uploader(self.state, self.vault, self.stores, inventory, self.coordinator.manifest)
        remote = RemoteSource(self.state, self.stores)
        self.reach = RestoreSources(self.state, self.vault, self.identity, names.EXCHANGE_PORT, remote)
        self.restorer = Restorer(self.state, self.vault, self.reach)
        self.rehearser = Rehearser(self.state, self.vault, self.reach)
        self.socket = TrainerSocket(self.state, self.vault, self.reach, hands)
        self.parity = ParitySender(
            self.state, self.vault, self.identity, names.EXCHANGE_PORT, self.replicator.bucket
        )
        self.parity_holder = ParityHolder(self.state, self.vault)
        self.exchange.extra_handlers = lambda wire, claim: (
            ParitySession(self.state, self.parity_holder, wire, claim).handlers
        )
        self.reporter.holders_lack = self._holders_lack
        self.reporter.settled = self._settled
        self.tiers = TierClient(self.state, self.vault, self._acknowledged, self.uploader.uploaded)
        self._ports: list[GuardedPort] = []
        self.state.when_identified(self._identified)

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT, or until new credentials require a new process.
        Raises OSError if an address or the memory volume cannot be used."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        # Clients are not known here, so a connection is closed once it was answered.
        await self._serve(
            GuardedPort(self._health(), UnauthenticatedClients(lambda: _MOST_STRANGERS)),
            self.config.metrics_port,
        )
        await asyncio.to_thread(self._open_memory)
        # Not before: verifying a large memory takes long, may be cut off, and cannot be interrupted.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self.socket.start()
        self.exchange.start()
        for name, loop_body in self._loops():
            self.state.threads.loop(name, loop_body, vital=name not in _BESIDE)
        control = ControlApi(self.state, self.reporter)
        api = control.build(web.get(PATH, CoordinatorServer(self.coordinator).upgrade))
        strangers = UnauthenticatedClients(
            self._most_strangers, lambda: named_addresses(self.state.directive)
        )
        port = GuardedPort(api, strangers, server_context(self.config))
        control.on_proof = port.believe
        await self._serve(port, self.config.control_port)
        self._ready = True
        who = "a spare" if self.state.config.worker == SPARE else f"worker {self.state.config.worker}"
        log.info("sidecar of %s is ready on %s", who, self.config.pod_ip)
        renewal = asyncio.create_task(
            wait_for_renewal(self._remote_mounts(), lambda: self.state.remote.reachable)
        )
        renewal.add_done_callback(lambda _: stop.set())
        await stop.wait()
        renewal.cancel()
        self.state.begin_ending()
        await asyncio.to_thread(self._hand_over)
        await asyncio.to_thread(self._flush)
        await asyncio.to_thread(self._await_last_request, control)
        self.state.stop()
        self.socket.stop()
        self.exchange.stop()
        self.stores.close()
        for each in self._ports:
            await each.stop()
        if self._claim is not None and self._over:
            self._claim.discard()

    _ready = False
    _claim: FolderClaim | None = None

    def _open_memory(self) -> None:
        config = self.config
        if config.node_memory_keep is not None:
            self._claim = FolderClaim(config.vault_dir, config.worker, time.time())
            # A spare succeeds no earlier pod.
            adopted = self._claim.adopt() if config.worker != SPARE else 0
            log.info("%d slots of earlier pods of this worker lie in the node's memory", adopted)
        shutil.rmtree(config.vault_dir / FOLDER, ignore_errors=True)
        self.vault.open()

    def _sweep(self) -> None:
        """Removes what moved workers of this job left on this node."""
        keep = self.config.node_memory_keep
        while keep is not None and not self.state.stopping:
            sweep_job(self.config.memory_dir, keep, time.time())
            self.state.wait_until(lambda: False, max(1.0, keep / 4))

    def _watch_throttling(self) -> None:
        watch = ThrottleWatch()
        while not self.state.stopping:
            self.state.problem(
                "SidecarThrottled", watch.look(time.monotonic(), read_cpu_stat(self.config.cgroup_dir))
            )
            self.state.wait_until(lambda: False, EVERY)

    @property
    def _over(self) -> bool:
        return self.state.directive is not None and self.state.directive.phase is Phase.FINISH

    def _loops(self) -> list[tuple[str, Callable[[], None]]]:
        return [
            ("restore", self.restorer.run),
            ("reclaim", self.reclaimer.run),
            ("prepare", self.reclaimer.prepare),
            ("replicate", self.replicator.run),
            ("parity", self.parity.run),
            ("parity-blocks", self.parity_holder.run),
            ("coordinate", self.coordinator.run),
            ("offload", self.uploader.run),
            ("tiers", self.tiers.run),
            ("sweep", self._sweep),
            ("heartbeat", self.heartbeat.run),
            ("throttling", self._watch_throttling),
            ("rehearse", self.rehearser.run),
        ]

    def _identified(self, config: SidecarConfig) -> None:
        log.info("this is worker %d", config.worker)
        self.vault.identify(config.ranks)
        self.identity.worker = config.worker
        if self._claim is not None:
            self._claim.identify(config.worker)

    def _acknowledged(self, directive: Directive) -> list[tuple[int, Mapping[int, MemoryStock]]]:
        return [*self.replicator.acknowledged(directive), *self.parity.acknowledged(directive)]

    def _holders_lack(self) -> bool:
        return self.replicator.holders_lack() or self.parity.holders_lack()

    def _hand_over(self) -> None:
        """Copies to the holders what they lack, when asked to end while the job goes on (an eviction)."""
        state, end, seen = self.state, time.monotonic() + min(_HAND_OVER, self.config.flush_seconds), -1
        while time.monotonic() < end and not state.fenced:
            directive = state.directive
            if directive is None or directive.phase is not Phase.RELEASE:
                return
            if not self._holders_lack():
                return
            seen = state.wait(seen, timeout=0.2)

    def _flush(self) -> None:
        """Waits at the end of a job while its last complete version can still reach the remote tier."""
        state, seen = self.state, -1
        seconds = self.config.flush_seconds
        end = time.monotonic() + seconds
        while self._over and self.config.remote and not state.fenced and not self._settled():
            if time.monotonic() >= end:
                log.error(
                    "the last version did not reach the remote tier within %.0f s: %s",
                    seconds,
                    self._why_not_uploaded(),
                )
                return
            seen = state.wait(seen, timeout=0.5)

    def _settled(self) -> bool:
        """Returns whether the job is over and this sidecar has no uploads pending."""
        if not self._over:
            return False
        if not self.config.remote:
            return self.tiers.end().final
        return self.coordinator.may_go if self.state.config.worker == 0 else may_go(self.tiers.end())

    def _why_not_uploaded(self) -> str:
        if self.state.remote.reachable is False:
            return (
                f"{self.state.remote.message or 'it does not answer'}. Check spec.tiers.remote and its "
                "credentials"
            )
        others = self.coordinator.waits_for() if self.state.config.worker == 0 else []
        if others:
            return f"the trainer of worker {others[0]} has not ended"
        return "set terminationGracePeriodSeconds in spec.template to give it more time"

    def _await_last_request(self, control: ControlApi) -> None:
        """Waits at the end of a job until the controller has the last report, which it asks for again."""
        end, seen = time.monotonic() + _LAST_REQUEST, -1
        while self._over and not control.has_sent_all() and time.monotonic() < end:
            seen = self.state.wait(seen, timeout=0.1)

    def _health(self) -> web.Application:
        async def healthz(_: web.Request) -> web.Response:
            return web.Response(text="ok\n")

        async def readyz(_: web.Request) -> web.Response:
            return (
                web.Response(text="ready\n") if self._ready else web.Response(status=503, text="starting\n")
            )

        async def scrape(_: web.Request) -> web.Response:
            return web.Response(
                body=render(self.reporter), headers={"Content-Type": "text/plain; version=0.0.4"}
            )

        @web.middleware
        async def once(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            response = await handler(request)
            response.force_close()
            return response

        app = web.Application(middlewares=[once])
        app.add_routes(
            [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", scrape)]
        )
        return app

    def _remote_mounts(self) -> list[Path]:
        """Returns the folders of the Secret and the ConfigMap that the remote tier was opened with."""
        authorities = authority_file(self.config.remote or "")
        folders = (self.config.remote_credentials_dir, authorities and authorities.parent)
        return [folder for folder in folders if folder is not None]

    async def _serve(self, port: GuardedPort, number: int) -> None:
        self._ports.append(port)
        await port.start(self.config.pod_ip, number)

    def _most_strangers(self) -> int:
        """Returns the limit of unauthenticated connections: all workers may call worker 0 at once."""
        directive = self.state.directive
        return _MOST_STRANGERS + (directive.workers if directive else 0)


_LOOK_EVERY = 2.0
"""Seconds between two checks of the remote tier's credentials and authorities."""


async def wait_for_renewal(folders: Sequence[Path], reachable: Callable[[], bool | None]) -> None:
    """Returns when a Secret or ConfigMap has changed and the remote tier is not reachable; or never.

    An environment never follows its Secret, and the authorities are read once. The kubelet starts the process
    again with the new values, and everything it holds is found again on the memory volume. It ends only while
    the remote tier cannot be reached: changed credentials are no reason to disturb what works.
    """
    before = [fingerprint(folder) for folder in folders]
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        if reachable() is False and [fingerprint(folder) for folder in folders] != before:
            log.warning(
                "the remote tier's authorities or credentials have changed; the sidecar ends to be started "
                "with them"
            )
            return


def fingerprint(folder: Path) -> str:
    """Returns a hash of names and contents; what does not exist is an empty folder."""
    seen = hashlib.sha256()
    # The kubelet's own links and time-stamped folders begin with two dots.
    for file in (path for path in entries(folder) if not path.name.startswith("..")):
        with contextlib.suppress(OSError):
            content = file.read_bytes()
            seen.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return seen.hexdigest()


def prepare_process() -> None:
    """Collects garbage less often, for the coordinator of thousands of workers.
    Their reports are many live objects: at Python's own 700, collection took a quarter of its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 10, 20)


def main() -> int:
    """Returns 0 after an orderly end, 1 if an address or the volume fails, 2 for a wrong environment."""
    log_redacted(known=own_credentials())
    prepare_process()
    try:
        config = SidecarConfig.from_env()
    except ConfigError as error:
        log.error("%s", error)
        return 2
    try:
        asyncio.run(Sidecar(config).run())
    except OSError as error:
        log.error("the sidecar cannot run: %s", error)
        return 1
    return 0
