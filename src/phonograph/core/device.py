"""Devices as the engine plans for them. They need not be in this machine (for `explain`)."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Properties of a device.

    Attributes:
        name: name of the card or of a known device.
        kind: "cpu" or "cuda".
        capability: CUDA compute capability.
        num_sms: number of multiprocessors.
        memory: bytes.
        free: bytes that an engine can have now on a GPU of this machine; None for a device that is not here.
    """

    name: str
    kind: str
    capability: tuple[int, int] = (0, 0)
    num_sms: int = 0
    memory: int = 0
    free: int | None = None


# Published figures.
KNOWN_DEVICES = {
    spec.name: spec
    for spec in (
        DeviceSpec(name="cpu", kind="cpu", memory=16 * GIB),
        DeviceSpec(name="a100-40gb", kind="cuda", capability=(8, 0), num_sms=108, memory=40 * GIB),
        DeviceSpec(name="a100-80gb", kind="cuda", capability=(8, 0), num_sms=108, memory=80 * GIB),
        DeviceSpec(name="a10", kind="cuda", capability=(8, 6), num_sms=72, memory=24 * GIB),
        DeviceSpec(name="rtx3090", kind="cuda", capability=(8, 6), num_sms=82, memory=24 * GIB),
        DeviceSpec(name="rtx4090", kind="cuda", capability=(8, 9), num_sms=128, memory=24 * GIB),
        DeviceSpec(name="l4", kind="cuda", capability=(8, 9), num_sms=58, memory=24 * GIB),
        DeviceSpec(name="l40s", kind="cuda", capability=(8, 9), num_sms=142, memory=48 * GIB),
        DeviceSpec(name="h100", kind="cuda", capability=(9, 0), num_sms=132, memory=80 * GIB),
        DeviceSpec(name="h200", kind="cuda", capability=(9, 0), num_sms=132, memory=141 * GIB),
        DeviceSpec(name="b200", kind="cuda", capability=(10, 0), num_sms=148, memory=180 * GIB),
        DeviceSpec(name="rtx5090", kind="cuda", capability=(12, 0), num_sms=170, memory=32 * GIB),
    )
}


def known_device(name: str, setting: str = "device") -> DeviceSpec:
    """Return the published properties of a device by its name, which `setting` gave.

    Raises:
        ConfigError: the device is not known.
    """
    spec = KNOWN_DEVICES.get(name.lower())
    if spec is None:
        raise ConfigError(setting, name, f"is not known; known are {', '.join(KNOWN_DEVICES)}")
    return spec
