"""Runs a laptop cluster to be explored with kubectl (`python -m tiercheck_local up`)."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from pathlib import Path

from tiercheck_local.cluster import LocalCluster
from tiercheck_local.nodespec import NodeSpec


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tiercheck_local", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster and keep it until Ctrl-C")
    up.add_argument("--nodes", type=int, default=4)
    up.add_argument("--racks", type=int, default=2)
    up.add_argument("--cluster", type=Path, help="YAML file with the nodes, instead of --nodes and --racks")
    up.add_argument("--control-plane", choices=["embedded", "real"], default="embedded")
    up.add_argument(
        "--directory", type=Path, help="for logs and kubeconfig (default: a new temporary folder)"
    )
    up.add_argument(
        "--crds", type=Path, default=Path("crds"), help="definitions to apply, if the folder exists"
    )
    up.add_argument("--operator", action="store_true", help="start the operator too")
    given = parser.parse_args(arguments)
    nodes = NodeSpec.load(given.cluster) if given.cluster else NodeSpec.racks(given.nodes, given.racks)
    directory = given.directory or Path(tempfile.mkdtemp(prefix="tiercheck-cluster-"))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with LocalCluster(directory, nodes, given.control_plane) as cluster:
        if given.crds.is_dir():
            cluster.apply_crds(given.crds)
        if given.operator:
            cluster.start_operator()
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        print(f"# {len(nodes)} nodes; logs in {cluster.logs}; Ctrl-C ends it", file=sys.stderr, flush=True)
        stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
