"""Requests and results of evaluating a checkpoint: one scorecard from attempts of several shards."""

from pydantic import Field

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.egress.config import SandboxConfig
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.models.decode.config import DecodingConfig
from ostinato.tasks.evaluation.config import EvaluationConfig
from ostinato.tasks.evaluation.statistics import AttemptRow
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.records import Scorecard, Split


class EvaluationRequest(Record):
    """One evaluation: checkpoint, problems and settings."""

    checkpoint_directory: str
    endpoint: Endpoint | None = None
    """endpoint of a model that is served elsewhere; None: the checkpoint is loaded"""
    checkpoint_name: str = Field(description="name of the checkpoint in the scorecard")
    problems_directory: str
    """problems and prepared repositories of the problems stage"""
    split: Split | None = Split.HELD_OUT
    """None: all problems of a suite, with a score for each of its slices"""
    suite: str = Field(default="", description="name on the scorecard; empty: the split")
    config: EvaluationConfig = EvaluationConfig()
    harness: HarnessConfig = HarnessConfig()
    grading: GradingConfig = GradingConfig()
    sandbox: SandboxKind = SandboxKind.NAMESPACE
    """kind of box in which an agent's commands run"""
    sandboxes: SandboxConfig = SandboxConfig()
    engine_slots: int = Field(default=32, ge=1)
    """attempts decoded together in one process"""
    decoding: DecodingConfig = DecodingConfig()
    processes: int = Field(default=2, ge=1, description="shards that run at the same time")
    search_directory: str | None = None
    """encoder of code search; None: search by words only"""
    context_tokens: int = Field(default=0, ge=0)
    """longest conversation of the engine; 0: the model's limit"""


class EvaluationResult(Record):
    """The scorecard, its rows and the time it took."""

    scorecard: Scorecard
    rows: tuple[AttemptRow, ...]
    trajectories_path: str
    """record of each attempt, as JSON lines"""
    wall_seconds: float


class ShardRequest(Record):
    """One shard of an evaluation, run by a process of its own."""

    evaluation: EvaluationRequest
    index: int = Field(ge=0)
    count: int = Field(ge=1)


class ShardResult(Record):
    """File of a shard's rows."""

    rows_path: str
