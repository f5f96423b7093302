"""The one tree of errors. Each states the fault, its cause and the remedy; each has a stable `code`.

    TandemError
    ├── InvalidRequestError        the client's request is wrong (names the field)
    │   ├── UnknownModelError
    │   ├── NotFoundError          no such response, file or batch
    │   ├── ContextLengthError
    │   ├── InvalidGrammarError    no answer can be made to follow it (names the place in the schema)
    │   ├── UnsupportedParameterError
    │   ├── UnsupportedEndpointError
    │   ├── RequestTooLargeError
    │   └── MediaTypeError
    ├── AuthError                  a missing or wrong key or cluster secret
    ├── PermissionDeniedError      a key that may not do this
    ├── ConflictError              another writer changed it first, or a precondition does not hold
    ├── RateLimitError             this tenant has had its share; waiting helps
    ├── QuotaError                 this tenant keeps as much as it may; waiting does not help, deleting does
    ├── CapacityError              no room now; waiting helps
    ├── UnavailableError           no worker can take it now; waiting helps
    ├── WorkerLostError            a worker died or stalled while it held the request
    ├── TransferError              a KV transfer failed; its attempt is over
    │   └── PairRefusedError       the KV of two workers does not fit together
    ├── CancelledError             the client left or a deadline passed
    ├── DeadlineError
    ├── StartupError               wrong configuration, model, port, memory …
    │   ├── ConfigError
    │   └── ModelError
    └── InternalError              our own fault

`STATUS` maps every code to HTTP and gRPC once, for all front doors.
"""

from __future__ import annotations

from typing import ClassVar


class TandemError(Exception):
    """Base: `what` happened, `why`, and the remedy `todo`; `retryable` = the same request may succeed later or
    elsewhere; `retry_after_s` = when, if that is known."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(
        self, what: str, *, why: str = "", todo: str = "", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        self.what, self.why, self.todo, self.param = what, why, todo, param
        self.retry_after_s = retry_after_s
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """One line: the fault, its cause and the remedy."""
        text = self.what.rstrip(".")
        if self.why:
            text += f": {self.why.rstrip('.')}"
        todo = self.todo.rstrip(".")
        return f"{text}. {todo[0].upper()}{todo[1:]}." if todo else f"{text}."


class InvalidRequestError(TandemError):
    code = "invalid_request"


class UnknownModelError(InvalidRequestError):
    code = "model_not_found"


class NotFoundError(InvalidRequestError):
    code = "not_found"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class InvalidGrammarError(InvalidRequestError):
    code = "invalid_grammar"


class UnsupportedParameterError(InvalidRequestError):
    code = "unsupported_parameter"


class UnsupportedEndpointError(InvalidRequestError):
    code = "unsupported_endpoint"


class RequestTooLargeError(InvalidRequestError):
    code = "request_too_large"


class MediaTypeError(InvalidRequestError):
    code = "unsupported_media_type"


class AuthError(TandemError):
    code = "invalid_api_key"


class PermissionDeniedError(TandemError):
    code = "insufficient_permissions"


class ConflictError(TandemError):
    code = "conflict"


class RateLimitError(TandemError):
    code = "rate_limit_exceeded"
    retryable = True


class QuotaError(TandemError):
    code = "quota_exceeded"


class CapacityError(TandemError):
    code = "overloaded"
    retryable = True


class UnavailableError(TandemError):
    code = "unavailable"
    retryable = True


class WorkerLostError(TandemError):
    code = "worker_lost"
    retryable = True


class TransferError(TandemError):
    code = "transfer_failed"
    retryable = True


class PairRefusedError(TransferError):
    code = "pair_refused"
    retryable = False


class CancelledError(TandemError):
    code = "cancelled"


class DeadlineError(TandemError):
    code = "deadline_exceeded"


class StartupError(TandemError):
    code = "startup"


class ConfigError(StartupError):
    code = "config"


class ModelError(StartupError):
    code = "model"


class InternalError(TandemError):
    code = "internal"


STATUS: dict[str, tuple[int, str]] = {
    "invalid_request": (400, "INVALID_ARGUMENT"),
    "model_not_found": (404, "NOT_FOUND"),
    "not_found": (404, "NOT_FOUND"),
    "context_length_exceeded": (400, "INVALID_ARGUMENT"),
    "invalid_grammar": (400, "INVALID_ARGUMENT"),
    "unsupported_parameter": (400, "INVALID_ARGUMENT"),
    "unsupported_endpoint": (404, "UNIMPLEMENTED"),
    "request_too_large": (413, "INVALID_ARGUMENT"),
    "unsupported_media_type": (415, "INVALID_ARGUMENT"),
    "invalid_api_key": (401, "UNAUTHENTICATED"),
    "insufficient_permissions": (403, "PERMISSION_DENIED"),
    "conflict": (409, "ABORTED"),
    "rate_limit_exceeded": (429, "RESOURCE_EXHAUSTED"),
    "quota_exceeded": (429, "RESOURCE_EXHAUSTED"),
    "overloaded": (503, "RESOURCE_EXHAUSTED"),
    "unavailable": (503, "UNAVAILABLE"),
    "worker_lost": (502, "UNAVAILABLE"),
    "transfer_failed": (502, "UNAVAILABLE"),
    "pair_refused": (503, "FAILED_PRECONDITION"),
    "cancelled": (499, "CANCELLED"),
    "deadline_exceeded": (504, "DEADLINE_EXCEEDED"),
    "startup": (500, "INTERNAL"),
    "config": (500, "INTERNAL"),
    "model": (500, "INTERNAL"),
    "internal": (500, "INTERNAL"),
}
"""code → (HTTP status, gRPC status name)."""

_BY_CODE: dict[str, type[TandemError]] = {
    cls.code: cls
    for cls in (
        InvalidRequestError, UnknownModelError, NotFoundError, ContextLengthError, UnsupportedParameterError,
        UnsupportedEndpointError, InvalidGrammarError,
        RequestTooLargeError, MediaTypeError, AuthError, CapacityError, UnavailableError, WorkerLostError,
        TransferError, PairRefusedError, CancelledError, DeadlineError, StartupError, ConfigError, ModelError,
        InternalError,
        PermissionDeniedError, RateLimitError, QuotaError, ConflictError,
    )
}  # fmt: skip


def from_code(code: str, message: str) -> TandemError:
    """The error of that `code` with a finished message, as it came over the wire; unknown codes are internal."""
    return _BY_CODE.get(code, InternalError)(message)
