"""Lines of the log about each request, with --enable-log-requests: what it asks for, and how it ended."""

from __future__ import annotations

import logging
import time

from phonograph.config.server_config import ServerConfig
from phonograph.core.pooling_params import PoolingParams
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.token_types import plain_ids
from phonograph.engine.process.calls import Call
from phonograph.errors import counted, shortened
from phonograph.server.observe.logs import REQUEST_ID
from phonograph.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def log_request(call: Call, params: SamplingParams | PoolingParams, tokenizer: Tokenizer, config: ServerConfig) -> None:
    """Log a call that has been opened, and another line when it ends."""
    most = config.max_log_len
    for prompt in call.prompts:
        # A token has one character or more, but for parts of one.
        text = tokenizer.decode(plain_ids(prompt.token_ids)[: None if most is None else 4 * most])
        shown = repr(text if most is None else shortened(text, most))
        log.info("received: prompt %s of %s, %s", shown, counted(len(prompt.token_ids), "token"), params)
    # The end may come from another task.
    extra = {"request_id": REQUEST_ID.get()}

    def log_end(ended: Call) -> None:
        samples = ended.samples
        reasons = ", ".join(sample.finish_reason or "abort" for sample in samples)
        num_tokens = counted(sum(len(sample.token_ids) for sample in samples), "token")
        seconds = time.monotonic() - ended.prompts[0].opened
        log.info("ended: %s after %s in %.3f s", reasons, num_tokens, seconds, extra=extra)

    call.at_end(log_end)
