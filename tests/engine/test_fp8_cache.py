"""An FP8 KV cache through the whole engine: it fits twice the tokens, answers hardly differ, and scales are used."""

from __future__ import annotations

import pytest
import torch

from demo_tasks.tasks import problems
from phonograph.attention.selection import select
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.engine.plan import resolve_attention
from phonograph.errors import BackendError
from phonograph.models.spec import read_model_spec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


def answers(llm: LLM) -> list[str]:
    questions = [llm.encode_chat([{"role": "user", "content": problem.question}]) for problem in problems(3, 12)]
    return [output.outputs[0].text for output in llm.generate(questions, GREEDY)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_answers(kv_cache_dtype: str, device: str) -> None:
    # Some CPUs have no products of 16-bit numbers, and make them one by one.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    settings = {"model": "demo", "device": device, "dtype": str(dtype).removeprefix("torch."), "max_num_seqs": 8}
    settings |= {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 512}
    settings |= {"cudagraph_capture_sizes": [1, 2, 4, 8, 64]} if device == "cpu" else {}
    plain, fp8 = LLM(**settings), LLM(**settings, kv_cache_dtype=kv_cache_dtype)
    assert fp8.plan.memory.num_blocks == dtype.itemsize * plain.plan.memory.num_blocks
    same = sum(one == other for one, other in zip(answers(plain), answers(fp8), strict=True))
    # Coarser keys and values change some answers, never most of them; were they garbage, none would survive.
    assert same >= (8 if kv_cache_dtype == "fp8_e4m3" else 5), f"{same} of 12 answers as without FP8"


@pytest.mark.parametrize("device", DEVICES)
def test_scales_reach_the_cache(device: str) -> None:
    limits = {"max_num_seqs": 2, "num_kv_blocks": 16, "max_model_len": 128, "cudagraph_capture_sizes": [1, 2]}
    llm = LLM(model="demo", device=device, kv_cache_dtype="fp8", **limits)
    layers = llm.engine.core.runner._program.attention.layers
    assert all(layer.k_scale is None and layer.v_scale is None for layer in layers), "the demo model has none: 1"
    assert llm.plan.attention.kv_cache_dtype == "float8_e4m3fn"
    assert llm.engine.make_subject()._kv_caches[0].dtype is torch.float8_e4m3fn


def test_a_device_that_cannot() -> None:
    device = known_device("a100-80gb")
    (spec,) = resolve_attention(EngineConfig(model="demo", kv_cache_dtype="fp8"), read_model_spec("demo"), device).specs
    with pytest.raises(BackendError, match=r"triton refuses: KV cache dtype float8_e4m3fn .*8\.9"):
        select("triton", None, spec, device)
