"""Schemathesis loads this (SCHEMATHESIS_HOOKS): what its own checks cannot see."""

import json

import schemathesis

ENDS = {
    "/v1/responses": ("response.completed", "response.incomplete"),
    "/v1/messages": ("message_stop",),
}
"""Types of the last event of protocols without the mark [DONE]."""


@schemathesis.check
def no_failure_in_a_stream(ctx, response, case):
    """Check that a stream, whose status is 200 from the beginning, has no error and ends as its protocol says."""
    kind = (response.headers.get("content-type") or [""])[0]
    text = response.content.decode()
    pieces = text.split("\n")  # texts in JSON may have other ends of lines
    if "application/x-ndjson" in kind:
        lines = [json.loads(line) for line in pieces if line]
        assert lines[-1].get("done") is True, text[-1000:]
        assert not any(line.get("done") for line in lines[:-1]), text[-1000:]
        return
    if "text/event-stream" not in kind:
        return
    assert '"type":"server_error"' not in text, text[-1000:]
    ends = ENDS.get(case.path)
    if ends is None:
        assert text.endswith("data: [DONE]\n\n"), text[-1000:]
        return
    events = [json.loads(line.removeprefix("data: ")) for line in pieces if line.startswith("data: ")]
    assert not any(event["type"] in ("error", "response.failed") for event in events), text[-1000:]
    assert events[-1]["type"] in ends, text[-1000:]
