"""The simulated cluster is that of the operator's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "operator"))
