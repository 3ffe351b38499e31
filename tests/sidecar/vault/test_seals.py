"""Promise: a seal is as it was written or none, and no sidecar stops for a bad one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.version import Digests, Share, Version
from tiercheck_sidecar.decoding import Malformed, read_checked, with_checksum
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.node_memory import OWNER, FolderClaim, FolderOwner
from tiercheck_sidecar.vault import Seal, Vault
from tiercheck_sidecar.vault.seal import read_seal, seal_path, write_seal

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
