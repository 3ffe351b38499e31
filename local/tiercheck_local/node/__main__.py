"""`python -m tiercheck_local.node`: one simulated node in this process, until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path

from tiercheck_local import markers
from tiercheck_local.client import Client
from tiercheck_local.node.agent import Agent
from tiercheck_local.node.process import FIRST_BACK_OFF
from tiercheck_local.node.settings import Settings
from tiercheck_local.node.volumes import Roots


def parse(arguments: list[str] | None = None) -> tuple[Settings, bool]:
    parser = argparse.ArgumentParser(prog="python -m tiercheck_local.node", description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--kubeconfig", required=True, type=Path)
    parser.add_argument("--directory", required=True, type=Path, help="where logs/<pod>/<container>.log go")
    parser.add_argument(
        "--address-prefix", required=True, help="three octets, such as 127.7.1; pods get the fourth"
    )
    parser.add_argument("--labels", type=_pairs, default={}, help="k=v,... of the Node")
    parser.add_argument("--pods", type=int, default=8, help="how many pods fit")
    parser.add_argument(
        "--resources", type=_pairs, default={}, help="allocatable, such as cpu=8,nvidia.com/gpu=4"
    )
    parser.add_argument(
        "--image-paths", type=_pairs, default={}, help="path in images=folder of this machine,..."
    )
    parser.add_argument("--cluster", default=os.environ.get(markers.CLUSTER, "alone"))
    parser.add_argument("--memory", type=Path, help="folder for memory volumes")
    parser.add_argument(
        "--scratch", type=Path, help="folder for other volumes; keep it short, sockets live there"
    )
    parser.add_argument("--claims", type=Path, help="folder that stands for persistent volumes")
    parser.add_argument("--lease-seconds", type=float, default=0.5)
    parser.add_argument(
        "--back-off", type=float, default=FIRST_BACK_OFF, help="first wait for a container that keeps ending"
    )
    parser.add_argument("--cuts", help="file that names the links that are cut")
    parser.add_argument(
        "--failpoints", type=Path, help="folder of the files that arm the containers' failpoints"
    )
    parser.add_argument("--lifeline", action="store_true", help="end when standard input ends")
    given = parser.parse_args(arguments)
    memory, scratch = markers.folders(given.cluster)
    roots = Roots(
        memory=given.memory or memory / given.name,
        scratch=given.scratch or scratch / given.name,
        claims=given.claims or given.directory / "claims",
    )
    settings = Settings(
        name=given.name,
        cluster=given.cluster,
        kubeconfig=given.kubeconfig,
        directory=given.directory,
        address_prefix=given.address_prefix,
        roots=roots,
        labels=given.labels,
        pods=given.pods,
        resources=given.resources,
        image_paths=given.image_paths,
        lease_seconds=given.lease_seconds,
        back_off=given.back_off,
        cuts=given.cuts,
        failpoints=given.failpoints,
    )
    return settings, given.lifeline


def _pairs(text: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in text.split(",") if entry)


async def serve(settings: Settings, lifeline: bool) -> None:
    async with Client.of(settings.kubeconfig) as client:
        await Agent(client, settings).run(lifeline)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(*parse()))


if __name__ == "__main__":
    main()
