"""Converts versions to torch.distributed.checkpoint folders, and files of other tools to versions.

Tensors are copied one by one, with meta tensors and mapped files, so the model need not fit into memory.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from tiercheck.plain_files import open_plain
from tiercheck.protocol.artifacts.contents import DCP, DCP_BYTES, FORMAT, IMPORT, WholeTensor
from tiercheck.protocol.artifacts.pieces import Box, Piece, pieces_table
from tiercheck.protocol.artifacts.slot import PIECES, SlotLayout, read_tensors
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.backends.folder_backend import FolderBackend
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.slot_file import USER_BLOB, USER_BYTES, SlotWriter, bytes_into
from tiercheck.trainer.state.user_state import capacity_for
from tiercheck.trainer.tensors.tensor_parts import dtype_name, dtype_of
from tiercheck_cli.checkpoint.saved import Saved, read_box
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_operator.model.conditions import listed

Progress = Callable[[str, int], None]


def write_dcp(saved: Saved, folder: Path, progress: Progress) -> list[str]:
    """Writes a folder and returns what could not be included, as sentences. Raises CannotDo, OSError."""
    nested, stored, remarks = _dcp_state(saved) if saved.writer == DCP else _checkpointer_state(saved)
    planner = _Reading(saved, stored, progress)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that one process saves alone, as intended
        writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
        state_dict_saver.save(nested, storage_writer=writer, planner=planner, no_dist=True)
    return remarks


class _Reading(DefaultSavePlanner):
    """Plans with meta tensors, and reads each one when it is written: one in memory at a time."""

    def __init__(self, saved: Saved, stored: Mapping[str, WholeTensor], progress: Progress) -> None:
        super().__init__()
        self._saved, self._stored, self._progress = saved, stored, progress

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        tensor = self._stored.get(write_item.index.fqn)
        if tensor is None:
            return super().resolve_data(write_item)
        self._progress(write_item.index.fqn, tensor.size)
        dtype = dtype_of(tensor.dtype)
        if not tensor.size:
            return torch.empty(tensor.shape, dtype=dtype)
        content = read_box(self._saved, tensor, Box.whole(tensor.shape))
        return torch.frombuffer(content, dtype=dtype).view(tensor.shape)


def _nothing(tensor: WholeTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype), device="meta")


_State = tuple[dict[str, Any], dict[str, WholeTensor], list[str]]


def _dcp_state(saved: Saved) -> _State:
    flat: dict[str, Any] = {name: _nothing(tensor) for name, tensor in saved.tensors.items()}
    paths: dict[str, tuple[str | int, ...]] = {}
    for rank, note in enumerate(saved.notes):
        for fqn, path in note["planner"] or []:
            paths.setdefault(fqn, tuple(path))
        content = saved.entry(rank, DCP_BYTES, "dcp_bytes_length") if note["bytes"] else b""
        for fqn, (begin, end) in note["bytes"].items():
            flat.setdefault(fqn, _plain(content[begin:end], fqn))
    nested = unflatten_state_dict(flat, {fqn: paths.get(fqn, (fqn,)) for fqn in flat})
    return nested, dict(saved.tensors), []


def _checkpointer_state(saved: Saved) -> _State:
    """Names state as torch's `get_state_dict` does: model, optimizer (state, param_groups), script's own."""
    nested: dict[str, Any] = {"model": {}}
    stored: dict[str, WholeTensor] = {}
    remarks: list[str] = []
    contents = [_plain(saved.entry(rank, "user", "user_bytes"), "user") for rank in range(len(saved.slots))]
    facts = [content["facts"] for content in contents]
    many = len(facts[0]["optimizers"])

    def optimizer(index: int) -> str:
        return "optimizer" if many == 1 else f"optimizer{index}"

    for name, tensor in saved.tensors.items():
        top, _, rest = name.partition("/")
        path: tuple[str, ...] = (top, rest)
        if top.startswith("optimizer"):
            parameter, _, key = rest.rpartition("/")
            path = (optimizer(int(top.removeprefix("optimizer"))), "state", parameter, key)
        set_element(nested, path, _nothing(tensor))
        stored[".".join(path)] = tensor
    for fact in facts:
        for index, described in enumerate(fact["optimizers"]):
            of = nested.setdefault(optimizer(index), {"state": {}})
            for parameter, state in described["states"].items():
                for key, each in state.items():
                    if "value" in each:
                        of["state"].setdefault(parameter, {}).setdefault(key, each["value"])
    for index, described in enumerate(facts[0]["optimizers"]):
        names = list(dict.fromkeys(name for fact in facts for name in fact["optimizers"][index]["states"]))
        if len(described["groups"]) == 1:
            nested[optimizer(index)]["param_groups"] = [{**described["groups"][0], "params": names}]
        else:
            remarks.append(
                f"{optimizer(index)}: which parameter is in which of its groups is not stored, so "
                "param_groups is left out"
            )
    for key, value in facts[0]["model_extra"].items():
        nested["model"][key] = value
    if contents[0]["state"]:
        nested["state"] = contents[0]["state"]
        if len(contents) > 1:
            remarks.append("of the script's own state (state) that of rank 0 is taken")
    texts = _keys_as_text({"model": facts[0]["model_extra"], "state": contents[0]["state"]})
    if texts:
        remarks.append(
            f"the keys of {listed(texts, 3)} are not text; torch writes them as text, and an "
            "import brings them back as text: set these anew after restore()"
        )
    return nested, stored, remarks


def _keys_as_text(value: Any, place: str = "") -> list[str]:
    """Returns the places of the mappings in `value` with keys other than text."""
    if isinstance(value, Mapping):
        here = [place] if not all(isinstance(key, str) for key in value) else []
        inside = [(f"{place}.{key}" if place else str(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        here, inside = [], [(f"{place}.{index}", each) for index, each in enumerate(value)]
    else:
        return []
    return here + [found for name, each in inside for found in _keys_as_text(each, name)]


def _plain(content: bytes, what: str) -> Any:
    try:
        return user_state.unpack(content, lenient=True)  # the script's classes are not available here
    except TypeError as error:
        raise CannotDo(f"{what} cannot be read: {error}") from error


Fill = Callable[[Tensor], None]


@dataclass
class Incoming:
    """The content to import. Names are those of a `Checkpointer`."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], Fill]] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    """The facts about the optimizer (`capture.Inventory`); None: weights only."""
    model_extra: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def write_version(found: Incoming, folder: Path, version: Version, progress: Progress) -> Path:
    """Writes a version into a `Checkpointer`'s folder and returns its slot's path. Raises CannotDo."""
    facts: dict[str, Any] = {
        "model_extra": found.model_extra,
        "optimizers": [] if found.optimizer is None else [found.optimizer],
    }
    buffer = io.BytesIO()
    torch.save({"facts": facts, "random": None, "state": found.state}, buffer)
    blob = buffer.getvalue()
    pieces = pieces_table({name: Piece.whole(shape) for name, (_, shape, _) in found.tensors.items()})
    room = capacity_for(len(blob))
    try:
        layout = SlotLayout.plan(
            [
                (PIECES, "U8", (len(pieces),), len(pieces)),
                *(
                    (name, dtype_name(dtype), shape, Box.whole(shape).count * dtype.itemsize)
                    for name, (dtype, shape, _) in found.tensors.items()
                ),
                (USER_BLOB, "U8", (room,), room),
            ]
        )
        backend = FolderBackend(folder, 0, 1, keep=2)
        backend.attempt = version.attempt
        path = backend.begin(version.step, layout.size, Kind.SNAPSHOT)
        try:
            slot = SlotWriter(path)
            views = slot.begin(layout)
            for name, (_, _, fill) in found.tensors.items():
                fill(views[name])
                progress(name, views[name].nbytes)
            bytes_into(views[PIECES], pieces)
            bytes_into(views[USER_BLOB], blob)
            slot.finish(layout, 0, version, 1, {FORMAT: IMPORT, USER_BYTES: str(len(blob))})
        except BaseException:
            backend.abandon(path, version.step, Kind.SNAPSHOT)
            raise
        backend.complete(path, version.step, layout.size, Kind.SNAPSHOT)
    except CannotDo:
        raise
    except Exception as error:  # the content may have any form; torch has an error of its own for each
        raise CannotDo(f"it cannot be made a version: {error}") from error
    return backend.path_of(0, version)


def from_safetensors(folder: Path) -> Incoming:
    """Reads all tensors of all *.safetensors files as the model's weights. Raises CannotDo."""
    found = Incoming()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CannotDo(f"{folder} has no *.safetensors", USAGE)
    for path in files:
        try:
            with _opened(path) as file:
                tensors = read_tensors(file.read, os.fstat(file.fileno()).st_size)
            for tensor in tensors:
                if f"model/{tensor.name}" in found.tensors:
                    raise CannotDo(f"{tensor.name} is in two files of {folder}")
                fill = _from_file(path, tensor.begin, tensor.end)
                found.tensors[f"model/{tensor.name}"] = (dtype_of(tensor.dtype), tensor.shape, fill)
        except (OSError, ValueError, TypeError) as error:
            raise CannotDo(f"{path} cannot be read: {error}") from error
    return found


def _opened(path: Path) -> BinaryIO:
    """Opens a file and follows links, of which a Hugging Face cache consists."""
    return open(open_plain(path.resolve()), "rb")


def _from_file(path: Path, begin: int, end: int, most: int = 64 * 1024 * 1024) -> Fill:
    def fill(view: Tensor) -> None:
        if begin == end:
            return
        target = view.reshape(-1).view(torch.uint8)
        with _opened(path) as file:
            file.seek(begin)
            for at in range(0, end - begin, most):
                content = file.read(min(most, end - begin - at))
                if not content:
                    raise CannotDo(f"{path} is cut off")
                target[at : at + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    return fill


class _MetadataOnly(pickle.Unpickler):
    """Unpickles torch's `.metadata`; only the plain classes in it are allowed, so that no code runs."""

    _ALLOWED = frozenset({
        ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
        ("builtins", "set"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"),
    })  # fmt: skip
    _CLASSES = frozenset({
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        ours = module == "torch.distributed.checkpoint.metadata" and name in self._CLASSES
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if ours or dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which does not belong there")


def from_dcp(folder: Path, prefix: str) -> Incoming:
    """Reads a folder of torch.distributed.checkpoint. `prefix`: the model in it (empty: all is the model).

    `optimizer` and `state` beside it are read in the form that `export` writes. Raises CannotDo."""
    try:
        with _opened(folder / ".metadata") as file:
            metadata: Metadata = _MetadataOnly(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError("it is no metadata of torch.distributed.checkpoint")
        return _described(folder, metadata, prefix)
    except CannotDo:
        raise
    except Exception as error:  # a pickle may hold anything, and each part raises an error of its own kind
        raise CannotDo(f"{folder / '.metadata'} cannot be read: {error!r}") from error


def _described(folder: Path, metadata: Metadata, prefix: str) -> Incoming:
    source = _DcpFolder(folder, metadata)
    found = Incoming()
    optimizer: dict[str, Any] = {"class": "", "groups": [], "states": {}}
    nested: dict[str, Any] = {}
    for fqn, described in metadata.state_dict_metadata.items():
        path = tuple((metadata.planner_data or {}).get(fqn) or fqn.split("."))
        rest = fqn if not prefix else fqn.removeprefix(f"{prefix}.")
        if not prefix or rest != fqn:
            name, inside = _extra_state(rest, path)
            if inside:
                set_element(found.model_extra, (name, *inside), _value(source, fqn, described))
            elif isinstance(described, TensorStorageMetadata):
                found.tensors[f"model/{rest}"] = source.tensor(fqn, described)
            else:
                found.model_extra[rest] = source.value(fqn)
        elif path[:2] == ("optimizer", "state") and len(path) == 4:
            name, key = str(path[2]), str(path[3])
            state = optimizer["states"].setdefault(name, {})
            if isinstance(described, TensorStorageMetadata):
                found.tensors[f"optimizer0/{name}/{key}"] = source.tensor(fqn, described)
                state[key] = {"device": "cpu" if not described.size else "as its parameter"}
            else:
                state[key] = {"value": source.value(fqn)}
        elif path[0] == "state" or path[:2] == ("optimizer", "param_groups"):
            set_element(nested, path, _value(source, fqn, described))
        else:
            found.left_out.append(fqn)
    groups = nested.get("optimizer", {}).get("param_groups")
    if groups:  # with no state, as of SGD without momentum, they have the rate that a schedule reached
        optimizer["groups"] = [
            {key: value for key, value in group.items() if key != "params"} for group in groups
        ]
        found.optimizer = optimizer
    elif optimizer["states"]:
        found.left_out += [name for name in found.tensors if name.startswith("optimizer0/")]
        found.tensors = {
            name: each for name, each in found.tensors.items() if not name.startswith("optimizer0/")
        }
    found.state = nested.get("state", {})
    if not any(name.startswith("model/") for name in found.tensors):
        tops = sorted({fqn.partition(".")[0] for fqn in metadata.state_dict_metadata})
        raise CannotDo(
            f'no tensor is below "{prefix}"; give --prefix one of {", ".join(tops)}, or "" if all is the '
            "model",
            USAGE,
        )
    return found


def _extra_state(name: str, path: tuple[str | int, ...]) -> tuple[str, tuple[str | int, ...]]:
    """Returns the key of a module's extra state, and the place in it that torch has made an item of its own.

    `name`, `path`: of the item. Without such a place the key is `name`.
    """
    for index, part in enumerate(path[:-1]):
        if str(part).rpartition(".")[2] == "_extra_state":
            inside = path[index + 1 :]
            return name.removesuffix("".join(f".{each}" for each in inside)), inside
    return name, ()


def _value(source: _DcpFolder, fqn: str, described: TensorStorageMetadata | BytesStorageMetadata) -> Any:
    if isinstance(described, BytesStorageMetadata):
        return source.value(fqn)
    dtype, shape, fill = source.tensor(fqn, described)
    fill(value := torch.empty(shape, dtype=dtype))
    return value


class _DcpFolder:
    """Reads items where torch's `FileSystemWriter` put them, each with `weights_only`."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._places = {
            (index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()
        }

    def value(self, fqn: str) -> Any:
        return self._load(fqn, ())

    def tensor(self, fqn: str, described: TensorStorageMetadata) -> tuple[torch.dtype, tuple[int, ...], Fill]:
        shape = tuple(int(extent) for extent in described.size)
        whole = Box.whole(shape)
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks]
        if min(shape, default=0) < 0 or not isinstance(described.properties.dtype, torch.dtype):
            raise ValueError(f"{fqn} is no tensor")

        def fill(view: Tensor) -> None:
            for box in boxes:
                if box.count:
                    target, part = view[box.within(whole)], self._load(fqn, box.offset)
                    if not isinstance(part, Tensor) or part.shape != target.shape:
                        raise CannotDo(f"{fqn} is stored in another shape than its metadata says")
                    target.copy_(part)

        return described.properties.dtype, shape, fill

    def _load(self, fqn: str, offset: tuple[int, ...]) -> Any:
        place = self._places.get((fqn, offset))
        if place is None:
            raise CannotDo(f"{fqn} has no part at {offset} in {self._folder}")
        path = (self._folder / place.relative_path).resolve()
        if getattr(place, "transform_descriptors", None) or not path.is_relative_to(self._folder.resolve()):
            raise CannotDo(f"{fqn} is stored in a way that is not known here")
        try:
            with _opened(path) as file:
                file.seek(place.offset)
                content = file.read(min(place.length, os.fstat(file.fileno()).st_size))
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # pickle raises many kinds, all meaning the same here
            raise CannotDo(f"{fqn} cannot be read from {path}: {error}") from error
