"""The sidecar shares the machine with training: with nothing to do, it does nothing."""

from __future__ import annotations

from pathlib import Path

from tiercheck_sidecar.vault import Vault


def test_tidying_a_tidy_vault_wakes_nobody(tmp_path: Path) -> None:
    changes: list[str] = []
    vault = Vault(tmp_path, limit=10_000_000, ranks=[0], on_change=lambda: changes.append("changed"))
    vault.open()
    vault.reserve(0, 300_000)
    vault.tidy()
    changes.clear()
    vault.tidy()
    vault.evict(lambda seal: True)
    assert changes == [], "a loop that is woken by its own tidying would never rest"
