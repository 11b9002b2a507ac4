"""Settings of problem sets built from many repositories: sources, quotas by kind, validity rules.

The nano recipe does not use it: its problems come from ProblemsConfig, which stays as it is.
Torch-free: the recipe composes both.
"""

from enum import StrEnum
from pathlib import Path

from pydantic import Field, model_validator

from ostinato.tasks.problems.config import Config, RepositorySource
from ostinato.tasks.records import Split

YIELD_FILE = "yield_table.json"  # beside the problems: a row a package and kind


class Kind(StrEnum):
    """Way in which a problem was made."""

    MUTATION = "mutation"  # one wrong line
    DELETED_FUNCTION = "deleted_function"  # one body, or a whole function, is gone
    DELETED_FEATURE = "deleted_feature"  # a public symbol and the helpers only it used are gone
    COMBINED = "combined"  # two to four proven mutations at once
    MINED_COMMIT = "mined_commit"  # product code as it was before a commit


class PromptLevel(StrEnum):
    """Amount of detail in the prompt."""

    DETAILED = "detailed"
    TERSE = "terse"
    VAGUE = "vague"


class PackageSource(RepositorySource):
    """A package of the index for a set: its split, what it imports, and where its code lies."""

    mutated_paths: tuple[str, ...] = Field(
        default=(), description="files or folders that may be broken; empty: all product code"
    )
    stripped_prefix: str = Field(
        default="", description="folder of the archive that is on the import path, such as src"
    )
    dependencies: tuple[str, ...] = Field(
        default=(), description="name==version of wheels laid beside the package"
    )
    split: Split = Split.TRAIN


class GitSource(Config):
    """A git repository on this machine, or a bare one, whose commits become problems."""

    name: str
    path: str = Field(description="directory that git can read")
    package_paths: tuple[str, ...]
    test_paths: tuple[str, ...]
    split: Split = Split.TRAIN
    revision: str = "HEAD"
    max_commits: int = Field(default=200, ge=1, description="first parents looked at")
    max_changed_lines: int = Field(default=400, ge=1, description="of product code in a commit")
    max_problems: int = Field(default=50, ge=0)


class Quotas(Config):
    """Most problems of each kind that one repository gives."""

    mutation: int = Field(default=150, ge=0)
    deleted_function: int = Field(default=60, ge=0)
    deleted_feature: int = Field(default=30, ge=0)
    combined: int = Field(default=40, ge=0)
    trials_ratio: float = Field(
        default=1.6, ge=1, description="candidates tried at most for each wanted problem"
    )

    def of(self, kind: Kind) -> int:
        """The quota of a kind."""
        return int(self.model_dump()[kind.value])


class ValidityRules(Config):
    """Conditions on a candidate."""

    max_failing_ratio: float = Field(
        default=0.4, gt=0, le=1, description="of all stable tests; more is a broken package"
    )
    max_tests_first_run: int = Field(
        default=60, ge=2, description="covering tests run on a candidate; the rest is estimated"
    )
    max_fail_to_pass: int = Field(default=16, ge=1)
    max_pass_to_pass: int = Field(default=16, ge=1)
    min_changed_lines: int = Field(default=1, ge=1)
    max_changed_lines: int = Field(default=400, ge=1)
    max_test_calls: int = Field(
        default=1_000_000, gt=0, description="tests that call more functions take no part"
    )
    max_idle_seconds: float = Field(default=0.2, gt=0)
    time_limit_seconds: float = Field(default=30.0, gt=0, description="wall time of one test run")
    cheater_share: float = Field(
        default=1 / 16, ge=0, le=1, description="problems also judged on a skip-everything patch"
    )
    cold_share: float = Field(
        default=1 / 8, ge=0, le=1, description="second runs made on a fresh import"
    )
    hidden_share: float = Field(
        default=0.5, ge=0, le=1, description="of the failing test functions the agent never sees"
    )


class OracleConfig(Config):
    """Calls by which a candidate is compared with the original."""

    enabled: bool = True
    max_calls_recorded: int = Field(default=40, ge=1, description="for each function")
    max_calls_derived: int = Field(default=24, ge=1, description="held-out arguments a function")
    call_seconds: float = Field(default=0.5, gt=0, description="CPU time of one call")


class ProblemSetConfig(Config):
    """Everything that decides which problems a set holds."""

    packages: tuple[PackageSource, ...] = ()
    git: tuple[GitSource, ...] = ()
    seed: int = Field(default=0, ge=0)
    quotas: Quotas = Quotas()
    rules: ValidityRules = ValidityRules()
    oracle: OracleConfig = OracleConfig()
    max_function_lines: int = Field(default=120, ge=2)
    max_per_function: int = Field(default=6, ge=1, description="mutations of one function")
    max_duplicate_ratio: float = Field(
        default=0.8, gt=0, description="similarity of functions above which only one split may stay"
    )
    prompt_shares: dict[PromptLevel, float] = Field(
        default={PromptLevel.DETAILED: 0.3, PromptLevel.TERSE: 0.5, PromptLevel.VAGUE: 0.2}
    )

    @model_validator(mode="after")
    def _check_names(self) -> "ProblemSetConfig":
        names = [source.name for source in (*self.packages, *self.git)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not names:
            raise ValueError(f"sources named twice: {twice}, of {len(names)}; wanted 1 or more")
        return self


class ProblemSetRequest(Config):
    """Request of the problem-set stage."""

    config: ProblemSetConfig
    archives_directory: Path
    workers: int | None = Field(
        default=None, ge=0, description="Ray actors; 0: in this process; None: the settings' limit"
    )
