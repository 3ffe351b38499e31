"""Several operator processes on one laptop cluster, of which one leads."""

from __future__ import annotations

import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiercheck_local.cluster import LocalCluster

PATIENCE = 90.0


@dataclass(frozen=True)
class Replica:
    name: str
    process: subprocess.Popen[bytes]
    address: str

    def page(self, path: str) -> str:
        """Empty if it does not answer, or not with 200."""
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return ""

    @property
    def leads(self) -> bool:
        """By its own word; a stopped process says nothing."""
        return "\ntiercheck_leader 1.0" in self.page("/metrics")


@dataclass
class Replicas:
    """Use `leader` and `other` while all of them run."""

    cluster: LocalCluster
    env: Mapping[str, str]
    running: list[Replica] = field(default_factory=list)
    _made: int = 0

    def start(self) -> Replica:
        """Returns when it is ready to take over."""
        self._made += 1
        name = f"replica-{self._made}"
        process = self.cluster.start_operator({**self.env, "TIERCHECK_IDENTITY": name}, name)
        replica = Replica(name, process, self.cluster.metrics_address)
        self.running.append(replica)
        self.cluster.wait_for(lambda: replica.page("/readyz"), PATIENCE, f"{name} to be ready")
        return replica

    def leader(self) -> Replica:
        def one() -> Replica | None:
            leading = [replica for replica in self.running if replica.leads]
            assert len(leading) <= 1, "two lead"
            return leading[0] if leading else None

        return self.cluster.wait_for(one, PATIENCE, "one to lead")

    def other(self, than: Replica) -> Replica:
        (found,) = [replica for replica in self.running if replica is not than]
        return found

    def kill(self, replica: Replica) -> None:
        replica.process.kill()
        replica.process.wait()
        self.running.remove(replica)

    def stop(self) -> None:
        for replica in self.running:
            replica.process.send_signal(signal.SIGCONT)
            replica.process.terminate()
        for replica in self.running:
            replica.process.wait(30)
        self.running.clear()
