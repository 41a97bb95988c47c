"""Refusals of the hub as one short line with a hint, for the model and for the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import errors

import phonograph.text.tokenizer as tokenizers
from phonograph.demo import MODEL_DIRECTORY
from phonograph.errors import ModelError
from phonograph.files import model_files
from phonograph.files.model_files import model_path
from phonograph.text.tokenizer import Tokenizer

LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


def _http(kind: type[Any], status: int) -> BaseException:
    """As the client raises it: a page of text, with the address and an id."""
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/api/models/a/b"))
    return kind(
        f"{status} Client Error. (Request ID: Root=1-abc)\n\n" + "Cannot access the repository. " * 40,
        response=response,
    )


CASES: list[tuple[BaseException, str]] = [
    (_http(errors.GatedRepoError, 403), f"is gated on the hub; accept its terms on its page there, and {LOG_IN}"),
    (_http(errors.RepositoryNotFoundError, 401), f"is not on the hub, or is private; check the name, or {LOG_IN}"),
    (_http(errors.RevisionNotFoundError, 404), "has no such revision on the hub; give a branch, tag or commit of it"),
    (_http(errors.DisabledRepoError, 403), "has been disabled on the hub; choose another"),
    (_http(errors.HfHubHTTPError, 401), f"cannot be read with this token (HTTP 401); {LOG_IN}"),
    (_http(errors.HfHubHTTPError, 503), "could not be read, the hub answered HTTP 503; try again later"),
    (errors.HFValidationError("Repo id must be " + "x" * 500), "is not a valid name on the hub; give owner/name"),
    (errors.LocalEntryNotFoundError("An error happened. " * 50), "could not be read: the hub cannot be reached"),
    (errors.OfflineModeIsEnabled("offline mode is enabled " * 20), "could not be read: the hub cannot be reached"),
    (httpx.ConnectError("[Errno -2] Name or service not known"), "could not be read: the hub cannot be reached"),
]


def _raising(error: BaseException, *, wrapped: bool) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        if not wrapped:
            raise error
        try:
            raise error
        except Exception as cause:
            raise OSError("There was a specific connection error when trying to load a/b. " * 20) from cause

    return call


@pytest.mark.parametrize(("error", "said"), CASES, ids=[type(error).__name__ for error, _ in CASES])
@pytest.mark.parametrize("wrapped", [False, True])
def test_errors_of_the_hub_are_one_short_line(
    error: BaseException, said: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", _raising(error, wrapped=wrapped))
    with pytest.raises(ModelError) as caught:
        model_path("owner/name", revision="v2")
    message = str(caught.value)
    assert message.startswith(f"model 'owner/name' at revision 'v2' is not a local folder and {said}")
    assert len(message) < 220 and "\n" not in message

    class Unreachable:
        from_pretrained = staticmethod(_raising(error, wrapped=wrapped))

    monkeypatch.setattr(tokenizers, "_tokenizer_class", lambda _: Unreachable)
    with pytest.raises(ModelError) as caught:
        Tokenizer.load("owner/name")
    message = str(caught.value)
    assert message.startswith(f"tokenizer 'owner/name' is not a local folder and {said}")
    assert len(message) < 220 and "\n" not in message


def test_other_errors_are_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", _raising(KeyError("x" * 5000), wrapped=False))
    with pytest.raises(
        ModelError, match=r"could not be read from the hub \('xxx.*\.\.\.\); give a local folder"
    ) as caught:
        model_path("owner/name")
    assert len(str(caught.value)) < 300


def test_a_name_like_those_of_the_package_is_answered_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: (_ for _ in ()).throw(ConnectionError()))
    with pytest.raises(ModelError, match=r"names like it: .*llama-3\.1-8b"):
        model_path("llama-3.1-9b")


@pytest.mark.parametrize("name", ["llama3.2", "llama3.2:1b", "qwen3", "Qwen/Qwen3", "/qwen3:1b"])
def test_a_name_of_ollamas_library_is_answered_with_the_form_of_a_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: (_ for _ in ()).throw(ConnectionError()))
    with pytest.raises(ModelError) as caught:
        model_path(name)
    assert str(caught.value).endswith(model_files._OLLAMA) == ("/" not in name)


@pytest.mark.parametrize("name", ["demmo", "Demo", "dem", "demo1"])
def test_a_name_like_demo_is_told_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = _http(errors.RepositoryNotFoundError, 401)
    monkeypatch.setattr("huggingface_hub.snapshot_download", _raising(error, wrapped=False))
    with pytest.raises(ModelError, match="did you mean 'demo', the model in the package\\?$"):
        model_path(name)


def test_a_folder_named_demo_does_not_hide_the_model_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    model_files._warn_of_folder.cache_clear()
    assert model_path("demo") == MODEL_DIRECTORY and not caplog.messages, "a folder without a model is no choice"
    (tmp_path / "demo" / "config.json").write_text("{}")
    for _ in range(2):
        assert model_path("demo") == MODEL_DIRECTORY
    assert caplog.messages == ["model 'demo' is the model in the package; the folder of that name here is './demo'"]
    assert model_path("./demo").resolve() == tmp_path / "demo"
