"""Sets how many random examples a property is tried on.

`make test-extended` takes all that its test asks for, `make test` a part, others each time.
"""

from __future__ import annotations

import os

_SHARE = 1.0 if os.environ.get("TIERCHECK_EXTENDED") else 0.4
_FEWEST = 5


def examples(count: int) -> int:
    return min(count, max(_FEWEST, round(count * _SHARE)))
