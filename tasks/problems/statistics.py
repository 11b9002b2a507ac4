"""Figures of a problem set: yield by repository and kind, operators, splits, sizes."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ostinato.tasks.problems.building import BuiltPart
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.problems.proving.judging import Finding
from ostinato.tasks.problems.publishing import ProblemSet
from ostinato.tasks.records import Problem, Split

Row = dict[str, str | int | float]


def summarise(made: ProblemSet, parts: Sequence[BuiltPart], left_out: Mapping[str, str]) -> dict:
    """Figures of a set, for its artifact and its card."""
    problems = made.problems
    findings = count_findings(parts)
    tried = findings.total()
    return {
        "num_problems": len(problems),
        "num_candidates": tried,
        "yield_ratio": findings[Finding.PROVEN] / tried if tried else 0.0,
        "findings": {finding.value: count for finding, count in findings.items()},
        "dropped": dict(made.dropped),
        "left_out": dict(left_out),
        "split_sizes": {
            split.value: sum(item.split is split for item in problems) for split in Split
        },
        "repositories_by_split": {
            split.value: sorted({item.repository for item in problems if item.split is split})
            for split in Split
        },
        **describe_shape(problems),
        "tests": {item.part.repository.name: len(item.baseline.tests) for item in parts},
        "unstable_tests": {item.part.repository.name: item.baseline.num_unstable for item in parts},
        "yield_table": yield_table(parts, problems),
    }


def describe_shape(problems: Sequence[Problem]) -> dict:
    """Kinds, operators and sizes of problems."""
    return {
        "kinds": _count(problem.kind for problem in problems),
        "operators": _count(problem.operator for problem in problems),
        "changed_lines": _spread([problem.num_changed_lines for problem in problems]),
        "prompt_characters": _spread([len(problem.prompt) for problem in problems]),
        "fail_to_pass": _spread([len(problem.fail_to_pass) for problem in problems]),
        "problems_with_hidden_tests": sum(bool(item.hidden_tests) for item in problems),
        "problems_with_oracle": sum(item.oracle is not None for item in problems),
        "questions_warranted": sum(item.question_warranted for item in problems),
    }


def count_findings(parts: Sequence[BuiltPart]) -> Counter[Finding]:
    """Candidates by what became of them."""
    findings: Counter[Finding] = Counter()
    for built in parts:
        for (_, finding), count in built.findings.items():
            findings[finding] += count
    return findings


def yield_table(parts: Sequence[BuiltPart], problems: Sequence[Problem]) -> list[Row]:
    """One row per repository and kind: tried, proven, published, and the refusals by reason."""
    published = Counter((problem.repository, problem.kind) for problem in problems)
    rows: list[Row] = []
    for built in parts:
        name = built.part.repository.name
        for kind in Kind:
            counts = {f: built.findings[kind, f] for f in Finding if built.findings[kind, f]}
            tried, proven = sum(counts.values()), counts.pop(Finding.PROVEN, 0)
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


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


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
