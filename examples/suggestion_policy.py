"""When to show a suggestion, learnt from users: one cycle of a policy that shows it or stays silent.

    python examples/suggestion_policy.py [--line suggestions] [--accepted 0.75] [--rejected -0.25]

A client asks `Policy.choose` before it shows a suggestion, stores the choices of a session with `SuggestionLine.record` if
its user consents, and reports `edit_kept` or `edit_reverted` to the gateway's /v1/feedback. Such a client, for simulated
users, is `tests/benchmarks/suggestions.py`. The script runs one cycle. docs/realtime-cycle.md says what it shares with the
cycle of models. Shapes: N choices, F features.
"""

import argparse
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from pydantic import Field, NegativeFloat, PositiveFloat, TypeAdapter, ValidationError
from torch import Tensor

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.ledger import open_ledger
from ostinato.infra.platform.ledger.rows import CycleRow, InteractionRow, NewInteraction
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.evaluation.statistics import mean, paired_difference
from ostinato.tasks.realtime.config import BaselineConfig, CanaryConfig, GuardConfig
from ostinato.tasks.realtime.cycle_training import DISTIL_STAGE, carried_baselines
from ostinato.tasks.realtime.feedback.baseline import Baselines, DistilledReward, advantages
from ostinato.tasks.realtime.feedback.collect import choose_watermark
from ostinato.tasks.realtime.feedback.interactions import latest_signals
from ostinato.tasks.realtime.promotion.observations import CANDIDATE, CONTROL
from ostinato.tasks.realtime.promotion.serving_line import ServingLine
from ostinato.tasks.records import GateCheck, GateDecision
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig
from ostinato.tasks.reinforcement.learning.objective import policy_loss

EXPLORED = 0.02  # least probability of either choice: what is never shown teaches nothing
BATCH, LEARNING_RATE = 100, 20.0  # choices per step of SGD
OBJECTIVE = ObjectiveConfig(loss_divisor_tokens=BATCH, importance_cap=3.0)  # a choice is a token
MARGIN, HELD_OUT = 0.02, 5  # the gate's: mean reward of a suggestion, one session in so many
CANARY = CanaryConfig(share=0.5, guard=GuardConfig(looks=3))  # 80 sessions of each arm
MINIMUM_SESSIONS, SETTLE_SECONDS = 50, 600.0  # of a cycle


class Rewards(Record):
    """Rewards of a suggestion that was shown. Silence has 0."""

    accepted: PositiveFloat = 0.75
    rejected: NegativeFloat = -0.25

    @property
    def threshold(self) -> float:
        """Probability of acceptance above which showing pays."""
        return -self.rejected / (self.accepted - self.rejected)


class Choice(Record):
    """What the policy knew of a suggestion, and what it did."""

    kind: str
    features_F: tuple[float, ...]
    shown: bool
    probability: float = Field(gt=0, le=1, description="probability of this choice when made")


_CHOICES = TypeAdapter(tuple[Choice, ...])


class Event(DistilledReward):
    """A choice and its reward."""

    session_id: str
    choice: Choice


def make_event(row: InteractionRow, choice: Choice, rewards: Rewards) -> Event:
    """Event of a stored choice with its feedback. A shown suggestion that was not kept is rejected: otherwise the policy
    would learn to show what users ignore.
    """
    said = latest_signals(row.feedback)
    kept, undone = said.get(Signal.EDIT_KEPT), said.get(Signal.EDIT_REVERTED)
    reason, reward = "rejected", rewards.rejected
    if not choice.shown:
        reason, reward = "silent", 0.0
    elif kept is not None and (undone is None or kept.created_at > undone.created_at):
        reason, reward = "accepted", rewards.accepted
    return Event(
        interaction_id=row.interaction_id,
        judged_id=row.interaction_id,
        population=row.tenant,
        problem_kind=row.problem_kind,
        reward=reward,
        reason=reason,
        terms={reason: reward},
        session_id=row.session_id,
        choice=choice,
    )


class Policy(Record):
    """Shows a suggestion with a probability that is logistic in its features."""

    weights_F: tuple[float, ...]

    @property
    def name(self) -> str:
        """Checkpoint id in the ledger, from the weights."""
        return f"suggestions-{_hash(self.model_dump_json()):016x}"

    def probabilities(self, features_NF: np.ndarray) -> np.ndarray:
        """Probabilities of showing."""
        shown_N = torch.ones(len(features_NF), dtype=torch.bool)
        return _logprobs(_tensor(self.weights_F), _tensor(features_NF), shown_N).exp().numpy()

    def choose(
        self, kinds: Sequence[str], features_NF: np.ndarray, generator: np.random.Generator
    ) -> list[Choice]:
        """Choices for suggestions of these kinds, drawn at random."""
        show_N = self.probabilities(features_NF)
        shown_N = generator.random(len(show_N)) < show_N
        chosen_N = np.where(shown_N, show_N, 1 - show_N)
        rows = zip(kinds, features_NF.tolist(), shown_N.tolist(), chosen_N.tolist(), strict=True)
        names = tuple(Choice.model_fields)
        return [Choice(**dict(zip(names, row, strict=True))) for row in rows]

    def learn(
        self,
        choices: Sequence[Choice],
        advantages_N: Sequence[float],
        generator: np.random.Generator,
    ) -> "Policy":
        """The policy after one pass. Stored probabilities correct for its earlier steps."""
        weights_F = _tensor(self.weights_F).requires_grad_()
        features_NF = _tensor([one.features_F for one in choices])
        shown_N = torch.tensor([one.shown for one in choices])
        behaviour_N = _tensor([one.probability for one in choices]).log()
        gains_N, optimizer = _tensor(advantages_N), torch.optim.SGD([weights_F], LEARNING_RATE)
        for batch in torch.from_numpy(generator.permutation(len(choices))).split(BATCH):
            logprobs_N = _logprobs(weights_F, features_NF[batch], shown_N[batch])
            loss = policy_loss(logprobs_N, behaviour_N[batch], gains_N[batch], OBJECTIVE)
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
        return Policy(weights_F=tuple(weights_F.tolist()))


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def _tensor(values: Sequence | np.ndarray) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _logprobs(weights_F: Tensor, features_NF: Tensor, shown_N: Tensor) -> Tensor:
    show_N = EXPLORED + (1 - 2 * EXPLORED) * torch.sigmoid(features_NF @ weights_F)
    return torch.where(shown_N, show_N, 1 - show_N).log()


def update(
    policy: Policy, events: Sequence[Event], known: Baselines, name: str
) -> tuple[Policy, GateDecision]:
    """A candidate trained on most sessions, and its gate on the others. `name` is also the seed."""
    tested = [event for event in events if _hash(event.session_id) % HELD_OUT == 0]
    trained = [event for event in events if _hash(event.session_id) % HELD_OUT]
    choices, gains = [event.choice for event in trained], advantages(trained, known)
    candidate = policy.learn(choices, gains, np.random.default_rng(_hash(name)))
    return candidate, gate(policy, candidate, tested, name)


def gate(policy: Policy, candidate: Policy, events: Sequence[Event], name: str) -> GateDecision:
    """Decision by a test that the candidate is not worse, paired by session. It earns the policy's rewards, weighted by
    how much likelier its choices are.
    """
    show_N = candidate.probabilities(np.array([event.choice.features_F for event in events]))
    before, after = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for event, show in zip(events, show_N.tolist(), strict=True):
        weight = (show if event.choice.shown else 1 - show) / event.choice.probability
        before[event.session_id].append(event.reward)
        after[event.session_id].append(event.reward * weight)
    means = ({one: mean(arm[one]) for one in arm} for arm in (before, after))
    paired = paired_difference(*means, resamples=1_000)
    shown = f"{paired.mean:+.3f} [{paired.low:+.3f}, {paired.high:+.3f}]"
    check = GateCheck(
        name="reward_not_worse",
        value=paired.low,
        threshold=-MARGIN,
        passed=paired.low > -MARGIN,
        detail=f"reward of a suggestion {shown} in {paired.count} sessions, margin {-MARGIN}",
    )
    return GateDecision(
        gate_id=f"gate-{name}",
        candidate=candidate.name,
        candidate_scorecard_id=f"gate-{name}",
        champion=policy.name,
        champion_scorecard_id=None,
        passed=check.passed,
        difference=paired,
        checks=(check,),
        reason=check.detail,
    )


class SuggestionLine:
    """Policies that serve users, and what the users did. `clock` gives seconds since the epoch."""

    def __init__(
        self, ledger: Ledger, objects: ObjectStore, name: str, clock: Callable[[], float]
    ) -> None:
        self.serving = ServingLine(ledger, name, clock)
        self._name, self._ledger, self._objects, self._clock = name, ledger, objects, clock

    def start(self, policy: Policy) -> None:
        """Serves a first policy, unless the line has one."""
        self._store(policy)
        if self.serving.champion() is None:
            at = self._clock()
            self._ledger.promotions.promote(self._name, policy.name, None, "first policy", at)

    def arms(self) -> dict[str, Policy]:
        """The champion and, unless the guard ends its canary now, a candidate."""
        canary, champion = self.serving.watch_canary(CANARY.guard), self.serving.champion()
        if end := self.serving.unannounced_end():  # the next canary's end waits for this
            self.serving.note_announced(end)
        if champion is None:
            raise ConfigError(f"line {self._name!r} has no policy, wanted one: call `start`")
        arms = {CONTROL: self._load(champion)}
        return arms if canary is None else arms | {CANDIDATE: self._load(canary.checkpoint_id)}

    def record(
        self, session_id: str, tenant: str, arm: str, policy: Policy, choices: Sequence[Choice]
    ) -> list[str]:
        """Stores the choices of a session once and returns their ids, which feedback names."""
        key, names = f"{self._name}/sessions/{session_id}.json", []
        stored = _CHOICES.dump_json(tuple(choices))
        if not self._objects.put_new(key, stored) and self._objects.get_bytes(key) != stored:
            raise ConfigError(f"session {session_id!r} has other choices, wanted a new session_id")
        for index, choice in enumerate(choices):
            row = NewInteraction(
                interaction_id=f"{session_id}/{index}",
                line=self._name,
                tenant=tenant,
                session_id=session_id,
                arm=arm,
                checkpoint_id=policy.name,
                weight_version=0,
                problem_kind=choice.kind,
                consent=True,
                object_key=key,
                created_at=self._clock(),
            )
            self._ledger.interactions.record(row)
            names.append(row.interaction_id)
        return names

    def run_cycle(self, rewards: Rewards) -> str:
        """Learns from the champion's choices since the last cycle and returns the outcome. A killed cycle goes on."""
        cycles = self._ledger.cycles
        cycle = cycles.open_cycle(self._name) or self._open_cycle()
        if cycle is None:
            return f"waits for an open canary, or for {MINIMUM_SESSIONS} sessions"
        known = carried_baselines(self._ledger, self._name)
        events = self._collect(cycle, rewards)
        learned = known.absorb(events, BaselineConfig())
        cycles.update(cycle.cycle_id, DISTIL_STAGE, {"baselines": learned.model_dump(mode="json")})
        candidate, decision = update(self._load(cycle.served), events, known, cycle.cycle_id)
        self._store(candidate)
        report = (
            self.serving.start_canary(decision, CANARY.share)
            if decision.passed
            else self.serving.decide(decision)
        )
        cycles.close(cycle.cycle_id, report.outcome, self._clock())
        return f"{report.outcome}: {report.reason}"

    def _open_cycle(self) -> CycleRow | None:
        arms, cycles, name, now = self.arms(), self._ledger.cycles, self._name, self._clock()
        start, served = cycles.last_closed_watermark(name), arms[CONTROL].name
        end = choose_watermark(self._ledger, name, start, settle_seconds=SETTLE_SECONDS, now=now)
        sessions = {row.session_id for row in self._rows(start, end, served)}
        if CANDIDATE in arms or len(sessions) < MINIMUM_SESSIONS:
            return None
        window = {"from_watermark": start, "to_watermark": end}
        number = len(cycles.history(name))
        return cycles.open(f"{name}-{number:06d}", line=name, served=served, **window, at=now)

    def _rows(self, start: int, end: int, served: str) -> list[InteractionRow]:
        rows = self._ledger.interactions.since(start, end, line=self._name)
        return [row for row in rows if row.checkpoint_id == served]  # others are off-policy

    def _collect(self, cycle: CycleRow, rewards: Rewards) -> list[Event]:
        """Events with the feedback that was there when the cycle opened, so that a killed cycle reads the same."""
        events, choices = [], dict[str, tuple[Choice, ...]]()
        for row in self._rows(cycle.from_watermark, cycle.to_watermark, cycle.served):
            if row.object_key not in choices:
                stored = self._objects.get_bytes(row.object_key)
                choices[row.object_key] = _CHOICES.validate_json(stored)
            choice = choices[row.object_key][int(row.interaction_id.rpartition("/")[2])]
            said = tuple(one for one in row.feedback if one.created_at <= cycle.opened_at)
            events.append(make_event(row.model_copy(update={"feedback": said}), choice, rewards))
        return events

    def _store(self, policy: Policy) -> None:
        key, stored = f"{self._name}/{policy.name}.json", policy.model_dump_json()
        self._objects.put_bytes(key, stored.encode())

    def _load(self, name: str) -> Policy:
        return Policy.model_validate_json(self._objects.get_bytes(f"{self._name}/{name}.json"))


def arm_of(session_id: str, arms: dict[str, Policy]) -> str:
    """The arm that serves a session, by hash."""
    if CANDIDATE not in arms:
        return CONTROL
    position = _hash(f"{arms[CANDIDATE].name}/{session_id}") / 2**64
    return CANDIDATE if position < CANARY.share else CONTROL


def main() -> None:
    """Reads the command line and runs one cycle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--line", default="suggestions")
    for name, field in Rewards.model_fields.items():
        parser.add_argument(f"--{name}", type=float, default=field.default, help="reward")
    options = vars(parser.parse_args())
    settings, name = load_settings(), options.pop("line")
    try:
        rewards = Rewards(**options)
    except ValidationError as error:
        (seen, *_) = error.errors()
        parser.error(f"--{seen['loc'][0]} is {seen['input']}: {seen['msg']}")
    line = SuggestionLine(open_ledger(settings), open_object_store(settings), name, time.time)
    print(line.run_cycle(rewards))


if __name__ == "__main__":
    main()
