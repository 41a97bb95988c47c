"""An OpenAI-compatible server around the engine.

```
clients ── HTTP ──► app ─► routes ─► AsyncLLM ══ ZeroMQ ══► CoreLoop ─► Session ─► EngineCore
                     text, tokens, JSON, limits                 requests and steps
                     (the server's process)                     (the engine's process)
```

Text is the server process's business, so that nothing a client sends delays a step: the engine's process sees token
ids only. It needs the packages of the extra `server`; nothing below it does.
"""
