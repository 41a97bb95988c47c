"""Errors of the Hugging Face hub as one line with a hint."""

from __future__ import annotations

from collections.abc import Iterator

from phonograph.errors import shortened

_LONGEST = 150
_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


def hub_problem(error: BaseException) -> str | None:
    """Return problem and remedy for an error of the hub's client, or None for another error.

    Libraries wrap the client's errors, so causes and contexts are examined too.
    """
    from huggingface_hub import errors

    chain = list(_chain(error))
    for kind, problem in (
        (errors.GatedRepoError, f"is gated on the hub; accept its terms on its page there, and {_LOG_IN}"),
        (errors.DisabledRepoError, "has been disabled on the hub; choose another"),
        (errors.RevisionNotFoundError, "has no such revision on the hub; give a branch, tag or commit of it"),
        (errors.RepositoryNotFoundError, f"is not on the hub, or is private; check the name, or {_LOG_IN}"),
        (errors.HFValidationError, "is not a valid name on the hub; give owner/name"),
    ):
        if any(isinstance(one, kind) for one in chain):
            return problem
    status = next((_status(one) for one in chain if isinstance(one, errors.HfHubHTTPError)), None)
    if status in (401, 403):
        return f"cannot be read with this token (HTTP {status}); {_LOG_IN}"
    if status is not None:
        return f"could not be read, the hub answered HTTP {status}; try again later, or give a local folder"
    offline = errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError
    if any(
        isinstance(one, offline) or type(one).__module__.partition(".")[0] in ("httpx", "requests") for one in chain
    ):
        return (
            "could not be read: the hub cannot be reached; check the network and HF_HUB_OFFLINE, or give a local folder"
        )
    return None


def first_line(error: BaseException) -> str:
    """Return the beginning of an error's text on one line."""
    return shortened(" ".join(str(error).split()) or type(error).__name__, _LONGEST)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
