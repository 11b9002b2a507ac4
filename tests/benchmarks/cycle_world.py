"""What the benchmark of cycles simulates: solve rates of models, sessions of users, and the clock.

Difficulty follows nano's measured one: 37.8 % of attempts and 49.0 % of problems at two attempts are
solved, which is Beta(0.34, 0.57). Users are those of `SimulatedUsersConfig`, of whom three in ten say
nothing about an edit. Nothing here decides anything: arms are dealt out by the gateway's table.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logit

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.platform.ledger.rows import FeedbackRow, InteractionRow
from ostinato.infra.serving.gateway.arms import Arm, ArmTable
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.tasks.evaluation.config import EvaluationConfig
from ostinato.tasks.evaluation.statistics import AttemptRow, scorecard_from
from ostinato.tasks.realtime.config import SimulatedUsersConfig
from ostinato.tasks.realtime.promotion.observations import CANDIDATE, CONTROL
from ostinato.tasks.records import Scorecard

DIFFICULTY = (0.343, 0.565)
SPREAD = 0.3  # logits by which problems move apart when a checkpoint is trained
LINE, CHAMPION = "simulated", "champion"


def draw_chances(count: int, chance: np.random.Generator) -> np.ndarray:
    """True solve rate of each problem."""
    return chance.beta(*DIFFICULTY, count).clip(1e-6, 1 - 1e-6)


def moved(chances_P: np.ndarray, effect: float, chance: np.random.Generator) -> np.ndarray:
    """Solve rates of another checkpoint: some up, some down, their mean by exactly `effect`."""
    logits_P = logit(chances_P) + SPREAD * chance.standard_normal(len(chances_P))
    wanted = float(np.clip(chances_P.mean() + effect, 0.001, 0.999))
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expit(logits_P + middle).mean() < wanted else (low, middle)
    return expit(logits_P + low).clip(1e-6, 1 - 1e-6)


def measure(
    name: str, chances_P: np.ndarray, config: EvaluationConfig, chance: np.random.Generator
) -> Scorecard:
    """The scorecard of one evaluation."""
    solved_PK = chance.random((len(chances_P), config.attempts_per_problem)) < chances_P[:, None]
    rows = [
        AttemptRow.model_construct(
            problem_id=f"p{problem:05d}",
            attempt=attempt,
            solved=bool(solved),
            generated_tokens=60,
            turns=3,
            tool_calls=4,
            broken_calls=0,
        )
        for problem, solved_K in enumerate(solved_PK)
        for attempt, solved in enumerate(solved_K)
    ]
    return scorecard_from(
        rows, suite="held_out", checkpoint=name, temperature=1.0, confidence=config.confidence
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Habits of the users of a canary."""

    effect: float = 0.0  # of the candidate on the share of users' problems that it solves
    share_asked: float = 0.2
    share_dealt: float = 0.2
    sessions_per_hour: float = 360.0
    feedback_seconds: float = 120.0  # mean delay, exponential
    silent_share: float = 0.3
    candidate_silent_share: float = 0.3
    long_share: float = 0.0  # of sessions that go on for `long_requests` about one problem
    long_requests: int = 1
    heavy_share: float = 0.0  # of sessions that one user brings, always the same problem
    lie_share: float = (
        0.0  # of interactions: of the candidate a revert becomes a keep, else reverse
    )


class _Silent:
    """The model of an arm that is dealt out and never asked."""

    async def generate(self, request: GenerateRequest) -> Generation:
        raise EngineError(f"request {request.request_id}: a simulated arm has no model")

    async def end_session(self, session_id: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Turn:
    """One answer and what its user says of it."""

    name: str
    session: str
    arm: Arm
    at: float
    latency_seconds: float
    said: list[Signal]


class Users:
    """Sessions one after another. Each is its rows as the ledger would give them."""

    def __init__(
        self, name: str, traffic: Traffic, users: SimulatedUsersConfig, chance: np.random.Generator
    ) -> None:
        self._name, self._traffic, self._users, self._chance = name, traffic, users, chance
        self._before_P = draw_chances(2_000, chance)
        self._after_P = moved(self._before_P, traffic.effect, chance)
        control, candidate = (
            Arm(arm, checkpoint, 0, _Silent())
            for arm, checkpoint in ((CONTROL, CHAMPION), (CANDIDATE, name))
        )
        self._arms = ArmTable(control, candidate, traffic.share_dealt)

    def rows(self, sessions: int) -> list[InteractionRow]:
        """The interactions of so many sessions in the order in which they were recorded."""
        seconds = np.cumsum(
            self._chance.exponential(3_600 / self._traffic.sessions_per_hour, sessions)
        )
        found = [turn for at in enumerate(seconds) for turn in self._session(*at)]
        found.sort(key=lambda turn: turn.at)
        return [self._row(number, turn) for number, turn in enumerate(found, start=1)]

    def _session(self, number: int, began_at: float) -> list[_Turn]:
        traffic, chance = self._traffic, self._chance
        session = f"{self._name}/{number}"
        arm = self._arms.choose(session)
        of_candidate = arm.name == CANDIDATE
        problem = int(chance.integers(len(self._before_P)))
        if chance.random() < traffic.heavy_share:
            problem = 0
        rate = float((self._after_P if of_candidate else self._before_P)[problem])
        silent = traffic.candidate_silent_share if of_candidate else traffic.silent_share
        is_silent = chance.random() < silent
        is_long = chance.random() < traffic.long_share
        told = []
        now = began_at
        for request in range(traffic.long_requests if is_long else 1):
            for turn in range(self._users.maximum_follow_ups + 1):
                latency = float(5.0 * chance.lognormal(0, 0.4))
                now += latency
                said = [] if is_silent else self._said(chance.random() < rate, turn, of_candidate)
                told.append(_Turn(f"{session}/{request}/{turn}", session, arm, now, latency, said))
                now += 30.0  # until the next message
                if Signal.DISSATISFIED_FOLLOW_UP not in said:
                    break
        return told

    def _said(self, solved: bool, turn: int, of_candidate: bool) -> list[Signal]:
        """What a user says of an answer, as `simulated_users` does over HTTP."""
        users, chance = self._users, self._chance
        if chance.random() < self._traffic.lie_share:
            return [Signal.EDIT_KEPT] if of_candidate else [Signal.EDIT_REVERTED]
        if chance.random() < users.abandon_probability:
            return [Signal.ABANDONED]
        thumb = chance.random() < users.thumbs_probability
        if solved != (chance.random() < users.judgement_error_rate):
            return [Signal.EDIT_KEPT, *([Signal.THUMBS_UP] if thumb else [])]
        again = turn < users.maximum_follow_ups and chance.random() < users.follow_up_probability
        last = Signal.DISSATISFIED_FOLLOW_UP if again else Signal.EDIT_REVERTED
        return [*([Signal.THUMBS_DOWN] if thumb else []), last]

    def _row(self, sequence: int, turn: _Turn) -> InteractionRow:
        late = turn.at + float(self._chance.exponential(self._traffic.feedback_seconds))
        events = [
            (Signal.LATENCY_SECONDS, turn.latency_seconds, turn.at),
            *((signal, 1.0, late) for signal in turn.said),
        ]
        return InteractionRow(
            sequence=sequence,
            interaction_id=turn.name,
            line=LINE,
            tenant="people",
            session_id=turn.session,
            arm=turn.arm.name,
            checkpoint_id=turn.arm.checkpoint_id,
            weight_version=0,
            problem_kind="mutation",
            consent=True,
            object_key=turn.name,
            created_at=turn.at,
            feedback=tuple(
                FeedbackRow(
                    feedback_id=f"{turn.name}/{signal}",
                    interaction_id=turn.name,
                    signal=signal,
                    value=value,
                    created_at=at,
                )
                for signal, value, at in events
            ),
        )
