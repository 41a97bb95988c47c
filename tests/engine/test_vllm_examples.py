"""Programs as users of vLLM write them after its offline examples: only the import and the model's name are others.

Each prints what it should. What such programs have and this package lacks is in docs/guides/coming-from-vllm.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from phonograph import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputs,
)
from phonograph.errors import EngineUnavailable, PhonographError

GUIDE = Path(__file__).parents[2] / "docs/guides/coming-from-vllm.md"
BASIC = """
from phonograph import LLM, SamplingParams

prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

def main():
    llm = LLM(model="demo")
    outputs = llm.generate(prompts, sampling_params)
    print("-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")

if __name__ == "__main__":
    main()
"""
CHAT = """
from phonograph import LLM, SamplingParams

def print_outputs(outputs):
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")

llm = LLM(model="demo", enforce_eager=True)
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
sampling_params = llm.get_default_sampling_params()
print_outputs(llm.chat(conversation, sampling_params, use_tqdm=False))
conversations = [conversation for _ in range(10)]
print_outputs(llm.chat(conversations, SamplingParams(temperature=0.5, max_tokens=4), use_tqdm=True))
chat_template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}. {% endfor %}"
print_outputs(llm.chat(conversations, sampling_params, use_tqdm=False, chat_template=chat_template))
"""
STRUCTURED = """
from enum import Enum
from pydantic import BaseModel
from phonograph import LLM, SamplingParams, StructuredOutputsParams

class CarType(str, Enum):
    SEDAN = "SEDAN"
    SUV = "SUV"

class CarDescription(BaseModel):
    brand: CarType
    car_type: CarType

grammar = '''
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
'''
statement = StructuredOutputsParams(grammar=grammar)
choice = StructuredOutputsParams(choice=["Positive", "Negative"])
regex = StructuredOutputsParams(regex=r"[a-z]{1,9}@[a-z]{1,9}\\.com\\n")
structured_json = StructuredOutputsParams(json=CarDescription.model_json_schema())
asks = [
    ("Classify this sentiment: vLLM is wonderful!", SamplingParams(structured_outputs=choice)),
    ("Generate an email address.", SamplingParams(structured_outputs=regex, stop=["\\n"], max_tokens=50)),
    ("Generate a JSON with the brand.", SamplingParams(structured_outputs=structured_json, max_tokens=100)),
    ("Generate an SQL query.", SamplingParams(structured_outputs=statement, max_tokens=50)),
]
llm = LLM(model="demo", max_model_len=200)
for prompt, sampling_params in asks:
    outputs = llm.generate(prompts=prompt, sampling_params=sampling_params)
    print(outputs[0].outputs[0].text)
"""
BEAM_SEARCH = """
from phonograph import LLM, TextPrompt, TokensPrompt, BeamSearchParams

llm = LLM(model="demo")
params = BeamSearchParams(beam_width=3, max_tokens=8)
prompts = [TextPrompt(prompt="Tom has 12 apples."), TokensPrompt(prompt_token_ids=[5, 6, 7]), {"prompt": "1 2 3"}]
outputs = llm.beam_search(prompts, params)
for output in outputs:
    for sequence in output.sequences:
        print(sequence.text, sequence.cum_logprob, len(sequence.tokens))
"""
PREFIX_CACHING = """
from phonograph import LLM, SamplingParams

prefix = "You are an expert school principal, skilled in effectively managing faculty and staff. Draft questions. "
prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0)

regular_llm = LLM(model="demo", enable_prefix_caching=False, gpu_memory_utilization=0.4)
outputs = regular_llm.generate(generating_prompts, sampling_params)
regular_generated_texts = [output.outputs[0].text for output in outputs]
del regular_llm

prefix_cached_llm = LLM(model="demo", enable_prefix_caching=True, gpu_memory_utilization=0.4)
prefix_cached_llm.generate(generating_prompts[0], sampling_params)
outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
cached_generated_texts = [output.outputs[0].text for output in outputs]
print("Generated answers are the same:", regular_generated_texts == cached_generated_texts)
print("Tokens from the cache:", min(output.num_cached_tokens for output in outputs) > 0)
prefix_cached_llm.reset_prefix_cache()
print("After a reset:", prefix_cached_llm.generate(prefix, sampling_params)[0].num_cached_tokens)
"""
STREAMING = """
import asyncio
from phonograph import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

async def stream_response(engine, prompt, request_id):
    print(f"Prompt: {prompt!r}")
    sampling_params = SamplingParams(
        max_tokens=12, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            new_text = completion.text
            if new_text:
                print(new_text, end="", flush=True)
        if output.finished:
            print("\\nGeneration complete!")
            break

async def main():
    engine_args = AsyncEngineArgs(model="demo", enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        prompts = ["The future of artificial intelligence is", "In a galaxy far, far away"]
        for i, prompt in enumerate(prompts, 1):
            await stream_response(engine, prompt, f"stream-example-{i}")
    finally:
        engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""
SLEEP = """
from phonograph import LLM, SamplingParams

llm = LLM(model="demo", enable_sleep_mode=True, enforce_eager=True)
sampling_params = SamplingParams(temperature=0, max_tokens=10)
before = llm.generate("Tom has 12 apples.", sampling_params)[0].outputs[0].text
llm.sleep(level=1)
llm.wake_up()
after = llm.generate("Tom has 12 apples.", sampling_params)[0].outputs[0].text
print("The same after level 1:", before == after)
llm.sleep(level=2)
llm.wake_up(tags=["weights"])
llm.wake_up(tags=["kv_cache"])
after = llm.generate("Tom has 12 apples.", sampling_params)[0].outputs[0].text
print("The same after level 2:", before == after)
"""
# Python writes a text with an apostrophe in double quotes.
TEXT = "(?:'[^\\n]*'|\"[^\\n]*\")"
ESSAY = r"Write an essay about the importance of higher education\."
EMAIL = r"[a-z]{1,9}@[a-z]{1,9}\.com\n"
# A schema says nothing about the space between its tokens.
CAR = r'\{\s*"brand"\s*:\s*"(SEDAN|SUV)"\s*,\s*"car_type"\s*:\s*"(SEDAN|SUV)"\s*\}'
SQL = r"SELECT col_[12]  from table_[12]  where col_[12] = [12] \n"
PRINTED = {
    "basic": (BASIC, rf"-+\n(Prompt:    {TEXT}\nOutput:    {TEXT}\n){{3}}"),
    "chat": (
        CHAT,
        rf"(Prompt: '<\|begin\|>.*{ESSAY}<\|end\|><\|assistant\|>', Generated text: {TEXT}\n){{11}}"
        rf"(Prompt: 'system: You .*user: {ESSAY}\. ', Generated text: {TEXT}\n){{10}}",
    ),
    "structured output": (STRUCTURED, rf"(Positive|Negative)\n{EMAIL}{CAR}\n{SQL}"),
    "beam search": (BEAM_SEARCH, r"(Tom has 12 apples\..* -\d+\.\d+ \d+\n){3}(.* -\d+\.\d+ \d+\n){3}(1 2 3.*\n){3}"),
    "prefix caching": (
        PREFIX_CACHING,
        "Generated answers are the same: True\nTokens from the cache: True\nAfter a reset: 0\n",
    ),
    "async streaming": (STREAMING, r"(Prompt: '.*'\n.+\nGeneration complete!\n){2}"),
    "sleep": (SLEEP, "The same after level 1: True\nThe same after level 2: True\n"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_should(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a process of its own if it starts an engine in another, or is the first that users write."""
    source, printed = PRINTED[name]
    program = tmp_path / "example.py"
    program.write_text(source, encoding="utf-8")
    if name in ("basic", "async streaming"):
        subprocess.run([sys.executable, str(program)], timeout=120, check=True)
    else:
        runpy.run_path(str(program), run_name="__main__")
    found = capfd.readouterr()
    assert re.fullmatch(printed, found.out), found


ABSENT: dict[str, tuple[str, type[Exception], str]] = {
    "sampling_params.max_tokens = 5": (
        "SamplingParams().max_tokens = 5",
        FrozenInstanceError,
        "dataclasses.replace(params, max_tokens=5) returns a changed copy",
    ),
    "EngineArgs.add_cli_args(parser)": ("EngineArgs.add_cli_args(None)", AttributeError, "add_cli_args"),
    "from vllm import LLMEngine": ("from phonograph import LLMEngine", ImportError, "LLMEngine"),
    'llm.collective_rpc("reload_weights")': (
        "LLM.__new__(LLM).collective_rpc",
        AttributeError,
        "wake_up reads the weights again",
    ),
    "llm.reward(prompts)": ("LLM.__new__(LLM).reward", AttributeError, "token_classify"),
    "profiler_config={...}": ("EngineArgs(model='demo', profiler_config={'a': 1})", PhonographError, "--profile-dir"),
    "logits_processors=[...]": ("SamplingParams(logits_processors=[print])", PhonographError, "logit_bias"),
}
"""Code of vLLM's examples that does not work, with what stands for it here, the error, and a part of its message."""


@pytest.mark.parametrize("code", ABSENT)
def test_what_examples_have_and_this_package_lacks_is_in_the_guide(code: str) -> None:
    statement, kind, says = ABSENT[code]
    names: dict[str, Any] = {"LLM": LLM, "SamplingParams": SamplingParams, "EngineArgs": EngineArgs}
    with pytest.raises(kind, match=re.escape(says)):
        exec(statement, names)
    assert f"| `{code}` |" in GUIDE.read_text(encoding="utf-8")


@pytest.mark.parametrize("params", [SamplingParams(), StructuredOutputs(regex="a"), BeamSearchParams(2, 3)])
def test_a_changed_field_of_parameters_says_what_works(params: Any) -> None:
    for one in fields(params):
        with pytest.raises(FrozenInstanceError, match=f"cannot be changed; dataclasses.replace.params, {one.name}=5"):
            setattr(params, one.name, 5)
    with pytest.raises(FrozenInstanceError, match=f"^{type(params).__name__} cannot be changed"):
        params.anything = 5


ASKED = {"max_tokens": 9, "temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1, "stop": ["9"]}


def test_kinds_of_outputs() -> None:
    async def outputs(engine: AsyncLLM, kind: Any) -> list[tuple[bool, list[tuple[str, list[int], str | None, int]]]]:
        params = SamplingParams(**ASKED, output_kind=kind)  # type: ignore[arg-type]
        return [
            (one.finished, [(s.text, [*s.token_ids], s.finish_reason, len(s.logprobs or ())) for s in one.outputs])
            async for one in engine.generate("Tom has 12 apples.", params)
        ]

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="demo", max_num_seqs=4, enforce_eager=True))
        # The first requests start the engine, together.
        whole, deltas, final = await asyncio.gather(*(outputs(engine, kind) for kind in (0, 1, 2)))
        assert [finished for finished, _ in whole] == [*[False] * (len(whole) - 1), True]
        assert final == whole[-1:] and [finished for finished, _ in deltas][-1] and len(deltas) > 2
        for index, (text, token_ids, reason, num_scored) in enumerate(final[0][1]):
            pieces = [samples[index] for _, samples in deltas]
            assert "".join(piece[0] for piece in pieces) == text and pieces[-1][2] == reason
            assert [one for piece in pieces for one in piece[1]] == token_ids
            assert all(len(piece[1]) == piece[3] for piece in pieces) and num_scored == len(token_ids)
        engine.shutdown()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await outputs(engine, 0)
        engine.shutdown()

    asyncio.run(run())


def test_an_engine_that_cannot_start_says_so_to_each_request() -> None:
    async def run() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="/nowhere/at/all"))
        asked = [anext(engine.generate("a")) for _ in range(2)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in found] == [type(found[0])] * 2
        assert all("/nowhere/at/all" in str(one) for one in found)

    asyncio.run(run())


def test_llm_returns_complete_outputs_with_each_kind() -> None:
    with LLM("demo", max_num_seqs=2, enforce_eager=True) as llm:
        texts = {
            llm.generate("1 2 3", SamplingParams(temperature=0, max_tokens=5, output_kind=kind))[0].outputs[0].text
            for kind in RequestOutputKind
        }
        assert len(texts) == 1
        # A conversation that is refused has no text of a prompt.
        chats = [[{"role": "user", "content": "Hi"}], [{"role": 5}], [{"role": "user", "content": "Hi" * 9000}]]
        template = "{% for m in messages %}{{ m['content'] + '' }}{% endfor %}"
        first, second, third = llm.chat(chats, SamplingParams(max_tokens=1), chat_template=template)
        assert first.prompt == "Hi" and second.error and second.prompt is None and third.prompt == "Hi" * 9000
        assert json.dumps(first.prompt_token_ids)
