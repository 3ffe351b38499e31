"""Reads the settings of a sidecar's start: its identity, and its memory, socket and credentials.

Everything that can change while it runs arrives in directives instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiercheck.protocol import names
from tiercheck.protocol.report import SPARE
from tiercheck_sidecar.pacing import CGROUP

ENV_CGROUP_DIR = "TIERCHECK_CGROUP_DIR"
"""The variable with the path of the container's cgroup; /sys/fs/cgroup if not set."""


class ConfigError(ValueError):
    """A missing or malformed environment variable; the message names it."""


@dataclass(frozen=True)
class SidecarConfig:
    """The sidecar's identity, paths and ports, from the variables in `protocol.names`."""

    job: str
    job_uid: str
    worker: int
    """The worker's number; `SPARE` until a directive assigns one. A later directive may change it."""
    procs_per_worker: int
    pod_uid: str
    pod_ip: str
    """The address that all servers bind to and all connections start from."""
    memory_dir: Path
    memory_limit: int
    """Bytes."""
    run_dir: Path
    credentials_dir: Path
    remote: str | None
    token: str
    operator_public: bytes = b""
    """The operator's public key: 32 bytes; empty: no signature is accepted."""
    cluster: str = ""
    remote_credentials_dir: Path | None = None
    node_memory_keep: float | None = None
    """Seconds to keep what dead pods left in the node's memory; None: the memory is the pod's."""
    grace: int = 30
    cgroup_dir: Path = CGROUP
    control_port: int = names.CONTROL_PORT
    exchange_port: int = names.EXCHANGE_PORT
    metrics_port: int = names.METRICS_PORT

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks of this worker; a spare has none."""
        if self.worker == SPARE:
            return ()
        first = self.worker * self.procs_per_worker
        return tuple(range(first, first + self.procs_per_worker))

    @property
    def vault_dir(self) -> Path:
        """Returns the folder of the slots; in the node's memory it is one of this pod's own."""
        return self.memory_dir if self.node_memory_keep is None else self.memory_dir / self.pod_uid

    @property
    def flush_seconds(self) -> float:
        """Returns the seconds that an upload may delay the end; the rest of the grace is for closing down."""
        return self.grace - min(5.0, 0.2 * self.grace)

    @property
    def socket_path(self) -> Path:
        return self.run_dir / names.SOCKET_NAME

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> SidecarConfig:
        """Reads the environment. Raises ConfigError."""
        credentials = Path(env.get(names.ENV_CREDENTIALS_DIR) or names.CREDENTIALS_DIR)
        memory = Path(env.get(names.ENV_MEMORY_DIR) or names.MEMORY_DIR)
        try:
            token = (credentials / "token").read_text().strip()
            operator_public = (credentials / names.OPERATOR_PUBLIC).read_bytes()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{names.ENV_CREDENTIALS_DIR}: the job's credentials cannot be read ({error})"
            ) from error
        if not token:
            raise ConfigError(f"{names.ENV_CREDENTIALS_DIR}: the job's token is empty")
        if len(operator_public) != 32:
            raise ConfigError(f"{names.ENV_CREDENTIALS_DIR}: {names.OPERATOR_PUBLIC} has no 32 bytes")
        is_spare = env.get(names.ENV_WORKER) == names.SPARE_WORKER
        mounted, keeps_memory = env.get(names.ENV_REMOTE_CREDENTIALS_DIR), env.get(names.ENV_NODE_MEMORY_KEEP)
        has_grace = env.get(names.ENV_GRACE_SECONDS)
        return SidecarConfig(
            job=_text(env, names.ENV_JOB),
            job_uid=_text(env, names.ENV_JOB_UID),
            worker=SPARE if is_spare else _number(env, names.ENV_WORKER),
            procs_per_worker=_number(env, names.ENV_PROCS_PER_WORKER),
            pod_uid=_text(env, names.ENV_POD_UID),
            pod_ip=_text(env, names.ENV_POD_IP),
            memory_dir=memory,
            memory_limit=_number(env, names.ENV_MEMORY_LIMIT),
            run_dir=Path(env.get(names.ENV_RUN_DIR) or names.RUN_DIR),
            credentials_dir=credentials,
            remote=env.get(names.ENV_REMOTE) or None,
            token=token,
            operator_public=operator_public,
            cluster=env.get(names.ENV_CLUSTER, ""),
            remote_credentials_dir=Path(mounted) if mounted else None,
            node_memory_keep=_number(env, names.ENV_NODE_MEMORY_KEEP) if keeps_memory else None,
            **_ports(env),
            cgroup_dir=Path(env.get(ENV_CGROUP_DIR) or CGROUP),
            grace=_number(env, names.ENV_GRACE_SECONDS) if has_grace else SidecarConfig.grace,
        )


def _ports(env: Mapping[str, str]) -> dict[str, int]:
    if not env.get(names.ENV_FIRST_PORT):
        return {}
    first = _number(env, names.ENV_FIRST_PORT)
    return {"control_port": first, "exchange_port": first + 1, "metrics_port": first + 2}


_MOST_DIGITS = 18


def _text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise ConfigError(f"{name} is not set")
    return value


def _number(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    if not (text.isascii() and text.isdigit()) or len(text) > _MOST_DIGITS:
        raise ConfigError(f"{name} is not a whole number: {text[:40]!r}")
    return int(text)
