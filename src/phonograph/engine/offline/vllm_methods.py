"""Methods of vLLM's engines that are missing here: an error that says what works."""

from __future__ import annotations

from typing import TYPE_CHECKING

_WORKERS = "an engine has no workers; it runs in this process, or in one of its own with AsyncLLM"
_RPC = f"{_WORKERS}; after sleep(level=2), wake_up reads the weights again without reload_weights"
_WEIGHTS = "weights cannot be replaced yet; make a new engine"
MISSING = {
    "reward": "encode with the task token_classify or classify returns the rows of a reward model",
    **dict.fromkeys(("apply_model", "get_world_size"), _WORKERS),
    "collective_rpc": _RPC,
    **dict.fromkeys(("init_weight_transfer_engine", "start_weight_update", "update_weights"), _WEIGHTS),
    **dict.fromkeys(("finish_weight_update", "reload_weights"), _WEIGHTS),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras"), "adapters are merged into the weights beforehand"),
    "llm_engine": "`session` adds, steps and aborts requests",
}
"""Attributes of vLLM's `LLM` and `AsyncLLM`, each with the reason for its absence, or what works."""


class VllmMethods:
    """Base of `LLM` and `AsyncLLM`, whose AttributeError explains methods of vLLM."""

    if not TYPE_CHECKING:  # for type checkers, a class with this method has every attribute

        def __getattr__(self, name: str) -> object:
            reason = f"; {MISSING[name]}" if name in MISSING else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{reason}"
            raise AttributeError(text, name=name, obj=self)
