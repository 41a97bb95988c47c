"""Regular expressions of JSON Schema's formats, and of formats and encodings that pydantic adds.

Each allows a part of what its RFC allows. `idn-email` and `idn-hostname` take ASCII names, dates take years from 1000
on, times take no leap second, `regex` takes expressions without groups. The local part of an e-mail address has at most
64 characters, and at most 32 in some addresses with dots.
"""

from __future__ import annotations

from phonograph.errors import shortened

_DAYS = (
    "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])",
    "(0[469]|11)-(0[1-9]|[12][0-9]|30)",
    "02-(0[1-9]|1[0-9]|2[0-8])",
)
_LEAP_YEAR = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE = f"([1-9][0-9]{{3}}-({'|'.join(_DAYS)})|{_LEAP_YEAR}-02-29)"
_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+\-]{_MINUTE})"
# Labels have no two hyphens in a row: those mark encoded names of other scripts, which have rules of their own.
_HOSTNAME = r"[a-z0-9]([.\-]?[a-z0-9]){0,31}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?\^_`{|}~\-]"
_TWO_OR_THREE_ATOMS = rf"{_ATOM}{{1,32}}\.{_ATOM}{{1,31}}|{_ATOM}{{1,20}}(\.{_ATOM}{{1,20}}){{2}}"
_LOCAL_PART = rf"({_ATOM}{{1,64}}|{_TWO_OR_THREE_ATOMS}|{_ATOM}(\.?{_ATOM}){{0,31}})"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_POINTER = "(/([^/~]|~[01])*)*"
_OTHER_SCRIPTS = r"\u{a0}-\u{d7ff}\u{f900}-\u{fdcf}\u{fdf0}-\u{ffef}\u{10000}-\u{1fffd}"


def _uri(more: str = "", *, relative: bool = False) -> str:
    """Return a pattern of RFC 3986, or of RFC 3987 with the characters `more`. Hosts are names or IPv4 addresses."""

    def any_of(besides: str) -> str:
        return rf"([A-Za-z0-9\-._~!$&'()*+,;={besides}{more}]|%[0-9A-Fa-f]{{2}})"

    part = any_of(":@")
    parts = f"(/{part}*)*"
    authority = f"//({any_of(':')}*@)?{any_of('')}*(:[0-9]*)?{parts}"
    end = rf"(\?{any_of(':@/?')}*)?(#{any_of(':@/?')}*)?"
    whole = f"[A-Za-z][A-Za-z0-9+.\\-]*:({authority}|/({part}+{parts})?|{part}+{parts})?"
    if relative:
        whole = f"({whole}|({authority}|/({part}+{parts})?|{any_of('@')}+{parts})?)"
    return whole + end


def _ipv6() -> str:
    """Return a pattern of RFC 4291: eight groups, of which `::` replaces one or more, the last two perhaps as IPv4."""
    group = "[0-9A-Fa-f]{1,4}"
    forms = [f"({group}:){{6}}({group}:{group}|{_IPV4})"]
    for before in range(8):
        after = [f"({group}:){{0,{5 - before}}}({group}:{group}|{_IPV4})"] * (before < 6) + [group] * (before < 7)
        forms.append(f"{group}(:{group}){{{before - 1}}}" * (before > 0) + f"::({'|'.join(after)})?")
    return f"({'|'.join(forms)})"


def _uuid(version: str = "[0-9a-fA-F]", variant: str = "[0-9a-fA-F]") -> str:
    digit = "[0-9a-fA-F]"
    return f"{digit}{{8}}-{digit}{{4}}-{version}{digit}{{3}}-{variant}{digit}{{3}}-{digit}{{12}}"


def _base64(digit: str) -> str:
    return f"({digit}{{4}})*({digit}{{2}}==|{digit}{{3}}=)?"


_DURATION_TIME = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DURATION_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_NAME_PART = "([A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
_NAME = rf"{_NAME_PART}(\.?{_NAME_PART})*(:[1-9][0-9]{{0,3}}|\*)?"
_URI_TEMPLATE = r"([!#$&(-;=?-\[\]_a-z~]|%[0-9A-Fa-f]{2}" rf"|\{{[+#./;?&=,!@|]?{_NAME}(,{_NAME})*\}})*"
_REGEX_ATOM = r"([A-Za-z0-9 _:;,@#%=!~/'<>\-]|\\[dwsDWS.^$*+?()\[\]{}|/\\\-]|\.|\[(\^?[A-Za-z0-9_]+|a-z|A-Z|0-9)\])"

PATTERNS = {
    "base64": _base64("[A-Za-z0-9+/]"),
    "base64url": _base64(r"[A-Za-z0-9_\-]"),
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P([0-9]+W|{_DURATION_DAYS}({_DURATION_TIME})?|{_DURATION_TIME})",
    "email": rf"{_LOCAL_PART}@{_LABEL}(\.{_LABEL})*",
    "hostname": rf"{_HOSTNAME}(\.{_HOSTNAME})?",
    "idn-email": rf"{_ATOM}(\.?{_ATOM}){{0,31}}@[A-Za-z0-9]([.\-]?[A-Za-z0-9]){{0,31}}",
    "idn-hostname": rf"{_HOSTNAME}(\.{_HOSTNAME})?",
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "ipv4interface": rf"{_IPV4}(/([12]?[0-9]|3[0-2]))?",
    "ipv6interface": rf"{_ipv6()}(/([1-9]?[0-9]|1[01][0-9]|12[0-8]))?",
    "ipvanyaddress": f"({_IPV4}|{_ipv6()})",
    "iri": _uri(_OTHER_SCRIPTS),
    "iri-reference": _uri(_OTHER_SCRIPTS, relative=True),
    "json-pointer": _POINTER,
    "regex": rf"\^?({_REGEX_ATOM}[*+?]?({_REGEX_ATOM}[*+?]?|\|)*)?\$?",
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "time": _TIME,
    "uri": _uri(),
    "uri-reference": _uri(relative=True),
    "uri-template": _URI_TEMPLATE,
    "uuid": _uuid(),
    **{f"uuid{version}": _uuid(str(version), "[89abAB]") for version in range(1, 9)},
}
BY_LIBRARY = frozenset({"duration", "hostname", "ipv4", "uri", "uuid"})
"""Formats of values that the library implements as their RFCs define them."""
LONGEST = {"email": 254, "hostname": 253}
"""Most characters of formats whose expression has no such bound."""
_OF_ANY_TEXT = frozenset(
    {*("binary", "password", "path", "int32", "int64", "float", "double"), *("7bit", "8bit", "text/plain")}
)
"""Formats, encodings and media types that all strings have, or that describe numbers."""


def noted(key: str, form: str) -> list[str]:
    """Return a warning for a format, encoding or media type that has no expression and constrains strings."""
    return [] if form in _OF_ANY_TEXT else [f"{key} {shortened(form, 50)} cannot be enforced"]
