"""The setting fused_rope: what it needs, and what it may not be dropped for in silence. (That answers are the same is
`test_gpu_path.py`'s, and on a GPU `test_gpu_engine.py`'s.)"""

from __future__ import annotations

from typing import Any

import pytest

from phonograph.config import EngineConfig
from phonograph.device import known_device
from phonograph.engine.plan import EnginePlan, make_plan
from phonograph.errors import BackendError, ConfigError
from phonograph.models.spec import read_model_spec


def plan(device: str = "h200", **settings: Any) -> EnginePlan:
    return make_plan(
        EngineConfig(model="demo", fused_rope=True, **settings), read_model_spec("demo"), known_device(device)
    )


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "NONE"])
def test_where_decodes_run_whole(mode: str) -> None:
    made = plan(cudagraph_mode=mode)
    assert made.attention.fused_rope and made.selection.capabilities.label == "triton"


def test_what_could_never_rotate_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="fused_rope=True: works where decodes run in whole graphs.*mode is PIECEWISE"
    ):
        plan(cudagraph_mode="PIECEWISE")
    with pytest.raises(BackendError, match="triton refuses: fused_rope with draft tokens"):
        plan(num_speculative_tokens=2)
    with pytest.raises(BackendError, match="triton refuses: fused_rope with a KV cache of float8_e4m3fn"):
        plan(kv_cache_dtype="fp8")
    with pytest.raises(BackendError, match="reference refuses: fused_rope; it takes queries that are rotated"):
        plan("cpu")
    with pytest.raises(BackendError, match="flash_attn 3 refuses: fused_rope; .*Would serve: triton"):
        plan(attention_backend="flash_attn")
