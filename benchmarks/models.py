"""Builds small models of the kinds that people train, whose gradients differ in type and zeros."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workload import UpdateClock
from tiercheck import Checkpointer


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
