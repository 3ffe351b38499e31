"""Credentials of a bucket as people put them into Secrets: `echo key | base64` ends in a line break, which no header may hold."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

from tiercheck.protocol.names import ENV_POD_UID
from tiercheck_sidecar.remote.errors import Reason, RemoteError

log = logging.getLogger(__name__)

_SIGNING = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def clean_credentials(env: MutableMapping[str, str]) -> None:
    """Strip blanks and line breaks around each AWS_ variable. Raises RemoteError if one that signs holds them within."""
    padded = [name for name, value in env.items() if name.startswith("AWS_") and value != value.strip()]
    for name in sorted(padded):
        env[name] = env[name].strip()
        log.warning("%s has blanks or a line break around its value; they are left out: %s", name, mend_credentials())
    for name in _SIGNING:
        value = env.get(name, "")
        if not (value.isascii() and value.isprintable()) or " " in value:
            raise RemoteError(
                Reason.FORBIDDEN,
                f"{name} holds a blank, a line break or another character that no credential has; "
                f"{mend_credentials()}.",
                retriable=False,
            )


def give_credentials() -> str:
    """What to do where there are none. In a pod they are the job's, at a command line the caller's own."""
    if os.environ.get(ENV_POD_UID):
        return "name a Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in credentialsSecretName, or give the pods a cloud identity"
    return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE to a profile of ~/.aws that has them"


def mend_credentials() -> str:
    """What to do about wrong ones."""
    if os.environ.get(ENV_POD_UID):
        return "correct the Secret named in credentialsSecretName"
    return "correct the AWS_ variables of the environment, or the profile that AWS_PROFILE names"
