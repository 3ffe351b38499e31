"""Promise: whatever bytes arrive, they end in a declared error and in bounded memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.fuzz.__main__ import mutate
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=examples(200))
@example(0, 0, b"")
@example(0, 0, b"[" * 5000)
@example(0, 0, b'{"a":' * 5000)
@example(0, 0, b"\xff\xfe[\x00]\x00")
@example(0, 0, b'{"a":"\xff"}')
@given(st.integers(0, 2**32), st.integers(1, 3), st.none())
def test_only_declared_errors(name: str, seed: int, rounds: int, text: bytes | None) -> None:
    target, numbers = TARGETS[name], random.Random(seed)
    if text is None:
        text = numbers.choice(target.samples)
        for _ in range(rounds):
            text = mutate(text, numbers)
    target.run(text)


@pytest.mark.parametrize("name", TARGETS)
def test_true_samples_are_no_nonsense(name: str) -> None:
    """Else the mutations would only ever meet the first check."""
    for sample in TARGETS[name].samples:
        TARGETS[name].run(sample)
