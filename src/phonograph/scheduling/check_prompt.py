"""Check of a prompt's length, before its request is queued."""

from __future__ import annotations

from phonograph.core.limits import Limits
from phonograph.errors import RequestError


def check_prompt(prompt_len: int, limits: Limits, *, context_len: int) -> None:
    """Check that a prompt leaves room for a token, or fits if nothing is generated.

    Args:
        prompt_len: tokens of the prompt.
        limits: of the engine.
        context_len: tokens of a sequence that the KV cache holds, of those that the model allows.

    Raises:
        RequestError: it is empty or too long.
    """
    if not prompt_len:
        raise RequestError("prompt", [], "is empty; at least one token is needed")
    longest = limits.max_len - 1
    if prompt_len > longest:
        room = "do not fit in" if limits.pools else "leave no room to generate in"
        problem = f"tokens {room} a context (max_model_len) of {limits.max_model_len}; the maximum is {longest}"
        raise RequestError("prompt length", prompt_len, problem)
    if limits.whole_prompts and prompt_len > limits.max_num_batched_tokens:
        problem = "tokens are more than a step takes, and this model computes a prompt in one step"
        most = f"max_num_batched_tokens={limits.max_num_batched_tokens}"
        raise RequestError("prompt length", prompt_len, f"{problem} ({most}); shorten the prompt or raise that")
    if prompt_len >= context_len:
        problem = f"tokens do not fit in the KV cache, which holds {context_len - 1}"
        raise RequestError("prompt length", prompt_len, f"{problem}; shorten the prompt or enlarge the KV cache")
