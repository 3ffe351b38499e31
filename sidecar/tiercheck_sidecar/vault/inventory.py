"""Reads what memory holds again, to see whether it is what was sealed.

After a restart of the sidecar, slots whose bytes still match their seals are found. Anything unsealed is
removed rather than reused in place: a trainer that outlived the sidecar may still be writing through its
mapping, and must then write into a file that no one will ever open again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from tiercheck.plain_files import is_plain
from tiercheck_sidecar.digest import chunk_view, digest_chunk, length_of
from tiercheck_sidecar.vault.seal import SUFFIX, Seal, header_fault, read_seal, seal_path
from tiercheck_sidecar.vault.slots import Pool, Slot, SlotState, remove

log = logging.getLogger(__name__)

SLOT_SUFFIX = ".safetensors"
_VERIFIERS = 4


def take_inventory(directory: Path) -> list[Slot]:
    """Every slot in `directory` that is sealed and verified. All other slot files are removed."""
    files = [
        path
        for path in sorted(directory.glob(f"*{SLOT_SUFFIX}"))
        if is_plain(path) and is_plain(seal_path(path))
    ]
    with ThreadPoolExecutor(_VERIFIERS) as pool:
        found = list(pool.map(_inspect, files))
    kept = [slot for slot in found if slot is not None]
    _clear(directory, {slot.path for slot in kept})
    return kept


def _inspect(path: Path) -> Slot | None:
    seal = read_seal(path)
    if seal is None:
        log.info("%s has no seal: torn or free", path.name)
        return None
    pool = Pool(seal.tier, seal.rank, seal.kind, seal.share)
    slot = Slot(path=path, size=path.stat().st_size, pool=pool, state=SlotState.SEALED, seal=seal)
    try:
        reason = fault(slot)
    except OSError as error:
        reason = str(error)
    if reason:
        log.warning("%s is given up: %s", path.name, reason)
        return None
    return slot


def fault(slot: Slot, threads: Executor | None = None, read: Callable[[int], None] = lambda _: None) -> str:
    """Why the slot's bytes are not what its seal says; empty if they are. `threads` share the chunks, and
    `read` hears of the bytes of each. Raises OSError."""
    with sealed(slot) as (view, seal):
        digests = seal.digests

        def is_bad(index: int) -> bool:
            bad = digest_chunk(chunk_view(view, digests, index)) != digests.values[index]
            read(length_of(digests, index))
            return bad

        found = [*(map if threads is None else threads.map)(is_bad, range(len(digests.values)))]
        if True in found:
            return f"chunk {found.index(True)} does not match its digest"
        return header_fault(view, seal) if seal.share is None else ""


@contextlib.contextmanager
def sealed(slot: Slot) -> Iterator[tuple[memoryview, Seal]]:
    """The bytes that the slot's seal is about. Raises OSError if there are fewer."""
    seal = slot.seal
    assert seal is not None
    if slot.size < seal.digests.size:
        raise OSError(f"it is {slot.size} bytes long, its seal says {seal.digests.size}")
    with slot.mapped(size=seal.digests.size) as view:
        yield view, seal


def _clear(directory: Path, kept: Iterable[Path]) -> None:
    keep = {name for path in kept for name in (path, seal_path(path))}
    for path in directory.iterdir():
        if path in keep:
            continue
        try:
            if path.name.endswith(SLOT_SUFFIX):
                remove(path)
            elif SUFFIX in path.name:
                path.unlink(missing_ok=True)
        except OSError as error:  # a folder of that name, say
            log.warning("%s cannot be removed: %s", path.name, error)
