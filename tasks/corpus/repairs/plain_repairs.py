"""Repairs in plain text, for models that other people trained: edit_file calls, then a closing word."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.full.calls import write_call
from ostinato.infra.agent.tools.names import EDIT_FILE
from ostinato.tasks.corpus.repairs.demonstrator import AnswerScript
from ostinato.tasks.corpus.repairs.transcripts import FIXED
from ostinato.tasks.problems.prompt_facts import facts_of
from ostinato.tasks.records import LineEdit, Problem


@dataclass(slots=True)
class _Lines:
    """A file while it is edited line by line. No edit adds or takes lines."""

    lines: list[str]

    def replace(self, edit: LineEdit) -> tuple[str, str]:
        """Old and new text of the edit, with as many lines around as make the old text unique."""
        first = last = edit.line_number - 1
        whole = "\n".join(self.lines)
        while whole.count("\n".join(self.lines[first : last + 1])) > 1:
            first, last = max(first - 1, 0), last + (first == 0)
        old = "\n".join(self.lines[first : last + 1])
        self.lines[edit.line_number - 1] = edit.gold_text
        return old, "\n".join(self.lines[first : last + 1])


def write_repair(
    problem: Problem, broken: Mapping[str, bytes], harness: HarnessConfig
) -> str | None:
    """The calls that put the gold lines back. None where a wrong line is not in the prompt."""
    seen = {
        (file.path, file.first_line + number)
        for file in facts_of(problem, broken, harness).recent_files
        for number in range(file.text.count("\n") + 1)
    }
    if problem.blocks or any((edit.path, edit.line_number) not in seen for edit in problem.edits):
        return None
    return "\n".join(_calls(problem, broken))


def _calls(problem: Problem, broken: Mapping[str, bytes]) -> Iterator[str]:
    files = {path: _Lines(content.decode().split("\n")) for path, content in broken.items()}
    for edit in sorted(problem.edits, key=lambda edit: (edit.path, edit.line_number)):
        old, new = files[edit.path].replace(edit)
        yield write_call(EDIT_FILE, {"path": edit.path, "old": old, "new": new})


def repair_plainly(calls: str) -> AnswerScript:
    """The conversation of a repair: all calls in one answer, then the closing word."""
    yield calls
    yield FIXED
