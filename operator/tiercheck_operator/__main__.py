"""`python3 -m tiercheck_operator`: the operator's process."""

import os
import signal
import sys

if __name__ == "__main__":
    # PID 1 ends by no signal that it does not catch. The event loop takes over when something has begun.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

    import faulthandler

    faulthandler.enable()  # who ends in native code says where, in the log

    # kopf would load it wherever it is installed, for operators that have its models; it takes 20 MiB.
    sys.modules["kubernetes"] = None  # type: ignore[assignment]

    import asyncio

    from tiercheck_operator.app import main

    try:
        asyncio.run(main())
    except ValueError as error:
        sys.exit(f"tiercheck-operator: {error}")
