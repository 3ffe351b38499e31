"""Turns errors of boto3 and obstore into one sentence and one reason.

boto3 raises typed errors with a code. obstore's errors have the HTTP status and the server's XML, or the
causes of a broken connection, in their text alone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from tiercheck_sidecar.remote.config import (
    missing_credentials_advice,
    untrusted_certificate_advice,
    wrong_credentials_advice,
)
from tiercheck_sidecar.remote.errors import Reason, RemoteArchived, RemoteError

_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "InvalidClientTokenId",
    "TokenRefreshRequired",
}
_FORBIDDEN = {"AccessDenied", "Forbidden", "AllAccessDisabled", "AccountProblem", "Unauthorized"}
_CLOCK = "RequestTimeTooSkewed"
_ARCHIVED = "InvalidObjectState"
# Each server has its own spelling of these two, also behind a prefix as in `KMS.ThrottlingException`.
_FULL = re.compile(r"(?i)quota|(storage|disk).?(full|limit)|insufficient.?(storage|capacity|space)|no.?space")
_BUSY = re.compile(
    r"(?i)slow.?down|throttl|too.?many.?requests|busy|overload|(limit|rate|qps|throughput).?exceeded|unavailable|time.?out"
    r"|internal|PriorRequestNotComplete|TransactionInProgress|OperationAborted|NotInitialized"
)
_ADVICE = (
    (r"PathStyle|PathAccess|VirtualHost|SecondLevelDomain", "set tiers.remote.s3.addressing: Virtual"),
    (r"InvalidStorageClass", "correct tiers.remote.s3.storageClass"),
    (r"KMS\.", "see that the key of the encryption exists, is enabled and may be used"),
    (r"EntityTooLarge|HTTP 413", "let the server, or the proxy in between, take requests of 16 MiB and more"),
)
"""Advice, by a pattern for the code of the answer."""
_OF_S3 = re.compile(r"<(?:Code|Message)>")
_CODE = re.compile(r"<Code>\s{0,9}([\w.:-]{1,99})\s{0,9}</Code>")
_MESSAGE = re.compile(r"<(?:Message|Details)>([^<]*)</")
_SENTENCES = ("Message", "Details")
_REGION = re.compile(r"<Region>([\w-]{1,40})</Region>")
_TITLE = re.compile(r"(?i)<title>([^<]+)</title>")
_TAG = re.compile(r"<[^<>]*>")
_ACTION = re.compile(r"not authorized to perform: ([\w:]+)")
_STATUS = re.compile(r"status code: (\d{3})(?: [^:]{0,40}: )?")
_LONGEST_PAGE, _LONGEST_SENTENCE = 8192, 300
"""The number of characters of an answer that are parsed, and of its sentence that are kept."""
_BYTE = re.compile(r"\d+")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_OF_CREDENTIALS = "External AWS credential provider: "


@dataclass(frozen=True)
class Answer:
    """A server's answer to a request that failed."""

    status: int = 0
    """The HTTP status; 0: unknown."""
    code: str = ""
    """The S3 error code; empty: none, so the server may not be S3."""
    sentence: str = ""
    region: str = ""
    """The region of the bucket, if the answer names it."""
    header: str = ""
    """The header that the server does not support, if the answer names it."""
    elsewhere: str = ""
    """The URL of the host to which the answer redirects; empty: unknown."""

    @property
    def is_busy(self) -> bool:
        """Returns whether the same request may succeed in a moment."""
        if self.status in (408, 429):
            return True
        failing = self.status >= 500 and self.status not in (501, 505, 507)
        return (failing or bool(_BUSY.search(self.code))) and not _FULL.search(self.code)

    def refuses(self, header: str) -> bool:
        """Returns whether the answer reports that the server does not support this header."""
        if self.code.endswith("NotImplemented") or self.status == 501:
            return self.header.lower() in ("", header)
        return self.status == 400 and header in self.sentence.lower()

    def __str__(self) -> str:
        said = self.code or (f"HTTP {self.status}" if self.status else "an answer that is no text")
        return f"{said}: {self.sentence.rstrip('. ')}" if self.sentence else said


def read_page(text: str) -> tuple[str, str]:
    """Returns code and sentence of an answer's body: S3's XML or the page of a proxy."""
    text = text[:_LONGEST_PAGE]
    code, found = _CODE.search(text), _MESSAGE.findall(text) or _TITLE.findall(text)
    said = " ".join(found) or ("" if _OF_S3.search(text) else _TAG.sub(" ", text))
    readable = "".join(each if each.isprintable() else " " for each in html.unescape(said))
    return code[1] if code else "", " ".join(readable.split())[:_LONGEST_SENTENCE]


def answer_of(response: Mapping[str, Any]) -> Answer:
    """Converts the form in which botocore returns an answer."""
    said, more = response.get("Error", {}), response.get("ResponseMetadata", {})
    code, headers = str(said.get("Code") or ""), more.get("HTTPHeaders", {})
    target = urlsplit(str(headers.get("location") or ""))
    return Answer(
        int(more.get("HTTPStatusCode", 0)),
        "" if code.isdigit() else code,
        read_page("".join(f"<Message>{html.escape(str(said.get(key) or ''))}</" for key in _SENTENCES))[1],
        str(said.get("Region") or headers.get("x-amz-bucket-region") or ""),
        str(said.get("Header") or ""),
        f"{target.scheme}://{target.hostname}" if target.hostname else "",
    )


def from_boto(error: Exception, location: str) -> RemoteError:
    """Converts any botocore exception."""
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        return of_answer(answer_of(error.response), location)
    if isinstance(
        error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)
    ):
        return credentials_missing(location, str(error))
    if isinstance(error, boto.SSLError):
        return _tls(location, str(error))
    # It cannot connect, timed out, was closed, or met a proxy.
    if isinstance(error, (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError)):
        return _unreachable(location, str(error))
    return _other(location, f"{type(error).__name__}: {error}")


def from_obstore(error: Exception, location: str) -> RemoteError:
    """Converts what obstore raises: BaseError, and FileNotFoundError for any 404."""
    said, _, causes = str(error).partition("\n\nDebug source")
    status = _STATUS.search(said)
    answer = answer_of_page(int(status[1]), said[status.end() :]) if status is not None else Answer()
    if answer.code or answer.status:
        return of_answer(answer, location)
    if "FromUtf8Error" in causes:
        page = bytes(map(int, _BYTE.findall(causes.partition("bytes: [")[2].partition("]")[0])))
        return of_answer(Answer(0, *read_page(page.decode(errors="replace"))), location)
    if "redirect without LOCATION" in said:
        return of_answer(Answer(301), location)
    if _OF_CREDENTIALS in said:
        return credentials_missing(location, _first_line(said.partition(_OF_CREDENTIALS)[2]))
    if "InvalidCertificate" in causes:
        return _tls(location, " ".join(causes.partition("InvalidCertificate")[2].split())[:80].strip("( ),"))
    if "HTTP error: " in said:
        cause = _CAUSE.search(causes)
        broken = "no progress in time" if "TimedOut" in causes else "the connection broke"
        return _unreachable(location, cause[1] if cause else broken)
    return _other(location, _first_line(said))


def is_timeout(error: Exception) -> bool:
    """Returns whether an error of obstore, botocore or a socket is a timeout."""
    from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

    timeouts = TimeoutError | ReadTimeoutError | ConnectTimeoutError
    return isinstance(error, timeouts) or "TimedOut" in str(error)


def unresponsive(location: str, seconds: float) -> RemoteError:
    """Returns the error for a store that accepts the connection and then does not respond."""
    return _unreachable(location, f"it took nothing and said nothing for {seconds:g} s")


def from_read(error: Exception, location: str) -> RemoteError:
    """Converts errors from reading a body: RemoteError, botocore's, OSError and HTTPException."""
    from botocore.exceptions import BotoCoreError

    if isinstance(error, RemoteError):
        return error
    if is_timeout(error):
        return _unreachable(location, "no progress in time")
    if isinstance(error, BotoCoreError):
        return from_boto(error, location)
    return _unreachable(location, str(error) or type(error).__name__)


def is_absent(answer: Answer) -> bool:
    """Returns whether the object to be read does not exist, or ends before the range."""
    return answer.status == 416 or answer.code == "NoSuchKey"


def answer_of_page(status: int, text: str) -> Answer:
    """Parses a status and the body that came with it."""
    region = _REGION.search(text[:_LONGEST_PAGE])
    return Answer(status, *read_page(text), region[1] if region else "")


def of_answer(answer: Answer, location: str) -> RemoteError:
    """Returns the error for a server's error answer, with advice where the code is known."""
    status, code, passing = answer.status, answer.code, False
    if code == _ARCHIVED:
        return RemoteArchived(f"{location} has moved what was asked for into an archive ({answer})")
    if code == "NoSuchBucket":
        reason, what, advice = (
            Reason.NO_SUCH_BUCKET,
            "has no bucket",
            "create it or correct tiers.remote.s3.bucket",
        )
    elif code in _CREDENTIALS:
        reason, what, advice = Reason.FORBIDDEN, "refused the credentials", wrong_credentials_advice()
    elif code == _CLOCK:
        reason, what, advice, passing = Reason.FORBIDDEN, "refused this node's clock", "synchronise it", True
    elif answer.is_busy:
        reason, what, passing = Reason.UNREACHABLE, "is in trouble or overloaded", True
        advice = "uploads go on when it recovers"
    elif _FULL.search(code) or status == 507:
        reason, what, passing = Reason.FULL, "is full", True
        advice = "free space, raise its quota, or keep fewer versions (tiers.remote.keep)"
    elif 300 <= status < 400 and answer.elsewhere and not answer.region and code != "PermanentRedirect":
        reason, what = Reason.OTHER, f"sends requests on to {answer.elsewhere}"
        advice = "set tiers.remote.s3.endpoint, or region, so that they go there at once"
    elif code in ("PermanentRedirect", "AuthorizationHeaderMalformed") or status in (301, 307):
        reason, what, advice = Reason.OTHER, "is in another region", "correct tiers.remote.s3.region"
        if answer.region:
            advice = f"set tiers.remote.s3.region: {answer.region}"
    elif code in _FORBIDDEN or status in (401, 403):
        reason, what, advice = Reason.FORBIDDEN, "refused access", _advice(answer)
    else:
        reason, what, advice = Reason.OTHER, "failed", _advice(answer)
    said = f"{location} {what} ({answer})"
    return RemoteError(reason, f"{said}; {advice}." if advice else f"{said}.", retriable=passing)


def _advice(answer: Answer) -> str:
    """Returns the advice; empty: there is none."""
    said = answer.code or f"HTTP {answer.status}"
    for pattern, advice in _ADVICE:
        if re.search(pattern, said):
            return advice
    if answer.code in _FORBIDDEN:
        action = _ACTION.search(answer.sentence)
        allow = f"allow these credentials {action[1] if action else 'to list, get, put and delete there'}"
        if "explicit deny" in answer.sentence:
            allow = "a policy denies it whatever else allows it, so change that policy"
        return f"{allow}, or set what the bucket demands (encryption, requesterPays, ...) in tiers.remote.s3"
    return "no S3 answers so: look for a proxy in between" if not answer.code and answer.sentence else ""


def credentials_missing(location: str, detail: str = "") -> RemoteError:
    return RemoteError(
        Reason.CREDENTIALS_MISSING,
        f"No credentials for {location} were found{f' ({detail})' if detail else ''}; "
        f"{missing_credentials_advice()}.",
        retriable=True,
    )


def _unreachable(location: str, detail: str) -> RemoteError:
    proxies = (
        " and at HTTPS_PROXY, HTTP_PROXY and NO_PROXY of its environment"
        if getproxies().keys() - {"no"}
        else ""
    )
    return RemoteError(
        Reason.UNREACHABLE,
        f"{location} does not answer ({detail}); look at tiers.remote.s3.endpoint, at network "
        f"policies{proxies}.",
        retriable=True,
    )


def _tls(location: str, detail: str) -> RemoteError:
    return RemoteError(
        Reason.UNREACHABLE,
        f"The certificate of {location} is not trusted ({detail}); {untrusted_certificate_advice()}.",
        retriable=False,
    )


def _other(location: str, detail: str) -> RemoteError:
    return RemoteError(Reason.OTHER, f"{location} failed: {detail}.", retriable=False)


def _first_line(text: str) -> str:
    return text.partition("\n")[0].rstrip(" -:")[:300]
