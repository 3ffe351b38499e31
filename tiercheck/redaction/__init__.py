"""Takes credentials out of text on its way to people: status, Events, logs and exports.

It is better to lose a harmless word than to give a secret away. The time it takes is linear in the length of
the text.
"""

from tiercheck.redaction.logs import log_redacted
from tiercheck.redaction.names import is_secret_name
from tiercheck.redaction.shapes import GONE
from tiercheck.redaction.text import redacted

__all__ = ["GONE", "is_secret_name", "log_redacted", "redacted"]
