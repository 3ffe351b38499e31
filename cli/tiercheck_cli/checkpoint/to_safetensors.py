"""Writes safetensors as Hugging Face libraries lay it out: files of limited size, and an index.

Bytes are copied as they are, so neither torch nor safetensors has to be installed.
Layout: https://huggingface.co/docs/safetensors, `save_torch_state_dict` of huggingface_hub.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from tiercheck.protocol.artifacts.contents import WholeTensor
from tiercheck_cli.checkpoint.saved import Saved, read_box, slabs
from tiercheck_cli.failure import USAGE, CannotDo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Progress = Callable[[str, int], None]
"""A function to call with the tensor's name and the bytes written since the last call."""


def choose_tensors(saved: Saved, prefix: str) -> dict[str, WholeTensor]:
    """Returns the tensors below `prefix`, by names without it; all if it is empty. Raises CannotDo."""
    if not prefix:
        return dict(saved.tensors)
    found = {
        name[len(prefix) + 1 :]: tensor
        for name, tensor in saved.tensors.items()
        if name.startswith((f"{prefix}/", f"{prefix}."))
    }
    if not found:
        tops = sorted({name.replace("/", ".").partition(".")[0] for name in saved.tensors})
        raise CannotDo(
            f'no tensor is below "{prefix}"; give --prefix one of {", ".join(tops)}, or "" for all', USAGE
        )
    return found


def write(
    saved: Saved, tensors: Mapping[str, WholeTensor], folder: Path, shard_bytes: int, progress: Progress
) -> list[str]:
    """Writes complete files and returns their names. Raises CannotDo, OSError."""
    shards: list[dict[str, WholeTensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(each.size for each in shards[-1].values()) + tensor.size > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    count = len(shards)
    files = (
        [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    for file, shard in zip(files, shards, strict=True):
        _write_file(saved, shard, folder / file, progress)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(tensor.size for tensor in tensors.values())},
            "weight_map": {
                name: file for file, shard in zip(files, shards, strict=True) for name in sorted(shard)
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        files.append(INDEX)
    return files


def _write_file(saved: Saved, tensors: Mapping[str, WholeTensor], path: Path, progress: Progress) -> None:
    # Widest elements first, as the format's own library does, so that each tensor is aligned.
    order = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in order:
        table[name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }  # fmt: skip
        offset += tensor.size
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, tensor in order:
            for slab in slabs(tensor):
                if tensor.size:
                    file.write(content := read_box(saved, tensor, slab))
                    progress(name, len(content))
        file.flush()
        os.fsync(file.fileno())
