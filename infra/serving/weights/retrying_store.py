"""An object store that retries transient failures.

Errors of an overloaded or unreachable server are retried. A missing object, a missing permission and
a full disk are not.
"""

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore

logger = logging.getLogger(__name__)

ATTEMPTS = 5
FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 5.0
_LASTING_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)

Result = TypeVar("Result")


class RetryingStore(ObjectStore):
    """The part of `ObjectStore` that chains use, with retries."""

    def __init__(self, inner: ObjectStore, attempts: int = ATTEMPTS) -> None:
        self.url = inner.url
        self._inner = inner
        self._attempts = attempts

    @classmethod
    def around(cls, objects: ObjectStore) -> "RetryingStore":
        """A retrying store over `objects`, or `objects` itself when it is one."""
        return objects if isinstance(objects, RetryingStore) else cls(objects)

    def put_bytes(self, key: str, data: bytes) -> str:
        return self._with_retries(lambda: self._inner.put_bytes(key, data))

    def put_new(self, key: str, data: bytes) -> bool:
        """As ObjectStore.put_new. After a retry, False may mean that the first try did store it."""
        return self._with_retries(lambda: self._inner.put_new(key, data))

    def get_bytes(self, key: str, checksum: str | None = None) -> bytes:
        return self._with_retries(lambda: self._inner.get_bytes(key, checksum))

    def exists(self, key: str) -> bool:
        return self._with_retries(lambda: self._inner.exists(key))

    def list(self, prefix: str = "") -> list[str]:
        return self._with_retries(lambda: self._inner.list(prefix))

    def delete(self, key: str) -> None:
        self._with_retries(lambda: self._inner.delete(key))

    def _with_retries(self, call: Callable[[], Result]) -> Result:
        return Retrying(
            retry=retry_if_exception(_is_transient),
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS),
            before_sleep=_log_retry,
            reraise=True,
        )(call)


def _is_transient(error: BaseException) -> bool:
    """Whether the same operation may succeed later."""
    cause = error.__cause__
    if not isinstance(error, StorageError) or cause is None:
        return False
    if isinstance(cause, FileNotFoundError | PermissionError):
        return False
    return not (isinstance(cause, OSError) and cause.errno in _LASTING_ERRORS)


def _log_retry(state: RetryCallState) -> None:
    error = None if state.outcome is None else state.outcome.exception()
    logger.warning("attempt=%d storage failed, trying again: %s", state.attempt_number, error)
