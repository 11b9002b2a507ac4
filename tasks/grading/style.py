"""Lint findings that a change brings into product code.

The count for the style term: the linter is the one the agent's read_lints tool runs, the baseline
is the state the attempt began with. Starts one linter process a file; nothing runs when the term
has no weight.
"""

from ostinato.infra.agent.tools.lints import LINTED_SUFFIXES, new_lints
from ostinato.tasks.grading.change import AttemptChange


async def count_new_lints(change: AttemptChange) -> int:
    """Findings beyond the baseline's over all counted files. Removed files have none."""
    total = 0
    for file in change.counted:
        if file.after is None or not file.path.endswith(LINTED_SUFFIXES):
            continue
        before = None if file.before is None else file.before.decode(errors="replace")
        total += len(await new_lints(before, file.after.decode(errors="replace"), file.path))
    return total
