"""The vault stays within its limit, and what is sealed stays readable."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.examples import examples
from tests.sidecar.stations import image
from tests.sidecar.world import layout
from tiercheck.protocol.artifacts.sizing import Room
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, Kind, Share, Version
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.vault import MemoryTooSmall, NoFreeSlot, Seal, SlotDraft, Vault

kinds = st.sampled_from(list(Kind))
own = st.integers(0, 1)
hosted = st.integers(2, 3)
sizes = st.integers(1, 120_000)
LANE = Share(0, (4, 5, 6))


class VaultUnderUse(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="vault-"))
        self.step = 0
        self.writing: list[tuple[Path, int, Version, Kind]] = []
        self.drafts: list[SlotDraft] = []
        self.sealed: set[tuple[Artifact, Tier]] = set()
        self.plans: dict[int, tuple[int, int]] = {}

    @initialize(limit=st.integers(300_000, 5_000_000))
    def begin(self, limit: int) -> None:
        self.limit = limit
        self._open()

    def _open(self) -> None:
        self.vault = Vault(self.folder, self.limit, [0, 1])
        self.vault.open()
        self.vault.host([2, 3], [LANE])

    @rule(rank=own, snapshot=sizes, delta=st.integers(0, 60_000))
    def reserve(self, rank: int, snapshot: int, delta: int) -> None:
        self.plans[rank] = (snapshot, delta)
        try:
            self.vault.reserve(rank, layout(snapshot).size, layout(delta).size if delta else 0)
        except MemoryTooSmall:
            return

    @rule()
    def prepare(self) -> None:
        self.vault.prepare()

    @rule(cadence=st.integers(2, 12), snapshot=sizes, delta=sizes)
    def expect(self, cadence: int, snapshot: int, delta: int) -> None:
        self.vault.expect(cadence, Room(snapshot, delta))

    @rule(rank=own, kind=kinds, size=st.integers(1, 60_000))
    def capture(self, rank: int, kind: Kind, size: int) -> None:
        if rank not in self.plans:
            return
        self.step += 1
        version = Version(self.step, 1)
        snapshot, delta = self.plans[rank]
        plan = layout(snapshot if kind is Kind.SNAPSHOT else min(size, max(1, delta)))
        try:
            path = self.vault.begin(rank, version, kind, plan.size)
        except (NoFreeSlot, MemoryTooSmall):
            return
        with open(path, "r+b") as file:
            file.write(image(rank, version, plan, kind))
        self.writing.append((path, rank, version, kind))

    @precondition(lambda self: self.writing)
    @rule(fate=st.sampled_from(["complete", "abandon", "lose"]))
    def end_capture(self, fate: str) -> None:
        path, rank, version, kind = self.writing.pop(0)
        if fate == "abandon":
            self.vault.release(path)
        elif fate == "lose":
            self.vault.discard(path)
        else:
            assert self.vault.complete(path, 8) is kind
            assert self.vault.seal(path)
            self.sealed.add((Artifact(rank, version, kind), Tier.LOCAL))

    @rule(rank=hosted, kind=kinds, size=sizes)
    def receive(self, rank: int, kind: Kind, size: int) -> None:
        self._copy(rank, kind, size, Tier.PEER)

    @rule(rank=own, kind=kinds, size=sizes)
    def restore(self, rank: int, kind: Kind, size: int) -> None:
        self._copy(rank, kind, size, Tier.LOCAL)

    def _copy(self, rank: int, kind: Kind, size: int, tier: Tier) -> None:
        self.step += 1
        version = Version(self.step, 1)
        data = image(rank, version, layout(size), kind)
        try:
            draft = self.vault.draft(Seal(rank, version, 8, tier, digest(memoryview(data)), kind))
        except NoFreeSlot:
            return
        assert len(draft.view) == len(data)
        draft.view[:] = data
        draft.keep()
        self.sealed.add((Artifact(rank, version, kind), tier))

    @rule(kind=kinds, size=sizes, keep=st.booleans())
    def fold(self, kind: Kind, size: int, keep: bool) -> None:
        self.step += 1
        seal = Seal(4, Version(self.step, 1), 8, Tier.PEER, digest(memoryview(bytes(size))), kind, LANE)
        try:
            draft = self.vault.draft(seal)
        except NoFreeSlot:
            return
        assert not any(draft.view), "zeros to fold into"
        draft.view[: min(8, size)] = b"x" * min(8, size)
        if keep:
            draft.keep(Seal(4, seal.version, 8, Tier.PEER, digest(draft.view), kind, LANE))
        else:
            draft.release()

    @rule(older=st.integers(0, 20))
    def free(self, older: int) -> None:
        gone = self.vault.evict(lambda seal: seal.version.step < self.step - older)
        for seal in gone:
            self.sealed.discard((seal.artifact, seal.tier))

    @rule()
    def restart(self) -> None:
        self.writing.clear()
        self.plans.clear()  # a trainer reserves anew with a sidecar that was restarted
        self._open()

    @invariant()
    def within_limit(self) -> None:
        if not hasattr(self, "vault"):
            return
        on_disk = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())
        assert on_disk <= self.vault.used() <= self.limit

    @invariant()
    def sealed_is_held(self) -> None:
        if hasattr(self, "vault"):
            held = {
                (Artifact(each.rank, each.version, each.kind), each.tier)
                for each in self.vault.held()
                if not each.share
            }
            assert self.sealed == held

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


VaultUnderUse.TestCase.settings = settings(
    max_examples=examples(15), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestVaultUnderUse = VaultUnderUse.TestCase
