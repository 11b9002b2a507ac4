"""The extension point for environments, which provide problems, their initial files and their verdicts.

A package names an `Environment` object through the entry point group `ostinato.environments`. A
recipe draws problems from it with `[environments.NAME]`.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, ConfigDict, Field

from ostinato.infra.platform.plugins import VERIFIERS, PluginGroup, verifiers_module
from ostinato.infra.sandbox.protocol import Sandbox
from ostinato.tasks.records import Problem, StageRecord

if TYPE_CHECKING:  # recipes import this module, but must not import an engine
    from ostinato.infra.agent.loop.attempt import Dialogue

ENVIRONMENTS = PluginGroup(
    "ostinato.environments",
    "environment",
    {"verifiers": "ostinato.tasks.grading.verifiers_environments:load_environment"},
    families=frozenset({"verifiers"}),
)
VERIFIERS_VERSIONS = SpecifierSet(">=0.3.1,<0.4")  # later versions have no `load_environment`
OpenBox = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Function that opens a fresh sandbox with the final files of an attempt, to run their code."""


class ProblemDraft(StageRecord):
    """One problem as an environment draws it."""

    prompt: str = Field(description="request to the agent")
    files: dict[str, str] = Field(
        default={}, description="path -> text of files over the environment's"
    )
    facts: dict[str, str] = Field(default={}, description="facts for the judge, never shown")


class Judgement(StageRecord):
    """Verdict of an environment on the final files of an attempt."""

    passed: bool
    detail: str = ""


class Environment(Protocol):
    """Source of problems that judges attempts itself. The agent works with this project's tools and sandbox."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Initial files of every problem, by path. At least one."""
        ...

    def draw(self, rng: random.Random) -> ProblemDraft:
        """A problem. Equal states of `rng` give equal problems."""
        ...

    async def judge(
        self, problem: Problem, files: Mapping[str, bytes], open_box: OpenBox
    ) -> Judgement:
        """Whether the files solve the problem. The files are untrusted, so run them in a box only."""
        ...


@runtime_checkable
class SolvedEnvironment(Environment, Protocol):
    """Environment that solves its own problems, so that they can be certified."""

    def solve(self, problem: Problem) -> Mapping[str, bytes]:
        """Files, by path, that solve a problem when they replace its own."""
        ...


@runtime_checkable
class DialogueEnvironment(Environment, Protocol):
    """Environment that holds the dialogue with the model itself, with its own turns and tools, and scores it."""

    def draw_held_out(self, rng: random.Random) -> ProblemDraft:
        """A problem for evaluation. Equal states of `rng` give equal problems."""
        ...

    def dialogue(self, problem: Problem) -> "Dialogue":
        """Function that holds the dialogue of an attempt at the problem, and scores it."""
        ...


def dialogue_of(problem: Problem) -> "Dialogue | None":
    """The dialogue of a problem whose environment holds it. None: the harness holds it."""
    if not problem.environment:
        return None
    environment = ENVIRONMENTS.load(problem.environment)
    return environment.dialogue(problem) if isinstance(environment, DialogueEnvironment) else None


def refuse_absent(names: Iterable[str]) -> None:
    """Raises ValueError for an environment that no installed package provides. Imports none of them."""
    ENVIRONMENTS.refuse_unknown(names)
    for name in names:
        if not name.startswith("verifiers"):
            continue
        found = version("verifiers") if find_spec("verifiers") is not None else None
        if found is None or found not in VERIFIERS_VERSIONS:
            raise ValueError(
                f"environment {name!r} needs the package verifiers {VERIFIERS_VERSIONS}, found "
                f"{found or 'none'}: pip install 'ostinato[verifiers]'"
            )
        module = verifiers_module(name)
        if not name.startswith(VERIFIERS) or find_spec(module) is None:
            raise ValueError(
                f"environment is {name!r}, but no module {module!r} is installed; wanted "
                f"{VERIFIERS}NAME of a package with `load_environment`"
            )


class EnvironmentConfig(BaseModel):
    """Number of problems drawn from one environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: int = Field(default=100, ge=0, description="problems for RL")
    held_out: int = Field(default=20, ge=0, description="problems for evaluation, not in train")
