"""`python3 -m tiercheck_sidecar`: the sidecar process."""

import sys

from tiercheck_sidecar.app import main

if __name__ == "__main__":
    sys.exit(main())
