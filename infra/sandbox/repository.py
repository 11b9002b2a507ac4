"""A repository prepared for the sandbox: which files are product code, which are tests, and a fingerprint of all."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath

from pydantic import ConfigDict, Field

from ostinato.infra.platform.cluster.workspace import replace_text
from ostinato.infra.platform.errors import ProblemError, SandboxError
from ostinato.infra.platform.folders import is_below, read_folder
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.discovery.metadata import read_metadata
from ostinato.infra.sandbox.inside.sources import RULES_FILE

MANIFEST_NAME = "repository.json"
# files that a test runner or the start of the interpreter reads
RUNNER_FILES = frozenset(
    {
        "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "setup.py",
        "pyproject.toml", "sitecustomize.py", "usercustomize.py", "noxfile.py", "pytest.toml",
    }
)  # fmt: skip
CACHE_DIRECTORIES = frozenset(
    ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".git")
)


class PreparedRepository(Record):
    """A repository whose `directory` the sandbox shows at /repo."""

    model_config = ConfigDict(ignored_types=(cached_property,))

    name: str
    fingerprint: str = Field(description="hash of every path and content below `directory`")
    directory: Path
    package_paths: tuple[str, ...] = Field(description="files or folders that hold product code")
    test_paths: tuple[str, ...]
    """files or folders that hold tests; a path in both lists is a test"""

    @classmethod
    def from_directory(
        cls, name: str, directory: Path, package_paths: tuple[str, ...], test_paths: tuple[str, ...]
    ) -> "PreparedRepository":
        """A record for a filled directory, with its fingerprint computed now."""
        for wanted in (*package_paths, *test_paths):
            if not (directory / wanted).exists():
                raise SandboxError(f"repository {name}: {wanted} is missing below {directory}")
        files = read_folder(directory, left_out=CACHE_DIRECTORIES)
        return cls(
            name=name,
            fingerprint=fingerprint_files(files),
            directory=directory,
            package_paths=package_paths,
            test_paths=test_paths,
        )

    @classmethod
    def load(cls, directory: Path) -> "PreparedRepository":
        """Reads the manifest `directory`/repository.json that `save` wrote. The files are in `directory`/files."""
        manifest = directory / MANIFEST_NAME
        try:
            fields = json.loads(manifest.read_text())
        except (OSError, ValueError) as error:
            raise SandboxError(f"repository manifest {manifest} cannot be read: {error}") from error
        return cls(directory=directory / "files", **fields)

    def save(self) -> None:
        """Writes repository.json next to the files folder. `directory` must be called `files`."""
        if self.directory.name != "files":
            raise SandboxError(
                f"repository {self.name}: directory is {self.directory}, wanted .../files"
            )
        fields = self.model_dump(mode="json", exclude={"directory"})
        manifest = json.dumps(fields, indent=1, sort_keys=True)
        replace_text(self.directory.parent / MANIFEST_NAME, manifest)

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """Content of every file of the pristine repository, by relative path."""
        return read_folder(self.directory, left_out=CACHE_DIRECTORIES)

    @property
    def collection_rules(self) -> str:
        """Text of the repository's own configuration of test collection. Empty: it has none."""
        return self.files.get(RULES_FILE, b"").decode(errors="replace")

    @cached_property
    def own_packages(self) -> frozenset[str]:
        """Names under which a package index may have this repository's own code."""
        found = {self.name, *(PurePosixPath(path).stem for path in self.package_paths)}
        with contextlib.suppress(ProblemError):  # metadata that does not parse
            found.add(read_metadata(self.files, self.name).name)
        return frozenset(found)

    def is_test(self, path: str) -> bool:
        """Whether `path` is one of `test_paths` or below one."""
        return is_below(path, self.test_paths)

    def is_editable(self, path: str) -> bool:
        """Whether a change of `path` counts: only Python product code that does not configure a test runner."""
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or pure.suffix != ".py":
            return False
        is_product = is_below(path, self.package_paths) and not self.is_test(path)
        return is_product and pure.name not in RUNNER_FILES

    def keep_editable(self, changed: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
        """The changes of editable paths whose content differs from the pristine one (None: removed)."""
        return {
            path: content
            for path, content in sorted(changed.items())
            if self.is_editable(path) and self.files.get(path) != content
        }


def module_of(path: str) -> str:
    """Import name of a Python file of a repository."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def fingerprint_files(files: Mapping[str, bytes | None]) -> str:
    """Hash of paths and contents in any order. A removed file (None) differs from an empty one."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = files[path]
        head = f"{len(path)}:{path}:{-1 if content is None else len(content)}:"
        digest.update(head.encode(errors="surrogateescape"))
        digest.update(content or b"")
    return digest.hexdigest()[:16]
