"""Builds images, brings a cluster up, runs the guide and the matrix, and takes it down.

`make real-cluster-test`; nothing stays.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testbed.cluster import FOLDER, Testbed
from testbed.needs import missing

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_PARTS = (["test_install_guide.py"], ["test_real_faults.py", "test_real_neighbours.py", "test_real_modes.py"])
"""Each on a cluster of its own, as the guide begins with nothing installed."""
_NONE_CHOSEN = 5
"""What pytest ends with if `-k` leaves nothing of a part."""


def main(flags: list[str]) -> int:
    """0: green, or there is no real cluster to be had here, which is said."""
    if reason := missing():
        print(f"SKIPPED: no test on real kubelets here: {reason}", flush=True)
        return 0
    if "TIERCHECK_IMAGES" not in os.environ:
        os.environ["TIERCHECK_IMAGES"] = str(_ROOT / ".images" / "archives")
        command = [sys.executable, "-m", "tests.images.building", os.environ["TIERCHECK_IMAGES"]]
        subprocess.run(command, cwd=_ROOT, check=True)
    os.chdir(_ROOT)
    codes = []
    for files in _PARTS:
        try:
            names = [str(_HERE / name) for name in files]
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-s", *flags, *names]
            codes.append(Testbed.anew(FOLDER).call(command))
        finally:
            Testbed(FOLDER).down()
    ran = [code for code in codes if code != _NONE_CHOSEN]
    return sum(code != 0 for code in ran) if ran else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
