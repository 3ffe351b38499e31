"""Runs the demo: a job on one machine, hit by six failures, twice, and a run without failures.

`make demo`
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console

from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.job import (
    FAILURES,
    PLAYS,
    WORKERS,
    Live,
    ObjectStore,
    Play,
    StoryRunner,
    credentials,
    job,
)
from tiercheck_local.demo.record import (
    Digest,
    FaultRecord,
    RunRecord,
    Step,
    TrainingLog,
    add_resumes,
    compare,
    run_uninterrupted,
    with_resumes,
)
from tiercheck_local.demo.report import faults_table, verdict_line, write_report
from tiercheck_local.nodespec import NodeSpec
from tiercheck_local.running import WaitTimeout
from tiercheck_local.stage import NAMESPACE, LaptopStage
from tiercheck_operator.kubernetes.api_server import JOBS

ROOT = Path(__file__).resolve().parents[3]
BUCKET = "demo-checkpoints"
FIRST_FAILURE = 12
"""Step of the first failure; the others follow at equal distances."""
BETWEEN = 16
STEPS = FIRST_FAILURE + len(FAILURES) * BETWEEN + 8

OPERATOR_ENV = {"TIERCHECK_SETTLE_SECONDS": "0.5", "TIERCHECK_SUSPECT_SECONDS": "5"}


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if each run bitwise equals the reference and no resume differs, else 1; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tiercheck_local.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up afterwards, until Ctrl-C")
    parser.add_argument("--report", type=Path, default=Path("demo-report"), help="folder for the report")
    parser.add_argument("--directory", type=Path, help="folder for logs (default: a new temporary one)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    console = Console()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="tiercheck-demo-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return _run(console, directory, options.report, options.keep)
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        return 130
    except WaitTimeout as error:
        console.print(f"[bold red]demo failed:[/] {error}", highlight=False)
        console.print(f"logs: {directory / 'logs'}", highlight=False, soft_wrap=True)
        return 1


def _run(console: Console, directory: Path, report: Path, keep: bool) -> int:
    started = time.time()
    nodes = NodeSpec.load(ROOT / "examples" / "clusters" / "two-racks.yaml")
    command = ["python3", str(ROOT / "examples" / "train_gpt.py"), "--steps", str(STEPS)]
    console.print("[bold]TierCheck demo[/]: 4 workers on 4 nodes in 2 racks, a small GPT, six failures")
    console.print("starting a laptop cluster, a local S3 server and the operator ...")
    with (
        ObjectStore(directory / "s3.log", BUCKET) as store,
        LocalCluster(directory, nodes, lease_grace=3.0) as cluster,
    ):
        cluster.apply_crds(ROOT / "crds")
        cluster.start_operator(OPERATOR_ENV)
        cluster.apply(credentials())
        reference: Reference | None = None
        records = []
        for play in PLAYS:
            console.print(
                f"[bold]{play.title}[/] after a failure (spec.recovery.inProcess: {play.in_process})"
            )
            cluster.apply(job(play, command, store.endpoint, store.bucket))
            stage = LaptopStage(cluster, play.name)
            log = TrainingLog(cluster.logs, f"{play.name}-0-*/trainer.log")
            with Live(console, STEPS, log) as live:
                faults = _run_story(stage, log, live)
                if reference is None:
                    live.say("  now the same training without any failure, to compare ...")
                    alone = [sys.executable, *command[1:]]
                    reference = run_uninterrupted(
                        alone,
                        WORKERS,
                        deadline=120.0,
                        on_step=lambda step: live.count("reference", step.step),
                    )
            records.append(_record(play, stage, log, faults, reference, started=started))
            cluster.api.delete(JOBS, NAMESPACE, play.name)
        _show(console, records, report)
        console.print(f"logs: {cluster.logs}", highlight=False, soft_wrap=True)
        if keep:
            _explore(console, cluster)
    return 0 if all(record.verdict.equal for record in records) else 1


def _run_story(stage: LaptopStage, log: TrainingLog, live: Live) -> list[FaultRecord]:
    story = StoryRunner(stage, log, WORKERS, live)
    faults = []
    for number, failure in enumerate(FAILURES):
        fault = story.play(failure, at_step=FIRST_FAILURE + number * BETWEEN)
        faults.append(fault)
        live.say(
            f"  ✓ back at step {fault.restored_step} after {fault.total_seconds:.1f} s, {fault.lost_steps} "
            f"steps lost, {fault.restarted} of {WORKERS} processes new: "
            + ", ".join(f"rank {rank} from {source}" for rank, source in enumerate(fault.rank_sources))
        )
    story.finish()
    live.say("  ✓ the job is complete")
    return with_resumes(faults, story.ended)


Reference = tuple[list[Step], Digest | None]


def _record(
    play: Play,
    stage: LaptopStage,
    log: TrainingLog,
    faults: list[FaultRecord],
    reference: Reference,
    *,
    started: float,
) -> RunRecord:
    verdict = compare(log.steps, log.digest, *reference)
    return RunRecord(
        title=play.title,
        machine=(
            f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python "
            f"{platform.python_version()}"
        ),
        started=started,
        ended=time.time(),
        nodes=stage.racks(),
        steps=log.steps,
        faults=faults,
        reference=reference[0],
        digest=log.digest,
        reference_digest=reference[1],
        verdict=add_resumes(verdict, faults),
    )


def _show(console: Console, records: list[RunRecord], folder: Path) -> None:
    written = write_report(records, folder)
    for record in records:
        console.print(faults_table(record))
        console.print(verdict_line(record))
    console.print(f"report: {written}", highlight=False, soft_wrap=True)
    console.print(f"took {records[-1].ended - records[0].started:.0f} s", highlight=False)


def _explore(console: Console, cluster: LocalCluster) -> None:
    console.print(
        f"the cluster is still up:\n  export KUBECONFIG={cluster.kubeconfig}", highlight=False, soft_wrap=True
    )
    console.print("  kubectl get tcj,pods,nodes\nCtrl-C ends it", highlight=False)
    threading.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
