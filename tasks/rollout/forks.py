"""Forked groups: attempts that share an opening and are compared from the point where they branch.

The first attempt, the trunk, runs to its end. After its first failing test run its box and its
context are copied (`BranchWatch`). The other attempts of the group continue from that copy, and the
trunk's own continuation is one of the siblings. The advantage on tokens after the branch is the reward
minus the siblings' mean. The gradient is unbiased: whether an attempt branches depends on nothing after
the branch, so all siblings are independent samples of the policy from there (VinePPO, arXiv:2410.01679;
ARPO, arXiv:2507.19849).

The opening was sampled once, so it has no baseline and is not trained: `forked_share` should stay below 1
unless openings need no training. If the trunk never branches, the other attempts begin at the start. The
trunk is then conditioned on not branching, so it counts neither in their mean nor in the loss
(`Trajectory.is_context_only`).

A branch holds the files of /repo and the memory of the harness. Processes and /tmp are not copied. A
group that was not complete when its process ended starts over.
"""

import base64
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.tools.names import RUN_TERMINAL
from ostinato.infra.agent.tools.testing import did_tests_pass
from ostinato.infra.agent.transcript import CallStatus, Opening, Transcript, TurnRecord
from ostinato.tasks.records import Branch, Trajectory
from ostinato.tasks.rollout.records import AttemptRequest


class BranchWatch:
    """Detects and records the branch of one trunk while it runs."""

    def __init__(self, environment: AgentEnvironment) -> None:
        self._environment = environment
        self._turns = 0
        self._found: Branch | None = None

    async def on_turn(self, turn: TurnRecord) -> None:
        """Copies box and memory after the first failing test run."""
        self._turns += 1
        if self._found is not None or turn.is_summary or not _fails_tests(turn):
            return
        changes = await self._environment.sandbox.diff()
        self._found = Branch(
            turns=self._turns,
            files={
                path: None if data is None else base64.b64encode(data).decode()
                for path, data in changes.items()
            },
            state=deepcopy(self._environment.state),
        )

    def branch(self, transcript: Transcript) -> Branch:
        """The branch of the trunk. At the end of the attempt if no other attempt can continue from it."""
        turns = transcript.turns
        if self._found is None or len(turns) <= self._found.turns:
            return Branch(turns=len(turns))
        if any(turn.is_summary for turn in turns[: self._found.turns + 1]):
            return Branch(turns=len(turns))
        return self._found


def branch_of(request: AttemptRequest) -> Branch | None:
    """The branch from which this attempt continues. None: it begins at the start."""
    if request.trunk is None or request.trunk.is_context_only:
        return None
    return request.trunk.branch


def opening_of(request: AttemptRequest) -> Opening | None:
    """Turns before the branch from which this attempt continues. None: it begins at the start."""
    branch = branch_of(request)
    if branch is None or request.trunk is None:
        return None
    return request.trunk.transcript.opening(branch.turns)


class ForkedGroups:
    """Attempts of forked groups that wait for their trunk."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._waiting: dict[str, list[AttemptRequest]] = {}

    def begin(self, number: int, requests: Sequence[AttemptRequest]) -> list[AttemptRequest]:
        """Attempts that start now, from those of the group with this number."""
        if math.floor((number + 1) * self._share) == math.floor(number * self._share):
            return list(requests)
        trunk, *others = requests
        self._waiting[trunk.group_id] = others
        return [replace(trunk, is_trunk=True)]

    def continued(self, request: AttemptRequest, ended: Trajectory) -> list[AttemptRequest]:
        """Attempts that may start after this one ended. If a trunk was lost, they begin at the start."""
        if not request.is_trunk:
            return []
        others = self._waiting.pop(request.group_id)
        if ended.branch is None:
            return others
        return [replace(other, trunk=ended) for other in others]


def _fails_tests(turn: TurnRecord) -> bool:
    return any(
        call.tool == RUN_TERMINAL
        and call.status is CallStatus.OK
        and did_tests_pass(call.arguments.get("command", ""), result) is False
        for call, result in zip(turn.calls, turn.results, strict=True)
    )
