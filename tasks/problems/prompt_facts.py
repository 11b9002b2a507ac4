"""What an agent is shown of a problem beside its prompt, alike in training, evaluation and demonstrations."""

from collections.abc import Mapping

from ostinato.infra.agent.config import HarnessConfig, PromptFacts, RecentFile
from ostinato.infra.agent.regions import RegionError, open_region
from ostinato.tasks.records import Problem


def facts_of(problem: Problem, broken: Mapping[str, bytes], harness: HarnessConfig) -> PromptFacts:
    """The broken function as an open file, where the harness shows one. `broken`: files as the agent finds them."""
    if not harness.shown_lines or problem.path not in broken or not problem.symbol:
        return PromptFacts()
    text = broken[problem.path].decode()
    try:
        region = open_region(text, f"{problem.path}::{problem.symbol}")
    except RegionError:  # the whole function was deleted
        return PromptFacts()
    shown = "\n".join(region.lines[: harness.shown_lines])
    recent = RecentFile(path=problem.path, first_line=region.first_line, text=shown)
    return PromptFacts(recent_files=(recent,))
