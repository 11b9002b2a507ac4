"""The part of a proven problem set that a recipe uses."""

from collections import Counter
from pathlib import Path

from ostinato.infra.platform.errors import ProblemError
from ostinato.tasks.problems.config import ProblemSelection, ProblemsResult
from ostinato.tasks.problems.published import PROBLEMS_FILE, load_problems
from ostinato.tasks.records import Problem, Split


def choose_problems(result: ProblemsResult, selection: ProblemSelection) -> ProblemsResult:
    """The set with the problems that the selection keeps, on disk too, and their counts."""
    if selection == ProblemSelection():
        return result
    directory = Path(result.directory)
    kept = [problem for problem in load_problems(directory) if _is_kept(problem, selection)]
    if not kept:
        raise ProblemError(
            f"[selection] keeps none of {result.num_problems} problems, wanted at least 1: {selection}"
        )
    lines = "".join(problem.model_dump_json() + "\n" for problem in kept)
    (directory / PROBLEMS_FILE).write_text(lines)
    counts = {
        "num_problems": len(kept),
        "split_sizes": {split.value: sum(item.split is split for item in kept) for split in Split},
        "kinds": dict(Counter(problem.kind for problem in kept).most_common()),
        "operators": dict(Counter(item.operator for item in kept if item.operator).most_common()),
    }
    return result.model_copy(update=counts)


def _is_kept(problem: Problem, selection: ProblemSelection) -> bool:
    has_kind = not selection.kinds or problem.kind in selection.kinds
    num_lines = problem.last_line - problem.first_line + 1
    return has_kind and (selection.max_lines is None or num_lines <= selection.max_lines)
