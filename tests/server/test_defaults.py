"""Defaults that come with a model or from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import Server

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError, ModelError
from phonograph.files.model_files import model_path
from phonograph.server.http.run import serve, try_chat
from phonograph.server.openai.defaults import chat_template, sampling_defaults
from phonograph.text.tokenizer import Tokenizer


def test_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    engine = EngineConfig(model=str(tmp_path))
    assert sampling_defaults(engine, ServerConfig()) == {}
    content = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "do_sample": True, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert sampling_defaults(engine, ServerConfig()) == {"temperature": 0.6, "top_p": 0.9}
    assert sampling_defaults(engine, ServerConfig(generation_config="none")) == {}
    for bad in ("{", "[]", '{"temperature": -1}'):
        (tmp_path / "generation_config.json").write_text(bad)
        with pytest.raises(ModelError, match="--generation-config none"):
            sampling_defaults(engine, ServerConfig())


def test_sampling_defaults_of_the_server_replace_those_of_the_model(tmp_path: Path) -> None:
    engine = EngineConfig(model=str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    override = {"temperature": 0.1, "top_k": 7}
    expected = {"temperature": 0.1, "top_p": 0.9, "top_k": 7}
    assert sampling_defaults(engine, ServerConfig(override_generation_config=override)) == expected
    for choice in ("none", "vllm"):
        server = ServerConfig(override_generation_config=override, generation_config=choice)
        assert sampling_defaults(engine, server) == override
    for bad, said in (
        ({"temprature": 1}, "has 'temprature'; known are temperature, top_k, top_p, min_p, repetition_penalty"),
        ({"temperature": -1}, "has temperature=-1: must be"),
        ({"max_new_tokens": 5}, "known are temperature"),
    ):
        with pytest.raises(ConfigError) as caught:
            sampling_defaults(engine, ServerConfig(override_generation_config=bad))
        assert str(caught.value).startswith("override_generation_config=") and said in str(caught.value)


def test_variables_of_the_template_by_default(serve_with: Callable[..., Server]) -> None:
    template = "{{ kind | default('plain') }} {{ size | default('small') }}"
    server = serve_with(chat_template=template, default_chat_template_kwargs={"kind": "thin", "size": "large"})
    chat: dict[str, object] = {"messages": [{"role": "user", "content": "a"}]}

    def text(**more: object) -> str:
        tokens = server.post("/tokenize", {**chat, **more}).json()["tokens"]
        return server.post("/detokenize", {"tokens": tokens}).json()["prompt"]

    assert text() == "thin large"
    assert text(chat_template_kwargs={"kind": "thick"}) == "thick large"


def test_a_format_without_a_template_has_no_variables_of_one() -> None:
    server = ServerConfig(chat_format="harmony", default_chat_template_kwargs={"a": 1})
    with pytest.raises(ConfigError, match="default_chat_template_kwargs=.*chat_format=harmony has no template"):
        chat_template(server)


def test_a_chat_template_by_file_or_by_itself(tmp_path: Path) -> None:
    assert chat_template(ServerConfig()) is None
    assert chat_template(ServerConfig(chat_template="{{ messages }}")) == "{{ messages }}"
    (tmp_path / "chat.jinja").write_text("é{{ messages }}", encoding="utf-8")
    assert chat_template(ServerConfig(chat_template=str(tmp_path / "chat.jinja"))) == "é{{ messages }}"
    with pytest.raises(ConfigError, match="nor a readable file"):
        chat_template(ServerConfig(chat_template=str(tmp_path / "absent")))


def test_a_broken_chat_template_is_found_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "broken.jinja"
    file.write_text("{% for message in messages %}\n{{ message.content }\n{% endfor %}")
    with pytest.raises(ConfigError, match=r"chat_template='.*broken.jinja': has a syntax error in line 2"):
        chat_template(ServerConfig(chat_template=str(file)))
    with pytest.raises(ConfigError, match=r"chat_template='{% if %}': has a syntax error in line 1"):
        chat_template(ServerConfig(chat_template="{% if %}"))
    # What transformers adds to Jinja, and what is refused only for some messages.
    for fine in ("{% generation %}{% endgeneration %}", "{{ raise_exception('no') }}"):
        assert chat_template(ServerConfig(chat_template=fine)) == fine


def test_a_server_with_a_broken_chat_template_does_not_start() -> None:
    server = ServerConfig(chat_template="{% if %}", port=0)
    with pytest.raises(ConfigError, match="chat_template"):
        serve(EngineConfig(model="demo"), server, lambda *_: None, lambda _: None)


def test_a_model_without_a_tokenizer_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = ServerConfig(chat_template="{% if %}", port=0)
    with pytest.raises(ModelError, match="has no tokenizer, which a server needs; give one with --tokenizer"):
        serve(EngineConfig(model=str(tmp_path)), server, lambda *_: None, lambda _: None)


def test_a_chat_template_that_fails_when_it_runs_is_logged_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(model_path("demo"))
    serving: Any = SimpleNamespace(tokenizer=tokenizer, harmony=None)
    serving.engine = SimpleNamespace(facts=SimpleNamespace(pooler=None))
    for template in ("{{ messages[0].absent.name }}", "{{ raise_exception('no') }}", None):
        serving.chat_template = template
        try_chat(serving)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("chats may fail: ") and "absent" in first and second.endswith("no")
