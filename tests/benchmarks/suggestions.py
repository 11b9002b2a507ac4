"""Suggestions shown and accepted by a policy that learns when to show them, beside three controls and an oracle.

    python -m tests.benchmarks.suggestions [--seeds 10] [--rounds 6] [--quick]

`examples/suggestion_policy.py` decides and learns; only users are simulated. In each round every arm gets the same
suggestions, and a user accepts a suggestion in all arms or in none. The arms: always show; the best fixed threshold of
the model's own confidence, chosen on the suggestions that it is measured on; a placebo that learns the same way from
shuffled rewards; the learnt policy; the oracle, which knows the probability of acceptance. Figures are of the last round, the
intervals over seeds. A last run goes through ledger, gate, canary and guard.

Shapes: N suggestions, F features, K kinds.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.suggestion_policy import (
    Choice,
    Event,
    Policy,
    Rewards,
    SuggestionLine,
    arm_of,
    make_event,
    update,
)
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import FeedbackRow, InteractionRow
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.evaluation.statistics import mean_metric
from ostinato.tasks.realtime.config import BaselineConfig
from ostinato.tasks.realtime.feedback.baseline import Baselines
from ostinato.tasks.records import Metric

KINDS = tuple(f"kind-{index}" for index in range(8))
POPULATIONS = ("novices", "experts")
PER_SESSION = 10
ROUND_SECONDS = 7_200.0
REWARDS = Rewards()
ALWAYS, THRESHOLD, PLACEBO, LEARNT, ORACLE = "always", "threshold", "placebo", "learnt", "oracle"
_HABITS = np.array([-0.7, 0.0, 0.7])  # of single users, which no feature shows
_BINS = (0.0, 0.15, 0.2, 0.25, 0.3, 0.35, 1.0)  # edges, in probability of acceptance


@dataclass(frozen=True, slots=True)
class Suggestions:
    """Suggestions of one round, ten to a session, and what users would do with them."""

    kinds_N: np.ndarray
    populations_N: np.ndarray
    confidence_N: np.ndarray  # logit of the model's own
    acceptance_N: np.ndarray  # probability, given all that a policy can know
    is_good_N: np.ndarray  # the user accepts it if it is shown

    @property
    def features_NF(self) -> np.ndarray:
        """Each kind, its confidence, and the population."""
        kinds_NK = np.eye(len(KINDS))[self.kinds_N]
        population_N = 2.0 * self.populations_N[:, None] - 1
        return np.hstack([kinds_NK, kinds_NK * self.confidence_N[:, None], population_N])


class Users:
    """Users who accept some kinds of suggestions often and others rarely, and change between rounds."""

    def __init__(self, seed: int, drift: float = 0.1) -> None:
        chance = self._chance = np.random.default_rng([7, seed])
        count = len(KINDS)
        self.drift = drift
        self._liking_K = chance.permutation(np.linspace(-3.6, 0.4, count))
        self._usual_confidence_K = 0.35 * self._liking_K + chance.normal(0, 0.8, count)
        self._slope_K = chance.uniform(0.5, 2, count)
        self._share_K = chance.dirichlet(np.full(count, 6))

    def bring(self, sessions: int) -> Suggestions:
        """Suggestions of a round. Afterwards the users' taste drifts."""
        chance, number = self._chance, sessions * PER_SESSION
        kinds_N = chance.choice(len(KINDS), number, p=self._share_K)
        populations_N = np.repeat(chance.integers(2, size=sessions), PER_SESSION)
        unusual_N = chance.normal(0, 1, number)
        score_N = self._liking_K[kinds_N] + self._slope_K[kinds_N] * unusual_N + populations_N - 0.5
        acceptance_N = _logistic(score_N[:, None] + _HABITS).mean(1)
        self._liking_K = self._liking_K + chance.normal(0, self.drift, len(KINDS))
        return Suggestions(
            kinds_N=kinds_N,
            populations_N=populations_N,
            confidence_N=self._usual_confidence_K[kinds_N] + unusual_N,
            acceptance_N=acceptance_N,
            is_good_N=chance.random(number) < acceptance_N,
        )


def _logistic(score: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-score))


def first_policy() -> Policy:
    """Shows most suggestions, as a product does that begins."""
    return Policy(weights_F=(1.5,) * len(KINDS) + (0.0,) * (len(KINDS) + 1))


def events_of(
    seen: Suggestions, choices: Sequence[Choice], rewards: Rewards = REWARDS
) -> list[Event]:
    """Events as the ledger would give them."""
    events = []
    for index, choice in enumerate(choices):
        name = f"{index // PER_SESSION}/{index}"
        signal = Signal.EDIT_KEPT if seen.is_good_N[index] else Signal.EDIT_REVERTED
        said = FeedbackRow(
            feedback_id=name, interaction_id=name, signal=signal, value=1.0, created_at=1.0
        )
        row = InteractionRow(
            sequence=index,
            interaction_id=name,
            line="",
            tenant=POPULATIONS[seen.populations_N[index]],
            session_id=str(index // PER_SESSION),
            arm="control",
            checkpoint_id="",
            weight_version=0,
            problem_kind=choice.kind,
            consent=True,
            object_key="",
            created_at=0.0,
            feedback=(said,) if choice.shown else (),
        )
        events.append(make_event(row, choice, rewards))
    return events


class Learner:
    """A policy that is updated after each round. A placebo learns from rewards that are shuffled."""

    def __init__(self, seed: int, *, is_placebo: bool = False) -> None:
        self.policy, self.baselines, self.refused = first_policy(), Baselines(), 0
        self._is_placebo, self._round = is_placebo, 0
        self._chance = np.random.default_rng([8, seed])
        self._name = f"{seed}-{is_placebo}"

    def choose(self, seen: Suggestions) -> list[Choice]:
        kinds = [KINDS[kind] for kind in seen.kinds_N]
        return self.policy.choose(kinds, seen.features_NF, self._chance)

    def learn(self, seen: Suggestions, choices: Sequence[Choice]) -> None:
        """One cycle: the candidate serves if it passes the gate."""
        events = events_of(seen, choices)
        if self._is_placebo:
            order = self._chance.permutation(len(events))
            rewards = [events[index].reward for index in order]
            events = [
                event.model_copy(update={"reward": reward})
                for event, reward in zip(events, rewards, strict=True)
            ]
        name = f"{self._name}-{self._round}"
        candidate, decision = update(self.policy, events, self.baselines, name)
        self.baselines = self.baselines.absorb(events, BaselineConfig())
        self.policy = candidate if decision.passed else self.policy
        self.refused += not decision.passed
        self._round += 1


def best_threshold(seen: Suggestions) -> np.ndarray:
    """Shown suggestions under the threshold of confidence that earns most on them."""
    gains_N = seen.acceptance_N - REWARDS.threshold
    order = np.argsort(-seen.confidence_N)
    most = int(np.argmax(np.append(0.0, np.cumsum(gains_N[order]))))
    shown_N = np.zeros(len(order), dtype=bool)
    shown_N[order[:most]] = True
    return shown_N


def figures_of(seen: Suggestions, shown_N: np.ndarray) -> dict[str, float]:
    """What became of the suggestions that an arm showed."""
    gains_N = seen.acceptance_N - REWARDS.threshold  # the expected reward, with these rewards
    accepted_N = shown_N & seen.is_good_N
    return {
        "shown": float(shown_N.mean()),
        "accepted": float(accepted_N.mean()),
        "rate": float(accepted_N.sum() / shown_N.sum()),
        "reward": float((shown_N * gains_N).mean()),
    }


@dataclass(frozen=True, slots=True)
class SeedRun:
    """One seed."""

    rounds: list[dict[str, dict[str, float]]]  # by arm
    refused: dict[str, int]  # candidates, by arm
    show_by_acceptance: list[float]  # probability of showing, in the last round
    agreement: float  # with the oracle, where the acceptance is 5 points or more from the threshold


def run_seed(seed: int, rounds: int, sessions: int, drift: float = 0.1) -> SeedRun:
    """All arms on the same users."""
    users = Users(seed, drift)
    learners = {LEARNT: Learner(seed), PLACEBO: Learner(seed, is_placebo=True)}
    history: list[dict[str, dict[str, float]]] = []
    for number in range(rounds):
        seen = users.bring(sessions)
        is_worth_N = seen.acceptance_N > REWARDS.threshold
        shown = {
            ALWAYS: np.ones(len(is_worth_N), dtype=bool),
            THRESHOLD: best_threshold(seen),
            ORACLE: is_worth_N,
        }
        choices = {arm: learner.choose(seen) for arm, learner in learners.items()}
        shown |= {arm: np.array([one.shown for one in made]) for arm, made in choices.items()}
        history.append({arm: figures_of(seen, shown_N) for arm, shown_N in shown.items()})
        if number == rounds - 1:
            break
        for arm, learner in learners.items():
            learner.learn(seen, choices[arm])
    show_N = learners[LEARNT].policy.probabilities(seen.features_NF)
    places_N = np.digitize(seen.acceptance_N, _BINS) - 1
    is_clear_N = np.abs(seen.acceptance_N - REWARDS.threshold) >= 0.05
    return SeedRun(
        rounds=history,
        refused={arm: learner.refused for arm, learner in learners.items()},
        show_by_acceptance=[
            float(show_N[places_N == place].mean()) for place in range(len(_BINS) - 1)
        ],
        agreement=float(((show_N > 0.5) == is_worth_N)[is_clear_N].mean()),
    )


class Clock:
    """Simulated seconds since the epoch."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class LedgerRun:
    """Users, and a line on a ledger in a folder."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.clock, self.users = Clock(), Users(seed)
        self.ledger = Ledger(f"sqlite:///{folder}/ledger.db").migrate()
        objects = ObjectStore.from_url(f"file://{folder}/objects")
        self.line = SuggestionLine(self.ledger, objects, "suggestions", self.clock)
        self._chance, self._sessions = np.random.default_rng([9, seed]), 0

    def serve(self, sessions: int) -> dict[str, dict[str, float]]:
        """Sessions of a round, and what became of the suggestions by arm."""
        arms, seen = self.line.arms(), self.users.bring(sessions)
        features_NF = seen.features_NF
        shown: dict[str, list[tuple[int, bool]]] = {arm: [] for arm in arms}
        for first in range(0, sessions * PER_SESSION, PER_SESSION):
            places = range(first, first + PER_SESSION)
            name = f"session-{self._sessions}"
            arm = arm_of(name, arms)
            kinds = [KINDS[seen.kinds_N[place]] for place in places]
            choices = arms[arm].choose(kinds, features_NF[places], self._chance)
            tenant = POPULATIONS[seen.populations_N[first]]
            ids = self.line.record(name, tenant, arm, arms[arm], choices)
            for place, choice, interaction in zip(places, choices, ids, strict=True):
                shown[arm].append((place, choice.shown))
                if choice.shown:
                    self.judge(interaction, is_good=bool(seen.is_good_N[place]))
            self._sessions += 1
            self.clock.now += ROUND_SECONDS / sessions
        self.clock.now += 700.0  # until all choices are settled
        found = {}
        for arm, rows in shown.items():
            is_shown_N = np.zeros(len(seen.kinds_N), dtype=bool)
            is_shown_N[[place for place, is_shown in rows if is_shown]] = True
            figures = figures_of(seen, is_shown_N)
            found[arm] = {"shown": float(is_shown_N.sum() / len(rows)), "rate": figures["rate"]}
        return found

    def judge(self, interaction: str, *, is_good: bool) -> None:
        """Feedback of the user."""
        self.ledger.interactions.add_feedback(
            FeedbackRow(
                feedback_id=f"{interaction}/user",
                interaction_id=interaction,
                signal=Signal.EDIT_KEPT if is_good else Signal.EDIT_REVERTED,
                value=1.0,
                created_at=self.clock.now + 1.0,
            )
        )


def run_on_ledger(folder: Path, rounds: int, sessions: int) -> int:
    """Prints each round of a line that starts with the first policy. Returns the number of its champions."""
    run = LedgerRun(folder)
    run.line.start(first_policy())
    for number in range(rounds):
        arms = run.serve(sessions)
        told = ", ".join(
            f"{arm} shows {figures['shown']:.0%} and {figures['rate']:.0%} are accepted"
            for arm, figures in arms.items()
        )
        print(f"round {number}: {told}; cycle: {run.line.run_cycle(REWARDS)}", flush=True)
    return len(run.ledger.promotions.history("suggestions"))


Measure = Callable[[dict[str, dict[str, float]]], float]


def compare(runs: Sequence[SeedRun], measure: Measure) -> Metric:
    """Mean over seeds of a measure of the last round."""
    return mean_metric([measure(run.rounds[-1]) for run in runs], confidence=0.95)


def _relative(arm: str, beside: str, name: str) -> Measure:
    return lambda arms: arms[arm][name] / arms[beside][name] - 1


def _more(arm: str, beside: str) -> Measure:
    return lambda arms: arms[arm]["reward"] - arms[beside]["reward"]


def _regret(arm: str) -> Measure:
    """Share of the always-showing arm's regret."""

    def measure(arms: dict[str, dict[str, float]]) -> float:
        best = arms[ORACLE]["reward"]
        return (best - arms[arm]["reward"]) / (best - arms[ALWAYS]["reward"])

    return measure


def _shown(metric: Metric, scale: float = 100.0) -> str:
    low, high = scale * metric.low, scale * metric.high
    return f"{scale * metric.mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def report(runs: Sequence[SeedRun]) -> dict[str, Metric]:
    """Prints the tables and returns the comparisons."""
    print(f"{'arm':<10} {'shown %':>22} {'accepted / 100':>22} {'rate %':>22} {'regret %':>22}")
    for arm in (ALWAYS, THRESHOLD, PLACEBO, LEARNT, ORACLE):
        columns: list[Measure] = [
            lambda arms, arm=arm, name=name: arms[arm][name]
            for name in ("shown", "accepted", "rate")
        ]
        cells = [_shown(compare(runs, measure)) for measure in (*columns, _regret(arm))]
        print(f"{arm:<10} " + " ".join(f"{cell:>22}" for cell in cells))
    print("\nchange, paired by seed       shown %                rate %         reward / 100")
    found = {"learnt regret": compare(runs, _regret(LEARNT))}
    for arm, beside in (
        (LEARNT, ALWAYS),
        (LEARNT, PLACEBO),
        (LEARNT, THRESHOLD),
        (PLACEBO, ALWAYS),
    ):
        name = f"{arm} beside {beside}"
        found[f"{name}: shown"] = compare(runs, _relative(arm, beside, "shown"))
        found[f"{name}: rate"] = compare(runs, _relative(arm, beside, "rate"))
        found[f"{name}: reward"] = compare(runs, _more(arm, beside))
        cells = [_shown(found[f"{name}: {one}"]) for one in ("shown", "rate", "reward")]
        print(f"{name:<25} " + " ".join(f"{cell:>22}" for cell in cells))
    rounds = range(len(runs[0].rounds))
    for arm in (LEARNT, PLACEBO):
        regrets = [np.mean([_regret(arm)(run.rounds[number]) for run in runs]) for number in rounds]
        refused = sum(run.refused[arm] for run in runs)
        told = " ".join(f"{regret:.0%}" for regret in regrets)
        print(f"regret of {arm} by round: {told}; candidates refused by the gate: {refused}")
    return found


def main() -> None:
    """Reads the command line, prints tables and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sessions", type=int, default=400, help="per round, of ten suggestions")
    parser.add_argument(
        "--quick", action="store_true", help="3 seeds, 5 rounds, a short ledger run"
    )
    options = parser.parse_args()
    seeds, rounds = (3, 5) if options.quick else (options.seeds, options.rounds)
    runs = [run_seed(seed, rounds, options.sessions) for seed in range(seeds)]
    found = report(runs)
    by_acceptance = np.mean([run.show_by_acceptance for run in runs], axis=0).tolist()
    edges = [f"{low:.0%}-{high:.0%}" for low, high in itertools.pairwise(_BINS)]
    shows = dict(zip(edges, by_acceptance, strict=True))
    agreement = mean_metric([run.agreement for run in runs], confidence=0.95)
    told = ", ".join(f"{name}: {value:.0%}" for name, value in shows.items())
    print(f"probability of showing by probability of acceptance: {told}")
    print(f"decides as the oracle where 5 points from the threshold: {_shown(agreement)} %\n")
    with tempfile.TemporaryDirectory() as folder:
        champions = run_on_ledger(Path(folder), 2 if options.quick else 4, 200)
    met = (
        all(found[f"learnt beside {arm}: shown"].high < 0 for arm in (ALWAYS, PLACEBO))
        and all(found[f"learnt beside {arm}: rate"].low > 0 for arm in (ALWAYS, PLACEBO))
        and found["learnt beside threshold: reward"].low > 0
        and found["placebo beside always: reward"].low <= 0
        and by_acceptance[2] < 0.5 < by_acceptance[3]
    )
    figures = {
        name: [round(value, 4) for value in (metric.mean, metric.low, metric.high)]
        for name, metric in (found | {"agreement": agreement}).items()
    }
    figures |= {"show_probability": shows, "champions_on_ledger": champions, "seeds": seeds}
    targets = {
        "learnt beside always and placebo": "fewer shown, higher rate, intervals exclude 0",
        "learnt beside threshold": "more reward, interval excludes 0",
        "placebo beside always": "not more reward",
        "show_probability": "below 0.5 at 20-25 % acceptance, above at 25-30 %",
    }
    print(json.dumps({"name": "suggestions", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
