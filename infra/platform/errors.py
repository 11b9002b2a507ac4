"""The flat family of errors, named by the boundary they cross, and `boundary`, which converts untyped exceptions.

Each error takes one message, so that it survives pickling. The message names the fault, the value seen, the
value wanted and the id.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class OstinatoError(Exception):
    """Base of all errors that cross a boundary of the project."""


class ConfigError(OstinatoError):
    """A recipe, setting or request is wrong. The same input fails again."""


class ProblemError(OstinatoError):
    """An RL problem or its repository cannot be built, proven or loaded."""


class SandboxError(OstinatoError):
    """A sandbox refused or broke an operation."""


class SandboxLost(SandboxError):
    """The sandbox process is gone. Whatever ran in it must start again elsewhere."""


class SandboxHostLost(SandboxLost):
    """The machine of a sandbox is gone or reclaimed it. Nothing that ran inside is the cause."""


class CapacityExhausted(SandboxError):
    """No sandbox became available within the time limit."""


class OutOfMemory(SandboxError):
    """The sandbox exceeded its memory limit and was killed. The program inside is the cause."""


class OutputLimit(SandboxError):
    """The answer is larger than the sandbox may return at once. Ask for less."""


class SandboxNotFound(SandboxError):
    """No such file, snapshot or sandbox."""


class InvalidArgument(SandboxError):
    """The request can never succeed, for example a path outside or a folder instead of a file."""


class AgentError(OstinatoError):
    """The harness could not run an attempt."""


class GradingError(OstinatoError):
    """A verdict or reward could not be computed."""


class EngineError(OstinatoError):
    """Generation failed or a replica is gone."""


class StorageError(OstinatoError):
    """Object store, ledger or disk: unreachable, full, corrupt or inconsistent."""


class TrainingError(OstinatoError):
    """Training or another long computation failed in a way that would repeat."""


class ClusterError(OstinatoError):
    """A process, actor or node died or could not start."""


def _with_subclasses(kind: type[OstinatoError]) -> Iterator[type[OstinatoError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)


ERROR_TYPES = {kind.__name__: kind for kind in _with_subclasses(OstinatoError)}
# infrastructure faults: an attempt that ends with one is repeated or masked, never rewarded
_RETRYABLE = (SandboxLost, CapacityExhausted, EngineError, StorageError, ClusterError)


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later. Any other error would repeat."""
    return isinstance(error, _RETRYABLE)


def type_name(error: OstinatoError) -> str:
    """Name of the closest class in ERROR_TYPES. Libraries such as Ray raise subclasses of their own."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERROR_TYPES)


@contextmanager
def boundary(error_type: type[OstinatoError], what: str) -> Iterator[None]:
    """Converts an untyped exception into `error_type`, and the OSError of a full disk into StorageError."""
    try:
        yield
    except OstinatoError:
        raise
    except Exception as error:
        is_full_disk = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = StorageError if is_full_disk else error_type
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
