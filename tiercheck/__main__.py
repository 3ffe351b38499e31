"""Runs `python3 -m tiercheck launch -- COMMAND...` wherever the library is on the path."""

import os
import signal
import sys

_USAGE = "usage: python3 -m tiercheck launch -- COMMAND [ARGUMENT...]"

if __name__ == "__main__":
    # PID 1 ends by no signal that it does not catch. The loop takes over when it can start something.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

    from tiercheck.launcher.app import main

    if sys.argv[1:2] != ["launch"]:
        sys.exit(_USAGE)
    sys.exit(main(sys.argv[2:]))
