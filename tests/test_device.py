"""What is known of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from phonograph import device


def test_a_core_with_two_threads_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_SIBLINGS", str(tmp_path / "{}"))
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    assert device.num_cores() == 5
    assert device.num_whole_cores() == 5, "the system does not say"
    for core, siblings in enumerate(("0,4", "1,5", "2,6", "3,7", "0,4", "1,5")):
        (tmp_path / str(core)).write_text(siblings + "\n")
    assert device.num_whole_cores() == 4
