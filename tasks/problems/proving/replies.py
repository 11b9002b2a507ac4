"""Problems that a final message solves: questions with their answers, and right code with the prompt of a mutation.

A question asks which line raises the exception of a call, found by making calls in a box, or which functions call
another. The proof finds the answer again; it makes the call alone, in a new box with another hash seed.
"""

import ast
import json
import random
import re
from collections import Counter

from ostinato.infra.platform.syntax import parse_once
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import CallRequest, format_call, make_calls
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository, module_of
from ostinato.tasks.problems.breaking.candidates import Candidate, draw_rank
from ostinato.tasks.problems.breaking.definitions import (
    Definition,
    find_callers,
    read_definitions,
)
from ostinato.tasks.problems.config import Kind, ProblemsConfig
from ostinato.tasks.problems.proving.baseline import Baseline
from ostinato.tasks.problems.proving.judging import ProofOutcome, ProofResult, RepositoryUnderTest
from ostinato.tasks.problems.proving.oracle import derive_arguments, record_calls
from ostinato.tasks.records import CodePlace, Problem, WantedReply

RAISED, CALLERS = "raised", "callers"  # operators of questions
_LIMITS = SandboxLimits(memory_bytes=2 << 30, start_seconds=180.0)
_CALL_SECONDS = 0.5
_TESTS_PER_FUNCTION = 3  # run to record calls
_NUM_CALLERS = range(2, 7)
_RAISES_PER_FUNCTION = 2
_CALL_CHARACTERS = 300
_MESSAGE_CHARACTERS = 160
_ODD_TEXT = re.compile(r"\n|\b0x[0-9a-fA-F]{6,}")  # an address differs from run to run
_RAISED_TEXTS = (
    "`{call}` of {repository} ends in `{error}`. Which line of the code raises it?",
    "`{call}` of {repository} shows `{error}`. Where is it raised?",
    "Calling `{call}` in {repository} gives me `{error}`. I need the line that raises it.",
)
_CALLERS_TEXTS = (
    "Which functions and methods of {repository} call `{symbol}` ({path})? Leave out the tests.",
    "List every function or method of {repository}, tests apart, that calls `{symbol}` of {path}.",
)
_ONE = "Answer with path:line and name no other line. Change no file."
_ALL = "Answer with path:line of each, any line within it, and name no other line. Change no file."


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
    """ProofResult of a candidate with right code: its tests pass in both boxes, and its answer is found again."""
    baseline, rules = under_test.baseline, under_test.rules
    covering = sorted(
        baseline.covering(candidate.touched), key=lambda n: (baseline.call_bits[n], n)
    )
    few = tuple(baseline.tests[position] for position in covering[: rules.max_pass_to_pass])
    named = candidate.named_passing or few
    first = await under_test.server.run({}, named, rules.time_limit_seconds)
    mixed = random.Random(f"second {candidate.candidate_id}").sample(named, len(named))
    second = await under_test.second.run_again({}, mixed, rules.time_limit_seconds)
    is_proven = first.passed and second.passed
    if candidate.reply is not None and candidate.reply.places:
        places = await derive_places(candidate.draft(""), under_test.server.repository)
        is_proven = is_proven and places == candidate.reply.places
    return ProofResult(
        candidate_id=candidate.candidate_id,
        finding=ProofOutcome.PROVEN if is_proven else ProofOutcome.UNSTABLE,
        pass_to_pass=named,
        seconds=first.cpu_seconds,
    )


async def derive_places(problem: Problem, repository: PreparedRepository) -> tuple[CodePlace, ...]:
    """The places that answer a question, found anew. Empty if there are none."""
    if problem.operator == CALLERS:
        return _callers_in(repository).get((problem.path, problem.symbol), ())
    call = CallRequest(problem.path, problem.symbol, problem.facts["arguments"])
    async with open_box(repository, limits=_LIMITS) as box:
        (line,) = await make_calls(box, [call], _CALL_SECONDS, mode="raise", hash_seed=1)
    _, _, place = _read_raise(line, repository)
    return () if place is None else (place,)


async def ask_questions(
    repository: PreparedRepository, baseline: Baseline, config: ProblemsConfig
) -> list[Candidate]:
    """Questions about the functions that stable tests call, in an order drawn by the seed. ProblemError or
    SandboxError if no call can be recorded.
    """
    definitions = {
        (path, item.qualified_name): item
        for path, found in read_definitions(_product(repository)).items()
        for item in found
        if item.is_plain and baseline.covering([item.call_key])
    }
    asked = await _ask_for_raises(repository, definitions, baseline, config)
    for (path, symbol), places in _callers_in(repository).items():
        if len(places) in _NUM_CALLERS and (path, symbol) in definitions:
            rng = random.Random(f"question {config.seed} {path} {symbol}")
            words = {"repository": repository.name, "symbol": symbol, "path": path}
            text = f"{rng.choice(_CALLERS_TEXTS).format(**words)} {_ALL}"
            reply = WantedReply(places=places, needs_all=True)
            asked.append(_ask(repository, definitions[path, symbol], CALLERS, text, reply))
    return sorted(asked, key=lambda item: draw_rank(f"{config.seed}", item.candidate_id))


def _ask(
    repository: PreparedRepository, about: Definition, operator: str, text: str, reply: WantedReply
) -> Candidate:
    return Candidate.at(
        about,
        repository=repository.name,
        kind=Kind.QUESTION,
        operator=operator,
        touched=(about.call_key,),
        message=text,
        reply=reply,
    )


def _product(repository: PreparedRepository) -> dict[str, bytes]:
    files = repository.files
    return {path: files[path] for path in files if repository.is_editable(path)}


def _callers_in(repository: PreparedRepository) -> dict[tuple[str, str], tuple[CodePlace, ...]]:
    """Places of the callers of functions, by path and name."""
    files = _product(repository)
    return {
        (called.path, called.name): tuple(
            CodePlace(path=one.path, first_line=one.decorator_line, last_line=one.last_line)
            for one in callers
        )
        for called, callers in find_callers(files, read_definitions(files)).items()
    }


async def _ask_for_raises(
    repository: PreparedRepository,
    definitions: dict[tuple[str, str], Definition],
    baseline: Baseline,
    config: ProblemsConfig,
) -> list[Candidate]:
    """Questions about calls that tests make, and about calls derived from those."""
    tests = baseline.cheapest_tests(definitions.values(), _TESTS_PER_FUNCTION)
    most, seed = config.oracle.max_calls_derived, config.seed
    async with open_box(repository, limits=_LIMITS) as box:
        recorded = await record_calls(box, list(definitions.values()), tests)
        calls = [
            CallRequest(path, symbol, arguments)
            for (path, symbol), known in sorted(recorded.items())
            for arguments in (*known, *derive_arguments(known, most, f"{seed} {path} {symbol}"))
        ]
        lines = await make_calls(box, calls, _CALL_SECONDS, mode="raise")
    texts = [content.decode(errors="replace") for content in _product(repository).values()]
    asked: dict[tuple[Definition, CodePlace], Candidate] = {}
    num_asked: Counter[Definition] = Counter()
    for (path, symbol, arguments), line in zip(calls, lines, strict=True):
        called = definitions[path, symbol]
        error, message, place = _read_raise(line, repository)
        shown = format_call(f"{module_of(path)}.{symbol}", arguments)
        is_long = len(shown) > _CALL_CHARACTERS or "\n" in shown
        if place is None or is_long or (called, place) in asked:
            continue
        if num_asked[called] == _RAISES_PER_FUNCTION or _is_only_raise(place, called, repository):
            continue
        is_odd = len(message) > _MESSAGE_CHARACTERS or _ODD_TEXT.search(message)
        if not is_odd and not any(message in text for text in texts):  # a search would find it
            error = f"{error}: {message}"
        rng = random.Random(f"question {seed} {shown}")
        words = {"repository": repository.name, "call": shown, "error": error}
        num_asked[called] += 1
        text = f"{rng.choice(_RAISED_TEXTS).format(**words)} {_ONE}"
        made = _ask(repository, called, RAISED, text, WantedReply(places=(place,)))
        asked[called, place] = made.model_copy(update={"facts": {"arguments": arguments}})
    return list(asked.values())


def _read_raise(
    line: str | None, repository: PreparedRepository
) -> tuple[str, str, CodePlace | None]:
    """Type, text and statement of an exception, from a box's answer on one call. None: product code raises none."""
    # matched and not decoded, because a form can name code to import
    match json.loads(line or "{}"):
        case {
            "returns": {"list": [str() as error, str() as message, str() as path, int() as number]}
        }:
            for node in _raises_in(path, repository):
                place = CodePlace(
                    path=path, first_line=node.lineno, last_line=node.end_lineno or node.lineno
                )
                if place.first_line <= number <= place.last_line:
                    return error, message, place
    return "", "", None


def _raises_in(path: str, repository: PreparedRepository) -> list[ast.Raise]:
    if not repository.is_editable(path):
        return []
    tree = parse_once(repository.files.get(path, b""))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]


def _is_only_raise(place: CodePlace, called: Definition, repository: PreparedRepository) -> bool:
    """Whether the called function raises by itself, and in one line only, so that nothing must be found out."""
    own = [node for node in _raises_in(called.path, repository) if called.contains(node.lineno)]
    return place.path == called.path and called.contains(place.first_line) and len(own) < 2
