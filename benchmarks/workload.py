"""Trains one loop in which TierCheck and its peers save the same state, timed by the same clock.

Also builds small models of the kinds that people train, whose gradients differ in type and zeros. Needs torch
only, because it runs in the peers' environments too.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiercheck import Checkpointer

STATE_BYTES_PER_PARAMETER = 12
"""fp32 parameter and the two moments of Adam."""


class Stack(nn.Module):
    """Square linear layers with residual connections: as many bytes of parameters as wanted, all used in
    every step."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * 0.1
        return x


class UpdateClock:
    """Seconds that an optimizer's step takes beside its own arithmetic: in hooks of others, wherever they
    stand in line."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own = 0.0
        self._around = 0.0
        hooked = type(optimizer).step
        own = getattr(hooked, "__wrapped__", hooked)

        @functools.wraps(own)
        def timed(this: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return own(this, *arguments, **named)
            finally:
                if this is optimizer:
                    self._own += time.perf_counter() - start

        # As torch does when the first optimizer of a class is made: the hooks run around the function that it
        # finds.
        step = torch.optim.Optimizer.profile_hook_step(timed)
        step.hooked = True  # type: ignore[attr-defined]
        type(optimizer).step = step  # type: ignore[method-assign]

    def step(self) -> None:
        """The optimizer's step."""
        self._own, start = 0.0, time.perf_counter()
        self._optimizer.step()
        self._around += time.perf_counter() - start - self._own

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._around = self._around, 0.0
        return seconds


class Training:
    """A model whose state (parameters and Adam's moments) has about `state_bytes`; `tokens` make a step long
    or short.

    With `tokens=0` a step is the update alone: the gradients are made once. `fresh`: as a script begins,
    without moments yet.
    """

    def __init__(self, state_bytes: int, tokens: int, width: int = 1024, *, fresh: bool = False) -> None:
        torch.manual_seed(0)
        layers = max(1, round(state_bytes / STATE_BYTES_PER_PARAMETER / width**2))
        self.model = Stack(width, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._input = torch.randn(max(tokens, 1), width)
        self._tokens = tokens
        if not fresh:
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter) * 1e-3
            self.optimizer.step()  # so that the moments exist
        self.clock = UpdateClock(self.optimizer)
        self.state_bytes = sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All that a snapshot must hold, but for a few words."""
        found = [parameter.detach() for parameter in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, Tensor)]
        return found

    def state_dict(self) -> dict[str, Any]:
        """As peers want it: the tensors themselves, not copies."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def compute(self) -> None:
        """Forward and backward."""
        if self._tokens:
            self.optimizer.zero_grad()
            self.model(self._input).square().mean().backward()

    def update(self) -> None:
        """The optimizer's step."""
        self.clock.step()

    def copy_seconds(self, runs: int = 3, *, new_moments: bool = False) -> list[float]:
        """The limit: seconds that copying the state into memory that is already there takes.

        `new_moments`: only the parameters have memory, as in a new process.

        Of a state above 1 GiB only a part is copied, and the time scaled: the machine may not have room for
        it twice.
        """
        tensors = self.tensors()
        part = tensors[: max(1, math.ceil(len(tensors) * min(1.0, 2**30 / self.state_bytes)))]
        scale = self.state_bytes / sum(tensor.nbytes for tensor in part)
        tensors = part
        into = [torch.empty_like(tensor) for tensor in tensors]
        for target, source in zip(into, tensors, strict=True):
            target.copy_(source)
        found = []
        there = len(list(self.model.parameters())) if new_moments else len(into)
        for _ in range(runs):
            del into[there:]
            start = time.perf_counter()
            into += [torch.empty_like(tensor) for tensor in tensors[there:]]
            for target, source in zip(into, tensors, strict=True):
                target.copy_(source)
            found.append((time.perf_counter() - start) * scale)
        return found


@dataclass
class Cycle:
    """One save and the steps around it, in seconds."""

    blocked: float
    """What training waited for: in the saving call, and in hooks around the updates."""
    step: float
    """A step while nothing was being saved."""
    aside: float = 0.0
    """Processor time of all threads but the training's: what saving took, however long it had to wait for a
    core."""


def run_cycles(
    training: Training,
    after_step: Callable[[int], None],
    settle: Callable[[], object],
    *,
    cycles: int,
    half: int,
    warm_up: int = 3,
) -> list[Cycle]:
    """Train for cycles of 2 x `half` steps. `after_step(n)` is called after every step and saves when n is a
    multiple of that.

    `settle` waits for what still goes on in the background; it is called, and not counted, in the middle of a
    cycle, so that the second half is undisturbed; if it answers False, nothing was saved and the cycle is
    done again. The first `warm_up` cycles, in which each slot is used for the first time, are not reported.
    """
    found: list[Cycle] = []
    number = 0

    def steps(count: int) -> tuple[float, float]:
        """(seconds in the saving calls and hooks, seconds altogether), the call after each step included"""
        nonlocal number
        blocked, start = 0.0, time.perf_counter()
        for _ in range(count):
            training.compute()
            training.update()
            number += 1
            called = time.perf_counter()
            after_step(number)
            blocked += time.perf_counter() - called
        return blocked + training.clock.take(), time.perf_counter() - start

    steps(2 * half - 1)
    settle()  # slots are made when the size of the state is known
    left = 10 * (cycles + warm_up)
    while len(found) < cycles + warm_up:
        left -= 1
        if left < 0:
            raise RuntimeError("too many saves were not taken")
        # The step that saves is counted with those after it, up to the middle.
        aside = time.thread_time() - time.process_time()
        first_blocked, _ = steps(half)
        taken = settle()
        second_blocked, second = steps(half)
        aside += time.process_time() - time.thread_time()
        if taken is not False:  # what was not saved blocked nobody, and does not count
            found.append(Cycle(first_blocked + second_blocked, second / half, aside))
    settle()
    return found[warm_up:]


def summary(training: Training, cycles: list[Cycle], copies: list[float]) -> dict[str, Any]:
    """What a process reports about itself."""
    return {
        "torch": torch.__version__,
        "state_bytes": training.state_bytes,
        "copy_seconds": min(copies),
        "cycles": [asdict(cycle) for cycle in cycles],
    }


class Block(nn.Module):
    """A layer of a GPT. `adapters`: LoRA of that rank beside each linear layer, whose own weight is then
    frozen."""

    def __init__(self, width: int, adapters: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = linear(width, 3 * width, adapters)
        self.out = linear(width, width, adapters)
        self.up = linear(width, 4 * width, adapters)
        self.down = linear(4 * width, width, adapters)
        self._heads = width // 64

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self._heads, 64).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Adapted(nn.Module):
    """LoRA (https://arxiv.org/abs/2106.09685): a frozen layer and a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def linear(inputs: int, outputs: int, adapters: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs, bias=False)
    return Adapted(layer, adapters) if adapters else layer


class Gpt(nn.Module):
    """Tokens to the loss of predicting the next one. With `adapters` everything but them is frozen."""

    def __init__(
        self, width: int, layers: int, words: int = 4096, length: int = 256, adapters: int = 0
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, adapters) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(
            self.words.weight, std=0.02
        )  # or words would be so sure that their gradients are zero
        if adapters:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(
                    name.endswith((".down.weight", ".up.weight")) and ".base." not in name
                )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.words.weight)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class MasterAdamW(torch.optim.Optimizer):
    """AdamW for bf16 parameters with bf16 gradients, all of its own state in fp32: mixed precision as large
    models use it."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["master"] = parameter.detach().float()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["exp_avg_sq"] = torch.zeros_like(state["master"])
                gradient = parameter.grad.float()
                state["step"] += 1
                count = state["step"].item()
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                scale = (state["exp_avg_sq"] / (1 - second**count)).sqrt_().add_(group["eps"])
                master = state["master"]
                master.mul_(1 - group["lr"] * group["weight_decay"])
                master.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - first**count))
                parameter.copy_(master)


class Turn:
    """One of two equal trainings that take turns, of which one may be kept."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        **kernels: bool,
    ) -> None:
        """`shape`: width, layers and batch. `kernels`: of AdamW."""
        width, layers, batch = shape
        torch.manual_seed(0)
        self.model = Gpt(width, layers).to(device=device, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **kernels)
        self.tokens = torch.randint(0, 4096, (batch, 256), device=device)
        self.clock = UpdateClock(self.optimizer)
        self.checkpointer: Checkpointer | None = None
        self.called = 0.0
        """Seconds in `Checkpointer.step`."""

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.tokens).backward()
        self.clock.step()
        if self.checkpointer is not None:
            began = time.perf_counter()
            self.checkpointer.step()
            self.called += time.perf_counter() - began

    def take_blocked(self) -> float:
        """Seconds in our calls and hooks since the last call."""
        seconds, self.called = self.called + self.clock.take(), 0.0
        return seconds
