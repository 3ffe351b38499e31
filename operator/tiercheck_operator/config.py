"""Holds every setting of the operator's process, so that chart, tests and code cannot disagree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tiercheck.about import __version__
from tiercheck_operator.kubernetes.election import Terms
from tiercheck_operator.manifests.pod_settings import NodeMemory, absolute_path
from tiercheck_operator.model.observed import Patience
from tiercheck_operator.model.parsing import NO_SETTINGS, NodeSigns, parse_signs

T = TypeVar("T")
_SECONDS = ("resync", "poll", "call", "progress", "watch_check", "watch_grace", "stuck")
_PATIENCE = (
    "settle", "unreachable", "isolated", "suspect", "silent", "unschedulable", "capacity", "suspend", "flush",
    "relocate", "grow", "retry",
)  # fmt: skip
"""The fields of `Patience` that can be set by environment variables."""


@dataclass(frozen=True)
class WebhookConfig:
    """The address, certificate Secret and DNS names of the attach mode webhook."""

    host: str
    port: int
    secret: tuple[str, str]
    """Namespace and name of the Secret with the webhook's certificate."""
    configuration: str
    """Name of the MutatingWebhookConfiguration."""
    hosts: tuple[str, ...]
    """DNS names or addresses at which the API server calls the webhook."""
    issuer: str = ""
    """The name of another issuer of the certificate; empty: the operator issues it."""


@dataclass(frozen=True)
class Config:
    """Holds the settings read from TIERCHECK_* environment variables; `from_env` has their names."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty: the whole cluster."""
    metrics_host: str = "0.0.0.0"
    metrics_port: int = 8080
    metrics_tls: str = ""
    """Folder with tls.crt and tls.key to serve metrics and probes with; empty: plain HTTP."""
    sidecar_image: str = f"tiercheck-sidecar:{__version__}"
    """Image of the sidecar and of the init container that copies the library."""
    sidecar_pull_policy: str = ""
    """The pull policy of both: Always, IfNotPresent or Never; empty: the cluster's default."""
    sidecar_pull_secrets: tuple[str, ...] = ()
    """Pull secrets beside those of the job's template. They must be in the job's namespace."""
    resync_seconds: float = 15.0
    """Seconds between two reconciles of a job when nothing happened."""
    poll_seconds: float = 5.0
    """Seconds that one long poll of a sidecar may wait for a change."""
    call_seconds: float = 3.0
    """Seconds beyond that after which a sidecar that has not answered counts as silent."""
    progress_seconds: float = 1.0
    """Seconds. The least time between two status writes that only carry progress."""
    lease: tuple[str, str] | None = None
    """Namespace and name of the leader election Lease; None: this is the only replica."""
    identity: str = "tiercheck-operator"
    """The replica's name in the Lease; a random part is added."""
    terms: Terms = field(default_factory=Terms)
    watch_check_seconds: float = 60.0
    """Seconds between two comparisons of the watched objects with a listing."""
    watch_grace_seconds: float = 60.0
    """Seconds that a watch may lag before it counts as stale."""
    stuck_seconds: float = 300.0
    """Seconds that one reconcile may take before the process counts as unhealthy."""
    node_memory: NodeMemory = field(default_factory=NodeMemory)
    log_level: str = "INFO"
    signs: NodeSigns = NO_SETTINGS
    """The taints and conditions that make pods leave a node."""
    webhook: WebhookConfig | None = None
    """None: attach mode is off."""
    patience: Patience = field(default_factory=Patience)

    @staticmethod
    def from_env(env: Mapping[str, str]) -> Config:
        """Reads the settings. Raises ValueError, naming the variable, if a value cannot be parsed."""
        default = Config()

        def seconds(name: str, usual: float) -> float:
            return _parsed(env, f"TIERCHECK_{name.upper()}_SECONDS", usual, float)

        usual = default.metrics_host, default.metrics_port
        host, port = _parsed(env, "TIERCHECK_METRICS_ADDRESS", usual, _address)
        return Config(
            namespaces=_names(env, "TIERCHECK_NAMESPACES"),
            metrics_host=host or default.metrics_host,
            metrics_port=port,
            metrics_tls=env.get("TIERCHECK_METRICS_TLS", ""),
            sidecar_image=env.get("TIERCHECK_SIDECAR_IMAGE") or default.sidecar_image,
            sidecar_pull_policy=_parsed(env, "TIERCHECK_SIDECAR_PULL_POLICY", "", _pull_policy),
            sidecar_pull_secrets=_names(env, "TIERCHECK_SIDECAR_PULL_SECRETS"),
            lease=_parsed(env, "TIERCHECK_LEASE", default.lease, _lease),
            identity=env.get("TIERCHECK_IDENTITY") or default.identity,
            terms=_parsed(env, "TIERCHECK_LEASE_SECONDS", default.terms, lambda text: Terms.of(float(text))),
            node_memory=NodeMemory(
                path=_parsed(env, "TIERCHECK_NODE_MEMORY_PATH", NodeMemory.path, absolute_path),
                keep_seconds=seconds("node_memory_keep", NodeMemory.keep_seconds),
            ),
            log_level=env.get("TIERCHECK_LOG_LEVEL") or default.log_level,
            signs=_signs(env),
            webhook=_webhook(env),
            **{f"{name}_seconds": seconds(name, getattr(default, f"{name}_seconds")) for name in _SECONDS},
            patience=Patience(**{name: seconds(name, getattr(default.patience, name)) for name in _PATIENCE}),
        )


def _names(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(env.get(name, "").replace(",", " ").split())


def _pull_policy(text: str) -> str:
    if text not in ("Always", "IfNotPresent", "Never"):
        raise ValueError("expected one of Always, IfNotPresent, Never")
    return text


def _signs(env: Mapping[str, str]) -> NodeSigns:
    taints, conditions = env.get("TIERCHECK_LEAVING_TAINTS", ""), env.get("TIERCHECK_BAD_NODE_CONDITIONS", "")
    try:
        return parse_signs(taints, conditions, env.get("TIERCHECK_CORDON", ""))
    except ValueError as error:
        raise ValueError(f"TIERCHECK_CORDON: {error}") from error


def _parsed(env: Mapping[str, str], name: str, default: T, parse: Callable[[str], T]) -> T:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from error


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError("expected HOST:PORT")
    return host.strip("[]"), int(port)


def _lease(text: str) -> tuple[str, str] | None:
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise ValueError("expected NAMESPACE/NAME")
    return namespace, name


def _webhook(env: Mapping[str, str]) -> WebhookConfig | None:
    host, port = _parsed(env, "TIERCHECK_WEBHOOK_ADDRESS", ("", 0), _address)
    namespace, _, secret = env.get("TIERCHECK_WEBHOOK_SECRET", "").partition("/")
    configuration = env.get("TIERCHECK_WEBHOOK_CONFIGURATION", "")
    hosts = tuple(env.get("TIERCHECK_WEBHOOK_HOSTS", "").split())
    issuer = env.get("TIERCHECK_WEBHOOK_ISSUER", "")
    if not port:
        return None
    if not (namespace and secret and configuration and hosts):
        raise ValueError(
            "TIERCHECK_WEBHOOK_ADDRESS needs TIERCHECK_WEBHOOK_SECRET=NAMESPACE/NAME, "
            "TIERCHECK_WEBHOOK_CONFIGURATION and TIERCHECK_WEBHOOK_HOSTS beside it"
        )
    return WebhookConfig(host, port, (namespace, secret), configuration, hosts, issuer)
