"""Attention of transformers' modules: it calls what stands in the module, our attention or a recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from phonograph.errors import UnsupportedModelError
from phonograph.models.layer_spec import UNLIMITED
from phonograph.models.layers.kernel_set import Attend
from phonograph.models.modules.module_spec import RecordedAttention

IMPLEMENTATION = "phonograph"
"""Name of our attention among the implementations of transformers."""
_ATTRIBUTE = "phonograph_attention"
_WITHOUT_EFFECT = frozenset({"dropout", "position_ids", "use_cache", "cache_position", "logits_to_keep"})
"""Arguments that change nothing about the attention of an inference step, which knows the positions."""
_ARGUMENTS = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "is_causal"})


class Recorder:
    """Records the calls of attention of a module on the meta device."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: list[RecordedAttention] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in self._names:
            set_attention(module, self)

    def __call__(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, asked: Any
    ) -> torch.Tensor:
        """Record a call. Queries, keys and values are [1, H, T, D], [1, K, T, D] and [1, K, T, V]; return [1, T, H, V].

        Raises:
            UnsupportedModelError: the attention is none that our backends have.
        """
        name = self._names[module]
        given = {key: value for key, value in asked.items() if value is not None and value is not False}
        unknown = sorted(given.keys() - _ARGUMENTS - _WITHOUT_EFFECT)
        if mask is not None or unknown:
            what = f"the argument {unknown[0]}" if unknown else "a mask of its own"
            raise UnsupportedModelError(f"attention of {name} has {what}, which our attention has not")
        if not getattr(module, "is_causal", True) or not asked.get("is_causal", True):
            raise UnsupportedModelError(f"attention of {name} looks ahead")
        if any(call.module == name for call in self.calls):
            raise UnsupportedModelError(f"{name} calls attention twice in a step; once is supported")
        sinks, window = given.get("s_aux"), given.get("sliding_window")
        scaling = given.get("scaling")
        self.calls.append(
            RecordedAttention(
                name,
                q.shape[1],
                k.shape[1],
                q.shape[3],
                v.shape[3],
                float(q.shape[3] ** -0.5 if scaling is None else scaling),
                UNLIMITED if window is None else (int(window) - 1, 0),
                float(given.get("softcap", 0.0)),
                None if sinks is None else self._parameters[id(sinks)],
            )
        )
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


class ModuleAttention:
    """Our attention in the place of a module's; `attend` is that of the step that runs.

    Args:
        layer: index of the layer.
        dtype: type of the model. A module may compute a rotary embedding in another one.
    """

    attend: Attend

    def __init__(self, layer: int, dtype: torch.dtype) -> None:
        self._layer = layer
        self._dtype = dtype

    def __call__(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, asked: Any
    ) -> torch.Tensor:
        """Attend as `Recorder.__call__` says; the cache has values with as many numbers as keys."""
        value_size = v.shape[3]
        if value_size < k.shape[3]:
            v = torch.nn.functional.pad(v, (0, k.shape[3] - value_size))
        q_THD, k_TKD, v_TKD = (one[0].transpose(0, 1).to(self._dtype) for one in (q, k, v))
        return self.attend(q_THD, k_TKD, v_TKD, self._layer)[None, ..., :value_size]


Called = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Any, Any], torch.Tensor]


def set_attention(module: torch.nn.Module, attention: Called) -> None:
    """Let a module call this attention."""
    setattr(module, _ATTRIBUTE, attention)


def _run(
    module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, **asked: Any
) -> tuple[torch.Tensor, None]:
    return getattr(module, _ATTRIBUTE)(module, q, k, v, mask, asked), None


AttentionInterface.register(IMPLEMENTATION, _run)
