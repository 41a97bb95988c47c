"""Bodies of multipart/form-data (RFC 7578): text fields, and one file."""

from __future__ import annotations

from email.message import EmailMessage
from email.parser import BytesHeaderParser
from email.policy import HTTP
from typing import Any

from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_route import MAX_BODY_FIELDS

MOST_CHARACTERS = 65_536
"""Maximum characters of a text field."""


def read_form(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes | None]:
    """Return the text fields by name, and the content of `file`, or None without one.

    A field whose name ends with [] becomes a list.

    Raises:
        ApiError: the body is not a form.
    """
    header = EmailMessage()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise invalid(None, f"the body must be multipart/form-data with a boundary, not {content_type or 'unnamed'}")
    # The first delimiter may be at the beginning; each ends what is before it with a line break.
    head, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(pieces) < 2 or head.strip() or not pieces[-1].startswith(b"--"):
        raise invalid(None, "the body is not a form: a delimiter is missing")
    if len(pieces) > MAX_BODY_FIELDS:
        raise invalid(None, f"the body has {len(pieces)} fields; no endpoint has more than {MAX_BODY_FIELDS}")
    fields: dict[str, Any] = {}
    file: bytes | None = None
    for piece in pieces[:-1]:
        heads, _, content = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        part = BytesHeaderParser(policy=HTTP).parsebytes(heads[:MOST_CHARACTERS])
        name = part.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise invalid(None, "the body is not a form: a part has no name")
        if name == "file":
            file = content
            continue
        if len(content) > MOST_CHARACTERS:
            raise invalid(name, f"{name}: has more than {MOST_CHARACTERS} bytes")
        text = content.decode("utf-8", "replace")
        if name.endswith("[]"):
            fields.setdefault(name.removesuffix("[]"), []).append(text)
        else:
            fields[name] = text
    return fields, file
