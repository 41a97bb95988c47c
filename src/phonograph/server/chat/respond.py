"""The response to a request, at once or as a stream, when its call has ended or begun to answer."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse, Response

from phonograph.engine.process.calls import Call
from phonograph.errors import PhonographError
from phonograph.server.http.api_errors import api_error
from phonograph.server.http.stream import AnswerWriter, EventStream
from phonograph.server.observe.warning_header import with_grammar_warnings


async def respond(
    call: Call, answer: AnswerWriter, headers: Mapping[str, str], names: Mapping[str, str], *, streams: bool
) -> Response:
    """Wait for the answer, or for its beginning, and return the response.

    Args:
        call: the call of the engine.
        answer: writes the answer.
        headers: headers of the answer.
        names: the request's names of engine parameters, where they differ.
        streams: send the answer as it grows.

    Raises:
        ApiError: the call failed before the answer began.
    """
    call.name = answer.name
    try:
        if streams:
            await call.wait(peek=True)
            return EventStream(call, answer, with_grammar_warnings(headers, call), names)
        await call.wait()
        call.close()
        return JSONResponse(answer.whole(), headers=with_grammar_warnings(headers, call))
    except PhonographError as error:
        call.close()
        raise api_error(error, names) from None
    except BaseException:
        call.close()
        raise
