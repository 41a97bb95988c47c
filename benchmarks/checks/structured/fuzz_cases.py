"""Random structured outputs that try to make a grammar compiler spend time or memory without limit."""

from __future__ import annotations

import json
import random
from typing import Any

from checks.structured.fuzz_texts import random_gbnf, random_lark, random_regex
from phonograph.core.structured_outputs import MAX_CHARACTERS

Case = dict[str, Any]
"""Keyword arguments of `StructuredOutputs`."""
Schema = dict[str, Any]

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "iri", "regex"),
    *("json-pointer", "uri-template", "idn-email", "relative-json-pointer", "uri-reference", "idn-hostname"),
)


def random_case(rng: random.Random) -> Case:
    """Return a random case: mostly JSON schemas, else an expression, choices or a grammar."""
    kind = rng.choices(["json", "regex", "choice", "gbnf", "lark"], [10, 3, 1, 3, 2])[0]
    if kind == "json":
        case: Case = {"json": _Schemas(rng).root(), "disable_any_whitespace": rng.random() < 0.3}
        case["strictness"] = rng.choice(["strict", "strict", "relaxed"])
        case["disable_additional_properties"] = rng.random() < 0.7
    elif kind == "regex":
        case = {"regex": random_regex(rng, rng.randint(1, 4))}
    elif kind == "choice":
        size, count = size_of(rng, 1000), size_of(rng, 10_000)
        case = {"choice": [_word(rng, rng.randint(1, size)) for _ in range(min(count, 150_000 // (size + 3) + 1))]}
    else:
        case = {"grammar": random_gbnf(rng) if kind == "gbnf" else random_lark(rng)}
    return case if len(json.dumps(case)) < MAX_CHARACTERS else random_case(rng)


def size_of(rng: random.Random, largest: int) -> int:
    """Return a size whose order of magnitude is random."""
    return int(largest ** rng.random())


def _word(rng: random.Random, length: int) -> str:
    return "".join(rng.choices('abcxyz019_ é"\\', k=length))


class _Schemas:
    """A random schema. Definitions are few, so that references form cycles and diamonds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions = rng.choice([0, 0, 1, 3, 8, 30])
        self._budget = size_of(rng, 400)
        self._themes = rng.sample(
            ["texts", "numbers", "arrays", "objects", "products", "enums", "references", "conditions", "patterns"],
            rng.randint(1, 4),
        )

    def root(self) -> Schema:
        schema = self.schema(self._rng.randint(1, 6))
        if self._definitions:
            schema["$defs"] = {f"d{index}": self.schema(self._rng.randint(0, 3)) for index in range(self._definitions)}
        return schema

    def schema(self, depth: int) -> Schema:
        rng = self._rng
        self._budget -= 1
        if self._budget < 0 or depth <= 0:
            return rng.choice([{"type": rng.choice(_TYPES)}, {"type": "string"}, {}, self._enum(5), self._text()])
        makers = {
            "texts": self._text,
            "numbers": self._number,
            "arrays": lambda: self._array(depth),
            "objects": lambda: self._object(depth),
            "products": lambda: self._product(depth),
            "enums": lambda: self._enum(size_of(rng, 2000)),
            "references": lambda: self._reference(depth),
            "conditions": lambda: self._condition(depth),
            "patterns": lambda: self._pattern_properties(depth),
        }
        schema = makers[rng.choice(self._themes)]()
        while rng.random() < 0.2:
            schema = {**makers[rng.choice([*makers])](), **schema}
        return schema

    def _schemas(self, count: int, depth: int) -> list[Schema]:
        return [self.schema(depth - 1) for _ in range(count)]

    def _text(self) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "string"}
        if rng.random() < 0.5:
            schema["pattern"] = random_regex(rng, rng.randint(0, 3), anchored=rng.random() < 0.6)
        if rng.random() < 0.3:
            schema["minLength"] = size_of(rng, 1_000_000)
        if rng.random() < 0.3:
            schema["maxLength"] = schema.get("minLength", 0) + size_of(rng, 1_000_000)
        if rng.random() < 0.3:
            schema["format"] = rng.choice(_FORMATS)
        return schema

    def _number(self) -> Schema:
        rng = self._rng

        def bound() -> float:
            digits = "".join(rng.choices("0123456789", k=size_of(rng, 19)))
            fraction = "".join(rng.choices("0123456789", k=size_of(rng, 300)))
            text = f"{rng.choice(['', '-'])}{digits}{rng.choice(['', '', '.' + fraction, 'e-' + digits[:3]])}"
            return json.loads(str(float(text))) if rng.random() < 0.7 else int(float(text))

        schema: Schema = {"type": rng.choice(["integer", "number", "number"])}
        bounds = sorted(bound() for _ in range(2))
        for key, value in (("inimum", bounds[0]), ("aximum", bounds[1])):
            if rng.random() < 0.7:
                first = "m" if rng.random() < 0.7 else "exclusiveM"
                schema[first + key] = value
        if rng.random() < 0.4:
            schema["multipleOf"] = rng.choice(
                [size_of(rng, 2000), size_of(rng, 2000) / 10 ** rng.randint(0, 8), 1024, 1021]
            )
        return schema

    def _array(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "array"}
        if rng.random() < 0.8:
            schema["items"] = self.schema(depth - 1) if rng.random() < 0.7 else self._enum(6)
        if rng.random() < 0.2:
            schema["prefixItems"] = self._schemas(size_of(rng, 60), depth - 2)
        if rng.random() < 0.4:
            schema["minItems"] = size_of(rng, 100_000)
        if rng.random() < 0.4:
            schema["maxItems"] = schema.get("minItems", 0) + size_of(rng, 100_000)
        if rng.random() < 0.2:
            schema["uniqueItems"] = rng.random() < 0.9
        if rng.random() < 0.05:
            schema["contains"] = self.schema(depth - 2)
        return schema

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        count = size_of(rng, 600 if rng.random() < 0.2 else 12)
        plain = count > 20
        names = [rng.choice([f"p{index}", _word(rng, rng.randint(0, 12)) + str(index)]) for index in range(count)]
        schema: Schema = {"type": "object"}
        schema["properties"] = {name: {"type": "integer"} if plain else self.schema(depth - 1) for name in names}
        if rng.random() < 0.6:
            schema["required"] = rng.sample(names, rng.randint(0, count)) + ["other"] * (rng.random() < 0.1)
        if rng.random() < 0.4:
            schema["additionalProperties"] = rng.choice([True, False, self.schema(depth - 2)])
        if rng.random() < 0.2:
            schema["minProperties"] = rng.randint(0, count)
        if rng.random() < 0.2:
            schema["maxProperties"] = size_of(rng, 2 * count + 2)
        if rng.random() < 0.1:
            schema["propertyNames"] = rng.choice([self._text(), self._enum(30), {"maxLength": size_of(rng, 1_000_000)}])
        return schema

    def _pattern_properties(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = self._object(depth) if rng.random() < 0.5 else {"type": "object"}
        patterns = [random_regex(rng, rng.randint(0, 2), anchored=rng.random() < 0.7) for _ in range(size_of(rng, 15))]
        schema["patternProperties"] = {pattern: self.schema(depth - 2) for pattern in patterns}
        return schema

    def _product(self, depth: int) -> Schema:
        """Return an allOf of several anyOf or oneOf, which multiply where they are merged."""
        rng = self._rng
        if rng.random() < 0.3:
            return {rng.choice(["anyOf", "oneOf", "allOf"]): self._schemas(size_of(rng, 30), depth)}
        if rng.random() < 0.2:
            return {"allOf": [{"type": "string", "pattern": random_regex(rng, 2)} for _ in range(size_of(rng, 30))]}
        width = rng.randint(1, 5)
        factors = [
            {rng.choice(["anyOf", "anyOf", "oneOf"]): self._schemas(width, depth - 1)} for _ in range(size_of(rng, 20))
        ]
        return {"allOf": factors}

    def _enum(self, count: int) -> Schema:
        rng = self._rng
        if rng.random() < 0.1:
            return {"const": self._value(2)}
        length = size_of(rng, 100)
        words = [self._value(1) if rng.random() < 0.1 else _word(rng, rng.randint(0, length)) for _ in range(count + 1)]
        return {"enum": words[: max(1, min(count, 50_000 // (length + 4)))]}

    def _value(self, depth: int) -> Any:
        rng = self._rng
        if depth and rng.random() < 0.4:
            values = [self._value(depth - 1) for _ in range(rng.randint(0, 4))]
            return values if rng.random() < 0.5 else {_word(rng, 3): one for one in values}
        return rng.choice([None, True, rng.randint(-(10**19), 10**19), rng.random(), 1e300, _word(rng, 5)])

    def _reference(self, depth: int) -> Schema:
        rng = self._rng
        target = f"#/$defs/d{rng.randrange(self._definitions)}" if self._definitions else "#"
        siblings = self.schema(depth - 1) if rng.random() < 0.2 else {}
        return {**siblings, "$ref": target}

    def _condition(self, depth: int) -> Schema:
        rng = self._rng
        schema = self._object(depth)
        names = [*schema["properties"]] or ["p"]
        key = rng.choice(["dependentRequired", "dependencies", "not", "if", "unevaluatedProperties"])
        if key in ("dependentRequired", "dependencies"):
            count = size_of(rng, min(12, len(names)) + 1)
            schema[key] = {
                name: rng.sample(names, min(len(names), 3)) for name in rng.sample(names, min(count, len(names)))
            }
        elif key == "not":
            schema["not"] = {"required": rng.sample(names, min(len(names), size_of(rng, 10)))}
        elif key == "if":
            schema |= {"if": self.schema(depth - 2), "then": self.schema(depth - 2), "else": self.schema(depth - 2)}
        else:
            schema[key] = False
        return schema
