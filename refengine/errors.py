"""Errors a user can act on. Each carries one clear sentence, and each leaves the engine as it was."""

from __future__ import annotations


class RefengineError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(RefengineError, ValueError):
    """An option that is unknown, impossible, or that contradicts another one."""


class CheckpointError(RefengineError):
    """A model directory that is missing, damaged, or of a kind that is not supported."""


class RequestError(RefengineError, ValueError):
    """A request that cannot be served. `request_id` names it, so that one bad request in a batch fails alone."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id!r}: {reason}")
        self.request_id = request_id
        self.reason = reason


class IntegrityError(RefengineError, AssertionError):
    """A structure contradicts itself: `check_integrity()` found a broken invariant. Always a bug of a part."""


class PartError(RefengineError):
    """A part that a reader plugged in failed: names the part, the call and what was expected of it."""
