"""Runs the GPU acceptance, and ends with the number of checks that failed.

python -m benchmarks.gpu_acceptance: everything, under ten minutes on one GPU; `--only C1,P2`: these alone;
`--cpu --quick`: what means something without a GPU, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_acceptance.checks import CHECKS, Setting, line, numbers, page, summary
from benchmarks.gpu_acceptance.runner import run_all, run_here
from benchmarks.harness import ROOT, shared_memory


def main() -> int:
    """The number of checks that failed; 64 if there is no GPU to check, as nothing is known then."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cpu", action="store_true", help="without a GPU; speeds are measured and not judged"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, only to see that it works")
    parser.add_argument("--only", type=_names, default=list(CHECKS), metavar="C1,P2", help="these checks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table as a page")
    parser.add_argument(
        "--memory", type=Path, default=shared_memory(), metavar="FOLDER", help="where slots lie"
    )
    parser.add_argument(
        "--spoil", action="store_true", help="flip a bit of what is restored: checks that restore fail"
    )
    parser.add_argument("--child", type=_names, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        here = Setting(arguments.device, arguments.quick, arguments.out.parent, arguments.spoil)
        run_here(arguments.child, here, arguments.out)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # so that what was started is ended, and memory given back
    machine = _machine()
    if machine["gpu"] == "none" and not arguments.cpu:
        print("torch sees no GPU; --cpu runs what means something without one", file=sys.stderr)
        return 64
    device = "cpu" if arguments.cpu else "cuda"
    print(
        f"torch {machine['packages'].get('torch')}, {device}, GPU: {machine['gpu']}",
        file=sys.stderr,
        flush=True,
    )
    setting = Setting(device, arguments.quick, arguments.memory, arguments.spoil)
    results = run_all(
        arguments.only, setting, lambda result: print(line(result), file=sys.stderr, flush=True)
    )
    command = " ".join(["python -m benchmarks.gpu_acceptance", *sys.argv[1:]])
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers(machine, command, results), indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(page(machine, command, results))
    print(page(machine, command, results))
    print(summary(results), file=sys.stderr)
    return sum(result.status == "failed" for result in results)


def _names(text: str) -> list[str]:
    names = [name.strip().upper() for name in text.split(",")]
    if unknown := [name for name in names if name not in CHECKS]:
        raise argparse.ArgumentTypeError(
            f"no check is called {', '.join(unknown)}; there are {', '.join(CHECKS)}"
        )
    return names


def _machine() -> dict[str, Any]:
    """Asked by a process of its own, so that this one never opens the GPU."""
    code = "import json; from benchmarks.harness import describe; print(json.dumps(describe()))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
