"""Builds errors as the real server does: clients branch on `reason` and `code`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class FieldCause:
    """One error in one field. `reason` is one of the API's FieldValue... reasons."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class ApiError(Exception):
    """A request that ends with a Status object of kind Failure."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def status(self) -> Object:
        """Returns the Status object sent to the client."""
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
            body["details"] = self.details
        return body


def success(details: Object) -> Object:
    """Returns the Status object that answers a completed delete, binding or eviction."""
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def qualified(plural: str, group: str) -> str:
    """Returns the name of a resource in messages: `pods`, or `leases.coordination.k8s.io`."""
    return f"{plural}.{group}" if group else plural


def details_of(name: str, group: str, kind: str) -> Object:
    """Returns the details of a Status that identify its object."""
    return {"name": name, **({"group": group} if group else {}), "kind": kind}


def not_found(plural: str, group: str, name: str) -> ApiError:
    return ApiError(
        404, "NotFound", f'{qualified(plural, group)} "{name}" not found', details_of(name, group, plural)
    )


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource", {})


def already_exists(plural: str, group: str, name: str) -> ApiError:
    message = f'{qualified(plural, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, details_of(name, group, plural))


def conflict(plural: str, group: str, name: str, why: str | None = None) -> ApiError:
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {qualified(plural, group)} "{name}": {why}'
    return ApiError(409, "Conflict", message, details_of(name, group, plural))


def forbidden(plural: str, group: str, name: str, why: str, causes: Sequence[Object] = ()) -> ApiError:
    details = details_of(name, group, plural)
    if causes:
        details["causes"] = list(causes)
    return ApiError(403, "Forbidden", f'{qualified(plural, group)} "{name}" is forbidden: {why}', details)


def invalid(kind: str, group: str, name: str, causes: Sequence[FieldCause]) -> ApiError:
    """Returns a 422 with every error found."""
    text = str(causes[0]) if len(causes) == 1 else "[" + ", ".join(map(str, causes)) + "]"
    details = details_of(name, group, kind)
    details["causes"] = [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]
    return ApiError(422, "Invalid", f'{qualified(kind, group)} "{name}" is invalid: {text}', details)


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def unsupported_media_type(accepted: Sequence[str]) -> ApiError:
    message = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(
        accepted
    )
    return ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", message)
