"""Owns the errors a person may see. Each says which field or file, what was found and what is allowed.

`rpc.errors` maps every class here to one gRPC status code; nothing else does.
"""

from __future__ import annotations

import logging
from uuid import uuid4

_log = logging.getLogger(__name__)
_MOST_FOUND_CHARS = 300  # of what was found: the rest of a message must be left room, in headers of 8 KiB


class OutriderError(Exception):
    """Base of all errors that outrider raises on purpose."""


class InvalidArgument(OutriderError):
    """A request field holds a value that is not allowed.

    Args:
        field: dotted path of the field, e.g. ``sampling_params.top_p``.
        found: what the field held; of a long text the message has the beginning.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, found: object, allowed: str) -> None:
        self.field, self.found, self.allowed = field, found, allowed
        super().__init__(f"{field}: found {_shortened(repr(found))}, allowed is {allowed}")


def _shortened(text: str) -> str:
    """At most _MOST_FOUND_CHARS of it, how long it was included."""
    if len(text) <= _MOST_FOUND_CHARS:
        return text
    rest = f"… ({len(text)} characters)"
    return text[: _MOST_FOUND_CHARS - len(rest)] + rest


class PairMismatch(OutriderError):
    """Draft and target do not share a vocabulary, so no proposal could be verified."""


class ModelNotFound(OutriderError):
    """A model folder, or a file that must be inside it, does not exist or cannot be read."""


class Overloaded(OutriderError):
    """No capacity for another session now.

    Args:
        retry_after_s: seconds after which a caller may try again.
    """

    def __init__(self, what: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{what}; retry in {retry_after_s:.1f} s")


class PermissionDenied(OutriderError):
    """Who the caller is is known, and that it may not do this."""


class LimitExceeded(Overloaded):
    """A tenant has used up what it may have for now."""


class SlowReader(Overloaded):
    """A caller took too long to read what was there for it."""


class Unauthenticated(OutriderError):
    """A call came without a key or token that is accepted here."""


class Unavailable(OutriderError):
    """A peer that this call needs cannot be reached."""


class UnknownSession(OutriderError):
    """A message names a session that is not open here."""


class DeadlineExceeded(OutriderError):
    """A session was closed because its deadline passed."""


class InternalError(OutriderError):
    """Something failed that should not have; what it was stands in the log of the process where it failed.

    Args:
        incident: the id under which that log has the traceback.
    """

    def __init__(self, incident: str) -> None:
        self.incident = incident
        super().__init__(f"internal error, see the server log under id {incident}")


def presentable(error: BaseException, doing: str) -> OutriderError:
    """`error` itself if it was meant to be seen; else an InternalError, once the traceback is in the log.

    Args:
        error: what was raised.
        doing: what failed, for the log, e.g. "engine step".
    """
    if isinstance(error, OutriderError):
        return error
    incident = uuid4().hex[:12]
    _log.error("%s failed, id %s", doing, incident, exc_info=error)
    return InternalError(incident)


class EngineFault(OutriderError):
    """The engine could not go on with a session (a model that yields NaN, say); other sessions are unaffected."""
