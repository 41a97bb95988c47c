"""Parameters of beam search, validated at construction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from phonograph.core.checked_arguments import checks_arguments
from phonograph.core.sampling_params import MAX_LOGPROBS, SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError

MAX_WIDTH = MAX_LOGPROBS // 2
"""Each beam is continued by twice as many tokens as there are beams."""


@checks_arguments("parameter of beam search", neutral={"watermarking": (False,)}, hints={})
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with vLLM's names and meanings.

    Attributes:
        beam_width: sequences that are kept after each token, and returned.
        max_tokens: maximum tokens to generate.
        ignore_eos: continue after the model's end-of-sequence tokens.
        temperature: draws one more continuation of each beam at this temperature; 0 takes the most likely ones only.
        length_penalty: exponent of the length that divides a sequence's log-probability; larger prefers longer ones.
        include_stop_str_in_output: keep the end-of-sequence token in the tokens.
        skip_special_tokens: omit special tokens from the text.
        structured_outputs: constraint on the output, as of `SamplingParams`. There may be fewer sequences than beams.
        allowed_token_ids: tokens that the output may have; None for all. The end-of-sequence token is one of them only
            if it is listed.

    Raises:
        RequestError: a value is out of range.

    Example:
        ```python
        params = BeamSearchParams(beam_width=4, max_tokens=16)
        assert params.length_penalty == 1.0
        ```
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_WIDTH), ("max_tokens", None)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < 1 or (most is not None and value > most):
                limit = "" if most is None else f" and <= {most}"
                raise RequestError(name, value, f"must be an integer >= 1{limit}")
        for name, least in (("temperature", 0.0), ("length_penalty", -math.inf)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < least:
                raise RequestError(name, value, "must be a finite number" + " >= 0" * (least == 0.0))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "must be True or False")
        names = ("ignore_eos", "structured_outputs", "allowed_token_ids")
        checked = SamplingParams(**{name: getattr(self, name) for name in names})
        for name in names:
            object.__setattr__(self, name, getattr(checked, name))

    @property
    def has_constraint(self) -> bool:
        """True if the output may not have every token."""
        return self.structured_outputs is not None or self.allowed_token_ids is not None
