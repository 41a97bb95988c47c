"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from phonograph.server.errors import invalid
from phonograph.server.protocol import DetokenizeBody, TokenizeBody
from phonograph.server.serving import Serving, warning_headers

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request, response: Response) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the model would see it."""
    serving: Serving = request.app.state.serving
    response.headers.update(warning_headers(body.check()))
    serving.check_model(body.model)
    if body.messages is not None:
        token_ids = await serving.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
    else:
        assert body.prompt is not None
        (token_ids,) = await serving.encode([body.prompt], add_special_tokens=body.add_special_tokens is not False)
    return {
        "count": len(token_ids),
        "max_model_len": serving.engine.facts.context_len,
        "tokens": token_ids,
        "token_strs": [serving.tokenizer.piece(token_id) for token_id in token_ids] if body.return_token_strs else None,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request, response: Response) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    serving: Serving = request.app.state.serving
    response.headers.update(warning_headers(body.check_fields()))
    serving.check_model(body.model)
    vocab_size = serving.engine.facts.vocab_size
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < vocab_size):
        raise invalid("tokens", f"the model's token ids are 0 to {vocab_size - 1}")
    return {"prompt": serving.tokenizer.decode(body.tokens, skip_special_tokens=False)}
