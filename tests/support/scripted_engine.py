"""An engine whose answers are written by the test: it reads the prompt as text, and streams the tokens of an answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn
from chat_forms import ChatForm
from tokenizers_made import byte_level

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.core.batch import DraftCounts
from phonograph.engine.async_llm import AsyncLLM
from phonograph.engine.process.client import StartProgress
from phonograph.engine.process.messages import Abort, Add, Command, EngineFacts, PromptFacts, Report
from phonograph.scheduling.scheduler_stats import SchedulerStats
from phonograph.server.chat.serving import Serving
from phonograph.server.http.application import make_app
from phonograph.server.http.http_protocol import http_protocol
from phonograph.text.tokenizer import Tokenizer

CONTEXT_LEN = 1 << 20
Script = Callable[[str], str]
"""Returns the answer to a prompt."""


class ScriptedClient:
    """Connection to no engine: each prompt is answered by the script, with a few tokens a report.

    Args:
        script: makes the answers.
        tokenizer: of prompts and answers.
        before_step: a function that a thread calls before each report.
        tokens: tokens of a report.
    """

    def __init__(
        self, script: Script, tokenizer: Tokenizer, *, before_step: Callable[[], object] | None = None, tokens: int = 5
    ) -> None:
        self._script, self._tokenizer = script, tokenizer
        self._before_step, self._tokens = before_step, tokens
        self._reports: asyncio.Queue[Report] = asyncio.Queue()
        self._running: dict[int, asyncio.Task[None]] = {}

    async def ready(self, progress: StartProgress) -> EngineFacts:
        facts: Any = SimpleNamespace(
            context_len=CONTEXT_LEN,
            vocab_size=self._tokenizer.vocab_size,
            pooler=None,
            encoder=None,
            text_encoder=None,
            max_num_seqs=256,
            scheduling_policy="fcfs",
            stats=self._stats(),
        )
        return facts

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            for key, token_ids in command.prompts.items():
                text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
                answer = self._tokenizer.encode(self._script(text), add_special_tokens=False)
                steps = self._answer(key, answer, command.params.max_tokens or CONTEXT_LEN)
                self._running[key] = asyncio.get_running_loop().create_task(steps)
        elif isinstance(command, Abort) and command.key in self._running:
            self._running.pop(command.key).cancel()

    async def receive(self) -> list[Report]:
        return [await self._reports.get()]

    def on_death(self, callback: Callable[[], None]) -> None:
        """It does not die."""

    def end(self) -> str:
        return "the script ended"

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        for task in self._running.values():
            task.cancel()

    async def _answer(self, key: int, token_ids: list[int], most: int) -> None:
        reason = "stop" if len(token_ids) <= most else "length"
        token_ids = token_ids[:most]
        prompts = {key: PromptFacts(0, None)}
        for start in range(0, max(len(token_ids), 1), self._tokens):
            await (asyncio.sleep(0) if self._before_step is None else asyncio.to_thread(self._before_step))
            ended = start + self._tokens >= len(token_ids)
            update = (key, 0, token_ids[start : start + self._tokens], None, reason if ended else None, None)
            self._reports.put_nowait(Report(stats=self._stats(), num_steps=0, updates=[update], prompts=prompts))
            prompts = {}
        self._running.pop(key, None)

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=0,
            blocks_used=0,
            num_blocks=1,
            num_preemptions=0,
            prefix_queries=0,
            prefix_hits=0,
            drafts=DraftCounts(),
        )


@contextmanager
def scripted_engine(
    script: Script,
    *,
    form: ChatForm,
    name: str = "scripted",
    wrap: Callable[[Any], Any] = lambda app: app,
    port: int = 0,
    before_step: Callable[[], object] | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Serve a script until the end of the block; yield the address.

    Args:
        script: makes the answers.
        form: of the model's chats.
        name: of the model.
        wrap: changes the application.
        port: of the server; 0 is a free one.
        before_step: a function that a thread calls before each piece of an answer.
        settings: of the server.
    """
    tokenizer = byte_level(form.markers)
    started = threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        config = EngineConfig(model="demo")
        client = ScriptedClient(script, tokenizer, before_step=before_step)
        async with AsyncLLM(config=config, client=lambda _: client) as engine:
            engine.tokenizer = tokenizer
            serving = Serving(engine, ServerConfig(**settings), name, {}, form.template)
            http = uvicorn.Server(
                uvicorn.Config(
                    wrap(make_app(serving)),
                    lifespan="off",
                    ws="none",
                    http=http_protocol(serving.config),
                    log_level="error",
                    timeout_graceful_shutdown=1,
                )
            )
            listener = socket.create_server(("127.0.0.1", port))
            found.extend((http, listener.getsockname()[1]))
            started.set()
            await http.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        found[0].should_exit = True
        thread.join(20)
