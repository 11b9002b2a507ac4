"""Turns proven candidates into published problems: hidden tests, prompts, splits, no leaks."""

import ast
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ostinato.infra.platform.syntax import parse_once, walk_definitions
from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.building import BuiltPart
from ostinato.tasks.problems.config import Kind, ProblemsConfig, PromptLevel
from ostinato.tasks.problems.prompts import choose_level, is_ambiguous, write_prompt
from ostinato.tasks.problems.proving.duplicates import find_duplicates
from ostinato.tasks.problems.proving.hiding import hide_tests
from ostinato.tasks.problems.proving.judging import ProofOutcome, ProofResult
from ostinato.tasks.problems.proving.leaks import LeakCheck
from ostinato.tasks.problems.proving.repeated_lines import RepeatedLines
from ostinato.tasks.problems.selection import Sources
from ostinato.tasks.records import Problem

# similarity of functions above which only one of two repositories' splits may keep its problems
_MAX_DUPLICATE_RATIO = 0.8


@dataclass
class ProblemSet:
    """Published problems, and the number of proven ones dropped by reason."""

    problems: list[Problem] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def publish(parts: Sequence[BuiltPart], config: ProblemsConfig) -> ProblemSet:
    """The whole set, in the order of the parts and their candidates."""
    made = ProblemSet()
    texts: list[tuple[Problem, str]] = []
    for built in parts:
        repository = built.part.repository
        leaks = LeakCheck.of(repository)
        symbols = [item.qualified_name for item in Sources.read(repository).every_definition()]
        for candidate, judgement in built.proven:
            problem = make_problem(candidate, judgement, built, config, symbols)
            is_checked = bool(problem.hidden_tests) or bool(problem.blocks)
            is_old_code = candidate.kind in (Kind.MINED_COMMIT, Kind.GIVEN)
            if is_checked and not is_old_code and leaks.find(problem):
                made.dropped["leaked"] += 1
                continue
            made.problems.append(problem)
            if built.part.split is not None:  # dealt splits share functions on purpose
                lines = repository.files[problem.path].decode().split("\n")
                texts.append(
                    (problem, "\n".join(lines[problem.first_line - 1 : problem.last_line]))
                )
    repeated = (
        _find_repeated(made.problems, parts) if config.rules.drops_repeated_lines else frozenset()
    )
    twins = find_duplicates(texts, _MAX_DUPLICATE_RATIO)
    proven = [candidate for built in parts for candidate, _ in built.proven]
    hashes = {candidate.candidate_id for candidate in proven if candidate.asks_for_hash}
    weak = {
        candidate.candidate_id
        for built in parts
        for candidate, judgement in built.proven
        if judgement.finding is ProofOutcome.STUB_PASSES
    }
    made.dropped["duplicate_of_evaluation"] = len(twins)
    made.dropped["asks_for_hash"] = len(hashes)
    made.dropped["stub_passes"] = len(weak)
    made.dropped["repeated_lines"] = len(repeated)
    left_out = hashes | twins | weak | repeated
    made.problems = [item for item in made.problems if item.problem_id not in left_out]
    return made


def _find_repeated(problems: Sequence[Problem], parts: Sequence[BuiltPart]) -> frozenset[str]:
    """Ids of problems with a right line that can be read elsewhere in the broken state."""
    scans = {built.part.repository.name: RepeatedLines(built.part.repository) for built in parts}
    return frozenset(
        problem.problem_id for problem in problems if any(scans[problem.repository].find(problem))
    )


def make_problem(
    candidate: Candidate,
    judgement: ProofResult,
    built: BuiltPart,
    config: ProblemsConfig,
    symbols: Collection[str] = (),
) -> Problem:
    """The record of a proven candidate. `symbols`: all that the repository's package defines."""
    repository, place = built.part.repository, (candidate.path, candidate.symbol)
    hidden, cuts = hide_tests(
        judgement.fail_to_pass,
        repository.files,
        # collections of tasks hide their tests from agents
        1.0 if candidate.kind is Kind.GIVEN else config.rules.hidden_share,
        f"{config.seed} {candidate.candidate_id}",
    )
    oracle = built.oracles.get(place)
    level = choose_level(
        config.prompt_shares,
        candidate,
        config.seed,
        is_described=place in built.part.descriptions,
    )
    docstring = (
        built.part.descriptions[place]
        if level is PromptLevel.DESCRIBED
        else read_docstring(repository.files[candidate.path].decode(), candidate.symbol)
    )
    return candidate.draft(repository.fingerprint).model_copy(
        update={
            "prompt": candidate.message
            if candidate.kind is Kind.GIVEN
            else write_prompt(level, candidate, judgement, oracle, docstring, config.seed),
            "fail_to_pass": judgement.fail_to_pass,
            "pass_to_pass": judgement.pass_to_pass,
            "hidden_tests": hidden,
            "cut_tests": cuts,
            "split": built.splits[candidate.candidate_id],
            # a failing test that the agent can run tells which of the two is meant
            "question_warranted": candidate.kind is not Kind.GIVEN
            and len(hidden) == len(judgement.fail_to_pass)
            and is_ambiguous(candidate, level, symbols),
            "oracle": None if oracle is None else oracle.model_copy(update={"visible": ()}),
        }
    )


def read_docstring(text: str, symbol: str) -> str:
    """The docstring of a function, method or class. Empty when there is none."""
    for name, node in walk_definitions(parse_once(text)):
        if name == symbol:
            return ast.get_docstring(node) or ""
    return ""
