"""Bodies that are mostly accepted: values of fields that `scripts/fuzz-server` puts into the OpenAPI document."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def number(low: float, high: float, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


def strings(most: int) -> Schema:
    return {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": most}


def struct(required: Schema, optional: Schema | None = None) -> Schema:
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


IDS: Schema = {"type": "array", "items": number(0, 2047), "minItems": 1, "maxItems": 40}
TEXT: Schema = {"type": "string", "minLength": 1}
OBJECT: Schema = {"type": "object"}
NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,20}$"}


def one_of(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


def items(schema: Schema, most: int, least: int = 1) -> Schema:
    return {"type": "array", "minItems": least, "maxItems": most, "items": schema}


def constant(value: str) -> Schema:
    return {"const": value}


def text_part(kind: str) -> Schema:
    return struct({"type": constant(kind), "text": TEXT})


ROLES: Schema = {"enum": ["system", "developer", "user", "assistant", "tool"]}
MESSAGE = struct(
    {"role": ROLES, "content": one_of({"type": "string"}, items(text_part("text"), 3, least=0))},
    {"name": TEXT, "tool_call_id": TEXT},
)
PARAMETERS = one_of(
    OBJECT, struct({"type": constant("object"), "properties": {"type": "object", "additionalProperties": OBJECT}})
)
FUNCTION = struct({"name": NAME}, {"description": TEXT, "parameters": PARAMETERS, "strict": {"type": "boolean"}})
GRAMMAR_OF_INPUT = struct(
    {
        "type": constant("grammar"),
        "syntax": {"enum": ["lark", "regex"]},
        "definition": one_of(TEXT, {"enum": ["a+", "start: /[a-z]+/", 'start: "a" | "(" start ")"', '"\\\\d+"']}),
    }
)
CUSTOM = struct(
    {"name": NAME}, {"description": TEXT, "format": one_of(struct({"type": constant("text")}), GRAMMAR_OF_INPUT)}
)
FORMAT = struct({"type": constant("json_schema"), "json_schema": struct({"name": TEXT}, {"schema": OBJECT})})
REGEX: Schema = {"anyOf": [TEXT, {"enum": ["[a-z]{2,5}", "(yes|no)!?", "\\\\d+", ".*", "[^a]"]}]}
GRAMMAR: Schema = {"anyOf": [TEXT, {"enum": ['root ::= "a" | "b" root', 'root ::= [0-9]+ "." x?\nx ::= "é" | x x']}]}
OUTPUTS = struct({}, {"regex": REGEX, "choice": strings(5), "json": OBJECT, "grammar": GRAMMAR})
NARROW: dict[str, Schema] = {
    "model": {"const": "demo"},
    "prompt": {"anyOf": [TEXT, strings(3), IDS, {"type": "array", "items": IDS, "minItems": 1, "maxItems": 3}]},
    "messages": {"type": "array", "minItems": 1, "maxItems": 4, "items": MESSAGE},
    "tools": items(
        one_of(
            struct({"type": constant("function"), "function": FUNCTION}),
            struct({"type": constant("custom"), "custom": CUSTOM}),
        ),
        2,
    ),
    "tool_choice": {"enum": ["none", "auto", "required"]},
    "tokens": IDS,
    "max_tokens": number(1, 24),
    "max_completion_tokens": {"type": "null"},
    "min_tokens": number(0, 2),
    "n": number(1, 3),
    "seed": number(0, 2**31),
    "priority": {"const": 0},
    "top_k": number(-1, 100),
    "top_p": number(0.01, 1, "number"),
    "min_p": number(0, 1, "number"),
    "temperature": number(0, 2, "number"),
    "repetition_penalty": number(0.5, 2, "number"),
    "presence_penalty": number(-2, 2, "number"),
    "frequency_penalty": number(-2, 2, "number"),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,3}$"},
        "additionalProperties": number(-100, 100, "number"),
        "maxProperties": 4,
    },
    "logprobs": number(0, 5),
    "stream": {"const": True},
    "top_logprobs": number(0, 5),
    "prompt_logprobs": number(0, 5),
    "stop": {"anyOf": [TEXT, strings(4)]},
    "stop_token_ids": IDS,
    "stream_interval": number(1, 9),
    "repetition_detection": struct({"max_pattern_size": number(1, 8), "min_count": number(2, 5)}),
    "length_penalty": number(0.5, 2, "number"),
    "chat_template": {"enum": ["{{ messages[0].content }}", "{% for m in messages %}{{ m.role }}{% endfor %}", "{{"]},
    "response_format": {"anyOf": [{"enum": [{"type": "text"}, {"type": "json_object"}]}, FORMAT]},
    "structured_outputs": OUTPUTS | {"minProperties": 1, "maxProperties": 1},
}
"""Values that are mostly accepted, for fields by their names."""
CALL_ID: Schema = {"enum": ["c1", "c2"]}
SENTENCE: Schema = one_of(TEXT, {"enum": ["How many apples?", "<tool_call>", "</think>"]})
BLOCK = one_of(
    text_part("text"),
    struct({"type": constant("thinking"), "thinking": TEXT, "signature": {"type": "string"}}),
    struct({"type": constant("tool_use"), "id": CALL_ID, "name": NAME, "input": OBJECT}),
    struct(
        {"type": constant("tool_result"), "tool_use_id": CALL_ID},
        {"content": one_of({"type": "string"}, items(text_part("text"), 2)), "is_error": {"type": "boolean"}},
    ),
)
TURN = struct(
    {"role": {"enum": ["user", "assistant"]}, "content": one_of(SENTENCE, items(text_part("text"), 2), items(BLOCK, 3))}
)
CALL = {
    "type": {"enum": ["function_call"]},
    "call_id": CALL_ID,
    "name": NAME,
    "arguments": {"enum": ["{}", '{"a": 1}']},
}
ITEM = one_of(
    struct(
        {
            "role": {"enum": ["user", "system", "developer"]},
            "content": one_of(SENTENCE, items(text_part("input_text"), 2)),
        }
    ),
    struct({"type": constant("message"), "role": constant("assistant"), "content": items(text_part("output_text"), 2)}),
    struct(
        {"type": constant("reasoning"), "summary": items(text_part("summary_text"), 2, least=0)},
        {"encrypted_content": TEXT},
    ),
    struct(CALL),
    struct({**CALL, "type": constant("custom_tool_call"), "input": {"type": "string"}}),
    struct(
        {
            "type": {"enum": ["function_call_output", "custom_tool_call_output"]},
            "call_id": CALL_ID,
            "output": one_of({"type": "string"}, items(text_part("input_text"), 2)),
        }
    ),
)
OLLAMA_MESSAGE = struct(
    {"role": {"enum": ["system", "user", "assistant", "tool"]}, "content": one_of(SENTENCE, {"type": "null"})},
    {
        "thinking": {"type": "string"},
        "tool_name": NAME,
        "tool_calls": items(struct({"function": struct({"name": NAME}, {"arguments": OBJECT})}), 2),
    },
)
EFFORT: Schema = {"enum": ["low", "medium", "high", "none", None]}
OLLAMA: dict[str, Schema] = {
    "messages": items(OLLAMA_MESSAGE, 4),
    "tools": items(struct({"type": constant("function"), "function": FUNCTION}), 2),
    "format": one_of({"enum": ["", "json", None]}, OBJECT),
    "think": one_of({"type": "boolean"}, EFFORT),
    "keep_alive": one_of(number(-1, 60), {"enum": ["5m", "-1"]}),
    "stream": {"type": "boolean"},
    "name": {"const": "demo"},
    "logprobs": {"const": True},
}
MESSAGES: dict[str, Schema] = {
    "messages": items(TURN, 4),
    "system": one_of(SENTENCE, items(text_part("text"), 2)),
    "tools": items(
        struct({"name": NAME, "input_schema": PARAMETERS}, {"description": TEXT, "strict": {"type": "boolean"}}), 2
    ),
    "tool_choice": one_of(
        struct({"type": {"enum": ["auto", "any", "none"]}}, {"disable_parallel_tool_use": {"type": "boolean"}})
    ),
    "thinking": one_of(
        struct({"type": {"enum": ["disabled", "adaptive"]}}),
        struct({"type": constant("enabled"), "budget_tokens": number(1, 8)}),
    ),
    "output_config": struct({}, {"effort": EFFORT}),
    "stop_sequences": strings(3),
    "cache_control": struct({"type": constant("ephemeral")}),
    "stream": {"type": "boolean"},
}
BODY_NARROW: dict[str, dict[str, Schema]] = {
    "ResponseBody": {
        "input": one_of(SENTENCE, items(ITEM, 4)),
        "tools": items(
            one_of(
                struct({"type": constant("function"), **FUNCTION["properties"]}),
                struct({"type": constant("custom"), **CUSTOM["properties"]}),
            ),
            2,
        ),
        "text": struct(
            {}, {"verbosity": constant("medium"), "format": struct({"type": {"enum": ["text", "json_object"]}})}
        ),
        "reasoning": struct({}, {"effort": EFFORT, "summary": constant("auto")}),
        "include": items({"enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]}, 2),
        "max_output_tokens": number(1, 24),
        "thinking_token_budget": {"type": "null"},
        "chat_template_kwargs": {"type": "object"},
        "truncation": constant("disabled"),
        "stream": {"type": "boolean"},
        "top_logprobs": {"type": "null"},
    },
    "MessageBody": MESSAGES,
    "CountBody": MESSAGES,
    "OllamaChatBody": OLLAMA,
    "GenerateBody": {
        **OLLAMA,
        "prompt": SENTENCE,
        "suffix": {"enum": ["", None]},
        "system": {"enum": ["Be brief.", None]},
    },
    "Options": {
        "num_predict": number(1, 24),
        "repeat_last_n": {"const": -1},
        "repeat_penalty": number(0.5, 2, "number"),
    },
    "ShowBody": {**OLLAMA, "verbose": {"type": "boolean"}},
}
"""The same for bodies whose fields have another form."""
EXCLUDING = {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}
"""Older names of what structured_outputs has; with all of them nearly every body would contradict itself."""

OF_CHATS = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
WHOLE, SCORES = {"stream", "stream_options"}, {"logprobs", "top_logprobs"}
VARIANTS: dict[str, list[tuple[set[str], set[str]]]] = {
    "CompletionBody": [({"stream"}, {"prompt_logprobs"}), (set(), WHOLE)],
    "ChatBody": [
        ({"stream"}, {"prompt_logprobs"} | SCORES),
        ({"stream", "logprobs"}, {"prompt_logprobs"}),
        ({"logprobs"}, WHOLE),
        (set(), WHOLE | SCORES),
    ],
    "OllamaChatBody": [({"model"}, {"logprobs", "top_logprobs"}), ({"model", "logprobs"}, set())],
    "GenerateBody": [({"model"}, {"logprobs", "top_logprobs", "system"}), ({"model", "logprobs"}, {"raw"})],
    "TokenizeBody": [({"prompt"}, OF_CHATS), ({"messages"}, {"prompt", "add_special_tokens"})],
}
"""Sets of fields that a body may combine: required fields and excluded fields."""


def variant(body: Schema, needed: set[str], excluded: set[str]) -> Schema:
    properties = {field: schema for field, schema in body["properties"].items() if field not in excluded}
    return body | {"properties": properties, "required": sorted({*body.get("required", ()), *needed})}


def narrowed(document: Schema) -> Schema:
    """Return the document with bodies that are mostly accepted."""
    for name, body in list(document["components"]["schemas"].items()):
        if not name.endswith("Body") and name != "Options":
            continue
        fields = {field: schema for field, schema in body["properties"].items() if field not in EXCLUDING}
        known = {**NARROW, **BODY_NARROW.get(name, {})}
        body["properties"] = {field: known.get(field, schema) for field, schema in fields.items()}
        if name == "ChatBody":
            body["properties"]["logprobs"] = {"const": True}
        variants = VARIANTS.get(name, [(set(), set())])
        document["components"]["schemas"][name] = {"anyOf": [variant(body, *one) for one in variants]}
    for parameter in document["paths"]["/v1/models/{name}"]["get"]["parameters"]:
        parameter["schema"] = NARROW["model"]
    return document
