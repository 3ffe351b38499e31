"""`python3 -m tiercheck launch -- COMMAND...` works wherever the library is on the path, installed or not."""

import sys

from tiercheck.launcher.app import main

_USAGE = "usage: python3 -m tiercheck launch -- COMMAND [ARGUMENT...]"

if __name__ == "__main__":
    if sys.argv[1:2] != ["launch"]:
        sys.exit(_USAGE)
    sys.exit(main(sys.argv[2:]))
