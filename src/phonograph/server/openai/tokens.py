"""POST /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.openai.chat_translation import tokenize_request
from phonograph.server.openai.protocol import DetokenizeBody, TokenizeBody

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize", response_model=dict[str, Any])
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids of a text, or of a conversation in the model's template."""
    serving: Serving = request.app.state.serving
    headers = serving.check(body)
    # The thread also encodes the answer, which may have a hundred thousand ids.
    return await serving.prepare(request, lambda _: JSONResponse(_tokens(serving, body), headers=headers))


def _tokens(serving: Serving, body: TokenizeBody) -> dict[str, Any]:
    if body.messages is not None:
        token_ids = serving.encode_chat(tokenize_request(body, serving.config), whole_context=False)
    else:
        assert body.prompt is not None
        token_ids = serving.encode_text(
            body.prompt, add_special_tokens=body.add_special_tokens is not False, whole_context=False
        )
    return {
        "count": len(token_ids),
        "max_model_len": serving.engine.facts.context_len,
        "tokens": token_ids,
        "token_strs": [serving.tokenizer.piece(token_id) for token_id in token_ids] if body.return_token_strs else None,
    }


@router.post("/detokenize", response_model=dict[str, Any])
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    serving: Serving = request.app.state.serving
    headers = serving.check(body)
    vocab_size = serving.engine.facts.vocab_size
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < vocab_size):
        raise invalid("tokens", f"the model's token ids are 0 to {vocab_size - 1}")

    def decoded(_: object) -> Response:
        return JSONResponse(
            {"prompt": serving.tokenizer.decode(body.tokens, skip_special_tokens=False)}, headers=headers
        )

    return await serving.prepare(request, decoded)
