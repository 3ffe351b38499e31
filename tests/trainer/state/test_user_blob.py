"""The users' state is that of the end of the step, though it is written while the next one runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tiercheck.trainer.state.user_state import Packed, unpack
from tiercheck.trainer.tensors.leaves import NotCapturable


def test_what_changes_after_the_step_is_not_in_the_blob() -> None:
    position: dict[str, Any] = {"shard": 3, "seen": [1, 2], "mean": torch.ones(4), "nested": {"at": (1, [5])}}
    facts = {"groups": [{"lr": torch.tensor(0.5), "betas": (0.9, 0.999)}]}
    drawn = torch.get_rng_state()
    packed = Packed({"data": position}, facts)
    position["shard"] = 4
    position["seen"].append(3)
    position["mean"].zero_()
    position["nested"]["at"][1].append(6)
    facts["groups"][0]["lr"].fill_(7.0)  # type: ignore[attr-defined]
    torch.rand(1)
    content = unpack(packed.written())
    assert content["state"]["data"]["shard"] == 3
    assert content["state"]["data"]["seen"] == [1, 2]
    assert content["state"]["data"]["mean"].tolist() == [1.0] * 4
    assert content["state"]["data"]["nested"] == {"at": (1, [5])}
    assert content["facts"]["groups"][0]["lr"].item() == 0.5
    assert torch.equal(content["random"]["torch"], drawn)


def test_what_only_its_own_code_can_copy_is_written_at_once() -> None:
    milestones = Counter({30: 1})
    packed = Packed({"scheduler": {"milestones": milestones}}, {})
    milestones[60] = 1
    assert unpack(packed.written())["state"]["scheduler"]["milestones"] == Counter({30: 1})


def test_what_is_shared_stays_shared() -> None:
    whole = torch.arange(6.0)
    listed = [1]
    content = unpack(Packed({"data": {"a": whole, "b": whole[2:], "c": listed, "d": listed}}, {}).written())
    data = content["state"]["data"]
    assert data["a"].untyped_storage().data_ptr() == data["b"].untyped_storage().data_ptr()
    assert data["c"] is data["d"]


def test_what_cannot_be_written_is_refused_in_the_step_itself() -> None:
    with pytest.raises(NotCapturable):
        Packed({"data": {"hook": lambda: None}}, {})
