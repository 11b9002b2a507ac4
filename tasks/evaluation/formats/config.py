"""Settings, request and result of a format trial, which finds the tool-call dialect and edit form that
a model can write.
"""

from typing import Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt

from ostinato.infra.agent.config import EditForm, HarnessConfig
from ostinato.infra.agent.extensions import BUILTIN
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.egress.config import SandboxConfig
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.models.decode.config import DecodingConfig
from ostinato.tasks.evaluation.statistics import wilson_interval
from ostinato.tasks.grading.config import GradingConfig

EXAMPLES = 3


class AnswerFormat(Record):
    """A form of answers: of tool calls and of edits, or the one of a foreign program."""

    dialect: str
    edits: EditForm = "tool"
    program: str = BUILTIN
    """harness program; another than the builtin loop reads answers in its own way"""

    @property
    def title(self) -> str:
        """Dialect and edit form by name, or the program."""
        return f"{self.dialect}, {self.edits}" if self.is_builtin else f"program {self.program}"

    @property
    def is_builtin(self) -> bool:
        """Whether the builtin loop reads the answers, so that it is known which could be read."""
        return self.program == BUILTIN


class FormatTrialConfig(Record):
    """Amounts of `ostinato try`."""

    problems: PositiveInt = Field(
        default=8, description="training problems, with one attempt per format"
    )
    seconds: PositiveFloat = Field(
        default=210.0,
        description="time of all formats together; attempts that are unfinished then do not count",
    )
    temperature: float = Field(default=0.5, ge=0, description="0 is greedy")
    seed: int = Field(default=0, description="seed of the drawn problems and of the attempts")
    slots: PositiveInt = Field(default=8, description="attempts that one process decodes together")


class FormatTrialRequest(Record):
    """One checkpoint and the formats to try."""

    checkpoint_directory: str
    problems_directory: str
    formats: tuple[AnswerFormat, ...] = Field(min_length=1)
    config: FormatTrialConfig
    harness: HarnessConfig
    """settings other than dialect and edits"""
    grading: GradingConfig = GradingConfig()
    sandbox: SandboxKind = SandboxKind.NAMESPACE
    sandboxes: SandboxConfig = SandboxConfig()
    decoding: DecodingConfig = DecodingConfig()
    processes: int = Field(default=2, ge=1, description="engines that decode at the same time")


class FormatTrialShard(Record):
    """One process of a trial."""

    trial: FormatTrialRequest
    index: int
    count: int


Ending = Literal["solved", "changed", "parsed", "unread"]
"""Furthest result of an attempt: the tests pass, a file is changed, a call or edit was parsed, or none was."""
ENDINGS: tuple[Ending, ...] = get_args(Ending)


class FormatAttempt(Record):
    """An attempt with the whole text that the model read and wrote."""

    format: AnswerFormat
    problem_id: str
    ending: Ending
    generated_tokens: int
    text: str = Field(description="prompt, answers and results, with special tokens by name")
    reason: str = Field(default="", description="reason why the attempt ended")


class FormatTrialShardResult(Record):
    """The attempts of one process that ended in time."""

    attempts: tuple[FormatAttempt, ...]


class FormatScore(Record):
    """Counts of one format's attempts."""

    format: AnswerFormat
    attempts: int = Field(description="attempts that ended in time")
    parsed: int = Field(description="attempts with a call or an edit that could be read")
    changed: int = Field(description="attempts that left a changed file")
    solved: int
    generated_tokens: float = Field(description="tokens per attempt, mean; 0 of none")

    @property
    def rank(self) -> tuple[float, ...]:
        """Larger is better: shares of solved, changed, parsed attempts, then fewer tokens. Of each share the lower
        end of its interval, since the number of attempts differs: 7 of 8 is better than 1 of 1.
        """
        num_attempts = max(1, self.attempts)
        lows = (
            round(wilson_interval(count / num_attempts, num_attempts)[0], 9)  # 0 of any is 0
            for count in (self.solved, self.changed, self.parsed)
        )
        return *lows, -self.generated_tokens


class FormatTrialResult(Record):
    """Scores in the order of the formats, and example attempts of the best format."""

    scores: tuple[FormatScore, ...]
    examples: tuple[FormatAttempt, ...]
    wall_seconds: float

    @property
    def best(self) -> FormatScore:
        """The score of the best format."""
        return max(self.scores, key=lambda score: score.rank)
