"""Turns proven candidates into published problems: hides tests, writes prompts, drops leaks and duplicates."""

import ast
import random
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.infra.platform.syntax import parse_once, parse_python, walk_definitions
from ostinato.infra.sandbox.inside.sources import function_of
from ostinato.tasks.problems.breaking.candidates import Candidate, LinePlan
from ostinato.tasks.problems.breaking.refactorings import write_request
from ostinato.tasks.problems.building import BuiltPart
from ostinato.tasks.problems.config import Kind, ProblemsConfig, PromptLevel
from ostinato.tasks.problems.prompts import choose_level, is_ambiguous, write_prompt
from ostinato.tasks.problems.proving.judging import TESTED, ProofOutcome, ProofResult
from ostinato.tasks.problems.proving.leaks import LeakCheck
from ostinato.tasks.problems.selection import Sources
from ostinato.tasks.records import BlockEdit, Problem, Split

# similarity to a function of an evaluation split above which a problem of another split is dropped
_MAX_DUPLICATE_RATIO = 0.8


@dataclass
class ProblemSet:
    """Published problems, and the number of dropped candidates by reason."""

    problems: list[Problem] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def publish(parts: Sequence[BuiltPart], config: ProblemsConfig) -> ProblemSet:
    """The problem set, in the order of the parts and their candidates."""
    made = ProblemSet()
    texts: list[tuple[Problem, str]] = []
    repeated: set[str] = set()
    for built in parts:
        repository = built.part.repository
        leaks = LeakCheck(repository)
        symbols = [item.qualified_name for item in Sources.read(repository).every_definition()]
        for candidate, judgement in built.proven:
            problem = make_problem(candidate, judgement, built, config, symbols)
            if leaks.find(problem):
                made.dropped["leaked"] += 1
                continue
            made.problems.append(problem)
            if config.rules.drops_repeated_lines and any(leaks.find_repeated(problem)):
                repeated.add(problem.problem_id)
            if built.part.split is not None:  # splits that share a repository share its functions
                lines = repository.files[problem.path].decode().split("\n")
                texts.append(
                    (problem, "\n".join(lines[problem.first_line - 1 : problem.last_line]))
                )
    twins = find_duplicates(texts, _MAX_DUPLICATE_RATIO)
    tested = [pair for built in parts for pair in built.proven]
    hashes = {candidate.candidate_id for candidate, _ in tested if candidate.asks_for_hash}
    unproven = {
        candidate.candidate_id: judgement.finding
        for candidate, judgement in tested
        if judgement.finding is not ProofOutcome.PROVEN
    }
    made.dropped["duplicate_of_evaluation"] = len(twins)
    made.dropped["asks_for_hash"] = len(hashes)
    made.dropped["repeated_lines"] = len(repeated)
    for finding in TESTED - {ProofOutcome.PROVEN}:
        made.dropped[finding] = list(unproven.values()).count(finding)
    left_out = hashes | twins | unproven.keys() | repeated
    made.problems = [item for item in made.problems if item.problem_id not in left_out]
    return made


def make_problem(
    candidate: Candidate,
    judgement: ProofResult,
    built: BuiltPart,
    config: ProblemsConfig,
    symbols: Collection[str] = (),
) -> Problem:
    """The problem of a proven candidate. `symbols`: qualified names of all definitions of the package."""
    if candidate.decoy:
        decoy = make_problem(*built.decoys[candidate.decoy], built, config, symbols)
        names = ("prompt", "prompt_level", "cut_tests", "hidden_tests", "question_warranted")
        kept = {name: getattr(decoy, name) for name in names}
        kept |= {
            "pass_to_pass": judgement.pass_to_pass,
            "split": built.splits[candidate.candidate_id],
        }
        return candidate.draft(decoy.repository_fingerprint).model_copy(update=kept)
    repository, place = built.part.repository, (candidate.path, candidate.symbol)
    # the agent sees a refactoring's tests under the old name
    is_refactoring = candidate.kind is Kind.REFACTORING
    is_given = candidate.kind in (Kind.GIVEN, Kind.QUESTION)  # its prompt comes with it
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
            if is_given
            else write_request(candidate, level)
            if is_refactoring
            else write_prompt(
                level, candidate, judgement, oracle, docstring, config.seed, config.wording
            ),
            "prompt_level": "" if is_given else level.value,
            "fail_to_pass": judgement.fail_to_pass,
            "pass_to_pass": judgement.pass_to_pass,
            "hidden_tests": () if is_refactoring else hidden,
            "cut_tests": candidate.adapted_tests if is_refactoring else cuts,
            "split": built.splits[candidate.candidate_id],
            # a visible failing test would tell which of the matching functions is meant
            "question_warranted": not (is_given or is_refactoring)
            and len(hidden) == len(judgement.fail_to_pass)
            and (
                is_ambiguous(candidate, level, symbols)
                or (level is PromptLevel.VAGUE and not config.wording.vague_names)
            ),
            "oracle": None if oracle is None else oracle.model_copy(update={"visible": ()}),
        }
    )


def hide_tests(
    failing: Sequence[str], files: Mapping[str, bytes], share: float, seed: str
) -> tuple[tuple[str, ...], tuple[BlockEdit, ...]]:
    """Ids and cuts of a share of the failing test functions, drawn by the seed and rounded up. The agent's test
    files lack them; the verifier has the pristine files.

    Functions that are created while the file is imported cannot be cut out, so they stay.
    """
    by_function: dict[str, list[str]] = defaultdict(list)
    for test in failing:
        by_function[function_of(test)].append(test)
    places = {name: _find_test(name, files) for name in by_function}
    can_hide = sorted(name for name, place in places.items() if place is not None)
    random.Random(seed).shuffle(can_hide)
    chosen = can_hide[: -(-int(share * 1000 * len(by_function)) // 1000)]
    plan = LinePlan(files)
    hidden: list[str] = []
    for name in chosen:
        place = places[name]
        assert place is not None
        path, node = place
        first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
        plan.replace(
            path, first, node.end_lineno or node.lineno, _placeholder_body(path, node, files)
        )
        hidden += by_function[name]
    if not plan.parses():
        return (), ()
    return tuple(test for test in failing if test in frozenset(hidden)), plan.blocks()


def _find_test(name: str, files: Mapping[str, bytes]) -> tuple[str, ast.FunctionDef] | None:
    path, *parts = name.split("::")
    if path not in files:
        return None
    body: Sequence[ast.stmt] = parse_once(files[path]).body
    for part in parts[:-1]:
        classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == part]
        if len(classes) != 1:
            return None
        body = classes[0].body
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == parts[-1]]
    return (path, found[0]) if len(found) == 1 else None


def _placeholder_body(
    path: str, node: ast.FunctionDef, files: Mapping[str, bytes]
) -> tuple[str, ...]:
    """Lines in place of a cut test: `pass` for a method, so that its class is not left empty, else nothing."""
    for outer in ast.walk(parse_once(files[path])):
        if isinstance(outer, ast.ClassDef) and any(
            isinstance(item, ast.FunctionDef) and item.lineno == node.lineno for item in outer.body
        ):
            return (" " * node.col_offset + "pass",)
    return ()


def read_docstring(text: str, symbol: str) -> str:
    """The docstring of a function, method or class. Empty when there is none."""
    for name, node in walk_definitions(parse_once(text)):
        if name == symbol:
            return ast.get_docstring(node) or ""
    return ""


_SIZE = 5
_MIN_SHINGLES = 40  # shorter functions resemble one another by nature
_EVALUATED = (Split.HELD_OUT, Split.HELD_OUT_FUNCTION)


def shingle(text: str) -> frozenset[int]:
    """Hashes of runs of syntax nodes without names, so that renaming a definition does not change them."""
    try:
        tree = parse_python(textwrap.dedent(text))
    except SyntaxError:
        return frozenset()
    kinds = [
        f"{type(node).__name__} {node.value!r}"
        if isinstance(node, ast.Constant)
        else type(node).__name__
        for node in ast.walk(tree)
    ]
    return frozenset(
        hash(tuple(kinds[start : start + _SIZE])) for start in range(len(kinds) - _SIZE + 1)
    )


def find_duplicates(problems: Sequence[tuple[Problem, str]], max_ratio: float) -> frozenset[str]:
    """Ids of problems outside the evaluation splits with a function that nearly equals one inside."""
    evaluated: set[frozenset[int]] = set()
    others: dict[frozenset[int], list[str]] = {}
    shingles = {text: shingle(text) for text in {text for _, text in problems}}
    for problem, text in problems:
        found = shingles[text]
        if len(found) < _MIN_SHINGLES:
            continue
        if problem.split in _EVALUATED:
            evaluated.add(found)
        else:
            others.setdefault(found, []).append(problem.problem_id)
    return frozenset(
        name
        for found, names in others.items()
        for name in names
        if any(similarity(found, other) > max_ratio for other in evaluated)
    )


def similarity(one: frozenset[int], other: frozenset[int]) -> float:
    """Ratio of shared shingles to all shingles, 0 to 1."""
    if min(len(one), len(other)) == 0 or 2 * len(one) < len(other) or 2 * len(other) < len(one):
        return 0.0
    return len(one & other) / len(one | other)


Row = dict[str, str | int | float]


def summarise(made: ProblemSet, parts: Sequence[BuiltPart], left_out: Mapping[str, str]) -> dict:
    """Figures of a set, for its artifact and its card."""
    problems = made.problems
    findings = Counter[ProofOutcome]()
    for built in parts:
        for (_, finding), count in built.findings.items():
            findings[finding] += count
    tried = findings.total()
    return {
        "num_problems": len(problems),
        "num_candidates": tried,
        "yield_ratio": findings[ProofOutcome.PROVEN] / tried if tried else 0.0,
        "findings": findings,
        "dropped": made.dropped,
        "left_out": left_out,
        **count_published(problems),
        "yield_table": yield_table(parts, problems),
    }


def count_published(problems: Sequence[Problem]) -> dict[str, dict[str, float]]:
    """Number of problems by split, kind and operator, and the sizes of their changes."""
    files = [{part.path for part in (*item.edits, *item.blocks)} for item in problems]
    return {
        "changes": {
            "median_lines": statistics.median([item.num_changed_lines for item in problems] or [0]),
            "several_files": sum(len(found) > 1 for found in files) / max(len(files), 1),
        },
        "split_sizes": {
            split.value: sum(item.split is split for item in problems) for split in Split
        },
        "kinds": dict(Counter(problem.kind for problem in problems).most_common()),
        "operators": dict(Counter(problem.operator for problem in problems).most_common()),
    }


def yield_table(parts: Sequence[BuiltPart], problems: Sequence[Problem]) -> list[Row]:
    """One row per repository and kind: tried, proven, published, and the refusals by reason."""
    published = Counter((problem.repository, problem.kind) for problem in problems)
    rows: list[Row] = []
    for built in parts:
        name = built.part.repository.name
        for kind in Kind:
            counts = {f: built.findings[kind, f] for f in ProofOutcome if built.findings[kind, f]}
            tried, proven = sum(counts.values()), counts.pop(ProofOutcome.PROVEN, 0)
            if tried:
                rows.append(
                    {
                        "repository": name,
                        "kind": kind.value,
                        "split": built.part.split.value if built.part.split else "dealt",
                        "tests": len(built.baseline.tests),
                        "tried": tried,
                        "proven": proven,
                        "yield": round(proven / tried, 3),
                        "published": published[name, kind.value],
                        "refused": ", ".join(f"{f.value} {n}" for f, n in sorted(counts.items())),
                    }
                )
    return rows
