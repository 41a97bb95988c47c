"""Scales of an FP8 KV cache, as checkpoints carry them: a factor for the keys and one for the values of each layer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from phonograph.errors import WeightError

# Both of a layer's, or one of them, under the names that quantizers write.
_NAMES = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\.(?:attn\.)?(?:k_proj\.(?P<k>k)|v_proj\.(?P<v>v)|(?P<both>k|v|kv))_scale"
)


@dataclass(slots=True)
class KVScales:
    """What stored keys and values are multiplied by: float32 [K] by layer, where the checkpoint has them."""

    keys: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    values: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    def take(self, name: str, tensor: torch.Tensor, num_kv_heads: int, device: torch.device) -> None:
        """Keeps a tensor that `is_kv_scale`.

        Raises:
            WeightError: it is neither one number nor one for each KV head, or no finite number above 0.
        """
        match = _NAMES.fullmatch(name)
        assert match is not None
        if tensor.numel() not in (1, num_kv_heads):
            raise WeightError(
                f"tensor {name} has {tensor.numel()} numbers; a scale is one number, or one for each of {num_kv_heads} "
                "KV heads"
            )
        scale = tensor.float().reshape(-1).expand(num_kv_heads).contiguous()
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise WeightError(f"tensor {name} is {scale.tolist()}; scales are finite and above 0")
        which = match["k"] or match["v"] or match["both"]
        layer = int(match["layer"])
        if "k" in which:
            self.keys[layer] = scale.to(device)
        if "v" in which:
            self.values[layer] = scale.to(device)

    def check(self, num_layers: int) -> None:
        """All layers have both scales, or none has any.

        Raises:
            WeightError: some have.
        """
        everyone = set(range(num_layers))
        for name, scales in (("keys", self.keys), ("values", self.values)):
            if (self.keys or self.values) and scales.keys() != everyone:
                absent = sorted(everyone - scales.keys())
                problem = f"none for the {name} of layer {absent[0]}" if absent else f"some for layer {max(scales)}"
                raise WeightError(f"the checkpoint has scales of an FP8 KV cache, but {problem}; it is incomplete")


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name is one."""
    return _NAMES.fullmatch(name) is not None
