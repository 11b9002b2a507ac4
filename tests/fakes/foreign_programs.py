"""Programs that run in boxes in the place of an agent, and a worker whose attempts they make."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.extensions import COMMAND
from ostinato.infra.agent.harnesses import HarnessCommand
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.serving.attempts.program import ProgramDialogue
from ostinato.models.rendering import Renderer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.records import Problem, Trajectory
from ostinato.tasks.rollout.config import BOX_LIMITS
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import RolloutWorker
from tests.fakes.answering_model import AnsweringModel

CLIENT = """
import json, os, socket, subprocess, sys, threading, time, urllib.error, urllib.request

PROMPT, URL, KEY = sys.argv[1], os.environ["URL"], os.environ["KEY"]


def post(path, body, seconds=60.0):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chat(messages, **fields):
    body = {"model": "ostinato", "messages": messages, **fields}
    status, answer = post("/v1/chat/completions", body)
    if status != 200:
        raise SystemExit(f"{status} {answer}")
    return answer["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}

"""
"""A client of chat completions out of the standard library, to which a test adds what the program does."""

LOOP = """
messages = [user(PROMPT)]
for _ in range(6):
    said = chat(messages)
    messages.append(said)
    if "```" not in said["content"]:
        break
    command = said["content"].split("```")[1]
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    messages.append(user(done.stdout + done.stderr + f"code {done.returncode}"))
print("done:", messages[-1]["content"])
"""
"""The simplest agent: a command in backticks, until there is none."""


def python_program(source: str, **fields: Any) -> HarnessCommand:
    """A program of the client above and `source`."""
    return HarnessCommand(
        command="python3 /tmp/program.py {prompt}",
        environment={"URL": "{url}", "KEY": "{key}"},
        files={"/tmp/program.py": CLIENT + source},
        **fields,
    )


@dataclass
class ForeignRollouts:
    """A worker over real boxes whose attempts a program makes, behind a scripted model."""

    worker: RolloutWorker
    model: AnsweringModel
    problem: Problem
    number: int = 0

    async def attempt(self, seed: int = 1) -> Trajectory:
        self.number += 1
        name = f"run.g0.t{self.number}"
        return await self.worker.attempt(
            AttemptRequest(name, "run.g0", self.problem, self.number, 0, seed)
        )


def open_rollouts(
    program: HarnessCommand | str,
    answer: Callable[[str], str],
    renderer: Renderer,
    repository: PreparedRepository,
    problem: Problem,
    *,
    attempts_at_once: int = 4,
    **limits: Any,
) -> ForeignRollouts:
    """`program`: a command, or the name of a harness that is shipped."""
    named = {"program": program} if isinstance(program, str) else {"command": program}
    harness = HarnessConfig(
        **{"program": COMMAND, "context_tokens": 6000, "max_generated_tokens": 3000}
        | named
        | limits
    )
    model = AnsweringModel(renderer, answer)
    dialogue = ProgramDialogue(model, renderer, harness)
    sandboxes = Sandboxes(
        [repository],
        concurrent_trajectories=attempts_at_once,
        limits=dialogue.limits(BOX_LIMITS),
        mounts=dialogue.mounts,
    )
    worker = RolloutWorker(
        converse=dialogue,
        harness=harness,
        sandboxes=sandboxes,
        grade=make_grader(GradingConfig()),
        clock=time.monotonic,
        close_dialogue=dialogue.close,
    )
    return ForeignRollouts(worker, model, problem)
