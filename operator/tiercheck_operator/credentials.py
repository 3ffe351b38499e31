"""Makes a job's credentials: a certificate authority that lives for one signature, one server certificate, one token."""

from __future__ import annotations

import datetime
import secrets

from tiercheck.protocol.names import TLS_SERVER_NAME
from tiercheck_operator.certificates import issue_pair
from tiercheck_operator.manifests.secret import Credentials

_LIFETIME = datetime.timedelta(days=3650)


def issue(job_uid: str) -> Credentials:
    """New, random credentials for one job."""
    pair = issue_pair(f"tiercheck job {job_uid}", [TLS_SERVER_NAME], _LIFETIME)
    return Credentials(ca=pair.ca, certificate=pair.certificate, key=pair.key, token=secrets.token_urlsafe(32))
