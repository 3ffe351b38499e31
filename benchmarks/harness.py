"""Gives each benchmark its sizes, machine and processes, and takes its figures with their bounds."""

from __future__ import annotations

import enum
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20
GIB = 1 << 30


def bytes_text(count: float) -> str:
    """In binary units."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if count >= 0.99 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """In s, ms or µs."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"


def rate_text(bytes_per_second: float) -> str:
    """In GB/s (10^9), as links and memory are sold."""
    return f"{bytes_per_second / 1e9:.2f} GB/s"


class Sense(str, enum.Enum):
    """Which side of the bound is the promised one."""

    AT_MOST = "≤"
    AT_LEAST = "≥"


@dataclass(frozen=True)
class Figure:
    """`ours` and `against` are for people; `ratio` and `bound` decide. No `ratio`: not measured, and `note`
    says why.

    No `bound`: the row is for information, and nothing is promised.
    """

    name: str
    ours: str = ""
    against: str = ""
    ratio: float | None = None
    bound: float | None = None
    sense: Sense = Sense.AT_MOST
    note: str = ""
    unit: str = "x"
    """How the ratio is written: "x", "%" for a share, or a unit of its own, such as " ms"."""

    @property
    def reached(self) -> bool | None:
        """None: not measured, or nothing is promised."""
        if self.ratio is None or self.bound is None:
            return None
        return self.ratio <= self.bound if self.sense is Sense.AT_MOST else self.ratio >= self.bound

    @property
    def ratio_text(self) -> str:
        if self.ratio is None:
            return "" if self.ours else "not measured"
        return _written(self.ratio, self.unit)

    @property
    def bound_text(self) -> str:
        return "" if self.bound is None else f"{self.sense.value} {_written(self.bound, self.unit)}"

    @property
    def verdict(self) -> str:
        """For the last column."""
        if self.ratio is None:
            return "" if self.ours else "not run"
        return {True: "yes", False: "MISSED", None: ""}[self.reached]

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "sense": self.sense.value, "reached": self.reached}

    @staticmethod
    def read(plain: dict[str, Any]) -> Figure:
        """Inverse of `plain`."""
        fields = {key: value for key, value in plain.items() if key != "reached"}
        return Figure(**{**fields, "sense": Sense(plain["sense"])})


@dataclass
class Outcome:
    """What one benchmark found: rows of the table, and the numbers that the plots are drawn from."""

    figures: list[Figure]
    data: dict[str, Any] = field(default_factory=dict)


def _written(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.2f} %"
    return f"{value:.3g}{unit}"


@dataclass(frozen=True)
class Scale:
    """Sizes and repetitions. A quick run's ratios mean little: constant costs weigh more on small states."""

    quick: bool
    states: tuple[int, ...]
    """Bytes of state in the comparison with peers; the first one is the one that is judged."""
    growth_states: tuple[int, ...]
    growth_workers: tuple[int, ...]
    rounds: int
    """How often systems alternate."""
    cycles: int
    """Saves per round."""
    restore: int
    """Bytes of a restored artifact."""

    @property
    def judged(self) -> int:
        """Bytes of state that promises are about."""
        return self.states[0]


FULL = Scale(
    quick=False,
    states=(GIB // 2, GIB),
    growth_states=(GIB // 10, GIB // 4, GIB // 2, GIB, 2 * GIB, 4 * GIB),
    growth_workers=(2, 4, 8, 16),
    rounds=2,
    cycles=3,
    restore=GIB // 2,
)
QUICK = Scale(
    quick=True,
    states=(64 * MIB,),
    growth_states=(32 * MIB, 64 * MIB, 128 * MIB),
    growth_workers=(2, 4),
    rounds=1,
    cycles=2,
    restore=64 * MIB,
)

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("TIERCHECK_BENCH_CACHE") or ROOT / ".bench")
"""Environments of the peers, and what single benchmarks found last; ignored by git."""


_PACKAGES = ("torch", "numpy", "xxhash", "obstore", "boto3", "pyeclib", "moto", "msgspec")


def describe() -> dict[str, Any]:
    """Hardware, system and versions, and the commit that was measured."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gpu": _gpu(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "commit": _commit(),
    }


def load() -> float:
    """Processes that want a core, averaged over a minute: what else goes on here."""
    return os.getloadavg()[0]


def shared_memory() -> Path:
    """Where slots lie: a folder in memory, as in a pod."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder there, which is gone at the end."""
    with tempfile.TemporaryDirectory(
        "", "tiercheck-bench-", shared_memory(), ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine()
    )


def _gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else "none"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # many images have no git
        return "unknown"
    return found.stdout.strip() or "unknown"


_SECONDS = 500.0


def run_ranks(module: str, world: int, *arguments: object) -> list[dict[str, Any]]:
    """`python -m MODULE MEET RANK WORLD ARGUMENTS...` for each rank; what `be_rank` printed there. Raises
    RuntimeError if one fails."""
    with tempfile.TemporaryDirectory(prefix="tcb-") as place:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, f"{place}/meet", str(rank), str(world), *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        end = time.monotonic() + _SECONDS
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes) or time.monotonic() > end:
                    raise RuntimeError(f"{module} with {world} ranks failed")
                time.sleep(0.05)
            return [json.loads((process.communicate()[0]).splitlines()[-1]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def be_rank(measure: Callable[[Path, list[str]], dict[str, Any]]) -> None:
    """The other side of `run_ranks`: join the group, print what `measure` of the first argument (a folder)
    and the others finds."""
    import torch
    import torch.distributed as dist

    meet, rank, world, folder, *others = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=int(rank), world_size=int(world))
    print(json.dumps(measure(Path(folder), others)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
