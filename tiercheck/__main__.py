"""Runs `python3 -m tiercheck launch -- COMMAND...` wherever the library is on the path."""

import os
import signal
import sys

_USAGE = "usage: python3 -m tiercheck launch -- COMMAND [ARGUMENT...]"

if __name__ == "__main__":
    # PID 1 ignores signals that it does not catch. The launcher's loop replaces this handler.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

    from tiercheck.launcher.app import main

    if sys.argv[1:2] != ["launch"]:
        sys.exit(_USAGE)
    sys.exit(main(sys.argv[2:]))
