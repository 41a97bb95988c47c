"""The steps of the check scripts: which skips pass, what a program's end means, and a whole small run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.check_tests import COMBINATIONS, read_report, report_result
from checks.checks import Result, evaluated, outcome_of, run_json, run_step, verified

PASSED = f"""<testcase classname="tests.attention.test_triton_gpu_matrix" name="a"><properties>
<property name="combinations" value="{COMBINATIONS}"/><property name="largest_error" value="bfloat16 0.003"/>
</properties></testcase>"""
SKIPPED = '<testcase classname="{file}" name="b"><skipped type="pytest.skip" message="{why}">x</skipped></testcase>'
LACKS = SKIPPED.format(file="tests.attention.test_flash_attn_gpu", why="no kernel of head size 96")
ABSENT = SKIPPED.format(file="tests.attention.test_flashinfer_gpu", why="flashinfer is not installed")
OTHER = SKIPPED.format(file="tests.engine.test_gpu_engine", why="no reason that counts")
FAILED = '<testcase classname="tests.x" name="c"><failure message="assert 1 == 2">long</failure></testcase>'


FILE = """<testcase classname="" name="tests.evaluation.test_harness"><skipped type="pytest.skip" \
message="collection skipped">('/x/test_harness.py', 11, "Skipped: lm_eval is not installed: pip install it")</skipped>\
</testcase>"""


def _result(tmp_path: Path, *cases: str, code: int = 0) -> Result:
    report = tmp_path / "tests.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return report_result(read_report(report), code=code)


def test_skips_of_optional_libraries_pass_and_are_reported(tmp_path: Path) -> None:
    result = _result(tmp_path, PASSED, LACKS, LACKS, ABSENT)
    assert result.ok and result.facts["passed"] == 1 and result.facts["skipped"] == {}
    assert result.facts["skipped_optional"] == {"no kernel of head size 96": 2, "flashinfer is not installed": 1}
    told = "3 SKIPPED for optional libraries: 2 x no kernel of head size 96; 1 x flashinfer is not installed"
    assert told in result.text
    result = _result(tmp_path, PASSED, FILE)
    assert result.ok and result.facts["skipped_optional"] == {"lm_eval is not installed: pip install it": 1}


def test_other_skips_and_failures_fail(tmp_path: Path) -> None:
    result = _result(tmp_path, PASSED, ABSENT, OTHER)
    assert not result.ok and "1 SKIPPED WITHOUT AN EXCUSE: 1 x no reason that counts" in result.text
    result = _result(tmp_path, PASSED, FAILED, code=1)
    assert (
        not result.ok
        and "failed: tests.x::c" in result.text
        and "assert 1 == 2" in result.facts["reasons"]["tests.x::c"]
    )
    assert not _result(tmp_path, PASSED.replace(str(COMBINATIONS), "12")).ok, "too few combinations"
    assert _result(tmp_path, PASSED).ok


def test_a_step_that_raises_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Result:
        raise ValueError("broken")

    results = run_step(("one", broken)) + run_step(("two", lambda: Result(name="two", ok=None, text="left out")))
    assert [result.ok for result in results] == [False, None] and results[0].text == "ValueError: broken"
    assert "FAILED" in capsys.readouterr().out
    assert not outcome_of(results, 1.0)["ok"] and outcome_of(results[1:], 1.0)["ok"]


def test_a_program_that_prints_no_result() -> None:
    done, facts = run_json(["python3", "-c", "import sys; print('[no json'); sys.exit('it broke')"])
    assert facts == {} and done.code == 1
    for read in (verified, evaluated):
        result = read("step", done, facts)
        assert result.ok is False and "it broke" in result.text
