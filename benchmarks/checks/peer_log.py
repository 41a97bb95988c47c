"""Kernels, attention backend and graph mode that vLLM chose, from its log.

A figure of a peer means little without them: with dummy weights vLLM once ran the weights of a GPTQ model in 16 bits.
With layers that have a state, a block of attention is as large as a state, which tells the state's type.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

_CHOICES = re.compile(
    r"(?:Using|Selected) \S*(?:Kernel|Experts|MoE)\S*(?: \S+)*"
    r"|Using .{0,80}attention backend.*"
    r"|Using FlashAttention version.*"
    r"|Setting attention block size to \d+ tokens"
    r"|Capturing CUDA graphs \([^)]*\)"
    r"|\bquantization=[^, ]+"
    r"|['\"]?cudagraph_mode['\"]?: ?[^,]+(?:, ?\d\)>)?"
    r"|['\"]?max_cudagraph_capture_size['\"]?: ?[^,}]+"
)
_QUANTIZED_KERNEL = re.compile(r"(?:Using|Selected) \S*(?:LinearKernel|Mxfp4|MXFP4|Fp8|FP8|Marlin|Int4)\S*")


def peer_choices(log: Path) -> list[str]:
    """Return the parts of a log that name a kernel, a backend or a graph mode, each once."""
    if not log.exists():
        return []
    lines = log.read_text(errors="replace").splitlines()
    return list(dict.fromkeys(found.strip()[:200] for line in lines for found in _CHOICES.findall(line)))


def missing_kernel(model: str, choices: list[str]) -> str | None:
    """Return what is wrong if the model is quantized and no line names a kernel of quantized weights, else None.

    Args:
        model: folder of the model.
        choices: result of `peer_choices`.
    """
    config = Path(model) / "config.json"
    if not config.is_file() or not json.loads(config.read_text()).get("quantization_config"):
        return None
    if any(_QUANTIZED_KERNEL.match(choice) for choice in choices):
        return None
    return "its log names no kernel of quantized weights; the weights probably ran in 16 bits"
