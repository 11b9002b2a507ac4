"""A problem set as an environment of verifiers: its loop and model, our tools, boxes and grader.

The package that `ostinato problems export --format verifiers` writes opens this environment. A
rollout's box lives from `setup_state` to the clean-up, which judges the files in it. The reward is 1
for a pass. No module of a run imports this one, because it imports verifiers.
"""

import importlib
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.infra.agent.config import HarnessConfig, PromptFacts
from ostinato.infra.agent.dialects.dialect import offered_tools
from ostinato.infra.agent.dialects.full.calls import call_from_json
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.extensions import FULL
from ostinato.infra.agent.loop.execute import execute_calls
from ostinato.infra.agent.loop.prompts import write_first_message, write_system_prompt
from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.agent.tools.definition import tool_schemas
from ostinato.infra.agent.transcript import EndReason, Transcript, TurnRecord
from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.protocol import Sandbox
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.problems.published import facts_of, load_problems, load_repositories
from ostinato.tasks.records import Problem, Split
from ostinato.tasks.rollout.sandboxes import Sandboxes

vf: Any = importlib.import_module("verifiers")

MAX_TURNS = 30
BOXES = 16  # most rollouts at a time


@dataclass(slots=True)
class _Attempt:
    """One rollout: its problem, its box and the turns so far."""

    problem: Problem
    box: AsyncExitStack
    sandbox: Sandbox
    server: TestServer
    environment: AgentEnvironment
    turns: list[TurnRecord] = field(default_factory=list)


def open_environment(directory: Path, *, max_turns: int = MAX_TURNS, **harness: Any) -> Any:
    """The environment of a problem set. `harness`: fields of HarnessConfig. Its data set holds the problems of split
    train, its evaluation data set the others.
    """
    config = HarnessConfig(**{"dialect": FULL, **harness})
    repositories = load_repositories(directory)
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for problem in load_problems(directory):
        broken = problem.break_files(repositories[problem.repository].files)
        facts = facts_of(problem, broken, config)
        rows[problem.split is Split.TRAIN].append(_row(problem, facts, config))
    data: Any = importlib.import_module("datasets").Dataset
    return RepairEnvironment(
        directory,
        config,
        dataset=data.from_list(rows[True] or rows[False]),
        eval_dataset=data.from_list(rows[False] or rows[True]),
        max_turns=max_turns,
    )


def _row(problem: Problem, facts: PromptFacts, config: HarnessConfig) -> dict[str, Any]:
    tools = offered_tools(config, config.policy).values()
    system = write_system_prompt(tools, config, config.policy, facts, states_tools=True)
    user = write_first_message(problem.prompt, facts, config)
    return {
        "prompt": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "answer": "",
        "info": {"problem_id": problem.problem_id},
    }


class RepairEnvironment(vf.ToolEnv):
    """Environment of verifiers in which a model repairs repositories with our tools."""

    def __init__(self, directory: Path, config: HarnessConfig, **settings: Any) -> None:
        super().__init__(tools=[], rubric=vf.Rubric(funcs=[passed]), **settings)
        self._config, self._directory = config, directory
        self._problems = {each.problem_id: each for each in load_problems(directory)}
        self._tools = offered_tools(config, config.policy)
        self.tool_defs = [
            vf.Tool(**schema["function"]) for schema in tool_schemas(self._tools.values())
        ]
        self._grade = make_grader(GradingConfig())
        self._search = SearchService(None)
        self._sandboxes: Sandboxes | None = None
        self._attempts: dict[str, _Attempt] = {}

    async def setup_state(self, state: Any) -> Any:
        """Leases a box with the broken files for the rollout."""
        if self._sandboxes is None:  # boxes belong to the running event loop
            repositories = load_repositories(self._directory).values()
            self._sandboxes = Sandboxes(repositories, concurrent_trajectories=BOXES)
        problem = self._problems[state["info"]["problem_id"]]
        boxes = self._sandboxes.of(problem)
        broken = problem.break_files(boxes.repository.files)
        box = AsyncExitStack()
        try:
            sandbox = await box.enter_async_context(self._sandboxes.leased(boxes, broken))
        except SandboxError as error:
            raise vf.SandboxError(str(error)) from error
        environment = self._sandboxes.workplace(
            problem, sandbox, broken, self._config, self._search
        )
        self._attempts[state["trajectory_id"]] = _Attempt(
            problem, box, sandbox, boxes.test_server, environment
        )
        return state

    async def env_response(self, messages: Any, state: Any, **others: Any) -> Any:
        """Results of the tool calls in the last message."""
        attempt = self._attempts[state["trajectory_id"]]
        message = messages[-1]
        calls = [
            call_from_json(each.name, each.arguments, self._tools, each.id)
            for each in message.tool_calls
        ]
        try:
            results = await execute_calls(
                calls, attempt.environment, self._config, turn=len(attempt.turns) + 1
            )
        except SandboxError as error:
            raise vf.SandboxError(str(error)) from error
        texts = tuple(result.text for result in results)
        records = tuple(result.record for result in results)
        turn = TurnRecord(
            generated_tokens=0, text=str(message.content or ""), calls=records, results=texts
        )
        attempt.turns.append(turn)
        return [
            vf.ToolMessage(tool_call_id=call.id, content=text)
            for call, text in zip(message.tool_calls, texts, strict=True)
        ]

    @vf.cleanup
    async def judge_files(self, state: Any) -> None:
        """Ends the rollout's box and judges the files in it. This runs before the rubric."""
        attempt = self._attempts.pop(state["trajectory_id"], None)
        if attempt is None:
            return
        async with attempt.box:
            changes = await attempt.sandbox.diff()
        transcript = Transcript(
            segments=(),
            turns=tuple(attempt.turns),
            end_reason=EndReason.FINISHED,
            final_message="",
            wall_seconds=0.0,
        )
        verdict, reward = await self._grade(attempt.problem, changes, transcript, attempt.server)
        state["verdict"] = verdict.model_dump(mode="json")
        state["terms"] = dict(reward.terms)

    @vf.teardown
    async def close(self) -> None:
        """Ends all boxes."""
        if self._sandboxes is not None:
            await self._sandboxes.close()


async def passed(state: Any) -> float:
    """1 if the required tests pass on the final files and the grader does not void the result, else 0."""
    return float(bool(state.get("verdict")) and state["verdict"]["passed"])
