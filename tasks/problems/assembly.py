"""Proven candidates become problems: hidden tests, prompts, difficulty, split, and the set's figures.

Nothing is run here.
"""

import ast
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ostinato.infra.platform.syntax import parse_once
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.candidates import Candidate
from ostinato.tasks.problems.definitions import read_definitions
from ostinato.tasks.problems.difficulty import estimate_difficulty
from ostinato.tasks.problems.duplicates import find_duplicates
from ostinato.tasks.problems.hiding import hide_tests
from ostinato.tasks.problems.leaks import CodeNames, ReadableTree, find_leaks
from ostinato.tasks.problems.prompts import choose_level, leaves_two_readings, write_prompts
from ostinato.tasks.problems.set_build import BuiltPart, read_everything
from ostinato.tasks.problems.set_config import Kind, ProblemSetConfig, PromptLevel
from ostinato.tasks.problems.validity import Finding, Judgement
from ostinato.tasks.records import Problem, Split

Row = dict[str, str | int | float]
_BINS = (1, 3, 10, 30, 100, 400)


@dataclass
class ProblemSet:
    """Everything that is published."""

    problems: list[Problem] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    rows: list[Row] = field(default_factory=list)


def assemble(parts: Sequence[BuiltPart], config: ProblemSetConfig) -> ProblemSet:
    """The whole set."""
    made = ProblemSet()
    problems: list[Problem] = []
    for built in parts:
        for problem, is_leaking in _make_problems(built, config):
            if is_leaking:
                made.dropped["leaked"] += 1
            else:
                problems.append(problem)
    texts = [(problem, _symbol_text(problem, parts)) for problem in problems]
    twins = find_duplicates(texts, config.max_duplicate_ratio)
    made.problems = [problem for problem in problems if problem.problem_id not in twins]
    made.dropped["duplicate_of_evaluation"] = len(problems) - len(made.problems)
    made.rows = yield_table(parts, made.problems)
    return made


def _make_problems(built: BuiltPart, config: ProblemSetConfig) -> Iterable[tuple[Problem, bool]]:
    repository = built.part.repository
    everything = read_everything(repository.directory)
    tree, names = ReadableTree(everything), CodeNames(everything)
    symbols = _read_symbols(repository)
    for candidate, judgement in built.proven:
        problem = make_problem(candidate, judgement, built, config, symbols)
        is_checked = bool(problem.hidden_tests) or bool(problem.blocks)
        is_mined = candidate.kind is Kind.MINED_COMMIT
        leaks = is_checked and not is_mined and find_leaks(problem, repository.files, tree, names)
        yield problem, bool(leaks)


def make_problem(
    candidate: Candidate,
    judgement: Judgement,
    built: BuiltPart,
    config: ProblemSetConfig,
    symbols: Collection[str] = (),
) -> Problem:
    """The record of a proven candidate. `symbols`: all that the repository's package defines."""
    repository = built.part.repository
    hidden, cuts = hide_tests(
        judgement.fail_to_pass,
        repository.files,
        config.rules.hidden_share,
        f"{config.seed} {candidate.candidate_id}",
    )
    docstring = read_docstring(repository.files[candidate.path].decode(), candidate.symbol)
    oracle = built.oracles.get((candidate.path, candidate.symbol))
    prompts = write_prompts(candidate, judgement, oracle, docstring, config.seed)
    level = choose_level(config.prompt_shares, candidate, config.seed)
    draft = candidate.draft(repository.fingerprint)
    return draft.model_copy(
        update={
            "prompt": prompts[level],
            "prompts": {name.value: text for name, text in prompts.items()},
            "fail_to_pass": judgement.fail_to_pass,
            "pass_to_pass": judgement.pass_to_pass,
            "hidden_tests": hidden,
            "cut_tests": cuts,
            "split": built.part.split,
            "difficulty": estimate_difficulty(
                candidate.kind,
                num_changed_lines=draft.num_changed_lines,
                num_files=len(candidate.paths),
                num_edits=len(candidate.edits) + len(candidate.blocks),
                num_failing=judgement.num_failing,
                docstring_kept=candidate.docstring_kept,
                prompt_names_symbol=level is not PromptLevel.VAGUE,
            ),
            # a failing test that the agent can run tells which of the two is meant
            "question_warranted": len(hidden) == len(judgement.fail_to_pass)
            and leaves_two_readings(candidate, level, symbols),
            "oracle": None if oracle is None else oracle.model_copy(update={"visible": ()}),
        }
    )


def _read_symbols(repository: PreparedRepository) -> tuple[str, ...]:
    """Qualified names of everything that the product code defines."""
    files = {
        path: content
        for path, content in repository.files.items()
        if path.endswith(".py") and repository.is_editable(path)
    }
    return tuple(
        definition.qualified_name
        for definitions in read_definitions(files).values()
        for definition in definitions
    )


def read_docstring(text: str, symbol: str) -> str:
    """What the author wrote about a function, method or class; empty when there is nothing."""
    node: ast.AST = parse_once(text)
    for part in symbol.split("."):
        inner = [
            item
            for item in ast.walk(node)
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and item.name == part
        ]
        if not inner:
            return ""
        node = inner[0]
    is_documented = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    return (ast.get_docstring(node) or "") if is_documented else ""


def _symbol_text(problem: Problem, parts: Sequence[BuiltPart]) -> str:
    repository = next(
        item.part.repository for item in parts if item.part.repository.name == problem.repository
    )
    lines = repository.files[problem.path].decode().split("\n")
    return "\n".join(lines[problem.first_line - 1 : problem.last_line])


def yield_table(parts: Sequence[BuiltPart], problems: Sequence[Problem]) -> list[Row]:
    """One row a repository and kind: tried, proven, published, and why the rest was refused."""
    published = Counter((problem.repository, problem.kind) for problem in problems)
    rows: list[Row] = []
    for built in parts:
        name = built.part.repository.name
        for kind in Kind:
            counts = {f: built.findings[kind, f] for f in Finding if built.findings[kind, f]}
            tried = sum(counts.values())
            if not tried:
                continue
            failing = [len(j.fail_to_pass) for c, j in built.proven if c.kind is kind]
            proven = counts.get(Finding.PROVEN, 0)
            row: Row = {
                "package": name,
                "kind": kind.value,
                "split": built.part.split.value,
                "tests": len(built.baseline.tests),
                "tried": tried,
                "proven": proven,
                "yield": round(proven / tried, 3),
                "published": published[name, kind.value],
                "median_failing": statistics.median(failing) if failing else 0,
            }
            refused = {f.value: n for f, n in counts.items() if f is not Finding.PROVEN}
            row["refused"] = ", ".join(f"{name} {n}" for name, n in sorted(refused.items()))
            rows.append(row)
    return rows


def summarise(made: ProblemSet, parts: Sequence[BuiltPart], failures: dict[str, str]) -> dict:
    """Figures of a set, for its artifact."""
    problems = made.problems
    lines = [problem.num_changed_lines for problem in problems]
    findings: Counter[str] = Counter()
    for built in parts:
        for (_, finding), count in built.findings.items():
            findings[finding.value] += count
    tried = sum(findings.values())
    return {
        "num_problems": len(problems),
        "num_candidates": tried,
        "yield_ratio": findings[Finding.PROVEN.value] / tried if tried else 0.0,
        "findings": dict(findings),
        "dropped": dict(made.dropped),
        "failures": failures,
        "kinds": dict(Counter(problem.kind for problem in problems)),
        "operators": dict(Counter(problem.operator for problem in problems)),
        "split_sizes": {
            split.value: sum(1 for item in problems if item.split is split) for split in Split
        },
        "repositories_by_split": {
            split.value: sorted({item.repository for item in problems if item.split is split})
            for split in Split
        },
        "changed_lines": _spread(lines) | {"bins": _histogram(lines)},
        "files_changed": _spread(
            [len({e.path for e in (*item.edits, *item.blocks)}) for item in problems]
        ),
        "prompt_characters": {
            level.value: _spread([len(item.prompts[level.value]) for item in problems])
            for level in PromptLevel
        }
        | {"asked": _spread([len(item.prompt) for item in problems])},
        "difficulty": _spread([item.difficulty or 0.0 for item in problems]),
        "difficulty_by_kind": {
            kind.value: _spread([i.difficulty or 0.0 for i in problems if i.kind == kind.value])
            for kind in Kind
        },
        "fail_to_pass": _spread([len(item.fail_to_pass) for item in problems]),
        "problems_with_hidden_tests": sum(1 for item in problems if item.hidden_tests),
        "problems_with_oracle": sum(1 for item in problems if item.oracle is not None),
        "questions_warranted": sum(1 for item in problems if item.question_warranted),
        "tests": {item.part.repository.name: len(item.baseline.tests) for item in parts},
        "unstable_tests": {item.part.repository.name: item.baseline.num_unstable for item in parts},
        "seconds_in_boxes": round(sum(item.seconds_in_boxes for item in parts), 1),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "minimum": ordered[0],
        "median": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "maximum": ordered[-1],
        "mean": round(statistics.fmean(ordered), 3),
    }


def _histogram(values: Sequence[int]) -> dict[str, int]:
    """How many lie above the bin before and up to each bound."""
    bounds = zip((0, *_BINS), (*_BINS, max([*values, _BINS[-1]])), strict=True)
    return {
        f"{low + 1}..{high}": sum(1 for value in values if low < value <= high)
        for low, high in bounds
        if high > low
    }
