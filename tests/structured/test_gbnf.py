"""GBNF grammars as llguidance follows them after the conversion, against sets of strings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest
from gbnf_reference import Grammar, languages, random_grammar, written
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from phonograph.structured.gbnf import lark_from_gbnf
from phonograph.structured.runs import LarkItem, _lead_bytes, _Search

LIMITS = LLParserLimits(max_items_in_row=20_000)
PIECES = ("aa", "ab", "ba", "bab", "aba", "bbbb", "aab", "cab", "bé", "éa", "éé", "ü-é", "-é")


class Vocabulary:
    """Tokens of one byte each, tokens of several characters if wanted, and the end token."""

    bos_token_id = None

    def __init__(self, pieces: tuple[str, ...]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in pieces] + [b"</s>"]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        """Take the longest token each time."""
        rest, found = text if isinstance(text, bytes) else text.encode(), []
        while rest:
            found.append(
                max((len(token), index) for index, token in enumerate(self.tokens) if rest.startswith(token))[1]
            )
            rest = rest[len(self.tokens[found[-1]]) :]
        return found


@cache
def tokenizer(pieces: tuple[str, ...]) -> tuple[list[bytes], LLTokenizer]:
    vocabulary = Vocabulary(pieces)
    return vocabulary.tokens, LLTokenizer(TokenizerWrapper(vocabulary))


def matcher(source: str, pieces: tuple[str, ...] = ()) -> LLMatcher:
    made = LLMatcher(tokenizer(pieces)[1], LLMatcher.grammar_from_lark(lark_from_gbnf(source)), limits=LIMITS)
    assert not made.is_error(), (source, made.get_error())
    return made


def check(
    source: str, alphabet: str, length: int, texts: set[str], prefixes: set[str], pieces: tuple[str, ...]
) -> None:
    """Walk all prefixes. A mask must allow the end after a text, and exactly the tokens that continue a prefix."""
    tokens, _ = tokenizer(pieces)
    complete = {text.encode() for text in texts}
    begun = {text.encode()[:end] for text in prefixes for end in range(len(text.encode()) + 1)}
    known = {byte for text in alphabet for byte in text.encode()}
    todo = [(matcher(source, pieces), b"")]
    while todo:
        state, text = todo.pop()
        mask = state.compute_bitmask()
        assert not state.is_error(), (source, text, state.get_error())
        allowed = {index for index in range(len(tokens)) if mask[index >> 3] >> (index & 7) & 1}
        assert (len(tokens) - 1 in allowed) == (text in complete), (source, text, "end")
        room = length - len(text.decode(errors="replace"))
        judged = {
            index
            for index, token in enumerate(tokens[:-1])
            if set(token) <= known and len((text + token).decode(errors="replace")) <= length
        }
        right = {index for index in judged if text + tokens[index] in begun}
        if len({tokens[index][0] for index in allowed} | {b"" for _ in [0] if text in complete}) == 1:
            # Where the next bytes are forced, the library allows only the token that the tokenizer chooses for them.
            assert allowed & judged <= right and len({tokens[index][0] for index in right}) <= 1, (source, text)
        else:
            assert allowed & judged == right, (source, text, [tokens[index] for index in allowed & judged ^ right])
        for byte in known if room > 0 else ():
            if text + bytes([byte]) in begun:
                after = state.deep_copy()
                assert after.consume_token(byte), (source, text, byte)
                todo.append((after, text + bytes([byte])))


def cases(seed: int, count: int) -> Iterator[tuple[str, str, int, Grammar]]:
    for index in range(count):
        rng = random.Random(f"{seed} {index}")
        alphabet = rng.choice(["ab", "ab", "abc", "abc", "aéb", "éü-", "\n]a"])
        grammar = random_grammar(rng, alphabet)
        yield written(grammar, rng, alphabet), alphabet, {2: 6, 3: 4}[len(alphabet)], grammar


def test_random_grammars_keep_their_language() -> None:
    endless = 0
    for index, (source, alphabet, length, grammar) in enumerate(cases(35, 400)):
        texts, prefixes = languages(grammar, alphabet, length)
        if prefixes:
            check(source, alphabet, length, texts, prefixes, PIECES if index % 2 else ())
        else:
            endless += 1
            with pytest.raises(ValueError, match="line 1: the rule 'root' derives no text"):
                lark_from_gbnf(source)
    assert 40 < endless < 200


@pytest.mark.parametrize(
    ("source", "texts", "others"),
    [
        ('root ::= ("a" | "ab") "bd"', ["abd", "abbd"], ["ab", "ad", "abb"]),
        ('root ::= x x\nx ::= "a"+', ["aa", "aaa", "a" * 50], ["", "a", "aab"]),
        ('root ::= "a" | [a-z] "b"', ["a", "ab", "cb"], ["b", "aa"]),
        ('root ::= ""', [""], ["a"]),
        ("root ::=", [""], ["a"]),
        ('root ::= x\nx ::= | "a" | x x', ["", "a", "aaaa"], ["b"]),
        (r'root ::= "\n\t\r\\\"\x41\u00e9\U0001F600"', ['\n\t\r\\"Aé😀'], [""]),
        (r'root ::= [\x41-C\]\-^"]+', ['ABC]-^"'], ["D", "\\", ""]),
        (r"root ::= [a-] [-a] [^^] [a^]", ["--x^", "aaaa"], ["bbbb", "aa^a"]),
        ("root ::= . [^a].{2}", ["\n\n\n\n", "😀é\x00a"], ["aaaa", "bbb"]),
        ('root ::= ("ab" "c"?){2,3} # three\r\n  | # none\n  ""', ["", "abcab", "ababab"], ["ab", "ababababab"]),
        ('a ::= "x" |\n\n "y" root?\nroot ::=\n[z]a', ["zx", "zyzx"], ["x", "z"]),
        ('root ::= "a"?*  "b"{2}{2} "c"{0}', ["bbbb", "aabbbb"], ["bb", "abbbbb"]),
        ('root ::= "a"?{2,} "b"+{2} "c"{2}?', ["bb", "aaabbb", "bbcc"], ["b", "bbc"]),
        ('root ::= "a" | "b" root "c"', ["a", "bac", "bbacc"], ["ba", "bbac", "bbaccc"]),
        ('root ::= ("a" | "b" root "b")', ["a", "bbabb"], ["bba", "bab" * 2]),
        ('start ::= "a"\nroot ::= start root-2\nroot-2 ::= "b"', ["ab"], ["a"]),
        (r"root ::= [\U00000000-\U0010FFFF]", ["\ue000", "\U0010ffff"], ["aa"]),
        ('root ::= [ab]{2} "d" | "a" "b" "c"', ["abd", "abc"], ["aac", "ab"]),
        ('root ::= [ab]+ "c" | [bc]+ "d"', ["bbc", "bbcd", "bd"], ["abd"]),
        ('root ::= ([ab]{2,3} "c"?)+', ["aaaa", "abca" + "b"], ["a", "abcb"]),
        ('root ::= ([a-z] | "-" [0-9])* "."', ["abc-1d-2.", "."], ["1.", "a-."]),
        ('root ::= item item\nitem ::= ([ab] | "-")+', ["ab", "a-b", "bbbb"], ["a"]),
        ('root ::= x x\nx ::= [ab] x | "-"', ["--", "ab-b-"], ["ab-", "-"]),
        ('root ::= [é]+ "è"', ["éè", "ééè"], ["é", "è"]),
        ('root ::= [^é]+ "é"', ["aé", "aèé"], ["é", "éa"]),
        ('root ::= [ab]+ x "a"\nx ::= "x" | ""', ["aa", "abxa", "aba"], ["a", "xa"]),
        ('root ::= [ab]+ x\nx ::= y "a"\ny ::= "x" | ""', ["aa", "abxa", "aba"], ["a", "xa"]),
        ('root ::= [ab]+ [ab]{2} "c"', ["aaac", "ababac"], ["aac", "aaa"]),
        ('root ::= x\nx ::= x "," [a-c]+ | [a-b] | x x "."', ["a,cc", "ab."], ["ab", "c"]),
    ],
)
def test_a_grammar_takes_its_texts_and_no_others(source: str, texts: list[str], others: list[str]) -> None:
    for text in texts + others:
        state = matcher(source)
        ends = [state.is_accepting()]
        for byte in text.encode():
            if not state.validate_tokens([byte]):
                ends = [False]
                break
            state.consume_token(byte)
            ends = [state.is_accepting()]
        assert ends == [text in texts], (source, text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "line 1: there is no rule 'root'"),
        ('x ::= "a"', "line 1: there is no rule 'root'"),
        ('root ::= "a"\n  | y\n y', "line 2: there is no rule 'y'"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: the rule 'root' is defined twice"),
        ('"a" root ::= "b"', "line 1: '\"a\"' comes before the first rule; a rule begins with `name ::=`"),
        ('root ::= ("a"\nx ::= "b")', "line 2: a ( is not closed before the rule 'x'"),
        ('root ::= ("a"\n', "line 2: a ( is not closed"),
        ('root ::= "a")', "line 1: a ) closes no ("),
        ('root ::= "a\n"', "line 1: cannot read '\"a\\n\"'"),
        ("root ::= [a", "line 1: cannot read '[a'"),
        ("root ::=\n []", "line 2: the class [] is empty"),
        ("root ::= [^]", "line 1: the class [^] is empty"),
        ("root ::= [z-a]", "line 1: the range z-a in '[z-a]' is not in order"),
        (r'root ::= "\q"', r"line 1: unknown escape '\\q'; use \n \r \t \\ \" \xNN \uNNNN or \UNNNNNNNN"),
        (r'root ::= "\x4"', r"line 1: unknown escape '\\x4'; use"),
        (r'root ::= "\ud800"', "line 1: U+D800 is not a character"),
        (r"root ::= [\UFFFFFFFF]", "line 1: U+FFFFFFFF is not a character"),
        ("root ::= *", "line 1: * has nothing before it to repeat"),
        ('root ::= "a" | {2}', "line 1: {2} has nothing before it to repeat"),
        ('root ::= "a"{3,2}', "line 1: the counts of {3,2} must be in order and at most 1000000"),
        ('root ::= "a"{1000001}', "line 1: the counts of {1000001} must be in order and at most 1000000"),
        ('root ::= "a" root', "line 1: the rule 'root' derives no text, because its recursion has no end"),
        ("root ::= <think>", "line 1: cannot read '<think>'"),
    ],
)
def test_a_refusal_names_line_and_problem(source: str, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        lark_from_gbnf(source)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("source", "runs"),
    [
        ('root ::= [ab]+ "c" [ab]+', 2),
        ('root ::= x [a]\nx ::= [ab]+ "c"', 1),
        ('root ::= [ab]+ x [ab]+\nx ::= "c" | "d"', 2),
        ('root ::= [ab]+ "c"? [ab]+', 0),
        ('root ::= [ab]+ x [ab]+\nx ::= "c" | ""', 0),
    ],
)
def test_a_repeated_class_is_one_lexeme_unless_its_characters_may_follow(source: str, runs: int) -> None:
    assert lark_from_gbnf(source).count("]+/") == runs


def test_long_and_deep_grammars_convert_in_linear_time() -> None:
    deep = "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000
    chain = "root ::= r0\n" + "".join(f"r{index} ::= r{index + 1}\n" for index in range(5_000)) + 'r5000 ::= "a"'
    for source in (deep, chain, 'root ::= "' + "x" * 100_000 + '"', "root ::= [" + "x" * 100_000 + "]"):
        assert lark_from_gbnf(source)


def test_lead_bytes_begin_the_characters_of_a_class() -> None:
    """All bytes from the lowest to the highest; of a negated class all beyond ASCII, and none that it excludes."""
    characters = [*map(chr, range(1, 0x250)), "\u0800", "\u20ac", "\uffff", "\U00010000", "\U0010ffff"]
    for low, high in (("a", "z"), ("a", "a"), ("\x7f", "\x80"), ("b", "\u20ac"), ("\u0100", "\U0010ffff")):
        first, last = low.encode()[0], high.encode()[0]
        written = rf"\u{{{ord(low):x}}}-\u{{{ord(high):x}}}"
        kept, others = _lead_bytes(f"/[{written}]/"), _lead_bytes(f"/[^{written}]/")
        assert [byte for byte in range(256) if kept >> byte & 1] == [*range(first, last + 1)]
        assert all(others >> one.encode()[0] & 1 for one in characters if not low <= one <= high)
        assert not any(others >> byte & 1 for byte in range(first, min(last + 1, 0x80)))


def test_each_set_of_the_search_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that comes to its limit in its sets, not only in its rules, ends with no runs."""
    symbol = r"/[\u{61}-\u{7a}]/"
    rules = {"root": [[LarkItem(symbol, 0, None), LarkItem(symbol)]]}
    search = _Search(rules)
    search._first("root"), search._follow(("root", 0, 0)), search._follow(("root", 0, 1))
    before = search._work
    monkeypatch.setattr(search, "_follow", lambda place: {("root", 0, 1)})
    search.unsafe_runs()
    assert search._work > before
