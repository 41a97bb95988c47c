"""Formats of JSON Schema by their RFCs, asked of finished texts: written apart from the patterns that grammars have."""

from __future__ import annotations

import base64
import ipaddress
import re
import string
import uuid
from collections.abc import Callable
from datetime import date, datetime
from functools import partial

import jsonschema

_PCT = "%[0-9A-Fa-f]{2}"
_UNRESERVED = r"A-Za-z0-9\-._~"
_SUB = "!$&'()*+,;="


def _is_date(text: str) -> bool:
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text) is not None and date.fromisoformat(text).isoformat() == text


def _is_time(text: str) -> bool:
    match = re.fullmatch(r"(\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|[+-](\d\d:\d\d))", text)
    return match is not None and all(
        datetime.strptime(f"{one or '00:00'}:00"[:8], "%H:%M:%S") for one in match.groups()
    )


def _is_hostname(text: str, longest_label: int = 63) -> bool:
    label = re.compile("[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
    return len(text) <= 253 and all(
        label.fullmatch(one) and len(one) <= longest_label and one[:4].lower() != "xn--" for one in text.split(".")
    )


def _is_email(text: str) -> bool:
    local, _, host = text.rpartition("@")
    atoms = local.split(".")
    literal = re.fullmatch(r"\[(IPv6:)?([0-9a-fA-F.:]+)\]", host)
    if literal is not None:
        host = str(ipaddress.ip_address(literal[2]).version) if bool(literal[1]) == (":" in host[6:]) else ""
    return (
        len(local) <= 64 and _is_hostname(host) and all(re.fullmatch(r"[\w!#$%&'*+/=?^`{|}~-]+", one) for one in atoms)
    )


_DAYS, _HOURS = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)", r"(T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))"


def _is_uri_reference(text: str) -> bool:
    """By the expression of RFC 3986's appendix B, and then each part by its own characters."""
    match = re.fullmatch(r"(([^:/?#]+):)?(//([^/?#]*))?([^?#]*)(\?([^#]*))?(#(.*))?", text)
    assert match is not None
    scheme, authority, path, query, fragment = (match[number] for number in (2, 4, 5, 7, 9))
    segment = rf"(?:[{_UNRESERVED}{_SUB}:@]|{_PCT})"
    if scheme is not None and not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.\-]*", scheme):
        return False
    if authority is not None and not re.fullmatch(
        rf"((?:[{_UNRESERVED}{_SUB}:]|{_PCT})*@)?(?:[{_UNRESERVED}{_SUB}]|{_PCT})*(:[0-9]*)?", authority
    ):
        return False
    if scheme is None and authority is None and ":" in path.split("/")[0]:
        return False
    return re.fullmatch(rf"(?:{segment}|/)*", path) is not None and all(
        part is None or re.fullmatch(rf"(?:{segment}|[/?])*", part) for part in (query, fragment)
    )


def _is_uri(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.\-]*:", text) is not None and _is_uri_reference(text)


def _in_ascii(text: str) -> str:
    """RFC 3987's way from an IRI to a URI."""
    assert not re.search("[\x80-\x9f\ud800-\uf8ff\ufdd0-\ufdef\ufff0-\uffff]", text)
    return "".join(one if ord(one) < 128 else "".join(f"%{byte:02X}" for byte in one.encode()) for one in text)


def _is_uri_template(text: str) -> bool:
    name = rf"(?:\w|{_PCT})(?:\.?(?:\w|{_PCT}))*(?::[1-9]\d{{0,3}}|\*)?"
    plain = re.sub(rf"\{{[+#./;?&=,!@|]?{name}(?:,{name})*\}}", "", text, flags=re.ASCII)
    return re.fullmatch(rf"(?:[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~]|{_PCT})*", plain) is not None


def _is_pointer(text: str) -> bool:
    return text == "" or (text[0] == "/" and re.search("~(?![01])", text) is None)


def _is_base64(text: str, others: str = "+/") -> bool:
    given = re.sub(f"[{others}]", lambda found: "+/"[others.index(found[0])], text)
    return set(text) <= {*string.ascii_letters, *string.digits, *others, "="} and bool(
        base64.b64decode(given, validate=True) or not text
    )


def _is_uuid(text: str, version: int | None = None) -> bool:
    made = uuid.UUID(text)
    return str(made) == text.lower() and version in (None, made.version)


CHECKS: dict[str, Callable[[str], bool]] = {
    "base64": _is_base64,
    "base64url": lambda text: _is_base64(text, "-_"),
    "date": _is_date,
    "date-time": lambda text: text[10:11] == "T" and _is_date(text[:10]) and _is_time(text[11:]),
    "duration": lambda text: re.fullmatch(rf"P(\d+W|{_DAYS}{_HOURS}?|{_HOURS})", text) is not None,
    "email": _is_email,
    "hostname": _is_hostname,
    "idn-email": _is_email,
    "idn-hostname": lambda text: _is_hostname(text) and text == text.lower(),
    "ipv4": lambda text: ipaddress.ip_address(text).version == 4,
    "ipv6": lambda text: ipaddress.ip_address(text).version == 6,
    "ipv4interface": lambda text: ipaddress.ip_interface(text).version == 4,
    "ipv6interface": lambda text: ipaddress.ip_interface(text).version == 6,
    "ipvanyaddress": lambda text: ipaddress.ip_address(text) is not None,
    "iri": lambda text: _is_uri(_in_ascii(text)),
    "iri-reference": lambda text: _is_uri_reference(_in_ascii(text)),
    "json-pointer": _is_pointer,
    "regex": lambda text: re.compile(text) is not None,
    "relative-json-pointer": lambda text: (
        (match := re.fullmatch("(0|[1-9][0-9]*)(.*)", text, re.DOTALL)) is not None
        and (match[2] == "#" or _is_pointer(match[2]))
    ),
    "time": _is_time,
    "uri": _is_uri,
    "uri-reference": _is_uri_reference,
    "uri-template": _is_uri_template,
    "uuid": _is_uuid,
    **{f"uuid{version}": partial(_is_uuid, version=version) for version in range(1, 9)},
}


def checker() -> jsonschema.FormatChecker:
    """Return a checker of these formats; `jsonschema` alone knows few, and needs other packages."""
    made = jsonschema.FormatChecker(formats=())
    usual = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for name, check in CHECKS.items():

        def both(value: object, name: str = name, check: Callable[[str], bool] = check) -> bool:
            return not isinstance(value, str) or (check(value) and usual.conforms(value, name))

        made.checks(name, raises=(ValueError, re.error))(both)
    return made
