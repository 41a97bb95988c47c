"""The server's settings: from each source by the same words, beside the engine's, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from phonograph.cli.options import takes_serve_config
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError

VALUES: dict[str, tuple[str, Any]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "api_key": ("one, two", ("one", "two")),
    "enable_admin": ("true", True),
    "enable_tokenizer_info_endpoint": ("true", True),
    "admin_api_key": ("one, two", ("one", "two")),
    "served_model_name": ("a", ("a",)),
    "chat_template": ("chat.jinja", "chat.jinja"),
    "chat_format": ("HARMONY", "harmony"),
    "generation_config": ("NONE", "none"),
    "trust_request_chat_template": ("true", True),
    "return_tokens_as_token_ids": ("true", True),
    "enable_force_include_usage": ("true", True),
    "enable_per_request_metrics": ("true", True),
    "stream_interval": ("5", 5),
    "max_stored_responses": ("0", 0),
    "max_logprobs": ("-1", -1),
    "enable_auto_tool_choice": ("false", False),
    "tool_call_parser": ("HERMES", "hermes"),
    "reasoning_parser": ("None", "none"),
    "reasoning_key": ("REASONING", "reasoning"),
    "allowed_origins": ('["*"]', ("*",)),
    "allowed_methods": ("GET,POST", ("GET", "POST")),
    "allowed_headers": ("x-a", ("x-a",)),
    "allow_credentials": ("true", True),
    "root_path": ("/llm", "/llm"),
    "uds": ("/run/phonograph", "/run/phonograph"),
    "ssl_certfile": ("a.pem", "a.pem"),
    "ssl_keyfile": ("a.key", "a.key"),
    "ssl_ca_certs": ("b.pem", "b.pem"),
    "ssl_cert_reqs": ("2", 2),
    "default_chat_template_kwargs": ('{"enable_thinking": false}', {"enable_thinking": False}),
    "override_generation_config": ('{"temperature": 0.5}', {"temperature": 0.5}),
    "unknown_fields": ("WARN", "warn"),
    "max_queued_requests": ("0", 0),
    "max_queued_bytes": ("5000", 5000),
    "max_request_bytes": ("1000", 1000),
    "max_request_fields": ("100", 100),
    "max_request_token_ids": ("300", 300),
    "max_request_depth": ("32", 32),
    "max_request_prompts": ("3", 3),
    "max_request_messages": ("4", 4),
    "max_request_tools": ("0", 0),
    "max_request_stops": ("5", 5),
    "max_request_stop_token_ids": ("6", 6),
    "max_request_biases": ("7", 7),
    "header_timeout": ("2.5", 2.5),
    "body_timeout": ("1", 1.0),
    "request_timeout": ("1.5", 1.5),
    "shutdown_timeout": ("0", 0.0),
    "log_level": ("DEBUG", "debug"),
    "log_format": ("JSON", "json"),
    "enable_log_requests": ("true", True),
    "max_log_len": ("80", 80),
    "otlp_traces_endpoint": ("http://localhost:4318", "http://localhost:4318"),
    "uvicorn_log_level": ("WARNING", "warning"),
    "disable_uvicorn_access_log": ("true", True),
}


def on_the_command_line(*tokens: str) -> tuple[EngineConfig, ServerConfig]:
    app = App()

    @app.default
    @takes_serve_config
    def command(configs: tuple[EngineConfig, ServerConfig]) -> tuple[EngineConfig, ServerConfig]:
        return configs

    return app(list(tokens), exit_on_error=False, print_error=False, result_action="return_value")


def tokens(name: str, text: str) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if text == "false":
        return [flag.replace("--", "--no-", 1)]
    return [flag] if text == "true" else [flag, text]


def test_every_setting_is_tried_here() -> None:
    assert set(VALUES) == set(ServerConfig.model_fields)
    assert not set(VALUES) & set(EngineConfig.model_fields)


@pytest.mark.parametrize("name", VALUES)
def test_flag_environment_and_file_mean_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, value = VALUES[name]
    expected = ServerConfig(**{name: value})
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: demo\n{name}: {text if text.startswith('[') else repr(text)}\n")
    variable = {f"PHONOGRAPH_{name.upper()}": text}
    assert on_the_command_line("demo", *tokens(name, text))[1] == expected
    assert ServerConfig.load(flags={}, config_file=None, environ=variable) == expected
    assert ServerConfig.load(flags={}, config_file=file, environ={}) == expected
    # The engine's commands read the same file and environment, and leave the server's part to `serve`.
    assert EngineConfig.load(flags={}, config_file=file, environ=variable) == EngineConfig(model="demo")


def test_model_as_argument_flag_or_setting(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: here\nmax_num_seqs: 4\nport: 1\n")
    engine, server = on_the_command_line("demo", "--config", str(file), "--port", "2", "--block-size", "32")
    assert (engine.model, engine.max_num_seqs, engine.block_size, server.port) == ("demo", 4, 32, 2)
    assert on_the_command_line("--model", "demo")[0].model == "demo"
    assert on_the_command_line("--config", str(file))[0].model == "here"
    with pytest.raises(ConfigError, match="contradicts the argument 'demo'"):
        on_the_command_line("demo", "--model", "other")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"port": 70000}, "port=70000: must be a whole number >= 0 and <= 65535"),
        ({"request_timeout": -1}, "request_timeout=-1: must be seconds > 0, or null for no limit"),
        ({"request_timeout": "0"}, "request_timeout='0': must be seconds > 0, or null for no limit"),
        ({"shutdown_timeout": -1}, "shutdown_timeout=-1: must be seconds >= 0"),
        ({"api_key": [1]}, "must be texts"),
        ({"allowed_origins": "[1"}, "must be texts"),
        ({"prot": 1}, "prot=1: is not a setting; did you mean port?"),
        ({"uvicorn_log_level": "loud"}, "must be one of critical, error"),
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs=3: must be a whole number >= 0 and <= 2"),
        ({"unknown_fields": "drop"}, "unknown_fields='drop': must be one of error, warn"),
    ],
)
def test_values_that_do_not_work_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**settings)
    assert says in str(caught.value)


def test_a_mistyped_setting_of_the_server_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean shutdown_timeout"):
        EngineConfig.load(flags={"model": "demo"}, config_file=None, environ={"PHONOGRAPH_SHUTDOWN_TIMEOUTS": "1"})
    with pytest.raises(ConfigError, match="PHONOGRAPH_PORT"):
        ServerConfig.load(flags={}, config_file=None, environ={"PHONOGRAPH_PORT": "x"})
