"""A remembered inventory is the one that would be taken anew, whatever happened between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.trainer.torch_limits import FSDP2_ON_CPUS
from tiercheck.trainer.state.capture import Inventory, take_inventory
from tiercheck.trainer.state.inventories import Inventories


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(x)))


def train(net: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.tensor([1, 2, 3])).square().sum().backward()
    optimizer.step()


def described(inventory: Inventory) -> tuple[list[tuple[object, ...]], str]:
    entries = [
        (
            e.name,
            e.tensor.data_ptr(),
            e.tensor.dtype,
            e.tensor.shape,
            e.lazy,
            e.must_be_finite,
            e.origin._version,
        )
        for e in inventory.entries
        if e.origin is not None
    ]
    assert len(entries) == len(inventory.entries)
    return entries, repr(inventory.facts)


def replaced_state(net: Net, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[net.body[0].weight]
    state["exp_avg"] = state["exp_avg"].clone()


def swapped_data(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.body[0].weight.data = net.body[0].weight.data.clone().T.contiguous()


def tied_by_data(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.body[2].weight.data = net.body[0].weight.data


def untied(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())


def more_parameters(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.extra = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(net.extra.parameters()), "lr": 0.5})


def renamed(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.trunk = net.body
    del net._modules["trunk"]
    net._modules = {("trunk" if name == "body" else name): module for name, module in net._modules.items()}


def kept_buffer(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net._non_persistent_buffers_set.clear()


def hooked(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.head.weight.requires_grad_(False)  # what is trained may not be left out

    def without_head(
        module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object
    ) -> None:
        state.pop("head.weight", None)  # once is enough

    net.register_state_dict_post_hook(without_head)


def patched(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.head.weight.requires_grad_(False)
    plain = net.state_dict
    net.state_dict = lambda *a, **k: {
        key: value for key, value in plain(*a, **k).items() if key != "head.weight"
    }


def other_hyper_parameters(net: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.25


def plain_number_in_the_state(net: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[net.body[0].weight]["calls"] = 3


def state_dropped(net: Net, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[net.body[0].bias]


def nothing(net: Net, optimizer: torch.optim.Optimizer) -> None:
    return


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        train,
        replaced_state,
        swapped_data,
        tied_by_data,
        untied,
        more_parameters,
        renamed,
        kept_buffer,
        hooked,
        patched,
        other_hyper_parameters,
        plain_number_in_the_state,
        state_dropped,
    ],
    ids=lambda change: change.__name__,
)
def test_remembered_inventory_is_that_of_now(change: Callable[[Net, torch.optim.Optimizer], None]) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    inventories = Inventories(net, [optimizer])
    inventories.take()
    for _ in range(2):
        train(net, optimizer)
        assert described(inventories.take()) == described(take_inventory(net, [optimizer]))
    change(net, optimizer)
    for _ in range(2):
        assert described(inventories.take()) == described(take_inventory(net, [optimizer]))


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[Net]:
    if not FSDP2_ON_CPUS:
        pytest.skip("FSDP2 of this torch needs an accelerator")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        net = Net()
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(net.body, mesh=mesh)
        yield fully_shard(net, mesh=mesh)
    finally:
        dist.destroy_process_group()


def gathered(net: Net, optimizer: torch.optim.Optimizer) -> None:
    """As when `step` is called after a forward pass."""
    net.unshard()


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        train,
        gathered,
        replaced_state,
        kept_buffer,
        hooked,
        other_hyper_parameters,
        plain_number_in_the_state,
        state_dropped,
    ],
    ids=lambda change: change.__name__,
)
def test_remembered_inventory_of_shards_is_that_of_now(
    sharded: Net, change: Callable[[Net, torch.optim.Optimizer], None]
) -> None:
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    inventories = Inventories(sharded, [optimizer])
    for _ in range(3):
        train(sharded, optimizer)
        change(sharded, optimizer)
        assert described(inventories.take()) == described(take_inventory(sharded, [optimizer]))


def test_inventory_of_shards_is_remembered(sharded: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_remembered(sharded, monkeypatch)


def test_inventory_of_a_plain_model_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_remembered(Net(), monkeypatch)


def assert_remembered(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer)
    inventories = Inventories(net, [optimizer])
    inventories.take()
    monkeypatch.setattr("tiercheck.trainer.state.inventories.take_inventory", None)
    assert described(inventories.take()) == described(take_inventory(net, [optimizer]))
