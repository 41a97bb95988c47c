r"""Regular expressions as the library reads them right: written anew, or refused by name.

The library takes some expressions for others: `.` for any character, line breaks too, `a$b` for `ab`, `[\^]` for any
character, `\A` for the letter, `\x5ea` for one character. And in JSON's strings it lets `"` and `\` through as they
are where an expression is made of nothing but characters, and closes the way where it is not.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

_QUANTIFIER = re.compile(r"([*+?])|\{(\d+)\}|\{(\d*),(\d*)\}")
_SIGNS: dict[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})")
_CLASSES = "dDwWsS"
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_ANCHORS = {"^": "^", "$": "$", r"\A": "^", r"\Z": "$", r"\z": "$"}
_LINE_BREAKS = r"[^\n\r\u{2028}\u{2029}]"
_LAST = 0x10FFFF
_CARET = ord("^")
_SURROGATES = range(0xD800, 0xE000)


class PatternError(ValueError):
    """What of an expression cannot be held by a grammar; begins with a verb, whose subject is the expression."""


def rewritten(pattern: str, *, in_json: bool) -> str:
    r"""The expression for the library, which takes it for the whole text; `^` and `$` at its ends say no more.

    in_json: it is for the text between the quotes of a JSON string. What JSON writes with a backslash (`"`, `\`,
             control characters) no output can have then, so ways through it are left out.

    `\d` and `\w` are of ASCII, as in JavaScript. Lazy quantifiers match what others do.

    Raises:
        PatternError: it looks ahead or back, refers back, has flags or anchors within; or it is no expression; or
            nothing is left of it in JSON.
    """
    parser = _Parser(pattern, in_json)
    piece = parser.alternatives(at_start=True, depth=0)
    if parser.position < len(pattern):
        parser.refuse("has a ')' too many")
    if piece.text is None:
        parser.refuse("needs a character that JSON writes with a backslash, which cannot be held by a grammar")
    return piece.text or "()"


class _Piece(NamedTuple):
    """text:    for the library, None where no output can match
    anchored:   holds `^` or `$`, so it matches once at most
    ends:       holds `$`, so nothing may follow
    """

    text: str | None
    anchored: bool = False
    ends: bool = False


class _Parser:
    MAX_DEPTH = 100
    MAX_CHARACTERS = 200_000

    def __init__(self, pattern: str, in_json: bool) -> None:
        self.pattern = pattern
        self.position = 0
        self.in_json = in_json

    def refuse(self, problem: str) -> NoReturn:
        raise PatternError(problem)

    def alternatives(self, *, at_start: bool, depth: int) -> _Piece:
        if depth > self.MAX_DEPTH:
            self.refuse(f"has groups more than {self.MAX_DEPTH} deep in each other")
        pieces = [self._sequence(at_start, depth)]
        while self._take("|"):
            pieces.append(self._sequence(at_start, depth))
        texts = [piece.text for piece in pieces if piece.text is not None]
        return _Piece(
            "|".join(texts) if texts else None,
            any(piece.anchored for piece in pieces),
            any(piece.ends for piece in pieces),
        )

    def _sequence(self, at_start: bool, depth: int) -> _Piece:
        text: str | None = ""
        anchored = ends = False
        while self.position < len(self.pattern) and self.pattern[self.position] not in "|)":
            anchor = self._anchor()
            if anchor is not None:
                if anchor == "^" and not at_start:
                    self.refuse(f"has {anchor} behind its start, which cannot be held by a grammar")
                anchored, ends = True, ends or anchor == "$"
                if self._quantifier() is not None:
                    self.refuse("repeats an anchor")
                continue
            if ends:
                self.refuse("has $ before its end, which cannot be held by a grammar")
            piece = self._quantified(at_start, depth)
            at_start = False
            anchored, ends = anchored or piece.anchored, piece.ends
            text = None if text is None or piece.text is None else text + piece.text
        return _Piece(text, anchored, ends)

    def _quantified(self, at_start: bool, depth: int) -> _Piece:
        group = self._at("(")
        piece = self._item(at_start, depth)
        counts = self._quantifier()
        if counts is None:
            return piece
        least, most = counts
        if most is not None and most < least:
            self.refuse(f"has {{{least},{most}}}, whose bounds exclude each other")
        if piece.anchored and most != 1:
            self.refuse("repeats an anchor")
        self._take("?")  # lazy: it matches the same
        if most == 0 or (piece.text is None and least == 0):
            return piece._replace(text="()")
        if piece.text is None:
            return piece
        text = piece.text + _repeated(piece.text, least, most, by_hand=group and self.in_json)
        if len(text) > self.MAX_CHARACTERS:
            self.refuse(f"takes more than {self.MAX_CHARACTERS} characters with its repetitions written out")
        return piece._replace(text=text)

    def _item(self, at_start: bool, depth: int) -> _Piece:
        character = self._next()
        if character == "(":
            self._open_group()
            inner = self.alternatives(at_start=at_start, depth=depth + 1)
            if not self._take(")"):
                self.refuse("has a '(' that is not closed")
            return inner if inner.text is None else inner._replace(text=f"({inner.text})")
        if character == "[":
            return _Piece(self._class())
        if character == ".":
            return _Piece("." if self.in_json else _LINE_BREAKS)
        if character in "*+?" or (character == "{" and _QUANTIFIER.match(self.pattern, self.position - 1)):
            self.refuse(f"has {character} with nothing to repeat, or two quantifiers in a row")
        if character == "\\":
            if self.pattern[self.position : self.position + 1] in [*_CLASSES]:
                return _Piece("\\" + self._next())
            return self._literal(self._escaped())
        return self._literal(ord(character))

    def _literal(self, code: int) -> _Piece:
        return _Piece(None if self.in_json and _escaped_in_json(code) else _written(code))

    def _open_group(self) -> None:
        """Behind `(`: to its first alternative. Names and numbers of groups matter to nobody here."""
        if not self._take("?"):
            return
        rest = self.pattern[self.position :]
        named = re.match(r":|P?<[A-Za-z_]\w*>", rest)
        if named is None:
            looks = re.match("<?[=!]", rest)
            kind = "looks ahead or back" if looks else f"has a group (?{rest[:1]}"
            self.refuse(f"{kind}, which cannot be held by a grammar")
        self.position += named.end()

    def _anchor(self) -> str | None:
        for text, anchor in _ANCHORS.items():
            if self._take(text):
                return anchor
        return None

    def _quantifier(self) -> tuple[int, int | None] | None:
        """At least and at most; None where no quantifier stands here: a `{` may be a character."""
        match = _QUANTIFIER.match(self.pattern, self.position)
        if match is None or match[0] == "{,}":
            return None
        self.position = match.end()
        if match[1]:
            return next(counts for counts, sign in _SIGNS.items() if sign == match[1])
        if match[2]:
            return int(match[2]), int(match[2])
        return int(match[3] or 0), int(match[4]) if match[4] else None

    def _class(self) -> str | None:
        negated = self._take("^")
        if self.pattern[self.position : self.position + 1] == "]":
            self.refuse(r"has a ']' first in a class; write it as \]")
        ranges: list[tuple[int, int]] = []
        kinds: list[str] = []
        while not self._take("]"):
            first = self._member(kinds)
            if self.pattern[self.position : self.position + 1] != "-" or self._at("-]"):
                ranges += [] if first is None else [(first, first)]
                continue
            self._take("-")
            last = self._member(kinds)
            if first is None or last is None:
                self.refuse(r"has a class such as \d as the bound of a range; write the hyphen as \-")
            if first > last:
                self.refuse(f"has the range {chr(first)}-{chr(last)}, whose bounds exclude each other")
            ranges.append((first, last))
        if self.in_json and not negated:
            ranges = [part for one in ranges for part in _within_json(*one)]
            if not ranges and not kinds:
                return None
        # However they are written, a caret that comes first negates, and what is no letter swallows a digit behind it.
        caret = any(low == _CARET for low, _ in ranges)
        ranges = [(low + (low == _CARET), high) for low, high in ranges if (low, high) != (_CARET, _CARET)]
        ranges.sort(key=lambda one: not _plain(one[0]))
        members = "".join(_written(low) + (f"-{_written(high)}" if high > low else "") for low, high in ranges)
        members = "".join(kinds) + members
        if caret and not members and not negated:
            return _written(_CARET)
        return f"[{'^' if negated else ''}{members}{_written(_CARET) if caret else ''}]"

    def _member(self, kinds: list[str]) -> int | None:
        """The next character of a class, or None where a class such as `\\d` stood, which goes to `kinds`."""
        if self.position >= len(self.pattern):
            self.refuse("has a '[' that is not closed")
        character = self._next()
        if character != "\\":
            return ord(character)
        following = self.pattern[self.position : self.position + 1]
        if following and following in _CLASSES:
            kinds.append("\\" + self._next())
            return None
        if following == "b":
            self.position += 1
            return 8
        return self._escaped()

    def _escaped(self) -> int:
        """The character that is meant by what stands behind a backslash."""
        match = _HEX.match(self.pattern, self.position)
        if match is not None:
            self.position = match.end()
            code = int(next(group for group in match.groups() if group), 16)
            if code > _LAST or code in _SURROGATES:
                self.refuse(f"has \\{match[0]}, which is no character; write it as \\u{{...}}")
            return code
        if self.position >= len(self.pattern):
            self.refuse("ends in a backslash")
        character = self._next()
        if character in _CONTROLS and not (
            character == "0" and self.pattern[self.position : self.position + 1].isdigit()
        ):
            return ord(_CONTROLS[character])
        if character.isascii() and character.isalnum():
            self.refuse(f"has \\{character}, which cannot be held by a grammar")
        return ord(character)

    def _next(self) -> str:
        self.position += 1
        return self.pattern[self.position - 1]

    def _at(self, text: str) -> bool:
        return self.pattern.startswith(text, self.position)

    def _take(self, text: str) -> bool:
        found = self._at(text)
        self.position += len(text) * found
        return found


def _repeated(text: str, least: int, most: int | None, *, by_hand: bool) -> str:
    """What follows `text` so that it is repeated.

    by_hand: without `?` and `{2,}`, behind which the library goes on where a way through a group ends, in JSON's
             strings: `a(-b+)?` would take `ab`.
    """
    if (least, most) in _SIGNS and not (by_hand and most):
        return _SIGNS[least, most]
    if most is not None or not by_hand:
        return f"{{{least},{'' if most is None else most}}}"
    return f"{{{least - 1}}}{text}+"


def _written(code: int) -> str:
    """A character, within a class or not: as itself where it can be taken for nothing else."""
    return chr(code) if _plain(code) else f"\\u{{{code:x}}}"


def _plain(code: int) -> bool:
    return code < 0x80 and chr(code).isalnum()


def _escaped_in_json(code: int) -> bool:
    return code < 0x20 or chr(code) in '"\\'


def _within_json(low: int, high: int) -> list[tuple[int, int]]:
    """What of a range stands in JSON's strings as it is."""
    parts, start = [], max(low, 0x20)
    for cut in (ord('"'), ord("\\")):
        if start <= cut <= high:
            parts += [(start, cut - 1)] if start < cut else []
            start = cut + 1
    return [*parts, (start, high)] if start <= high else parts
