"""Canaries of users who differ, for the error rates of the guard: all eight measures as arrays.

A user's rate of each share is drawn from a beta distribution and a user's latency and tokens from a log-normal one, so
that sessions of one user are correlated by `alike`. Effects reverse the sessions of the candidate at random, by as much
as the mean of all users shall change. Users have sessions before the canary, by which the product groups them.

Shapes: S sessions, U users.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ostinato.tasks.realtime.promotion.arm_measures import ArmValues
from ostinato.tasks.realtime.promotion.observations import (
    CANDIDATE,
    CONTROL,
    MEDIANS,
    SHARES,
    ArmObservation,
)
from ostinato.tasks.realtime.promotion.user_groups import UserGroups, group_users

RATES = {
    "edit_kept": 0.6,
    "edit_judged": 0.7,
    "edit_survived_10_minutes": 0.8,
    "edit_survived_60_minutes": 0.7,
    "dissatisfied": 0.2,
    "abandoned": 0.1,
}
TYPICAL = {"latency_seconds": 5.0, "generated_tokens": 400.0}
SPREAD = 0.4  # deviation of the logarithm of latency and tokens
REPORTS = 0.5  # share of sessions whose client reports that an edit survived
CORRELATED = 0.57  # `alike` with which five earlier sessions and a later one correlate by 0.7


@dataclass(frozen=True, slots=True)
class Population:
    """Habits of the users of a canary."""

    alike: float = CORRELATED  # correlation of two sessions of one user, in each measure
    users: int = 200
    known: float = 0.8  # share of users with earlier sessions
    earlier_sessions: int = 5  # of each known user
    worse: dict[str, float] = field(default_factory=dict)  # measure: points, or factor of a median
    share_asked: float = 0.2
    share_dealt: float = 0.2
    lies: float = 0.0  # share of sessions with false feedback in favour of `lies_for`
    lies_for: str = CANDIDATE
    false_past: float = 0.0  # share of known users whose earlier feedback was the contrary
    steering: float = 0.0  # share of users who take to the candidate what they once reverted
    late: float = 0.0  # share of sessions that are judged 200 sessions later


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions in order."""

    users_S: np.ndarray
    of_candidate_S: np.ndarray
    values: dict[str, np.ndarray]  # by measure; not a number: no value

    def of_arms(self, measure: str, groups: UserGroups) -> list[ArmValues]:
        """Values of one measure by arm: control, candidate."""
        group_of = groups.of(measure)
        found = []
        for arm_S in (~self.of_candidate_S, self.of_candidate_S):
            used_S = arm_S & ~np.isnan(self.values[measure])
            users = self.users_S[used_S].tolist()
            groups_S = np.array([group_of.get(str(user), 0) for user in users], dtype=int)
            found.append(ArmValues(self.values[measure][used_S], groups_S))
        return found

    def prefix(self, smaller_arm: int) -> "Sessions":
        """The first sessions, until both arms have so many."""
        counts = [np.cumsum(arm_S) for arm_S in (self.of_candidate_S, ~self.of_candidate_S)]
        end = 1 + max(int(np.searchsorted(count_S, smaller_arm)) for count_S in counts)
        return Sessions(
            self.users_S[:end],
            self.of_candidate_S[:end],
            {name: values_S[:end] for name, values_S in self.values.items()},
        )

    def observations(self) -> list[ArmObservation]:
        """The sessions as the guard gets them."""
        columns = {
            SHARES[name][0]: _optional(values_S)
            for name, values_S in self.values.items()
            if name in SHARES and name != "edit_judged"
        }
        columns |= {name: self.values[name].tolist() for name in MEDIANS}
        arms = np.where(self.of_candidate_S, CANDIDATE, CONTROL).tolist()
        users = self.users_S.tolist()
        return [
            ArmObservation(
                arm=arms[index],
                session_id=str(index),
                interaction_id=str(index),
                user=str(users[index]),
                **dict(zip(columns, row, strict=True)),
            )
            for index, row in enumerate(zip(*columns.values(), strict=True))
        ]


def _optional(values_S: np.ndarray) -> list[bool | None]:
    return [None if value != value else bool(value) for value in values_S.tolist()]


class World:
    """Users, their earlier sessions, and a canary."""

    def __init__(self, population: Population, chance: np.random.Generator) -> None:
        self.population, self._chance = population, chance
        num_users, alike = population.users, max(population.alike, 1e-6)
        strength = (1 - alike) / alike
        self._rates = {
            name: chance.beta(rate * strength, (1 - rate) * strength, num_users)
            for name, rate in RATES.items()
        }
        self._logs = {
            name: np.log(typical) + SPREAD * np.sqrt(alike) * chance.standard_normal(num_users)
            for name, typical in TYPICAL.items()
        }
        known_U = np.flatnonzero(chance.random(num_users) < population.known)
        earlier_S = np.repeat(known_U, population.earlier_sessions)
        earlier = self._draw(earlier_S, np.zeros(len(earlier_S), dtype=bool), {})
        liars_U = chance.random(num_users) < population.false_past
        for name in RATES:
            values_S = earlier.values[name]
            values_S[liars_U[earlier_S]] = 1 - values_S[liars_U[earlier_S]]
        self.groups = group_users(earlier.observations())

    def sessions(self, count: int) -> Sessions:
        """So many sessions of a canary."""
        population, chance = self.population, self._chance
        users_S = chance.integers(population.users, size=count)
        of_candidate_S = chance.random(count) < population.share_dealt
        if population.steering:
            kept = self.groups.of("edit_kept")
            steers_U = chance.random(population.users) < population.steering
            group_S = np.array([kept.get(str(user), 0) for user in users_S])
            of_candidate_S[steers_U[users_S] & (group_S == 1)] = True
            of_candidate_S[steers_U[users_S] & (group_S == 4)] = False
        return self._draw(users_S, of_candidate_S, population.worse)

    def observations(self, count: int) -> list[ArmObservation]:
        """The sessions of a canary as observations, with feedback that comes late."""
        return list(self._in_order(self.sessions(count).observations()))

    def _in_order(self, seen: list[ArmObservation]) -> Iterator[ArmObservation]:
        late_S = self._chance.random(len(seen)) < self.population.late
        for index, one in enumerate(seen):
            yield one.model_copy(update={"kept": None}) if late_S[index] else one
            if index >= 200 and late_S[index - 200]:
                yield seen[index - 200]

    def _draw(
        self, users_S: np.ndarray, of_candidate_S: np.ndarray, worse: dict[str, float]
    ) -> Sessions:
        chance, count = self._chance, len(users_S)
        values: dict[str, np.ndarray] = {}
        lies_S = chance.random(count) < self.population.lies
        praises_S = of_candidate_S == (self.population.lies_for == CANDIDATE)
        for name, (_, bad) in SHARES.items():
            rate, better = RATES[name], float(bad == "less")
            values_S = (chance.random(count) < self._rates[name][users_S]).astype(float)
            flips = worse.get(name, 0.0) / (rate if better else 1 - rate)
            values_S[of_candidate_S & (chance.random(count) < flips)] = 1 - better
            values_S[lies_S] = np.where(praises_S[lies_S], better, 1 - better)
            values[name] = values_S
        values["edit_judged"][lies_S] = 1.0
        values["edit_kept"][values["edit_judged"] == 0] = np.nan
        for name in ("edit_survived_10_minutes", "edit_survived_60_minutes"):
            values[name][chance.random(count) >= REPORTS] = np.nan
        for name, logs_U in self._logs.items():
            noise_S = SPREAD * np.sqrt(1 - self.population.alike) * chance.standard_normal(count)
            factor_S = np.where(of_candidate_S, worse.get(name, 1.0), 1.0)
            values[name] = np.exp(logs_U[users_S] + noise_S) * factor_S
        return Sessions(users_S, of_candidate_S, values)
