"""The rules that hold for the metadata of every object: names, labels, owners."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tiercheck_local.apiserver.errors import FieldCause, Object

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must "
    "start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
DNS_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start "
    "and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_DNS_LABEL_NAMES = frozenset({"/namespaces", "/services"})
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_LABEL_VALUE_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must "
    "start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used "
    "for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
_KEY_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_KEY_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
    "alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)


def name_faults(collection: str, name: str, field: str = "metadata.name") -> list[FieldCause]:
    """Why `name` cannot be the name of an object in this collection."""
    if collection in _DNS_LABEL_NAMES:
        limit, pattern, rule = 63, DNS_LABEL, DNS_LABEL_RULE
    else:
        limit, pattern, rule = 253, _SUBDOMAIN, _SUBDOMAIN_RULE
    shown = f'Invalid value: "{name}": '
    if len(name) > limit:
        return [FieldCause(field, f"{shown}must be no more than {limit} characters")]
    return [] if pattern.fullmatch(name) else [FieldCause(field, shown + rule)]


def metadata_faults(metadata: Object) -> list[FieldCause]:
    """What is wrong with the rest of the metadata."""
    return [*_label_faults(metadata), *_annotation_faults(metadata), *_owner_faults(metadata)]


def _label_faults(metadata: Object) -> Iterator[FieldCause]:
    for key, value in (metadata.get("labels") or {}).items():
        yield from _key_faults("metadata.labels", key)
        if len(value) > 63:
            yield FieldCause("metadata.labels", f'Invalid value: "{value}": must be no more than 63 bytes')
        if not _LABEL_VALUE.fullmatch(value):
            yield FieldCause("metadata.labels", f'Invalid value: "{value}": {_LABEL_VALUE_RULE}')


def _annotation_faults(metadata: Object) -> Iterator[FieldCause]:
    for key in metadata.get("annotations") or {}:
        yield from _key_faults("metadata.annotations", key, any_case=True)


def _key_faults(field: str, key: str, any_case: bool = False) -> Iterator[FieldCause]:
    prefix, slash, name = key.rpartition("/")
    if slash and not _SUBDOMAIN.fullmatch(prefix.lower() if any_case else prefix):
        yield FieldCause(field, f'Invalid value: "{key}": prefix part {_SUBDOMAIN_RULE}')
    if len(name) > 63:
        yield FieldCause(field, f'Invalid value: "{key}": name part must be no more than 63 bytes')
    if not _KEY_NAME.fullmatch(name):
        yield FieldCause(field, f'Invalid value: "{key}": {_KEY_RULE}')


def _owner_faults(metadata: Object) -> Iterator[FieldCause]:
    for owner in metadata.get("ownerReferences") or []:
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                why = "version must not be empty" if field == "apiVersion" else "must not be empty"
                yield FieldCause(f"metadata.ownerReferences.{field}", f'Invalid value: "": {why}')
    controllers = [o for o in metadata.get("ownerReferences") or [] if o.get("controller")]
    if len(controllers) > 1:
        why = "Only one reference can have Controller set to true"
        yield FieldCause("metadata.ownerReferences", f"Invalid value: {len(controllers)}: {why}")
