"""Selection: who is chosen, who refuses, and that every step says why."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from phonograph.attention import selection as module
from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionBackend, Capabilities
from phonograph.attention.flash_attn import providers
from phonograph.attention.reference.backend import ReferenceBackend
from phonograph.attention.selection import Registered, load, select
from phonograph.core.device import DeviceSpec, known_device
from phonograph.errors import BackendError, ConfigError
from phonograph.graphs.modes import GraphSupport, Support

CPU, A100, H100, B200 = map(known_device, ("cpu", "a100-80gb", "h100", "b200"))
HALF = AttentionSpec(
    num_query_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=16
)
FLOAT = replace(HALF, dtype="float32", kv_cache_dtype="float32")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("spec", "device", "label"),
    [
        (FLOAT, CPU, "reference"),
        (HALF, CPU, "reference"),
        (HALF, H100, "triton"),
        (HALF, A100, "triton"),
        (FLOAT, H100, "reference"),
        (replace(HALF, block_size=4), H100, "reference"),
    ],
)
def test_the_best_for_the_device(spec: AttentionSpec, device: DeviceSpec, label: str) -> None:
    selection = select(None, None, spec, device)
    assert selection.capabilities.label == label
    assert all(selection.rejected.values())
    # Everyone before it in the order was looked at, and each refusal is a reason.
    for rejected in selection.rejected:
        assert any(reason.startswith(f"{rejected} refuses: ") for reason in selection.reasons)


@pytest.mark.parametrize(("device", "version"), [(A100, "2"), (H100, "3"), (B200, "4")])
def test_a_family_takes_its_first_version_that_fits(device: DeviceSpec, version: str) -> None:
    selection = select("FLASH_ATTN", None, HALF, device)
    assert selection.capabilities.version == version
    assert "first version that fits" in selection.reasons[0]


def test_the_version_decides_before_features_do() -> None:
    """On an H100 the family's first choice is version 3; ALiBi needs 2, and the graph support is then that of 2."""
    alibi = replace(HALF, alibi=True)
    selection = select("flash_attn", None, alibi, H100)
    assert selection.capabilities.label == "flash_attn 2"
    assert selection.rejected["flash_attn 3"] == ["ALiBi; it takes no slopes"]
    assert selection.capabilities.graph_support(alibi, H100).level is GraphSupport.ALWAYS
    assert select("flash_attn", "2", HALF, H100).capabilities.version == "2"
    assert select(None, "2", HALF, H100).capabilities.label == "flash_attn 2"


def test_auto_goes_by_the_order_of_preference() -> None:
    for device in (H100, A100):
        assert select("Auto", None, HALF, device).reasons == select(None, None, HALF, device).reasons
    assert select("auto", None, HALF, H100).capabilities.label == "triton"
    assert select("auto", "2", HALF, H100).capabilities.label == "flash_attn 2"


def test_a_refusal_names_all_reasons_and_backends_that_serve() -> None:
    spec = replace(HALF, sinks=True, head_size=100, kv_cache_dtype="float8_e5m2")
    with pytest.raises(BackendError) as caught:
        select("flash_attn", "2", spec, H100)
    for part in ("attention_backend='flash_attn'", "h100", "sinks", "head size 100", "float8_e5m2", "reference"):
        assert part in str(caught.value)
    assert "triton" not in str(caught.value)  # it refuses head size 100 too


def test_no_backend_serves() -> None:
    with pytest.raises(BackendError, match="No backend would serve"):
        select(None, None, replace(HALF, dtype="int4"), H100)


@pytest.mark.parametrize(
    ("asked", "version", "setting", "part"),
    [
        ("xformers", None, "attention_backend", "triton, flash_attn, flashinfer, reference"),
        ("flash_attn", "5", "flash_attn_version", "has versions 3, 4, 2"),
        (None, "5", "flash_attn_version", "has versions 3, 4, 2"),
        ("reference", "2", "flash_attn_version", "has no versions"),
    ],
)
def test_unknown_names(asked: str | None, version: str | None, setting: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        select(asked, version, HALF, H100)
    assert caught.value.setting == setting


def test_loading() -> None:
    assert load(select(None, None, FLOAT, CPU)) is ReferenceBackend
    for asked, why in (("flash_attn", "nothing here provides FlashAttention 3"), ("flashinfer", "flashinfer-python")):
        selection = select(asked, None, HALF, H100)
        assert "cannot run here" in selection.reasons[-1]
        with pytest.raises(ConfigError, match=f"'{selection.capabilities.label}': cannot run: .*{why}"):
            load(selection)


def test_backends_that_support_batch_invariance() -> None:
    spec = replace(HALF, batch_invariant=True)
    assert select(None, None, spec, H100).capabilities.label == "triton"
    assert select("flash_attn", None, spec, H100).capabilities.label == "flash_attn 3"
    for asked, version, why in (
        ("flashinfer", None, "its plans cut the keys of a sequence into parts by what else is in the batch"),
        ("flash_attn", "2", "it cuts the keys of decodes into as many parts as fill the device"),
        ("reference", None, "its decodes share sums that are as long as the longest of them"),
    ):
        with pytest.raises(BackendError) as caught:
            select(asked, version, spec, H100)
        assert f"batch_invariant; {why}" in str(caught.value)
        assert "Would serve: triton, flash_attn 3" in str(caught.value)
    windows = replace(spec, windows=((-1, -1), (63, 0)))
    assert select(None, None, windows, H100).capabilities.label == "triton"
    with pytest.raises(BackendError, match="flash_attn 3 refuses: batch_invariant with windows; .*serve: triton"):
        select("flash_attn", "3", windows, H100)
    with pytest.raises(BackendError, match="what stands before a query of one token"):
        select("prefill=flash_attn,decode=triton", None, spec, H100)
    with pytest.raises(BackendError, match="cpu.*reference refuses: batch_invariant; .*No backend would serve"):
        select(None, None, replace(spec, dtype="float32", kv_cache_dtype="float32"), CPU)
    assert not select(None, None, HALF, H100).rejected


def test_batch_invariance_is_not_supported_by_default() -> None:
    spec = replace(FLOAT, batch_invariant=True)
    with pytest.raises(BackendError, match="other refuses: batch_invariant; it does not say"):
        select("other", None, spec, CPU, [OTHER])
    assert select("other", None, FLOAT, CPU, [OTHER]).capabilities.label == "other"


class Other(Capabilities):
    name = "other"

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        return []

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        return Support(GraphSupport.ALWAYS, "it says so")


def other_backend() -> type[AttentionBackend]:
    return ReferenceBackend


OTHER = Registered(capabilities=Other(), loader=other_backend)


def test_a_part_of_a_split_is_loaded_as_a_part() -> None:
    """A backend may need other tensors where it serves a part of the batch; one without a loader for that has one."""
    pytest.importorskip("triton")

    class Whole(ReferenceBackend): ...

    class Part(ReferenceBackend): ...

    class Splitting(Other):
        name = "splitting"

    registered = Registered(capabilities=Splitting(), loader=lambda: Whole, part_loader=lambda: Part)
    backends = [OTHER, registered]
    made: Any = load(select("prefill=splitting,decode=other", None, HALF, H100, backends))
    assert made.keywords == {"prefill": Part, "decode": ReferenceBackend}
    assert load(select("splitting", None, HALF, H100, backends)) is Whole


def test_out_of_tree_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(value: str) -> None:
        point = EntryPoint("other", value, module.ENTRY_POINTS)
        monkeypatch.setattr(module, "entry_points", lambda group: [point] if group == module.ENTRY_POINTS else [])
        monkeypatch.setattr(EntryPoint, "load", lambda self: {"here:OTHER": OTHER, "here:Other": Other}[value])

    found("here:OTHER")
    assert load(select("other", None, FLOAT, CPU)) is ReferenceBackend
    # Chosen only where it is asked for.
    assert select(None, None, FLOAT, CPU).capabilities.name == "reference"
    found("here:Other")
    with pytest.raises(BackendError, match="here:Other.*Registered"):
        select("other", None, FLOAT, CPU)
    found("nowhere:OTHER")
    with pytest.raises(BackendError, match="nowhere:OTHER"):
        select("other", None, FLOAT, CPU)
