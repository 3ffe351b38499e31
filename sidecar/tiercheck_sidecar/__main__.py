"""`python3 -m tiercheck_sidecar`: the sidecar process."""

import os
import signal
import sys

if __name__ == "__main__":
    # PID 1 ends by no signal that it does not catch. The event loop takes over when something has begun.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

    import faulthandler

    faulthandler.enable()  # who ends in native code says where, in the log

    from tiercheck_sidecar.app import main

    sys.exit(main())
