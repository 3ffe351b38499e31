"""A real cluster for people and tests: python -m testbed up|down|needs|shell|run -- COMMAND, as root."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from testbed.cluster import Testbed
from testbed.needs import missing

_FOLDER = Path(os.environ.get("TIERCHECK_TESTBED_FOLDER", "/var/tmp/tiercheck-testbed"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="testbed", description=__doc__)
    parser.add_argument("what", choices=("needs", "up", "down", "run"))
    parser.add_argument("command", nargs=argparse.REMAINDER, help="for `run`: what to run in the cluster's network")
    given = parser.parse_args()
    reason = missing()
    if given.what == "needs" or reason:
        print(f"no real cluster here: {reason}" if reason else "all is there for a real cluster")
        return 0 if given.what == "needs" and not reason else 3
    testbed = Testbed(_FOLDER)
    if given.what == "down":
        testbed.down()
        return 0
    if given.what == "up":
        testbed.down()
        _FOLDER.mkdir(parents=True)
        testbed = Testbed(_FOLDER)
        testbed.up()
        print(f"KUBECONFIG={testbed.kubeconfig}; in the cluster's network: nsenter -t {testbed.core} -n")
        return 0
    words = [word for word in given.command if word != "--"]
    variables = {"KUBECONFIG": str(testbed.kubeconfig), "TIERCHECK_TESTBED": str(_FOLDER)}
    return subprocess.run(testbed.inside(words), env={**os.environ, **variables}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
