"""Turns errors of boto3 and obstore into one sentence and one reason.

boto3 raises typed errors with a code. obstore's hold the HTTP status and the server's XML, or the causes of a
broken connection, in their text alone.
"""

from __future__ import annotations

import re

from tiercheck_sidecar.remote.config import give_credentials, mend_credentials
from tiercheck_sidecar.remote.errors import Reason, RemoteError

_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
}
_FORBIDDEN = {"AccessDenied", "Forbidden", "AllAccessDisabled", "AccountProblem", "Unauthorized"}
_BUSY = {
    "SlowDown",
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeout",
    "Throttling",
    "OperationAborted",
}
_CLOCK = "RequestTimeTooSkewed"
_FULL = {
    "QuotaExceeded",
    "InsufficientStorage",
    "InsufficientCapacity",
    "XMinioStorageFull",
    "XMinioAdminBucketQuotaExceeded",
}
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_OF_CREDENTIALS = "External AWS credential provider: "


def from_boto(error: Exception, location: str) -> RemoteError:
    """For any botocore exception."""
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return of_answer(int(status), str(error.response.get("Error", {}).get("Code", "")), location)
    if isinstance(
        error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)
    ):
        return credentials_missing(location, str(error))
    if isinstance(error, boto.SSLError):
        return _tls(location, str(error))
    if isinstance(
        error, (boto.ConnectionError, boto.HTTPClientError)
    ):  # cannot connect, timed out, closed, proxy
        return _unreachable(location, str(error))
    return _other(location, f"{type(error).__name__}: {error}")


def from_obstore(error: Exception, location: str) -> RemoteError:
    """For what obstore raises: BaseError, and FileNotFoundError for any 404."""
    said, _, causes = str(error).partition("\n\nDebug source")
    status, code = _answer_in(said)
    if code or status:
        return of_answer(status, code, location)
    if "redirect without LOCATION" in said:
        return of_answer(301, "", location)
    if _OF_CREDENTIALS in said:
        return credentials_missing(location, _first_line(said.partition(_OF_CREDENTIALS)[2]))
    if "InvalidCertificate" in causes:
        return _tls(location, " ".join(causes.partition("InvalidCertificate")[2].split())[:80].strip("( ),"))
    if "HTTP error: " in said:
        cause = _CAUSE.search(causes)
        broken = "no progress in time" if "TimedOut" in causes else "the connection broke"
        return _unreachable(location, cause[1] if cause else broken)
    return _other(location, _first_line(said))


def is_silence(error: Exception) -> bool:
    """Whether what obstore raised says that nothing came in time."""
    return "TimedOut" in str(error)


def silence(location: str, seconds: float) -> RemoteError:
    """For a store that takes the connection and then says nothing."""
    return _unreachable(location, f"it took nothing and said nothing for {seconds:g} s")


def is_absent(error: Exception) -> bool:
    """Whether the object that obstore was to read does not exist, or ends before the range."""
    status, code = _answer_in(str(error))
    return status == 416 or code == "NoSuchKey"


def _answer_in(text: str) -> tuple[int, str]:
    status, code = _STATUS.search(text), _CODE.search(text)
    return int(status[1]) if status else 0, code[1] if code else ""


def of_answer(status: int, code: str, location: str) -> RemoteError:
    """For a server that answered with an error: HTTP status (0 if unknown) and S3 error code ("" if none)."""
    said = code or f"HTTP {status}"
    if code == "NoSuchBucket":
        return RemoteError(
            Reason.NO_SUCH_BUCKET,
            f"The bucket of {location} does not exist; create it or correct tiers.remote.s3.bucket.",
            retriable=False,
        )
    if code in _CREDENTIALS:
        return RemoteError(
            Reason.FORBIDDEN,
            f"{location} refused the credentials ({said}); {mend_credentials()}.",
            retriable=False,
        )
    if code == _CLOCK:
        return RemoteError(
            Reason.FORBIDDEN,
            f"{location} refused this node's clock ({said}); synchronise it.",
            retriable=True,
        )
    if code in _FULL or status == 507:
        return RemoteError(
            Reason.FULL,
            f"{location} is full ({said}); free space, raise its quota, or keep fewer versions "
            "(tiers.remote.keep).",
            retriable=True,
        )
    if code in _FORBIDDEN or status in (401, 403):
        return RemoteError(
            Reason.FORBIDDEN,
            f"{location} refused access ({said}); allow these credentials to list, get, put and delete "
            "there.",
            retriable=False,
        )
    if code in _BUSY or status in (429, 500, 502, 503, 504):
        return RemoteError(
            Reason.UNREACHABLE,
            f"{location} is in trouble or overloaded ({said}); uploads go on when it recovers.",
            retriable=True,
        )
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed") or status in (301, 307):
        return _other(location, f"{said}: the bucket is in another region; correct tiers.remote.s3.region")
    return _other(location, said)


def credentials_missing(location: str, detail: str = "") -> RemoteError:
    """Nothing to sign with."""
    return RemoteError(
        Reason.CREDENTIALS_MISSING,
        f"No credentials for {location} were found{f' ({detail})' if detail else ''}; {give_credentials()}.",
        retriable=True,
    )


def _unreachable(location: str, detail: str) -> RemoteError:
    return RemoteError(
        Reason.UNREACHABLE,
        f"{location} does not answer ({detail}); look at tiers.remote.s3.endpoint and at network policies.",
        retriable=True,
    )


def _tls(location: str, detail: str) -> RemoteError:
    return RemoteError(
        Reason.UNREACHABLE,
        f"The certificate of {location} is not trusted ({detail}); give its authority in "
        "tiers.remote.s3.caBundle.",
        retriable=False,
    )


def _other(location: str, detail: str) -> RemoteError:
    return RemoteError(Reason.OTHER, f"{location} failed: {detail}.", retriable=False)


def _first_line(text: str) -> str:
    return text.partition("\n")[0].rstrip(" -:")[:300]
