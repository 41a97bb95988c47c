r"""Formats of strings as patterns, where the library has none or one that is too wide.

The library's take a 31st of June, a second 60, addresses with leading zeros, names of any length, and in e-mail
addresses and JSON pointers text that is no JSON; its URIs have no digit in their schemes, its URI templates take long
to fill a mask. Its own `duration` and `uuid` are as their RFCs have them. Of `idn-email` and `idn-hostname` those in
ASCII are held, of dates the years from 1000 on, of times seconds without the leap second and up to nine decimals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from phonograph.engine.grammars.numbers import is_number
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


def _hostname(character: str) -> str:
    """Of up to 32 letters and digits and 63 characters, so that no label is longer: a state for each costs time.

    No label has two hyphens in a row, as those of other scripts have, which must be well-formed themselves.
    """
    return rf"{character}([.\-]?{character}){{0,31}}"


_HOSTNAME, _IDN_HOSTNAME = (rf"{one}(\.{one})?" for one in (_hostname("[A-Za-z0-9]"), _hostname("[a-z0-9]")))
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?\^_`{|}~\-]"
_EMAIL = rf"{_ATOM}(\.?{_ATOM}){{0,31}}@{_hostname('[A-Za-z0-9]')}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_IPV4 = rf"{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _ipv6() -> Iterator[str]:
    """RFC 4291: eight groups, or fewer around one `::`; the last two may be written as an IPv4 address."""
    yield f"({_GROUP}:){{7}}{_GROUP}"
    yield f"({_GROUP}:){{6}}{_IPV4}"
    yield f"::(({_GROUP}:){{0,6}}{_GROUP})?"
    yield f"::({_GROUP}:){{0,5}}{_IPV4}"
    yield f"({_GROUP}:){{1,7}}:"
    for before in range(1, 7):
        yield f"({_GROUP}:){{{before}}}(:{_GROUP}){{1,{7 - before}}}"
    for before in range(1, 6):
        yield f"({_GROUP}:){{{before}}}(:{_GROUP}){{0,{5 - before}}}:{_IPV4}"


_POINTER = "(/([^/~]|~[01])*)*"
_OTHER_SCRIPTS = r"\u{a0}-\u{d7ff}\u{f900}-\u{fdcf}\u{fdf0}-\u{ffef}\u{10000}-\u{1fffd}"


def _uri(more: str = "", *, relative: bool = False) -> str:
    """RFC 3986, and RFC 3987 with `more` characters; hosts are names or IPv4 addresses."""

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


_NAME_PART = "([A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
_NAME = rf"{_NAME_PART}(\.?{_NAME_PART})*(:[1-9][0-9]{{0,3}}|\*)?"
_URI_TEMPLATE = r"([!#$&(-;=?-\[\]_a-z~]|%[0-9A-Fa-f]{2}" rf"|\{{[+#./;?&=,!@|]?{_NAME}(,{_NAME})*\}})*"

PATTERNS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "idn-email": _EMAIL,
    "idn-hostname": _IDN_HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": "|".join(_ipv6()),
    "iri": _uri(_OTHER_SCRIPTS),
    "iri-reference": _uri(_OTHER_SCRIPTS, relative=True),
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "time": _TIME,
    "uri": _uri(),
    "uri-reference": _uri(relative=True),
    "uri-template": _URI_TEMPLATE,
}
_LENGTHS: dict[str, tuple[int, float]] = {
    "date": (10, 10),
    "date-time": (20, 35),
    "duration": (3, math.inf),
    "email": (3, 127),
    "hostname": (1, 127),
    "idn-email": (3, 127),
    "idn-hostname": (1, 127),
    "ipv4": (7, 15),
    "ipv6": (2, 45),
    "iri": (2, math.inf),
    "iri-reference": (0, math.inf),
    "json-pointer": (0, math.inf),
    "relative-json-pointer": (1, math.inf),
    "time": (9, 24),
    "uri": (2, math.inf),
    "uri-reference": (0, math.inf),
    "uri-template": (0, math.inf),
    "uuid": (36, 36),
}
"""Characters of the shortest and of the longest text of each format that is held: by our pattern, or by the library's
where we have none."""


def refusal_of_format(schema: dict[str, Any]) -> str | None:
    """Why the format of a schema cannot be held; formats that JSON Schema does not define are notes and say nothing."""
    form = schema.get("format")
    if not isinstance(form, str) or not _of_strings(schema):
        return None
    if form == "regex":
        return "the format 'regex' cannot be held by a grammar; leave it out, or write a pattern"
    if form not in _LENGTHS:
        return None
    if "pattern" in schema:
        return f"'pattern' beside the format {form!r} cannot be held by a grammar; write one pattern that says both"
    least, most = _LENGTHS[form]
    texts = f"{least} characters or more" if most == math.inf else f"{least} to {most} characters"
    for key, first, last in (("minLength", 0, least), ("maxLength", most, math.inf)):
        length = schema.get(key, last)
        if not is_number(length) or not first <= length <= last:
            return (
                f"{key} {shortened(str(length))} beside the format {form!r}, whose texts have {texts}, cannot be held "
                "by a grammar; leave it out, or write a pattern in place of the format"
            )
    return None


def narrow_format(schema: dict[str, Any]) -> None:
    """Writes the format of a schema as a pattern, in place, or leaves one that the library holds; takes notes away."""
    form = schema.get("format")
    if not isinstance(form, str):
        return
    if form in _LENGTHS and _of_strings(schema):
        # What is left of them says nothing, and the library would drop the pattern for it.
        schema.pop("minLength", None)
        schema.pop("maxLength", None)
        if form not in PATTERNS:
            return
        schema["pattern"] = PATTERNS[form]
    del schema["format"]


def _of_strings(schema: dict[str, Any]) -> bool:
    """Whether values of a schema may be strings, as far as its type says."""
    kinds = schema.get("type", "string")
    return "string" in (kinds if isinstance(kinds, list) else [kinds])
