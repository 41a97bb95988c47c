"""What a plan derives from its limits."""

from __future__ import annotations

from phonograph.config import EngineConfig
from phonograph.device import known_device
from phonograph.engine.plan import make_plan
from phonograph.models.spec import read_model_spec


def test_no_graph_is_captured_for_more_tokens_than_requests_can_have() -> None:
    limits = {"max_num_seqs": 3, "max_model_len": 72, "num_kv_blocks": 96, "max_num_batched_tokens": 512}
    plan = make_plan(EngineConfig(model="demo", **limits), read_model_spec("demo"), known_device("cpu"))
    assert max(key.num_tokens for key in plan.captures.largest_first()) == 3 * 72
    limits = {**limits, "num_kv_blocks": 7}
    plan = make_plan(EngineConfig(model="demo", **limits), read_model_spec("demo"), known_device("cpu"))
    assert max(key.num_tokens for key in plan.captures.largest_first()) == 72 + 2 * 16
