"""A sandbox over a copy of the user's repository, and the transfer of its edits to the repository. Only files that
the agent changed are written, and only over files that are still as they were copied.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pathspec

from ostinato.infra.agent.config import RecentFile
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.search.index import LocalSearch, SearchService
from ostinato.infra.agent.tools.testing import make_test_runner
from ostinato.infra.platform.diffs import unified_diff
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.git import run_git
from ostinato.infra.sandbox.discovery.checkout import Checkout, describe_checkout
from ostinato.infra.sandbox.discovery.collection import unloaded_plugins
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.infra.sandbox.repository import PreparedRepository

MAX_FILES = 20_000
MAX_FILE_BYTES = 4 << 20
MAX_TOTAL_BYTES = 200 << 20
ALWAYS_IGNORED = (
    *(".git", "__pycache__/", ".venv/", "venv/", "node_modules/", ".mypy_cache/", "*.egg-info/"),
    *(".pytest_cache/", ".ruff_cache/", ".tox/", ".nox/", "*.pyc"),
)
_GENERATED_FILES = pathspec.GitIgnoreSpec.from_lines(ALWAYS_IGNORED)
# never sent to the model unasked
_PRIVATE_FILES = pathspec.GitIgnoreSpec.from_lines(
    (".*", "*.pem", "*.key", "*.p12", "id_rsa*", "id_ed25519*", "*secret*", "*credential*")
)
MAX_RECENT_FILES = 3
MAX_RECENT_LINES = 60
Files = Mapping[str, bytes | None]


def list_files(root: Path) -> list[str]:
    """Regular files that belong to the repository, sorted. Links, and files behind them, are left out."""
    root = Path(os.path.realpath(root))
    return [name for name in list_names(root) if is_inside(root, name, may_link=False)]


def list_names(root: Path) -> list[str]:
    """All names that belong to the repository, sorted, by git's list. A folder without a repository is read as the
    files that its .gitignore files do not exclude.
    """
    listing = ["ls-files", "-oz", "--exclude-standard", *_own_ignores()]
    if any((folder / ".git").exists() for folder in (root, *root.parents)):
        with contextlib.suppress(ProblemError):
            listed = _names(run_git(root, *listing, "--cached"))
            # a folder that its repository ignores has an empty list; the user named it, so it is read anyway
            if listed or (root / ".git").exists():
                return listed
    with tempfile.TemporaryDirectory() as empty:
        run_git(None, "init", "--quiet", "--bare", "--template=", empty)
        generated = (f"--exclude={pattern}" for pattern in ALWAYS_IGNORED)
        place = (f"--git-dir={empty}", "--work-tree=.")
        return _names(run_git(root, *place, *listing, *generated))


def _names(listing: bytes) -> list[str]:
    return sorted({os.fsdecode(name) for name in listing.split(b"\0") if name})


def is_inside(root: Path, name: str, *, may_link: bool) -> bool:
    """Whether a name is a regular file of a folder. With `may_link`, links that stay in the folder are allowed."""
    real = os.path.realpath(root / name)
    is_below = Path(real).is_relative_to(root) if may_link else real == str(root / name)
    return is_below and os.path.isfile(real)  # noqa: PTH113 Path.is_file raises in closed folders


def _own_ignores() -> list[str]:
    """Options of ls-files for the user's global ignore file, because `run_git` reads no user configuration."""
    options: list[str] = []
    home = os.path.expanduser("~")  # noqa: PTH111 Path.home raises for a user without a home folder
    names = (".config/git/config", ".gitconfig")
    for place in (Path(home, name) for name in names if Path(home, name).is_file()):
        question = ("--file", str(place), "--includes", "--type=path", "core.excludesFile")
        with contextlib.suppress(ProblemError):  # the configuration names no file
            ignored = os.fsdecode(run_git(None, "config", *question)).removesuffix("\n")
            options = [f"--exclude-from={ignored}"] if Path(ignored).is_file() else []
    return options


def copy_repository(root: Path, target: Path) -> dict[str, bytes]:
    """Copies files of at most 4 MiB below `target`. Returns their content by path. ConfigError above the limits."""
    names = list_files(root)
    if len(names) > MAX_FILES:
        raise ConfigError(f"{root} has {len(names)} files, wanted at most {MAX_FILES}")
    files: dict[str, bytes] = {}
    total = 0
    for name in names:
        path = root / name
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                continue
            files[name] = path.read_bytes()
        except OSError:  # unreadable, or deleted since it was listed
            continue
        total += len(files[name])
        if total > MAX_TOTAL_BYTES:
            raise ConfigError(f"{root} has more than {MAX_TOTAL_BYTES >> 20} MiB of files")
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(files[name])
    if not files:
        raise ConfigError(f"{root} has no files, wanted a repository")
    return files


def recent_files(
    root: Path, files: Mapping[str, bytes], since_seconds: float
) -> tuple[RecentFile, ...]:
    """The first lines of the most recently changed text files, newest first, without hidden files and files whose
    names say that they hold secrets.
    """
    named = [path for path in files if not _PRIVATE_FILES.match_file(path)]
    changed = [((root / path).stat().st_mtime, path) for path in named if (root / path).is_file()]
    shown: list[RecentFile] = []
    for at, path in sorted(changed, reverse=True):
        text = files[path].decode(errors="replace")
        if at >= since_seconds and "\0" not in text and len(shown) < MAX_RECENT_FILES:
            head = "\n".join(text.split("\n")[:MAX_RECENT_LINES])
            shown.append(RecentFile(path=path, text=head))
    return tuple(shown)


@dataclass(slots=True)
class Workplace:
    """The user's repository, the files as they were copied, and the sandbox over the copy."""

    root: Path
    files: dict[str, bytes]
    layout: Checkout
    environment: AgentEnvironment
    place: RepositoryEnvironment
    kept: dict[str, bytes | None] = field(default_factory=dict)  # already in the repository
    left_out: tuple[str, ...] = ()  # names of the repository that were not copied
    warning: str = ""  # why its tests cannot be run

    async def pending(self) -> dict[str, bytes | None]:
        """Changes by the agent that are not yet in the repository."""
        changed = await self.environment.sandbox.diff()
        everything = {**dict.fromkeys(self.kept), **changed}
        now = {path: changed.get(path, self.files.get(path)) for path in everything}
        return {
            path: content
            for path, content in sorted(now.items())
            if content != self.known(path) and not _GENERATED_FILES.match_file(path)
        }

    def known(self, path: str) -> bytes | None:
        """The content of a file when this chat last read or wrote it in the repository."""
        return self.kept[path] if path in self.kept else self.files.get(path)

    def conflicts(self, changes: Files) -> list[str]:
        """Paths of `changes` that somebody else has changed in the repository meanwhile."""
        return [path for path in changes if self._on_disk(path) != self.known(path)]

    def keep(self, changes: Files) -> None:
        """Writes changes into the repository, each file atomically."""
        for path, content in changes.items():
            target = self._target(path)
            if content is None:
                target.unlink(missing_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f".{target.name}.ostinato")
                # a link of that name would lead the write elsewhere
                partial.unlink(missing_ok=True)
                try:
                    with partial.open("xb") as file:
                        file.write(content)
                    if target.exists():
                        shutil.copymode(target, partial)
                    partial.replace(target)
                finally:
                    partial.unlink(missing_ok=True)
            self.kept[path] = content

    async def revert(self) -> None:
        """Resets the sandbox to the state of the repository."""
        await self.place.release(self.environment.sandbox)
        self.environment.sandbox = await self.place.lease(self.kept)
        self.environment.state.region = None
        self.environment.state.seen.clear()

    def describe(self, changes: Files) -> str:
        return "".join(
            unified_diff(path, self.known(path), content) for path, content in changes.items()
        )

    def _on_disk(self, path: str) -> bytes | None:
        target = self._target(path)
        return target.read_bytes() if target.is_file() else None

    def _target(self, path: str) -> Path:
        target = self.root / path
        if ".." in PurePosixPath(path).parts or not target.resolve().is_relative_to(self.root):
            raise ConfigError(f"path is {path!r}, wanted one inside {self.root}")
        return target


@contextlib.asynccontextmanager
async def open_workplace(
    root: Path,
    copy: Path,
    *,
    warm_tests: bool,
    test_limit_seconds: float,
    tests: Sequence[str] = (),
    sandbox: SandboxKind = SandboxKind.NAMESPACE,
    search_directory: str | None = None,
) -> AsyncIterator[Workplace]:
    """A sandbox over a copy of `root` below `copy`, for the duration of the block. With `warm_tests`,
    `pytest` runs the collected tests, or those of `tests` if any are given, in a warm box; else it is
    an ordinary command.
    """
    root = root.resolve()
    files = copy_repository(root, copy)
    layout = describe_checkout(files)
    for path, text in layout.generated_files.items():  # in the copy alone; `files` are the user's
        (copy / path).write_text(text)
    search = LocalSearch(SearchService.load(search_directory), "chat", files)
    repository = PreparedRepository.from_directory(
        "chat", copy, layout.package_paths, layout.test_paths
    )
    place = RepositoryEnvironment.create(repository, 1, sandbox, tests_may_write=True)
    box = await place.lease()
    try:
        run_tests, warning = None, unloaded_plugins(files)
        if not layout.test_paths:
            warning = "no test can be run here: the repository has none"
        else:
            try:
                await place.test_server.start()
            except ProblemError as error:
                warning = f"no test can be run here: {error}"
            chosen = choose_tests(place.test_server.tests, tests)
            if warm_tests and chosen:
                run_tests = make_test_runner(place.test_server, chosen, test_limit_seconds)
        environment = AgentEnvironment(box, run_tests=run_tests, baseline=files, code_search=search)
        left_out = tuple(name for name in list_names(root) if name not in files)
        yield Workplace(root, files, layout, environment, place, left_out=left_out, warning=warning)
    finally:
        await place.close()


def choose_tests(collected: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """Collected tests below the wanted folders, files, classes or names. All tests when none is wanted."""
    chosen = tuple(
        test
        for test in collected
        if not wanted
        or any(
            test == place or test.startswith((f"{place}/", f"{place}::", f"{place}["))
            for place in wanted
        )
    )
    if collected and not chosen:
        raise ConfigError(
            f"tests {', '.join(wanted)}: none of {len(collected)} collected tests is there, "
            f"wanted a folder, file or test such as {collected[0]}"
        )
    return chosen
