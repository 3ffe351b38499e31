"""What goes wrong with one slot harms no other, and what nobody could keep changes no plan.

Promise: a seal is as it was written or none, and no sidecar stops for a bad one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sidecar.stations import config_of, image
from tests.sidecar.world import layout
from tiercheck.protocol.artifacts.slot import NotASlot, SlotLayout
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.version import Artifact, Digests, Kind, Share, Version
from tiercheck_sidecar.decoding import Malformed, read_checked, with_checksum
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.node_memory import OWNER, FolderClaim, FolderOwner
from tiercheck_sidecar.vault import NoFreeSlot, Seal, Vault, vault
from tiercheck_sidecar.vault.seal import read_seal, seal_path, write_seal
from tiercheck_sidecar.vault.slots import SlotState

LIMIT = 4 << 20
SIZE = 100_000


@pytest.fixture
def own(tmp_path: Path) -> Vault:
    """Rank 0's, which keeps copies of rank 1."""
    made = Vault(tmp_path, LIMIT, [0])
    made.open()
    made.host([1])
    made.reserve(0, layout(SIZE).size)
    return made


def save(own: Vault, step: int) -> Path:
    plan = layout(SIZE)
    path = own.begin(0, Version(step, 1))
    path.write_bytes(image(0, Version(step, 1), plan, world_size=2))
    own.complete(path, 2)
    return path


def claim(size: int, kind: Kind = Kind.SNAPSHOT) -> Seal:
    return Seal(1, Version(5, 1), 2, Tier.PEER, Digests(size, 4096, ()), kind)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("size", [LIMIT - SIZE, 1 << 40])
def test_claim_that_does_not_fit_stops_no_saving(own: Vault, size: int, kind: Kind) -> None:
    before = own.size_plan()
    with pytest.raises(NoFreeSlot):
        own.draft(claim(size, kind))
    assert own.size_plan() == before
    assert own.too_small() == ""
    assert own.seal(save(own, 5)) is not None


def test_size_that_fits_is_learned_and_its_next_one_too(own: Vault) -> None:
    own.draft(claim(SIZE)).release()
    assert own.size_plan().peer > 0
    own.draft(claim(2 * SIZE)).release()
    assert own.size_plan().peer >= 4 * SIZE


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("nobody thought of it")


def states(own: Vault) -> set[SlotState]:
    return {slot.state for slot in own._slots.values()}


def receive(own: Vault) -> None:
    plan = layout(SIZE)
    draft = own.draft(claim(plan.size))
    draft.view[:] = image(1, Version(5, 1), plan, world_size=2)
    draft.keep()


@pytest.mark.parametrize(
    ("where", "act"),
    [
        ("digest_and_tag", lambda own: own.seal(save(own, 5))),
        ("read_header", lambda own: save(own, 5)),
        ("SlotDraft", receive),
        ("write_seal", receive),
    ],
    ids=["sealed", "completed", "copied", "copied and sealed"],
)
def test_slot_is_free_again_whatever_ended_what_it_was_for(
    own: Vault, monkeypatch: pytest.MonkeyPatch, where: str, act: Callable[[Vault], object]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(vault, where, fail)
        with pytest.raises(RuntimeError, match="nobody thought"):
            act(own)
    assert states(own) == {SlotState.FREE}
    assert own.unfinished() == set()


def put_folder(path: Path) -> None:
    path.unlink()
    (path / "inner").mkdir(parents=True)


@pytest.mark.parametrize("spoil", [Path.unlink, put_folder])
def test_slot_that_a_trainer_took_away_holds_up_no_other(own: Vault, spoil: Callable[[Path], None]) -> None:
    for step in (5, 6):
        own.seal(save(own, step))
    first = next(path for path, slot in own._slots.items() if slot.seal and slot.seal.version.step == 5)
    spoil(first)
    own.evict(lambda seal: seal.version.step == 5)
    own.evict(lambda seal: seal.version.step == 6)
    own.tidy()
    assert own.held() == ()
    for step in (7, 8):
        assert own.seal(save(own, step)) is not None


def test_link_in_place_of_a_slot_leads_the_sidecar_nowhere(
    own: Vault, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It may write where the trainer cannot, as in a remote tier that is a folder."""
    elsewhere = tmp_path_factory.mktemp("store") / "manifest"
    elsewhere.write_bytes(b"m" * (LIMIT // 2))
    before = elsewhere.read_bytes()

    def point_elsewhere(path: Path) -> None:
        path.unlink()
        path.symlink_to(elsewhere)

    own.seal(save(own, 5))
    (sealed,) = (path for path, slot in own._slots.items() if slot.seal)
    point_elsewhere(sealed)
    with pytest.raises(OSError, match="bytes long"):
        own.fault(Artifact(0, Version(5, 1)))
    own.evict(lambda seal: seal.version.step == 5)
    begun = own.begin(0, Version(6, 1))
    point_elsewhere(begun)
    with pytest.raises(NotASlot):
        own.complete(begun, 2)
    own.tidy()
    assert elsewhere.read_bytes() == before
    assert own.seal(save(own, 7)) is not None


def test_slot_that_could_not_be_made_takes_no_room(own: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    before = own.used()
    with monkeypatch.context() as patch:
        patch.setattr(vault, "create", fail)
        with pytest.raises(RuntimeError, match="nobody thought"):
            own.draft(claim(SIZE))
    assert own.used() == before
    receive(own)


def test_own_artifact_that_cannot_be_read_for_now_is_not_given_up_as_a_rotten_one_is(
    own: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors may be short for a moment, and nobody else may have it."""
    path = save(own, 5)
    seal = own.seal(path)
    assert seal is not None
    state = SidecarState(config_of(tmp_path))

    def unreadable(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as short:
        short.setattr(own, "fault", unreadable)
        assert "too many open files" in own.evict_if_bad(state, seal.artifact, Tier.LOCAL)
    assert own.find(seal.artifact) == seal
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    assert "does not match" in own.evict_if_bad(state, seal.artifact, Tier.LOCAL)
    assert own.find(seal.artifact) is None


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


LAYOUT = SlotLayout.plan([("w", "U8", (5000,), 5000)])
BODY = LAYOUT.state_word + LAYOUT.header(0, Version(5, 1), 8, {}) + bytes(5000)
SEAL = Seal(0, Version(5, 1), 8, Tier.LOCAL, digest(memoryview(BODY)))


@pytest.fixture
def slot(tmp_path: Path) -> Path:
    path = tmp_path / "own-0-a.safetensors"
    path.write_bytes(BODY)
    write_seal(path, SEAL)
    return path


def vault_on(folder: Path) -> Vault:
    vault = Vault(folder, 64 << 20, (0,))
    vault.open()
    return vault


def test_seal_is_read_back_and_its_slot_is_found_again(slot: Path) -> None:
    assert read_seal(slot) == SEAL
    assert vault_on(slot.parent).held() == (SEAL,)


def test_a_flip_of_any_bit_makes_it_no_seal(slot: Path) -> None:
    good = seal_path(slot).read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        seal_path(slot).write_bytes(bad)
        assert read_seal(slot) is None, f"bit {bit}"


def test_a_cut_or_longer_seal_is_none(slot: Path) -> None:
    good = seal_path(slot).read_bytes()
    for bad in (
        *(good[:length] for length in range(len(good))),
        good + b"\n",
        good + good,
        b"\n" + good,
        to_json(SEAL),
    ):
        seal_path(slot).write_bytes(bad)
        assert read_seal(slot) is None


@pytest.mark.parametrize(
    "seal",
    [
        replace(SEAL, rank=-1), replace(SEAL, world_size=-8), replace(SEAL, version=Version(-5, 1)),
        *(
            replace(SEAL, digests=digests)
            for digests in (
                Digests(len(BODY), 0, SEAL.digests.values), Digests(len(BODY), -1, SEAL.digests.values),
                Digests(-1, 4096, ()), Digests(0, 4096, ()),
                Digests(2**62, 4096, SEAL.digests.values), Digests(len(BODY), 2**62, SEAL.digests.values),
                Digests(len(BODY), 4096, ()),
            )
        ),
        replace(SEAL, share=Share(0, ())), replace(SEAL, share=Share(-1, (0, 1))),
        replace(SEAL, share=Share(0, (1, 2))),
        replace(SEAL, share=Share(0, (0, 1)), members=(Digests(5, 0, ()),)),
    ],
    ids=str,
)  # fmt: skip
def test_nonsense_with_a_right_checksum_is_no_seal_and_stops_no_sidecar(slot: Path, seal: Seal) -> None:
    write_seal(slot, seal)
    assert read_seal(slot) is None
    assert vault_on(slot.parent).held() == ()


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 300, b"[" * 100_000, b'{"rank":"\xff"}', b'{"rank":' + b"9" * 5000 + b"}"]
)
@pytest.mark.parametrize("forged", [False, True])
def test_no_content_of_a_seal_stops_the_sidecar(slot: Path, content: bytes, forged: bool) -> None:
    seal_path(slot).write_bytes(with_checksum(content) if forged else content)
    for _ in range(2):
        assert vault_on(slot.parent).held() == ()


def test_what_is_no_file_is_never_waited_for(slot: Path) -> None:
    seal_path(slot).unlink()
    os.mkfifo(seal_path(slot))
    assert read_seal(slot) is None
    seal_path(slot).unlink()
    seal_path(slot).symlink_to("/dev/zero")
    assert read_seal(slot) is None
    seal_path(slot).unlink()
    seal_path(slot).mkdir()
    assert read_seal(slot) is None


@pytest.mark.parametrize("odd", ["link", "fifo"])
def test_seal_is_written_into_a_file_of_its_own_whatever_lies_in_its_way(slot: Path, odd: str) -> None:
    seal = read_seal(slot)
    assert seal is not None
    way, elsewhere = seal_path(slot).with_name(seal_path(slot).name + ".new"), slot.with_name("elsewhere")
    elsewhere.write_bytes(b"theirs")
    if odd == "link":
        way.symlink_to(elsewhere)
    else:
        os.mkfifo(way)
    write_seal(slot, seal)
    assert elsewhere.read_bytes() == b"theirs"
    assert read_seal(slot) == seal
    assert not seal_path(slot).is_symlink()


@pytest.mark.parametrize("share", [Share(2**40, (0, 1)), Share(0, tuple(range(300)))])
def test_seal_of_a_block_that_cannot_be_is_none(slot: Path, share: Share) -> None:
    seal = read_seal(slot)
    assert seal is not None
    write_seal(slot, replace(seal, share=share))
    assert read_seal(slot) is None


def test_a_flip_of_any_bit_of_an_owner_file_makes_it_nobodys(tmp_path: Path) -> None:
    claim = FolderClaim(tmp_path / "old", 1, 10.0)
    claim.close()
    good = (claim.folder / OWNER).read_bytes()
    assert read_checked(claim.folder / OWNER, FolderOwner) == FolderOwner(1, 10.0)
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        (claim.folder / OWNER).write_bytes(bad)
        with pytest.raises(Malformed):
            read_checked(claim.folder / OWNER, FolderOwner)
    (claim.folder / "own-1-a.safetensors").write_bytes(b"bytes")
    (claim.folder / "own-1-a.safetensors.seal").write_bytes(b"seal")
    assert FolderClaim(tmp_path / "new", 1, 20.0).adopt() == 0, "nobody takes what may be another's"
