"""OpenAI-compatible server around the engine.

```
clients ── HTTP ──► app ─► routes ─► AsyncLLM ══ ZeroMQ ══► CoreLoop ─► Session ─► EngineCore
                     text, tokens, JSON, limits                 requests and steps
                     (the server's process)                     (the engine's process)
```

The server's process does all text work, so that requests of clients do not delay a step; the engine's process gets
token ids only. The server needs the packages of the extra `server`; lower rooms do not.
"""
