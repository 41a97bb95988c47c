"""`phonograph generate`: continues or answers prompts, and prints the graphs that ran."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from phonograph.cli.answer import print_piece, show_nothing, stream_answer
from phonograph.cli.lines import check_text, read_line
from phonograph.cli.options import takes_engine_or_url
from phonograph.cli.remote import RemoteAnswer, RemoteModel
from phonograph.cli.sampling_flags import GREEDY, SamplingFlags
from phonograph.cli.show import Json, completion_facts, engine_facts, note, print_json, start, steps_text
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import RequestError, shortened

if TYPE_CHECKING:
    from phonograph.core.sampling_params import SamplingParams
    from phonograph.engine.llm import LLM
    from phonograph.engine.outputs import RequestOutput

AT_ONCE = 16
"""Prompts that a server gets at one time."""
_STDIN = "Another prompt from each line of standard input."
_TOKEN_IDS = "A prompt as token ids, such as 1,2,3; may be given several times."
_RAW = "Continue the text, instead of answering it as in a chat."
_LOGPROBS = "Log-probabilities of the sampled and of so many likely tokens; needs --json."


@takes_engine_or_url
def generate(
    config: EngineConfig | RemoteModel,
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
        model = shortened(config.name if isinstance(config, RemoteModel) else config.model)
        problem = f"give a prompt after the model ({model!r}), - for the lines of standard input, or --token-ids"
        raise RequestError("prompts", list(prompts), problem)
    if isinstance(config, RemoteModel):
        if logprobs is not None:
            raise RequestError("logprobs", logprobs, "is not available with --url")
        return _generate_remote(config, [*texts, *ids], params, raw=raw, as_json=as_json)
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


def _generate_remote(
    model: RemoteModel, prompts: list[str | list[int]], params: SamplingParams, *, raw: bool, as_json: bool
) -> int:
    """Answer prompts by a server. One prompt is streamed; several are sent at one time."""
    streams = len(prompts) == 1 and params.n == 1 and not as_json

    def answer(prompt: str | list[int]) -> RemoteAnswer | RequestError:
        show = print_piece if streams else show_nothing
        try:
            if raw or not isinstance(prompt, str):
                return model.complete(prompt, params, show)
            return model.chat([{"role": "user", "content": prompt}], params, show)
        except RequestError as error:
            return error

    if streams:
        answers = [answer(prompts[0])]
        print()
    else:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(answer, prompts))
    refused = [one for one in answers if isinstance(one, RequestError)]
    if as_json:
        shown = zip(prompts, answers, strict=True)
        rows = [row for prompt, one in shown for row in _remote_rows(prompt, one)]
        print_json({"url": model.url, "model": model.name, "outputs": rows})
    elif not streams:
        for prompt, one in zip(prompts, answers, strict=True):
            print(f"> {prompt if isinstance(prompt, str) else _shown_ids(prompt)}")
            for text in [] if isinstance(one, RequestError) else one.texts:
                print(text)
            print()
    if not as_json:
        for error in refused:
            note(f"refused: {error}", style="red")
    interrupted = any(isinstance(one, RemoteAnswer) and one.interrupted for one in answers)
    return 130 if interrupted else 2 if refused else 0


def _remote_rows(prompt: str | list[int], answer: RemoteAnswer | RequestError) -> list[dict[str, Any]]:
    if isinstance(answer, RequestError):
        return [{"prompt": prompt, "error": str(answer)}]
    return [
        {"prompt": prompt, "sample": index, "text": text, "finish_reason": answer.reasons.get(index), **answer.facts()}
        for index, text in enumerate(answer.texts)
    ]


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
