"""Credentials of a bucket as people put them into Secrets: `echo key | base64` ends in a line break, which no header may hold."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from tiercheck_sidecar.remote.errors import Reason, RemoteError

log = logging.getLogger(__name__)

_SIGNING = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def clean_credentials(env: MutableMapping[str, str]) -> None:
    """Strip blanks and line breaks around each AWS_ variable. Raises RemoteError if one that signs holds them within."""
    padded = [name for name, value in env.items() if name.startswith("AWS_") and value != value.strip()]
    for name in sorted(padded):
        env[name] = env[name].strip()
        log.warning("%s has blanks or a line break around its value; they are left out. Correct the Secret", name)
    for name in _SIGNING:
        value = env.get(name, "")
        if not (value.isascii() and value.isprintable()) or " " in value:
            raise RemoteError(
                Reason.FORBIDDEN,
                f"{name} holds a blank, a line break or another character that no credential has; "
                "correct the Secret named in credentialsSecretName.",
                retriable=False,
            )
