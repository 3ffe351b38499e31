"""How a source of a restore fails: so that exchange, parity and the remote tier say it in the same words."""

from __future__ import annotations


class SourceFailed(Exception):
    """A source could not give the artifact; the message is a sentence."""


class SourceCorrupt(SourceFailed):
    """It gave bytes that do not match their digests: it must not be asked again."""
