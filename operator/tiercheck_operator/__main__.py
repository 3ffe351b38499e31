"""Runs the operator's process: `python3 -m tiercheck_operator`."""

import os
import signal
import sys

if __name__ == "__main__":
    # PID 1 ignores every signal without a handler. The event loop installs its own once it runs.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

    import faulthandler

    faulthandler.enable()  # a crash in native code writes its stack to the log

    # kopf imports this package wherever it is installed, to support its models; that takes 20 MiB.
    sys.modules["kubernetes"] = None  # type: ignore[assignment]

    import asyncio

    from tiercheck_operator.app import main

    try:
        asyncio.run(main())
    except ValueError as error:
        sys.exit(f"tiercheck-operator: {error}")
