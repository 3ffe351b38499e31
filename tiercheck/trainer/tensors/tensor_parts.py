"""Lists the plain tensors that a tensor consists of, and names their dtypes as a slot does.

A tensor may be sharded, quantised or otherwise wrapped. A slot is a safetensors file, so every dtype needs
the name that this format gives it.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.protocol.artifacts.pieces import Piece

PLAIN = {Tensor, nn.Parameter, nn.Buffer}
"""The classes of tensors that are nothing but their bytes."""


def read_each(attribute: Callable[[Tensor], Any], tensors: Iterable[Tensor]) -> list[Any]:
    """Reads an attribute that torch's C++ has of every tensor.

    A subclass's `__torch_function__` is not called, nor even looked for: with a sharded tensor the search
    takes longer than the reading.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(attribute, tensors))


def parameters_of(*optimizers: Optimizer) -> list[Any]:
    """Returns the parameters of optimizers, in the order of their groups."""
    return list(chain.from_iterable([group["params"] for each in optimizers for group in each.param_groups]))


def write_count(tensor: Tensor) -> int:
    """Returns torch's counter of in-place writes; 0 for a tensor of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


class NotCapturable(TypeError):
    """Something in the state cannot be stored and put back exactly; the message names it."""


class Entry(NamedTuple):
    """One tensor to store. `lazy`: only `optimizer.step` changes it, so it may be copied during training."""

    name: str
    tensor: Tensor
    lazy: bool
    must_be_finite: bool = False
    """True for a parameter, or what the optimizer keeps of it."""
    origin: Tensor | None = None
    """The tensor that `tensor` is the local shard of, or itself; None: not recorded."""
    piece: Piece | None = None
    """The part of the whole that `tensor` is; None: it is private to this rank."""


def shard_or_self(tensor: Tensor) -> Tensor:
    """Returns the local shard of a DTensor, whatever it is, or else the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Returns the bytes this rank owns: the local shard of a DTensor, the tensor itself otherwise.

    Raises NotCapturable for other tensor subclasses, because their bytes are not their whole meaning.
    """
    plain = _unwrapped(tensor)
    if type(plain) not in PLAIN:
        raise NotCapturable(f"tensors of {type(plain).__name__} cannot be stored")
    if plain.layout is not torch.strided:
        raise NotCapturable(f"tensors of layout {plain.layout} cannot be stored")
    return plain.detach()


def parts(tensor: Tensor, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the plain tensors that make up this rank's part of a tensor, by path ("" of a plain one).

    A wrapper, such as a quantised tensor, consists of others, and lists them by `__tensor_flatten__`
    (torch.utils._python_dispatch). Raises NotCapturable for subclasses that do not.
    """
    shard = _unwrapped(tensor)
    if type(shard) in PLAIN or not hasattr(shard, "__tensor_flatten__"):
        yield path, local_shard(shard)
        return
    names, _ = shard.__tensor_flatten__()
    for name in names:
        yield from parts(getattr(shard, name), f"{path}/{name}")


def first_part(tensor: Tensor) -> Tensor:
    """Returns the first plain tensor of this rank's part of a tensor."""
    return next(leaf for _, leaf in parts(tensor)) if is_wrapper(tensor) else local_shard(tensor)


def is_wrapper(tensor: Tensor) -> bool:
    """Returns whether a tensor consists of other tensors."""
    return type(tensor) not in PLAIN and hasattr(_unwrapped(tensor), "__tensor_flatten__")


def _unwrapped(tensor: Tensor) -> Tensor:
    """Returns the tensor without what distributes it, or waits for it."""
    if type(tensor) in PLAIN:
        return tensor
    if hasattr(tensor, "placements"):
        # Not by `to_local`, which goes through autograd and takes twenty times as long.
        local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
        tensor = local
    if hasattr(tensor, "wait"):  # an unfinished collective hides behind an AsyncCollectiveTensor
        tensor = tensor.wait()
    return tensor


def memory(tensor: Tensor) -> tuple[torch.device, int]:
    """Returns the device and the address of a plain tensor."""
    return tensor.device, tensor.data_ptr()


def exact_memory(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what two tensors have in common if they are one in memory: address, dtype, shape, strides."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def has_plain_bytes(tensor: Tensor) -> bool:
    """Returns whether a tensor's bytes, in memory order, are its values."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor's bits as integers of the same size."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether shape, dtype and all bits are equal: a NaN equals itself, -0.0 differs from 0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_words(one), _words(other))


def _words(tensor: Tensor) -> Tensor:
    plain = tensor.detach().contiguous().view(-1)
    return plain if plain.dtype == torch.bool or plain.is_complex() else as_integers(plain)


def held_by(tensors: Iterable[Tensor]) -> Callable[[Tensor], bool]:
    """Returns a test of whether every byte of a plain tensor is also in these, however they are cut.

    The work is done at its first call.
    """
    listed = list(tensors)

    @cache
    def memory_of_all() -> tuple[set[tuple[Any, ...]], dict[torch.device, list[tuple[int, int]]]]:
        spans: dict[torch.device, list[tuple[int, int]]] = {}
        for device, begin, end in sorted(map(_span, filter(_is_dense, listed)), key=lambda span: span[1:]):
            found = spans.setdefault(device, [])
            if found and begin <= found[-1][1]:
                found[-1] = found[-1][0], max(end, found[-1][1])
            else:
                found.append((begin, end))
        return {(*_span(tensor), tensor.shape, tensor.stride()) for tensor in listed}, spans

    def held(tensor: Tensor) -> bool:
        same, spans = memory_of_all()
        device, begin, end = span = _span(tensor)
        if (*span, tensor.shape, tensor.stride()) in same:
            return True
        found = spans.get(device, [])
        at = bisect_right(found, (begin, sys.maxsize)) - 1
        return at >= 0 and end <= found[at][1]

    return held


def _span(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Returns the device, the address of the first byte and that after the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.device, tensor.data_ptr(), tensor.data_ptr() + size


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor has every element of its memory once, in whatever order."""
    _, begin, end = _span(tensor)
    return end - begin == tensor.nbytes


def write(target: Tensor, value: Tensor) -> None:
    """Writes every element once: an expanded tensor (`Tensor.expand`) has some many times."""
    once = tuple(slice(None) if stride else slice(0, 1) for stride in target.stride())
    with writable(target):
        target[once].copy_(value[once])


def writable(tensor: Tensor) -> AbstractContextManager[Any]:
    """Returns the mode in which torch allows writes to a tensor: some buffers are made in an evaluation."""
    # inference_mode(False) would record gradients, also where the caller does not want that.
    return torch.inference_mode() if tensor.is_inference() else nullcontext()


@contextmanager
def named(name: str) -> Iterator[None]:
    """Adds a name to NotCapturable errors from the block, and a remedy if it is that of a parameter."""
    try:
        yield
    except NotCapturable as error:
        remedy = (
            f"; if it is frozen, and the script loads it itself at each start: "
            f"Checkpointer(..., leave_out=[{name.removeprefix('model/')!r}])"
        )
        raise NotCapturable(f"{name}: {error}{remedy if name.startswith('model/') else ''}") from None


def list_tensor(name: str, value: Tensor, lazy: bool, entries: list[Entry]) -> None:
    """Adds what has to be stored of a tensor. Raises NotCapturable, with its name."""
    with named(name):
        if value.is_meta:
            raise NotCapturable("it has no memory, it is on the meta device")
        if not is_wrapper(value):
            entries.append(Entry(name, local_shard(value), lazy, lazy, value))
            return
        for path, leaf in parts(value):
            entries.append(Entry(f"{name}{path}", leaf, lazy, lazy, leaf))


_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# Dtypes that the format has no name for (only TierCheck reads these), or that not every torch has.
_NAMES |= {
    dtype: name
    for attribute, name in (
        ("complex128", "C128"),
        ("complex32", "C32"),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
        ("float8_e8m0fnu", "F8_E8M0"),
        ("float4_e2m1fn_x2", "F4_E2M1_X2"),
    )
    if (dtype := getattr(torch, attribute, None)) is not None
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns safetensors' name of `dtype`. Raises TypeError if the format has none."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TypeError(f"tensors of {dtype} cannot be stored") from None


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of that name. Raises TypeError if torch has no such dtype."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise TypeError(f"unknown dtype {name!r} in a slot") from None
