"""Runs the launcher, which the operator puts in front of the user's command.

`python3 -m tiercheck.launcher -- COMMAND...`
"""

import os
import signal
import sys

if __name__ == "__main__":
    # PID 1 ends by no signal that it does not catch. The loop takes over when it can start something.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

    from tiercheck.launcher.app import main

    sys.exit(main(sys.argv[1:]))
