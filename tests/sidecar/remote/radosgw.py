"""Runs Ceph's radosgw, a real S3 server that persists, with the least cluster it needs.

One monitor, one object store daemon and one gateway, in a temporary folder, on loopback, without
authentication among themselves. Needs Debian's packages radosgw, ceph-mon and ceph-osd (`make radosgw-test`
installs them).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from tiercheck_local.controlplane import start_child
from tiercheck_local.markers import free_ports

PROGRAMS = ("ceph-mon", "ceph-osd", "ceph", "monmaptool", "radosgw", "radosgw-admin")
ACCESS_KEY, SECRET_KEY = "tiercheck", "tiercheck-secret"
_START_SECONDS = 180.0


def missing() -> str:
    """What keeps it from being started; empty if nothing does."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return (
        f"radosgw is not installed ({', '.join(absent)} missing; make radosgw-test installs it)"
        if absent
        else ""
    )


class Cluster:
    """Everything lies under `root`; nothing is left when it is stopped."""

    def __init__(self, root: Path, address: str = "127.0.0.1") -> None:
        self._root, self._config, self._address = root, root / "ceph.conf", address
        self._processes: list[subprocess.Popen[bytes]] = []
        self._fsid, self._mon, self._port = str(uuid.uuid4()), *free_ports(2)
        self.endpoint = f"http://{address}:{self._port}"

    def start(self) -> None:
        """Raises RuntimeError with the end of a log."""
        self._configure()
        self._make_monitor()
        self._daemon("ceph-mon", "--id", "a")
        self._until(lambda: self._ceph("status").returncode == 0, "the monitor answers")
        self._make_osd()
        self._daemon("ceph-osd", "--id", "0")
        self._until(self._osd_is_up, "the object store is up", may_end=True)
        self._run(
            "radosgw-admin", "user", "create", "--uid=tiercheck", "--display-name=tests",
            f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}",
        )  # fmt: skip
        self._daemon("radosgw", "-n", "client.admin")
        self._until(self._answers, "the gateway answers")

    def pause(self) -> None:
        """The gateway takes connections and answers none, until `go_on`."""
        self._processes[-1].send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._processes[-1].send_signal(signal.SIGCONT)

    def admin(self, *words: str) -> None:
        """radosgw-admin. Raises RuntimeError."""
        self._run("radosgw-admin", *words)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
        for process in self._processes:
            process.wait()

    def _configure(self) -> None:
        for name in ("mon", "osd", "rgw", "log", "run"):
            (self._root / name).mkdir()
        self._config.write_text(
            f"""[global]
fsid = {self._fsid}
mon host = [v1:127.0.0.1:{self._mon}]
ms bind msgr2 = false
public network = 127.0.0.0/8
public addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
mon allow pool size one = true
mon warn on pool no redundancy = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd crush chooseleaf type = 0
osd objectstore = filestore
osd journal = {self._root}/osd/journal
osd journal size = 100
osd max object name len = 256
osd max object namespace len = 64
filestore xattr use omap = true
run dir = {self._root}/run
admin socket = {self._root}/run/$name.asok
log file = {self._root}/log/$name.log
mon data = {self._root}/mon
osd data = {self._root}/osd
mon max pg per osd = 1000
mon data avail warn = 1
mon data avail crit = 0
setuser match path =
rgw data = {self._root}/rgw
rgw frontends = beast endpoint={self._address}:{self._port}
rgw enable usage log = false
rgw dns name = localhost
"""
        )

    def _make_monitor(self) -> None:
        monmap = self._root / "monmap"
        address = f"[v1:127.0.0.1:{self._mon}]"
        self._run(
            "monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", address, str(monmap), config=False
        )
        self._run("ceph-mon", "--mkfs", "--id", "a", "--monmap", str(monmap))

    def _make_osd(self) -> None:
        name = str(uuid.uuid4())
        self._run("ceph", "osd", "new", name)
        self._run("ceph-osd", "--id", "0", "--mkfs", "--osd-uuid", name)

    def _daemon(self, program: str, *words: str) -> None:
        command = [program, "-f", "-c", str(self._config), *words]
        self._processes.append(start_child(command, self._root / "log" / f"{program}.out"))

    def _ceph(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        command = ["ceph", "-c", str(self._config), "--connect-timeout", "5", *words]
        return subprocess.run(command, capture_output=True, check=False)

    def _run(self, program: str, *words: str, config: bool = True) -> None:
        command = [program, *(["-c", str(self._config)] if config else []), *words]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode(errors='replace')[-2000:]}")

    def _osd_is_up(self) -> bool:
        # It ends with "wrong fsid" if it speaks before it has the monitor's map: then it is started again.
        if self._processes[-1].poll() is not None:
            self._processes.pop()
            self._daemon("ceph-osd", "--id", "0")
        return b"1 up" in self._ceph("osd", "stat").stdout

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=5):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def _until(self, condition: Callable[[], bool], what: str, may_end: bool = False) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            dead = [process.args for process in self._processes if process.poll() is not None]
            if (dead and not may_end) or time.monotonic() > deadline:
                raise RuntimeError(f"in vain: {what}; ended: {dead}; {self._logs()}")
            time.sleep(0.2)

    def _logs(self) -> str:
        texts = (path.read_text(errors="replace")[-1500:] for path in sorted((self._root / "log").iterdir()))
        return "\n".join(texts)


@contextlib.contextmanager
def running() -> Iterator[str]:
    """The base URL of a gateway that lives as long as the block."""
    root = Path(tempfile.mkdtemp(prefix="rgw-"))
    cluster = Cluster(root)
    try:
        cluster.start()
        yield cluster.endpoint
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


def main() -> int:
    """Run a command with TIERCHECK_RADOSGW set to the gateway's URL."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    words = parser.parse_args().command
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    with running() as endpoint:
        return subprocess.run(
            words, env={**os.environ, "TIERCHECK_RADOSGW": endpoint}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
