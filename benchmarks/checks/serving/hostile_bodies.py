"""Request bodies that cost a server much more than they cost their sender, each below 16 MiB."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
SIZE = 15 * MIB
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}


@dataclass(frozen=True, slots=True)
class HostileBody:
    """One request.

    make:    the body
    headers: beside those that every request has
    """

    path: str
    make: Callable[[], bytes]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def _completion(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"prompt": "Hi", "max_tokens": 1, **fields}).encode()


def _raw(before: str, item: str, after: str, count: int | None = None) -> Callable[[], bytes]:
    """Return a body that repeats an item, up to `SIZE` where there is no count. The last comma of lists is left out."""
    many = SIZE // len(item.encode()) if count is None else count
    return lambda: f"{before}{(item * many).removesuffix(',')}{after}".encode()


def _text(field_name: str, rest: str = '"prompt": "Hi", "max_tokens": 1', text: str = "a") -> Callable[[], bytes]:
    """Return a body with a text of `SIZE` in one field."""
    return _raw(f'{{{rest}, "{field_name}": "', text, '"}')


def _keys(count: int, value: str = "1") -> str:
    return ",".join(f'"k{index}":{value}' for index in range(count))


def _in_user_message(content: str) -> str:
    return f'{{"messages": [{{"role": "user", "content": {content}'


def _call(arguments: str) -> Callable[[], bytes]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return lambda: json.dumps({"messages": [USER, {"role": "assistant", "tool_calls": [call]}, USER]}).encode()


def _tools(count: int, fields: int, choice: str = "required") -> Callable[[], bytes]:
    properties = {f"p{index}": {"type": "string"} for index in range(fields)}
    parameters = {"type": "object", "properties": properties}

    def make() -> bytes:
        tools = [
            {"type": "function", "function": {"name": f"f{index}", "parameters": parameters}} for index in range(count)
        ]
        return json.dumps({"messages": [USER], "tools": tools, "tool_choice": choice, "max_tokens": 1}).encode()

    return make


def _schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(count)}}


_SEVERAL = [{"multipleOf": unit} for unit in (97, 89, 83, 79)]
_NESTED = json.loads('{"items": ' * 300 + "{}" + "}" * 300)
_GRAMMARS: dict[str, dict[str, Any]] = {
    "a thousand times a thousand": {"guided_regex": "(a{0,1000}){0,1000}"},
    "a letter 20 before the end": {"guided_regex": ".*a.{20}"},
    "a letter 200 before the end": {"guided_regex": "(a|b)*a(a|b){200}"},
    "100,000 items": {"guided_json": {"type": "array", "minItems": 100_000, "maxItems": 100_000, "items": {}}},
    "1,000,000 characters": {"guided_json": {"type": "string", "minLength": 10**6, "maxLength": 10**6}},
    "2,000 long texts": {"guided_choice": [f"{index:090}" for index in range(2000)]},
    "3,000 objects": {
        "guided_json": {"anyOf": [{"type": "object", "properties": {f"p{one}": {}}} for one in range(3000)]}
    },
    "2,000 optional names": {"guided_json": {"type": "object", "properties": {f"p{one}": {} for one in range(2000)}}},
    "300 schemas in each other": {"guided_json": _NESTED},
    "a circle": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "20 choices at once": {
        "guided_json": {
            "allOf": [{"anyOf": [{"required": [f"a{one}"]}, {"required": [f"b{one}"]}]} for one in range(20)]
        }
    },
    "12 exclusive choices at once": {
        "guided_json": {
            "allOf": [{"oneOf": [{"required": [f"a{one}"]}, {"required": [f"b{one}"]}]} for one in range(12)]
        }
    },
    "multiples of 1,000,003": {"guided_json": {"type": "integer", "multipleOf": 1_000_003}},
    "multiples of 97, 89, 83 and 79": {"guided_json": {"type": "integer", "allOf": _SEVERAL}},
    "many derivations": {"guided_grammar": 'start: e\ne: e e e e | e e e | e e | "a"'},
}

BODIES: Mapping[str, HostileBody] = {
    # Seen to stall a server.
    "450,000 empty messages": HostileBody(CHAT, _raw('{"messages": [', "{},", "]}", 450_000)),
    "1,000,000 unknown fields": HostileBody(COMPLETIONS, lambda: f'{{"prompt": "Hi",{_keys(1_000_000)}}}'.encode()),
    "5,000,000 token ids": HostileBody(COMPLETIONS, _raw('{"prompt": [', "1,", "]}", 5_000_000)),
    "metadata of 700,000 keys": HostileBody(
        COMPLETIONS, lambda: f'{{"prompt": "Hi", "metadata": {{{_keys(700_000)}}}}}'.encode()
    ),
    "/tokenize of 15 MB": HostileBody("/tokenize", _raw('{"prompt": "', "Tom has 12 apples. ", '"}')),
    "logit_bias of 100,000": HostileBody(
        COMPLETIONS, lambda: _completion(logit_bias={str(index): 1 for index in range(100_000)})()
    ),
    "two prompts of 7.5 MB": HostileBody(
        COMPLETIONS, lambda: _completion(prompt=["Tom has 12 apples. " * (SIZE // 38)] * 2)()
    ),
    # Large in one respect.
    "15 MB of open lists": HostileBody(COMPLETIONS, _raw('{"prompt": ', "[", "")),
    "3,000,000 objects in each other": HostileBody(COMPLETIONS, _raw('{"prompt": "Hi", "metadata": ', '{"a":', "")),
    "a number of 15 MB": HostileBody(COMPLETIONS, _raw('{"prompt": "Hi", "max_tokens": ', "9", "}")),
    "a fraction of 15 MB": HostileBody(COMPLETIONS, _raw('{"prompt": "Hi", "temperature": 0.', "9", "}")),
    "3,500 numbers of 4,300 digits": HostileBody(
        COMPLETIONS, _raw('{"prompt": "Hi", "metadata": [', "9" * 4300 + ",", "]}", 3500)
    ),
    "one key 2,500,000 times": HostileBody(COMPLETIONS, _raw('{"prompt": "Hi"', ',"n":1', "}")),
    "15 MB of blanks": HostileBody(COMPLETIONS, _raw('{"prompt": "Hi", "max_tokens": 1', " ", "}")),
    "15 MB of bytes that are no UTF-8": HostileBody(COMPLETIONS, lambda: b'{"prompt": "' + b"\xff" * SIZE + b'"}'),
    "15 MB of UTF-16": HostileBody(COMPLETIONS, lambda: ('{"prompt": "' + "a" * (SIZE // 2) + '"}').encode("utf-16")),
    "15 MB of escapes": HostileBody(COMPLETIONS, _text("prompt", '"max_tokens": 1', r"\u0041")),
    "15 MB of escaped pairs": HostileBody(COMPLETIONS, _text("prompt", '"max_tokens": 1', r"\ud83d\ude00")),
    "15 MB of half pairs": HostileBody(COMPLETIONS, _text("prompt", '"max_tokens": 1', r"\ud83d")),
    "15 MB of escaped quotation marks": HostileBody(COMPLETIONS, _text("prompt", '"max_tokens": 1', r"\"")),
    "a prompt of 15 MB without blanks": HostileBody(COMPLETIONS, _text("prompt", '"max_tokens": 1')),
    "a message of 15 MB": HostileBody(CHAT, _raw(_in_user_message('"'), "a b ", '"}]}')),
    "a message of 300,000 parts": HostileBody(
        CHAT, _raw(_in_user_message("["), '{"type":"text","text":"a"},', "]}]}", 300_000)
    ),
    "a message of 100,000 texts": HostileBody(CHAT, _raw(_in_user_message("["), '"a",', "]}]}", 100_000)),
    "16,000 messages": HostileBody(CHAT, _raw('{"messages": [', json.dumps(USER) + ",", "]}", 16_000)),
    **{
        f"{name} of 15 MB": HostileBody(COMPLETIONS, _text(name))
        for name in ("model", "user", "stop", "request_id", "guided_regex", "guided_grammar", "guided_json")
    },
    "a key of 15 MB": HostileBody(COMPLETIONS, _raw('{"prompt": "Hi", "', "k", '": 1}')),
    "a role of 15 MB": HostileBody(CHAT, _raw('{"messages": [{"content": "Hi", "role": "', "r", '"}]}')),
    "JSON of 7,000,000 numbers as guided_json": HostileBody(
        COMPLETIONS, _raw('{"prompt": "Hi", "guided_json": "[', "0,", ']"}')
    ),
    "arguments of 5,000,000 lists": HostileBody(CHAT, lambda: _call("[" + "[]," * 5_000_000 + "0]")()),
    "arguments of 15 MB": HostileBody(CHAT, lambda: _call('{"a": "' + "a" * SIZE + '"}')()),
    # Many of what a few are usual of.
    "200,000 stop strings": HostileBody(COMPLETIONS, lambda: _completion(stop=["stop"] * 200_000)()),
    "60,000 stop strings": HostileBody(COMPLETIONS, lambda: _completion(stop=["stop"] * 60_000)()),
    "400,000 stop token ids": HostileBody(COMPLETIONS, lambda: _completion(stop_token_ids=[1] * 400_000)()),
    "100,000 prompts": HostileBody(COMPLETIONS, lambda: _completion(prompt=["Hi"] * 100_000)()),
    "2,000 prompts of 1,024 samples": HostileBody(COMPLETIONS, lambda: _completion(prompt=["Hi"] * 2000, n=1024)()),
    "60 prompts of 8,500 token ids": HostileBody(COMPLETIONS, lambda: _completion(prompt=[[5] * 8500] * 60)()),
    "60,000 empty prompts": HostileBody(COMPLETIONS, lambda: _completion(prompt=[[]] * 60_000)()),
    "50,000 tools": HostileBody(CHAT, _raw('{"messages": [], "tools": [', "{},", "]}", 50_000)),
    "100 tools of 400 fields": HostileBody(CHAT, _tools(100, 400)),
    "10 tools of 400 fields": HostileBody(CHAT, _tools(10, 400)),
    "10 tools of 400 fields for the template": HostileBody(CHAT, _tools(10, 400, "auto")),
    "a schema of 60,000 properties": HostileBody(COMPLETIONS, lambda: _completion(guided_json=_schema(60_000))()),
    "a schema of 3,000 properties": HostileBody(COMPLETIONS, lambda: _completion(guided_json=_schema(3000))()),
    "a choice of 100,000": HostileBody(
        COMPLETIONS, lambda: _completion(guided_choice=[f"c{index}" for index in range(100_000)])()
    ),
    "a choice of 100,000 numbers": HostileBody(COMPLETIONS, lambda: _completion(guided_choice=[1] * 100_000)()),
    "a regular expression of nested repeats": HostileBody(
        COMPLETIONS, _completion(guided_regex="((((a{1,99}){1,99}){1,99}){1,99}){1,99}")
    ),
    "a grammar of 14,000 rules": HostileBody(
        COMPLETIONS,
        lambda: _completion(guided_grammar="root ::= r0\n" + "".join(f'r{i} ::= "a"\n' for i in range(14_000)))(),
    ),
    **{
        f"grammar: {name}": HostileBody(COMPLETIONS, _completion(max_tokens=64, temperature=1, **fields))
        for name, fields in _GRAMMARS.items()
    },
    "60,000 stream options": HostileBody(
        COMPLETIONS, lambda: f'{{"prompt": "Hi", "stream": true, "stream_options": {{{_keys(60_000)}}}}}'.encode()
    ),
    "chat_template_kwargs of 60,000": HostileBody(
        CHAT,
        lambda: json.dumps(
            {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": {f"v{index}": 1 for index in range(60_000)}}
        ).encode(),
    ),
    # At the limits, and answered with a result where they fit.
    "130,000 unknown fields": HostileBody(COMPLETIONS, lambda: f'{{"prompt": "Hi",{_keys(130_000)}}}'.encode()),
    "a message of 130,000 unknown fields": HostileBody(
        CHAT, lambda: f'{{"messages": [{{"role": "user", "content": "Hi",{_keys(130_000)}}}]}}'.encode()
    ),
    "500,000 token ids": HostileBody(COMPLETIONS, lambda: _completion(prompt=[5] * 500_000)()),
    "2,000 prompts": HostileBody(COMPLETIONS, lambda: _completion(prompt=["Tom has 12 apples."] * 2000)()),
    "100,000 template arguments": HostileBody(
        CHAT,
        lambda: json.dumps(
            {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": {f"v{index}": 1 for index in range(100_000)}}
        ).encode(),
    ),
    "metadata of 60,000 keys": HostileBody(
        COMPLETIONS, lambda: _completion(metadata={f"k{index}": 1 for index in range(60_000)})()
    ),
    "/detokenize of 500,000": HostileBody("/detokenize", lambda: json.dumps({"tokens": [5] * 500_000}).encode()),
    "/tokenize of 100,000 characters": HostileBody("/tokenize", _raw('{"prompt": "', "é", '"}', 100_000)),
    # Beside the body.
    "a header of 1 MB": HostileBody(COMPLETIONS, _completion(), {"x-long": "a" * MIB}),
    "10,000 headers": HostileBody(COMPLETIONS, _completion(), {f"x-{index}": "a" for index in range(10_000)}),
    "a path of 1 MB": HostileBody("/v1/" + "a" * MIB, _completion()),
}
