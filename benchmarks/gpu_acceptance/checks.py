"""The checks by their ids: what each promises, how what it found is judged, and how it is shown."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, bytes_text


class Status(str, enum.Enum):
    """How a check ends."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    MEASURED = "measured"
    """The figures are there, and this machine says nothing about the promise."""


class Skip(Exception):
    """This machine cannot run the check; the message says why."""


@dataclass(frozen=True)
class Setting:
    """Where checks run, and how large they are."""

    device: str
    """Of torch: "cuda" or "cpu"."""
    quick: bool
    memory: Path
    """A folder in memory, for slots; a new one inside of it for each process of checks, which is removed
    after it."""
    spoil: bool = False
    """Flip a bit of every snapshot that is given back: checks that restore must fail then, or they show
    nothing."""

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def small(self) -> bool:
        """To see that it works: no figure means anything."""
        return self.quick or not self.gpu


@dataclass(frozen=True)
class Found:
    """What a check saw."""

    text: str
    good: bool = True
    """False: the promise is broken, whatever the figures are."""
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Check:
    """One promise."""

    promise: str
    run: str
    """Module of this package and its function, which takes a Setting and returns Found; raises Skip."""
    needs_gpu: str = ""
    """Why it means nothing without one; empty: it runs without one too."""
    speed: bool = False
    """Its figures are speeds and amounts of a GPU: their bounds judge nothing else."""


@dataclass(frozen=True)
class Result:
    """How one check ended."""

    name: str
    promise: str
    status: Status
    text: str
    """What was found, or why it was not run."""
    figures: tuple[Figure, ...] = field(default=())
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        figures = [figure.plain() for figure in self.figures]
        return {**asdict(self), "status": self.status.value, "figures": figures}

    @staticmethod
    def read(plain: Mapping[str, Any]) -> Result:
        """Inverse of `plain`."""
        figures = tuple(map(Figure.read, plain["figures"]))
        return Result(**{**plain, "status": Status(plain["status"]), "figures": figures})


def judge(check: Check, found: Found, gpu: bool) -> Status:
    """Speeds are judged on a GPU only, and only by a bound; everything else is judged everywhere."""
    if not found.good:
        return Status.FAILED
    if not check.speed:
        return Status.PASSED
    bounded = [figure.reached for figure in found.figures if figure.reached is not None]
    if not gpu or not bounded:
        return Status.MEASURED
    return Status.PASSED if all(bounded) else Status.FAILED


_GRAPHS = "CUDA graphs need a GPU"

CHECKS: Mapping[str, Check] = {
    "C1": Check(
        "No snapshot and no delta is torn, whatever is written into memory that is free again, and into "
        "slots used again.",
        "copies.torn",
    ),
    "C2": Check(
        "Deltas of torch's optimizers are replayed bit for bit: kernels, dtypes, gradients at odd "
        "addresses, overflows.",
        "replays.known_optimizers",
    ),
    "C3": Check(
        "torch.compile(optimizer.step) trains on; what is restored is exact, and deltas are refused "
        "beforehand or exact.",
        "replays.compiled_optimizer",
    ),
    "C4": Check(
        "Gradients in the memory of a CUDA graph (mode='reduce-overhead') are replayed exactly, or "
        "refused beforehand.",
        "replays.gradients_of_a_graph",
        needs_gpu=_GRAPHS,
    ),
    "C5": Check(
        "An update inside of a CUDA graph, which calls no hook, tears no snapshot.",
        "copies.captured_update",
        needs_gpu=_GRAPHS,
    ),
    "C6": Check(
        "A CUDA graph can be captured while an artifact is copied.",
        "copies.captures_beside_copies",
        needs_gpu=_GRAPHS,
    ),
    "C7": Check(
        "Parameters that only the optimizer has (fp32 master weights) come back exactly, or are refused.",
        "replays.master_weights",
    ),
    "C8": Check(
        "Lists of tensors in an optimizer's state come back exactly, on their device, or are refused.",
        "replays.lists_of_tensors",
    ),
    "C9": Check(
        "When the GPU's memory is full deltas go, and training does not.",
        "copies.memory_full",
        needs_gpu="the memory that fills up is a GPU's",
    ),
    "C10": Check(
        "A model whose state_dict gives copies (as FSDP1's does) is restored exactly, or refused.",
        "replays.state_dict_of_copies",
    ),
    "P1": Check(
        "Slots are page-locked at 0.15 s/GB, and no launch of the training waits for it longer than 20 ms.",
        "transfers.page_locking",
        needs_gpu="only CUDA's runtime page-locks",
        speed=True,
    ),
    "P2": Check(
        "A copy into a slot has 90 % of a pinned copy's speed, 75 % beside a busy interpreter, and does "
        "not spin.",
        "transfers.into_a_slot",
        speed=True,
    ),
    "P3": Check(
        "A delta at every step and a snapshot at each third make the mean step at most 2 % longer, and "
        "skip none.",
        "steps.every_step_kept",
        speed=True,
    ),
    "P4": Check(
        "A slot comes back to the device at 50 % of a pinned copy's speed.",
        "transfers.out_of_a_slot",
        speed=True,
    ),
    "P5": Check(
        "To look for infinities in an artifact takes no longer than to copy it.",
        "transfers.sanity_gate",
        speed=True,
    ),
    "P6": Check(
        "What a warm start imports touches no driver, and its process can use the GPU.",
        "steps.warm",
    ),
    "P7": Check(
        "With FSDP2 and 291 parameters (Llama 8B's) Python in the training thread takes 2 ms an update, "
        "10 ms a snapshot.",
        "steps.python_with_fsdp2",
        speed=True,
    ),
    "P8": Check(
        "loss.item() beside a copy off the device takes 5 ms at most, 99 times of 100.",
        "transfers.small_reads_beside_a_copy",
        needs_gpu="without one there is no copy engine to wait for",
        speed=True,
    ),
}
"""In the order of the table."""


def line(result: Result) -> str:
    """For a terminal, as soon as it is known."""
    told = "; ".join(part for part in (result.text, *map(written, result.figures)) if part)
    return (
        f"{result.status.value:8} {result.name:4}({result.seconds:.1f} s) {result.promise}\n           "
        f"   {told}"
    )


def written(figure: Figure) -> str:
    """In words, with its bound."""
    bound = "" if figure.bound is None else f" (must be {figure.bound_text})"
    about = f" [{figure.against}]" if figure.against else ""
    return f"{figure.name} {figure.ratio_text}{bound}{about}"


def summary(results: Sequence[Result]) -> str:
    """In one sentence."""
    counts = [(sum(result.status is status for result in results), status.value) for status in Status]
    return f"{len(results)} checks: " + ", ".join(f"{count} {name}" for count, name in counts if count) + "."


def numbers(machine: Mapping[str, Any], command: str, results: Sequence[Result]) -> dict[str, Any]:
    """For a file of JSON."""
    return {
        "machine": machine,
        "command": command,
        "checks": {result.name: result.plain() for result in results},
    }


def page(machine: Mapping[str, Any], command: str, results: Sequence[Result]) -> str:
    """Markdown."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        "# GPU acceptance",
        "",
        f"Written by `{command}` of commit {machine['commit']}. {summary(results)}",
        "",
        f"Machine: GPU: {machine['gpu']}, {machine['processor']}, {machine['cores']} cores, "
        f"{bytes_text(machine['memory_bytes'])} of memory, {machine['system']}, Python "
        f"{machine['python']}; {packages}.",
        "",
        "| check | promise | result | found | figures | took |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    for result in results:
        status = "**FAILED**" if result.status is Status.FAILED else result.status.value
        figures = "; ".join(map(written, result.figures))
        cells = (result.name, result.promise, status, result.text, figures, f"{result.seconds:.0f} s")
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
