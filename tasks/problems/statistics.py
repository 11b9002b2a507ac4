"""Figures of a problem set: yield by repository and kind, operators, splits."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ostinato.tasks.problems.building import BuiltPart
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.problems.proving.judging import ProofOutcome
from ostinato.tasks.problems.publishing import ProblemSet
from ostinato.tasks.records import Problem, Split

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


def count_published(problems: Sequence[Problem]) -> dict[str, dict[str, int]]:
    """Number of problems by split, kind and operator."""
    return {
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
