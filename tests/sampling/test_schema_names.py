"""Names of additional properties: none is one of `properties`, however it is spelled, and all others can be written."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from byte_grammars import byte_compiler, compiled, takes
from samples import sample

pytest.importorskip("xgrammar")

from phonograph.engine.grammars.names import told_apart

CHARACTERS = 'abéÃ©字😀"\\/\n\t\x01]^- u0'
SHORT = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def random_name(rng: random.Random, length: int = 3) -> str:
    return "".join(rng.choices(CHARACTERS, k=rng.randint(0, length)))


def near(names: list[str], rng: random.Random) -> str:
    """One of the names, or what differs from one by little."""
    name = rng.choice(names)
    cut = rng.randint(0, len(name))
    return rng.choice([name, name[:cut], name + random_name(rng, 1), name[:cut] + random_name(rng, 2)])


def escaped(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def spelled(name: str, rng: random.Random) -> str:
    """In JSON, each of its characters in one of the ways that there are."""
    ways: list[list[str]] = []
    for character in name:
        plain = [character] * (character >= " " and character not in '"\\')
        ways.append([escaped(character), *plain, *([SHORT[character]] if character in SHORT else [])])
    return '"' + "".join(map(rng.choice, ways)) + '"'


def open_schema(names: list[str], additional: dict[str, Any]) -> str:
    properties = {name: {"type": "integer"} for name in names}
    schema = {"type": "object", "properties": properties, "additionalProperties": additional}
    return json.dumps(schema, ensure_ascii=False)


def valid(text: str, names: list[str]) -> bool:
    """Integers for the names, booleans for others."""
    pairs = json.loads(text, object_pairs_hook=list)
    return all(type(value) is (int if name in names else bool) for name, value in pairs)


@pytest.mark.parametrize("seed", range(3))
def test_no_spelling_of_a_known_name_is_another_name(seed: int) -> None:
    rng = random.Random(seed)
    compiler = byte_compiler()
    known = others = refused = sampled = 0
    for _ in range(60):
        names = list({random_name(rng) for _ in range(rng.randint(1, 4))})
        grammar = compiled(compiler, "json", open_schema(names, {"type": "boolean"}))
        for _ in range(40):
            name = near(names, rng)
            if name in names:
                known += 1
                assert not takes(grammar, f"{{{spelled(name, rng)}: true}}"), (names, name)
                assert takes(grammar, f"{{{json.dumps(name, ensure_ascii=False)}: 1}}"), (names, name)
                continue
            others += 1
            taken = takes(grammar, f"{{{json.dumps(name, ensure_ascii=False)}: true}}")
            # All but a control character without a short escape where it leaves the known names.
            assert taken or "\x01" in name, (names, name)
            refused += not taken
        for _ in range(4):
            text = sample(grammar, rng, most=200)
            sampled += text is not None
            assert text is None or valid(text, names), (names, text)
    assert known > 500 and others > 500 and refused < others / 7 and sampled > 60


def test_names_within_schemas_and_definitions() -> None:
    inner = json.loads(open_schema(["é"], {"type": "boolean"}))
    schema = json.loads(open_schema(["x_addl_key", "ab"], {"$ref": "#/$defs/q_addl_key"}))
    schema["$defs"] = {"q_addl_key": inner}
    grammar = compiled(byte_compiler(), "json", json.dumps(schema, ensure_ascii=False))
    assert takes(grammar, '{"ab": 1, "c": {"é": 1, "e": true}}') and takes(grammar, '{"ab": 1, "c": {"è": true}}')
    for wrong in ('{"ab": 1, "c": {"é": true}}', r'{"ab": 1, "c": {"\u00e9": true}}', r'{"\u0061b": {}}', '{"ab": {}}'):
        assert not takes(grammar, wrong), wrong


def test_long_names_take_no_recursion() -> None:
    name = "字" * 1200
    grammar = compiled(byte_compiler(), "json", open_schema([name], {"type": "boolean"}))
    assert takes(grammar, f'{{"{name[1:]}": true}}') and not takes(grammar, f'{{"{name}": true}}')


def test_rules_of_another_form_are_an_error() -> None:
    form = 'root_addl_key ::= (("\\"" root_addl_key_1)) (=([ \\n\\r\\t]* [,}\\]:]))\nroot_addl_key_1 ::= (([a-z]))\n'
    with pytest.raises(ValueError, match="root_addl_key_1 .* not as it was expected"):
        told_apart(form)
    assert told_apart("root ::= ((basic_any))\n") is None


@pytest.mark.parametrize("name", ["Straße", "écran", "©0", "字a", "ÿf", "a x0e9"])
def test_latin_letters_before_hexadecimal_digits_stay_themselves(name: str) -> None:
    """The library writes them as two digits and reads as many as come."""
    for value in ({"const": name}, {"enum": [1, name]}, {"type": "string", "pattern": f"^{name}$"}):
        grammar = compiled(byte_compiler(), "json", open_schema([name], value))
        text = json.dumps({name: 1, name[1:]: name}, ensure_ascii=False)
        assert takes(grammar, text), value
