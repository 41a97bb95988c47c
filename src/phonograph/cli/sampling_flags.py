"""Sampling parameters as flags, the same in every command that generates text.

Two defaults differ from the Python API: commands are greedy, so that an answer repeats, and allow longer answers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError

_GROUP = Group("Sampling")


def _flag(text: str, *, name: str | None = None, negative: str = "") -> Parameter:
    return Parameter(group=_GROUP, help=text, name=name, negative=negative)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """Fields of SamplingParams as flags. `sampling_seed` is its `seed`, since --seed is the engine's."""

    temperature: Annotated[float, _flag("0 is greedy; 1 draws from the model's own distribution.")] = 0.0
    max_tokens: Annotated[int, _flag("Tokens to generate, at most.")] = 256
    min_tokens: Annotated[int, _flag("Tokens to generate before the output may end.")] = 0
    top_k: Annotated[int, _flag("Draw from this many most likely tokens; 0 is all.")] = 0
    top_p: Annotated[float, _flag("Draw from the most likely tokens that together reach this probability.")] = 1.0
    min_p: Annotated[float, _flag("Draw from tokens at least this many times as likely as the likeliest.")] = 0.0
    repetition_penalty: Annotated[float, _flag("Above 1 makes tokens of prompt and output less likely.")] = 1.0
    presence_penalty: Annotated[float, _flag("Taken once from the logit of a token in the output.")] = 0.0
    frequency_penalty: Annotated[float, _flag("Taken for each time that a token is in the output.")] = 0.0
    sampling_seed: Annotated[
        int | None, _flag("Makes the draws of each prompt repeatable; --seed is the engine's.")
    ] = None
    stop: Annotated[list[str] | None, _flag("Text that ends the output; may be given several times.")] = None
    stop_token_ids: Annotated[
        list[int] | None, _flag("Token id that ends the output; may be given several times.", name="--stop-token-id")
    ] = None
    ignore_eos: Annotated[bool, _flag("Go on after the model's end-of-sequence token.")] = False
    grammar_file: Annotated[Path | None, _flag("File of a grammar in GBNF that the output follows.")] = None

    def params(self, *, n: int = 1, logprobs: int | None = None) -> SamplingParams:
        """Return the parameters of a request.

        Raises:
            RequestError: a value is out of range.
        """
        values = asdict(self)
        values["seed"] = values.pop("sampling_seed")
        values["stop"] = values["stop"] or ()
        values["stop_token_ids"] = values["stop_token_ids"] or ()
        del values["grammar_file"]
        grammar = _grammar(self.grammar_file)
        values["structured_outputs"] = None if grammar is None else StructuredOutputs(grammar=grammar)
        return SamplingParams(**values, n=n, logprobs=logprobs)


def _grammar(path: Path | None) -> str | None:
    """Return the text of a file.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError("grammar_file", str(path), f"cannot be read: {reason}") from None


GREEDY = SamplingFlags()
