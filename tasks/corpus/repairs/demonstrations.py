"""Transcripts of the demonstrator on real problems, in the agents' own harness, with real tests."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.extensions import COMPACT
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.regions import Region, open_region
from ostinato.infra.agent.search.index import SearchService
from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.agent.workplace import make_workplace
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.protocol import Sandbox
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.rendering import Renderer
from ostinato.models.rendering.vocabulary import SPECIAL_IDS, line_tag
from ostinato.tasks.corpus.config import DemonstrationConfig
from ostinato.tasks.corpus.decontamination import Guard
from ostinato.tasks.corpus.repairs.demonstrator import (
    AnswerScript,
    Demonstrator,
    locate_and_repair,
    repair,
    repair_plainly,
    write_repair,
)
from ostinato.tasks.corpus.repairs.locating import LocatingCalls, locate
from ostinato.tasks.corpus.repairs.transcripts import (
    FIXED,
    GAVE_UP,
    Document,
    FailureReports,
    RepairScript,
    draw_plan,
    edit_call,
    place_of,
)
from ostinato.tasks.corpus.source_code.functions import CodeFunction
from ostinato.tasks.problems.breaking.drawn_mutations import draw_mutation
from ostinato.tasks.problems.descriptions import read_description
from ostinato.tasks.problems.published import facts_of
from ostinato.tasks.records import Problem

OPEN_EDIT = SPECIAL_IDS["<edit_file>"]
CLOSE_EDIT = SPECIAL_IDS["</edit_file>"]
_TEST_LIMIT_SECONDS = 10.0
PLAIN = "plain"  # script of a repair in plain text


@dataclass(slots=True)
class Demonstrations:
    """Transcripts and reports of all attempts."""

    documents: list[Document] = field(default_factory=list)
    reports: FailureReports = field(default_factory=FailureReports)
    by_plan: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One demonstrated attempt."""

    problem: Problem
    plan_name: str
    documents: tuple[Document, ...]  # one per segment
    first_report: str


@dataclass(frozen=True, slots=True)
class DemonstrationSettings:
    """Settings shared by all attempts."""

    config: DemonstrationConfig
    harness: HarnessConfig
    renderer: Renderer
    guard: Guard
    seed: int
    search: SearchService  # answers codebase_search


async def make_demonstrations(
    problems: Sequence[Problem],
    repositories: Mapping[str, PreparedRepository],
    settings: DemonstrationSettings,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> Demonstrations:
    """Runs `config.count` attempts. Each problem is used once before any is used again."""
    result = Demonstrations()
    if not problems or not settings.config.count:
        return result
    order = sorted(problems, key=lambda problem: problem.problem_id)
    random.Random(settings.seed).shuffle(order)
    total = settings.config.count
    jobs = [(index, order[index % len(order)]) for index in range(total)]
    attempts: list[_Attempt | None] = [None] * total
    async with AsyncExitStack() as stack:
        places = {}
        for name in sorted({problem.repository for problem in order}):
            boxes = settings.config.boxes_per_repository
            places[name] = RepositoryEnvironment.create(repositories[name], boxes)
            stack.push_async_callback(places[name].close)
        waiting = iter(jobs)
        num_done = 0

        async def work() -> None:
            nonlocal num_done
            for index, problem in waiting:
                place = places[problem.repository]
                attempts[index] = await _demonstrate(problem, place, settings, index)
                num_done += 1
                on_done(num_done, total)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(settings.config.concurrency, total)):
                group.create_task(work())
    for attempt in attempts:  # in the order of the jobs, whichever ended first
        assert attempt is not None
        result.by_plan[attempt.plan_name] += 1
        if attempt.documents:
            result.documents += attempt.documents
            result.reports.add(attempt.problem.path, attempt.problem.symbol, attempt.first_report)
    return result


async def _demonstrate(
    problem: Problem,
    place: RepositoryEnvironment,
    settings: DemonstrationSettings,
    index: int,
) -> _Attempt:
    """One attempt, without documents if it did not end as planned (a wrong edit may pass)."""
    if settings.harness.dialect != COMPACT:
        return await _demonstrate_plainly(problem, place, settings, index)
    rng = random.Random(f"{settings.seed}/{index}/{problem.problem_id}")
    plan = draw_plan(settings.config, rng)
    broken = problem.break_files(place.repository.files)
    text = broken[problem.path].decode()
    region = open_region(text, f"{problem.path}::{problem.symbol}")
    wrong = ""
    if plan.script is not RepairScript.RIGHT:
        wrong = _draw_wrong_edit(problem, region, settings.guard, rng)
        if not wrong:
            plan = replace(plan, script=RepairScript.RIGHT)
    right = _right_edit(problem, region)
    locating = _locating(problem, settings.config)
    if locating is None:
        named = place_of(problem.path, problem.symbol)
        conversation = repair(plan, named, right=right, wrong=wrong)
    else:
        conversation = locate_and_repair(locating, plan, right=right, wrong=wrong)
    async with place.leased(broken) as sandbox:
        transcript = await _play(
            conversation,
            problem,
            place,
            settings,
            sandbox,
            broken,
            index,
            _summary(problem, region),
        )
    wanted = GAVE_UP if plan.script is RepairScript.GIVE_UP else FIXED
    if transcript.end_reason is not EndReason.FINISHED or transcript.final_message != wanted:
        return _Attempt(problem, f"dropped_{transcript.end_reason}", (), "")
    documents = _documents(transcript)
    if plan.script is not RepairScript.RIGHT:
        _mask_first_edit(documents[0])
    return _Attempt(problem, plan.name, documents, _first_report(transcript))


async def _demonstrate_plainly(
    problem: Problem,
    place: RepositoryEnvironment,
    settings: DemonstrationSettings,
    index: int,
) -> _Attempt:
    """One repair in plain text, without documents unless it restores the original code byte for byte."""
    pristine = place.repository.files
    broken = problem.break_files(pristine)
    calls = write_repair(problem, broken, settings.harness)
    if calls is None:
        return _Attempt(problem, "dropped_not_shown", (), "")
    async with place.leased(broken) as sandbox:
        conversation = repair_plainly(calls)
        transcript = await _play(conversation, problem, place, settings, sandbox, broken, index)
        left = await sandbox.diff()
    edited = {edit.path for edit in problem.edits}  # other files may lack hidden tests
    is_whole = all(left.get(path, pristine[path]) == pristine[path] for path in edited)
    if transcript.final_message != FIXED or not is_whole:
        return _Attempt(problem, f"dropped_{transcript.end_reason}", (), "")
    return _Attempt(problem, PLAIN, _documents(transcript), "")


def _documents(transcript: Transcript) -> tuple[Document, ...]:
    return tuple(
        Document(segment.token_ids_T.tolist(), segment.loss_mask_T.tolist())
        for segment in transcript.segments
    )


async def _play(
    conversation: AnswerScript,
    problem: Problem,
    place: RepositoryEnvironment,
    settings: DemonstrationSettings,
    sandbox: Sandbox,
    broken: Mapping[str, bytes],
    index: int,
    summary: str = "",
) -> Transcript:
    """The transcript of a demonstrator in the agents' loop. `broken`: the problem's changed files."""
    request = AgentRequest(
        prompt=problem.prompt,
        session_id=f"{problem.problem_id}/{index}",
        facts=facts_of(problem, broken, settings.harness),
    )
    environment = make_workplace(
        sandbox,
        place.test_server,
        test_ids=(*problem.fail_to_pass, *problem.pass_to_pass),
        test_limit_seconds=_TEST_LIMIT_SECONDS,
        search=settings.search,
    )
    model = Demonstrator(settings.renderer, conversation, summary)
    return await run_agent(model, settings.renderer, environment, request, settings.harness)


def _locating(problem: Problem, config: DemonstrationConfig) -> LocatingCalls | None:
    if config.locating == "named":
        return None
    description = read_description(problem.prompt)
    return locate(config.locating, description, problem.path, problem.symbol)


def _right_edit(problem: Problem, region: Region) -> str:
    """The call that restores the gold lines. Raises ProblemError if the region lacks the broken lines."""
    lines: list[str] = []
    for edit in problem.edits:
        number = edit.line_number - region.first_line + 1
        shown = region.lines[number - 1] if 1 <= number <= len(region.lines) else None
        if shown != edit.broken_text:
            raise ProblemError(
                f"problem {problem.problem_id}: line {number} of {problem.symbol} is {shown!r}, "
                f"wanted {edit.broken_text!r}"
            )
        lines.append(f"{line_tag(number)}{edit.gold_text}")
    return f"<edit_file>{''.join(lines)}</edit_file>"


def _summary(problem: Problem, region: Region) -> str:
    """The wrong lines as read_file showed them, which a new context needs to edit them."""
    numbers = [edit.line_number - region.first_line + 1 for edit in problem.edits]
    shown = [f"{line_tag(number)}{region.lines[number - 1]}" for number in numbers]
    return "wrong: " + "".join(shown)


def _draw_wrong_edit(problem: Problem, region: Region, guard: Guard, rng: random.Random) -> str:
    """A call that changes another line, or the broken line wrongly. Empty if none was found."""
    edit = problem.edits[0]
    number = edit.line_number - region.first_line + 1
    lines = list(region.lines)
    others = [index for index in range(2, len(lines) + 1) if index != number]
    if others and rng.random() < 0.5:
        numbers = others
    else:
        numbers = [number]
        lines[number - 1] = edit.gold_text
    function = CodeFunction(problem.path, problem.symbol, tuple(lines))
    mutation = draw_mutation(function.lines, rng, numbers)
    if mutation is None or mutation.broken_text == region.lines[mutation.line_number - 1]:
        return ""
    if guard.forbids(function, mutation):
        return ""
    return edit_call(mutation.line_number, mutation.broken_text)


def _first_report(transcript: Transcript) -> str:
    for turn in transcript.turns:
        for call, text in zip(turn.calls, turn.results, strict=True):
            if call.tool == "run_terminal":
                return text
    return ""


def _mask_first_edit(document: Document) -> None:
    """Removes the content of the first edit from the loss. Its tags stay in."""
    start = document.token_ids.index(OPEN_EDIT) + 1
    end = document.token_ids.index(CLOSE_EDIT, start)
    document.loss_mask[start:end] = [False] * (end - start)
