"""Routes with JSON bodies, parsed and checked for list lengths before their fields are validated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response
from starlette.types import Receive

from phonograph.config.server_config import ServerConfig
from phonograph.server.http.api_errors import invalid

MAX_BODY_FIELDS = 256
"""Maximum fields of a body: more than any endpoint has."""
MAX_OPTIONS = {"stream_options": 16, "options": 64, "chat_template_kwargs": 1024}
"""Maximum fields of objects in a body: more than any endpoint or template has."""
INLINE_BYTES = 16_384
"""Longer bodies are prepared by a thread, and the event loop serves others before and after they are parsed."""
EXACT_BYTES = 1 << 20
"""Longest body that `json.loads` parses, in 35 ms at most. pydantic's parser takes no longer for the largest body."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LIMITS = {
    "messages": "max_request_messages",
    "system": "max_request_messages",
    "tools": "max_request_tools",
    "stop": "max_request_stops",
    "stop_sequences": "max_request_stops",
    "stop_token_ids": "max_request_stop_token_ids",
    "bad_words": "max_request_stop_token_ids",
    "allowed_token_ids": "max_request_token_ids",
    "logprob_token_ids": "max_request_token_ids",
    "documents": "max_request_messages",
    "logit_bias": "max_request_biases",
    "tokens": "max_request_token_ids",
}
"""Lists and objects of a body, and the settings that limit their items."""


class JsonRequest(Request):
    """A request whose body is parsed once. The bytes are freed then, because an answer can take minutes.

    num_bytes: length of the body
    """

    num_bytes = 0

    async def parse(self, config: ServerConfig) -> None:
        """Parse the body, if there is one.

        Raises:
            ApiError: the body is not JSON, or holds more than the configuration allows.
        """
        self._value: Any = None
        body = await super().body()
        self.num_bytes = len(body)
        if not body:
            return
        await self._yield()
        self._value = parsed_body(body)
        del body
        # FastAPI keeps the body until the answer is complete, and only tests that it is not empty.
        self._body = b"{}"
        check_sizes(self._value, config)
        await self._yield()

    async def _yield(self) -> None:
        if self.num_bytes > INLINE_BYTES:
            await asyncio.sleep(0)

    async def json(self) -> Any:
        return self._value


class JsonRoute(APIRoute):
    """Route of an endpoint with a JSON body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            parsed = JsonRequest(request.scope, request.receive)
            serving = request.app.state.serving
            await parsed.parse(serving.config)
            # Before the validation, which would look at each of its tokens.
            serving.check_token_ids(await parsed.json())
            return await handle(parsed)

        return handle_parsed


def parsed_body(body: bytes) -> Any:
    """Parse a body.

    Raises:
        ApiError: it is not JSON.
    """
    try:
        return parse_json(body)
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not JSON: not UTF-8 at byte {error.start}", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not JSON: {error}", code="invalid_json") from None


async def until_gone(receive: Receive) -> None:
    """Return when the client has disconnected. The request's body must have been received."""
    while (await receive())["type"] != "http.disconnect":
        pass


def parse_json(body: bytes) -> Any:
    """Parse a body. A byte-order mark before it is white space.

    pydantic's parser, for long bodies, refuses more than 200 levels and half of a surrogate pair.

    Raises:
        ValueError: the body is not JSON.
        UnicodeDecodeError: it is not UTF-8; the position is the byte in the body.
        RecursionError: lists and objects are too deep in each other.
    """
    if len(body) <= EXACT_BYTES:
        return json.loads(body.decode("utf-8-sig"))
    return from_json(body.removeprefix(_BYTE_ORDER_MARK), cache_strings="none")


def check_sizes(body: Any, config: ServerConfig) -> None:
    """Check the lengths of a body's lists, whatever their items are.

    Raises:
        ApiError: a list is longer than the configuration allows.
    """
    if not isinstance(body, dict):
        return
    if len(body) > MAX_BODY_FIELDS:
        raise invalid(None, f"the body has {len(body)} fields; no endpoint has more than {MAX_BODY_FIELDS}")
    for name, most in MAX_OPTIONS.items():
        options = body.get(name)
        if isinstance(options, dict) and len(options) > most:
            raise invalid(name, f"{name} has {len(options)} fields; this server takes {most} at most")
    for name, setting in LIMITS.items():
        value = body.get(name)
        if isinstance(value, list | dict):
            _check(name, len(value), "items", setting, config)
    options = body.get("options")
    stops = options.get("stop") if isinstance(options, dict) else None
    if isinstance(stops, list):
        _check("options.stop", len(stops), "items", LIMITS["stop"], config)
    for name in ("prompt", "input", "texts"):
        prompts = body.get(name)
        if isinstance(prompts, list) and prompts:
            _check_prompts(name, prompts, config)


def _check_prompts(name: str, prompts: list[Any], config: ServerConfig) -> None:
    """Check texts, token ids, lists of these, or the items of a conversation."""
    if isinstance(prompts[0], dict):
        _check(name, len(prompts), "items", "max_request_messages", config)
        return
    # A prompt of token ids has no lists, unless it is refused later.
    lists = [] if isinstance(prompts[0], int) else [one for one in prompts if isinstance(one, list)]
    if lists or isinstance(prompts[0], str):
        _check(name, len(prompts), "prompts", "max_request_prompts", config)
    num_ids = sum(map(len, lists)) if lists else len(prompts)
    _check(name, num_ids, "token ids", "max_request_token_ids", config)


def _check(name: str, count: int, things: str, setting: str, config: ServerConfig) -> None:
    most = getattr(config, setting)
    if count > most:
        raise invalid(name, f"{name} has {count} {things}; this server takes {most} at most ({setting})")
