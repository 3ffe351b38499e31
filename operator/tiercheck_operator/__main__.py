"""`python3 -m tiercheck_operator`: the operator's process."""

import asyncio
import sys

from tiercheck_operator.app import main

if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ValueError as error:
        sys.exit(f"tiercheck-operator: {error}")
