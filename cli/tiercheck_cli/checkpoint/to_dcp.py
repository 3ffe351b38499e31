"""Writes a plain folder of torch.distributed.checkpoint, readable wherever torch is."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem

from tiercheck.protocol.artifacts.contents import DCP, DCP_BYTES, WholeTensor
from tiercheck.protocol.artifacts.pieces import Box
from tiercheck.trainer.state import user_state
from tiercheck.trainer.tensors.leaves import dtype_of
from tiercheck_cli.checkpoint.saved import Saved, read_box
from tiercheck_cli.failure import CannotDo

Progress = Callable[[str, int], None]


def write(saved: Saved, folder: Path, progress: Progress) -> list[str]:
    """What could not be taken along, as sentences. Raises CannotDo, OSError."""
    nested, stored, remarks = _dcp_state(saved) if saved.writer == DCP else _checkpointer_state(saved)
    planner = _Reading(saved, stored, progress)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves alone is what is wanted
        writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
        state_dict_saver.save(nested, storage_writer=writer, planner=planner, no_dist=True)
    return remarks


class _Reading(DefaultSavePlanner):
    """Plans with tensors that have no bytes, and reads each when its turn comes: one in memory at a time."""

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
    """As `get_state_dict` of torch.distributed.checkpoint would name it: model, optimizer (state,
    param_groups), and the script's own."""
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
        if top == "model":
            nested["model"][rest] = _nothing(tensor)
            stored[f"model.{rest}"] = tensor
        elif top.startswith("optimizer"):
            parameter, _, key = rest.rpartition("/")
            of = nested.setdefault(optimizer(int(top.removeprefix("optimizer"))), {"state": {}})
            of["state"].setdefault(parameter, {})[key] = _nothing(tensor)
            stored[f"{optimizer(int(top.removeprefix('optimizer')))}.state.{parameter}.{key}"] = tensor
        else:
            nested.setdefault(top, {})[rest] = _nothing(tensor)
            stored[f"{top}.{rest}"] = tensor
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
    return nested, stored, remarks


def _plain(content: bytes, what: str) -> Any:
    try:
        return user_state.unpack(content, lenient=True)  # the script's classes are not here
    except TypeError as error:
        raise CannotDo(f"{what} cannot be read: {error}") from error
