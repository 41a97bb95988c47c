"""`phonograph generate`: continues or answers prompts, and prints the graphs that ran."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from phonograph.cli.answer import print_piece, stream_answer
from phonograph.cli.lines import check_text, read_line
from phonograph.cli.options import takes_engine_config
from phonograph.cli.sampling_flags import GREEDY, SamplingFlags
from phonograph.cli.show import Json, completion_facts, engine_facts, note, print_json, start, steps_text
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import RequestError, shortened

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM
    from phonograph.engine.outputs import RequestOutput

_STDIN = "Another prompt from each line of standard input."
_TOKEN_IDS = "A prompt as token ids, such as 1,2,3; may be given several times."
_RAW = "Continue the text, instead of answering it as in a chat."
_LOGPROBS = "Log-probabilities of the sampled and of so many likely tokens; needs --json."


@takes_engine_config
def generate(
    config: EngineConfig,
    *prompts: Annotated[str, Parameter(help="Prompts.")],
    stdin: Annotated[bool, Parameter(name="-", negative="", show_default=False, help=_STDIN)] = False,
    token_ids: Annotated[list[str] | None, Parameter(negative="", help=_TOKEN_IDS)] = None,
    raw: Annotated[bool, Parameter(negative="", show_default=False, help=_RAW)] = False,
    sampling: SamplingFlags = GREEDY,
    n: Annotated[int, Parameter(help="Samples of each prompt.")] = 1,
    logprobs: Annotated[int | None, Parameter(help=_LOGPROBS)] = None,
    as_json: Json = False,
) -> int:
    """Continue prompts, or answer them where the model has a chat template."""
    params = sampling.params(n=n, logprobs=logprobs)
    if logprobs is not None and not as_json:
        raise RequestError("logprobs", logprobs, "is printed with --json only; add it")
    texts = [check_text("prompt", text) for text in prompts]
    texts += [line for line in (iter(read_line, None) if stdin else ()) if line.strip()]
    ids = [_token_ids(text) for text in token_ids or []]
    if not texts and not ids:
        model = shortened(config.model)
        problem = f"give a prompt after the model ({model!r}), - for the lines of standard input, or --token-ids"
        raise RequestError("prompts", list(prompts), problem)
    llm = start(config)
    templated = not raw and llm.tokenizer is not None and llm.tokenizer.has_chat_template
    encoded = [llm.encode_chat([{"role": "user", "content": text}]) if templated else text for text in texts] + ids
    shown = [*texts, *map(_shown_ids, ids)]
    began = time.perf_counter()
    if len(encoded) == 1 and n == 1 and not as_json:
        answer = stream_answer(llm, encoded[0], params, print_piece)
        if answer.output is not None and llm.tokenizer is None:
            print_piece(_shown_ids(answer.output.outputs[0].token_ids))
        print()
        note(f"{llm.plan.resolution.label}, {steps_text(llm.step_counts)}")
        return 130 if answer.interrupted else 0
    outputs = llm.generate(encoded, params)
    seconds = time.perf_counter() - began
    if as_json:
        rows = [row for text, output in zip(shown, outputs, strict=True) for row in _rows(text, output)]
        print_json({**engine_facts(llm), "seconds": round(seconds, 4), "steps": dict(llm.step_counts), "outputs": rows})
    else:
        _print(llm, shown, outputs)
        note(f"{llm.plan.resolution.label}, {steps_text(llm.step_counts)}")
    return 2 if any(output.error is not None for output in outputs) else 0


def _token_ids(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise RequestError("token_ids", text, "must be token ids with commas between them, such as 1,2,3") from None


def _rows(text: str, output: RequestOutput) -> list[dict[str, Any]]:
    """Return a row for each sample, or one row with the error."""
    if output.error is not None:
        return [{"prompt": text, "error": str(output.error)}]
    prompt = {"prompt": text, "num_prompt_tokens": len(output.prompt_token_ids)}
    return [
        {**prompt, "sample": sample.index, **completion_facts(sample), "num_cached_tokens": output.num_cached_tokens}
        for sample in output.outputs
    ]


def _print(llm: LLM, shown: list[str], outputs: list[RequestOutput]) -> None:
    for text, output in zip(shown, outputs, strict=True):
        print(f"> {text}")
        if output.error is not None:
            note(f"refused: {output.error}", style="red")
        for completion in output.outputs:
            print(_shown_ids(completion.token_ids) if llm.tokenizer is None else completion.text)
        print()


def _shown_ids(token_ids: list[int]) -> str:
    return ",".join(map(str, token_ids))
