"""etcd, API server, controller manager and scheduler, as processes of the core."""

from __future__ import annotations

import json
import secrets
import ssl
import urllib.request
from pathlib import Path

from testbed.needs import kube_bin
from testbed.network import API_SERVER, CORE, SERVICES
from testbed.processes import Processes, run, wait_for

_ETCD = "http://127.0.0.1:2379"
START_SECONDS = 120.0


def start(processes: Processes, folder: Path, core: int, nodes: int) -> None:
    """Writes `folder`/admin.conf and node-<i>.conf. Raises TimeoutError with the end of a log."""
    inside = ["nsenter", "-t", str(core), "-n"]
    _write_credentials(folder, nodes)
    processes.start("etcd", [
        *inside, kube_bin("etcd"), f"--data-dir={folder}/etcd", f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}", "--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync",
    ])  # fmt: skip
    start_api_server(processes, folder, core)
    restart_controllers(processes, folder, core)


def restart_controllers(processes: Processes, folder: Path, core: int) -> None:
    """Controller manager and scheduler begin, or begin anew with the CA of now."""
    inside, admin = ["nsenter", "-t", str(core), "-n"], folder / "admin.conf"
    for name in ("kube-controller-manager", "kube-scheduler"):
        processes.kill(name)
    processes.start("kube-controller-manager", [
        *inside, kube_bin("kube-controller-manager"), f"--kubeconfig={admin}",
        f"--service-account-private-key-file={folder}/keys/accounts.key",
        f"--root-ca-file={folder}/apiserver/apiserver.crt",
        "--leader-elect=false", "--use-service-account-credentials",
    ])  # fmt: skip
    processes.start("kube-scheduler", [
        *inside, kube_bin("kube-scheduler"), f"--kubeconfig={admin}", "--leader-elect=false",
    ])  # fmt: skip


def start_api_server(processes: Processes, folder: Path, core: int) -> None:
    """Until it answers. Raises TimeoutError with the end of its log."""
    inside = ["nsenter", "-t", str(core), "-n"]
    keys = folder / "keys"
    command = [
        *inside, kube_bin("kube-apiserver"), f"--etcd-servers={_ETCD}", "--secure-port=6443",
        f"--bind-address={CORE}", f"--advertise-address={CORE}", f"--cert-dir={folder}/apiserver",
        f"--service-account-key-file={keys}/accounts.pub",
        f"--service-account-signing-key-file={keys}/accounts.key",
        "--service-account-issuer=https://kubernetes.default.svc", f"--token-auth-file={keys}/tokens.csv",
        "--authorization-mode=Node,RBAC", f"--service-cluster-ip-range={SERVICES}", "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
    ]  # fmt: skip

    def answers() -> bool:
        if processes.pid("kube-apiserver") is None:  # one that was killed may hold the port a moment longer
            processes.start("kube-apiserver", command)
        return _ready(core, folder / "admin.conf")

    try:
        wait_for(answers, START_SECONDS, "the API server")
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {processes.end_of_log('kube-apiserver')}") from error


def ask(kubeconfig: Path, path: str) -> dict[str, object]:
    """GET, from inside the core's network. Raises OSError."""
    token = json.loads(kubeconfig.read_text())["users"][0]["user"]["token"]
    request = urllib.request.Request(API_SERVER + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, context=ssl._create_unverified_context(), timeout=5) as answer:
        return dict(json.load(answer))


def _ready(core: int, admin: Path) -> bool:
    command = [
        "nsenter",
        "-t",
        str(core),
        "-n",
        "kubectl",
        f"--kubeconfig={admin}",
        "get",
        "--raw",
        "/readyz",
    ]
    return run(command, check=False).strip() == "ok"


def _write_credentials(folder: Path, nodes: int) -> None:
    """Every kubelet is its own node to the API server, and no more: NodeRestriction is on."""
    keys = folder / "keys"
    keys.mkdir(mode=0o700, exist_ok=True)
    run(["openssl", "genrsa", "-out", f"{keys}/accounts.key", "2048"])
    run(["openssl", "rsa", "-in", f"{keys}/accounts.key", "-pubout", "-out", f"{keys}/accounts.pub"])
    lines = []
    people = [("admin", "admin", "system:masters")]
    people += [(f"node-{i}", f"system:node:node-{i}", "system:nodes") for i in range(1, nodes + 1)]
    for name, user, group in people:
        token = secrets.token_hex(16)
        lines.append(f'{token},{user},{user},"{group}"')
        _write_kubeconfig(folder / f"{name}.conf", token)
    (keys / "tokens.csv").write_text("\n".join(lines) + "\n")


def _write_kubeconfig(path: Path, token: str) -> None:
    cluster = {
        "server": API_SERVER,
        "certificate-authority": str(path.parent / "apiserver" / "apiserver.crt"),
    }
    text = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "testbed", "cluster": cluster}],
        "users": [{"name": "me", "user": {"token": token}}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "me"}}],
        "current-context": "testbed",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(text, indent=1))
