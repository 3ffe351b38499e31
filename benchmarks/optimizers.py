"""Kills and resumes a training with every optimizer class of pytorch-optimizer, and compares the bits.

pip install --no-deps --target FOLDER pytorch-optimizer einops
PYTHONPATH=.:FOLDER python -m benchmarks.optimizers                into docs/benchmarks/optimizers.md
PYTHONPATH=.:FOLDER python -m benchmarks.optimizers --only adamw   these alone; nothing is published

Each class has four lives in processes of their own: undisturbed, killed by SIGKILL and resumed, from a
snapshot in a folder; and undisturbed or killed and resumed with a sidecar that takes a delta of every step.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import os
import platform
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tiercheck import Checkpointer
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import Welcome
from tiercheck.protocol.version import Kind
from tiercheck.trainer.backends import sidecar_backend

PACKAGE = "pytorch-optimizer"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "optimizers.md"
WIDTH, STEPS, KILL, EVERY = 16, 14, 9, 4
_SECONDS = 120
"""Seconds after which a life is ended."""

Make = Callable[[type[Any], nn.Module], Optimizer]


def _by_shape(kind: type[Any], model: nn.Module) -> Optimizer:
    """Matrices by Muon, the rest by AdamW."""
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is matrix], "use_muon": matrix}
        for matrix in (True, False)
    ]
    made: Optimizer = kind(groups)
    return made


def _of_model(kind: type[Any], model: nn.Module) -> Optimizer:
    made: Optimizer = kind(model)
    return made


def _with(**options: Any) -> Make:
    return lambda kind, model: kind(model.parameters(), **options)


SPECIAL: dict[str, Make] = {
    **dict.fromkeys(("adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon"), _by_shape),
    **dict.fromkeys(("adalomo", "adammini", "lomo"), _of_model),
    "bsam": _with(num_data=4),
    "ranger21": _with(num_iterations=STEPS),
}
"""How classes are made that take more than parameters."""
CLOSURE = {"lbfgs"}
"""Ask for the loss by themselves."""
AGAIN = {"alig", "bsam"}
"""Ask for it once more."""
GRAPH = {"adahessian", "sophiah"}
"""Differentiate the gradient."""
MATRICES = {"spectralsphere"}
"""Take matrices only."""
FUSED = {"adalomo", "lomo"}
"""Update inside the backward pass: `fused_backward(loss, lr)`."""


def _model(name: str) -> nn.Module:
    if name in MATRICES:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def _update(name: str, model: nn.Module, optimizer: Any) -> Tensor:
    batch = torch.randn(4, WIDTH)

    def loss_of_batch() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch).square().mean()
        if name not in FUSED:
            loss.backward(create_graph=name in GRAPH)
        return loss

    if name in CLOSURE:
        return torch.as_tensor(optimizer.step(loss_of_batch))
    loss = loss_of_batch()
    if name in FUSED:
        optimizer.fused_backward(loss, lr=1e-3)
    elif name in AGAIN:
        optimizer.step(torch.enable_grad()(loss_of_batch))
    else:
        optimizer.step()
    return loss.detach()


@dataclass
class Life:
    """What one process did."""

    losses: dict[int, str]
    """By step, as bits; under the step after the last one the sum of all parameters."""
    words: str
    """Of its output the first line of ours, or its last one."""
    whole: bool
    """Whether it made all steps."""


def _live(name: str, seed: int, kill: int, folder: Path | None) -> Life:
    """Trains in a forked process until `kill`, where it is killed, or to the end."""
    with tempfile.TemporaryDirectory() as place:
        lines, text = Path(place, "lines"), Path(place, "text")
        lines.touch()
        if not (pid := os.fork()):
            signal.alarm(_SECONDS)
            output = os.open(text, os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1), os.dup2(output, 2)
            try:
                _train(name, seed, kill, folder, lines)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        losses = dict(line.split() for line in lines.read_text().splitlines())
        said = text.read_text().strip().splitlines()
        words = next((line for line in said if "not saved" in line), (said or [""])[-1])
        return Life({int(step): loss for step, loss in losses.items()}, words, not status)


def _train(name: str, seed: int, kill: int, folder: Path | None, lines: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # some ask for one
    torch.manual_seed(seed)
    model = _model(name)
    kind = importlib.import_module("pytorch_optimizer.optimizer").OPTIMIZERS[name]
    optimizer = SPECIAL.get(name, _with())(kind, model)
    with (
        open(lines, "a", buffering=1) as file,
        Checkpointer(model, optimizer, folder=folder, every=EVERY) as checkpointer,
    ):
        for step in range(checkpointer.restore() + 1, STEPS + 1):
            loss = float(_update(name, model, optimizer))
            checkpointer.step(loss)
            checkpointer.wait(DEADLINE)
            file.write(f"{step} {loss.hex()}\n")
            if step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
        file.write(f"{STEPS + 1} {float(sum(p.detach().double().sum() for p in model.parameters())).hex()}\n")


def _compare(whole: Life, killed: Life, resumed: Life, said: str) -> tuple[str, str]:
    """One word, and how it was told if it is not `equal`."""
    if not whole.whole:
        return ("refused" if "NotCapturable" in whole.words else "fails alone", whole.words)
    first = min(resumed.losses, default=0)
    if not resumed.whole or not first:
        return "refused", resumed.words
    if first == 1:
        return ("told" if said else "silent", said)
    equal = all(whole.losses[step] == loss for step, loss in resumed.losses.items())
    if not equal or any(whole.losses[step] != loss for step, loss in killed.losses.items()):
        return ("told" if said else "silent", said)
    return f"equal, from step {first - 1}", said


def from_a_folder(name: str) -> tuple[str, str]:
    """Resumes from a snapshot."""
    with tempfile.TemporaryDirectory() as place:
        whole = _live(name, 0, 0, Path(place, "whole"))
        killed = _live(name, 0, KILL, Path(place, "cut"))
        return _compare(whole, killed, _live(name, 77, 0, Path(place, "cut")), whole.words)


def from_deltas(name: str) -> tuple[str, str]:
    """Resumes from the snapshot with the longest chain of deltas."""
    with tempfile.TemporaryDirectory() as place:
        whole = _live(name, 0, 0, Path(place, "whole"))
        os.environ |= {"TIERCHECK_RUN_DIR": place, "TIERCHECK_ATTEMPT": "1"}
        sidecar = ScriptedSidecar(Path(place), Welcome(attempt=1, snapshot_every=0, delta=DeltaMode.AUTO))
        try:
            killed = _live(name, 0, KILL, None)
            deltas = sidecar.completed(Kind.DELTA)
            chains = {
                base: base + len([*itertools.takewhile(deltas.__contains__, itertools.count(base + 1))])
                for base in sidecar.completed(Kind.SNAPSHOT)
            }
            if chains:
                base = max(chains, key=lambda base: (chains[base], -base))
                sidecar.offer(base, chains[base])
            resumed = _live(name, 77, 0, None)
            told = [*sidecar.asked("no-deltas"), *sidecar.asked("cannot-save")]
            said = next((text for each in told if (text := getattr(each, "message", "") or each.reason)), "")
        finally:
            sidecar.stop()
            del os.environ["TIERCHECK_RUN_DIR"], os.environ["TIERCHECK_ATTEMPT"]
        return _compare(whole, killed, resumed, said)


def main() -> int:
    """0 if none is silently different."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    only = parser.parse_args().only
    torch.set_num_threads(1)
    sidecar_backend.SidecarBackend.patience = DEADLINE
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, kind in sorted(importlib.import_module("pytorch_optimizer.optimizer").OPTIMIZERS.items()):
        if only and name not in only:
            continue
        (folder, why), (deltas, no_deltas) = from_a_folder(name), from_deltas(name)
        words = (no_deltas if folder.startswith("equal") else why).replace("|", "/").strip()
        rows.setdefault((folder, deltas, words.replace(f"{kind.__name__} ", "it ")), []).append(kind.__name__)
        print(kind.__name__, folder, deltas, words, sep=" | ", flush=True)
    count = sum(map(len, rows.values()))
    equal = sum(
        len(names) for row, names in rows.items() if all(each.startswith("equal") for each in row[:2])
    )
    replayed = sum(len(names) for row, names in rows.items() if row[1] == f"equal, from step {KILL}")
    silent = sum(len(names) for row, names in rows.items() if "silent" in row)
    counted = f"{count} classes: {equal} equal, {replayed} of them from deltas; {silent} silently other."
    print(counted)
    if not only:
        versions = f"{PACKAGE} {importlib.metadata.version(PACKAGE)}, torch {torch.__version__}"
        PAGE.write_text(
            "# Optimizer classes, killed and resumed\n\n"
            f"{counted} Losses and parameters are compared as bits.\n"
            f"Killed after step {KILL}, a snapshot every {EVERY} steps.\n\n"
            f"{versions}, Python {platform.python_version()}. Made by `python -m benchmarks.optimizers`.\n\n"
            "| from a snapshot | with deltas | what is said | classes |\n| --- | --- | --- | --- |\n"
            + "".join(f"| {' | '.join(row)} | {', '.join(names)} |\n" for row, names in sorted(rows.items()))
        )
    return min(1, silent)


if __name__ == "__main__":
    sys.exit(main())
