"""Promise: a fingerprint tells any two states apart, on whatever device it is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiercheck.trainer.proof.state_hash import fingerprints, first_difference, state_of_turn, turns
from tiercheck.trainer.tensors.samples import Sampler


@pytest.mark.parametrize("count", [1, 7, 1000, 16_384, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_one_bit_anywhere_changes_it(count: int, dtype: torch.dtype) -> None:
    values = torch.rand(count).gt(0.5) if dtype == torch.bool else torch.randn(count, dtype=dtype)
    before = fingerprints([values])
    assert fingerprints([values.clone()]) == before
    for at in {0, count // 2, count - 1}:
        changed = values.clone()
        changed.view(torch.uint8)[at * values.element_size()] ^= 1
        assert fingerprints([changed]) != before


@given(st.integers(0, 2**31), st.integers(0, 99_999), st.integers(0, 99_999))
def test_neighbouring_roundings_that_cancel_in_a_sum_are_seen(seed: int, up: int, down: int) -> None:
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(seed)) + 1
    changed = values.clone()
    changed.view(torch.int32)[up] += 1
    changed.view(torch.int32)[down] -= 1
    assert (fingerprints([changed]) == fingerprints([values])) == (up == down)


def test_odd_places_and_orders_in_memory_do_not_matter() -> None:
    values = torch.randn(300, 301)
    shifted = torch.empty(300 * 301 + 1)[1:].view(300, 301).copy_(values)
    turned = values.t().contiguous().t()
    assert fingerprints([values]) == fingerprints([shifted]) == fingerprints([turned])


def test_difference_is_named() -> None:
    places = [(0, 0, ""), (0, 1, "exp_avg")]
    tensors = [torch.randn(4), torch.randn(50_000)]
    wanted = fingerprints(tensors)
    assert first_difference(places, tensors, wanted) == ""
    tensors[1][3] = 0
    assert first_difference(places, tensors, wanted) == (0, 1, "exp_avg")


def test_all_tensors_have_their_turn() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert turns(40 * 4, 0) == 3
    seen = [{place for place, _ in state_of_turn([optimizer], step)} for step in range(3)]
    assert len(set.union(*seen)) == sum(map(len, seen)) == 40 * 4


def test_small_state_is_checked_whole_and_a_large_one_in_eight_turns() -> None:
    assert turns(16, 10_000) == 1
    assert turns(16, 2 * 2**26) == 2
    assert turns(10_000, 2**40) == 8


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
