"""Promise: a stored gradient has the same bits, and a mostly-zero one is small."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiercheck.trainer.deltas.encoding import (
    Encoded,
    decode,
    encode,
    have_same_bits,
    look_sparse,
    may_be_sparse,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def back(encoded: Encoded) -> Tensor | None:
    return decode(encoded.parts.get, encoded.about, CPU)


@given(
    rows=st.integers(200, 3000),
    width=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    kept=st.floats(0, 1),
    by_row=st.booleans(),
    minus_zeros=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_every_form_is_lossless(
    *, rows: int, width: int, dtype: torch.dtype, kept: float, by_row: bool, minus_zeros: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(rows, width, generator=generator).to(dtype)
    gradient *= torch.rand(rows, 1 if by_row else width, generator=generator) < kept
    gradient.abs_()  # the product left signed zeros behind
    for at in torch.randint(0, rows, (minus_zeros,), generator=generator).tolist():
        gradient[at, 0] = -0.0
    encoded = encode(gradient)
    restored = back(encoded)
    assert restored is not None
    assert have_same_bits(restored, gradient)
    assert encoded.nbytes <= gradient.nbytes


def test_few_rows_few_elements_and_nothing_are_small() -> None:
    embedding = torch.zeros(10_000, 64)
    embedding[[7, 4711]] = 1.5
    top_k = torch.zeros(512, 512)
    top_k.view(-1)[torch.arange(0, 512 * 512, 997)] = 2.0
    nothing = torch.zeros(512, 512)
    assert look_sparse([embedding, top_k, nothing, torch.randn(512, 512)]) == [True, True, True, False]
    assert encode(embedding).nbytes == 2 * (64 * 4 + 4)
    assert encode(top_k).nbytes < top_k.nbytes / 400
    assert encode(nothing).nbytes == 0
    for gradient in (embedding, top_k, nothing):
        restored = back(encode(gradient))
        assert restored is not None
        assert have_same_bits(restored, gradient)


def test_absent_gradient_stays_absent() -> None:
    assert decode(lambda suffix: None, None, CPU) is None


def test_order_in_memory_is_kept() -> None:
    for gradient in (
        torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(300, 70).t(),
        torch.randn(6, 5, 4).permute(2, 0, 1),
    ):
        restored = back(encode(gradient))
        assert restored is not None
        assert restored.stride() == gradient.stride()
        assert have_same_bits(restored, gradient)


def test_sparse_tensor_is_kept_as_it_is() -> None:
    indices = torch.tensor([[3, 1, 3]])
    gradient = torch.sparse_coo_tensor(indices, torch.randn(3, 8), (10, 8))
    for wanted in (gradient, gradient.coalesce()):
        assert not may_be_sparse(wanted)
        restored = back(encode(wanted))
        assert restored is not None
        assert restored.is_coalesced() == wanted.is_coalesced()
        assert have_same_bits(restored._values(), wanted._values())
        assert torch.equal(restored._indices(), wanted._indices())
