"""Schemathesis loads this (SCHEMATHESIS_HOOKS): what its own checks cannot see."""

import schemathesis


@schemathesis.check
def no_failure_in_a_stream(ctx, response, case):
    """Check that no event of a stream is an error: its status is 200 from the beginning."""
    if "text/event-stream" not in (response.headers.get("content-type") or [""])[0]:
        return
    text = response.content.decode()
    assert '"type":"server_error"' not in text, text[-1000:]
    assert text.endswith("data: [DONE]\n\n"), text[-1000:]
