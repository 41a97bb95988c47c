"""Texts that name a model, so that a command can tell them from a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from phonograph.files.catalog import HUB_IDS
from phonograph.files.model_files import is_gguf, names_model


def test_models_and_other_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("folder", "config.json"), ("ggufs", "a.gguf"), ("other", "config.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("")
    (tmp_path / "b.gguf").write_text("")
    (tmp_path / "c.txt").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    named = ["demo", next(iter(HUB_IDS)), "~/folder", "~/ggufs", "~/b.gguf", str(tmp_path / "b.gguf")]
    assert [text for text in named if not names_model(text)] == []
    others = ["~/other", "~/c.txt", "~/d.gguf", "a demo", "Tom has 12 apples.gguf", ""]
    assert [text for text in others if names_model(text)] == []
    assert is_gguf(tmp_path / "b.gguf")
    assert not any(is_gguf(tmp_path / name) for name in ("c.txt", "d.gguf", "ggufs"))
