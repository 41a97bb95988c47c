"""Machine code of kernels, compiled for a GPU that need not be here."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import report_of

Report = dict[str, tuple[int, list[str], list[str]]]


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of(Path(__file__).with_name("compile_for_hopper.py"))


@pytest.mark.long
def test_no_register_is_read_before_it_is_written(report: Report) -> None:
    attention = [name for name in report if name.startswith("_attention_kernel") and " long " not in name]
    assert len(attention) == 6 and all(report[name][0] > 1000 for name in attention)
    assert len([one for one in report if one.startswith("_prefill_kernel")]) == 2
    assert {name: unwritten for name, (_, unwritten, _) in report.items() if unwritten} == {}


@pytest.mark.long
def test_attention_launches_wait_as_they_must_to_run_at_the_same_time(report: Report) -> None:
    """The first waits before it lets the next begin; the second at its end, and before it reads if it is not behind the
    first."""
    launches = {name: launches for name, (_, _, launches) in report.items()}
    long = [name for name in launches if name.startswith("_attention_kernel long")]
    short = [name for name in launches if name.startswith("_attention_kernel") and name not in long]
    assert [launches[name] for name in long] == [["wait", "let"]] * 2
    assert [launches[name] for name in short] == [["let", "wait", "wait"]] * 6


@pytest.mark.long
def test_a_ring_is_asked_for_before_waiting(report: Report) -> None:
    """Its two places' weights (two tiles each of gates and ups), then the rows; then all of one more step."""
    rings = {name: launches for name, (_, _, launches) in report.items() if name.startswith("_gemm_ring_kernel")}
    for mode, tiles in (0, 1), (1, 1), (2, 2):
        before, after = 2 * tiles, 2 + tiles + 1
        assert rings[f"_gemm_ring_kernel mode {mode}"] == ["let", *["ask"] * before, "wait", *["ask"] * after]


@pytest.mark.long
def test_words_of_one_row_are_asked_for_before_waiting(report: Report) -> None:
    """Words of two steps are asked for before the wait, gates and ups at once, and those of one more in the loop.

    An exchange between threads, where operands are not in the order of registers, would double the instructions.
    """
    for mode in range(3):
        count, _, launches = report[f"_gemv_integer_kernel mode {mode}"]
        assert launches == ["let", "ask", "ask", "wait", "ask"] and count < 1500


@pytest.mark.long
def test_chunks_of_a_scan_are_copied_ahead(report: Report) -> None:
    """Inputs of a chunk are copied before the products of the one before end, and few registers are spilled."""
    for name in ("mamba_chunk_kernel", "delta_scan_kernel"):
        _, _, launches = report[f"{name} long"]
        first = launches.index("product")
        assert launches[:first].count("copy") >= 8 and launches.count("copy") >= 16
        assert launches.count("spill") <= 48 and launches[first:].count("spill") <= 4
    assert "product" in report["delta_chunk_kernel long"][2]


@pytest.mark.long
def test_kernels_of_states_start_early(report: Report) -> None:
    """Kernels of few tokens let the next one begin, and wait for the one before."""
    names = "delta_step_kernel", "delta_norm_kernel", "mamba_step_kernel", "_gated_norm_kernel", "_history_kernel"
    found = [report[f"{name} long"][2] for name in names] + [
        report[f"_conv_kernel {one}"][2] for one in ("long", "single")
    ]
    assert found == [["let", "wait"]] * 7


@pytest.mark.long
def test_decodes_read_states_and_last_inputs_before_waiting(report: Report) -> None:
    """After the wait come the token's query, key, values and two gates alone; a program of the norm has one wait."""
    launches = report["delta_decode_kernel decodes"][2]
    wait = launches.index("wait")
    assert launches[0] == "let" and set(launches[1:wait]) == {"read"} and wait > 40
    assert launches[wait + 1 :] == ["read"] * 5
    assert report["delta_norm_kernel decodes"][2] == ["let", "wait", "wait"]


@pytest.mark.long
def test_numbers_of_fp4_are_made_where_they_are_multiplied(report: Report) -> None:
    """No register is spilled, words are copied 16 bytes at a time, and numbers are not exchanged between threads.

    One instruction scales two codes: of a tile of 64 outputs and 128 inputs, 32 in each thread of four warps. Items of
    few rows have a loop of their own; with eight warps, a group of four has 64 rows of gates and ups together.
    """
    experts = {name: words for name, (_, _, words) in report.items() if name.startswith("_expert_kernel")}
    assert len(experts) == 5
    for name, words in experts.items():
        tiles = 2 if name.endswith("gated True") and "tail 64" not in name else 1
        loops = [part for part in " ".join(words).split("exchange") if "product" in part]
        assert words.count("spill") == 0 and len(loops) == (1 if "tail 0" in name else 2), name
        assert [loop.count("scale") for loop in loops] == [32 * tiles] * len(loops), name
        # Rows are copied too; each tile has a word of exponents a row.
        assert words.count("copy 16") >= 2 * tiles and words.count("copy 4") >= tiles, name


@pytest.mark.long
def test_numbers_of_few_rows_stay_in_registers(report: Report) -> None:
    """Words are read 16 bytes at a time, and neither they nor exponents pass to another thread before the products."""
    experts = {name: words for name, (_, _, words) in report.items() if name.startswith("expert_few_rows_kernel")}
    assert len(experts) == 3
    for name, words in experts.items():
        until = words[: len(words) - words[::-1].index("product")]
        assert words.count("spill") == until.count("exchange") == 0, name
        # 16 bytes are 32 codes, of which one instruction scales two; words are read ahead of the loop, and in it.
        assert words.count("scale") == 8 * words.count("read 16") > 0, name


@pytest.mark.long
def test_words_of_one_row_are_read_before_down_waits(report: Report) -> None:
    """Words of two steps and all experts; gates and ups wait first, as they need the routing."""
    gates, down = (report[f"_{name}_fp4_row_kernel one row gated {name != 'down'}"][2] for name in ("gate_up", "down"))
    assert gates[:2] == ["wait", "let"] and down[0] == "let"
    assert down[: down.index("wait")].count("read 16") >= 8
    for words in (gates, down):
        assert words.count("spill") == 0 and words.count("scale") == 8 * words.count("read 16") > 0


@pytest.mark.long
def test_routes_of_long_prompts_use_tensor_cores_without_spills(report: Report) -> None:
    """The products of Hopper need 64 rows; the choice of that many at once would spill registers."""
    routes = [launches for name, (_, _, launches) in report.items() if name.startswith("_route_kernel")]
    assert len(routes) == 3
    for launches in routes:
        assert launches == ["let", "wait", *["product"] * 8]


@pytest.mark.long
def test_half_of_a_tiles_exponentials_run_beside_later_products(report: Report) -> None:
    """The compiler could move all of them before the wait for the values' products, or behind it: 5% slower. Those of
    heads of 64 are half as long, and less need to run beside them."""
    for name in (one for one in report if one.startswith("_prefill_kernel")):
        _, *parts = " ".join(report[name][2]).split("keys")
        assert len(parts) == 2  # groups of warps
        least = 24 if "head_size=128" in name else 12
        for part in parts:
            before, behind = (one.count("exp") for one in part.split("all")[:2])
            assert min(before, behind) >= least and before + behind < 72, (name, before, behind)


@pytest.mark.long
def test_attention_fits_the_shared_memory_of_other_gpus() -> None:
    report = report_of(Path(__file__).with_name("compile_for_others.py"))
    assert {capability: len(found) for capability, (_, found) in report.items()} == {"80": 6, "86": 13, "120": 6}
    for capability, (limit, found) in report.items():
        assert {name: size for name, size in found.items() if size > limit} == {}, capability
        # The rings are as long as they may be: none is left short for fear of the limit.
        assert max(found.values()) > 0.7 * limit, capability


@pytest.mark.long
def test_a_tag_is_written_after_all_words(report: Report) -> None:
    """All threads meet, then a fence orders their writes before the last one, also for the host."""
    *_, launches = report["_send_kernel tag"]
    assert launches[:3] == ["let", "wait", "read"] and launches[-3:] == ["barrier", "fence", "write"]
    assert launches.count("write") > 8 and launches.count("barrier") == launches.count("fence") == 1
