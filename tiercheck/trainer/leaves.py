"""What a tensor's bytes are: of one that is sharded, quantised or otherwise wrapped, the plain tensors that it consists of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tiercheck.protocol.pieces import Piece

PLAIN = {Tensor, nn.Parameter, nn.Buffer}
"""Classes of tensors whose bytes are all there is."""


class NotCapturable(TypeError):
    """Something in the state cannot be stored and put back exactly; the message names it."""


class Entry(NamedTuple):
    """One tensor to store. `lazy`: only `optimizer.step` changes it, so it may be copied while training goes on."""

    name: str
    tensor: Tensor
    lazy: bool
    must_be_finite: bool = False
    """A parameter, or what the optimizer keeps of it."""
    origin: Tensor | None = None
    """What `tensor` is the local shard of, if it is sharded."""
    piece: Piece | None = None
    """What `tensor` is of the whole; None: this rank's own affair."""


def local_shard(tensor: Tensor) -> Tensor:
    """The bytes this rank owns: the local shard of a DTensor, the tensor itself otherwise.

    Raises NotCapturable for other tensor subclasses, whose meaning is not in their bytes alone.
    """
    plain = _unwrapped(tensor)
    if type(plain) not in PLAIN:
        raise NotCapturable(f"tensors of {type(plain).__name__} cannot be stored")
    if plain.layout is not torch.strided:
        raise NotCapturable(f"tensors of layout {plain.layout} cannot be stored")
    return plain.detach()


def parts(tensor: Tensor, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The plain tensors whose bytes make up this rank's part of a tensor, by their path in it ("" of a plain one).

    A wrapper, such as a quantised tensor, consists of others, and says so by `__tensor_flatten__`
    (torch.utils._python_dispatch). Raises NotCapturable for subclasses that do not.
    """
    shard = _unwrapped(tensor)
    if type(shard) in PLAIN or not hasattr(shard, "__tensor_flatten__"):
        yield path, local_shard(shard)
        return
    names, _ = shard.__tensor_flatten__()
    for name in names:
        yield from parts(getattr(shard, name), f"{path}/{name}")


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it consists of other tensors."""
    return type(tensor) not in PLAIN and hasattr(_unwrapped(tensor), "__tensor_flatten__")


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor whose shard here is a plain tensor."""
    return type(tensor).__name__ == "DTensor" and type(getattr(tensor, "_local_tensor", None)) in PLAIN


def _unwrapped(tensor: Tensor) -> Tensor:
    """Without what distributes it, or waits for it."""
    if type(tensor) in PLAIN:
        return tensor
    if hasattr(tensor, "placements"):
        # Not by `to_local`, whose way through autograd takes twenty times as long.
        local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
        tensor = local
    if hasattr(tensor, "wait"):  # an unfinished collective hides behind an AsyncCollectiveTensor
        tensor = tensor.wait()
    return tensor


def memory(tensor: Tensor) -> tuple[torch.device, int]:
    """Where a plain tensor lies."""
    return tensor.device, tensor.data_ptr()


def list_tensor(name: str, value: Tensor, lazy: bool, entries: list[Entry]) -> None:
    """Add what has to be stored of a tensor. Raises NotCapturable, with its name."""
    try:
        if not is_wrapper(value):
            entries.append(Entry(name, local_shard(value), lazy, lazy, value))
            return
        for path, leaf in parts(value):
            entries.append(Entry(f"{name}{path}", leaf, lazy, lazy, leaf))
    except NotCapturable as error:
        raise NotCapturable(f"{name}: {error}") from None
