"""The engine with batch_invariant: a request's logits and tokens, bit by bit, alone and in batches of 2 to 64."""

from __future__ import annotations

import pytest
import torch
from alone_in_engine import GREEDY, LIMITS, PARAMS, ROOMY, TIGHT, bits, differing, logits_of, make_llm, prompts

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine.plan import make_plan
from phonograph.errors import BackendError, ConfigError
from phonograph.models.spec import read_model_spec


@pytest.mark.gpu
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("limits", LIMITS)
def test_alone_and_among_others(limits: str, params: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(**LIMITS[limits])
    assert not differing(llm, PARAMS[params], (2, 3, 7, 16, 33, 64), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "NONE"])
def test_graphs_and_eager_alike(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, other = make_llm(**TIGHT), make_llm(**TIGHT, cudagraph_mode=mode)
    asked = prompts(llm, 24)
    wanted, _ = logits_of(llm, asked, GREEDY, monkeypatch)
    got, _ = logits_of(other, asked, GREEDY, monkeypatch)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(bits(row), bits(got[place])) for place, row in wanted.items())


@pytest.mark.gpu
def test_without_it_the_batch_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing(make_llm(batch_invariant=False, **ROOMY), GREEDY, (2, 16, 64), monkeypatch)


@pytest.mark.gpu
def test_every_graph_equals_eager() -> None:
    llm = make_llm(**TIGHT)
    report = llm.verify(num_replays=100)
    assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]


def test_the_plan() -> None:
    model, h100 = read_model_spec("demo"), known_device("h100")
    plan = make_plan(EngineConfig(model="demo", batch_invariant=True), model, h100)
    assert plan.attention.batch_invariant and plan.selection.capabilities.name == "triton"
    assert "cuts no keys" in plan.resolution.support.reason
    assert not make_plan(EngineConfig(model="demo"), model, h100).attention.batch_invariant
    with pytest.raises(ConfigError, match="batch_invariant=True: products are torch's on a CPU.*works on a GPU"):
        make_plan(EngineConfig(model="demo", batch_invariant=True), model, known_device("cpu"))
    with pytest.raises(BackendError, match="flashinfer refuses: batch_invariant; .*Would serve: triton, flash_attn 3"):
        make_plan(EngineConfig(model="demo", batch_invariant=True, attention_backend="flashinfer"), model, h100)
