"""`make real-cluster-test`: images, a cluster up, the guide and the matrix on it, the cluster down. Nothing stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testbed.cluster import Testbed
from testbed.needs import missing

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_FOLDER = Path(os.environ.get("TIERCHECK_TESTBED_FOLDER", "/var/tmp/tiercheck-testbed"))
_PARTS = (["test_install_guide.py"], ["test_real_faults.py", "test_real_modes.py", "test_real_release.py"])
"""Each on a cluster of its own, as the guide begins with nothing installed."""


def main(flags: list[str]) -> int:
    """0: green, or there is no real cluster to be had here, which is said."""
    if reason := missing():
        print(f"SKIPPED: no test on real kubelets here: {reason}", flush=True)
        return 0
    images = Path(os.environ.get("TIERCHECK_IMAGES", _ROOT / ".images" / "archives"))
    environment = {**os.environ, "TIERCHECK_IMAGES": str(images)}
    if not all((images / f"{name}.tar").exists() for name in ("operator", "sidecar", "example-trainer")):
        subprocess.run(["make", "images-archive", f"OUT={images}"], cwd=_ROOT, check=True)
    failed = 0
    for files in _PARTS:
        testbed = Testbed(_FOLDER)
        testbed.down()
        _FOLDER.mkdir(parents=True)
        testbed = Testbed(_FOLDER)
        try:
            testbed.up()
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-s", *flags]
            command += [str(_HERE / name) for name in files]
            variables = {"KUBECONFIG": str(testbed.kubeconfig), "TIERCHECK_TESTBED": str(_FOLDER)}
            done = subprocess.run(testbed.inside(command), cwd=_ROOT, env={**environment, **variables}, check=False)
            failed += done.returncode != 0
        finally:
            testbed.down()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
