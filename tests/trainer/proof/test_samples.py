"""A sample says whether tensors are still what they were, by whatever way they were written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiercheck.trainer.tensors.samples import Sampler

MIB = 2**20


@given(
    shape=st.lists(st.integers(1, 70), max_size=3),
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.complex64]
    ),
)
def test_small_tensor_is_seen_whole(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    if tensor.nbytes >= 2048:
        return
    sampler = Sampler()
    before = sampler.take([tensor])
    for at in range(tensor.numel()):
        tensor.data.view(-1)[at] = 1
        assert not before.equals(sampler.take([tensor]))
        tensor.data.view(-1)[at] = 0
    assert before.equals(sampler.take([tensor]))


@given(begin=st.integers(0, 39 * MIB), seed=st.integers(0, 9))
def test_any_mebibyte_of_a_large_tensor_is_seen(begin: int, seed: int) -> None:
    tensor = torch.full((40 * MIB,), seed, dtype=torch.uint8)
    sampler = Sampler()
    before = sampler.take([tensor])
    tensor.data[begin : begin + MIB + 128] = seed + 1
    assert before.sums != sampler.take([tensor]).sums


@pytest.mark.parametrize("shape", [(5, 7), (64, 3, 9, 9)])
def test_same_values_give_the_same_sums_however_they_lie_in_memory(shape: tuple[int, ...]) -> None:
    plain = torch.randn(shape)
    turned = plain.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    assert Sampler().take([plain, turned]).sums[0] == Sampler().take([turned]).sums[0]


def test_a_tensor_in_new_memory_is_looked_at_there() -> None:
    tensor, sampler = torch.nn.Parameter(torch.ones(1000)), Sampler()
    before = sampler.take([tensor])
    tensor.data = torch.full((1000,), 2.0)
    assert not before.equals(sampler.take([tensor]))
    tensor.data = torch.ones(1000)
    assert before.equals(sampler.take([tensor]))


def test_nothing_is_seen_of_what_has_no_bytes() -> None:
    nothing: list[Tensor] = [torch.empty(0), torch.empty(3, device="meta"), torch.eye(3).to_sparse()]
    assert Sampler().take(nothing).sums == [0, 0, 0]
