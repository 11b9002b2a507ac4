"""How hard a problem looks before anybody tried it.

The estimate: a logistic score of its shape. It orders a curriculum until solve rates are measured,
and claims no more than that.
"""

import math

from ostinato.tasks.problems.set_config import Kind

# How much each kind asks for beside its size: one line is found by its symptom, a feature must be
# designed again.
_KIND = {
    Kind.MUTATION: -1.6,
    Kind.COMBINED: -0.4,
    Kind.DELETED_FUNCTION: -0.6,
    Kind.DELETED_FEATURE: 0.2,
    Kind.MINED_COMMIT: 0.0,
}


def estimate_difficulty(
    kind: Kind,
    *,
    num_changed_lines: int,
    num_files: int,
    num_edits: int,
    num_failing: int,
    docstring_kept: bool,
    prompt_names_symbol: bool,
) -> float:
    """0 (easy) to 1: grows with lines, files, separate edits and broken behaviours."""
    score = _KIND[kind]
    score += 0.55 * math.log2(max(1, num_changed_lines))
    score += 0.7 * (num_files - 1) + 0.35 * (num_edits - 1 if kind is Kind.COMBINED else 0)
    score += 0.12 * math.log2(max(1, num_failing))
    score += 0.0 if docstring_kept else 0.5
    score += 0.0 if prompt_names_symbol else 0.6
    return round(1.0 / (1.0 + math.exp(1.5 - score)), 4)
