"""Sends raw requests to a real API server, and keeps the warnings of its answers."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.access import load
from tiercheck_local.controlplane.planes import write_kubeconfig


def post(kubeconfig: Path, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], list[str]]:
    """Status, answer and warnings."""
    access = load(kubeconfig)
    headers = {**access.headers, "Content-Type": "application/json"}
    request = urllib.request.Request(access.server + path, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30, context=access.tls) as answer:
            return answer.status, json.load(answer), answer.headers.get_all("Warning") or []
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers.get_all("Warning") or []


def service_account_kubeconfig(admin: Path, namespace: str, name: str, target: Path) -> Path:
    """A kubeconfig in `target` that is the service account and nobody else."""
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600},
    }
    status, answer, _ = post(admin, f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", request)
    assert status == 201, answer
    cluster = yaml.safe_load(admin.read_text())["clusters"][0]["cluster"]
    ca = base64.b64decode(cluster["certificate-authority-data"])
    write_kubeconfig(target, cluster["server"], answer["status"]["token"], ca)
    return target
