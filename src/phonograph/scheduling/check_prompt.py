"""Check of a prompt's length, before its request is queued."""

from __future__ import annotations

from phonograph.errors import RequestError


def check_prompt(prompt_len: int, *, max_model_len: int, context_len: int) -> None:
    """Check that a prompt leaves room for a token.

    Args:
        prompt_len: tokens of the prompt.
        max_model_len: tokens of prompt and output that the model allows.
        context_len: those of them that the KV cache holds.

    Raises:
        RequestError: it is empty or too long.
    """
    if not prompt_len:
        raise RequestError("prompt", [], "is empty; at least one token is needed")
    if prompt_len >= max_model_len:
        problem = f"tokens leave no room to generate in a context (max_model_len) of {max_model_len}"
        raise RequestError("prompt length", prompt_len, f"{problem}; the maximum is {max_model_len - 1}")
    if prompt_len >= context_len:
        problem = f"tokens do not fit in the KV cache, which holds {context_len - 1}"
        raise RequestError("prompt length", prompt_len, f"{problem}; shorten the prompt or enlarge the KV cache")
