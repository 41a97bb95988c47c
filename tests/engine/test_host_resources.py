"""Free memory and CPUs within control groups of both versions, in folders that imitate /proc and /sys."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from phonograph.config.engine_config import EngineConfig
from phonograph.core import host_resources
from phonograph.core.device import GIB, known_device
from phonograph.core.host_resources import FreeMemory, available_memory, free_memory, usable_cpus
from phonograph.engine.plan import make_plan
from phonograph.errors import MemoryLimitError
from phonograph.models.spec import read_model_spec

HOST, CORES = 64 * GIB, 16
V1_NONE = 2**63 - 4096

Machine = Callable[[str, dict[str, str]], None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Imitate a host of 64 GiB and 16 cores whose process is in these groups, with these files below /sys/fs/cgroup."""

    def make(groups: str, files: dict[str, str]) -> None:
        (tmp_path / "groups").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "sys" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(host_resources, "PROCESS_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_resources, "MOUNT", tmp_path / "sys")
    monkeypatch.setattr(host_resources.psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST))
    monkeypatch.setattr(host_resources, "num_cores", lambda: CORES)
    return make


def v2(folder: str, limit: object, used: int, cache: int = 0, cpu: str = "max 100000") -> dict[str, str]:
    """Return the files of a group of version 2."""
    stat = f"anon {used - cache}\nfile {cache + 77}\ninactive_anon 5\ninactive_file {cache}\nactive_file 77\n"
    files = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat, "cpu.max": f"{cpu}\n"}
    return {f"./{folder}/{name}": text for name, text in files.items()}


def v1(folder: str, limit: int, used: int, cache: int = 0, quota: int = -1) -> dict[str, str]:
    """Return the files of a group of version 1; its own cache is not that of the groups below it."""
    return {
        f"memory/{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"memory/{folder}/memory.usage_in_bytes": f"{used}\n",
        f"memory/{folder}/memory.stat": f"inactive_file 3\ntotal_inactive_anon 5\ntotal_inactive_file {cache}\n",
        f"cpu/{folder}/cpu.cfs_quota_us": f"{quota}\n",
        f"cpu/{folder}/cpu.cfs_period_us": "50000\n",
    }


OF_V1 = "12:cpuset:/tight\n9:name=systemd:/a/b\n4:memory:/a/b\n2:cpuacct,cpu:/a/b\n0::/a/b\n"


@pytest.mark.parametrize(
    ("groups", "files", "memory", "cpus"),
    [
        pytest.param("0::/\n", v2("", "max", 9 * GIB), FreeMemory(HOST), CORES, id="v2 without limits"),
        pytest.param("0::/\n", {}, FreeMemory(HOST), CORES, id="v2 of a host's root, which has no such files"),
        pytest.param(
            "0::/\n",
            v2("", 4 * GIB, 3 * GIB, GIB // 2, "250000 100000"),
            FreeMemory(GIB * 3 // 2, 4 * GIB),
            3,
            id="v2 in a namespace",
        ),
        pytest.param(
            "0::/a/b\n",
            v2("a/b", 8 * GIB, GIB, 0, "400000 100000") | v2("a", 6 * GIB, 5 * GIB, GIB // 4, "150000 100000"),
            FreeMemory(GIB * 5 // 4, 6 * GIB),
            2,
            id="v2, parent is tighter",
        ),
        pytest.param(
            "0::/a/b\n",
            v2("a/b", 8 * GIB, 7 * GIB, 0, "20000 100000")
            | v2("a", 60 * GIB, 7 * GIB, 0, "300000 100000")
            | v2("", "max", 9 * GIB),
            FreeMemory(GIB, 8 * GIB),
            1,
            id="v2, child is tighter",
        ),
        pytest.param("0::/\n", v2("", 2 * HOST, GIB), FreeMemory(HOST), CORES, id="v2, host has less free"),
        pytest.param("0::/\n", v2("", GIB, GIB + 4096), FreeMemory(0, GIB), CORES, id="v2, used up"),
        pytest.param(
            OF_V1, v1("a/b", V1_NONE, GIB) | v1("tight", GIB, 0, 0, 1), FreeMemory(HOST), CORES, id="v1, none"
        ),
        pytest.param(
            OF_V1,
            v1("a/b", 8 * GIB, GIB, 0, 300_000) | v1("a", 5 * GIB, 4 * GIB, GIB, 120_000) | v1("", V1_NONE, 9 * GIB),
            FreeMemory(2 * GIB, 5 * GIB),
            3,
            id="v1, parent is tighter",
        ),
        pytest.param(
            OF_V1.replace("/a/b", "/docker/0123"),
            # An engine of containers inside of this one has a folder of the same name.
            v1("", 4 * GIB, 3 * GIB, GIB // 2, 100_000) | v1("docker", GIB, 0, 0, 10_000),
            FreeMemory(GIB * 3 // 2, 4 * GIB),
            2,
            id="v1, path of the host",
        ),
        pytest.param(
            "0::/../other\n",
            v2("", 4 * GIB, GIB) | v2("../other", 2 * GIB, GIB),
            FreeMemory(3 * GIB, 4 * GIB),
            CORES,
            id="v2, outside of the namespace",
        ),
        pytest.param("nonsense\n\n4:memory\n::\n", v2("", "max", 0), FreeMemory(HOST), CORES, id="garbage of groups"),
        pytest.param(
            "0::/a\n",
            {"a/memory.max": "a lot\n", "a/cpu.max": "-5 x y\n", "memory.max": "", "cpu.max": "100000 0\n"},
            FreeMemory(HOST),
            CORES,
            id="garbage of limits",
        ),
        pytest.param(
            "0::/\n",
            {"memory.max": f"{GIB}\n", "memory.current": "x\n", "memory.stat": "inactive_file\n\n7 8 9\n"},
            FreeMemory(GIB, GIB),
            CORES,
            id="a limit without usage",
        ),
    ],
)
def test_control_groups(machine: Machine, groups: str, files: dict[str, str], memory: FreeMemory, cpus: int) -> None:
    machine(groups, files)
    assert free_memory() == memory and available_memory() == memory.available
    assert usable_cpus() == cpus


def test_files_that_cannot_be_read(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("0::/a\n", v2("", 4 * GIB, GIB))
    assert free_memory() == FreeMemory(3 * GIB, 4 * GIB)
    (tmp_path / "sys/a/memory.max").mkdir(parents=True)
    (tmp_path / "sys/a/cpu.max").write_bytes(b"\xff\xfe1 2")
    (tmp_path / "sys/memory.stat").unlink()
    assert free_memory() == FreeMemory(3 * GIB, 4 * GIB) and usable_cpus() == CORES
    monkeypatch.setattr(host_resources, "PROCESS_GROUPS", tmp_path / "nowhere")
    assert free_memory() == FreeMemory(HOST) and usable_cpus() == CORES


def test_an_affinity_mask_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert host_resources.num_cores() == allowed
    assert 1 <= usable_cpus() <= host_resources.num_cores() and available_memory() > 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert host_resources.num_cores() == 2 and usable_cpus() <= 2


def test_the_cache_of_a_cpu_engine_keeps_to_the_limit_and_the_plan_names_it(machine: Machine) -> None:
    config = EngineConfig(model="demo", device="cpu", enforce_eager=True, max_num_seqs=1000)
    limit = 3 * GIB // 2

    def plan(used: int) -> tuple[int, str]:
        machine("0::/\n", v2("", limit, used))
        found = make_plan(config, read_model_spec("demo"), known_device("cpu"))
        return found.memory.kv_cache, " ".join(found.notes)

    cache, notes = plan(GIB // 2)
    assert GIB // 4 < cache <= GIB // 2
    assert "half of the free memory below the limit of 1.5 GiB of the control group (container), 2 GiB at most" in notes
    with pytest.raises(
        MemoryLimitError, match=r"do not fit the 0\.0 GiB of free memory below the limit of 1\.5 GiB of the control"
    ):
        plan(limit - (4 << 20))
    machine("0::/\n", v2("", "max", GIB))
    found = make_plan(config, read_model_spec("demo"), known_device("cpu"))
    assert found.memory.kv_cache > GIB and "half of the free memory of this machine, 2 GiB" in " ".join(found.notes)
