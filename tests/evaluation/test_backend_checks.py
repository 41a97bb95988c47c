"""scripts/backend-checks: what it would run for each backend, and what it makes of FP8 caches."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from checks.checks import Finished, Result

SCRIPT = Path(__file__).parents[2] / "scripts" / "backend-checks"
BACKENDS = ["triton", "flash_attn:2", "prefill=flash_attn,decode=triton"]
REFUSAL = (
    "phonograph: error: attention_backend='x' on y: x refuses: KV cache dtype float8_e4m3fn; no. Would serve: {who}"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("backend_checks", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


def test_a_dry_run_names_everything(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 131072}))
    command = [sys.executable, str(SCRIPT), "--dry-run", "--backends", *BACKENDS, "--model-config", str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    programs = dict(zip((line.removeprefix("# ") for line in lines[::2]), map(shlex.split, lines[1::2]), strict=True))
    # Verification in four modes and with drafts, twice; evaluations in five; sizes; FP8.
    assert len(programs) == len(BACKENDS) * (2 * 5 + 5 + 1 + 1)
    for backend in BACKENDS:
        for mode in ("FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE"):
            demo, large = (programs[f"verify {model} {mode} {backend}"] for model in ("demo", tmp_path.name))
            assert "65536" in large and "dummy" in large and mode in demo
        assert "--num-speculative-tokens" in programs[f"verify demo FULL with drafts {backend}"]
        replays = [command[command.index("--replays") + 1] for name, command in programs.items() if "demo" in name]
        assert sum(map(int, replays)) >= 500 * len(BACKENDS)
    flash = programs["eval FULL flash_attn:2"]
    assert flash[flash.index("--attention-backend") + 1] == "flash_attn"
    assert flash[flash.index("--flash-attn-version") + 1] == "2"
    composite = programs[f"sizes {BACKENDS[2]}"]
    assert json.loads(composite[-2])["attention_backend"] == BACKENDS[2]
    assert composite[-1] == "1,2,4,8,16,24,32,40,48,56"


def test_a_refusal_names_backends_that_serve(script: ModuleType) -> None:
    backends = [script.Backend.parse(name) for name in ("triton", "flash_attn:3")]
    bore = Result(name="fp8 triton", ok=True, text="", facts={"tasks": []})
    words = REFUSAL.format(who="triton, flashinfer, reference")
    refused = script.read_fp8("fp8 flash_attn:3", Finished(code=2, out="", last_words=words), {})
    assert refused.ok and refused.facts["would_serve"] == ["triton", "flashinfer", "reference"]
    assert script.check_refusals(backends, [bore, refused]).ok
    bore.facts = {}
    assert not script.check_refusals(backends, [bore, refused]).ok, "triton was named, and did not run"
    assert script.check_refusals(backends, [bore]) is None
    broken = Finished(code=1, out="", last_words="CUDA error: an illegal memory access")
    assert script.read_fp8("fp8 triton", broken, {}).ok is False
    nobody = Finished(code=2, out="", last_words=words.partition(". Would")[0])
    assert script.read_fp8("fp8 triton", nobody, {}).ok is False


def test_every_job_runs_once_on_a_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    read = "import os, json; print(json.dumps({'gpu': os.environ['CUDA_VISIBLE_DEVICES']}))"

    def result(name: str, done: Finished, facts: dict[str, str]) -> Result:
        return Result(name=name, ok=done.code == 0, text=facts["gpu"])

    jobs = [
        script.Job(name=str(number), command=[sys.executable, "-c", read], read=result, large=number < 2)
        for number in range(6)
    ]
    results = script.run_all(jobs, ["0", "3"], 2, 1)
    assert sorted(one.name for one in results) == [str(number) for number in range(6)]
    assert all(one.ok and one.text in ("0", "3") for one in results)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert script.visible_gpus() == ["1", "2"]


def test_a_version_is_a_number(script: ModuleType) -> None:
    with pytest.raises(script.argparse.ArgumentTypeError, match="flash_attn:new"):
        script.Backend.parse("flash_attn:new")
