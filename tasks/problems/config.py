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
from ostinato.tasks.records import REFACTORING, Split

PROBLEMS_FILE = "problems.jsonl"  # of a set: a problem per line
Level = Literal["body", "signature", "everything"]
LEVELS: tuple[Level, ...] = ("body", "signature", "everything")


class Kind(StrEnum):
    """Ways to make a problem."""

    MUTATION = "mutation"  # one wrong line
    DELETED_FUNCTION = "deleted_function"  # the body of a function, or a whole function, is deleted
    DELETED_FEATURE = "deleted_feature"  # a public symbol and the helpers only it used are deleted
    COMBINED = "combined"  # two to four proven mutations at once
    MULTI_PLACE = "multi_place"  # one wrong idea in two to five places
    MINED_COMMIT = "mined_commit"  # product code as it was before a commit
    GIVEN = "given"  # a task of another collection, with its text
    REFACTORING = (
        REFACTORING  # a public function or class has another name, or is in another module
    )
    QUESTION = "question"  # places in the code are asked for; no file may change
    NO_EDIT = "no_edit"  # nothing is wrong although the prompt says so; no file may change


class PromptLevel(StrEnum):
    """Wordings of the user's request."""

    PLACE = "place"  # function and file, nothing else
    DESCRIBED = "described"  # the purpose of the function, neither its name nor its file
    DETAILED = "detailed"
    TERSE = "terse"
    VAGUE = "vague"


class Quotas(Record):
    """Maximum number of problems of each kind from one repository. Only the kinds of which the text says so are
    made from repositories that name no split.
    """

    mutation: NonNegativeInt = 150
    """problems with one wrong line; 0: none"""
    deleted_function: NonNegativeInt = 0
    """problems with a deleted function or function body; 0: none"""
    deleted_feature: NonNegativeInt = 0
    """problems with a deleted public symbol and the helpers that only it used; 0: none"""
    combined: NonNegativeInt = 0
    """problems with two to four of the proven mutations at once; 0: none"""
    multi_place: NonNegativeInt = 0
    """problems with one wrong idea in two to five places; 0: none"""
    refactoring: NonNegativeInt = 0
    """problems in which a public function or class is to be renamed or moved, also from repositories without a
    split; 0: none"""
    question: NonNegativeInt = 0
    """questions about places in the code, also from repositories without a split; 0: none"""
    no_edit: NonNegativeInt = 0
    """problems with right code and the prompt of a proven mutation, also from repositories without a split;
    0: none"""
    trials_ratio: float = Field(default=1.6, ge=1)
    """maximum number of candidates tried per wanted problem"""

    def of(self, kind: Kind) -> int:
        return int(self.model_dump()[kind.value])

    @property
    def total(self) -> int:
        """Problems of all kinds."""
        return sum(self.model_dump(exclude={"trials_ratio"}).values())


def refuse_runner(name: str, package_paths: Iterable[str]) -> str:
    """Reason to refuse a package that is part of the test runner. Empty: it is not part of it."""
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
    dropped_paths: tuple[str, ...] = ()
    """files or folders below package_paths and test_paths that are left out"""
    stripped_prefix: str = ""
    """folder of the source that is on the import path, such as src"""
    kept_paths: tuple[str, ...] = ()
    """other files or folders of the source that tests read"""
    dependencies: tuple[str, ...] = ()
    """name==version of wheels; their files are placed next to the code"""
    is_installed: bool = False
    """true: importlib.metadata knows the package and its dependencies, as after an installation, and the
    dependencies keep their compiled modules"""
    generated_files: dict[str, str] = Field(default={})
    """path -> text of modules that the project's build writes, of the metadata file if the project's name is
    not the source's, and of pytest.ini if the project has its own rules of test collection: names of
    functions and classes, pythonpath, import mode"""

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
    """split of all its problems; None: its mutations are divided among the splits by `sizes`"""
    quotas: Quotas | None = Field(default=None, description="None: the quotas of ProblemsConfig")


class GitSource(ProjectSource):
    """A git repository on this machine, bare or not. Problems are made from its commits."""

    path: str = Field(description="directory that git can read")
    split: Split = Field(default=Split.TRAIN, description="split of all its problems")
    revision: str = "HEAD"
    """commit, branch or tag at which the search begins; the search goes back in time"""
    max_commits: PositiveInt = 200
    """maximum number of commits searched, along first parents"""
    max_changed_lines: PositiveInt = 400
    """maximum number of changed lines of product code in a commit"""
    max_problems: NonNegativeInt = 50
    """maximum number of commits taken, newest first; each becomes a problem if its tests prove it; 0: none"""


class GivenSource(ProjectSource, SourceArchive):
    """Task of Harbor or instance of SWE-bench, kept in the archive cache as two states and a text."""

    version: str = Field(description="version of the archive: its checksum, shortened")
    sha256: str = Field(description="SHA-256 of the archive")
    distribution: str = Field(description="name under which importlib.metadata knows the project")
    split: Split = Field(default=Split.TRAIN, description="split of its problem")


class SplitSizes(Record):
    """Number of problems per split. A split is smaller if the packages do not give enough problems."""

    demonstration: NonNegativeInt = 800
    """problems with a repair in the demonstrations of the corpus"""
    train: NonNegativeInt = Field(default=600, description="problems for RL")
    held_out: NonNegativeInt = 240
    """problems for evaluation; training never sees these mutations, but may see others of the same functions"""
    held_out_function: NonNegativeInt = 60
    """problems for evaluation in the functions that functions_held_out sets aside"""
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
    """maximum share of all stable tests that fail; above it the whole package counts as broken"""
    max_tests_first_run: int = Field(default=60, ge=2)
    """maximum number of covering tests run on a candidate; the result of the others is estimated"""
    max_fail_to_pass: PositiveInt = 16
    """maximum number of failing tests in a problem; a solution makes all of them pass"""
    max_pass_to_pass: PositiveInt = 16
    """maximum number of passing tests in a problem; a solution breaks none of them"""
    max_changed_lines: PositiveInt = 400
    """maximum number of lines in which a candidate differs from the original"""
    max_test_calls: PositiveInt = 1_000_000
    """maximum number of function calls in a test that is used (100,000 calls take about 30 ms); unlike a time,
    this count is the same on every machine and under any load"""
    max_idle_seconds: PositiveFloat = 0.2
    """maximum sleeping time of a test that is used"""
    time_limit_seconds: PositiveFloat = Field(default=30.0, description="wall time of one test run")
    cheater_share: Share = 1 / 16
    """share of the problems that are also judged on a patch that skips every test"""
    hidden_share: Share = 0.5
    """share of the failing test functions that the agent never sees"""
    tries_stubs: bool = True
    """drop a mutation if its tests pass with a constant in place of the function; deletions are always
    dropped then"""
    tries_right_fix: bool = True
    """let the grader judge the original with a comment added, and drop the problem if it refuses, since it
    would refuse every repair; takes about two seconds per problem"""
    drops_repeated_lines: bool = True
    """drop a change if its right line occurs in a comment, in a text, or with both its neighbours in
    another file"""


class OracleConfig(Record):
    """Calls that compare a candidate with the original."""

    enabled: bool = True
    """make such calls, from arguments seen in tests; false: prompts have no example call, and
    grading.asks_oracle has no effect"""
    max_calls_derived: PositiveInt = 24
    """maximum number of held-out argument lists per function"""
    call_seconds: PositiveFloat = Field(default=0.5, description="CPU time of one call")


class Wording(Record):
    """Limits of the prompts' texts."""

    terse_characters: int = Field(
        default=390, ge=40, description="maximum number of characters of a terse prompt"
    )
    vague_names: bool = True
    """true: vague prompts name the topic by words of the function's name; false: they hold no name of a changed
    function, of its class or of a changed file"""


class ProblemsConfig(Record):
    """Everything that decides which problems are built."""

    repositories: tuple[RepositorySource, ...] = ()
    """packages of the index in which code is broken"""
    git: tuple[GitSource, ...] = ()
    """git repositories; problems are made from their commits"""
    given: tuple[GivenSource, ...] = ()
    """tasks of Harbor and instances of SWE-bench"""
    seed: NonNegativeInt = 0
    """seed of the broken lines, the splits and the prompts; default: the recipe's seed"""
    quotas: Quotas = Quotas()
    deletion_levels: tuple[Level, ...] = LEVELS
    """levels of deleted functions: `body` keeps signature and docstring, `signature` the signature,
    `everything` nothing"""
    feature_ways: tuple[Literal["symbol", "skeleton", "subject"], ...] = ("symbol",)
    """ways to delete a feature: `symbol` takes a public symbol and the helpers that only it used, `skeleton` all but
    the public signatures of one, `subject` everything that one group of tests alone needs, in any number of files"""
    min_deleted_lines: PositiveInt = 1
    """minimum number of lines that a deleted function or feature changes"""
    sizes: SplitSizes = SplitSizes()
    """problems per split from the repositories that name no split"""
    rules: ValidityRules = ValidityRules()
    oracle: OracleConfig = OracleConfig()
    strip_text: bool = False
    """drop docstrings and comments of product code; tests keep theirs"""
    plain_functions: bool = False
    """mutate only undecorated top-level functions with a name that is defined once"""
    max_function_lines: int = Field(default=120, ge=2)
    """maximum number of lines of a mutated function"""
    max_function_characters: int = Field(default=20_000, ge=20)
    """maximum number of characters of a mutated function, with line ends; the corpus has the same limits"""
    max_per_function: PositiveInt = 6
    """maximum number of mutations of one function"""
    operator_mix: Literal["even", "noticed"] = "even"
    """even: all mutation operators equally often, as far as there are candidates; noticed: in the
    proportions in which tests notice them"""
    operators_left_out: tuple[str, ...] = Field(
        default=(), description="mutation operators not used"
    )
    functions_held_out: NonNegativeInt = 12
    """functions, of repositories without a split, that occur only in the split held_out_function"""
    prompt_shares: dict[PromptLevel, float] = Field(default={PromptLevel.PLACE: 1.0})
    """share of the problems by wording"""
    wording: Wording = Wording()

    @model_validator(mode="after")
    def _check_names(self) -> "ProblemsConfig":
        names = [source.name for source in (*self.repositories, *self.git, *self.given)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"sources named twice: {twice}, wanted each name once")
        return self

    @property
    def is_described(self) -> bool:
        """Whether some prompts have the wording `described`."""
        return self.prompt_shares.get(PromptLevel.DESCRIBED, 0.0) > 0


class ProblemSelection(Record):
    """Filter for the problems of a set that a recipe uses. The shipped set itself does not change."""

    kinds: tuple[Kind, ...] = Field(default=(), description="kinds of problems used; empty: all")
    max_lines: PositiveInt | None = None
    """maximum number of lines of the problem's function; None: any number"""


class ProblemsRequest(Record):
    """Request of the problem stage."""

    config: ProblemsConfig
    selection: ProblemSelection = ProblemSelection()
    archives_directory: Path
    use_shipped: bool = True
    """take the set that ships for this configuration, if there is one"""
    parallel_runs: PositiveInt | None = None
    """test runs at once; None: the core limit of the settings"""


class ProblemsResult(Record):
    """Published problems: problems.jsonl, statistics.json and repositories/NAME in `directory`."""

    directory: str
    num_problems: int
    num_candidates: int = Field(description="candidates that were run")
    yield_ratio: float = Field(description="share of those candidates that were proven")
    split_sizes: dict[str, int]
    kinds: dict[str, int]
    operators: dict[str, int] = Field(description="published problems by operator")
    repositories: dict[str, str] = Field(description="name -> fingerprint")
    left_out: dict[str, str]
    """source, or NAME/FILE for a test file of a source, that gave no problems -> reason"""
    changes: dict[str, float] = Field(default={})
    """median_lines: median number of changed lines per problem; several_files: share of the problems that change
    more than one file; empty in older results"""
    yield_table: tuple[dict[str, str | int | float], ...]
    """one row per repository and kind"""
    seconds: float


class EnvironmentsRequest(Record):
    """Request of the stage that adds problems of environments to a problem set."""

    problems_directory: str
    environments: dict[str, EnvironmentConfig]
    seed: int = 0


class EnvironmentsResult(Record):
    """Problem set to which problems of environments were added."""

    directory: str
    added: dict[str, int] = Field(description="environment -> problems")


def pin_commits(config: ProblemsConfig) -> ProblemsConfig:
    """The configuration with each revision resolved to its current commit, so that a moved branch gives another
    set. A source that cannot be read stays unchanged, and the build reports why it is left out.
    """
    pinned: list[GitSource] = []
    for source in config.git:
        commit = source.revision
        with suppress(ProblemError):
            commit = resolve_commit(Path(source.path), source.revision)
        pinned.append(source.model_copy(update={"revision": commit}))
    return config.model_copy(update={"git": tuple(pinned)})
