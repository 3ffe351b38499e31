"""`python3 -m tiercheck_sidecar`: the sidecar process."""

import os
import signal
import sys

if __name__ == "__main__":
    # PID 1 ignores a signal that it does not handle. The event loop's handlers replace this one later.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

    import faulthandler

    faulthandler.enable()  # logs where a crash in native code happened

    from tiercheck_sidecar.app import main

    sys.exit(main())
