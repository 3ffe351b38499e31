"""The chart's tests share the helpers for real API servers with the operator's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "operator"))
