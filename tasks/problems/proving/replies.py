"""Problems that a final message solves: questions with their answers, and right code with the prompt of a mutation.

A question asks which line raises the exception of a call, found by making calls in a box, or which functions call
another, where names alone decide it. The proof finds the answer again: a call is made alone, in a new box with
another hash seed.
"""

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from ostinato.infra.platform.syntax import parse_once
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import CallRequest, format_call, make_calls
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository, module_of
from ostinato.tasks.problems.breaking.callers import Callers, find_callers
from ostinato.tasks.problems.breaking.candidates import Candidate, draw_rank
from ostinato.tasks.problems.breaking.definitions import Definition, read_definitions
from ostinato.tasks.problems.config import Kind, ProblemsConfig
from ostinato.tasks.problems.proving.baseline import Baseline
from ostinato.tasks.problems.proving.judging import ProofOutcome, ProofResult, RepositoryUnderTest
from ostinato.tasks.problems.proving.oracle import derive_arguments, record_calls
from ostinato.tasks.records import CodePlace, Problem, WantedReply

_LIMITS = SandboxLimits(memory_bytes=2 << 30, start_seconds=180.0)
_CALL_SECONDS = 0.5
_TESTS_PER_FUNCTION = 3  # run to record calls
_CALLERS = range(2, 7)  # callers that a question may ask for
_RAISES_PER_FUNCTION = 2
_CALL_CHARACTERS = 300
_MESSAGE_CHARACTERS = 160
_ODD_TEXT = re.compile(r"\n|\b0x[0-9a-fA-F]{6,}")  # differs from run to run, or spans lines
_RAISED = (
    "`{call}` of {repository} ends in {error}. Which line of the code raises it?",
    "Where is the {error} raised that `{call}` of {repository} shows?",
    "Calling `{call}` in {repository} gives me {error}. I need the line that raises this exception.",
)
_CALLED = (
    "Which functions and methods of {repository} call `{symbol}` ({path})? Leave out the tests.",
    "List every function or method of {repository}, tests apart, that calls `{symbol}` of {path}.",
)
_ONE = "Answer with path:line and name no other line. Change no file."
_ALL = (
    "Answer with path:line for each, where the line is any within the function, and name no other line. "
    "Change no file."
)


class Form(StrEnum):
    """Forms of questions."""

    RAISED = "raised"  # the line that raises the exception of a call
    CALLERS = "callers"  # all functions that call a function


class RaisedAt(NamedTuple):
    """Exception of a call, and the statement that raises it."""

    error: str
    message: str
    place: CodePlace


def leave_unbroken(decoy: Candidate, judgement: ProofResult) -> Candidate:
    """The candidate with right code that gets the prompt of a proven mutation."""
    return decoy.model_copy(
        update={
            "kind": Kind.NO_EDIT,
            "operator": "unbroken",
            "edits": (),
            "decoy": decoy.candidate_id,
            "named_passing": (*judgement.fail_to_pass, *judgement.pass_to_pass),
            "reply": WantedReply(),
        }
    )


async def judge_unbroken(candidate: Candidate, under_test: RepositoryUnderTest) -> ProofResult:
    """ProofResult of a candidate without a broken line: its tests pass in both boxes, and a question has its answer
    again.
    """
    baseline, limit_seconds = under_test.baseline, under_test.rules.time_limit_seconds
    covering = sorted(
        baseline.covering(candidate.touched), key=lambda n: (baseline.call_bits[n], n)
    )
    few = covering[: under_test.rules.max_pass_to_pass]
    named = candidate.named_passing or tuple(baseline.tests[position] for position in few)
    tests = list(named)
    first = await under_test.server.run({}, tests, limit_seconds)
    random.Random(f"second {candidate.candidate_id}").shuffle(tests)
    second = await under_test.second.run_again({}, tests, limit_seconds)
    is_stable = first.passed and second.passed
    if candidate.reply is not None and candidate.reply.places:
        draft = candidate.draft("")
        places = await derive_places(draft, under_test.server.repository)
        is_stable = is_stable and places == candidate.reply.places
    return ProofResult(
        candidate_id=candidate.candidate_id,
        finding=ProofOutcome.PROVEN if is_stable else ProofOutcome.UNSTABLE,
        pass_to_pass=named,
        seconds=first.cpu_seconds,
    )


async def ask_questions(
    repository: PreparedRepository, baseline: Baseline, config: ProblemsConfig
) -> list[Candidate]:
    """Questions about the functions that stable tests call, in an order drawn by the seed. ProblemError or
    SandboxError if no call can be recorded.
    """
    definitions = [
        item
        for found in read_definitions(_product(repository)).values()
        for item in found
        if item.is_plain and baseline.covering([item.call_key])
    ]
    asked = [
        *_ask_for_callers(repository, definitions, config.seed),
        *await _ask_for_raises(repository, definitions, baseline, config),
    ]
    return sorted(asked, key=lambda item: draw_rank(f"{config.seed}", item.candidate_id))


async def derive_places(problem: Problem, repository: PreparedRepository) -> tuple[CodePlace, ...]:
    """The places that answer a question, found anew. Empty if there are none."""
    if problem.operator == Form.CALLERS:
        for definition, callers in _callers_in(repository).items():
            if (definition.path, definition.qualified_name) == (problem.path, problem.symbol):
                return _places_of(callers)
        return ()
    call = CallRequest(problem.path, problem.symbol, problem.facts["arguments"])
    async with open_box(repository, limits=_LIMITS) as box:
        (line,) = await make_calls(box, [call], _CALL_SECONDS, mode="raise", hash_seed=1)
    raised = _read_raise(line, repository)
    return () if raised is None else (raised.place,)


def _product(repository: PreparedRepository) -> dict[str, bytes]:
    files = repository.files
    return {path: files[path] for path in files if repository.is_editable(path)}


def _callers_in(repository: PreparedRepository) -> Callers:
    files = _product(repository)
    return find_callers(files, read_definitions(files))


def _places_of(callers: Sequence[Definition]) -> tuple[CodePlace, ...]:
    return tuple(
        CodePlace(path=item.path, first_line=item.decorator_line, last_line=item.last_line)
        for item in callers
    )


def _ask_for_callers(
    repository: PreparedRepository, definitions: Sequence[Definition], seed: int
) -> Iterator[Candidate]:
    known = frozenset(definitions)
    for definition, callers in _callers_in(repository).items():
        if len(callers) in _CALLERS and definition in known:
            rng = random.Random(f"question {seed} {definition.call_key}")
            text = rng.choice(_CALLED).format(
                repository=repository.name, symbol=definition.name, path=definition.path
            )
            reply = WantedReply(places=_places_of(callers), needs_all=True)
            yield _ask(repository, definition, Form.CALLERS, f"{text} {_ALL}", reply)


def _ask(
    repository: PreparedRepository,
    definition: Definition,
    form: Form,
    text: str,
    reply: WantedReply,
    arguments: str = "",
) -> Candidate:
    return Candidate.at(
        definition,
        repository=repository.name,
        kind=Kind.QUESTION,
        operator=form.value,
        touched=(definition.call_key,),
        message=text,
        reply=reply,
        facts={"arguments": arguments} if arguments else {},
    )


async def _ask_for_raises(
    repository: PreparedRepository,
    definitions: Sequence[Definition],
    baseline: Baseline,
    config: ProblemsConfig,
) -> list[Candidate]:
    """Questions about calls that tests make, and calls derived from those."""
    tests = baseline.cheapest_tests(definitions, _TESTS_PER_FUNCTION)
    most, seed = config.oracle.max_calls_derived, config.seed
    async with open_box(repository, limits=_LIMITS) as box:
        recorded = await record_calls(box, definitions, tests)
        calls = [
            CallRequest(path, symbol, arguments)
            for (path, symbol), known in sorted(recorded.items())
            for arguments in (*known, *derive_arguments(known, most, f"{seed} {path} {symbol}"))
        ]
        lines = await make_calls(box, calls, _CALL_SECONDS, mode="raise")
    by_place = {(item.path, item.qualified_name): item for item in definitions}
    texts = [content.decode(errors="replace") for content in _product(repository).values()]
    asked: dict[tuple[Definition, CodePlace], Candidate] = {}
    num_asked: Counter[Definition] = Counter()
    for call, line in zip(calls, lines, strict=True):
        definition, raised = by_place[call.path, call.symbol], _read_raise(line, repository)
        if raised is None or (definition, raised.place) in asked:
            continue
        shown = format_call(f"{module_of(call.path)}.{call.symbol}", call.arguments)
        is_plain = len(shown) <= _CALL_CHARACTERS and "\n" not in shown
        if not is_plain or num_asked[definition] >= _RAISES_PER_FUNCTION:
            continue
        if _is_only_raise(raised.place, definition, repository):
            continue
        rng = random.Random(f"question {seed} {shown}")
        text = rng.choice(_RAISED).format(
            repository=repository.name, call=shown, error=_name_error(raised, texts)
        )
        reply = WantedReply(places=(raised.place,))
        asked[definition, raised.place] = _ask(
            repository, definition, Form.RAISED, f"{text} {_ONE}", reply, call.arguments
        )
        num_asked[definition] += 1
    return list(asked.values())


def _read_raise(line: str | None, repository: PreparedRepository) -> RaisedAt | None:
    """The statement of product code that raised, read from a box's answer on one call. None: there is none."""
    match json.loads(
        line or "{}"
    ):  # matched and not decoded, because a form can name code to import
        case {
            "returns": {"list": [str() as error, str() as message, str() as path, int() as number]}
        }:
            tree = (
                parse_once(repository.files.get(path, b""))
                if repository.is_editable(path)
                else None
            )
        case _:
            return None
    for node in ast.walk(tree) if tree is not None else ():
        last = (node.end_lineno or node.lineno) if isinstance(node, ast.Raise) else 0
        if isinstance(node, ast.Raise) and node.lineno <= number <= last:
            place = CodePlace(path=path, first_line=node.lineno, last_line=last)
            return RaisedAt(error, message, place)
    return None


def _is_only_raise(
    place: CodePlace, definition: Definition, repository: PreparedRepository
) -> bool:
    """Whether the raising statement is the only one of the called function, so that nothing must be followed."""
    if place.path != definition.path or not definition.contains(place.first_line):
        return False
    tree = parse_once(repository.files[place.path])
    raises = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return sum(map(definition.contains, raises)) < 2


def _name_error(raised: RaisedAt, texts: Sequence[str]) -> str:
    """The exception as a prompt names it, without a message that a search for its text would find."""
    message = raised.message
    is_found = any(message in text for text in texts)
    if is_found or len(message) > _MESSAGE_CHARACTERS or _ODD_TEXT.search(message):
        return raised.error
    return f"{raised.error}: {message}"
