"""Starts a warm interpreter: prepares it, waits for the order, and runs the user's code.

`python [flags] entry.py DESCRIPTOR RECIPE COMMAND`. Only these few lines may be between Python and the
script, because a traceback of the script must begin with the script.
"""

import sys

_names = {**globals(), "__doc__": None}  # the names that this version of Python gives to `__main__`
_before = frozenset(sys.modules)
if not sys.flags.safe_path:
    del sys.path[0]  # this folder: its files must not be importable
sys.path.insert(0, __file__.rsplit("/", 3)[0])  # the launcher's own library comes first

from tiercheck.warm.in_place_exec import prepare  # noqa: E402

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
