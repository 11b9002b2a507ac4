"""Settings, request and result of the corpus stage."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.extensions import COMPACT
from ostinato.infra.platform.record import Record, Share
from ostinato.tasks.records import Split


class NgramOverlap(Record):
    """N-grams of words that one split's problems share with one stage's training data."""

    stage: str
    words: int = Field(description="length of an n-gram in words")
    problems: int = Field(description="problems with unique n-grams, in prompt or function")
    problems_with_text: int = Field(description="problems with an n-gram that the stage trains on")
    problems_with_answer: int = Field(
        description="problems with such an n-gram that contains a word of a right line"
    )
    median_share: float = Field(
        description="share of a problem's n-grams that is trained on (0..1), median over problems"
    )


class AnswerOverlap(Record):
    """Problems of one evaluated split with text in training documents."""

    split: Split
    problems: int = Field(
        description="problems with a right line that is long enough to be distinctive"
    )
    problems_with_answer: int
    """problems with all their right lines in some training document: shards, demonstrations,
    locating documents, conversations of the user"""
    median_documents: float = Field(description="documents with these lines, median over problems")
    ngrams: tuple[NgramOverlap, ...] = ()
    """overlap per stage"""


CONVERSATIONS = "conversations"  # held-out shard of a user's own conversations
SHARDS = ("code", "library", "repair", "repair_general")  # for training
DEMONSTRATED = (Split.DEMONSTRATION, Split.TRAIN)  # other splits are for evaluation or users

Locating = Literal["named", "search", "grep"]
"""named: the prompt names the function, nothing is located."""


class CodeSource(Record):
    """One source of general code."""

    kind: Literal["standard_library", "package", "directory", "git", "jsonl", "parquet"]
    """standard_library: of the running Python; package: an installed package; directory: the Python
    files below path; git: those of one commit; jsonl, parquet: one source file per row"""
    name: str = Field(default="", description="import name of an installed package, else a label")
    path: str = ""
    """path of a directory; path or URL of a git repository; path of a jsonl or parquet file or of a
    folder of them, local or as s3://bucket/prefix"""
    revision: str = Field(
        default="", description="revision of a git source: a full commit id, a tag or a branch"
    )
    text_column: str = Field(
        default="text", description="column of a row's text, for jsonl and parquet"
    )
    path_column: str = Field(
        default="path", description="column of a row's path, for jsonl and parquet"
    )
    licence_column: str = "licence"
    """column of a row's licence, for jsonl and parquet; rows without one have `licence`"""
    licence: str = Field(default="", description="licence of all files; packages declare theirs")

    @model_validator(mode="after")
    def _located(self) -> "CodeSource":
        if self.kind == "package" and not self.name:
            raise ValueError("source of kind package has no name, wanted an import name")
        if self.kind not in ("standard_library", "package") and not self.path:
            raise ValueError(f"source {self.name!r} of kind {self.kind} has no path")
        if (self.kind == "git") != bool(self.revision):
            wanted = "a commit, a tag or a branch" if self.kind == "git" else "none"
            raise ValueError(
                f"source {self.name!r} of kind {self.kind} has revision {self.revision!r}, wanted {wanted}"
            )
        for field in ("text_column", "path_column", "licence_column"):
            value, default = getattr(self, field), CodeSource.model_fields[field].default
            if value != default and self.kind not in ("jsonl", "parquet"):
                raise ValueError(
                    f"source {self.name!r} of kind {self.kind} has {field} {value!r}, wanted it for "
                    "jsonl and parquet only"
                )
        return self

    @field_validator("path")
    @classmethod
    def _without_password(cls, path: str) -> str:
        if "://" in path and "@" in path and urlsplit(path).password:
            raise ValueError(
                "path is a URL with a password, wanted one without, for example ssh://"
            )
        return path


class TokenBudgets(Record):
    """Tokens to make per kind of document."""

    code: NonNegativeInt = Field(default=400_000, description="windows of general source files")
    library: NonNegativeInt = 500_000
    """functions of the problem repositories"""
    repair: NonNegativeInt = 1_200_000
    """self-made bugs in those functions"""
    repair_general: NonNegativeInt = 600_000
    """self-made bugs in general functions"""
    located: NonNegativeInt = 0
    """transcripts that only locate a described general function, as demonstrations do"""


class DemonstrationConfig(Record):
    """Transcripts of a scripted demonstrator in real sandboxes with real tests."""

    count: NonNegativeInt = 700
    """attempts; with fewer problems, problems are used again"""
    parallel_share: Share = 0.5
    """several calls per turn; the rest one call per turn"""
    wrong_first_share: Share = 0.35
    """a wrong edit, failed tests, then the right edit"""
    give_up_share: Share = 0.15
    """a wrong edit, failed tests, then giving up"""
    start_over_share: Share = 0.0
    """a wrong edit, failed tests, a new beginning, then the right edit; requires
    harness.max_restarts"""
    splits: tuple[Split, ...] = Field(default=(Split.DEMONSTRATION,), min_length=1)
    """splits of the repaired problems: only demonstration and train are allowed"""
    concurrency: PositiveInt = Field(default=8, description="attempts at the same time")
    boxes_per_repository: PositiveInt = 4
    """maximum of concurrent sandboxes per repository"""
    locating: Locating = "named"
    """way to find a function that the prompt only describes"""

    @model_validator(mode="after")
    def _shares(self) -> "DemonstrationConfig":
        outside = [split.value for split in self.splits if split not in DEMONSTRATED]
        if outside:
            wanted = ", ".join(DEMONSTRATED)
            raise ValueError(f"splits holds {outside[0]!r}, wanted only {wanted}")
        total = self.wrong_first_share + self.give_up_share + self.start_over_share
        if total > 1:
            raise ValueError(
                f"wrong_first_share + give_up_share + start_over_share is {total}, wanted at most 1"
            )
        return self


class CorpusConfig(Record):
    """All settings that determine the content of the corpus."""

    sources: tuple[CodeSource, ...] = (CodeSource(kind="standard_library"),)
    """general source code"""
    vocab_size: int = Field(default=1280, ge=400, description="used when no tokenizer is given")
    budgets: TokenBudgets = TokenBudgets()
    repair_parallel_share: Share = 0.5
    """repair documents with several calls per turn"""
    fill_in_share: Share = 0.75
    """library documents with a line to fill in; the rest are clean"""
    held_out_share: float = Field(default=0.05, ge=0, lt=1)
    """share of general source files held out, for perplexity"""
    window_tokens: int = Field(default=384, ge=32, description="length of a document of code")
    near_duplicate_ratio: float = Field(default=0.8, gt=0, le=1)
    """share of common shingles from which two files count as duplicates"""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    conversations: str = ""
    """.jsonl or .parquet file of conversations to fine-tune on, in addition to the demonstrations;
    `ostinato run sft --data FILE` sets it"""
    seed: int = 0
    """seed of the drawn files and functions, self-made bugs and demonstrations; default: the
    recipe's seed"""


class FunctionLimits(Record):
    """Limits of the functions in documents. Problems have the same limits."""

    max_lines: int = Field(default=24, ge=2)
    max_characters: int = Field(default=600, ge=20)

    def accept(self, lines: tuple[str, ...]) -> bool:
        """Whether a function has at least two lines and stays within the limits."""
        return 2 <= len(lines) <= self.max_lines and len("\n".join(lines)) <= self.max_characters


class CorpusRequest(Record):
    """One corpus to build."""

    config: CorpusConfig
    pins: tuple[str, ...] = ()
    """content of each source, as `pin_sources` found it; empty: found when the stage runs"""
    limits: FunctionLimits = FunctionLimits()
    problems_directory: str = Field(description="problems.jsonl and repositories/NAME; empty: none")
    harness: HarnessConfig = HarnessConfig()
    """harness of the demonstrations"""
    search_directory: str | None = None
    """encoder of code search; None: search by words only"""
    tokenizer_path: str | None = None
    """checkpoint whose tokenizer is used; None trains one on this corpus"""

    @model_validator(mode="after")
    def _demonstrable(self) -> "CorpusRequest":
        config, harness = self.config.demonstrations, self.harness
        if config.start_over_share and not harness.max_restarts:
            raise ValueError(
                f"corpus.demonstrations.start_over_share is {config.start_over_share} and "
                "harness.max_restarts is 0, wanted at least 1: the attempt would end there"
            )
        wrong = config.wrong_first_share + config.give_up_share + config.start_over_share
        if harness.summarise_at_tokens is not None and harness.dialect == COMPACT and wrong:
            raise ValueError(
                f"demonstrations with a wrong edit have a share of {wrong} and harness.summarise_at_tokens is "
                f"{harness.summarise_at_tokens}, wanted 0: a demonstrated summary names the right line"
            )
        return self


class ShardStatistics(Record):
    """One pair of .bin and .idx files."""

    name: str
    documents: int
    tokens: int


class CorpusResult(Record):
    """Location and content of the corpus. The same numbers are in statistics.json."""

    directory: str
    vocab_size: int
    shards: tuple[ShardStatistics, ...]
    demonstrations: int
    demonstration_tokens: int
    demonstrations_by_plan: dict[str, int]
    sources: tuple[str, ...] = Field(
        default=(), description="sources, each with its commit or checksum"
    )
    files_read: int
    files_dropped: dict[str, int] = Field(description="reason -> files")
    documents_decontaminated: int
    licences: dict[str, int] = Field(description="licence -> characters kept")
    overlap: tuple[AnswerOverlap, ...] = ()
