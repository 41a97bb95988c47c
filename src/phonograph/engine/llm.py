"""The offline API: `LLM(...).generate` and `.chat`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phonograph.config.engine_config import EngineConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import admitted_config
from phonograph.engine.build import Engine
from phonograph.engine.offline.answer_inputs import answer_inputs
from phonograph.engine.offline.interrupts import deferred_interrupts
from phonograph.engine.offline.prompts import (
    PromptInput,
    conversation_list,
    plain_conversation,
    plain_prompt,
    prompt_list,
    refuse_unsupported,
)
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.plan import EnginePlan
from phonograph.engine.process.client import StartProgress, no_progress
from phonograph.engine.session import Session, grammar_compiler
from phonograph.engine.startup.start import start_engine, verify_engine
from phonograph.errors import RequestError
from phonograph.graphs.verification import VerifyReport
from phonograph.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer

VERIFY_REPLAYS = 200


class LLM:
    """A model, loaded and captured, that answers prompts.

    `LLM("demo", max_num_seqs=8)` takes every setting of EngineConfig as a keyword; `LLM(config=...)` takes a
    configuration instead. The engine is ready when the constructor returns. With `serves=False` it is for `verify`
    alone, which also allows settings whose graphs can be captured but not yet served (num_speculative_tokens).

    engine:        the core with its plan and captured graphs
    session:       the requests in flight; for callers that drive the steps themselves
    start_seconds: time that the constructor took

    Raises:
        PhonographError: the configuration, the model or the machine does not allow it; the message says what would.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        progress: StartProgress | None = None,
        serves: bool = True,
        **settings: Any,
    ) -> None:
        self.config = admitted_config(model, config, settings, serves=serves)
        start = time.perf_counter()
        self.engine: Engine = start_engine(self.config, progress or no_progress)
        tokenizer = load_tokenizer(self.config)
        spec = self.engine.plan.model.with_tokenizer_end(None if tokenizer is None else tokenizer.eos_token_id)
        grammars = grammar_compiler(lambda: tokenizer, spec, self.config)
        self.session = Session(self.engine.core, spec, tokenizer, self.config.seed, grammars)
        self.start_seconds = time.perf_counter() - start

    @property
    def plan(self) -> EnginePlan:
        """What was decided at the start, with the reasons."""
        return self.engine.plan

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.session.tokenizer

    @property
    def step_counts(self) -> Counter[str]:
        """Steps so far, by the kind of decision that ran them ("full decode", "full mixed", "eager", ...)."""
        return self.engine.core.runner.counts

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: object = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: object = None,
    ) -> list[RequestOutput]:
        """Continues prompts and returns their outputs in the same order.

        Names and order of the arguments are vLLM's.

        Args:
            prompts: one or a list: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": token_ids}`.
            sampling_params: one for all prompts, or one for each; None is `SamplingParams()`.
            use_tqdm: show a progress bar on stderr, if that is a terminal.
            lora_request: not supported; must be None.
            priority: one for each prompt, smaller first, with scheduling_policy "priority".
            tokenization_kwargs: not supported; must be None.

        Raises:
            RequestError, RequestFailure: the only prompt cannot be served, or work for it failed. Of several prompts,
                such a one has its `error` set in its output, and the others are answered. After any other error none of
                them is left in the engine.
        """
        refuse_unsupported(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return answer_inputs(
            self.session,
            prompt_list(prompts),
            plain_prompt,
            sampling_params=sampling_params,
            priority=priority,
            use_tqdm=use_tqdm,
        )

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: object = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: object = None,
        mm_processor_kwargs: object = None,
    ) -> list[RequestOutput]:
        """Answers conversations through the model's chat template; returns one output for each, in their order.

        Names of the arguments are vLLM's.

        Args:
            messages: one conversation, a list of `{"role": ..., "content": ...}`, or a list of conversations.
            sampling_params, use_tqdm: as for `generate`.
            chat_template: used instead of the model's own.
            add_generation_prompt: end the prompt with what begins the assistant's answer.
            continue_final_message: continue the last message; needs add_generation_prompt=False.
            tools: functions that the template shows to the model, as OpenAI describes them.
            chat_template_kwargs: more variables for the template.
            lora_request, tokenization_kwargs, mm_processor_kwargs: not supported; must be None.

        Raises:
            RequestError: as for `generate`; a conversation that the template refuses cannot be served.
        """
        refuse_unsupported(
            lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs
        )

        def encode(conversation: object) -> list[int]:
            return self.encode_chat(
                plain_conversation(conversation),
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=chat_template_kwargs,
            )

        return answer_inputs(
            self.session,
            conversation_list(messages),
            encode,
            sampling_params=sampling_params,
            priority=None,
            use_tqdm=use_tqdm,
        )

    def stream(self, prompt: PromptInput, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continues one prompt and yields its growing output after each step that added to it.

        Leaving the loop early ends the request.
        """
        output = self.session.add(plain_prompt(prompt), sampling_params or SamplingParams())
        try:
            # Others may step the session between two of these, so what changed is not what its step says.
            seen = 0
            while True:
                if output.error is not None:
                    raise output.error
                ended, tokens = output.finished, sum(len(one.token_ids) for one in output.outputs)
                if ended or tokens > seen:
                    seen = tokens
                    yield output
                if ended:
                    return
                if not output.finished:
                    with deferred_interrupts() as interrupted:
                        self.session.step()
                    if interrupted():
                        raise KeyboardInterrupt
        finally:
            self.session.abort(output)

    def encode_chat(self, messages: Sequence[ChatMessage], **options: Any) -> list[int]:
        """Returns the token ids of a conversation, up to where the answer begins; options as `Tokenizer.encode_chat`.

        Raises:
            RequestError: there is no tokenizer, or it refuses the conversation.
        """
        if self.tokenizer is None:
            raise RequestError("messages", "...", "chat needs a tokenizer")
        return self.tokenizer.encode_chat(messages, **options)

    def verify(
        self,
        *,
        num_replays: int = VERIFY_REPLAYS,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> VerifyReport:
        """Compares replays of every captured graph on random batches with eager runs. No request may be in flight.

        Raises:
            RequestError: requests are in flight.
            ConfigError: the mode has no graphs.
        """
        if self.session.has_unfinished:
            raise RequestError("verify", "now", "overwrites the KV cache; let the requests in flight end first")
        return verify_engine(self.engine, num_replays=num_replays, seed=seed, progress=progress)
