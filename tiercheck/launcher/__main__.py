"""Runs the launcher, which the operator puts in front of the user's command.

`python3 FOLDER/tiercheck/launcher/__main__.py -- COMMAND...`: all variables of the container are known only
here, because the image, a ConfigMap or the template may set them. Therefore the library is put first on
PYTHONPATH here, not in the manifest.
"""

import os
import signal
import sys

if __name__ == "__main__":
    # PID 1 ignores signals that it does not catch. The launcher's loop replaces this handler.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

    if not __package__:  # started by its path
        own = os.path.dirname(os.path.realpath(__file__))
        library = os.path.dirname(os.path.dirname(own))
        sys.path[:] = [library, *(path for path in sys.path if path != own)]
        former = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{library}{os.pathsep}{former}" if former else library

    from tiercheck.launcher.app import main

    sys.exit(main(sys.argv[1:]))
