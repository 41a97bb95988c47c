"""Regular expressions of JSON Schema formats that the library lacks, or takes too widely (second 60, 29 February 2023).

Each allows a part of what its RFC allows. `idn-email` and `idn-hostname` take ASCII names, dates take years from 1000
on, times take no leap second, `regex` takes expressions without groups.
"""

from __future__ import annotations

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


_NAME_PART = "([A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
_NAME = rf"{_NAME_PART}(\.?{_NAME_PART})*(:[1-9][0-9]{{0,3}}|\*)?"
_URI_TEMPLATE = r"([!#$&(-;=?-\[\]_a-z~]|%[0-9A-Fa-f]{2}" rf"|\{{[+#./;?&=,!@|]?{_NAME}(,{_NAME})*\}})*"
_REGEX_ATOM = r"([A-Za-z0-9 _:;,@#%=!~/'<>\-]|\\[dwsDWS.^$*+?()\[\]{}|/\\\-]|\.|\[(\^?[A-Za-z0-9_]+|a-z|A-Z|0-9)\])"

PATTERNS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "idn-email": rf"{_ATOM}(\.?{_ATOM}){{0,31}}@[A-Za-z0-9]([.\-]?[A-Za-z0-9]){{0,31}}",
    "idn-hostname": rf"{_HOSTNAME}(\.{_HOSTNAME})?",
    "iri": _uri(_OTHER_SCRIPTS),
    "iri-reference": _uri(_OTHER_SCRIPTS, relative=True),
    "json-pointer": _POINTER,
    "regex": rf"\^?({_REGEX_ATOM}[*+?]?({_REGEX_ATOM}[*+?]?|\|)*)?\$?",
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "time": _TIME,
    "uri-reference": _uri(relative=True),
    "uri-template": _URI_TEMPLATE,
}
BY_LIBRARY = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Formats that the library implements as their RFCs define them."""
