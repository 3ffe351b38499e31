"""The job's folder in the remote tier, opened once by whoever needs it first: the upload or a restore."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.remote import Claimant, RemoteStore, open_store


class JobStore:
    """Thread-safe."""

    def __init__(self, config: SidecarConfig, make: Callable[[], RemoteStore] | None = None) -> None:
        """`make`: opens another store than the one that the job names."""
        self._config, self._make = config, make or self._open
        self._lock = threading.Lock()
        self._store: RemoteStore | None = None

    @property
    def is_configured(self) -> bool:
        """Whether the job has a remote tier."""
        return self._config.remote is not None

    def get(self) -> RemoteStore:
        """The store; `close` ends what it does. Raises RemoteConfigError."""
        with self._lock:
            self._store = self._store or self._make()
            return self._store

    def close(self) -> None:
        """Whatever the store does ends."""
        if self._store is not None:
            self._store.close()

    def _open(self) -> RemoteStore:
        config = self._config
        assert config.remote is not None
        return open_store(config.remote, config.job, Claimant(config.cluster, config.job_uid))
