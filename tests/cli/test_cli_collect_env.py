"""`phonograph collect-env`: facts for a report, without keys."""

from __future__ import annotations

import json
import platform

import pytest
from commands import run

from phonograph import __version__


def test_facts_without_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHONOGRAPH_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("PHONOGRAPH_API_KEY", "hidden-1")
    monkeypatch.setenv("HF_TOKEN", "hidden-2")
    monkeypatch.setenv("VLLM_API_KEY", "hidden-3")
    monkeypatch.setenv("OTHER", "hidden-4")
    text = run(capsys, "collect-env")
    found = json.loads(run(capsys, "collect-env", "--json"))
    assert found["versions"]["phonograph"] == __version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["gpus"]
    assert {"torch", "transformers", "tokenizers"} <= found["packages"].keys()
    environment = found["environment"]
    assert environment["PHONOGRAPH_MAX_NUM_SEQS"] == "7" and environment["HF_TOKEN"] == "(set)"
    assert "hidden" not in json.dumps(found) and "hidden" not in text and "OTHER" not in text
    assert "  PHONOGRAPH_API_KEY: (set)" in text.splitlines() and f"  phonograph: {__version__}" in text.splitlines()
