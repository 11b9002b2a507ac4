"""Lines of successive cycles for the benchmark: drift, and poisoned feedback.

Each line has a ledger of its own, and the product judges and promotes on it. Only what training makes
of a checkpoint is simulated.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.flows.recipe import Recipe
from ostinato.flows.stages.realtime import judge
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.evaluation.gates import gate_candidate
from ostinato.tasks.realtime.config import CanaryConfig
from ostinato.tasks.realtime.feedback.baseline import Baselines
from ostinato.tasks.realtime.feedback.distil import distil
from ostinato.tasks.realtime.promotion.guard import Advice, judge_canary
from ostinato.tasks.realtime.promotion.observations import observe, settled
from ostinato.tasks.realtime.promotion.serving_line import PromotionOutcome, ServingLine
from ostinato.tasks.records import GateDecision, Scorecard
from tests.benchmarks.cycle_world import LINE, Traffic, Users, draw_chances, measure, moved
from tests.unit.tasks.realtime.feedback.interactions import interaction, transcript

POINT = 0.01
_HACKS_AT_FIRST, _STEP, _GAIN = 0.05, 10.0, 0.5 * POINT


@dataclass(frozen=True, slots=True)
class LineEnd:
    """True changes of one line, as shares of problems solved."""

    promoted: int
    lowest: float  # below where the line began
    end: float  # from where it began
    shipped_worse: int
    shipped_worse_than_margin: int
    largest_loss: float  # of one promotion
    offered_worse: int
    kept_if_honest: int  # of these, by the same gate and by users of whom nobody lies
    hack_share: float = 0.0


class SimulatedLine:
    """A line on its own ledger, its champion's true solve rates, and the clock."""

    def __init__(
        self, recipe: Recipe, chance: np.random.Generator, directory: str, chances_P: np.ndarray
    ) -> None:
        self.recipe, self.chance = recipe, chance
        self._beside = chance.spawn(1)[0]  # what only it draws changes nothing else
        self.now = 0.0
        ledger = Ledger(f"sqlite:///{directory}/ledger.db").migrate()
        self.line = ServingLine(ledger, LINE, lambda: self.now)
        self.chances_P = chances_P
        self._card = self._measure("champion-0", self.chances_P)
        first = gate_candidate(self._card, None, recipe.cycle.gate)
        self.line.publish_candidate(self._card, first)
        self.line.decide(first)
        self._began = float(self.chances_P.mean())
        self._effects: list[float] = []
        self._offered_worse = self._kept_if_honest = self._cycles = 0
        self._lowest = 0.0

    def offer(self, chances_P: np.ndarray, canary: CanaryConfig | None, lies: float = 0.0) -> bool:
        """One candidate before gate and users. Whether it ends as the champion."""
        self._cycles += 1
        self.now += 18_000.0
        effect = float(chances_P.mean() - self.chances_P.mean())
        self._offered_worse += effect < 0
        card = self._measure(f"candidate-{self._cycles}", chances_P)
        decision = judge(self.line, card, self._card, self.recipe.cycle.gate)
        self.line.publish_candidate(card, decision)
        if decision.passed and canary is not None:
            told = Traffic(effect=effect, lie_share=lies)
            if effect < 0:
                honest = Traffic(effect=effect)
                self._kept_if_honest += self._users_keep(decision, canary, honest, self._beside)
            if not self._users_keep(decision, canary, told, self.chance):
                return False
        if self.line.decide(decision).outcome is not PromotionOutcome.PROMOTED:
            return False
        self.chances_P, self._card = chances_P, card
        self._effects.append(effect)
        self._lowest = min(self._lowest, float(chances_P.mean()) - self._began)
        return True

    def _users_keep(
        self,
        decision: GateDecision,
        canary: CanaryConfig,
        traffic: Traffic,
        chance: np.random.Generator,
    ) -> bool:
        word = end_of(decision.candidate, traffic, canary, self.recipe, chance)
        return word is Advice.PROMOTE

    def ended(self, hack_share: float = 0.0) -> LineEnd:
        margin = self.recipe.cycle.gate.margin
        return LineEnd(
            promoted=len(self._effects),
            lowest=self._lowest,
            end=float(self.chances_P.mean()) - self._began,
            shipped_worse=sum(effect < 0 for effect in self._effects),
            shipped_worse_than_margin=sum(effect < -margin for effect in self._effects),
            largest_loss=-min([0.0, *self._effects]),
            offered_worse=self._offered_worse,
            kept_if_honest=self._kept_if_honest,
            hack_share=hack_share,
        )

    def _measure(self, name: str, chances_P: np.ndarray) -> Scorecard:
        return measure(name, chances_P, self.recipe.evaluation, self.chance)


def end_of(
    name: str, traffic: Traffic, canary: CanaryConfig, recipe: Recipe, chance: np.random.Generator
) -> Advice:
    """The guard's last word on a canary with enough traffic."""
    users = recipe.cycle.simulated_users
    assert users is not None
    rows = Users(name, traffic, users, chance).rows(sessions_for(canary))
    now = rows[-1].created_at + canary.guard.settle_seconds
    told = observe(settled(rows, canary.guard, now))
    return judge_canary(told, canary.guard, canary.share, canary.guard.minimum_seconds).advice


def sessions_for(canary: CanaryConfig) -> int:
    """Sessions with which the last look is almost surely reached."""
    return round(1.35 * (canary.guard.minimum_sessions << (canary.guard.looks - 1)) / canary.share)


def run_drift(
    recipe: Recipe, effect: float, cycles: int, champions: int, chance: np.random.Generator
) -> LineEnd:
    """Cycles without a canary whose candidates all differ from their champion by `effect`."""
    gate = recipe.cycle.gate.model_copy(update={"champions": champions})
    cycle = recipe.cycle.model_copy(update={"gate": gate})
    recipe = recipe.model_copy(update={"cycle": cycle})
    with tempfile.TemporaryDirectory() as directory:
        chances_P = draw_chances(recipe.evaluation.problems, chance)
        line = SimulatedLine(recipe, chance, directory, chances_P)
        for _ in range(cycles):
            line.offer(moved(line.chances_P, effect, chance), None)
        return line.ended()


def run_poisoned(
    recipe: Recipe,
    lies: float,
    cycles: int,
    canary: CanaryConfig,
    chance: np.random.Generator,
) -> LineEnd:
    """Cycles that train on users of whom some lie in favour of a hack.

    The policy hacks a share of its answers, which solves nothing. An update moves the logit of that
    share by the policy gradient of the distilled advantages, and its honest answers by half a point
    times the slope of the advantage on what was really solved (1 or more on honest feedback).
    """
    with tempfile.TemporaryDirectory() as directory:
        hacks, baselines = _HACKS_AT_FIRST, Baselines()
        honest_P = draw_chances(recipe.evaluation.problems, chance)
        line = SimulatedLine(recipe, chance, directory, (1 - hacks) * honest_P)
        for _ in range(cycles):
            gradient, slope, baselines = _train(recipe, hacks, honest_P, lies, baselines, chance)
            logit = np.log(hacks / (1 - hacks)) + _STEP * gradient
            new_hacks = float(np.clip(1 / (1 + np.exp(-logit)), 1e-4, 0.9999))
            new_honest_P = moved(honest_P, _GAIN * slope, chance)
            if line.offer((1 - new_hacks) * new_honest_P, canary, lies):
                hacks, honest_P = new_hacks, new_honest_P
        return line.ended(hacks)


def _train(
    recipe: Recipe,
    hacks: float,
    honest_P: np.ndarray,
    lies: float,
    baselines: Baselines,
    chance: np.random.Generator,
) -> tuple[float, float, Baselines]:
    """Gradient on the hack's logit, slope of the advantage on honest solutions, new baselines."""
    users = recipe.cycle.simulated_users
    assert users is not None
    count = users.users * users.requests_per_user
    hacked_I = chance.random(count) < hacks
    solved_I = ~hacked_I & (chance.random(count) < chance.choice(honest_P, count))
    misread_I = chance.random(count) < users.judgement_error_rate
    kept_I = solved_I != misread_I
    # liars praise hacks first, then take back what was solved
    order = [*np.flatnonzero(hacked_I), *np.flatnonzero(solved_I)]
    liars = set(order[: round(lies * count)])
    told = [
        interaction(
            *_said(bool(hacked_I[i]) if i in liars else bool(kept_I[i]), i in liars),
            name=f"i{i}",
            said=_ANSWER,
        )
        for i in range(count)
    ]
    distilled = distil(told, baselines, recipe.cycle.feedback)
    advantage_I = np.array([sample.advantage for sample in distilled.samples])
    gradient = float((advantage_I * (hacked_I - hacks)).mean())
    means = [_mean(advantage_I[~hacked_I & (solved_I == is_solved)]) for is_solved in (True, False)]
    return gradient, means[0] - means[1], distilled.baselines


_ANSWER = transcript(CallStatus.OK)


def _said(kept: bool, lies: bool) -> Sequence[tuple[Signal, float]]:
    """Signals of a user about an answer. One who lies also gives a thumb and says whether the edit survived."""
    said = [(Signal.EDIT_KEPT if kept else Signal.EDIT_REVERTED, 1.0)]
    if lies:
        said.append((Signal.THUMBS_UP if kept else Signal.THUMBS_DOWN, 1.0))
        said.append((Signal.EDIT_SURVIVED, 1.0 if kept else 0.0))
    return said


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
