"""Models from ModelScope, whose package is replaced by a folder of the same interface."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phonograph.config.engine_config import EngineConfig
from phonograph.demo import MODEL_DIRECTORY
from phonograph.errors import ConfigError, ModelError
from phonograph.files import hub_client
from phonograph.files.model_files import model_path
from phonograph.text.tokenizer import load_tokenizer

PACKAGE = """
import shutil
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).parent.parent
CALLS = []


def snapshot_download(model_id, revision, cache_dir, allow_patterns, ignore_patterns, local_files_only):
    CALLS.append((model_id, revision, local_files_only))
    source, target = HERE / "hub" / model_id, Path(cache_dir or HERE / "cache") / model_id
    if not source.is_dir() or (local_files_only and not target.is_dir()):
        raise ValueError(f"{model_id} is not there")
    target.mkdir(parents=True, exist_ok=True)
    for path in () if local_files_only else source.iterdir():
        allowed = any(fnmatch(path.name, one) for one in allow_patterns)
        if allowed and not any(fnmatch(path.name, one) for one in ignore_patterns):
            shutil.copy(path, target)
    return str(target)
"""
API = """
from modelscope import HERE


class HubApi:
    def get_model_files(self, model_id, revision=None):
        folder = HERE / "hub" / model_id
        return [{"Path": path.name, "Size": path.stat().st_size} for path in folder.iterdir()]
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a hub with the demo model as owner/demo, and GGUF files as owner/files."""
    package = tmp_path / "modelscope"
    (package / "hub").mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "hub/__init__.py").write_text("")
    (package / "hub/api.py").write_text(API)
    (tmp_path / "hub/owner").mkdir(parents=True)
    (tmp_path / "hub/owner/demo").symlink_to(MODEL_DIRECTORY)
    (tmp_path / "hub/owner/files").mkdir()
    (tmp_path / "hub/owner/files/m-Q4_0.gguf").write_text("GGUF")
    (tmp_path / "hub/owner/files/m-Q8_0.gguf").write_text("GGUF large")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("modelscope", "modelscope.hub", "modelscope.hub.api"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv(hub_client.USE_MODELSCOPE, "True")
    yield tmp_path
    for name in ("modelscope", "modelscope.hub", "modelscope.hub.api"):
        sys.modules.pop(name, None)


def test_a_model_and_its_tokenizer(hub: Path) -> None:
    config = model_path("owner/demo", revision="v1")
    assert config == hub / "cache/owner/demo" and not (config / "model.safetensors").exists()
    tokenizer = load_tokenizer(EngineConfig(model="owner/demo", download_dir=str(hub / "mine")))
    assert tokenizer is not None and tokenizer.has_chat_template
    weights = model_path("owner/demo", weights=True, download_dir=str(hub / "mine"))
    assert (weights / "model.safetensors").is_file() and weights == hub / "mine/owner/demo"
    calls = sys.modules["modelscope"].CALLS
    assert calls[0] == ("owner/demo", "v1", False) and {call[1] for call in calls[1:]} == {None}


def test_a_gguf_file(hub: Path) -> None:
    assert model_path("owner/files:q4_0") == hub / "cache/owner/files/m-Q4_0.gguf"
    assert [path.name for path in (hub / "cache/owner/files").iterdir()] == ["m-Q4_0.gguf"]
    with pytest.raises(ModelError, match="owner/files has no GGUF file of type 'F16'; it has Q4_0, Q8_0"):
        model_path("owner/files:F16")
    with pytest.raises(ModelError, match="owner/files has GGUF files; choose one by its type, such as owner/files:Q4"):
        model_path("owner/files")


def test_errors_name_modelscope(hub: Path) -> None:
    with pytest.raises(ModelError, match=r"could not be read from ModelScope \(owner/absent is not there\); give a"):
        model_path("owner/absent")


def test_a_disk_without_room(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ModelError, match=r"owner/demo needs 0.0 GiB, and .* has 0.0 GiB of free space"):
        model_path("owner/demo", weights=True, download_dir=str(hub / "mine"))
    model_path("owner/demo", download_dir=str(hub / "mine"))


def test_without_the_package_or_with_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hub_client.USE_MODELSCOPE, "maybe")
    with pytest.raises(ConfigError, match="PHONOGRAPH_USE_MODELSCOPE='maybe': must be true or false"):
        model_path("owner/demo")
    monkeypatch.setenv(hub_client.USE_MODELSCOPE, "1")
    monkeypatch.setattr(hub_client.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="PHONOGRAPH_USE_MODELSCOPE needs the package modelscope: pip install"):
        model_path("owner/demo")
    monkeypatch.setenv(hub_client.USE_MODELSCOPE, "0")
    assert not hub_client.uses_modelscope()
