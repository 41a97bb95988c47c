"""Beginning and end of a model that generates nothing, as plain values: the sum of embeddings, and the pooler.

The pooler reduces the last layer's rows to one row a prompt, or keeps the rows of all tokens. Its stages are small
dense layers after that: the head of a classifier, or the modules of a sentence-transformers folder. They are in
float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phonograph.core.pooling_params import PoolingTask, RowActivation

Pooling = Literal["first", "last", "mean", "all"]
StageActivation = Literal["none", "tanh", "relu", "gelu", "silu"]


class InputEmbedding(NamedTuple):
    """Embeddings that are added to those of tokens, and their norm. Their tensors are `model.positions.weight`, ...

    Attributes:
        positions: rows of the learned positions; 0 for none.
        first_position: row of a prompt's first token.
        token_types: rows of the types of tokens; 0 for none.
        norm: True if the sum is normed.
    """

    positions: int = 0
    first_position: int = 0
    token_types: int = 0
    norm: bool = True


class TokenRows(NamedTuple):
    """Rows of a language model's head that are the weight of a classifier; see `token_classifier`.

    Attributes:
        token_ids: tokens of the rows: one for each class, or two whose difference is the only class.
        source: end of the name of the tensor that has the rows.
        labels: names of the classes.
        template: template of a pair of texts, or None if the tokenizer's is used.
    """

    token_ids: tuple[int, ...]
    source: str
    labels: tuple[str, ...]
    template: str | None


class PoolerStage(NamedTuple):
    """A dense layer: activation(x @ weight + bias), and maybe a layer norm after it.

    Attributes:
        name: name of its module.
        norm: name of the norm, which has no bias; None for none.
        folder: folder of its file in the model's, or None if its tensors are among those of the model.
        rows: rows of the head that are its weight, or None.
    """

    name: str
    num_inputs: int
    num_outputs: int
    bias: bool = True
    activation: StageActivation = "none"
    norm: str | None = None
    folder: str | None = None
    rows: TokenRows | None = None

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each tensor."""
        yield f"{self.name}.weight", (self.num_outputs, self.num_inputs)
        if self.bias:
            yield f"{self.name}.bias", (self.num_outputs,)
        if self.norm is not None:
            yield f"{self.norm}.weight", (self.num_outputs,)


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """End of a model that generates nothing.

    Attributes:
        pooling: row of the first or last token, mean over all tokens, or the rows of all tokens.
        tasks: what requests may ask for; the first is the default.
        activation: of the result, where requests want it.
        activates: what requests want that do not say.
        origin: the files and fields that say so, for people.
        stages: layers after the pooling.
        labels: names of the classes, or none.
        template: chat template of a pair of texts, with the roles query and document; None for that of the tokenizer.
    """

    pooling: Pooling
    tasks: tuple[PoolingTask, ...]
    activation: RowActivation
    origin: str
    activates: bool = True
    stages: tuple[PoolerStage, ...] = ()
    labels: tuple[str, ...] = ()
    template: str | None = None

    def num_outputs(self, hidden_size: int) -> int:
        """Return the numbers of a row of a model with this hidden size."""
        return self.stages[-1].num_outputs if self.stages else hidden_size
