"""Runs training scripts that end in the middle of a chain and begin again with other seeds."""

from __future__ import annotations

import enum
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_acceptance.checks import Found, Setting
from benchmarks.gpu_acceptance.station import Station
from tiercheck import Checkpointer
from tiercheck.protocol.version import Kind
from tiercheck.trainer.tensors.tensor_parts import NotCapturable


@dataclass
class Script:
    """What a training script owns. `update` does all of one step but its end, and returns the loss."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    update: Callable[[], Tensor]
    state: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of all that the next step depends on, by name: parameters as they are, not as state_dict
        shows them."""
        found = {f"model/{name}": value for name, value in self.model.named_parameters()}
        found |= {f"buffer/{name}": value for name, value in self.model.named_buffers()}
        for index, optimizer in enumerate(self.optimizers):
            for number, parameter in enumerate(
                p for group in optimizer.param_groups for p in group["params"]
            ):
                found[f"optimizer{index}/{number}"] = parameter
                for key, value in optimizer.state[parameter].items():
                    parts = value if isinstance(value, list) else [value]
                    tensors = ((part, each) for part, each in enumerate(parts) if isinstance(each, Tensor))
                    found |= {f"optimizer{index}/{number}/{key}/{part}": each for part, each in tensors}
        found = {name: value.detach().clone() for name, value in found.items()}
        found["random"] = torch.get_rng_state()
        if next(self.model.parameters()).is_cuda:
            found["random/cuda"] = torch.cuda.get_rng_state()
        return found


Build = Callable[[], Script]


class Outcome(enum.Enum):
    """How a script came back."""

    EXACT = "exact"
    """From a snapshot and the deltas after it, in every bit."""
    WITHOUT_DELTAS = "exact, from snapshots alone"
    """Deltas were refused beforehand, with a reason."""
    REFUSED = "refused"
    """Nothing was saved, and that was told, with a reason."""
    WRONG = "WRONG"
    """Found out at the restore, silently other bits, or the end of the training."""


@dataclass(frozen=True)
class Return:
    """With the reason."""

    outcome: Outcome
    why: str = ""


def comes_back(setting: Setting, build: Build, base: int = 4, step: int = 9) -> Return:
    """Trains `step` steps with a snapshot at each `base`-th, and restores the last step that can be had into
    a new script."""
    with Station(setting, every=base) as station:
        try:
            kept = _first_life(build, step)
        except NotCapturable as refusal:
            return Return(Outcome.REFUSED, str(refusal))
        except Exception as error:  # one case must not hide the others
            return Return(Outcome.WRONG, f"training ended: {_told(error)}")
        snapshots = station.completed(Kind.SNAPSHOT)
        if not snapshots:
            why = station.cannot_save
            return (
                Return(Outcome.REFUSED, why)
                if why
                else Return(Outcome.WRONG, "nothing was saved, and nobody told")
            )
        first, last = min(snapshots), max(snapshots)
        missing = [at for at in range(first + 1, step + 1) if at not in station.completed(Kind.DELTA)]
        if missing and not station.no_deltas:
            return Return(Outcome.WRONG, f"there are no deltas of steps {missing}, and nobody was told why")
        station.offer(*((last, last) if missing else (first, step)))
        try:
            wrong = _second_life(build, kept)
        except Exception as error:
            wrong = _told(error)
        clear(setting)
        if wrong:
            return Return(Outcome.WRONG, f"{wrong} {station.mismatch}".strip())
        return (
            Return(Outcome.WITHOUT_DELTAS, station.no_deltas) if station.no_deltas else Return(Outcome.EXACT)
        )


def judge_returns(returns: Mapping[str, Return], *, exact: bool = False) -> Found:
    """Exact, or refused beforehand. `exact`: nothing less, and with deltas."""
    bad = [name for name, each in returns.items() if each.outcome is Outcome.WRONG]
    if exact:
        bad = [name for name, each in returns.items() if each.outcome is not Outcome.EXACT]
    count = sum(each.outcome is Outcome.EXACT for each in returns.values())
    told = [f"{count} of {len(returns)} exact"] if len(returns) > 1 else []
    told += [
        f"{name}: {each.outcome.value}" + (f" ({each.why})" if each.why else "")
        for name, each in returns.items()
        if len(returns) == 1 or each.outcome is not Outcome.EXACT
    ]
    return Found("; ".join(told), good=not bad)


def runs_alone(build: Build, steps: int = 3) -> str:
    """Why the script does not even run without us; empty: it does."""
    try:
        script = build()
        for _ in range(steps):
            script.update()
    except Exception as error:
        return _told(error)
    return ""


def layers(setting: Setting, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Matrices of odd shapes too."""
    width = width_of(setting)
    odd = 2 * width + 3
    model = nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.Linear(width, odd), nn.GELU(), nn.Linear(odd, width)
    )
    return model.to(setting.device, dtype)


def loss_of(
    model: Callable[[Tensor], Tensor], setting: Setting, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Of a random batch."""
    batch = torch.randn(64, width_of(setting), device=setting.device, dtype=dtype)
    return model(batch).float().square().mean()


def width_of(setting: Setting) -> int:
    return 32 if setting.small else 512


def clear(setting: Setting) -> None:
    """Nothing of one script is left for the next."""
    gc.collect()
    if setting.gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """Names of what differs in a bit; empty: nothing."""
    if one.keys() != other.keys():
        return f"only in one of them: {sorted(one.keys() ^ other.keys())[:3]}"
    return ", ".join([name for name in one if not _same_bits(one[name], other[name])][:5])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def _first_life(build: Build, steps: int) -> dict[int, dict[str, Tensor]]:
    """States of the steps that may be restored. Raises what ends the script."""
    torch.manual_seed(0)
    script, kept = build(), {}
    with Checkpointer(script.model, script.optimizers, state=script.state) as checkpointer:
        checkpointer.restore()
        for step in range(1, steps + 1):
            checkpointer.step(float(script.update().detach()))
            if step % checkpointer.every == 0 or step == steps:
                kept[step] = script.tensors()
        checkpointer.wait()
    return kept


def _second_life(build: Build, kept: Mapping[int, Mapping[str, Tensor]]) -> str:
    """What is wrong with what is restored. Raises what the restore raises."""
    torch.manual_seed(77)
    script = build()
    with Checkpointer(script.model, script.optimizers, state=script.state) as checkpointer:
        step = checkpointer.restore()
        found = difference(kept[step], script.tensors())
        return f"step {step} came back silently with other bits: {found}" if found else ""


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
