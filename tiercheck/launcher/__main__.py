"""`python3 -m tiercheck.launcher -- COMMAND...`: what the operator puts in front of the user's command."""

import sys

from tiercheck.launcher.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
