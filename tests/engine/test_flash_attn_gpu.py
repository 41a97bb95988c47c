"""The engine with FlashAttention 3: what it promises beyond other versions, an FP8 cache and batch invariance."""

from __future__ import annotations

import pytest
import torch
from alone_in_engine import LIMITS, PARAMS, differing, make_llm
from flash_kernels import kernel_missing

from demo_tasks.tasks import problems
from phonograph.attention.flash_attn.providers import missing
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


def provided(dtype: str) -> None:
    """Skips where FlashAttention 3 does not run the demo model, of head size 64, over a cache of this dtype."""
    if (absent := missing("3")) is not None:
        pytest.skip(absent)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 runs on compute capability 9.x")
    if (absent := kernel_missing("3", 64, dtype, torch.device("cuda"))) is not None:
        pytest.skip(absent)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("limits", LIMITS)
def test_alone_and_among_others(limits: str, params: str, monkeypatch: pytest.MonkeyPatch) -> None:
    provided("bfloat16")
    llm = make_llm(attention_backend="flash_attn", **LIMITS[limits])
    assert llm.plan.selection.capabilities.label == "flash_attn 3"
    assert not differing(llm, PARAMS[params], (2, 3, 7, 16, 33, 64), monkeypatch)


def test_answers_with_queries_rounded_too() -> None:
    provided("float8_e4m3fn")
    settings = {"model": "demo", "device": "cuda", "max_num_seqs": 8, "max_model_len": 512, "num_kv_blocks": 256}
    plain, fp8 = (LLM(**settings, attention_backend="flash_attn", kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert fp8.plan.selection.capabilities.label == "flash_attn 3"
    questions = [plain.encode_chat([{"role": "user", "content": problem.question}]) for problem in problems(3, 12)]
    one, other = ([output.outputs[0].text for output in llm.generate(questions, GREEDY)] for llm in (plain, fp8))
    same = sum(a == b for a, b in zip(one, other, strict=True))
    assert same >= 8, f"{same} of 12 answers as without FP8"
    report = fp8.verify(num_replays=50)
    assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]
