"""Runs every benchmark, each in a process of its own, and writes the table, the numbers and the plots.

python -m benchmarks                     everything, into docs/benchmarks
python -m benchmarks --only blocked      this one again; the rest of the table stays as it was
python -m benchmarks --only scale_operator --part 4000 "1 x 1000"
                                         of the large ones, these sizes again
python -m benchmarks --table             runs nothing: page and plots anew from results.json
python -m benchmarks --quick             small sizes, only to see that it works; nothing is published
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from benchmarks.harness import CACHE, FULL, QUICK, ROOT, Scale, describe, load
from benchmarks.report import Entry, Run, name_machine, print_table, publish

BENCHMARKS = {
    "blocked": "training blocked per snapshot, against a copy and against peers",
    "every_step": "training blocked with a delta at every step",
    "training_thread": "Python in the training thread, many sharded parameters",
    "delta_sizes": "delta bytes against snapshot bytes",
    "exchange": "peer copy throughput",
    "parity": "rebuild from parity",
    "restores": "verified local and peer restore",
    "resume_memory": "memory of a resume",
    "remote": "upload to and restore from S3",
    "sharing": "capture by the number of replicas",
    "resharding": "restore on another mesh",
    "growth": "growth with state and workers",
    "bookkeeping": "the sidecar's loops per wake",
    "ready_slots": "slots made ready after a start",
    "planning": "the planner's decisions",
    "reconcile": "what an event costs the operator",
    "scale_operator": "the operator with many workers and many jobs",
    "scale_coordinator": "what the coordinator costs, by workers",
    "in_process": "recoveries in which every other process stays",
    "warm_start": "from release to the first step, warm and cold",
    "simulate_validation": "what the simulator foretells, against what failures cost",
    "ettr": "ETTR by simulation, beside peers",
    "gpu": "capture and deltas on a GPU",
}
"""In the order of the table."""


def main() -> int:
    """0 if all ran, whatever they found; 1 if one could not."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is published")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--part", nargs="+", metavar="SIZE", default=[], help="with --only scale_...")
    parser.add_argument("--out", type=Path, help="folder for the table, the numbers and the plots")
    parser.add_argument(
        "--table", action="store_true", help="run nothing: write page and plots anew from results.json"
    )
    parser.add_argument("--one", choices=BENCHMARKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # so that what was started is ended, and memory given back
    scale = QUICK if arguments.quick else FULL
    if arguments.one:
        return _one(arguments.one, scale, arguments.part)
    out = arguments.out or (CACHE / "quick" if arguments.quick else ROOT / "docs" / "benchmarks")
    if arguments.table:
        return _render(Run.read(out), out)
    failed = False
    chosen = arguments.only or list(BENCHMARKS)
    for number, name in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {name}: {BENCHMARKS[name]}", file=sys.stderr, flush=True)
        failed |= not _run(name, arguments.quick, arguments.part)
    found = [entry for name in BENCHMARKS if (entry := Entry.read(_file(name, arguments.quick)))]
    published = out / "results.json"
    before = Run.read(out) if published.exists() else Run({}, _command(arguments.quick), [])
    _render(before.take_in(found, describe(), BENCHMARKS), out)
    return int(failed)


def _render(found: Run, out: Path) -> int:
    print_table(found)
    publish(found, out)
    print(f"written to {out}", file=sys.stderr)
    return 0


def _command(quick: bool) -> str:
    return "python -m benchmarks --quick" if quick else "make bench"


def _file(name: str, quick: bool) -> Path:
    return CACHE / ("found-quick" if quick else "found") / f"{name}.json"


def _run(name: str, quick: bool, parts: list[str]) -> bool:
    """One benchmark in a fresh process, so that none inherits another's memory or threads."""
    file = _file(name, quick)
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks", "--one", name, *(["--quick"] if quick else [])]
    command += ["--part", *parts] if parts else []
    started, busy = time.monotonic(), load()
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            process.wait()
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        print(f"{name} failed; its last result, if any, stays in the table", file=sys.stderr)
        return False
    found, machine = json.loads(file.read_text()), describe()
    found |= {
        "name": name,
        "title": BENCHMARKS[name],
        "seconds": round(time.monotonic() - started, 1),
        "load": round(busy, 2),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "commit": machine["commit"],
        "machine": name_machine(machine),
    }
    file.write_text(json.dumps(found, indent=1))
    return True


def _one(name: str, scale: Scale, parts: list[str]) -> int:
    try:
        module = importlib.import_module(f"benchmarks.{name}")
        if parts:
            earlier = Entry.read(_file(name, scale.quick))
            outcome = module.run(scale, parts, earlier.data if earlier is not None else {})
        else:
            outcome = module.run(scale)
    except Exception:  # a process boundary: the caller goes on with the others, and reports the failure
        traceback.print_exc()
        return 1
    plain = {"figures": [figure.plain() for figure in outcome.figures], "data": outcome.data}
    _file(name, scale.quick).parent.mkdir(parents=True, exist_ok=True)
    _file(name, scale.quick).write_text(json.dumps(plain))
    return 0


if __name__ == "__main__":
    sys.exit(main())
