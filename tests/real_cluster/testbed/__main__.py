"""A real cluster for people and tests: python -m testbed up|down|needs|run -- COMMAND, as root."""

from __future__ import annotations

import argparse
import sys

from testbed.cluster import FOLDER, Testbed
from testbed.needs import missing, no_root


def main() -> int:
    parser = argparse.ArgumentParser(prog="testbed", description=__doc__)
    parser.add_argument("what", choices=("needs", "up", "down", "run"))
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="for `run`: what to run in the cluster's network"
    )
    given = parser.parse_args()
    reason = no_root() if given.what == "down" else missing()  # what is to be ended may have been moved away
    if given.what == "needs" or reason:
        print(f"no real cluster here: {reason}" if reason else "all is there for a real cluster")
        return 0 if given.what == "needs" and not reason else 3
    if given.what == "down":
        Testbed(FOLDER).down()
        return 0
    if given.what == "up":
        testbed = Testbed.anew(FOLDER)
        print(f"KUBECONFIG={testbed.kubeconfig}; in the cluster's network: nsenter -t {testbed.core} -n")
        return 0
    return Testbed(FOLDER).call([word for word in given.command if word != "--"])


if __name__ == "__main__":
    sys.exit(main())
