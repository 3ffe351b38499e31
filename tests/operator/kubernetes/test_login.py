"""The operator gets at its API server as its pod or its kubeconfig says, and notices a new token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kopf
import pytest

from tiercheck_local.controlplane.kubeconfig import write_kubeconfig
from tiercheck_operator.kubernetes import login
from tiercheck_operator.kubernetes.login import Access, log_in


def test_kubeconfig_names_server_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9/", "secret")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    access = Access()
    assert access.server == "http://127.0.0.1:9"
    assert access.headers() == {"Authorization": "Bearer secret"}
    assert access.tls is None


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_pod_calls_the_address_that_its_kubelet_told_it(
    host: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert log_in().server == server


def test_who_has_neither_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(kopf.LoginError, match="neither"):
        log_in()


def test_token_is_read_again_and_kept_where_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["old", "new"]

    def read() -> kopf.ConnectionInfo:
        if not tokens:
            raise FileNotFoundError
        return kopf.ConnectionInfo(server="http://h", token=tokens.pop(0))

    access = Access(read)
    said = [access.headers()["Authorization"]]
    monkeypatch.setattr(login, "_READ_EVERY", -1.0)
    said += [access.headers()["Authorization"] for _ in range(2)]
    assert said == ["Bearer old", "Bearer new", "Bearer new"]


LOADED = """
import atexit, runpy, sys
unwanted = ("kubernetes", "pydantic", "jsonschema", "requests")
atexit.register(lambda: print([name for name in unwanted if sys.modules.get(name)]))
runpy.run_module("tiercheck_operator", run_name="__main__")
"""


def test_process_of_the_operator_loads_no_kubernetes_client(tmp_path: Path) -> None:
    """kopf takes it from wherever it is installed. The process ends at once, for want of an API server."""
    env = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", LOADED], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert "neither a service account nor a kubeconfig" in ended.stderr
    assert ended.stdout.strip() == "[]"
