"""Memory and CPUs of this machine that this process can use, within the limits of its control groups.

A container's limits are those of a control group. psutil, `os.cpu_count` and torch do not read them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from phonograph.core.device import GIB

PROCESS_GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of limit and usage, and the field of `memory.stat` for the page cache to reclaim: of version 2, and of 1."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that this process can still use.

    Attributes:
        available: bytes.
        limit: bytes of the control group that leaves the least, or None if the machine has less free.
    """

    available: int
    limit: int | None = None

    @property
    def place(self) -> str:
        """Bound of the memory, to follow "free memory" in a message."""
        if self.limit is None:
            return "of this machine"
        return f"below the limit of {self.limit / GIB:.1f} GiB of the control group (container)"


def available_memory() -> int:
    """Return the bytes that this process can still use."""
    return free_memory().available


def free_memory() -> FreeMemory:
    """Return the memory that this process can still use, with the limit that bounds it.

    This is the least of what the machine has and of what each control group has below its limit. Pages of files that
    were not read lately are free, as the kernel reclaims them first.
    """
    free = FreeMemory(psutil.virtual_memory().available)
    for group in _groups("memory"):
        for limit_file, usage_file, field in _MEMORY_FILES:
            limit = _number(_text(group / limit_file))  # Without a limit, version 1 has nearly 2**63.
            if limit is None:
                continue
            cache = re.search(rf"^{field} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
            usage = (_number(_text(group / usage_file)) or 0) - (int(cache[1]) if cache else 0)
            available = max(0, limit - max(0, usage))
            if available < free.available:
                free = FreeMemory(available, limit)
    return free


def num_cores() -> int:
    """Return the CPUs that this process may run on, without quotas."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cpus() -> int:
    """Return the CPUs whose time this process can use: `num_cores`, up to the quotas of its control groups."""
    cpus = num_cores()
    for group in _groups("cpu"):
        of_version_1 = f"{_text(group / 'cpu.cfs_quota_us')} {_text(group / 'cpu.cfs_period_us')}"
        for text in (_text(group / "cpu.max"), of_version_1):
            quota, period, *_ = (*map(_number, text.split()), None, None)
            if quota and period:
                cpus = min(cpus, -(-quota // period))
    return cpus


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from its own group up to the mounted root."""
    for line in _text(PROCESS_GROUPS).splitlines():
        _, _, names_and_path = line.partition(":")
        names, _, path = names_and_path.partition(":")
        if names and controller not in names.split(","):
            continue
        mount = MOUNT / controller if names else MOUNT  # Version 2 has no names and one tree.
        group = mount / path.lstrip("/")
        if ".." in group.parts or not os.path.isdir(group):
            group = mount  # The path is that of another namespace.
        yield group
        while group != mount:
            group = group.parent
            yield group


def _text(path: Path) -> str:
    """Return the text of a file, or none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _number(text: str) -> int | None:
    """Return a number of bytes or microseconds, or None for "max", -1 or another text."""
    return int(text) if text.strip().isdecimal() else None
