"""A suite that passes everything proves nothing: each backend here has one fault, which must be found by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import phonograph_dense
import pytest
import torch
from phonograph_dense import DenseBackend, DenseCapabilities, DenseMetadata, DenseMetadataBuilder

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AnyCall
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.selection import Registered
from phonograph.core.device import DeviceSpec
from phonograph.graphs.modes import GraphKey, GraphSupport, Support
from phonograph.testing import ConformanceReport, Outcome, check_conformance, suite

PLAIN = AttentionSpec(
    num_query_heads=4, num_kv_heads=2, head_size=32, dtype="float32", kv_cache_dtype="float32", block_size=16
)


class Narrow(DenseCapabilities):
    """Accepts little, so that a fault takes a second or two to be found."""

    level = GraphSupport.ALWAYS

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        return [] if spec == PLAIN else ["narrow on purpose"]

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        return Support(self.level, "it says so")


class DecodesOnly(Narrow):
    level = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE


class Softcapped(DecodesOnly):
    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        return super().refusals(replace(spec, softcap=0.0), device)


class Sample(DenseBackend):
    """Right, until a subclass changes something."""

    capabilities = Narrow()
    builder: type[DenseMetadataBuilder] = DenseMetadataBuilder

    def make_builder(self) -> DenseMetadataBuilder:
        return self.builder(self.device, self.limits)


class StaleMaxQueryLength(Sample):
    class builder(DenseMetadataBuilder):
        def max_query_len(self, common: CommonMetadata, key: GraphKey | None) -> int:
            return max(1, common.max_query_len)


def with_lens(metadata: DenseMetadata, lens: torch.Tensor) -> DenseMetadata:
    return replace(metadata, common=replace(metadata.common, seq_lens=lens))


class StaleSplitCount(Sample):
    class builder(DenseMetadataBuilder):
        def num_splits(self, common: CommonMetadata, key: GraphKey | None) -> int:
            return super().num_splits(common, None)


class UnzeroedTail(Sample):
    class builder(DenseMetadataBuilder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._schedule.fill_(-1)

    def schedule(self, metadata: Any) -> None:
        sequence_T, place_T = metadata.sequence_T.clone(), metadata.place_T.clone()
        super().schedule(metadata)
        kept_T = metadata.sequence_T < 0
        metadata.sequence_T.copy_(torch.where(kept_T, sequence_T, metadata.sequence_T))
        metadata.place_T.copy_(torch.where(kept_T, place_T, metadata.place_T))


class MovedBuffer(Sample):
    class builder(DenseMetadataBuilder):
        def build(self, common: CommonMetadata, *, key: GraphKey | None) -> DenseMetadata:
            self._schedule = torch.zeros_like(self._schedule)
            return super().build(common, key=key)


class IgnoresSoftcap(Sample):
    capabilities = Softcapped()

    def forward(self, query: Any, call: AnyCall, *outputs: Any) -> None:
        super().forward(query, call._replace(layer=replace(call.layer, softcap=0.0)), *outputs)


class NotCausal(DecodesOnly):
    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        return super().refusals(replace(spec, non_causal=False), device)


class AlwaysCausal(Sample):
    capabilities = NotCausal()

    def forward(self, query: Any, call: AnyCall, *outputs: Any) -> None:
        metadata = replace(call.metadata, common=replace(call.metadata.common, causal=True))
        super().forward(query, call._replace(metadata=metadata), *outputs)


class LeavesPadding(Sample):
    def _put(self, metadata: DenseMetadata, result_RQHD: torch.Tensor, out_THD: torch.Tensor) -> None:
        nobodys = (metadata.sequence_T < 0)[:, None, None]
        out_THD.copy_(torch.where(nobodys, out_THD, self._rows(metadata, result_RQHD, 0.0)))


class HiddenMovedBuffer(Sample):
    """Fault: a buffer moves that is not in the metadata but in the builder and in the graph."""

    def make_builder(self) -> DenseMetadataBuilder:
        self.made = LensBuilder(self.device, self.limits)
        return self.made

    def forward(self, query: Any, call: AnyCall, *outputs: Any) -> None:
        lens = self.made.lens[: len(call.metadata.common.seq_lens)]
        super().forward(query, call._replace(metadata=with_lens(call.metadata, lens)), *outputs)


class LensBuilder(DenseMetadataBuilder):
    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> DenseMetadata:
        self.lens = torch.zeros(self._limits.max_num_seqs, dtype=torch.int32)
        self.lens[: len(common.seq_lens_cpu)] = torch.from_numpy(common.seq_lens_cpu)
        return super().build(common, key=key)


class LeaksPadding(Sample):
    """Sums over all rows of a batch, so that one NaN among them reaches everybody."""

    def forward(self, query: torch.Tensor, *args: Any) -> None:
        super().forward(query + 0.0 * query.sum(), *args)


class MultipliesAbsentKeys(Sample):
    def _gathered(self, kv_cache: Any, metadata: Any, key_W: Any) -> Any:
        everything = with_lens(metadata, torch.full_like(metadata.common.seq_lens, 2**30))
        return super()._gathered(kv_cache, everything, key_W)


class BuildReadsTensors(Sample):
    class builder(DenseMetadataBuilder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._lens = torch.zeros(self._limits.max_num_seqs, dtype=torch.int32)

        def build(self, common: CommonMetadata, *, key: GraphKey | None) -> DenseMetadata:
            self._lens[: len(common.seq_lens)].copy_(common.seq_lens)
            return with_lens(super().build(common, key=key), self._lens[: len(common.seq_lens)])


class ReadsOnTheHost(Sample):
    def schedule(self, metadata: Any) -> None:
        if int(metadata.common.seq_lens.max()) > 0:
            super().schedule(metadata)


class StaleSequenceCount(Sample):
    class builder(DenseMetadataBuilder):
        def build(self, common: CommonMetadata, *, key: GraphKey | None) -> DenseMetadata:
            self.num_reqs = common.num_reqs
            return super().build(common, key=key)

    def make_builder(self) -> DenseMetadataBuilder:
        self.made = super().make_builder()
        return self.made

    def _rows(self, metadata: DenseMetadata, result_RQ: torch.Tensor, nobodys: float) -> torch.Tensor:
        rows = super()._rows(metadata, result_RQ, nobodys)
        present_T = metadata.sequence_T < self.made.num_reqs  # type: ignore[attr-defined]
        return rows.masked_fill(~present_T.view(-1, *[1] * (rows.dim() - 1)), nobodys)


class StaleDecodeCount(Sample):
    """The first sequences have one token, as long as there are as many decodes as in the captured batch."""

    class builder(DenseMetadataBuilder):
        def build(self, common: CommonMetadata, *, key: GraphKey | None) -> DenseMetadata:
            self.num_decodes = common.num_decodes
            return super().build(common, key=key)

    def make_builder(self) -> DenseMetadataBuilder:
        self.made = super().make_builder()
        return self.made

    def schedule(self, metadata: Any) -> None:
        super().schedule(metadata)
        is_decode_T = metadata.sequence_T < self.made.num_decodes  # type: ignore[attr-defined]
        metadata.place_T.masked_fill_(is_decode_T, 0)


class ForgetsToWrite(Sample):
    """Right but in a graph, where the numerics of the suite do not look: only padded batches go unwritten."""

    def write_kv(self, key: Any, value: Any, call: AnyCall) -> None:
        if key.shape[0] != 7:
            super().write_kv(key, value, call)


class OrderHangsOnSplits(Sample):
    """Right within rounding, but in another order than eager for contexts longer than the captured."""

    class builder(DenseMetadataBuilder):
        def build(self, common: CommonMetadata, *, key: GraphKey | None) -> DenseMetadata:
            self.is_long = common.max_seq_len > 120
            return super().build(common, key=key)

    def make_builder(self) -> DenseMetadataBuilder:
        self.made = super().make_builder()
        return self.made

    def _put(self, metadata: DenseMetadata, result_RQHD: torch.Tensor, out_THD: torch.Tensor) -> None:
        factor = 1.000001 if self.made.is_long else 1.0  # type: ignore[attr-defined]
        super()._put(metadata, result_RQHD * factor, out_THD)


def report_of(backend: type[Sample], capabilities: Narrow | None = None) -> ConformanceReport:
    registered = Registered(capabilities=capabilities or backend.capabilities, loader=lambda: backend)
    return check_conformance(registered, device="cpu")


@pytest.mark.parametrize(
    ("backend", "fault", "words"),
    [
        (StaleMaxQueryLength, "stale max query length", "one long query"),
        (StaleSplitCount, "stale split count", "max_seq_len"),
        (UnzeroedTail, "unzeroed metadata tail", "larger batch"),
        (MovedBuffer, "moved buffer", "sequence_T, place_T"),
        (IgnoresSoftcap, "undeclared feature: softcap", "accepted, but not computed"),
        (AlwaysCausal, "undeclared feature: batches without a causal mask", "accepted, but not computed"),
        (LeavesPadding, "NaN in padding", "were not written"),
        (StaleDecodeCount, "stale decode count", "num_decodes"),
    ],
)
def test_every_failure_has_the_name_of_the_fault(backend: type[Sample], fault: str, words: str) -> None:
    report = report_of(backend)
    assert not report.ok
    assert {check.name for check in report.failures} == {fault}, str(report)
    assert all(words in check.text for check in report.failures), str(report)


@pytest.mark.parametrize(
    ("backend", "fault", "words"),
    [
        (HiddenMovedBuffer, "moved buffer", "lens has moved since the capture"),
        (LeaksPadding, "NaN in padding", "right without NaN in the padding rows"),
        (MultipliesAbsentKeys, "reads unwritten memory", "0 times NaN"),
        (BuildReadsTensors, "build reads the step before", "query_start_loc_cpu"),
        (ReadsOnTheHost, "refused capture", "host read"),
        (StaleSequenceCount, "stale sequence count", "num_reqs"),
        (OrderHangsOnSplits, "replay unlike eager", "within tolerance"),
        (ForgetsToWrite, "wrong at the padded shape", "new keys"),
    ],
)
def test_other_faults_of_decode_graphs(backend: type[Sample], fault: str, words: str) -> None:
    report = report_of(backend, DecodesOnly())
    assert report.failures, str(report)
    assert report.failures[0].name == fault, str(report)
    assert words in report.failures[0].text, str(report)


def test_the_sample_without_a_fault() -> None:
    report = report_of(Sample)
    assert report.ok, str(report)
    # Every kind of graph that it declares was looked at, for every fault that this kind can have.
    graphs = [check for check in report.checks if check.name == "stale split count"]
    assert [check.subject.split("[")[0] for check in graphs] == ["decode", "mixed"]
    skipped = {
        check.name for check in report.checks if check.outcome is Outcome.NOT_APPLICABLE and "[" in check.subject
    }
    assert skipped == {"stale max query length", "stale decode count"}


class Moody(Narrow):
    asked = 0

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        self.asked += 1
        return [f"asked {self.asked} times"]


class Importing(Narrow):
    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        import hypothesis

        return [hypothesis.__name__]


class Silent(Narrow):
    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        return [""]


class Unreasoned(Narrow):
    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        return Support(GraphSupport.ALWAYS, "")


class Bare(Narrow):
    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Any:
        return GraphSupport.ALWAYS


class Raising(Narrow):
    def missing(self) -> str | None:
        raise OSError("no such library")


class Refusing(Narrow):
    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        return ["it does nothing"]


class Absent(Narrow):
    def missing(self) -> str | None:
        return "its library is not installed"


class Renamed(Narrow):
    name = "renamed"


@pytest.mark.parametrize(
    ("capabilities", "fault", "words"),
    [
        (Moody(), "impure capabilities", "asked twice"),
        (Raising(), "impure capabilities", "OSError: no such library"),
        (Importing(), "imports while answering", "hypothesis"),
        (Silent(), "refusal without a reason", "sentence"),
        (Unreasoned(), "support without a reason", "with its reason"),
        (Bare(), "support without a reason", "with its reason"),
        (Refusing(), "refuses everything", "it does nothing"),
        (Absent(), "missing", "its library is not installed"),
        (Renamed(), "loading", "registered is renamed"),
    ],
)
def test_faults_of_a_declaration(capabilities: Narrow, fault: str, words: str) -> None:
    report = report_of(Sample, capabilities)
    assert [check.name for check in report.failures] == [fault], str(report)
    assert words in report.failures[0].text


def test_a_loader_that_raises() -> None:
    def loader() -> type[DenseBackend]:
        raise ImportError("libdense.so: cannot open")

    report = check_conformance(Registered(capabilities=Narrow(), loader=loader), device="cpu")
    assert [check.name for check in report.failures] == ["loading"]
    assert "libdense.so" in report.failures[0].text


def test_a_device_that_is_lost_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(suite, "RigInputs", lost)
    report = report_of(Sample)
    assert [check.name for check in report.failures] == ["lost device"]
    # What was found before it is kept.
    assert "wrong numerics" in [check.name for check in report.checks if check.outcome is Outcome.PASSED]


def test_padding_that_the_engine_clears() -> None:
    class Declared(LeavesPadding):
        clears_padding = False

    report = report_of(Declared, DecodesOnly())
    assert report.ok, str(report)
    padding = [check for check in report.checks if check.name == "NaN in padding"]
    assert {check.outcome for check in padding} == {Outcome.NOT_APPLICABLE}


def test_the_file_is_the_one_of_the_example() -> None:
    assert "out_of_tree_backend" in str(phonograph_dense.__file__)
