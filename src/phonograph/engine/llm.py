"""`LLM`: the offline API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from phonograph.core.beam_search_params import BeamSearchParams
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import admitted_prompt, refuse_logits
from phonograph.engine.offline.answer_inputs import answer_inputs, complete_outputs, enqueue_inputs
from phonograph.engine.offline.beam_search import BeamSearchOutput, beam_search, completed
from phonograph.engine.offline.interrupts import deferred_interrupts
from phonograph.engine.offline.pooled_engine import PooledEngine
from phonograph.engine.offline.prompts import (
    PromptInput,
    conversation_list,
    plain_conversation,
    plain_prompt,
    prompt_list,
    refuse_unsupported,
    salt_of,
)
from phonograph.engine.outputs import CompletionOutput, RequestOutput
from phonograph.errors import RequestError
from phonograph.text.tokenizer import ChatMessage, Tokenizer


class LLM(PooledEngine):
    """A model that answers prompts. The engine is ready when the constructor returns, and ends with `close` or `with`.

    Several threads may use one LLM: their calls run one after the other. Open streams are the exception, which run a
    step whenever they are read, between the calls of others. To answer requests of many threads together, pass them to
    one call, or use `AsyncLLM`.

    Args:
        model: folder, GGUF file, hub id or "demo".
        config: configuration in place of `model` and `settings`.
        progress: called during the start with the phase, the work done and the total work of the phase.
        serves: False for an engine that only runs `verify`. It accepts settings whose graphs can be captured but not
            served yet (num_speculative_tokens).
        settings: fields of EngineConfig, with its defaults.

    Attributes:
        config: all settings.
        start_seconds: duration of the constructor in seconds.

    Raises:
        PhonographError: the configuration, the model or the machine does not allow it; the message says what would
            work.

    Example:
        ```python
        llm = LLM("demo", max_num_seqs=8)
        (output,) = llm.generate("Tom has 12 apples.", SamplingParams(max_tokens=32))
        print(output.outputs[0].text)
        ```
    """

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: object = None,
        priority: Sequence[int] | int | None = None,
        tokenization_kwargs: object = None,
    ) -> list[RequestOutput]:
        """Continue prompts, and return one output for each in the same order.

        Names and order of the arguments are vLLM's.

        Args:
            prompts: one or a list: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": token_ids}`. A mapping
                may have a `cache_salt`: cached prefixes are shared only with prompts of the same salt.
                For speech it has `"multi_modal_data": {"audio": (samples, sampling_rate)}` too.
            sampling_params: one for all prompts, or one for each; defaults to `get_default_sampling_params()`.
            use_tqdm: show a progress bar on stderr if that is a terminal; defaults to True.
            lora_request: not supported; must be None.
            priority: one for all prompts, or one for each; lower values are served earlier with scheduling_policy
                "priority".
            tokenization_kwargs: not supported; must be None.

        Returns:
            The outputs. Of several prompts, one that cannot be served has its `error` set, and the others are answered.

        Raises:
            RequestError: the only prompt cannot be served, an argument is wrong, or this is called inside another call
                of the same thread, such as from the progress callback of `verify`.
            RequestFailure: work for the only prompt failed. After any error, no request of this call is left in the
                engine.

        Example:
            ```python
            outputs = llm.generate(["Tom has 12 apples.", [5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=16))
            ```
        """
        refuse_unsupported(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        inputs = prompt_list(prompts)
        with self._calls.held("generate"):
            return answer_inputs(
                self.session,
                inputs,
                self._prompt,
                sampling_params=self.get_default_sampling_params() if sampling_params is None else sampling_params,
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
        priority: Sequence[int] | int | None = None,
        tokenization_kwargs: object = None,
        mm_processor_kwargs: object = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template, and return one output for each in the same order.

        Names of the arguments are vLLM's.

        Args:
            messages: one conversation, a list of `{"role": ..., "content": ...}`, or a list of conversations.
            sampling_params: as for `generate`.
            use_tqdm: as for `generate`.
            lora_request: not supported; must be None.
            chat_template: replaces the model's template.
            add_generation_prompt: end the prompt with the start of the assistant's answer; defaults to True.
            continue_final_message: continue the last message; needs add_generation_prompt=False.
            tools: functions that the template shows to the model, in OpenAI's format.
            chat_template_kwargs: further variables of the template.
            priority: as for `generate`.
            tokenization_kwargs: not supported; must be None.
            mm_processor_kwargs: not supported; must be None.

        Returns:
            The outputs, as for `generate`.

        Raises:
            RequestError: as for `generate`, or the template rejects the conversation.
            RequestFailure: as for `generate`.

        Example:
            ```python
            (output,) = llm.chat([{"role": "user", "content": "What is 2 + 3?"}], SamplingParams(max_tokens=32))
            ```
        """
        refuse_unsupported(
            lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs
        )

        rendered: list[str | None] = []

        def encode(conversation: object) -> list[int]:
            rendered.append(None)
            tokenizer = self._chat_tokenizer()
            text = tokenizer.render_chat(
                plain_conversation(conversation),
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=chat_template_kwargs,
            )
            rendered[-1] = text
            return tokenizer.encode(text, add_special_tokens=False)

        inputs = conversation_list(messages)
        with self._calls.held("chat"):
            outputs = answer_inputs(
                self.session,
                inputs,
                encode,
                sampling_params=self.get_default_sampling_params() if sampling_params is None else sampling_params,
                priority=priority,
                use_tqdm=use_tqdm,
            )
        for output, text in zip(outputs, rendered, strict=True):
            output.prompt = text
        return outputs

    def stream(self, prompt: PromptInput, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt, and yield its output after each step that added to it.

        All yields are the same object, which grows. Leaving the loop early aborts the request. Other calls may run
        while the stream is open, in its loop too; the stream continues with what its request has got meanwhile.

        Args:
            prompt: as for `generate`.
            sampling_params: defaults to `get_default_sampling_params()`.

        Yields:
            The output of the prompt so far.

        Raises:
            RequestError: the prompt cannot be served.
            RequestFailure: work for it failed.

        Example:
            ```python
            for output in llm.stream("Tom has 12 apples."):
                print(output.outputs[0].text)
            ```
        """
        plain = self._prompt(prompt)
        params = sampling_params or self.get_default_sampling_params()
        with self._calls.held("stream"):
            output = self.session.add(plain, params, cache_salt=salt_of(prompt))
        try:
            # Other calls may step the session in between, so the result of one step does not tell what changed.
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
                with self._calls.held("stream"):
                    # A call of another thread may have finished it, or closed the engine.
                    if not output.finished:
                        with deferred_interrupts() as interrupted:
                            self.session.step()
                        if interrupted():
                            raise KeyboardInterrupt
        finally:
            self._calls.abandon(output)

    def enqueue(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: object = None,
        priority: Sequence[int] | int | None = None,
        tokenization_kwargs: object = None,
    ) -> list[str]:
        """Queue prompts without running a step, and return the ids of their requests.

        Args:
            prompts: as for `generate`.
            sampling_params: as for `generate`.
            lora_request: not supported; must be None.
            priority: as for `generate`.
            tokenization_kwargs: not supported; must be None.

        Raises:
            RequestError: as for `generate`; then nothing has been queued.

        Example:
            ```python
            ids = llm.enqueue(["1 2 3", "4 5 6"], SamplingParams(max_tokens=4))
            assert [output.request_id for output in llm.wait_for_completion()] == ids
            ```
        """
        refuse_unsupported(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        inputs = prompt_list(prompts)
        with self._calls.held("enqueue"):
            outputs = enqueue_inputs(
                self.session,
                inputs,
                self._prompt,
                sampling_params=self.get_default_sampling_params() if sampling_params is None else sampling_params,
                priority=priority,
            )
            self._enqueued += outputs
        return [output.request_id for output in outputs]

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer all prompts of `enqueue`, and return their outputs in the order in which they were queued.

        Args:
            use_tqdm: as for `generate`.

        Returns:
            The outputs since the last call of this method. One that cannot be served has its `error` set.

        Example:
            ```python
            llm.enqueue("1 2 3", SamplingParams(max_tokens=4))
            llm.enqueue("4 5 6", SamplingParams(max_tokens=8))
            first, second = llm.wait_for_completion()
            assert first.finished and second.finished
            ```
        """
        with self._calls.held("wait_for_completion"):
            session, outputs = self.session, self._enqueued
            self._enqueued = []
            complete_outputs(session, outputs, use_tqdm=use_tqdm)
        return outputs

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        lora_request: object = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest sequences of each prompt, by beam search.

        Args:
            prompts: as for `generate`.
            params: number of beams and limits.
            lora_request: not supported; must be None.
            use_tqdm: no effect; there is no bar.

        Raises:
            RequestError: a prompt cannot be served, or the engine reports logits as log-probabilities.

        Example:
            ```python
            from phonograph import BeamSearchParams

            (output,) = llm.beam_search("Tom has 12", BeamSearchParams(beam_width=2, max_tokens=4))
            best, second = output.sequences
            assert best.cum_logprob / len(best.tokens) >= second.cum_logprob / len(second.tokens)
            ```
        """
        refuse_unsupported(lora_request=lora_request)
        if not isinstance(params, BeamSearchParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("params", params, "must be BeamSearchParams")
        refuse_logits(self.config.logprobs_mode, "a beam search")
        inputs = [plain_prompt(prompt) for prompt in prompt_list(prompts)]
        with self._calls.held("beam_search"):
            session, tokenizer, vocab_size = self.session, self.tokenizer, self.plan.model.vocab_size

            async def generate(beams: list[list[int]], step: SamplingParams) -> list[CompletionOutput]:
                outputs = answer_inputs(
                    session, beams, plain_prompt, sampling_params=step, priority=None, use_tqdm=False
                )
                for output in outputs:
                    if output.error is not None:
                        raise output.error
                return [output.outputs[0] for output in outputs]

            search = beam_search(
                [admitted_prompt(prompt, tokenizer, vocab_size) for prompt in inputs],
                params,
                generate,
                eos=frozenset(session.eos_token_ids),
                context_len=session.core.scheduler.context_len,
            )
            found = completed(search)
        if tokenizer is None:
            return found
        decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        return [
            BeamSearchOutput([replace(one, text=decode(one.tokens)) for one in output.sequences]) for output in found
        ]

    def encode_chat(self, messages: Sequence[ChatMessage], **options: Any) -> list[int]:
        """Return the token ids of a conversation, up to the start of the answer.

        Args:
            messages: list of `{"role": ..., "content": ...}`.
            options: keyword arguments of `Tokenizer.encode_chat`.

        Returns:
            The token ids, for `generate` and `stream`.

        Raises:
            RequestError: there is no tokenizer, or the template rejects the conversation.

        Example:
            ```python
            token_ids = llm.encode_chat([{"role": "user", "content": "What is 2 + 3?"}])
            outputs = llm.generate([token_ids], SamplingParams(max_tokens=4))
            ```
        """
        return self._chat_tokenizer().encode_chat(messages, **options)

    def _chat_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("messages", "...", "chat needs a tokenizer")
        return self.tokenizer
