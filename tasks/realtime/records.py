"""Requests and results of the real-time cycle: serving, simulated traffic, training."""

from pydantic import Field

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.models.decode.config import DecodingConfig
from ostinato.tasks.realtime.config import FeedbackConfig, SimulatedUsersConfig
from ostinato.tasks.realtime.feedback.interactions import Window
from ostinato.tasks.reinforcement.learning.config import LearningConfig


class ServedCandidate(Record):
    """Checkpoint of an open canary, which answers a share of the sessions."""

    checkpoint_directory: str
    checkpoint_id: str
    share: float


class DeployedModel(Record):
    """A checkpoint and the settings with which a gateway serves it."""

    line: str = Field(description="serving line that interactions are recorded under")
    checkpoint_directory: str
    checkpoint_id: str
    """name in the ledger's promotions and in recorded interactions"""
    weight_version: int = 0
    candidate: ServedCandidate | None = Field(default=None, description="None: no canary is open")
    problems_directory: str = Field(description="problem set with the repositories of users")
    harness: HarnessConfig
    engine_slots: int = Field(default=16, ge=1)
    boxes_per_repository: int = Field(default=8, ge=1)
    sandbox: SandboxKind = SandboxKind.NAMESPACE
    decoding: DecodingConfig = DecodingConfig()
    search_directory: str | None = None
    """encoder of code search; None: search by words only"""


class TrafficRequest(Record):
    """Simulated users of one cycle, and the deployed model that they use."""

    served: DeployedModel
    users: SimulatedUsersConfig
    cycle_number: int = Field(ge=0, description="number that decides which problems users bring")


class CycleTrainingRequest(Record):
    """A cycle's window of interactions, and the checkpoint that answered in them."""

    cycle_id: str
    window: Window
    checkpoint_directory: str
    feedback: FeedbackConfig
    learning: LearningConfig
    train_until: float | None = None
    """time at which training ends, in seconds since the epoch; older samples that do not fit are left out; None: no limit"""


class CycleTrainingResult(Record):
    """Candidate of a cycle, and figures of its batch."""

    checkpoint_directory: str | None = Field(description="None: the window holds no sample")
    interactions: int
    skipped: int
    samples: int = Field(description="samples that were trained on")
    left_out: int = Field(default=0, description="samples for which a late cycle had no time")
    mean_reward: float
    metrics: dict[str, float]
