"""Settings of the problem stage: which packages, which functions, which mutations, how many
problems of each split.

Torch-free: the recipe composes them. The defaults are the nano scope: toolz and the recipes of
more-itertools.
"""

from pydantic import BaseModel, ConfigDict, Field

from ostinato.infra.platform.source_archives import SourceArchive
from ostinato.tasks.records import Split


class Config(BaseModel):
    """Frozen settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RepositorySource(Config):
    """One package of the index, at one version, and what of it becomes a repository."""

    name: str = Field(description="name on the package index; also the repository's name")
    version: str = Field(description="exact version")
    sha256: str = Field(default="", description="of the source archive; empty: not checked")
    package_paths: tuple[str, ...] = Field(
        description="files or folders of product code in the archive"
    )
    test_paths: tuple[str, ...] = Field(description="files or folders of tests in the archive")
    dropped_paths: tuple[str, ...] = Field(default=(), description="below the former, left out")
    mutated_paths: tuple[str, ...] = Field(description="files whose functions become problems")

    @property
    def archive(self) -> SourceArchive:
        """Source archive of the package."""
        return SourceArchive(name=self.name, version=self.version, sha256=self.sha256)


class DescribedSource(RepositorySource):
    """A package whose problems say what a function is for and neither its name nor its file, so
    that it must be located first. All of them belong to one split.
    """

    stripped_prefix: str = Field(
        default="", description="folder of the archive that is on the import path, such as src"
    )
    split: Split


TOOLZ = RepositorySource(
    name="toolz",
    version="1.2.0",
    sha256="9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490",
    package_paths=("toolz", "tlz"),
    test_paths=("toolz/tests", "toolz/sandbox/tests"),
    dropped_paths=("toolz/sandbox/tests/test_parallel.py",),
    mutated_paths=(
        "toolz/dicttoolz.py",
        "toolz/functoolz.py",
        "toolz/itertoolz.py",
        "toolz/recipes.py",
        "toolz/sandbox/core.py",
    ),
)
MORE_ITERTOOLS = RepositorySource(
    name="more-itertools",
    version="11.2.1",
    package_paths=("more_itertools",),
    test_paths=("tests/__init__.py", "tests/test_recipes.py"),
    mutated_paths=("more_itertools/recipes.py",),
)


class SplitSizes(Config):
    """Number of problems wanted in each split; fewer when the packages do not hold so many."""

    demonstration: int = Field(default=800, ge=0)
    train: int = Field(default=600, ge=0)
    held_out: int = Field(default=240, ge=0)
    held_out_function: int = Field(default=60, ge=0)
    user: int = Field(default=160, ge=0)

    def of(self, split: Split) -> int:
        """The size of one split."""
        return int(self.model_dump()[split.value])


class ProblemsConfig(Config):
    """Everything that decides which problems come out."""

    repositories: tuple[RepositorySource | DescribedSource, ...] = Field(
        default=(TOOLZ, MORE_ITERTOOLS)
    )
    sizes: SplitSizes = SplitSizes()
    seed: int = Field(default=0, ge=0)
    strip_text: bool = Field(
        default=True, description="drop docstrings and comments of product code; tests keep theirs"
    )
    max_function_lines: int = Field(default=24, ge=2)
    max_function_characters: int = Field(default=600, ge=20)
    max_per_function_operator: int = Field(
        default=8, ge=1, description="candidates one mutation operator may make of one function"
    )
    operator_caps: dict[str, int] = Field(
        default={"wrong_variable": 9, "name_typo": 3, "deleted_statement": 6},
        description="other caps by operator; without them wrong variables are half of everything",
    )
    functions_held_out: int = Field(
        default=12,
        ge=0,
        description="functions that only ever occur in the split held_out_function",
    )
    max_tests_per_problem: int = Field(default=5, ge=2)
    max_tests_per_candidate: int = Field(
        default=10, ge=2, description="tests run to prove one candidate"
    )
    max_test_calls: int = Field(
        default=100_000,
        gt=0,
        description="tests that call more functions take no part (about 30 ms); unlike a time, "
        "this count is the same on every machine and under any load",
    )
    max_idle_seconds: float = Field(
        default=0.1, gt=0, description="tests that sleep longer take no part"
    )
    time_limit_seconds: float = Field(default=20.0, gt=0, description="wall time of one test run")
    parallel_runs: int = Field(
        default=2, ge=1, description="test runs at once in each repository's box"
    )


class ProblemsRequest(Config):
    """Request of the problems stage."""

    config: ProblemsConfig
    archives_directory: str = Field(
        default="", description="empty: cache/archives below the home directory"
    )


class ProblemsResult(Config):
    """Result of the problems stage: problems.jsonl, statistics.json and repositories/NAME in
    `directory`.
    """

    directory: str
    num_problems: int
    num_candidates: int = Field(description="candidates that were run")
    yield_ratio: float = Field(description="share of the run candidates that became proven")
    split_sizes: dict[str, int]
    operators: dict[str, int]
    repositories: dict[str, str] = Field(description="name -> fingerprint")
    seconds: float
