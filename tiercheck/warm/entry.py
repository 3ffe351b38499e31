"""Starts a warm interpreter: it prepares, waits, and then stands alone below the user's code.

`python [flags] entry.py DESCRIPTOR COMMAND...`. Nothing but the few lines here may stay between Python and
the script: a traceback of the script must begin with the script.
"""

import sys

_names = {**globals(), "__doc__": None}  # what Python gives to a script's `__main__`, whatever its version
_before = frozenset(sys.modules)
if not sys.flags.safe_path:
    del sys.path[0]  # this folder, whose files are nobody's modules
sys.path.insert(0, __file__.rsplit("/", 3)[0])  # the launcher's own library, whatever else there is

from tiercheck.warm.becoming import prepare  # noqa: E402

del sys.path[0]
_become = prepare(int(sys.argv[1]), sys.argv[2:], _names, _before)
try:
    if _become.module:
        _become.run_module(_become.module)
    else:
        exec(_become.code, _become.names)
except BaseException as _error:
    if _error.__traceback__ is not None:
        _error.__traceback__ = _error.__traceback__.tb_next
    raise
