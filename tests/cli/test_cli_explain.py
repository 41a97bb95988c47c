"""`phonograph explain`: the chain from what is asked to what runs, for devices and backends that are not here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from commands import run

from phonograph.attention.reference.backend import ReferenceCapabilities
from phonograph.attention.selection import BUILT_IN, Registered
from phonograph.cli.app import main
from phonograph.core.host_resources import FreeMemory

GIB = 1024**3

# What each backend supports, and what the modes become there: from the table of docs/architecture.md, by hand.
BACKENDS = {
    "flash_attn 2": "ALWAYS",
    "flash_attn 3": "ALWAYS",
    "flash_attn 4": "ALWAYS",
    "flashinfer": "ALWAYS",
    "triton": "ALWAYS",
    "reference": "NEVER",
}
RESULTS = {
    "ALWAYS": {None: "FULL", "FULL": "FULL"},
    "NEVER": {None: "PIECEWISE", "FULL_DECODE_ONLY": "PIECEWISE", "FULL_AND_PIECEWISE": "PIECEWISE"},
}


def test_on_a_cpu_the_demo_model_fills_25_lines_and_one_says_why_no_gpu_kernel_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(capsys, "explain", "demo", "--device-name", "cpu").splitlines()
    assert len(lines) <= 25
    words = [" ".join(line.split()) for line in lines]
    assert "attention reference: the GPU kernels need a GPU (--matrix has each refusal)" in words
    assert "mode FULL: the default where support is ALWAYS" in words
    assert not any("refuses" in line for line in words)
    matrix = " ".join(run(capsys, "explain", "demo", "--device-name", "cpu", "--matrix").split())
    assert "triton refused: device cpu is a cpu device; it runs on cuda" in matrix


def test_a_refusal_of_another_backend_for_the_cpu_is_still_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(ReferenceCapabilities):
        name = "mine"

        def why_not(self, spec: object, device: object) -> list[str]:
            return ["dtype float32; it computes in float16"]

    mine = Registered(capabilities=Refusing(), loader=lambda: None, automatic=True)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("phonograph.attention.selection.registered_backends", lambda: [mine, *BUILT_IN])
    text = " ".join(run(capsys, "explain", "demo", "--device-name", "cpu").split())
    assert "each refusal) - mine refuses: dtype float32; it computes in float16 support" in text


def backend_flags(label: str) -> list[str]:
    name, _, version = label.partition(" ")
    return ["--attention-backend", name, *(["--flash-attn-version", version] if version else [])]


def test_full_on_flash_attention_2_names_the_two_launches(
    llama: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phonograph.attention.flash_attn.providers.find_spec", lambda name: None)
    assert main(["explain", *llama, *backend_flags("flash_attn 2"), "--cudagraph-mode", "FULL"]) == 0
    out = capsys.readouterr().out
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert ["mode", "FULL"] in [[word.strip() for word in line] for line in lines]
    words = " ".join(out.split())
    assert "a mixed graph has two launches, decodes and prefills" in words
    assert "folds the 4 query heads of a KV head into the query dimension" in words
    assert "cannot run here" in words


def test_full_where_mixed_graphs_do_not_work_says_why_it_is_not(run_json: Any, llama: list[str]) -> None:
    flags = [flag if flag != "h200" else "a100-80gb" for flag in llama]
    assert flags != llama
    (facts,) = run_json("explain", *flags, *backend_flags("flashinfer"), "--cudagraph-mode", "FULL")
    assert facts["mode"]["resolved"] == "FULL_AND_PIECEWISE"
    assert "FULL -> FULL_AND_PIECEWISE: support is UNIFORM_BATCH" in facts["mode"]["reasons"][-1]


@pytest.mark.parametrize("label", BACKENDS)
@pytest.mark.parametrize("mode", [None, "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_every_mode_on_every_backend(run_json: Any, llama: list[str], label: str, mode: str | None) -> None:
    flags = [*llama, *backend_flags(label), *([] if mode is None else ["--cudagraph-mode", mode])]
    level = BACKENDS[label]
    if (level, mode) == ("NEVER", "FULL"):
        assert main(["explain", *flags]) == 2
        return
    (facts,) = run_json("explain", *flags)
    assert facts["support"]["level"] == level
    assert facts["mode"]["asked"] == mode
    resolved = facts["mode"]["resolved"]
    assert resolved == RESULTS[level].get(mode, mode)
    assert (len(facts["mode"]["reasons"]) > 1) == (
        (mode is not None and mode != resolved) or (level == "NEVER" and not mode)
    )
    captures = facts["captures"]
    assert bool(captures["decode"]) == resolved.startswith("FULL")
    assert bool(captures["mixed"]) == (resolved == "FULL")
    assert bool(captures["piecewise"]) == resolved.endswith("PIECEWISE")


def test_memory_is_that_of_the_model(run_json: Any, llama: list[str]) -> None:
    (facts,) = run_json("explain", *llama, "--attention-backend", "triton", "--max-num-seqs", "100")
    memory = facts["memory"]
    per_layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096
    assert memory["weights"] == 2 * (32 * per_layer + 2 * 128256 * 4096 + 4096)
    assert memory["kv_block"] == 64 * 32 * 2 * 8 * 128 * 2
    assert memory["kv_cache"] == memory["num_kv_blocks"] * memory["kv_block"]
    assert memory["num_kv_tokens"] == 64 * memory["num_kv_blocks"]
    used = memory["weights"] + memory["graphs"] + memory["attention"] + memory["kv_cache"]
    assert 0.89 * 141 * GIB < used <= 0.9 * 141 * GIB
    assert facts["captures"]["decode"][-1] == 100 == facts["limits"]["max_num_seqs"]
    embedding_and_norms = 2 * (128256 * 4096 + (2 * 32 + 1) * 4096)
    assert sum(one["nbytes"] for one in facts["products"]) + embedding_and_norms == memory["weights"]


def test_products_name_format_bytes_and_kernels(llama: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *llama, "--quantization", "fp8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "FP8" in shown and "gate and up 32 x 28672 x 4096 (3.5 GiB)" in shown
    assert "to 256 rows by gemm_ring; more by torch._scaled_mm" in shown
    assert "bfloat16: lm_head 128256 x 4096 (1002.0 MiB)" in shown


@pytest.mark.parametrize(
    ("label", "batch", "mode", "graph"),
    [
        ("flash_attn 2", "1@65536,5@5", "FULL", "mixed[6 tokens, 256 slots]"),
        ("flash_attn 3", "1@65536,5@5", "FULL", "mixed[6 tokens, 256 slots]"),
        ("flash_attn 2", "1@9,1@70,1@3", "FULL", "decode[4 tokens, 4 slots]"),
        ("flash_attn 3", "8192@8192", "NONE", None),
    ],
)
def test_the_decision_for_a_batch(
    run_json: Any, llama: list[str], label: str, batch: str, mode: str, graph: str | None
) -> None:
    (facts,) = run_json("explain", *llama, *backend_flags(label), "--batch", batch)
    (decision,) = facts["batches"]
    assert (decision["mode"], decision["graph"]) == (mode, graph)
    assert decision["num_tokens"] == sum(int(part.split("@")[0]) for part in batch.split(","))
    assert decision["reason"]


def test_batches_are_ordered_decodes_first_and_classified(run_json: Any, llama: list[str]) -> None:
    (facts,) = run_json("explain", *llama, "--batch", "5@5, 1@9,7@20,1@9", "--batch", "1@1")
    first, second = facts["batches"]
    assert first["batch"] == "2 x 1@9, 5@5, 7@20"
    assert (first["num_decodes"], first["num_reqs"], first["num_tokens"]) == (2, 4, 14)
    assert first["padded_tokens"] == int(first["graph"].split("[")[1].split()[0]) >= 14
    assert (second["num_tokens"], second["padded_tokens"], second["graph"]) == (1, 1, "decode[1 token, 1 slot]")


def test_decodes_with_drafts_have_graphs(run_json: Any, llama: list[str]) -> None:
    flags = [*llama, *backend_flags("flash_attn 2"), "--num-speculative-tokens", "2", "--batch", "3@50,3@9"]
    (facts,) = run_json("explain", *flags, "--batch", "1@50,3@9", "--batch", "1@50,3@3")
    equal, ragged, mixed = facts["batches"]
    for batch in equal, ragged:
        assert batch["mode"] == "FULL" and "decodes with drafts" in batch["reason"] and batch["num_decodes"] == 2
    assert mixed["mode"] == "FULL" and mixed["graph"].startswith("mixed") and mixed["num_decodes"] == 1
    assert all(tokens in (2 * seqs, 3 * seqs) for tokens, seqs in facts["captures"]["drafting"])


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ("5@3", "has a sequence shorter than its query, which is part of it; 5@5 works"),
        ("0@3", "has no query token"),
        ("1@131073", "is longer than max_model_len=131072"),
        ("1@8,", "'' is not query length @ sequence length"),
        ("1x8", "'1x8' is not query length @ sequence length"),
        ("-1@8", "is not query length @ sequence length"),
        ("8000@8000,193@193", "has 8193 query tokens; a step has at most max_num_batched_tokens=8192"),
        (",".join(["1@1"] * 257), "has 257 sequences; a step has at most max_num_seqs=256"),
    ],
)
def test_a_batch_that_never_runs_is_refused(
    llama: list[str], batch: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *llama, f"--batch={batch}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err and "batch=" in captured.err


def test_a_narrow_terminal_shows_it_all(
    run_json: Any, llama: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "34")
    flags = [*llama, *backend_flags("flashinfer"), "--batch", "1@65536,5@5", "--max-num-seqs", "6"]
    assert main(["explain", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 34
    letters = "".join("".join(lines).split())
    (facts,) = run_json("explain", *flags)
    texts = [facts["support"]["reason"], *facts["attention"]["reasons"], *facts["notes"], facts["batches"][0]["reason"]]
    assert [text for text in texts if "".join(text.split()) not in letters] == []


def test_a_backend_that_this_machine_cannot_run_gets_a_hint(
    llama: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama[:2]
    assert main(["explain", *model, *backend_flags("flash_attn 2"), "--max-model-len", "64"]) == 2
    assert "--device-name explains it for another device than cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--device-name", "h2000"], "device_name='h2000': is not known; known are cpu"),
        (["--device-name", "h200", "--device", "cpu"], "device='cpu': contradicts device_name='h200'"),
        (["--device-name", "l4", "--max-model-len", "131072"], "max_model_len=131072"),
        (
            ["--device-name", "a10", "--max-model-len", "8192", "--num-kv-blocks", "100000"],
            "num_kv_blocks=100000: a KV cache of 781.2 GiB does not fit beside weights of 15.0 GiB",
        ),
    ],
)
def test_devices_that_do_not_fit(
    llama: list[str], flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *llama[:2], *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("h200", "at least 7.0 GiB more are needed; gpu_memory_utilization=0.95, a smaller model, fewer bits"),
        ("h100", "are needed, at least 54.5 GiB more; a smaller model, fewer bits"),
    ],
)
def test_weights_beyond_the_card_say_what_is_missing(
    device: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "llama-3.1-70b", "--device-name", device]) == 2
    error = capsys.readouterr().err
    assert "weights of 131.4 GiB" in error and says in error and "max_model_len" not in error


@pytest.mark.parametrize("flags", [[], ["--max-model-len", "auto"], ["--max-model-len", "-1"]])
def test_the_context_is_the_largest_that_fits(run_json: Any, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    monkeypatch.setattr("phonograph.engine.memory.free_memory", lambda: FreeMemory(8 * GIB))
    (facts,) = run_json("explain", "qwen3-0.6b", "--device", "cpu", *flags)
    context = facts["limits"]["max_model_len"]
    assert context == facts["memory"]["num_kv_tokens"] == 2 * GIB // facts["memory"]["kv_block"] * 16 < 40960
    assert facts["notes"][1] == (
        f"max_model_len {context}: the largest that fits the memory; the model's 40960 (max_position_embeddings 40960) "
        "needs a KV cache of 8.8 GiB (kv_cache_memory_bytes=9395240960)"
    )


def test_shared_prefixes_of_batches(run_json: Any, llama: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sharing = "8x1@9000/8199,24x1@9000/512,1@30"
    (facts,) = run_json("explain", *llama, "--batch", sharing, "--batch", "2x1@600/512", "--batch", "1@9000,9@9000")
    one, few, none = facts["batches"]
    runs = [(run["level"], run["first"], run["last"], run["begin"], run["end"]) for run in one["shared_prefixes"]]
    # Whole blocks of 64.
    assert runs == [(0, 0, 31, 0, 512), (1, 0, 7, 512, 8192)]
    assert few["shared_prefixes"] == none["shared_prefixes"] == []
    # 8 KV heads: a run of 32 rows of 4 heads in tiles of 64 rows, one of 8 rows, and a tile for each sequence.
    assert one["attention_units"] == {"shared": 8 * (2 + 1), "own": 8 * 33}
    assert few["attention_units"] == {"shared": 0, "own": 16}
    assert "attend them once" in facts["attention"]["shared_prefixes"]
    words = " ".join(run(capsys, "explain", *llama, "--batch", sharing, "--batch", "2x1@600/512").split())
    assert "sequences 0 to 7 attend keys 512 to 8192 once, then each its own" in words
    assert "24 shared units and 264 others in each layer" in words
    assert "no prefix is attended once: no backend does that here, or it would save too little" in words


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "decodes that share 256 keys or more in equal blocks attend them once, if that is faster"),
        (["--cascade-attention", "off"], "each decode reads a shared prefix: cascade_attention is off"),
        (["--device-name", "a100-80gb"], "compute capability 8.0 may not run all at once; those of 9 and 10 do"),
        (["--device-name", "a100-80gb", "--cascade-attention", "off"], "a shared prefix: cascade_attention is off"),
        (["--cascade-attention", "false"], "each decode reads a shared prefix: cascade_attention is off"),
        (["--batch-invariant"], "each decode reads a shared prefix: batch_invariant: results would depend"),
        (["--attention-backend", "flash_attn"], "with attention_backend decode=triton they attend it once"),
        (["--attention-backend", "flashinfer"], "with attention_backend decode=triton they attend it once"),
        (["--attention-backend", "prefill=flash_attn,decode=triton"], "attend them once, if that is faster"),
    ],
)
def test_which_backends_share_prefixes(
    llama: list[str], flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in " ".join(run(capsys, "explain", *llama, *flags).split())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch", "8x1@100/100"], "'8x1@100/100' shares more than the 99 tokens that it has computed"),
        (["--batch", "0x1@100"], "'0x1@100' has no sequence; 1@100 has one"),
        (["--cascade-attention", "always"], "cascade_attention='always': must be one of auto, off"),
    ],
)
def test_prefixes_that_cannot_be_shared(
    llama: list[str], flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *llama, *flags]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_the_context_length_follows_rope_scaling_of_overrides(
    run_json: Any, llama: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    overrides = ["--hf-overrides", json.dumps({"rope_scaling": yarn})]
    (facts,) = run_json("explain", *llama, *overrides)
    assert facts["limits"]["max_model_len"] == 32768
    source = "original_max_position_embeddings 8192 x factor 4.0 of yarn rope scaling"
    assert f"max_model_len 32768: {source}" in facts["notes"]
    assert main(["explain", *llama, *overrides, "--max-model-len", "32769"]) == 2
    assert f"exceeds the model's context length of 32768 ({source})" in " ".join(capsys.readouterr().err.split())
