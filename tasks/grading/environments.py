"""The extension point for environments: problems, the files they start from, their judgement.

A package names an `Environment` object through the entry point group `ostinato.environments`; a
recipe draws problems from it with `[environments.NAME]`.
"""

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from ostinato.infra.platform.plugins import PluginGroup
from ostinato.infra.sandbox.protocol import Sandbox
from ostinato.tasks.records import Problem, StageRecord

ENVIRONMENTS = PluginGroup("ostinato.environments", "environment", {})
OpenBox = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Opens a fresh sandbox that holds the files an attempt left, for code that has to run."""


class ProblemDraft(StageRecord):
    """One problem as an environment draws it."""

    prompt: str = Field(description="request to the agent")
    files: dict[str, str] = Field(default={}, description="path -> text laid over the environment")
    facts: dict[str, str] = Field(default={}, description="facts for the judge, never shown")


class Judgement(StageRecord):
    """Verdict of an environment on what an attempt left."""

    passed: bool
    detail: str = ""


class Environment(Protocol):
    """Source of problems with its own judgement. The agent's tools and sandbox are the project's."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files by path that every problem starts from, at least one."""
        ...

    def draw(self, chance: random.Random) -> ProblemDraft:
        """A problem. Equal states of `chance` give equal problems."""
        ...

    async def judge(
        self, problem: Problem, files: Mapping[str, bytes], open_box: OpenBox
    ) -> Judgement:
        """Whether the files solve the problem. They are untrusted: run them in a box only."""
        ...


@runtime_checkable
class SolvedEnvironment(Environment, Protocol):
    """Environment that solves its own problems, so that they can be certified."""

    def solve(self, problem: Problem) -> Mapping[str, bytes]:
        """Files by path that solve a problem when they are laid over its own."""
        ...


class EnvironmentConfig(BaseModel):
    """Number of problems drawn from one environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: int = Field(default=100, ge=0, description="problems for RL")
    held_out: int = Field(default=20, ge=0, description="problems for evaluation, none of train's")
