"""Groups of users who behaved alike before a canary. The guard compares arms within them, which narrows its intervals.

This is CUPED (Deng et al., WSDM 2013, section 3) with groups as the covariate. Groups are made once, from the
interactions before the canary, so nothing that its users or its candidate do afterwards changes them. Decision 0026 has
the reasons.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from ostinato.tasks.realtime.promotion.observations import MEDIANS, SHARES, ArmObservation
from ostinato.tasks.records import StageRecord

_GROUPS = 4  # of users with earlier values, of equally many earlier sessions
_MOST_USERS = 2_000  # users with the most earlier sessions; the others count as unknown
# sessions at the mean of all users that each user's mean includes, since a mean of few sessions says little
_PRIOR_SESSIONS = 2.0


class UserGroups(StageRecord):
    """Group of each known user for each measure, from 1. Other users are in group 0."""

    measures: tuple[str, ...] = ()
    users: dict[str, tuple[int, ...]] = Field(
        default={}, description="groups of each user, parallel to measures"
    )

    def of(self, measure: str) -> dict[str, int]:
        """Group of each known user for one measure."""
        if measure not in self.measures:
            return {}
        place = self.measures.index(measure)
        return {user: groups[place] for user, groups in self.users.items()}


def group_users(sessions: Sequence[ArmObservation]) -> UserGroups:
    """Groups by the mean of each measure in the sessions before a canary. Numbers count by their logarithm."""
    fields = {name: field for name, (field, _) in SHARES.items()} | {name: name for name in MEDIANS}
    known = Counter(one.user for one in sessions).most_common(_MOST_USERS)
    columns = []
    for field in fields.values():
        found = [
            (one.user, value) for one in sessions if (value := getattr(one, field)) is not None
        ]
        columns.append(_group_by_mean(found))
    return UserGroups(
        measures=tuple(fields),
        users={user: tuple(column.get(user, 0) for column in columns) for user, _ in known},
    )


def _group_by_mean(values: Sequence[tuple[str, float]]) -> dict[str, int]:
    """Group of each user: the quarter of all sessions into which the user's mean falls."""
    if not values:
        return {}
    of_user: defaultdict[str, list[float]] = defaultdict(list)
    for user, value in values:
        of_user[user].append(value)
    counts_U = np.array([len(found) for found in of_user.values()])
    sums_U = np.array([np.log1p(found).sum() for found in of_user.values()])
    prior = _PRIOR_SESSIONS * sums_U.sum() / counts_U.sum()
    means_U = (sums_U + prior) / (counts_U + _PRIOR_SESSIONS)
    edges = np.quantile(np.repeat(means_U, counts_U), np.arange(1, _GROUPS) / _GROUPS)
    return dict(zip(of_user, (1 + np.searchsorted(edges, means_U)).tolist(), strict=True))
