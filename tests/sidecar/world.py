"""Makes a small world: one job's credentials, real sidecar processes, a scripted trainer."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import itertools
import json
import os
import secrets
import signal
import socket
import ssl
import struct
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from tests import operator_key
from tests.sidecar.exchange.pod_networks import PodNetworks
from tests.sidecar.nursery import Process, nursery
from tiercheck.protocol import names
from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.directive import Directive, Peer, Phase, Policy, Restore, Source, SourceTable, Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.local import REQUESTS, Hello, LauncherEvent, Order, Reply, ReportProgress, Welcome
from tiercheck.protocol.names import join_address
from tiercheck.protocol.report import Report, RestoreState
from tiercheck.protocol.version import Branch, History, Kind, Version
from tiercheck_operator.kubernetes.certificates import issue_pair
from tiercheck_sidecar.decoding import decode

T = TypeVar("T")
MakeWorld = Callable[..., "World"]
DEADLINE = 40.0
_HOSTS = itertools.count(1)
JOB_UID = "uid-of-the-job"
LAST_WORD = "tiercheck_sidecar.app:_LAST_REQUEST"
COME_BACK = "tiercheck_sidecar.model.trainer_watch:COME_BACK_SECONDS"


def until(condition: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """Wait for a condition. Fails with `what` at the deadline."""
    end, pause = time.monotonic() + deadline, 0.01
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(pause)
        # What is waited for shares the machine's few cores with whoever asks for it.
        pause = min(0.1, 1.2 * pause)


def write_credentials(folder: Path) -> str:
    """ca.crt, tls.crt, tls.key and token of one job; returns the token."""
    folder.mkdir(parents=True)
    pair = issue_pair("job CA", [names.TLS_SERVER_NAME], datetime.timedelta(days=1))
    (folder / "ca.crt").write_bytes(pair.ca)
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)
    token = secrets.token_hex(32)
    (folder / "token").write_text(token)
    (folder / names.OPERATOR_PUBLIC).write_bytes(operator_key.PUBLIC)
    return token


class World:
    """One job. Sidecars are real processes; everything they keep lies under `root`."""

    def __init__(
        self, root: Path, memory: Path, workers: int = 1, procs: int = 1, limit: int = 64 << 20
    ) -> None:
        self.root, self.memory, self.workers, self.procs, self.limit = root, memory, workers, procs, limit
        self.network = f"127.{os.getpid() % 200 + 20}.{next(_HOSTS) % 250}"
        self.token = write_credentials(root / "credentials")
        self.remote: str | None = None
        self.cluster = ""
        """UID of the cluster, if it is known."""
        self.spares: set[int] = set()
        """Workers whose sidecar is started as a spare, which learns who it is."""
        self.node_memory = False
        """Whether memory is the node's: each worker has a node of its own."""
        self.cgroup: Path | None = None
        """In place of the sidecars' own cgroup."""
        self.grace: int | None = None
        """Seconds between SIGTERM and SIGKILL that the sidecars are told."""
        self.patience: dict[str, float | tuple[float, float]] = {LAST_WORD: 0.1}
        """Seconds that constants of the sidecars have in place of their own, by `module:name`."""
        self.on_one_host = False
        """Whether all are in the network of one node: then they have one address, and ports of their own."""
        self.networks: PodNetworks | None = None
        """Whether each pod has interfaces of its own."""
        self.pods = {worker: f"pod-{worker}" for worker in range(workers)}
        self.places = {worker: worker for worker in range(workers)}
        """By worker: which of the pods it is, by what that pod was born as."""
        self.history = History()
        self.base: Version | None = None
        self.others = 0
        """Ranks that saved it, if they are not as many as now."""
        self.begin_from: Version | None = None
        """Its snapshot, if all ranks are told one."""
        self.attempt = 0
        self.policy = Policy(snapshot_every=1, remote_every=1_000_000, remote_keep=5)
        self._processes: dict[int, Process] = {}
        self._kept: dict[int, http.client.HTTPConnection] = {}
        self._life = 0

    # Processes

    def host(self, worker: int) -> str:
        return f"{self.network}.{1 if self.on_one_host else self.places.get(worker, worker) + 1}"

    def first_port(self, worker: int) -> int:
        return 12000 + 3 * self.places.get(worker, worker) if self.on_one_host else names.CONTROL_PORT

    def peer(self, worker: int) -> Peer:
        return Peer(
            worker, join_address(self.host(worker), self.first_port(worker) if self.on_one_host else None)
        )

    def memory_dir(self, worker: int) -> Path:
        return self.memory / f"worker-{self.places.get(worker, worker)}"

    def run_dir(self, worker: int) -> Path:
        return self.root / f"r{self.places.get(worker, worker)}"

    def env(self, worker: int) -> dict[str, str]:
        env = {
            names.ENV_JOB: "default/gpt",
            names.ENV_JOB_UID: JOB_UID,
            names.ENV_WORKER: names.SPARE_WORKER
            if worker in self.spares
            else str(self.places.get(worker, worker)),
            names.ENV_PROCS_PER_WORKER: str(self.procs),
            names.ENV_POD_UID: self.pods[worker],
            names.ENV_POD_IP: self.host(worker),
            names.ENV_MEMORY_DIR: str(self.memory_dir(worker)),
            names.ENV_MEMORY_LIMIT: str(self.limit),
            names.ENV_RUN_DIR: str(self.run_dir(worker)),
            names.ENV_CREDENTIALS_DIR: str(self.root / "credentials"),
        }
        if self.on_one_host:
            env[names.ENV_FIRST_PORT] = str(self.first_port(worker))
        if self.grace is not None:
            env[names.ENV_GRACE_SECONDS] = str(self.grace)
        if self.cgroup is not None:
            env["TIERCHECK_CGROUP_DIR"] = str(self.cgroup)
        if self.node_memory:
            env[names.ENV_NODE_MEMORY_KEEP] = "3600"
        if self.remote:
            env[names.ENV_REMOTE] = self.remote
        if self.cluster:
            env[names.ENV_CLUSTER] = self.cluster
        return env

    def start(self, *workers: int) -> None:
        for worker in workers or range(self.workers):
            self._life += 1
            log = self.root / f"sidecar-{worker}-{self._life}.log"
            network = self.networks.path(self.places.get(worker, worker)) if self.networks else ""
            self._processes[worker] = nursery().start(
                {**os.environ, **self.env(worker)}, log, self.patience, network
            )
        for worker in workers or range(self.workers):
            until(lambda worker=worker: self.is_ready(worker), f"sidecar {worker} is ready")

    def launch(self) -> Self:
        """Start every sidecar and begin the first attempt from scratch. Returns itself."""
        self.start()
        self.begin()
        return self

    def is_ready(self, worker: int) -> bool:
        assert self._processes[worker].poll() is None, self.logs(worker)
        connection = http.client.HTTPConnection(self.host(worker), self.first_port(worker) + 2, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def logs(self, worker: int) -> str:
        return "\n".join(path.read_text() for path in sorted(self.root.glob(f"sidecar-{worker}-*.log")))

    def kill(self, *workers: int) -> None:
        for worker in workers:
            process = self._processes.pop(worker)
            process.kill()
            process.wait()

    def lose(self, *workers: int) -> None:
        """The pod is gone, and its memory with it."""
        self.kill(*workers)
        for worker in workers:
            for path in self.memory_dir(worker).iterdir():
                path.unlink()

    def renew(self, *workers: int) -> None:
        """Other pods, whose memory is empty, take their places."""
        self.lose(*workers)
        self.start(*workers)

    def rename(self, old: int, new: int) -> None:
        """The pod of worker `old` is that of worker `new`, who is lost, from the next attempt on."""
        self.places[new], self.pods[new] = self.places.pop(old), self.pods.pop(old)
        self._processes[new] = self._processes.pop(old)

    def pause(self, worker: int) -> None:
        self._processes[worker].send_signal(signal.SIGSTOP)

    def resume(self, worker: int) -> None:
        self._processes[worker].send_signal(signal.SIGCONT)

    def terminate(self, worker: int) -> int:
        self.ask_to_end(worker)
        return self.end_of(worker)

    def ask_to_end(self, worker: int, number: int = signal.SIGTERM) -> None:
        self._processes[worker].send_signal(number)

    def has_ended(self, worker: int) -> bool:
        return self._processes[worker].poll() is not None

    def end_of(self, worker: int) -> int:
        """Its exit code."""
        return self._processes.pop(worker).wait(DEADLINE)

    def close(self) -> None:
        for connection in self._kept.values():
            connection.close()
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self._processes.values():
            process.wait()

    # Controller

    def call(
        self,
        worker: int,
        method: str,
        path: str,
        body: bytes | None = None,
        token: str | None = None,
        *,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """One call of the control API, as the operator makes it, on a connection of its own."""
        connection = self._connect(worker)
        try:
            shown = {**self._signed(worker, token), **(headers or {})}
            connection.request(method, path, body, shown)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def report(self, worker: int) -> Report:
        """On a connection that is kept while it works: handshakes were most of what waiting cost."""
        while True:
            kept = self._kept.pop(worker, None)
            connection = kept or self._connect(worker)
            try:
                connection.request("GET", "/v1/report", headers=self._signed(worker))
                response = connection.getresponse()
                status, body = response.status, response.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                if kept is None:
                    raise
                continue  # the process at its other end is another by now
            self._kept[worker] = connection
            assert status == 200, body
            return decode(body, Report)

    def _connect(self, worker: int) -> http.client.HTTPConnection:
        context = ssl.create_default_context(cafile=str(self.root / "credentials" / "ca.crt"))
        raw = socket.create_connection((self.host(worker), self.first_port(worker)), timeout=DEADLINE)
        connection = http.client.HTTPConnection(self.host(worker), names.CONTROL_PORT)
        connection.sock = context.wrap_socket(raw, server_hostname=names.TLS_SERVER_NAME)
        connection.auto_open = 0
        return connection

    def _signed(self, worker: int, token: str | None = None) -> dict[str, str]:
        """What the operator says of itself to the worker's sidecar."""
        token = self.token if token is None else token
        return {"Authorization": f"Bearer {token}", **operator_key.sign_pod(self.pods[worker])}

    def new_attempt(self, version: Version | None = None) -> None:
        """Begin the next attempt, from `version` or from scratch."""
        self.attempt += 1
        ranks = self.workers * self.procs
        self.history = self.history.after(self.attempt, version.step if version else 0, ranks)
        if version is None:
            self.history = History((Branch(self.attempt, 0, ranks),))
        self.base = version

    def directive(
        self,
        worker: int,
        phase: Phase,
        sources: dict[int, tuple[Source, ...]] | None = None,
        holders: tuple[int, ...] | None = None,
    ) -> Directive:
        """Copies go to the next worker unless `holders` names others (as distances)."""
        distances = (1,) if holders is None and self.workers > 1 else holders or ()
        ranks = range(self.others) if self.others else range(worker * self.procs, (worker + 1) * self.procs)
        restore = None
        if self.base is not None:
            restore = Restore(self.base, SourceTable.of(sources or {}, ranks), self.others, self.begin_from)
        return Directive(
            job_uid=JOB_UID,
            worker=worker,
            workers=self.workers,
            procs_per_worker=self.procs,
            attempt=self.attempt,
            phase=phase,
            history=self.history,
            policy=self.policy,
            restore=restore,
            holders=tuple(self.peer((worker + d) % self.workers) for d in distances),
            hosted=tuple(self.peer((worker - d) % self.workers) for d in distances),
            coordinator=self.peer(0),
            master_host=self.host(0),
            master_port=29500,
            placement=repr(distances),
            pod_uid=self.pods[worker],
            revision=f"{self.attempt}-{phase.value}-{self._life}",
            signature=operator_key.sign_attempt(JOB_UID, self.attempt).signature,
        )

    def direct(self, phase: Phase, sources: dict[int, tuple[Source, ...]] | None = None, **more: Any) -> None:
        """Send the directive of `phase` to every running sidecar."""
        for worker in sorted(self._processes):
            status, body = self.send(worker, self.directive(worker, phase, sources, **more))
            assert status == 200, body

    def send(self, worker: int, directive: Directive) -> tuple[int, bytes]:
        """As an operator that has just read the worker's report sends it."""
        known = self.report(worker)
        ordered = replace(directive, instance=known.instance, number=known.followed + 1)
        return self.call(worker, "PUT", "/v1/directive", to_json(ordered))

    def begin(
        self, version: Version | None = None, sources: dict[int, tuple[Source, ...]] | None = None
    ) -> None:
        """Next attempt: hold, restore everywhere, release."""
        self.hold(version, sources)
        self.direct(Phase.RELEASE, sources)

    def restore_in_vain(
        self, version: Version, sources: dict[int, tuple[Source, ...]] | None = None, **more: Any
    ) -> None:
        """Next attempt, until worker 0 says that it cannot restore it."""
        self.new_attempt(version)
        self.direct(Phase.HOLD, sources, **more)
        until(lambda: self.report(0).restore.state is RestoreState.FAILED, "it gives up")

    def hold(
        self, version: Version | None = None, sources: dict[int, tuple[Source, ...]] | None = None
    ) -> None:
        """Next attempt, until every sidecar has what it is to restore."""
        self.new_attempt(version)
        self.direct(Phase.HOLD, sources)
        for worker in sorted(self._processes):
            until(
                lambda worker=worker: self.report(worker).restore.state.value == "Ready",
                f"worker {worker} restored",
            )

    def from_peer(self, worker: int) -> Source:
        return Source(Tier.PEER, self.peer(worker))

    def reach(self, tier: str, version: Version, worker: int = 0) -> None:
        """Wait until the worker knows that this version is complete in this tier."""
        until(
            lambda: getattr(self.report(worker).watermarks, tier) == version,
            f"{version} is complete in tier {tier}, as worker {worker} knows",
        )

    def save_everywhere(self, *steps: int) -> None:
        """Every rank captures each step, and all copies are made."""
        with self.ranks() as ranks:
            for step in steps:
                for rank in ranks:
                    until(lambda rank=rank, step=step: rank.save(step), f"a free slot for step {step}")
                self.reach("peer", Version(step, self.attempt))

    def train(self, last: int, first: int = 1, size: int = 300_000, delta: int = 40_000) -> None:
        """Every rank saves a snapshot of the first step and a delta of each later one, and all of it is
        copied.
        """
        with self.ranks(size, delta) as ranks:
            for rank in ranks:
                until(lambda rank=rank: rank.save(first), "a free slot")
            for step in range(first + 1, last + 1):
                for rank in ranks:
                    until(lambda rank=rank, step=step: rank.save_delta(step, delta), f"a slot for {step}")
            self.reach("local" if self.workers == 1 else "peer", Version(last, self.attempt))

    def use_directory(self, every: int = 10, keep: int = 5) -> Path:
        """Makes a shared directory the job's remote tier. Returns its path."""
        store = self.root / "store"
        store.mkdir()
        self.remote = json.dumps({"directory": {"path": str(store)}})
        self.policy = replace(self.policy, remote_every=every, remote_keep=keep)
        return store

    def metrics(self, worker: int = 0) -> str:
        with urllib.request.urlopen(
            f"http://{self.host(worker)}:{names.METRICS_PORT}/metrics", timeout=10
        ) as answer:
            return str(answer.read().decode())

    # Trainers

    def rank(self, rank: int, attempt: int | None = None, world_size: int | None = None) -> FakeRank:
        worker = rank // self.procs
        hello = Hello(
            role="rank",
            pid=os.getpid(),
            rank=rank,
            world_size=self.workers * self.procs if world_size is None else world_size,
            attempt=self.attempt if attempt is None else attempt,
        )
        return FakeRank(self.run_dir(worker) / names.SOCKET_NAME, hello)

    @contextlib.contextmanager
    def ranks(self, size: int = 300_000, delta: int = 0) -> Iterator[list[FakeRank]]:
        """Every rank of the job, with slots reserved for snapshots of `size` and deltas of at most `delta`
        bytes."""
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(self.rank(rank)) for rank in range(self.workers * self.procs)]
            for rank in ranks:
                assert not rank.welcome.error, rank.welcome
                assert rank.reserve(size, delta).ok
            yield ranks

    def holds(
        self, worker: int, rank: int, version: Version, tier: Tier | None = None, kind: Kind = Kind.SNAPSHOT
    ) -> bool:
        return any(
            (each.rank, each.version, each.kind) == (rank, version, kind) and tier in (None, each.tier)
            for each in self.report(worker).holdings
        )


class Lines:
    """A connection of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE)
        self.socket.connect(str(path))
        self._file = self.socket.makefile("rb")

    def send(self, message: object) -> None:
        self.socket.sendall(to_json(message) + b"\n")

    def receive(self, cls: type[T]) -> T:
        line = self._file.readline()
        assert line, "the sidecar closed the connection"
        return decode(line, cls)

    def close(self) -> None:
        self._file.close()
        self.socket.close()


class FakeLauncher(Lines):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.send(Hello(role="launcher", pid=1))
        self.tell("idle", 0)

    def order(self) -> Order:
        """The next one; like a launcher below which nothing runs it says at once that it waits for the
        release."""
        order = self.receive(Order)
        if order.phase is Phase.HOLD:
            self.tell("idle", order.attempt)
        return order

    def tell(self, event: str, attempt: int, **more: Any) -> None:
        self.send(LauncherEvent(event, attempt, **more))


class FakeRank(Lines):
    """A trainer that saves recognisable bytes."""

    def __init__(self, path: Path, hello: Hello) -> None:
        super().__init__(path)
        self.hello = hello
        self.layout: SlotLayout | None = None
        self.send(hello)
        self.welcome = self.receive(Welcome)

    def __enter__(self) -> FakeRank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, op: str, **more: Any) -> Reply:
        self.send(REQUESTS[op](**more))
        return self.receive(Reply)

    def reserve(self, size: int, delta: int = 0) -> Reply:
        self.layout = layout(size)
        return self.ask("reserve", bytes=self.layout.size, delta_bytes=layout(delta).size if delta else 0)

    def begin(self, step: int, kind: Kind = Kind.SNAPSHOT, size: int = 0) -> Reply:
        return self.ask("begin", step=step, kind=kind, bytes=size)

    def write(
        self,
        path: str,
        step: int,
        finish: bool = True,
        kind: Kind = Kind.SNAPSHOT,
        plan: SlotLayout | None = None,
    ) -> None:
        plan = plan or self.layout
        assert plan is not None
        header = plan.header(
            self.hello.rank, Version(step, self.hello.attempt), self.hello.world_size, {}, kind
        )
        with open(path, "r+b") as file:
            file.seek(8)
            file.write(header)
            file.write(content(self.hello.rank, step, plan.size - plan.data_begin))
            if finish:
                file.seek(0)
                file.write(plan.state_word)

    def send_progress(self, step: int, not_finite: int = 0) -> None:
        self.send(ReportProgress(step, not_finite=not_finite))

    def save(self, step: int) -> bool:
        """Capture `step`; False if it was skipped."""
        return self._capture(step, Kind.SNAPSHOT)

    def save_delta(self, step: int, size: int = 20_000) -> bool:
        """Capture the delta of `step`, of about `size` bytes; False if it was skipped."""
        return self._capture(step, Kind.DELTA, layout(size))

    def _capture(self, step: int, kind: Kind, plan: SlotLayout | None = None) -> bool:
        size = plan.size if plan else 0
        reply = self.begin(step, kind, size)
        assert reply.ok, reply
        if reply.skip:
            return False
        self.write(reply.path, step, kind=kind, plan=plan)
        done = self.ask("complete", step=step, path=reply.path, bytes=size)
        assert done.ok, done
        return True


def layout(size: int) -> SlotLayout:
    return SlotLayout.plan([("model.weight", "U8", (size,), size), ("bias", "F32", (3,), 12)])


def content(rank: int, step: int, size: int) -> bytes:
    """Bytes that tell rank and step apart in every piece."""
    pattern = struct.pack("<QQ", rank + 1, step + 1) * 16 + os.urandom(0)
    return (pattern * (size // len(pattern) + 1))[:size]


def flip(path: Path, offset: int) -> None:
    """One bit of a file is not what it was."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (octet,) = file.read(1)
        file.seek(offset)
        file.write(bytes([octet ^ 1]))


def error_of(body: bytes) -> str:
    return str(json.loads(body)["error"])
