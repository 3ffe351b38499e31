"""What could be rebuilt of a rank: asked of everybody in its group, so that a restore plans with what is there and not with what was meant to be."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tiercheck.protocol.artifact import Artifact, Share
from tiercheck.protocol.directive import ParityGroup, Peer
from tiercheck_sidecar.exchange.fetch import Dial, holdings
from tiercheck_sidecar.exchange.frames import Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.parity.groups import coded_with
from tiercheck_sidecar.parity.messages import ParityAsk, ParitySay
from tiercheck_sidecar.parity.push import converse
from tiercheck_sidecar.source_errors import SourceFailed

_PARALLEL = 16


def obtainable(
    group: ParityGroup, rank: int, procs_per_worker: int, connect: Callable[[Peer], Wire]
) -> dict[Artifact, int]:
    """Artifacts of `rank`, with bytes, of which there are as many blocks as the group lacks artifacts of its members.

    Raises SourceFailed if nobody who could know answers.
    """
    ranks = coded_with(group, rank, procs_per_worker)
    others = [(peer, other) for peer, other in zip(group.members, ranks, strict=True) if other != rank]
    questions = [partial(_blocks, peer, Share(index, ranks), rank, connect) for index, peer in enumerate(group.holders)]
    questions += [partial(_held, peer, other, rank, connect) for peer, other in others]
    failures: list[str] = []
    parts: Counter[Artifact] = Counter()
    sizes: dict[Artifact, int] = {}
    with ThreadPoolExecutor(min(_PARALLEL, len(questions)), thread_name_prefix="obtainable") as pool:
        for number, answer in enumerate([pool.submit(question) for question in questions]):
            try:
                found = answer.result()
            except SourceFailed as error:
                failures.append(str(error))
                continue
            parts.update(found.keys())
            if number < len(group.holders):
                sizes |= found
    if not sizes and failures:
        raise SourceFailed("; ".join(failures))
    return {artifact: size for artifact, size in sizes.items() if parts[artifact] >= len(ranks)}


def _blocks(peer: Peer, share: Share, rank: int, connect: Callable[[Peer], Wire]) -> dict[Artifact, int]:
    try:
        with contextlib.closing(converse(connect(peer))) as wire:
            wire.send(ParityAsk("list", share=share))
            listed = wire.receive(ParitySay).listed
    except (WireBroken, PeerRefused) as error:
        raise SourceFailed(f"worker {peer.worker}: {error}") from error
    return {each.artifact: each.bytes for each in listed if each.artifact.rank == rank}


def _held(peer: Peer, other: int, rank: int, connect: Callable[[Peer], Wire]) -> dict[Artifact, int]:
    """Named after `rank`, whose artifact each of them would help to rebuild."""
    try:
        listed = holdings(Dial(peer.worker, lambda: connect(peer)), other)
    except (WireBroken, PeerRefused) as error:
        raise SourceFailed(f"worker {peer.worker}: {error}") from error
    return {Artifact(rank, each.artifact.version, each.artifact.kind): each.bytes for each in listed}
