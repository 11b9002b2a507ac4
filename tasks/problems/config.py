"""Settings of the problem stage: sources, kinds and quotas, rules of proof, wording and splits."""

from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.git import resolve_commit
from ostinato.infra.platform.record import Record, Share
from ostinato.infra.platform.source_archives import SourceArchive
from ostinato.infra.sandbox.protocol import RUNNER_PACKAGES
from ostinato.tasks.grading.environments import EnvironmentConfig
from ostinato.tasks.records import Split


class Kind(StrEnum):
    """Ways to make a problem."""

    MUTATION = "mutation"  # one wrong line
    DELETED_FUNCTION = "deleted_function"  # one body, or a whole function, is gone
    DELETED_FEATURE = "deleted_feature"  # a public symbol and the helpers only it used are gone
    COMBINED = "combined"  # two to four proven mutations at once
    MINED_COMMIT = "mined_commit"  # product code as it was before a commit
    GIVEN = "given"  # a task of somebody else's collection, with its text


class PromptLevel(StrEnum):
    """Wordings of what the user asks."""

    PLACE = "place"  # function and file, nothing else
    DESCRIBED = "described"  # what the function is for, neither its name nor its file
    DETAILED = "detailed"
    TERSE = "terse"
    VAGUE = "vague"


class Quotas(Record):
    """Most problems of each kind that one repository gives. Read for repositories that name a split."""

    mutation: NonNegativeInt = 150
    """problems with one wrong line; 0: none"""
    deleted_function: NonNegativeInt = 0
    """problems in which a function, or its body, is gone; 0: none"""
    deleted_feature: NonNegativeInt = 0
    """problems in which a public symbol is gone, with the helpers that only it used; 0: none"""
    combined: NonNegativeInt = 0
    """problems with two to four of the proven mutations at once; 0: none"""
    trials_ratio: float = Field(default=1.6, ge=1)
    """candidates tried at most for each wanted problem"""

    def of(self, kind: Kind) -> int:
        return int(self.model_dump()[kind.value])


def refuse_runner(name: str, package_paths: Iterable[str]) -> str:
    """Why no problems are made of a package that the test runner consists of. Empty: it is none."""
    tops = {path.partition("/")[0].removesuffix(".py") for path in package_paths}
    if taken := tops.intersection(RUNNER_PACKAGES):
        return (
            f"package_paths of {name} hold {sorted(taken)}, which the test runner brings into every box: an agent "
            "could read or import the answers there; wanted another package"
        )
    return ""


class ProjectSource(Record):
    """Fields that packages and git repositories share."""

    name: str = Field(
        description="name of the repository; for a package also its name on the index"
    )
    package_paths: tuple[str, ...] = Field(description="files or folders of product code")
    test_paths: tuple[str, ...] = Field(description="files or folders of tests")
    dropped_paths: tuple[str, ...] = Field(
        default=(), description="files or folders below the former that are left out"
    )
    stripped_prefix: str = ""
    """folder of the source that is on the import path, such as src"""
    kept_paths: tuple[str, ...] = ()
    """other files or folders of the source that tests read"""
    dependencies: tuple[str, ...] = ()
    """name==version of wheels laid beside the code"""
    is_installed: bool = False
    """true: as after an installation: importlib.metadata knows the package and its dependencies, and
    these keep their compiled modules"""
    generated_files: dict[str, str] = Field(default={})
    """path -> text of modules that the project's build writes, and of pytest.ini where the project has rules
    of its own for what a test is: names of functions and classes, pythonpath, import mode"""

    @model_validator(mode="after")
    def _check_runner(self) -> Self:
        if refusal := refuse_runner(self.name, self.package_paths):
            raise ValueError(refusal)
        return self


class RepositorySource(ProjectSource, SourceArchive):
    """A package of the index at one version."""

    mutated_paths: tuple[str, ...] = ()
    """files or folders that may be broken; empty: all product code"""
    split: Split | None = None
    """split of all its problems; None: its mutations are dealt out by `sizes`"""
    quotas: Quotas | None = Field(default=None, description="None: those of all repositories")


class GitSource(ProjectSource):
    """A git repository on this machine, or a bare one, whose commits become problems."""

    path: str = Field(description="directory that git can read")
    split: Split = Field(default=Split.TRAIN, description="split of all its problems")
    revision: str = "HEAD"
    """commit, branch or tag at which the search begins; it goes back in time"""
    max_commits: PositiveInt = Field(default=200, description="first parents looked at")
    max_changed_lines: PositiveInt = Field(
        default=400, description="lines of product code in a commit"
    )
    max_problems: NonNegativeInt = 50
    """commits taken, at most, the newest that are usable; each is a problem if its tests prove it;
    0: none"""


class GivenSource(ProjectSource, SourceArchive):
    """One task of Harbor or instance of SWE-bench, kept in the archive cache as two states and a text."""

    version: str = Field(description="version of the archive: its checksum, shortened")
    sha256: str = Field(description="SHA-256 of the archive")
    distribution: str = Field(description="name under which importlib.metadata knows the project")
    split: Split = Field(default=Split.TRAIN, description="split of its problem")


class SplitSizes(Record):
    """Number of problems per split. Fewer when the packages do not hold so many."""

    demonstration: NonNegativeInt = 800
    """problems whose repair the demonstrations of the corpus show"""
    train: NonNegativeInt = Field(default=600, description="problems that RL samples attempts at")
    held_out: NonNegativeInt = 240
    """problems to evaluate on: nothing trains on these mutations, but it may on others of their
    functions"""
    held_out_function: NonNegativeInt = 60
    """problems to evaluate on in the functions that functions_held_out sets aside"""
    user: NonNegativeInt = 160
    """problems that simulated users bring to the gateway"""

    def of(self, split: Split) -> int:
        return int(self.model_dump()[split.value])

    @property
    def total(self) -> int:
        return sum(self.model_dump().values())


class ValidityRules(Record):
    """Rules that a candidate must meet to become a problem."""

    max_failing_ratio: float = Field(default=0.4, gt=0, le=1)
    """share of all stable tests; more is a broken package"""
    max_tests_first_run: int = Field(default=60, ge=2)
    """covering tests run on a candidate; the rest is estimated"""
    max_fail_to_pass: PositiveInt = 16
    """failing tests of a problem, at most; a solution makes all of them pass"""
    max_pass_to_pass: PositiveInt = 16
    """passing tests of a problem, at most; a solution breaks none of them"""
    max_changed_lines: PositiveInt = 400
    """lines in which a candidate differs from the original, at most"""
    max_test_calls: PositiveInt = 1_000_000
    """tests that call more functions take no part (100,000 take about 30 ms); unlike a time, this
    count is the same on every machine and under any load"""
    max_idle_seconds: PositiveFloat = 0.2
    """tests that sleep longer take no part"""
    time_limit_seconds: PositiveFloat = Field(default=30.0, description="wall time of one test run")
    cheater_share: Share = 1 / 16
    """problems also judged on a skip-everything patch"""
    hidden_share: Share = 0.5
    """share of the failing test functions the agent never sees"""
    tries_stubs: bool = True
    """a mutation whose tests pass with a constant in place of the function is not published either;
    deletions never are"""
    tries_right_fix: bool = True
    """whether the grader is asked to pay the original with a comment added. A problem where it refuses is not
    published, since it would refuse every repair. Takes about two seconds per problem"""
    drops_repeated_lines: bool = True
    """a change whose right line stands in a comment, in a text, or with both its neighbours in
    another file is not published"""


class OracleConfig(Record):
    """Calls by which a candidate is compared with the original."""

    enabled: bool = True
    """make such calls, from arguments seen in tests; false: prompts hold no example call, and
    grading.asks_oracle has nothing to ask"""
    max_calls_derived: PositiveInt = 24
    """held-out arguments per function"""
    call_seconds: PositiveFloat = Field(default=0.5, description="CPU time of one call")


class ProblemsConfig(Record):
    """Everything that decides which problems come out."""

    repositories: tuple[RepositorySource, ...] = ()
    """packages of the index whose code is broken"""
    git: tuple[GitSource, ...] = ()
    """git repositories whose commits become problems"""
    given: tuple[GivenSource, ...] = ()
    """tasks of Harbor and instances of SWE-bench"""
    seed: NonNegativeInt = 0
    """seed of what is broken, of the splits and of the prompts; unless given, the recipe's"""
    quotas: Quotas = Quotas()
    sizes: SplitSizes = SplitSizes()
    """problems per split of the repositories that name no split"""
    rules: ValidityRules = ValidityRules()
    oracle: OracleConfig = OracleConfig()
    strip_text: bool = False
    """drop docstrings and comments of product code; tests keep theirs"""
    plain_functions: bool = False
    """mutate only undecorated top-level functions whose name is defined once"""
    max_function_lines: int = Field(default=120, ge=2, description="lines of a mutated function")
    max_function_characters: int = Field(default=20_000, ge=20)
    """characters of a mutated function, line ends included; the corpus has the same limits"""
    max_per_function: PositiveInt = Field(default=6, description="mutations of one function")
    operator_mix: Literal["even", "noticed"] = "even"
    """even: every mutation operator as often as the others, as far as there are candidates;
    noticed: in the proportions in which tests notice them"""
    operators_left_out: tuple[str, ...] = Field(default=(), description="never used")
    functions_held_out: NonNegativeInt = 12
    """functions of repositories without a split that occur in held_out_function alone"""
    prompt_shares: dict[PromptLevel, float] = Field(default={PromptLevel.PLACE: 1.0})
    """share of the problems by wording"""

    @model_validator(mode="after")
    def _check_names(self) -> "ProblemsConfig":
        names = [source.name for source in (*self.repositories, *self.git, *self.given)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"sources named twice: {twice}, wanted each name once")
        return self

    @property
    def is_described(self) -> bool:
        """Whether some prompts say only what a function is for."""
        return self.prompt_shares.get(PromptLevel.DESCRIBED, 0.0) > 0


class ProblemSelection(Record):
    """Problems of a set that a recipe uses. The set itself stays what it is."""

    kinds: tuple[Kind, ...] = Field(default=(), description="these only; empty: all")
    max_lines: PositiveInt | None = None
    """longest function, by its whole lines; None: any"""


class ProblemsRequest(Record):
    """Request of the problem stage."""

    config: ProblemsConfig
    selection: ProblemSelection = ProblemSelection()
    archives_directory: Path
    use_shipped: bool = True
    """take the set that ships for this configuration, if one does"""
    parallel_runs: PositiveInt | None = None
    """test runs at once; None: the settings' limit of cores"""


class ProblemsResult(Record):
    """Published problems: problems.jsonl, statistics.json and repositories/NAME in `directory`."""

    directory: str
    num_problems: int
    num_candidates: int = Field(description="candidates that were run")
    yield_ratio: float = Field(description="share of the run candidates that became proven")
    split_sizes: dict[str, int]
    kinds: dict[str, int]
    operators: dict[str, int] = Field(description="published problems by operator")
    repositories: dict[str, str] = Field(description="name -> fingerprint")
    left_out: dict[str, str]
    """source, or NAME/FILE for a test file of one, that gave nothing -> why"""
    yield_table: tuple[dict[str, str | int | float], ...]
    """one row per repository and kind"""
    seconds: float


class EnvironmentsRequest(Record):
    """Request of the stage that adds problems of environments to a problem set."""

    problems_directory: str
    environments: dict[str, EnvironmentConfig]
    seed: int = 0


class EnvironmentsResult(Record):
    """Problem set with the problems of the environments in it."""

    directory: str
    added: dict[str, int] = Field(description="environment -> problems")


def pin_commits(config: ProblemsConfig) -> ProblemsConfig:
    """The configuration with each revision as the commit that it names now, so that a branch which moved is another
    set. A source that cannot be read stays as it is: the build says why it is left out.
    """
    pinned: list[GitSource] = []
    for source in config.git:
        commit = source.revision
        with suppress(ProblemError):
            commit = resolve_commit(Path(source.path), source.revision)
        pinned.append(source.model_copy(update={"revision": commit}))
    return config.model_copy(update={"git": tuple(pinned)})
