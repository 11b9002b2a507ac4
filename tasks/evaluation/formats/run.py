"""Child entry of a format trial: the same problems in each format, within a time limit.

Each shard is a process with its own engine and boxes, as in an evaluation.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.platform.cluster.workspace import Progress, Workspace
from ostinato.infra.platform.errors import GradingError
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.infra.serving.attempts.layers import install_program
from ostinato.infra.serving.engine.start import load_engine
from ostinato.models.decode.protocol import ModelClient
from ostinato.models.rendering import Renderer, load_renderer
from ostinato.tasks.evaluation.attempts import (
    INFRASTRUCTURE_OUTCOMES,
    draw_problems,
    load_split,
    plan_attempts,
    run_shards,
    shard_of,
)
from ostinato.tasks.evaluation.formats.config import (
    ENDINGS,
    EXAMPLES,
    AnswerFormat,
    Ending,
    FormatAttempt,
    FormatScore,
    FormatTrialRequest,
    FormatTrialResult,
    FormatTrialShard,
    FormatTrialShardResult,
)
from ostinato.tasks.evaluation.statistics import mean
from ostinato.tasks.records import Split, Trajectory
from ostinato.tasks.rollout.attempted_problems import choose_attempted
from ostinato.tasks.rollout.config import WorkerSetup
from ostinato.tasks.rollout.graded_worker import build_worker, token_dialogue
from ostinato.tasks.rollout.records import AttemptRequest

SHARD_ENTRY = "ostinato.tasks.evaluation.formats.run:run_shard"
_UNREAD = frozenset({CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL})


def main(request: FormatTrialRequest, workspace: Workspace) -> FormatTrialResult:
    """Tries each format in all shards at once. Returns scores, and example attempts of the best format."""
    configure_logging()
    if not request.harness.is_builtin:  # before the time limit begins
        install_program(request.harness.foreign_program())
    started_at = time.monotonic()
    plan = _plan_of(request)
    count = min(request.processes, len(plan))

    def report(newest: Sequence[Progress]) -> None:
        done = sum(one.done for one in newest)
        total = len(plan) * len(request.formats)
        workspace.progress.update(done, total, f"attempts; {newest[-1].message}")

    requests = [FormatTrialShard(trial=request, index=index, count=count) for index in range(count)]
    shards = run_shards(SHARD_ENTRY, requests, FormatTrialShardResult, workspace, report)
    attempts = [one for shard in shards for one in shard.attempts]
    scores = tuple(score_of(form, attempts) for form in request.formats)
    best = max(scores, key=lambda score: score.rank)
    return FormatTrialResult(
        scores=scores,
        examples=choose_examples([one for one in attempts if one.format == best.format]),
        wall_seconds=time.monotonic() - started_at,
    )


def run_shard(request: FormatTrialShard, workspace: Workspace) -> FormatTrialShardResult:
    """Tries each format on this shard's problems with an engine and boxes of its own."""
    configure_logging()
    plan = shard_of(_plan_of(request.trial), index=request.index, count=request.count)
    return FormatTrialShardResult(
        attempts=tuple(asyncio.run(_try_all(request.trial, plan, workspace)))
    )


def _plan_of(request: FormatTrialRequest) -> list[AttemptRequest]:
    """One attempt at each drawn training problem. Held-out problems could not measure a format that was
    chosen on them.
    """
    problems = load_split(request.problems_directory, Split.TRAIN)
    problems = [problem for problem in problems if problem.reply is None]  # formats are of edits
    problems = choose_attempted(problems, request.harness, request.sandboxes)
    return plan_attempts(
        draw_problems(problems, count=request.config.problems, seed=request.config.seed),
        attempts_per_problem=1,
        seed=request.config.seed,
        temperature=request.config.temperature,
    )


async def _try_all(
    request: FormatTrialRequest, plan: list[AttemptRequest], workspace: Workspace
) -> list[FormatAttempt]:
    """Attempts of each format that ended within the format's share of the time."""
    started_at = time.monotonic()
    directory = Path(request.checkpoint_directory)
    engine = load_engine(
        directory,
        "format_trial",
        request.decoding,
        slots=request.config.slots,
        max_context_tokens=request.harness.context_tokens,
    )
    renderer = load_renderer(directory)
    tried: list[FormatAttempt] = []
    try:
        for index, form in enumerate(request.formats):
            left = request.config.seconds - (time.monotonic() - started_at)
            share_seconds = max(0.0, left) / (len(request.formats) - index)

            def on_done(count: int, form: AnswerFormat = form, before: int = index) -> None:
                total = len(plan) * len(request.formats)
                workspace.progress.update(before * len(plan) + count, total, form.title)

            ended = await _try_one(request, form, engine, plan, share_seconds, on_done)
            tried += [describe_attempt(form, trajectory, renderer) for trajectory in ended]
    finally:
        engine.close()
    return tried


async def _try_one(
    request: FormatTrialRequest,
    form: AnswerFormat,
    engine: ModelClient,
    plan: list[AttemptRequest],
    share_seconds: float,
    on_done: Callable[[int], None],
) -> list[Trajectory]:
    """The attempts that ended within `share_seconds`. Raises GradingError if all failed by a box or the
    engine.
    """
    values = request.harness.model_dump() | form.model_dump()
    setup = WorkerSetup(
        tokenizer_directory=request.checkpoint_directory,
        problems_directory=request.problems_directory,
        harness=type(request.harness).model_validate(values),
        grading=request.grading,
        concurrent_trajectories=request.config.slots,
        sandbox=request.sandbox,
        sandboxes=request.sandboxes,
    )
    worker = build_worker(setup, token_dialogue(setup, engine))
    places = asyncio.Semaphore(request.config.slots)
    ended: list[Trajectory] = []

    async def attempt(item: AttemptRequest) -> None:
        async with places:
            ended.append(await worker.attempt(item))
            on_done(len(ended))

    tasks = [asyncio.create_task(attempt(item)) for item in plan]
    try:
        _, unfinished = await asyncio.wait(tasks, timeout=share_seconds)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await worker.close()
    judged = [one for one in ended if one.outcome not in INFRASTRUCTURE_OUTCOMES]
    if ended and not judged:
        raise GradingError(
            f"all {len(ended)} attempts in format {form.title} ended without a verdict, wanted a "
            f"graded one: {ended[0].reason}"
        )
    return judged


def describe_attempt(
    form: AnswerFormat, trajectory: Trajectory, renderer: Renderer
) -> FormatAttempt:
    """An attempt with its whole text."""
    transcript = trajectory.transcript
    return FormatAttempt(
        format=form,
        problem_id=trajectory.problem_id,
        ending=_ending_of(trajectory),
        generated_tokens=sum(turn.generated_tokens for turn in transcript.turns),
        text="\n".join(
            renderer.decode(segment.token_ids_T.tolist()) for segment in transcript.segments
        ),
        reason=trajectory.reason,
    )


def _ending_of(trajectory: Trajectory) -> Ending:
    if trajectory.is_solved:
        return "solved"
    if trajectory.changed_files:
        return "changed"
    calls = [call for turn in trajectory.transcript.turns for call in turn.calls]
    return "parsed" if any(call.status not in _UNREAD for call in calls) else "unread"


def score_of(form: AnswerFormat, attempts: Sequence[FormatAttempt]) -> FormatScore:
    """Counts over a format's attempts. A solved attempt counts as changed and parsed too."""
    mine = [one for one in attempts if one.format == form]
    reached = [ENDINGS.index(one.ending) for one in mine]
    solved, changed, parsed = (sum(rank <= limit for rank in reached) for limit in range(3))
    return FormatScore(
        format=form,
        attempts=len(mine),
        parsed=parsed,
        changed=changed,
        solved=solved,
        generated_tokens=mean(one.generated_tokens for one in mine),
    )


def choose_examples(attempts: Sequence[FormatAttempt]) -> tuple[FormatAttempt, ...]:
    """Attempts with as many different endings as possible, best endings first."""
    ranked: list[tuple[int, int]] = []  # number of earlier attempts with the same ending, ending
    seen = dict.fromkeys(ENDINGS, 0)
    for one in attempts:
        ranked.append((seen[one.ending], ENDINGS.index(one.ending)))
        seen[one.ending] += 1
    order = sorted(range(len(attempts)), key=lambda index: ranked[index])[:EXAMPLES]
    return tuple(attempts[index] for index in sorted(order, key=lambda index: ranked[index][1]))
