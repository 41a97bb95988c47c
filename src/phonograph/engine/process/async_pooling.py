"""`AsyncPooling`: requests of an `AsyncLLM` that generate nothing."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property

from phonograph.core.pooling_params import PoolingParams
from phonograph.core.token_types import plain_ids
from phonograph.engine.admission import Prompt, admit_names, admitted_pooling, admitted_whole_prompt, tokenized_ahead
from phonograph.engine.offline.audio_prompts import encoder_prompt
from phonograph.engine.offline.pooled_inputs import PooledInputs
from phonograph.engine.offline.prompts import PromptInput, plain_prompt
from phonograph.engine.offline.text_pairs import text_pair
from phonograph.engine.outputs import PoolingOutput, PoolingRequestOutput
from phonograph.engine.process.async_verbs import AsyncVerbs
from phonograph.engine.process.calls import Call
from phonograph.engine.process.messages import EngineFacts
from phonograph.errors import RequestError, RequestFailure, shortened


class AsyncPooling(AsyncVerbs):
    """Base of `AsyncLLM`: embeddings, classes and scores, and prompts with audio."""

    facts: EngineFacts

    @abstractmethod
    def open(self, prompts: Sequence[list[int]], params: PoolingParams) -> Call:
        """Queue prompts of one call; see `AsyncLLM.open`."""

    @cached_property
    def pooled_inputs(self) -> PooledInputs:
        """Prompts of the model's folder, and pairs of texts; after the start."""
        facts = self.facts
        return PooledInputs(self.config, facts.pooler, facts.has_token_types, facts.context_len, self.tokenizer)

    async def pool(
        self, prompts: Sequence[Prompt], params: PoolingParams, *, request_id: str = "request"
    ) -> list[PoolingRequestOutput]:
        """Return the results of prompts, in their order. If one cannot be served, none is.

        Args:
            prompts: texts or tokens; pairs as `pooled_inputs.pair` returns them.
            params: parameters of all prompts.
            request_id: name of the outputs.

        Raises:
            RequestError: a prompt or a parameter cannot be served.
            RequestFailure: work for a prompt failed.
            EngineUnavailable: the engine has not started, has ended, or is closed.
        """
        await self._start_itself()
        self._check()
        call = self.open(await asyncio.to_thread(self._tokens, prompts, params), params)
        try:
            await call.wait()
            done = [(prompt, prompt.pooled) for prompt in call.prompts]
        finally:
            call.close()
        outputs: list[PoolingRequestOutput] = []
        for number, (prompt, pooled) in enumerate(done):
            name = f"{request_id}-{number}" if number else request_id
            outputs.append(
                PoolingRequestOutput(
                    request_id=name,
                    prompt_token_ids=plain_ids(prompt.token_ids),
                    result=RequestFailure(name, "engine", "was aborted") if pooled is None else PoolingOutput(pooled),
                    num_cached_tokens=prompt.num_cached_tokens,
                )
            )
        return outputs

    async def encode(
        self, prompt: PromptInput, pooling_params: PoolingParams, request_id: str | None = None
    ) -> AsyncGenerator[PoolingRequestOutput]:
        """Yield the result of one prompt, once. Name and form are vLLM's.

        Args:
            prompt: as for `generate`.
            pooling_params: task and parameters.
            request_id: name of the output.

        Yields:
            The result.

        Raises:
            RequestError: as `pool`; so are RequestFailure and EngineUnavailable.
        """
        if not isinstance(pooling_params, PoolingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("pooling_params", shortened(repr(pooling_params)), "must be PoolingParams")
        name = "request" if request_id is None else request_id
        admit_names(name, 0)
        await self._start_itself()
        self._check()
        plain = self.pooled_inputs.text(prompt, None)
        (output,) = await self.pool([plain], pooling_params, request_id=name)
        yield output

    def _pairs(self, prompts: Sequence[list[int]]) -> Sequence[list[int]]:
        """Return prompts as pairs, of which the encoder reads the prompt, for a model with an encoder of text."""
        encoder = self.facts.text_encoder
        return prompts if encoder is None else [text_pair(prompt, None, encoder) for prompt in prompts]

    async def _plain(self, prompt: PromptInput) -> Prompt:
        """Return the text or the token ids of a prompt, with the frames of its audio if it has some."""
        encoder = self.facts.encoder or self.facts.text_encoder
        if encoder is None:
            return plain_prompt(prompt)
        return await asyncio.to_thread(encoder_prompt, prompt, self.tokenizer, encoder)

    def _tokens(self, prompts: Sequence[Prompt], params: PoolingParams) -> list[list[int]]:
        """Return the tokens of prompts that can be served."""
        facts = self.facts
        admitted_pooling(params, facts.pooler, facts.row_size)
        return [
            admitted_whole_prompt(prompt, params, self.tokenizer, facts.vocab_size, facts.context_len)
            for prompt in tokenized_ahead(self.tokenizer, prompts)
        ]
