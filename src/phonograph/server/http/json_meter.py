"""Limits on JSON text, checked on its bytes before it is parsed.

A few bytes of JSON become an object of a hundred bytes and cost the parser as much time: 16 MiB of "{},{},..." block
the process for seconds and take gigabytes. Counting quotation marks, commas and brackets outside of strings is many
times cheaper. The counts bound what `json.loads` builds: each string or name has two quotation marks, each list or
object a bracket, and each number, true, false or null follows a comma, a colon or a bracket.
"""

from __future__ import annotations

import numpy as np

from phonograph.config.server_config import ServerConfig
from phonograph.server.http.api_errors import invalid

PIECE = 65_536
"""Bytes or characters that are counted at once, in about 2 ms."""
MAX_NUMBER = 1024
"""Maximum characters of a number. Python parses integers in time quadratic in their digits."""
_SPACE_AND_BRACKETS = b" \t\r\n[]{}:"
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class JsonMeter:
    """Counts the items of one or more JSON texts. The counts are upper bounds of what a parser builds."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._quotes = self._openers = self._commas = self._depth = self._number = 0
        self._in_text = False
        self._backslash = b""

    def check(self, piece: bytes) -> None:
        """Add a piece to the counts.

        Raises:
            ApiError: the text holds more than the configuration allows.
        """
        structure = self._structure(piece)
        self._openers += structure.count(b"[") + structure.count(b"{")
        self._commas += structure.count(b",")
        self._check_depth(structure)
        fields = self._quotes // 2 + self._openers
        self._refuse_above("max_request_fields", fields, "texts, field names, lists and objects")
        self._refuse_above("max_request_token_ids", self._commas - fields, "token ids or other numbers")
        literals = [len(one) for one in structure.translate(None, _SPACE_AND_BRACKETS).split(b",")]
        literals[0] += self._number
        self._number = literals[-1]
        if max(literals) > MAX_NUMBER:
            raise invalid(None, f"the body has a number of more than {MAX_NUMBER} characters", code="number_too_long")

    def check_text(self, text: str) -> None:
        """Add a text to the counts.

        Raises:
            ApiError: as `check`.
            UnicodeEncodeError: the text has a lone surrogate.
        """
        for start in range(0, len(text), PIECE):
            self.check(text[start : start + PIECE].encode())

    def _check_depth(self, structure: bytes) -> None:
        if self._openers <= self._config.max_request_depth:  # avoids NumPy for small bodies
            self._depth += structure.count(b"[") + structure.count(b"{") - structure.count(b"]") - structure.count(b"}")
            return
        brackets = np.frombuffer(structure.translate(None, _NO_BRACKETS), np.uint8)
        if len(brackets):
            # The second bit is set in "[" and "{" only.
            depths = self._depth + np.cumsum((brackets & 2).astype(np.int64) - 1)
            self._depth = int(depths[-1])
            self._refuse_above("max_request_depth", int(depths.max()), "levels of lists and objects within each other")

    def _structure(self, piece: bytes) -> bytes:
        """Return the part of a piece outside of strings."""
        piece = self._backslash + piece
        self._backslash = b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the escaped character is in the next piece
                piece, self._backslash = piece[:-1], b"\\"
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        structure = b"".join(parts[self._in_text :: 2])
        self._quotes += len(parts) - 1
        self._in_text = self._in_text != (len(parts) % 2 == 0)
        return structure

    def _refuse_above(self, setting: str, count: int, things: str) -> None:
        most = getattr(self._config, setting)
        if count > most:
            raise invalid(None, f"the body has more than {most} {things} ({setting})", code="body_too_complex")
