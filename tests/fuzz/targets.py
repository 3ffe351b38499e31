"""Lists what comes from others: each target takes any bytes and ends with its declared error only.

A target does not stop at decoding: what was let in is used as the product uses it.
"""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tiercheck.protocol.artifacts.contents import Incomplete, check_complete, contents
from tiercheck.protocol.artifacts.pieces import Box, NotCovered, Piece, cover, pieces_table, read_pieces
from tiercheck.protocol.artifacts.slot import (
    PIECES,
    NotASlot,
    SlotLayout,
    beginning,
    read_header,
    read_tensors,
)
from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.encoding import Malformed, from_json, to_json
from tiercheck.protocol.local import (
    BeginSlot,
    BorrowArtifact,
    Hello,
    LauncherEvent,
    Order,
    Reply,
    ReportResume,
    Request,
    ReserveSlots,
    Welcome,
)
from tiercheck.protocol.plain_json import decode_with, parse_json
from tiercheck.protocol.report import Exact, Report
from tiercheck.protocol.version import Digests, Manifest, RankArtifact, Share, Version
from tiercheck.redaction import LONGEST_LINE, redacted
from tiercheck_cli.checkpoint.saved import open_folder
from tiercheck_cli.failure import CannotDo
from tiercheck_cli.simulate.assumptions import read_assumed
from tiercheck_operator.attach.injection import Attachment
from tiercheck_operator.manifests.pod import Unbuildable, build_pod, build_spare
from tiercheck_operator.model.parsing import parse_job
from tiercheck_operator.model.saved_placement import read_placement_data
from tiercheck_operator.report_bounds import to_operator_clock
from tiercheck_operator.sidecars import read_report
from tiercheck_sidecar.decoding import decode, decode_request, encode, with_checksum
from tiercheck_sidecar.digest import digest, is_well_formed
from tiercheck_sidecar.exchange.frames import ListedArtifact, PeerRequest, PeerResponse, WireBroken
from tiercheck_sidecar.exchange.handshake import CallerClaim, CallerProof, Challenge
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.node_memory import FolderOwner
from tiercheck_sidecar.remote.config import parse as parse_remote
from tiercheck_sidecar.remote.errors import RemoteConfigError
from tiercheck_sidecar.vault.seal import Seal, read_seal, seal_path
from tiercheck_sidecar.vault.stock import take_inventory
from tiercheck_sidecar.versions.report_updates import (
    ReportInterner,
    ReportUpdate,
    TierAnswer,
    UpdateRejected,
    difference,
)
from tiercheck_sidecar.versions.tally import HeldCopies, RankHoldings, RankOwn, WorkerHead
from tiercheck_sidecar.versions.tier_line import Messages, framed

_VERSION = Version(5, 1)
_DIGESTS = Digests(9000, 4096, ("a" * 32, "b" * 32, "c" * 32))
_LAYOUT = SlotLayout.plan(
    [(PIECES, "U8", (60,), 60), ("w", "F32", (4, 4), 64), ("b", "F32", (), 4), ("user", "U8", (32,), 32)]
)
_HEADER = _LAYOUT.state_word + _LAYOUT.header(0, _VERSION, 1, {"user_bytes": "10"})
_TABLE = pieces_table({"w": Piece((8, 4), Box((0, 0), (4, 4)), (3, 15)), "b": Piece.whole(())})


@dataclass(frozen=True)
class Target:
    """`run` raises nothing, whatever bytes it is given; `samples` are true ones."""

    run: Callable[[bytes], None]
    samples: tuple[bytes, ...]


def _message(cls: type[Any], *samples: object) -> Target:
    """By the sidecar's decoder, and by the trainer's."""

    def run(text: bytes) -> None:
        with contextlib.suppress(Malformed):
            found = decode(text, cls)
            assert decode(to_json(found), cls) == found, "what was let in can be said again"
        with contextlib.suppress(Malformed):
            to_json(from_json(text, cls))

    return Target(run, tuple(map(to_json, samples)))


def _request(text: bytes) -> None:
    """As `_message`: the sidecar's decoder finds the class by the operation."""
    with contextlib.suppress(Malformed):
        found = decode_request(text)
        assert decode_request(to_json(found)) == found, "what was let in can be said again"
    with contextlib.suppress(Malformed):
        to_json(from_json(text, Request))  # type: ignore[arg-type]


def _report(text: bytes) -> None:
    with contextlib.suppress(Malformed):
        to_json(to_operator_clock(read_report(text), 3.0))


def _exchange(text: bytes) -> None:
    with contextlib.suppress(Malformed, WireBroken):
        ask = decode(text, PeerRequest)
        hash((ask.artifact, ask.digests is not None and is_well_formed(ask.digests)))
    with contextlib.suppress(Malformed):
        decode(text, PeerResponse)


def _slot(text: bytes) -> None:
    """`text`: the header's JSON. The bytes behind it are there, and nothing else."""
    if len(text) > 1 << 20:
        return
    view = struct.pack("<Q", len(text)) + text + bytes(_LAYOUT.size - _LAYOUT.data_begin)
    with contextlib.suppress(NotASlot):
        assert beginning(view, len(view)) <= len(view)
        header = read_header(view)
        assert header.size <= len(view)
        for tensor in header.tensors:
            assert 8 + len(text) <= tensor.begin <= tensor.end <= header.size
        with contextlib.suppress(KeyError, ValueError):
            begin, end = header.blob("user", "user_bytes")
            assert begin <= end <= header.size
        with contextlib.suppress(Incomplete):
            check_complete(contents([(header, read_pieces(_TABLE))]))
    with contextlib.suppress(NotASlot):
        read_tensors(_Reader(view), len(view))


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def __call__(self, size: int) -> bytes:
        self._at += size
        return self._content[self._at - size : self._at]


def _beginning(view: bytes) -> None:
    with contextlib.suppress(NotASlot):
        beginning(view, 1 << 20)
    with contextlib.suppress(NotASlot):
        read_header(view, 1 << 20)


def _pieces(text: bytes) -> None:
    with contextlib.suppress(Malformed):
        found = read_pieces(text)
        header = read_header(_HEADER + bytes(_LAYOUT.size - _LAYOUT.data_begin))
        with contextlib.suppress(Incomplete):
            check_complete(contents([(header, found)]))
        for piece in found.values():
            assert sum(part.box.count for part in piece.parts()) == piece.count
            with contextlib.suppress(NotCovered):
                cover(piece.box, [(0, piece)])


_places = threading.local()


def _folder() -> Path:
    """Of this thread, used again and again; gone with the process's memory."""
    if not hasattr(_places, "folder"):
        _places.kept = tempfile.TemporaryDirectory(prefix="tiercheck-fuzz-")
        _places.folder = Path(_places.kept.name)
    found: Path = _places.folder
    return found


def _seal_file(content: bytes) -> None:
    slot = _folder() / "own-0.safetensors"
    slot.write_bytes(bytes(9000))
    seal_path(slot).write_bytes(content)
    seal = read_seal(slot)
    if seal is not None:
        str(seal)
        to_json(seal)
    take_inventory(_folder())


def _forged_seal(text: bytes) -> None:
    """By somebody who can make a checksum."""
    _seal_file(with_checksum(text))


def _manifest(text: bytes) -> None:
    with contextlib.suppress(Malformed):
        for artifact in from_json(text, Manifest).artifacts:
            hash((artifact.bytes, artifact.rank))


def _template(text: bytes) -> None:
    try:
        template = {"spec": parse_json(text)}
    except Malformed:
        return
    job = replace(_JOB, spec=replace(_JOB.spec, template=template))
    with contextlib.suppress(Unbuildable):
        build_pod(job, 0, 0, ["n1"], "image", prefer="n2", unwelcome=["n3"])
    with contextlib.suppress(Unbuildable):
        build_spare(job, 0, ["n1"], "image")


def _placement(text: bytes) -> None:
    with contextlib.suppress(ValueError, AttributeError):
        data = {str(key): str(value) for key, value in parse_json(text).items()}
        with contextlib.suppress(ValueError):
            read_placement_data(data).holders()


def _attachment(text: bytes) -> None:
    with contextlib.suppress(ValueError):
        Attachment.from_json(text.decode(errors="replace")).to_json()


def _assumptions(text: bytes) -> None:
    path = _folder() / "assume.yaml"
    path.write_bytes(text)
    with contextlib.suppress(CannotDo):
        read_assumed(str(path)).bytes_of("peer_bandwidth", "2Gi")


def _folder_record(text: bytes) -> None:
    folder = _folder() / "saved" / "rank-0-of-1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "000000000005-1.safetensors").write_bytes(_HEADER + bytes(_LAYOUT.size - _LAYOUT.data_begin))
    (folder / "000000000005-1.json").write_bytes(text)
    with contextlib.suppress(CannotDo):
        open_folder(folder.parent, None)


def _remote_settings(text: bytes) -> None:
    with contextlib.suppress(RemoteConfigError):
        parse_remote(text.decode(errors="replace"))


def _redaction(text: bytes) -> None:
    shown = redacted(text.decode("utf-8", "replace"))
    assert all(len(line) <= 4 * LONGEST_LINE for line in shown.split("\n"))


def _plain(text: bytes) -> None:
    with contextlib.suppress(Malformed):
        parse_json(text)
    with contextlib.suppress(Malformed):
        decode_with(json.loads, text)


_POD = {
    "containers": [
        {
            "name": "trainer", "image": "i", "command": ["x"], "args": ["y"],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            "env": [{"name": "PYTHONPATH", "value": "/x"}],
            "resources": {"limits": {"memory": "1Gi", "cpu": "1"}},
        }
    ],
    "initContainers": [{"name": "i", "image": "i"}], "volumes": [{"name": "v", "emptyDir": {}}],
    "securityContext": {"runAsUser": 0},
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": []}]
            }
        }
    },
    "terminationGracePeriodSeconds": 30, "hostNetwork": True, "topologySpreadConstraints": [],
}  # fmt: skip
_PLACEMENT = {
    "attempt": "1", "workers": '[0,"p","u",0,"n",[1]]\n[1,"q","v",0,"m",[0]]', "groups": "[[0],[1]]",
    "leaving": "[0,[1]]",
    "replanning": '{"checked":"a","since":1.5}', "nodes": '["k"]\n["n",["v"]]',
}  # fmt: skip
_ATTACHED = {
    "owner": {"apiVersion": "batch/v1", "kind": "Job", "name": "n", "uid": "u"}, "policy": "p",
    "container": "c", "workers": 2, "procsPerWorker": 1,
}  # fmt: skip
_JOB = parse_job(
    {
        "metadata": {"name": "j", "namespace": "n", "uid": "u", "resourceVersion": "1"},
        "spec": {"workers": 4, "template": {"spec": _POD}},
    }
)
_SEAL = Seal(0, _VERSION, 1, Tier.LOCAL, digest(memoryview(bytes(9000))))
_BLOCK = replace(_SEAL, tier=Tier.PEER, share=Share(1, (0, 3)), members=(_DIGESTS, _DIGESTS))
_ARTIFACT = RankArtifact(0, _VERSION, "artifacts/x", _DIGESTS)


def _json(value: object) -> tuple[bytes, ...]:
    return (json.dumps(value).encode(),)


def _news(text: bytes) -> None:
    """To a coordinator's end that has heard a whole word before."""
    vocabulary = ReportInterner()
    base = vocabulary.updated(None, decode(encode(_NEWS), ReportUpdate))
    with contextlib.suppress(Malformed, UpdateRejected):
        word = vocabulary.updated(base, decode(text, ReportUpdate))
        assert word.own.keys() == word.shapes.keys()


def _messages(text: bytes) -> None:
    with contextlib.suppress(Malformed):
        found = Messages().feed(text)
        assert b"".join(map(framed, found)) == text[: sum(len(each) + 4 for each in found)]


def _full(hint: Any) -> Any:
    """A value with something in every field."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _full(inside[0])
    if origin is tuple:
        return tuple(_full(each) for each in inside if each is not ...)
    if is_dataclass(hint):
        return hint(**{name: _full(inner) for name, inner in get_type_hints(hint).items()})
    return next(iter(hint)) if issubclass(hint, Enum) else hint(7)


_NEWS = difference(
    None,
    ReportInterner().build(WorkerHead("u", 1, 0), [(RankOwn(0), RankHoldings())], [((1,), HeldCopies())]),
    1,
    0,
)

TARGETS: dict[str, Target] = {
        "directive": _message(Directive, _full(Directive)),
        "report": Target(_report, (to_json(_full(Report)),)),
        "exchange": Target(
            _exchange,
            (to_json(PeerRequest("offer", 0, _VERSION, 1, _DIGESTS)),
                to_json(PeerResponse("send", missing=(0, 7), damaged=(1,),
                    listed=(ListedArtifact(PeerRequest("x", 0, _VERSION).artifact, 3),)))),
        ),
        "parity ask": _message(PeerRequest, PeerRequest("read", 0, _VERSION, share=Share(0, (0, 1)))),
        "handshake claim": _message(CallerClaim, CallerClaim("u", 0, 1, "n")),
        "handshake challenge": _message(Challenge, Challenge(1, "n", "p")),
        "handshake proof": _message(CallerProof, CallerProof("p")),
        "verdict": _message(TierVerdict, decode(b'{"attempt":1,"watermarks":{}}', TierVerdict)),
        "tier answer": _message(TierAnswer, TierAnswer(1, upload=_VERSION, received=(0,))),
        "tier news": Target(_news, (encode(_NEWS), encode(ReportUpdate(2, 1)))),
        "messages of a connection": Target(_messages, (framed(b"{}") + framed(b""),)),
        "hello": _message(Hello, Hello("rank", 1)),
        "request": Target(_request,
            tuple(map(to_json,
                (BorrowArtifact(0, 1, ranges=((0, 1),)), BeginSlot(3), ReserveSlots(1, None),
                    ReportResume(3, Exact.DIFFERS, 1, "m"))))),
        "launcher event": _message(LauncherEvent, LauncherEvent("exited", 1, 3)),
        "order": _message(Order,
            decode(b'{"attempt":1,"phase":"Hold","worker":0,"workers":1,"procs_per_worker":1,"master_host":"h",'
            b'"master_port":1}', Order)),
        "reply": _message(Reply, Reply(True, "/x")),
        "welcome": _message(Welcome, Welcome(1, 2, _VERSION, "/x", ("/y",))),
        "slot header": Target(_slot, (_HEADER[8:].rstrip(),)),
        "beginning of a slot": Target(_beginning, (_HEADER,)),
        "pieces": Target(_pieces, (_TABLE,)),
        "seal": Target(_seal_file, (with_checksum(to_json(_SEAL)), with_checksum(to_json(_BLOCK)))),
        "forged seal": Target(_forged_seal, (to_json(_SEAL), to_json(_BLOCK))),
        "owner": _message(FolderOwner, FolderOwner(1, 2.0)),
        "manifest": Target(_manifest, (to_json(Manifest("n/j", "u", _VERSION, 1, (_ARTIFACT,), 1.0)),)),
        "rank artifact": _message(RankArtifact, _ARTIFACT),
        "template": Target(_template, _json(_POD)),
        "placement": Target(_placement, _json(_PLACEMENT)),
        "attachment": Target(_attachment, _json(_ATTACHED)),
        "assumptions": Target(_assumptions, _json({"failures": "rsc-1", "domainFailures": {"rack": 1}})),
        "folder record": Target(_folder_record,
            _json({"size": _LAYOUT.size, "chunk": 4096, "crc32": [0, 0]})),
        "remote settings": Target(_remote_settings,
            _json({"s3": {"bucket": "b", "prefix": "p", "endpoint": "https://e"}})),
        "text for people": Target(_redaction, (b"password=a", b"://a:b@c", b'"Cookie": "a"', b"--token a")),
        "plain JSON": Target(_plain, (b'{"a":[1,2.5,"\\u00e9\\"[",null]}',)),
}  # fmt: skip
