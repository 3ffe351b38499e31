"""Encodes gradients without their zeros, which come from frozen rows, unrouted experts, unused words.

Every form is lossless to the bit, including signed zeros:

    dense    all elements, in their order in memory (shape and strides are kept)
    rows     the rows of the last dimension that are not zero, and their numbers (embeddings, stacked experts)
    elements the same for single elements (top-k training)
    zero     no data
    coo      a torch.sparse gradient: its indices and values as they are

A sample decides whether a gradient is examined completely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiercheck.trainer.tensors.tensor_parts import NotCapturable, as_integers, dtype_name, dtype_of

SAMPLE = 1024
"""The number of elements examined first."""
WORTH = 0.75
"""The part of the dense size below which a sparse form is used."""
_SMALL = 64 * 1024  # bytes: smaller gradients are not examined
_CHUNK = 16 * 1024 * 1024  # bytes examined in one call


@dataclass(frozen=True)
class Encoded:
    """The parts to store, by suffix ("" is the gradient itself), and the parameters for `decode`.

    `about` is None for the common case: dense, in plain order, described by the stored tensor itself.
    """

    parts: dict[str, Tensor]
    about: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@torch.no_grad()
def encode(gradient: Tensor, sparse: bool = True) -> Encoded:
    """Returns the smallest form, which may share memory with `gradient`. `sparse`: try sparse forms.

    Raises NotCapturable for layouts other than strided and COO.
    """
    if gradient.layout is torch.sparse_coo:
        about = {"form": "coo", "shape": list(gradient.shape), "coalesced": gradient.is_coalesced()}
        return Encoded({"/indices": gradient._indices(), "/values": gradient._values()}, about)
    if gradient.layout is not torch.strided:
        raise NotCapturable(f"gradients of layout {gradient.layout} cannot be stored")
    if not gradient.is_contiguous():
        flat = _in_memory_order(gradient)
        if flat is None:
            return Encoded({"": gradient.contiguous()})
        return Encoded(
            {"": flat}, {"form": "dense", "shape": list(gradient.shape), "stride": list(gradient.stride())}
        )
    found = _sparse(gradient) if sparse and may_be_sparse(gradient) else None
    return found or Encoded({"": gradient})


def decode(
    part: Callable[[str], Tensor | None], about: Mapping[str, Any] | None, device: torch.device
) -> Tensor | None:
    """Decodes the result of `encode`; None if nothing was stored, because there was no gradient.

    `part` returns what was stored under a suffix. The result does not share memory with the parts, so it is
    aligned as torch's gradients are.
    """
    form = about["form"] if about else "dense"
    if form == "dense":
        stored = part("")
        if stored is None:
            return None
        if not about:
            return _moved(stored, device)
        whole = torch.empty_strided(about["shape"], about["stride"], dtype=stored.dtype, device=device)
        whole.as_strided(stored.shape, (1,)).copy_(stored)
        return whole
    assert about is not None
    if form == "zero":
        return torch.zeros(about["shape"], dtype=dtype_of(about["dtype"]), device=device)
    values = _moved(_needed(part, "/values"), device)
    if form == "coo":
        indices = _moved(_needed(part, "/indices"), device)
        sparse = torch.sparse_coo_tensor(indices, values, about["shape"], check_invariants=False)
        return sparse._coalesced_(about["coalesced"])
    whole = torch.zeros(about["shape"], dtype=values.dtype, device=device)
    index = _moved(_needed(part, "/index"), device).long()
    bits = as_integers(whole).view(-1, values.shape[1])
    bits[index] = as_integers(values)
    return whole


def may_be_sparse(gradient: Tensor) -> bool:
    """Returns whether a sparse form exists for the gradient and could be worth its cost."""
    return (
        gradient.layout is torch.strided
        and gradient.nbytes >= _SMALL
        and gradient.is_contiguous()
        and not gradient.is_complex()
    )


@torch.no_grad()
def look_sparse(gradients: Sequence[Tensor]) -> list[bool]:
    """Returns for each whether over half a sample is zero. All are on one device, for one transfer."""
    if not gradients:
        return []
    samples = []
    for gradient in gradients:
        bits = as_integers(gradient).view(-1)
        samples.append(bits[:: bits.numel() // SAMPLE | 1])  # odd: an even stride might cover one column
    counts = torch.stack([torch.count_nonzero(sample) for sample in samples]).tolist()
    return [2 * count < sample.numel() for count, sample in zip(counts, samples, strict=True)]


def _sparse(gradient: Tensor) -> Encoded | None:
    bits = as_integers(gradient)
    width = gradient.shape[-1] if gradient.dim() > 1 else 1
    by_row = bits.view(-1, width)
    index = _not_zero(by_row)
    if index.numel() == 0:
        return Encoded(
            {}, {"form": "zero", "shape": list(gradient.shape), "dtype": dtype_name(gradient.dtype)}
        )
    about = {"form": "sparse", "shape": list(gradient.shape)}
    rows = (
        Encoded({"/index": index, "/values": gradient.view(-1, width)[index]}, about) if width > 1 else None
    )
    if rows is not None and rows.nbytes * 8 < gradient.nbytes:
        return rows  # small enough: trying single elements costs more than it saves
    single = _not_zero(bits.view(-1, 1))
    if single.numel() * (gradient.element_size() + single.element_size()) < (
        rows.nbytes if rows is not None else gradient.nbytes
    ):
        rows = Encoded({"/index": single, "/values": gradient.view(-1, 1)[single]}, about)
    return rows if rows is not None and rows.nbytes < WORTH * gradient.nbytes else None


def _not_zero(by_row: Tensor) -> Tensor:
    """Returns the numbers of rows with a bit set. Works in chunks, to need little memory."""
    step = max(1, _CHUNK // (by_row.shape[1] * by_row.element_size()))
    found = []
    for begin in range(0, by_row.shape[0], step):
        piece = by_row[begin : begin + step]
        mask = piece.ne(0).any(dim=1) if by_row.shape[1] > 1 else piece.view(-1).ne(0)
        found.append(mask.nonzero().view(-1) + begin)
    index = torch.cat(found)
    return index.int() if by_row.shape[0] < 2**31 else index


def _in_memory_order(gradient: Tensor) -> Tensor | None:
    """Returns all elements in memory order; None if they overlap or leave gaps."""
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    plain = gradient.permute(order)
    return plain.view(-1) if plain.is_contiguous() else None


def _needed(part: Callable[[str], Tensor | None], suffix: str) -> Tensor:
    stored = part(suffix)
    if stored is None:
        raise ValueError(f"a sparse gradient lacks its {suffix[1:]}")
    return stored


def _moved(stored: Tensor, device: torch.device) -> Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device=device).copy_(stored)
