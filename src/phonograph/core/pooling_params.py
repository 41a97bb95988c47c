"""Pooling parameters of one request, which generates nothing: its prompt becomes rows of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

from phonograph.core.checked_arguments import checks_arguments
from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import RequestError

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
"""Tasks with vLLM's names. The first three return a row for a prompt, the others a row for each of its tokens."""
RowActivation = Literal["none", "normalize", "softmax", "sigmoid"]
"""Activation of a result: division by the Euclidean norm, or one of classes."""
TOKEN_TASKS = ("token_embed", "token_classify")
NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
"""Sampling parameters of a request that samples nothing."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("step_tag_id", "returned_token_ids", "late_chunking_params", "extra_kwargs"), ()),
    **dict.fromkeys(("requires_token_ids", "skip_reading_prefix_cache"), (False,)),
}
_HINTS: Mapping[str, str] = dict.fromkeys(
    ("normalize", "activation", "softmax"), "is vLLM's old name; use_activation takes the same value"
)


@checks_arguments("pooling parameter", neutral=_NEUTRAL, hints=_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of a request for embeddings, classes or scores, with vLLM's names.

    Attributes:
        task: "embed", "classify", "score", "token_embed" or "token_classify"; None is the first task of the model.
        dimensions: leading numbers of an embedding that are kept, before it is normalised; None for all.
        use_activation: normalise embeddings to length 1, or apply the softmax or sigmoid of classes; None is what the
            model's files say.
        truncate_prompt_tokens: most tokens of the prompt, whose text is cut at its end; -1 is the model's limit. None
            cuts nothing, so that a prompt that is too long is an error.

    Raises:
        RequestError: a value is out of range; the message names it and what would work.

    Example:
        ```python
        from phonograph import PoolingParams

        params = PoolingParams(task="embed", dimensions=64)
        assert params.use_activation is None
        ```
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in get_args(PoolingTask):
            raise RequestError("task", self.task, f"must be one of {', '.join(get_args(PoolingTask))}")
        if self.use_activation not in (None, True, False):
            raise RequestError("use_activation", self.use_activation, "must be True, False or None")
        for name, works in (("dimensions", ""), ("truncate_prompt_tokens", ", or -1 for the model's limit")):
            value = getattr(self, name)
            if value is None or (works and value == -1):
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise RequestError(name, value, f"must be an integer >= 1{works}")
            object.__setattr__(self, name, int(value))
