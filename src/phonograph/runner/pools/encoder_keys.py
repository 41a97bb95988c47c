"""Keys and values of an encoder's states, written to the pages of the requests that start, before their first step.

Shapes: B audios, M mel bins, F frames, P positions of an audio, E hidden size, X heads of keys and values, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from phonograph.core.batch import NewSequence, ScheduledBatch
from phonograph.core.blocks import blocks_for
from phonograph.core.token_types import EncoderTokens
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.graphs.runtime import CapturedGraph, GraphRuntime
from phonograph.kernels.host_arrays import send
from phonograph.models.heads.encoder_specs import TextEncoder
from phonograph.models.heads.word_alignment import align_words
from phonograph.models.modules.step_model import StepModel
from phonograph.models.transformer import Transformer
from phonograph.runner.step_attention import StepAttention
from phonograph.sampling.failures import SlotFailures


class EncoderKeys:
    """Runs the encoder for the requests that start, and fills the blocks of their cross attention.

    Batches have powers of two of audios, 5 of them 4 and 1, so that none is padded. `capture` makes a graph of each
    size; without it they run eagerly. A request that lost its blocks starts again, so that its encoder runs again too.

    graphs: captured graphs; their keys name positions as tokens

    Args:
        model: has the encoder.
        attention: KV caches and groups of the layers.
        most: audios of the largest batch, a power of two; 0 for one at a time, of which there is no graph.
    """

    def __init__(self, model: Transformer, attention: StepAttention, most: int) -> None:
        assert model.encoder is not None
        self._model, self._encoder = model, model.encoder
        self._captured, self._most = most, max(most, 1)
        # All layers of cross attention are equal, so that they have one group.
        self._group = attention.group(model.spec.num_layers)
        crosses = [layer.cross for layer in model.weights if layer.cross is not None]
        self._memories = [
            (cross.memory, attention.kv_cache(cross.layer)) for cross in crosses if cross.memory is not None
        ]
        spec, device = model.encoder.spec, model.device
        is_text = isinstance(spec, TextEncoder)
        kind = torch.int64 if is_text else model.dtype
        self._features = torch.zeros(self._most, *spec.input_shape, dtype=kind, device=device)
        self._num_tokens = spec.num_positions if is_text else None
        # Page of each position, and its place in the page.
        self._places_B2P = torch.zeros(self._most, 2, spec.num_positions, dtype=torch.int64, device=device)
        self.graphs: dict[GraphKey, CapturedGraph] = {}

    @classmethod
    def of(cls, model: StepModel, attention: StepAttention, most: int) -> EncoderKeys | None:
        """Return the writer of a model's encoder; None without one."""
        return cls(model, attention, most) if isinstance(model, Transformer) and model.encoder is not None else None

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture a graph of each size, and return their number. They write to the first page."""
        sizes = [1 << power for power in reversed(range(self._captured.bit_length()))]
        for size in sizes:
            run = partial(self.run, size)
            with torch.inference_mode(), runtime.scope():
                run()  # Libraries load their kernels.
            self.graphs[self._key(size)] = runtime.capture(run)
        return len(sizes)

    def write(self, batch: ScheduledBatch, failures: SlotFailures) -> None:
        """Write the keys of the requests that start with a step.

        Args:
            batch: the step, with the blocks of these requests.
            failures: receives slots whose audio cannot be encoded.
        """
        starting = [new for new in batch.new if new.features is not None]
        if not starting:
            return
        blocks = {append.slot: append.block_ids for append in batch.appends if append.group == self._group}
        slots, first = [new.slot for new in starting], 0
        while first < len(slots):
            size = min(self._most, 1 << ((len(slots) - first).bit_length() - 1))
            failures.run_rows(range(first, first + size), slots, "encoder", partial(self._write, starting, blocks))
            first += size
        # Other requests of the step may have found the blocks of those that failed.
        failed = [(slot, failure) for slot, failure in failures.by_slot.items() if failure.part == "encoder"]
        for slot, failure in failed:
            for new in batch.new:
                if blocks[new.slot] == blocks[slot]:
                    failures.by_slot.setdefault(new.slot, failure)

    def _write(self, new: Sequence[NewSequence], blocks: dict[int, list[int]], rows: Sequence[int]) -> None:
        self.load([new[row].features for row in rows], [blocks[new[row].slot] for row in rows])
        graph = self.graphs.get(self._key(len(rows)))
        if graph is None:
            self.run(len(rows))
        else:
            graph.replay()

    def _key(self, num_audios: int) -> GraphKey:
        return GraphKey(GraphSet.ENCODER, num_audios * self._encoder.spec.num_positions, num_audios)

    def load(self, features: Sequence[np.ndarray | None], block_ids: Sequence[Sequence[int]]) -> None:
        """Load the log-mel frames, float32 [M, F], and the blocks of each audio of a batch; or the tokens of a text."""
        loaded = np.stack([one for one in features if one is not None])
        place = np.arange(self._places_B2P.shape[2] if self._num_tokens is None else loaded.shape[1])
        page, offset = np.divmod(place, self._memories[0][1].shape[2])
        places_B2P = np.stack([np.stack([np.array(ids)[page], offset]) for ids in block_ids])
        targets = self._features, self._places_B2P
        if self._num_tokens is not None:
            self._num_tokens = len(place)
            targets = self._features[:, : len(place)], self._places_B2P[..., : len(place)]
        sources = torch.from_numpy(loaded).to(self._features.dtype), torch.from_numpy(places_B2P)
        for target, source in zip(targets, sources, strict=True):
            send(source, target[: len(source)])

    def run(self, num_audios: int) -> tuple[torch.Tensor, ...]:
        """Encode the first audios or the text that are loaded, and write the keys and values of all layers.

        Returns:
            Nothing.
        """
        if self._num_tokens is None:
            states_PE = self._encoder(self._features[:num_audios])
        else:
            states_PE = self._encoder(self._features[0, : self._num_tokens])
        page, offset = self._places_B2P[:num_audios].transpose(0, 1).flatten(1)[:, : len(states_PE)]
        for memory, kv_cache in self._memories:
            kv_PXD = memory.product(states_PE).unflatten(-1, (-1, kv_cache.shape[-1]))
            for part, rows_PKD in zip(kv_cache, kv_PXD.chunk(2, 1), strict=True):
                part[page, offset] = rows_PKD
        return ()

    def align(self, prompt: EncoderTokens, token_ids: Sequence[int], num_positions: int) -> np.ndarray:
        """Return how well the tokens behind a prompt and positions of its audio fit; see `align_words`."""
        return align_words(self._model, prompt.features, [*prompt, *token_ids], len(prompt), num_positions)

    def draw(self, num_audios: int, rng: np.random.Generator) -> None:
        """Load random audios, and pages of their own, for `verify`."""
        size, shape = self._memories[0][1].shape, self._features.shape[1:]
        num_blocks = blocks_for(self._encoder.spec.num_positions, size[2])
        pages = rng.permutation(size[1])[: num_audios * num_blocks].reshape(num_audios, num_blocks)
        self.load([rng.standard_normal(shape, np.float32) for _ in range(num_audios)], pages.tolist())

    def written(self, num_audios: int, run: Callable[[], object]) -> torch.Tensor:
        """Return sums of the keys and of the values that a run writes, float64 [layers, 2, B * P], for `verify`.

        The keys themselves may be more than is free: 8 audios have 2 GB of them in the largest Whisper.
        """
        page, offset = self._places_B2P[:num_audios].transpose(0, 1).flatten(1)
        for _, kv_cache in self._memories:
            kv_cache[:, page, offset] = float("nan")
        run()
        sums = [kv_cache[:, page, offset].sum((-1, -2), dtype=torch.float64) for _, kv_cache in self._memories]
        return torch.stack(sums)
