"""Code search for all sandboxes of a process: an index per repository, an overlay per session."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ostinato.infra.agent.search.chunk_cache import ChunkCache
from ostinato.infra.agent.search.encoder import BagEncoder, TextEncoder
from ostinato.infra.agent.search.index import CodeIndex, Hit
from ostinato.infra.platform.errors import ConfigError

SEARCHED_SUFFIXES = (".py", ".pyi", ".md", ".rst", ".toml", ".txt", ".cfg")
LARGEST_FILE_BYTES = 200_000
MOST_SESSIONS = 4_096

Files = Mapping[str, bytes | None]
"""Path -> content; None: removed."""


@dataclass(slots=True)
class _Session:
    repository_id: str
    index: CodeIndex
    changes: Files


@dataclass(frozen=True, slots=True)
class _Repository:
    files: Mapping[str, bytes]
    index: CodeIndex


class SearchService:
    """Indexes of a process. Belongs to one event loop or thread."""

    def __init__(self, encoder: TextEncoder | None, *, most_sessions: int = MOST_SESSIONS) -> None:
        self.cache = ChunkCache(encoder)
        self._repositories: dict[str, _Repository] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._most_sessions = most_sessions

    @classmethod
    def load(cls, encoder_directory: str | None) -> "SearchService":
        """A service with a trained encoder's files. None: BM25 by field alone."""
        return cls(None if encoder_directory is None else BagEncoder(Path(encoder_directory)))

    def add_repository(self, repository_id: str, files: Mapping[str, bytes]) -> None:
        """Indexes a pristine repository. A known id is not indexed again."""
        if repository_id in self._repositories:
            return
        kept = {path: content for path, content in files.items() if is_searched(path, content)}
        index = CodeIndex.build(self.cache, kept)
        # the whole index is made before anyone can see it
        self._repositories[repository_id] = _Repository(kept, index)

    def search(
        self, session_id: str, repository_id: str, changes: Files, query: str, limit: int
    ) -> list[Hit]:
        """Hits for a session. Its overlay is brought to `changes` first, at the cost of what
        changed since its last search.
        """
        repository = self._repositories.get(repository_id)
        if repository is None:
            known = ", ".join(sorted(self._repositories)) or "none"
            raise ConfigError(f"repository {repository_id!r} is not indexed, known: {known}")
        session = self._session(session_id, repository_id, repository)
        wanted = {
            path: content
            for path, content in changes.items()
            if content is None or is_searched(path, content)
        }
        moved: dict[str, bytes | None] = {
            path: repository.files.get(path) for path in session.changes if path not in wanted
        }
        moved.update(wanted)
        if moved:
            session.index.update(moved)
        session.changes = wanted
        return session.index.search(query, limit)

    def close_session(self, session_id: str) -> None:
        """Forgets an overlay. An unknown one is nothing to forget."""
        self._sessions.pop(session_id, None)

    def _session(self, session_id: str, repository_id: str, repository: _Repository) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or session.repository_id != repository_id:
            session = _Session(repository_id, repository.index.fork(), {})
            self._sessions[session_id] = session
        self._sessions.move_to_end(session_id)
        while len(self._sessions) > self._most_sessions:
            self._sessions.popitem(last=False)
        return session


@dataclass(frozen=True, slots=True)
class LocalSearch:
    """View of one sandbox on the service. The repository is indexed at its first search."""

    service: SearchService
    repository_id: str
    files: Mapping[str, bytes]  # of the pristine repository
    session_id: str

    def search(self, changes: Files, query: str, limit: int) -> list[Hit]:
        """The best chunks of the pristine repository with `changes` laid over it."""
        self.service.add_repository(self.repository_id, self.files)
        return self.service.search(self.session_id, self.repository_id, changes, query, limit)


def is_searched(path: str, content: bytes) -> bool:
    """Whether a file takes part: text of a sensible size that is not hidden."""
    hidden = any(part.startswith(".") for part in path.split("/"))
    return not hidden and path.endswith(SEARCHED_SUFFIXES) and len(content) <= LARGEST_FILE_BYTES
