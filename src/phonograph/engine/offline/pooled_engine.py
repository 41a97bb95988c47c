"""`PooledEngine`: the methods of `LLM` for models that generate nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from phonograph.core.pooling_params import PoolingParams, PoolingTask
from phonograph.core.token_types import TypedTokens
from phonograph.engine.admission import Prompt
from phonograph.engine.offline.answer_inputs import answer_inputs
from phonograph.engine.offline.offline_engine import OfflineEngine
from phonograph.engine.offline.pooled_inputs import PooledInputs, cosine, paired
from phonograph.engine.offline.prompts import PromptInput, prompt_list, refuse_unsupported
from phonograph.engine.outputs import PoolingOutput, PoolingRequestOutput, pooling_output
from phonograph.errors import RequestError, shortened


class PooledEngine(OfflineEngine):
    """An engine with methods for embeddings, classes and scores. Names of methods and arguments are vLLM's."""

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        prompt_name: str | None = None,
        lora_request: object = None,
        tokenization_kwargs: object = None,
    ) -> list[PoolingRequestOutput]:
        """Return the embedding of each prompt.

        Args:
            prompts: as for `generate`.
            use_tqdm: as for `generate`.
            pooling_params: defaults to `PoolingParams(task="embed")`.
            prompt_name: text of the model's folder to put before each text (config_sentence_transformers.json);
                defaults to the folder's default.
            lora_request: not supported; must be None.
            tokenization_kwargs: not supported; must be None.

        Raises:
            RequestError: as for `generate`, or the model makes no embeddings.

        Example:
            ```python
            with LLM("demo", convert="embed", max_num_seqs=2, enforce_eager=True) as embedder:
                first, second = embedder.embed(["Tom has 12 apples.", "1 2 3"])
            assert len(first.outputs.embedding) == len(second.outputs.embedding)
            ```
        """
        refuse_unsupported(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return self._pooled("embed", prompts, pooling_params, use_tqdm=use_tqdm, prompt_name=prompt_name)

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object = None,
        tokenization_kwargs: object = None,
    ) -> list[PoolingRequestOutput]:
        """Return the probabilities of the classes of each prompt.

        Args:
            prompts: as for `generate`.
            use_tqdm: as for `generate`.
            pooling_params: defaults to `PoolingParams(task="classify")`.
            lora_request: not supported; must be None.
            tokenization_kwargs: not supported; must be None.

        Raises:
            RequestError: as for `generate`, or the model has no classes.
        """
        refuse_unsupported(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return self._pooled("classify", prompts, pooling_params, use_tqdm=use_tqdm)

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: PoolingTask | None = None,
        lora_request: object = None,
        tokenization_kwargs: object = None,
    ) -> list[PoolingRequestOutput]:
        """Return the result of any task of the model, which for token tasks has a row for each token.

        Args:
            prompts: as for `generate`.
            pooling_params: parameters of all prompts.
            use_tqdm: as for `generate`.
            pooling_task: task in place of that of `pooling_params`.
            lora_request: not supported; must be None.
            tokenization_kwargs: not supported; must be None.

        Raises:
            RequestError: as for `embed`.
        """
        refuse_unsupported(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return self._pooled(pooling_task, prompts, pooling_params, use_tqdm=use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object = None,
        tokenization_kwargs: object = None,
        chat_template: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the score of each pair of texts: that of a reranker, or the cosine of two embeddings.

        Args:
            data_1: one text for all pairs, or one for each.
            data_2: the second text of each pair.
            use_tqdm: as for `generate`.
            pooling_params: parameters of all pairs.
            lora_request: not supported; must be None.
            tokenization_kwargs: not supported; must be None.
            chat_template: template of a pair for rerankers, with the roles query and document; defaults to the model's.

        Raises:
            RequestError: the texts do not make pairs, or the model neither scores nor embeds.

        Example:
            ```python
            with LLM("demo", convert="embed", max_num_seqs=2, enforce_eager=True) as embedder:
                same, other = embedder.score("1 2 3", ["1 2 3", "Tom has 12 apples."])
            assert same.outputs.score > other.outputs.score
            ```
        """
        refuse_unsupported(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        pairs, params, inputs = paired(data_1, data_2), pooling_params or PoolingParams(), self._inputs
        if inputs.scores_pairs:
            prompts = [inputs.pair(*pair, params, template=chat_template) for pair in pairs]
            return self._pooled("score", prompts, params, use_tqdm=use_tqdm)
        if chat_template is not None:
            raise RequestError("chat_template", shortened(chat_template), "is for rerankers; embeddings have no pairs")
        texts = dict.fromkeys(text for pair in pairs for text in pair)
        found = dict(zip(texts, self._pooled("embed", [*texts], params, use_tqdm=use_tqdm), strict=True))
        return [
            PoolingRequestOutput(
                request_id=f"{found[first].request_id},{found[second].request_id}",
                prompt_token_ids=found[first].prompt_token_ids + found[second].prompt_token_ids,
                result=PoolingOutput(cosine(found[first].outputs.data, found[second].outputs.data)),
            )
            for first, second in pairs
        ]

    @cached_property
    def _inputs(self) -> PooledInputs:
        model, scheduler = self.plan.model, self.engine.core.scheduler
        return PooledInputs(self.config, model.pooler, model.has_token_types, scheduler.context_len - 1, self.tokenizer)

    def _pooled(
        self,
        task: PoolingTask | None,
        prompts: PromptInput | Sequence[PromptInput],
        params: PoolingParams | None,
        *,
        use_tqdm: bool,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the results of all prompts."""
        params = params or PoolingParams()
        params = params if task is None else replace(params, task=task)

        def text(prompt: PromptInput) -> Prompt:
            return prompt if isinstance(prompt, TypedTokens) else self._inputs.text(prompt, prompt_name)

        with self._calls.held(task or "encode"):
            outputs = answer_inputs(
                self.session, prompt_list(prompts), text, sampling_params=params, priority=None, use_tqdm=use_tqdm
            )
        return [pooling_output(output) for output in outputs]
