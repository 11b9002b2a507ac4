"""Forked groups: attempts that share an opening and are compared from where they part.

The first attempt, the trunk, runs to its end; after its first failing test run its box and its
context are copied (`BranchWatch`). The others of the group continue from that copy, and the trunk's
own continuation is one of the siblings. Advantage: reward less the siblings' mean, on tokens after
the branch. After Monte Carlo returns from intermediate states (VinePPO, Kazemnejad et al. 2024,
arXiv:2410.01679) and branching after tool results (ARPO, Dong et al. 2025, arXiv:2507.19849).

Why it is unbiased: the branch is a stopping time. Whether an attempt branches after a turn is decided
by that turn and its results, never by what follows, so given the state s there all siblings, the trunk
among them, are independent draws of the policy from s. With R their rewards, the sum over siblings of
(R_i - mean R) grad log p(continuation_i | s) has the mean (n - 1) grad V(s): the plain group's law, with
s in place of the prompt. The opening is not trained: it was sampled once, so its only baseline from this
group would be its own mean and its advantage zero. Groups that are not forked train it, so `forked_share`
stays below 1 unless openings are to stay as they are. A trunk that never branches would be trained for
what it did not do; the others then begin at the start, and it counts neither in their mean nor in the
loss (`Trajectory.is_context_only`).

A branch holds the files of /repo and the harness' memory; processes and /tmp start anew, as in a
snapshot of files. A group that was not complete when its process ended starts over.
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
    """Looks for the branch of one trunk while it runs."""

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
        """The branch. At the end of the attempt where nothing can continue from one."""
        turns = transcript.turns
        if self._found is None or len(turns) <= self._found.turns:
            return Branch(turns=len(turns))
        if any(turn.is_summary for turn in turns[: self._found.turns + 1]):
            return Branch(turns=len(turns))
        return self._found


def branch_of(request: AttemptRequest) -> Branch | None:
    """Where this attempt continues from. None: it begins at the start."""
    if request.trunk is None or request.trunk.is_context_only:
        return None
    return request.trunk.branch


def opening_of(request: AttemptRequest) -> Opening | None:
    """Turns that this attempt continues from."""
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
        """Attempts of the group of that number that start now."""
        if math.floor((number + 1) * self._share) == math.floor(number * self._share):
            return list(requests)
        trunk, *others = requests
        self._waiting[trunk.group_id] = others
        return [replace(trunk, is_trunk=True)]

    def continued(self, request: AttemptRequest, ended: Trajectory) -> list[AttemptRequest]:
        """Attempts that the end of this one lets start. Where a trunk was lost they begin at the start."""
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
