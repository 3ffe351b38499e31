"""Promise: a probed part of a tensor gets the bits that the whole would have got."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from tests.examples import examples
from tiercheck.trainer.deltas.encoding import have_same_bits
from tiercheck.trainer.state.replayable import inseparable

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"maximize": True, "foreach": True},
    ],
    "Adam": [{}, {"weight_decay": 0.01, "amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True, "foreach": True}],
    "Adamax": [{}, {"weight_decay": 0.01}],
    "NAdam": [{}, {"weight_decay": 0.01, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"weight_decay": 0.01}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.01}],
    "Rprop": [{}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.01}],
    "Adadelta": [{}, {"weight_decay": 0.01}],
    "ASGD": [{}, {"weight_decay": 0.01}],
}
CASES = [
    *itertools.product(OPTIONS, (torch.float32, torch.float64)),
    *itertools.product(("AdamW",), (torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5000), data=st.data())
@settings(max_examples=examples(6))
def test_parts_get_the_bits_of_the_whole(
    name: str, dtype: torch.dtype, seed: int, count: int, data: st.DataObject
) -> None:
    options = data.draw(st.sampled_from(OPTIONS[name]))
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return getattr(torch.optim, name)(parameters, lr=0.01, **options)

    torch.manual_seed(seed)
    begin = torch.randn(count).to(dtype)
    whole = nn.Parameter(begin.clone())
    parts = [nn.Parameter(begin[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    together, apart = make([whole]), make(parts)
    assert not inseparable(together)
    for _ in range(3):
        gradient = torch.randn(count).to(dtype)
        whole.grad = gradient.clone()
        for part, (a, b) in zip(parts, itertools.pairwise(cuts), strict=True):
            part.grad = gradient[a:b].clone()
        together.step()
        apart.step()
    assert have_same_bits(torch.cat([part.detach() for part in parts]), whole.detach())
    for key, value in together.state[whole].items():
        if isinstance(value, torch.Tensor):
            found = [apart.state[part][key] for part in parts]
            assert have_same_bits(torch.cat(found) if value.dim() else found[0], value), key


class Own(torch.optim.AdamW):
    """May do anything."""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), "fused"),
        (lambda p: torch.optim.SGD([q.bfloat16() for q in p], lr=0.1), "bfloat16"),
        (torch.optim.Adafactor, "not known"),
        (Own, "not known"),
        (torch.optim.LBFGS, "not known"),
    ],
)
def test_what_is_not_known_to_be_separable_is_refused(
    make: Callable[[list[torch.Tensor]], Optimizer], why: str
) -> None:
    assert why in inseparable(make([torch.randn(4, 4)]))
