"""`--model phonograph` of lm-evaluation-harness: the offline API, with all requests in the engine at once.

Importing this registers it. What the harness would truncate is truncated here too, from the left, and said.
"""

# pyright: basic, reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import refuse_logits
from phonograph.engine.llm import LLM
from phonograph.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""Texts for the cache, context, continuation."""


@register_model("phonograph")
class PhonographLM(TemplateLM):
    """An engine as the harness sees models.

    settings are the engine's, as `LLM(...)` takes them; `pretrained`, the harness's own word, is the model.

    llm:           an engine that is there already, instead of settings
    max_gen_toks:  tokens to generate where a task does not say
    add_bos_token: begin every text with the tokens that the tokenizer puts there; chat templates have their own
    device:        as the engine's; "cuda:0", the default of the harness, leaves it to the engine
    batch_size, max_batch_size: the harness always passes them, and they mean nothing here: the scheduler batches

    Raises:
        PhonographError: as `LLM`; ConfigError where there is no tokenizer.
    """

    def __init__(
        self,
        *,
        llm: LLM | None = None,
        pretrained: str | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool = False,
        device: str | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if pretrained is not None:
            settings["model"] = pretrained
        if device not in (None, "cuda:0"):
            settings["device"] = device
        if llm is not None and settings:
            raise ConfigError("llm", "an engine", f"has its settings; leave out {', '.join(settings)}")
        self.llm = llm or LLM(**settings)
        refuse_logits(self.llm.config.logprobs_mode, "the harness")
        found = self.llm.tokenizer
        if found is None:
            raise ConfigError("tokenizer", self.llm.config.tokenizer, "the harness asks in text; give the model one")
        self._tokenizer = found
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together."""
        return self.llm.plan.limits.max_model_len

    @property
    def eot_token_id(self) -> int:
        """Stands for the beginning of a text, too, where the tokenizer has nothing for that."""
        ids = self.llm.plan.model.eos_token_ids
        token_id = self._tokenizer.eos_token_id if self._tokenizer.eos_token_id is not None else next(iter(ids), None)
        if token_id is None:
            raise ConfigError("tokenizer", self.tokenizer_name, "has no end of sequence to stand for an empty context")
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one."""
        begin = self._tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Tells the harness's caches apart."""
        return (self.llm.config.tokenizer or self.llm.config.model).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the name of the model's chat template for the run's record; no other can be chosen here."""
        return self._tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation as text, up to where an answer begins or continues."""
        return self._tokenizer.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Token ids; special tokens around them only with add_bos_token, unless the harness says."""
        special = self._add_bos_token if add_special_tokens is None else add_special_tokens
        return self._tokenizer.encode(string, add_special_tokens=special)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each up to the first of its stop strings, which is cut off."""
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        stops: list[list[str]] = []
        for request in requests:
            arguments: tuple[Any, ...] = request.args
            context, asked = arguments
            wanted: dict[str, Any] = {**normalize_gen_kwargs(asked, self._max_gen_toks)}
            wanted.pop("do_sample", None)
            max_tokens, until = wanted.pop("max_gen_toks"), [one for one in wanted.pop("until") if one]
            params.append(_sampling_params(wanted, max_tokens=max_tokens, stop=until))
            prompts.append(self._left_truncated(self.tok_encode(context), self.max_length - max_tokens))
            stops.append(until)
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts: list[str] = []
        for request, output, until in zip(requests, outputs, stops, strict=True):
            if output.error is not None:
                raise output.error
            texts.append(postprocess_generated_text(output.outputs[0].text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's context that do not overlap."""
        windows: list[Scored] = []
        counts: list[int] = []
        for request in requests:
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            own: list[Scored] = [(None, *make_disjoint_window(part)) for part in parts]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        sums = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is what greedy decoding would have written."""
        # The engine makes a token after each prompt that it scores.
        prompts = [self._left_truncated(context + rest, self.max_length - 1) for _, context, rest in requests]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        answers: list[tuple[float, bool]] = []
        for (cache_key, _, rest), output in zip(requests, outputs, strict=True):
            if output.error is not None:
                raise output.error
            assert output.prompt_logprobs is not None
            scored = output.prompt_logprobs[max(0, len(output.prompt_token_ids) - len(rest)) :]
            positions = [position for position in scored if position is not None]
            total = sum(position.logprobs[0] for position in positions)
            answers.append((total, all(position.ranks[0] == 1 for position in positions)))
            if cache_key is not None:
                self.cache_hook.add_partial("loglikelihood", cache_key, answers[-1])
        return answers

    def _left_truncated(self, token_ids: list[int], most: int) -> list[int]:
        if most < 1:
            raise RequestError("max_gen_toks", self.max_length - most, f"the context holds {self.max_length} tokens")
        if len(token_ids) > most:
            log.warning("a prompt of %d tokens is cut from the left to %d", len(token_ids), most)
        return token_ids[-most:]


def _sampling_params(asked: dict[str, Any], *, max_tokens: int, stop: list[str]) -> SamplingParams:
    """Convert the harness's sampling parameters, which have the engine's names.

    Raises:
        RequestError: the engine does not know one, or its value is out of range.
    """
    unknown = asked.keys() - SamplingParams.__dataclass_fields__.keys()
    if unknown:
        name = sorted(unknown)[0]
        raise RequestError(name, asked[name], "is not a sampling parameter of the engine")
    return SamplingParams(max_tokens=max_tokens, stop=stop, **asked)
