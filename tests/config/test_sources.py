"""Python, flags, YAML and environment mean the same by the same words, in their order of precedence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import App
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phonograph.cli.options import takes_engine_config
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.config.sources import OTHER_VARIABLES
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphMode

words = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12).filter(
    lambda text: text.lower() not in ("null", "~")
)
counts = st.integers(1, 10**12)
sizes = st.lists(st.integers(1, 4096), min_size=1, max_size=5, unique=True)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "model": words,
    "tokenizer": words,
    "revision": words,
    "skip_tokenizer_init": st.booleans(),
    "tokenizer_revision": words,
    "download_dir": words,
    "trust_remote_code": st.booleans(),
    "hf_overrides": st.dictionaries(
        st.sampled_from(["vocab_size", "hidden_act", "rope_scaling"]),
        st.one_of(
            st.integers(),
            st.booleans(),
            st.none(),
            words,
            st.floats(allow_nan=False, allow_infinity=False),
            st.fixed_dictionaries({"rope_type": words, "factor": st.floats(1, 8), "lists": st.lists(st.integers())}),
        ),
        max_size=2,
    ),
    "convert": st.sampled_from(["auto", "none", "EMBED"]),
    "model_impl": st.sampled_from(["auto", "TRANSFORMERS", "vllm"]),
    "load_format": st.sampled_from(["auto", "safetensors", "DUMMY"]),
    "quantization": st.sampled_from(["gptq", "AWQ", "compressed-tensors", "fp8"]),
    "quantize_lm_head": st.just("fp8"),
    "dtype": st.sampled_from(["auto", "float32", "Float16", "bfloat16"]),
    "cpu_products": st.sampled_from(["auto", "INT4", "float32"]),
    "device": st.sampled_from(["auto", "cpu", "CUDA"]),
    "tensor_parallel_size": counts,
    "decode_context_parallel_size": counts,
    "seed": st.integers(0, 2**63 - 1),
    "max_model_len": st.one_of(counts, st.sampled_from(["auto", "AUTO", -1])),
    "max_num_seqs": st.integers(1, 1 << 17),
    "max_num_batched_tokens": st.integers(1, 1 << 20),
    "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    "structured_outputs_strictness": st.sampled_from(["strict", "relaxed"]),
    "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]),
    "num_speculative_tokens": st.integers(0, 8),
    "data_parallel_size": st.integers(1, 64),
    "kv_events_config": st.just({"enable_kv_cache_events": False}),
    "speculative_config": st.just({"num_speculative_tokens": 3}),
    "block_size": counts,
    "kv_cache_dtype": st.sampled_from(["auto", "fp8", "fp8_e4m3", "fp8_E5M2"]),
    "kv_cache_layout": st.sampled_from(["NHD", "hnd"]),
    "kv_cache_memory_bytes": counts,
    "num_kv_blocks": counts,
    "gpu_memory_utilization": st.floats(0, 1, exclude_min=True),
    "enable_prefix_caching": st.booleans(),
    "state_checkpoint_share": st.floats(0, 1, exclude_min=True),
    "state_checkpoint_interval": st.integers(0, 1 << 20),
    "enable_sleep_mode": st.booleans(),
    "profile_dir": words,
    "attention_backend": st.sampled_from(["torch", "triton", "flash_attn", "flashinfer"]),
    "flash_attn_version": st.sampled_from([2, 3, 4]),
    "cascade_attention": st.sampled_from(["auto", "OFF", "true"]),
    "cudagraph_mode": st.sampled_from([*GraphMode.__members__, "full", "none"]),
    "cudagraph_capture_sizes": st.one_of(st.integers(1, 4096), sizes),
    "max_cudagraph_capture_size": counts,
    "enforce_eager": st.booleans(),
    "verify_graphs": st.booleans(),
    "batch_invariant": st.booleans(),
    "expert_load_metrics": st.booleans(),
    "compilation_config": st.fixed_dictionaries({}, optional={"cudagraph_mode": st.sampled_from(["FULL", "none"])}),
}
some_settings = st.builds(
    lambda model, rest: {"model": model, **rest},
    words,
    st.lists(st.sampled_from(sorted(SETTINGS)), max_size=5, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: SETTINGS[name] for name in names})
    ),
)


def as_text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def parsed_by_the_command_line(tokens: list[str]) -> EngineConfig:
    app = App()

    @app.default
    @takes_engine_config
    def command(config: EngineConfig, *, twice: bool = False) -> EngineConfig:
        return config

    return app(tokens, exit_on_error=False, print_error=False, result_action="return_value")


def tokens_for(given_settings: dict[str, Any]) -> list[str]:
    tokens: list[str] = []
    for name, value in given_settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            tokens.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            tokens.append(f"--{flag}={as_text(value)}")
    return tokens


def result_of(make: Any) -> EngineConfig | str:
    """Return the configuration, or the setting that was refused."""
    try:
        return make()
    except ConfigError as error:
        return error.setting


def test_every_setting_is_tried_here() -> None:
    assert set(SETTINGS) == set(EngineConfig.model_fields)


@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=some_settings)
def test_the_same_settings_from_each_source_make_the_same_configuration(
    chosen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in EngineConfig.model_fields:
        monkeypatch.delenv(f"PHONOGRAPH_{name.upper()}", raising=False)
    python = result_of(lambda: EngineConfig(**chosen))
    flags = result_of(lambda: parsed_by_the_command_line(tokens_for(chosen)))
    environ = {f"PHONOGRAPH_{name.upper()}": as_text(value) for name, value in chosen.items()}
    environment = result_of(lambda: EngineConfig.load(flags={}, config_file=None, environ=environ))
    file = tmp_path / "engine.yaml"
    file.write_text(yaml.safe_dump(chosen, allow_unicode=True), encoding="utf-8")
    yaml_file = result_of(lambda: EngineConfig.load(flags={}, config_file=file, environ={}))
    assert python == flags == environment == yaml_file


def load(text: str, tmp_path: Path, *, flags: dict[str, Any] | None = None, **environ: str) -> EngineConfig:
    file = tmp_path / "engine.yaml"
    file.write_text(text, encoding="utf-8")
    return EngineConfig.load(flags=flags or {}, config_file=file, environ=environ)


def test_flags_go_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    text = "model: demo\nmax_num_seqs: 1\nblock_size: 1\nmax_model_len: 1\n"
    config = load(text, tmp_path, flags={"max_num_seqs": "3"}, PHONOGRAPH_MAX_NUM_SEQS="2", PHONOGRAPH_BLOCK_SIZE="2")
    assert (config.max_num_seqs, config.block_size, config.max_model_len) == (3, 2, 1)


def test_null_in_a_flag_unsets_the_value_of_the_file(tmp_path: Path) -> None:
    text = "model: demo\nnum_kv_blocks: 8\n"
    config = load(text, tmp_path, flags={"num_kv_blocks": "null", "kv_cache_memory_bytes": "64"})
    assert (config.num_kv_blocks, config.kv_cache_memory_bytes) == (None, 64)


@pytest.mark.parametrize("auto", ["auto", "-1"])
def test_an_automatic_context_in_a_flag_goes_before_the_number_of_the_file(auto: str, tmp_path: Path) -> None:
    text = "model: demo\nmax_model_len: 64\n"
    assert load(text, tmp_path, flags={"max_model_len": auto}).max_model_len is None
    assert load(text, tmp_path, PHONOGRAPH_MAX_MODEL_LEN=auto).max_model_len is None
    # A value that begins with a dash is no flag.
    assert parsed_by_the_command_line(["demo", "--max-model-len", auto]).max_model_len is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1m", 10**6),
        ("1M", 2**20),
        ("2G", 2**31),
        ("1.5t", 15 * 10**11),
    ],
)
def test_numbers_have_suffixes_in_every_source(text: str, number: int, tmp_path: Path) -> None:
    assert load(f"model: demo\nkv_cache_memory_bytes: {text}\n", tmp_path).kv_cache_memory_bytes == number
    assert load("model: demo", tmp_path, flags={"kv_cache_memory_bytes": text}).kv_cache_memory_bytes == number
    assert load("model: demo", tmp_path, PHONOGRAPH_KV_CACHE_MEMORY_BYTES=text).kv_cache_memory_bytes == number


@pytest.mark.parametrize("text", ["1.5K", "k", "1kb", "0.0001k", "1 k", "-1k", "1P"])
def test_other_suffixes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes='.*': must be a whole number >= 1"):
        EngineConfig(model="demo", kv_cache_memory_bytes=text)


@pytest.mark.parametrize("null", ["null", "~", "Null"])
def test_null_is_the_default_of_every_setting_in_every_source(null: str, tmp_path: Path) -> None:
    names = [name for name in EngineConfig.model_fields if name != "model"]
    default = EngineConfig(model="demo")
    assert load("model: demo\n" + "".join(f"{name}: {null}\n" for name in names), tmp_path) == default
    assert load("model: demo\n", tmp_path, flags=dict.fromkeys(names, null)) == default
    assert load("model: demo\n", tmp_path, **{f"PHONOGRAPH_{name.upper()}": null for name in names}) == default
    file = "model: demo\ndtype: float16\nenable_prefix_caching: false\n"
    assert load(file, tmp_path, flags={"dtype": null}, PHONOGRAPH_ENABLE_PREFIX_CACHING=null) == default
    with pytest.raises(ConfigError, match="model is required"):
        load(f"model: {null}\n", tmp_path)
    with pytest.raises(ConfigError, match="dtypo=.*did you mean dtype"):
        load(f"model: demo\ndtypo: {null}\n", tmp_path)
    path = tmp_path / "serve.yaml"
    path.write_text("".join(f"{name}: {null}\n" for name in ServerConfig.model_fields), encoding="utf-8")
    assert ServerConfig.load(flags={}, config_file=path, environ={}) == ServerConfig()


def test_precedence_holds_inside_compilation_config(tmp_path: Path) -> None:
    text = "model: demo\ncudagraph_mode: FULL\ncudagraph_capture_sizes: [1, 2]\n"
    config = load(text, tmp_path, flags={"compilation_config": '{"cudagraph_mode": "PIECEWISE"}'})
    assert config.cudagraph_mode is GraphMode.PIECEWISE and config.cudagraph_capture_sizes == (1, 2)
    text = "model: demo\ncompilation_config: {cudagraph_mode: FULL}\n"
    config = load(text, tmp_path, flags={"cudagraph_mode": "NONE"})
    assert config.cudagraph_mode is GraphMode.NONE


def test_each_value_remembers_its_source(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(
        "# ours\nmodel: demo\nblock_size: 16\ncudagraph_mode: null\ncompilation_config: {cudagraph_mode: FULL}"
    )
    flags = {"enable_prefix_caching": False, "max_num_seqs": None}
    environ = {"PHONOGRAPH_BLOCK_SIZE": "32", "HOME": "/"}
    config, sources = EngineConfig.load_with_sources(flags=flags, config_file=file, environ=environ)
    assert {name: (given.source, given.where) for name, given in sources.items()} == {
        "model": ("file", f"{file}:2"),
        "block_size": ("environment", "PHONOGRAPH_BLOCK_SIZE"),
        "cudagraph_mode": ("file", f"{file}:5"),
        "enable_prefix_caching": ("flag", "--no-enable-prefix-caching"),
    }
    assert config == EngineConfig(model="demo", block_size=32, cudagraph_mode="FULL", enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("text", "environ", "setting", "says"),
    [
        ("model: demo\nmax_num_seqs: 0", {}, "max_num_seqs", "engine.yaml:2"),
        ("model: demo\nmax-num-seqs: 8", {}, "max-num-seqs", "did you mean max_num_seqs?"),
        ("model: demo", {"PHONOGRAPH_MAX_SEQS": "8"}, "max_seqs", "PHONOGRAPH_MAX_SEQS"),
        ("model: demo", {"PHONOGRAPH_SEED": ""}, "seed", "PHONOGRAPH_SEED"),
        ("model: demo", {"PHONOGRAPH_COMPILATION_CONFIG": "{"}, "compilation_config", "PHONOGRAPH_COMPILATION_CONFIG"),
        ("model: demo\nmodel: other", {}, "config", "model is set twice"),
        ("compilation_config: {cudagraph_mode: FULL, cudagraph_mode: NONE}", {}, "config", "is set twice"),
        ("model: [demo", {}, "config", "is not valid YAML"),
        ("- model", {}, "config", "one mapping of settings"),
        ("model: &a [*a]", {}, "config", "is not valid YAML"),
        ("model: \x07", {}, "config", "is not valid YAML"),
    ],
)
def test_errors_name_the_setting_and_where_it_was_given(
    text: str, environ: dict[str, str], setting: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, tmp_path, **environ)
    assert caught.value.setting == setting
    assert says in str(caught.value)


def test_spellings_of_yaml_scalars(tmp_path: Path) -> None:
    config = load("model: 007\nmax_num_seqs: 010\ngpu_memory_utilization: 1e-1\nenforce_eager: on\nseed: ~", tmp_path)
    assert config == EngineConfig(model="007", max_num_seqs=10, gpu_memory_utilization=0.1, enforce_eager=True)


def test_a_file_that_is_empty_or_cannot_be_read(tmp_path: Path) -> None:
    assert load("# nothing\n", tmp_path, PHONOGRAPH_MODEL="demo") == EngineConfig(model="demo")
    (tmp_path / "bytes.yaml").write_bytes(b"model: \xff\xfe")
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "bytes.yaml"):
        with pytest.raises(ConfigError, match="config="):
            EngineConfig.load(flags={}, config_file=path, environ={})


def test_variables_of_scripts_are_no_settings() -> None:
    environ = {"PHONOGRAPH_MODEL": "demo", **dict.fromkeys(OTHER_VARIABLES, "x")}
    assert EngineConfig.load(flags={}, config_file=None, environ=environ) == EngineConfig(model="demo")


def test_the_process_environment_is_not_read_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHONOGRAPH_MAX_NUM_SEQS", "3")
    assert EngineConfig(model="demo").max_num_seqs is None
    assert EngineConfig.load(flags={"model": "demo"}, config_file=None, environ={}).max_num_seqs is None


def test_overrides_in_yaml_have_the_types_of_json(tmp_path: Path) -> None:
    text = (
        "model: demo\nhf_overrides:\n  rope_theta: 1e6\n  hidden_act: silu\n  eos_token_id: [1, 2]\n  rope_scaling:\n"
    )
    text += "    {rope_type: yarn, factor: 4, truncate: false, beta_fast: null}\n"
    expected = {
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "eos_token_id": [1, 2],
        "rope_scaling": {"rope_type": "yarn", "factor": 4, "truncate": False, "beta_fast": None},
    }
    assert load(text, tmp_path).hf_overrides == expected
    flags = {"hf_overrides": json.dumps(expected)}
    assert load("model: demo\n", tmp_path, flags=flags).hf_overrides == expected
    for wrong in ("[1]", "rope_theta", '{"rope_theta": 1'):
        with pytest.raises(ConfigError, match="hf_overrides=.*must be a JSON object such as"):
            EngineConfig(model="demo", hf_overrides=wrong)
