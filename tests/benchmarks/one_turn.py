"""nano's problems reduced to one turn, for trainers that know no tools.

An attempt of nano begins with a test run and a look at the function that the user names, then comes the edit. Here
that first turn is given: it was run in a box once, its tokens with their results are the prompt, and nothing of it
counts or is trained. The answer is one turn, judged where it ends, with whatever calls it holds. Answers that
somebody else sampled are judged by the same harness, boxes and grader as those of our engine.
"""

import asyncio
import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ostinato.flows.recipe import Recipe, load_recipe
from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.transcript import Segment, Transcript
from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.platform.record import Record
from ostinato.models.decode.protocol import GenerateRequest, Generation, StopReason
from ostinato.models.rendering import Renderer, load_renderer
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.records import Problem, Split, Trajectory
from ostinato.tasks.rollout.config import CurriculumConfig, WorkerSetup
from ostinato.tasks.rollout.curriculum import Curriculum
from ostinato.tasks.rollout.graded_worker import build_worker
from ostinato.tasks.rollout.payload import trajectory_from_bytes, trajectory_to_bytes
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.slots import INFRASTRUCTURE_OUTCOMES
from ostinato.tasks.rollout.worker import Converse, RolloutWorker

FIRST_TURN = "<run_terminal>pytest</run_terminal><read_file>{place}</read_file>"
LAST_TURN = "Done."  # ends the attempt that the first turn is taken from
TRIES = 4


class Sizes(Record):
    """How much is done, alike by all trainers."""

    steps: int
    groups_per_step: int = 16
    group_size: int = 8
    visits: int = 1
    """groups of each problem; all problems come in their order, so often"""
    completion_tokens: int = 96
    """sampled tokens of an attempt, at most"""
    boxes: int = 64
    """attempts that are judged at a time"""

    @property
    def problems(self) -> int:
        """How many are drawn. ValueError where they do not make whole steps."""
        steps, rest = divmod(self.steps, self.visits)
        if rest or not steps:
            raise ValueError(f"steps is {self.steps}, wanted a multiple of visits, {self.visits}")
        return steps * self.groups_per_step


class Passes(Curriculum):
    """All problems in their order, several times."""

    def __init__(self, problems: Sequence[Problem], sizes: Sizes) -> None:
        super().__init__(problems, CurriculumConfig(), group_size=sizes.group_size, seed=0)
        self._in_order, self._visits = list(problems), sizes.visits

    @property
    def is_exhausted(self) -> bool:
        """Whether the last one was drawn."""
        return self.draws >= len(self._in_order) * self._visits

    def draw(self, in_flight: Collection[str]) -> Problem:
        """The next problem."""
        self.draws += 1
        return self._in_order[(self.draws - 1) % len(self._in_order)]


class GivenAnswers:
    """A model that answers what it was given, by attempt."""

    def __init__(self, renderer: Renderer) -> None:
        self._stop_token_ids = renderer.stop_token_ids
        self._answers: dict[str, deque[tuple[int, ...]]] = {}

    def give(self, trajectory_id: str, answers: Sequence[Sequence[int]]) -> None:
        """Takes the tokens of each answer of an attempt, with the token that ends it if one does."""
        self._answers[trajectory_id] = deque(tuple(answer) for answer in answers)

    async def generate(self, request: GenerateRequest) -> Generation:
        """The attempt's next answer."""
        token_ids = self._answers[request.session_id].popleft()
        if len(token_ids) > request.max_new_tokens:
            raise ValueError(
                f"{request.request_id}: an answer of {len(token_ids)} tokens, wanted at most "
                f"{request.max_new_tokens}"
            )
        is_whole = token_ids[-1] in self._stop_token_ids
        return Generation(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs_T=np.zeros(len(token_ids), dtype=np.float32),
            weight_versions_T=np.zeros(len(token_ids), dtype=np.int64),
            routed_experts=np.zeros((0, 0, 0), dtype=np.int16),
            route_offset=0,
            stop_reason=StopReason.STOP_TOKEN if is_whole else StopReason.LENGTH,
        )

    async def end_session(self, session_id: str) -> None:
        """Forgets what is left of the attempt."""
        self._answers.pop(session_id, None)


class OneTurn:
    """Problems of one seed, in the order in which all trainers take them, each with its first turn."""

    def __init__(self, home: Path, work: Path, sizes: Sizes, seed: int) -> None:
        """`home`: where a demo has made problems and the checkpoint from which RL begins. Nothing is written there."""
        self.sizes, self.seed = sizes, seed
        self.checkpoint = _newest(home, "drafted", "checkpoint.json")
        self.folder = work / self.checkpoint.name  # another start has other tokens and problems
        self._problems = _newest(home, "problems", "problems.jsonl")
        self.recipe: Recipe = load_recipe("nano", seed=seed)
        self.renderer = load_renderer(self.checkpoint)
        self.harness = self.recipe.harness.model_copy(
            update={"max_turns": 2, "max_generated_tokens": sizes.completion_tokens}
        )
        self.trunks: dict[str, Trajectory] = {}  # by problem
        self.problems: list[Problem] = []

    async def prepare(self) -> None:
        """Draws problems and takes their first turn, once for all trainers."""
        wanted = self.sizes.problems
        waiting = load_problems(self._problems, Split.TRAIN)
        random.Random(f"one turn:{self.seed}").shuffle(waiting)
        answers = GivenAnswers(self.renderer)
        harness = self.recipe.harness.model_copy(update={"max_turns": 2})
        worker = self._open_worker(partial(run_agent, answers, self.renderer), harness)
        chosen: list[Problem] = []
        try:
            while len(chosen) < wanted:
                taken, waiting = waiting[: wanted - len(chosen)], waiting[wanted - len(chosen) :]
                if not taken:
                    raise ValueError(f"{len(chosen)} problems have a first turn, wanted {wanted}")
                slots = asyncio.Semaphore(self.sizes.boxes)
                trunks = await asyncio.gather(
                    *(self._first_turn(problem, worker, answers, slots) for problem in taken)
                )
                for problem, trunk in zip(taken, trunks, strict=True):
                    if trunk is not None:
                        self.trunks[problem.problem_id] = trunk
                        chosen.append(problem)
        finally:
            await worker.close()
        self.problems = chosen

    def prompt(self, problem: Problem) -> list[int]:
        """Tokens up to the header of the answer."""
        return self.trunks[problem.problem_id].transcript.segments[0].token_ids_T.tolist()

    def open_worker(self, converse: Converse) -> RolloutWorker:
        """Boxes and grading for attempts of one turn."""
        return self._open_worker(converse, self.harness)

    def begun(self, request: AttemptRequest) -> AttemptRequest:
        """The attempt after its first turn."""
        return replace(request, trunk=self.trunks[request.problem.problem_id])

    def _open_worker(self, converse: Converse, harness: HarnessConfig) -> RolloutWorker:
        setup = WorkerSetup(
            tokenizer_directory=str(self.checkpoint),
            problems_directory=str(self._problems),
            harness=harness,
            grading=self.recipe.grading,
            concurrent_trajectories=self.sizes.boxes,
        )
        return build_worker(setup, converse)

    async def _first_turn(
        self,
        problem: Problem,
        worker: RolloutWorker,
        answers: GivenAnswers,
        slots: asyncio.Semaphore,
    ) -> Trajectory | None:
        """An attempt that others branch off after its first turn. None where too little context is left."""
        path = self.folder / "first_turns" / f"{problem.problem_id}.safetensors"
        if path.exists():
            trunk = trajectory_from_bytes(path.read_bytes())
        else:
            texts = FIRST_TURN.format(place=f"{problem.path}::{problem.symbol}"), LAST_TURN
            ids = [self.renderer.encode_answer(text) for text in texts]
            request = AttemptRequest(
                f"first.{problem.problem_id}", "first", problem, 0, 0, 0, is_trunk=True
            )
            async with slots:
                trunk = await judge_given(worker, answers, request, ids)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(trajectory_to_bytes(trunk))
        if trunk.branch is None or trunk.branch.turns != 1:
            return None  # its tests did not fail
        given = trunk.model_copy(update={"transcript": unsampled(trunk.transcript)})
        room = self.harness.context_tokens - self.sizes.completion_tokens
        return given if len(given.transcript.segments[0].token_ids_T) <= room else None


async def judge_given(
    worker: RolloutWorker,
    answers: GivenAnswers,
    request: AttemptRequest,
    given: Sequence[Sequence[int]],
) -> Trajectory:
    """The attempt with the answers it was given. SandboxError where the machine lost it several times."""
    trajectory = None
    for retry in range(TRIES):
        name = f"{request.trajectory_id}.r{retry}" if retry else request.trajectory_id
        answers.give(name, given)
        trajectory = await worker.attempt(replace(request, trajectory_id=name, retry=retry))
        if trajectory.outcome not in INFRASTRUCTURE_OUTCOMES:
            return trajectory
    raise SandboxError(f"{request.trajectory_id} was lost {TRIES} times: {trajectory}")


def unsampled(transcript: Transcript) -> Transcript:
    """The transcript with the tokens of its first turn alone, which nobody sampled."""
    segment = transcript.opening(1).segment
    total = len(segment.token_ids_T)
    unknown_T = np.full(total, -1, dtype=np.int64)
    given = Segment(
        token_ids_T=segment.token_ids_T,
        loss_mask_T=np.zeros(total, dtype=bool),
        logprobs_T=np.zeros(total, dtype=np.float32),
        weight_versions_T=unknown_T,
        cache_versions_T=unknown_T,
        routed_experts_TLK=segment.routed_experts_TLK,
    )
    turns = tuple(turn.model_copy(update={"generated_tokens": 0}) for turn in transcript.turns)
    return transcript.model_copy(update={"segments": (given,), "turns": turns})


def _newest(home: Path, kind: str, file: str) -> Path:
    """Newest artifact of a kind that holds a file."""
    found = sorted((home / "artifacts" / kind).glob(f"*/{file}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ValueError(
            f"{home}/artifacts/{kind} holds no {file}, wanted what `ostinato demo` made"
        )
    return found[-1].parent
