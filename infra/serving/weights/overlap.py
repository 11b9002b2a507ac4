"""Publishing beside training.

`OverlappedPublisher`: one thread that commits what was staged. At most one version is under way;
the next `start` waits for it, so a slow store slows training down and versions neither pile up in
memory nor overtake one another.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ostinato.infra.serving.chain_manifest import ChainManifest
from ostinato.infra.serving.weights.shard_writer import Publisher, Tensors


class OverlappedPublisher:
    """One publisher and its thread. Used by one thread at a time."""

    def __init__(
        self, publisher: Publisher, on_error: Callable[[BaseException], None] = lambda _: None
    ) -> None:
        """`on_error`: called in the publishing thread with the error that the next call will raise."""
        self._publisher = publisher
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._under_way: Future[ChainManifest] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a version is under way, or its error was not told yet."""
        return self._under_way is not None

    def start(self, version: int, weights: Tensors) -> ChainManifest | None:
        """Finishes the version under way, whose manifest it returns (None: there was none), copies the
        weights and commits them in the background.
        """
        before = self.finish()
        staged = self._publisher.stage(weights)
        self._under_way = self._thread.submit(self._commit, version, staged)
        return before

    def finish(self) -> ChainManifest | None:
        """Waits for the version under way. Raises why it was not committed. None when there is none."""
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.result()

    def close(self) -> ChainManifest | None:
        """As finish, and ends the thread."""
        try:
            return self.finish()
        finally:
            self._thread.shutdown()

    def _commit(self, version: int, staged: Tensors) -> ChainManifest:
        try:
            return self._publisher.commit(version, staged)
        except BaseException as error:
            self._on_error(error)
            raise
