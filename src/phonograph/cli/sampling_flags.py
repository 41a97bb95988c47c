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
    json_schema: Annotated[str | None, _flag("JSON schema that the output follows; {} is any object.")] = None
    json_schema_file: Annotated[Path | None, _flag("File of a JSON schema that the output follows.")] = None
    format: Annotated[str | None, _flag("json for any JSON object, or a JSON schema.")] = None

    def params(self, *, n: int = 1, logprobs: int | None = None) -> SamplingParams:
        """Return the parameters of a request.

        Raises:
            RequestError: a value is out of range.
        """
        values = asdict(self)
        values["seed"] = values.pop("sampling_seed")
        values["stop"] = values["stop"] or ()
        values["stop_token_ids"] = values["stop_token_ids"] or ()
        for name in self._constraints():
            del values[name]
        return SamplingParams(**values, n=n, logprobs=logprobs, structured_outputs=self._constraint())

    def _constraints(self) -> dict[str, Path | str | None]:
        return {
            "grammar_file": self.grammar_file,
            "json_schema": self.json_schema,
            "json_schema_file": self.json_schema_file,
            "format": self.format,
        }

    def _constraint(self) -> StructuredOutputs | None:
        """Return the constraint on the output, or None.

        Raises:
            RequestError: there are several, or one is unusable.
        """
        constraints = {name: value for name, value in self._constraints().items() if value is not None}
        if not constraints:
            return None
        name, *others = constraints
        if others:
            raise RequestError(others[0], str(constraints[others[0]]), f"contradicts {name}; give one of them")
        value = constraints[name]
        text = _read(name, value) if isinstance(value, Path) else value
        if name == "grammar_file":
            return StructuredOutputs(grammar=text)
        # An empty schema is any object, as in llama.cpp.
        if "".join(text.split()) == "{}" or (name, text) == ("format", "json"):
            return StructuredOutputs(json_object=True)
        try:
            return StructuredOutputs(json=text)
        except RequestError as error:
            hint = "; json is any JSON object" if name == "format" else ""
            raise RequestError(name, str(value), f"{error.problem}{hint}") from None


def _read(name: str, path: Path) -> str:
    """Return the text of a file.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(name, str(path), f"cannot be read: {reason}") from None


GREEDY = SamplingFlags()
