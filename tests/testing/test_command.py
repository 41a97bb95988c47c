"""The sample backend as another package registers it, and the suite as a command; the built-in backends pass it too."""

from __future__ import annotations

import json

import pytest
import torch

from phonograph.attention.selection import registered_backends, select
from phonograph.core.device import known_device
from phonograph.errors import BackendError
from phonograph.testing import Outcome, check_conformance
from phonograph.testing.__main__ import main
from phonograph.testing.specs import base_specs


def test_the_sample_passes_through_its_entry_point(installed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([installed, "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["backend"], facts["device"], facts["ok"]) == ("dense", "cpu", True)
    outcomes = {(one["name"], one["subject"]): one["outcome"] for one in facts["checks"]}
    assert set(outcomes.values()) == {"passed", "not applicable"}
    # It takes no ALiBi and says so; what it says it takes was run.
    assert outcomes["undeclared feature: ALiBi", ""] == "not applicable"
    for feature in ("softcap", "LSE", "KV layout HND", "dtype float16", "encoder_only attention", "all together"):
        assert outcomes[f"undeclared feature: {feature}", ""] == "passed"
    # Graphs: one and four tokens a decode, any batch, and any batch with all features.
    subjects = {subject for name, subject in outcomes if name == "stale split count"}
    assert subjects == {
        "decode[7 tokens, 7 slots]",
        "decode[28 tokens, 7 slots]",
        "mixed[160 tokens, 7 slots]",
        "mixed[160 tokens, 7 slots], all features",
    }


def test_it_is_chosen_only_where_it_is_asked_for(installed: str) -> None:
    dense = next(one for one in registered_backends() if one.capabilities.name == installed)
    (spec,) = base_specs(dense.capabilities, known_device("cpu"))
    assert select(installed, None, spec, known_device("cpu")).capabilities.label == "dense"
    assert select(None, None, spec, known_device("cpu")).capabilities.label == "reference"


def test_a_failure_is_an_exit_code_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A backend for GPUs, on a CPU."""
    assert main(["triton", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "FAILED refuses everything" in out or "FAILED missing" in out
    assert "triton on cpu does NOT conform; first: " in out


def test_user_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unknown"]) == 2
    assert "registered are triton, flash_attn 3" in capsys.readouterr().err
    assert main([]) == 2
    if not torch.cuda.is_available():
        assert main(["reference", "--device", "cuda"]) == 2
    with pytest.raises(BackendError, match="'unknown'"):
        check_conformance("unknown")


def test_a_version_by_its_label() -> None:
    report = check_conformance("flash_attn 2", device="cpu")
    assert report.backend == "flash_attn 2"
    assert not report.ok


def test_the_reference_passes() -> None:
    report = check_conformance("reference", device="cpu")
    assert report.ok, str(report)
    assert "reference on cpu conforms" in str(report)


@pytest.mark.gpu
@pytest.mark.long
def test_our_kernels_pass() -> None:
    report = check_conformance("triton", device="cuda")
    assert report.ok, str(report)
    assert any("[160 tokens" in check.subject and check.outcome is Outcome.PASSED for check in report.checks)


@pytest.mark.gpu
def test_the_sample_passes_on_a_gpu(installed: str) -> None:
    report = check_conformance(installed, device="cuda")
    assert report.ok, str(report)
