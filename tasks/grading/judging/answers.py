"""Verdicts on problems that a final message solves: questions about code, and code in which nothing is wrong.

`judge_reply` fails an attempt that changed a file of the repository. An answer passes if every place that it names is
an accepted one, so that a list of guesses fails. Every place that counts for the attempt also counts against it. A
thought is no part of the message, and an attempt that did not end by a message has none.
"""

import re
import time
from collections.abc import Iterator, Mapping

from ostinato.infra.agent.dialects.spans import no_calls
from ostinato.infra.agent.dialects.thoughts import part_answer
from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.tasks.grading.change import AttemptChange, is_runner_file
from ostinato.tasks.records import CodePlace, Problem, Verdict, WantedReply

MARGIN_LINES = 1  # of a named range outside the accepted lines: the `if` above a `raise`
_MAX_CHARACTERS = 20_000  # of a message that is read; a longer one fails
_PATH = r"[\w./-]*\w\.[A-Za-z]\w*"
_RANGE = r"L?\d{1,6}(?!\d)(?:\s?(?:-|\u2013|\.\.|to|through)\s?L?\d{1,6}(?!\d))?"
_MORE = rf"(?:\s?(?:,|;|/|&|\band\b|\bor\b)(?:\s?(?:and|or)\b)?\s?(?:lines?\s)?{_RANGE}(?![\w.(]))*"
_QUOTES = r"""[`'"*\]]*"""
_REFERENCE = re.compile(
    rf"""\blines?\s(?P<before>{_RANGE}{_MORE})\s(?:of|in|from|at)\s(?:the\s)?(?:file\s|module\s)?[`'"*\[]*(?P<of>{_PATH})"""
    rf"""|(?<![\w/.-])(?P<path>{_PATH})(?:{_QUOTES}\s?[:#|]\s?{_QUOTES}(?P<after>{_RANGE}(?::\d+(?!\d))?{_MORE}))?"""
    rf"""|\b(?:lines?[\s:#]{{1,2}}(?=[L\d])|L(?=\d))(?P<alone>{_RANGE}{_MORE})""",
    re.IGNORECASE,
)
_NUMBERS = re.compile(r"(\d+)(?:\s?(?:-|\u2013|\.\.|to|through)\s?L?(\d+))?", re.IGNORECASE)
_CLAIMS = re.compile(
    r"\b(?:fixed|solved|resolved|repaired|corrected|patched)\b"
    r"|\b(?:I|we)(?:'ve| have)?(?: now| also)? (?:changed|edited|updated|modified|replaced|rewrote|added|removed)\b"
    r"|\b(?:there (?:is|was)|found|has|contains|identified) (?:a|an|the|one|two|some)\b.{0,30}\b(?:bug|defect|mistake|error)"
    r"|\b(?:bugs?|defects?|mistakes?) (?:is|are|was|lies|comes)\b|\b(?:is|was) (?:broken|buggy|faulty|wrong|incorrect)\b",
    re.IGNORECASE,
)
_DENIES = re.compile(
    r"n['\u2019]t\b|\b(?:no|not|none|nothing|never|neither|nor|without|cannot|unable|isnt|free of)\b",
    re.IGNORECASE,
)


def judge_reply(problem: Problem, change: AttemptChange, transcript: Transcript) -> Verdict:
    """The verdict on an attempt at a problem with `reply`. Its detail names the accepted places, for the operator."""
    assert problem.reply is not None
    started, known, places = time.perf_counter(), change.repository, problem.reply.places
    # running code leaves other new files
    changed = [file.path for file in change.counted]
    changed += [
        path
        for path in change.ignored_paths
        if path in known.files or known.is_test(path) or is_runner_file(path)
    ]
    refusal = f"changed {', '.join(changed[:3])}, wanted no change" if changed else ""
    refusal = refusal or _refuse_message(read_message(transcript), problem.reply, known.files)
    wanted = ", ".join(map(str, places)) or "that nothing is wrong"
    return Verdict(
        problem_id=problem.problem_id,
        passed=not refusal,
        tests_required=1,
        tests_passed=int(not refusal),
        outcomes={"final message": "failed" if refusal else "passed"},
        detail=f"{refusal or 'the final message is right'}; accepted: {wanted}",
        wall_seconds=time.perf_counter() - started,
        ignored_paths=change.ignored_paths,
    )


def read_message(transcript: Transcript) -> str:
    """The final message without its thoughts. Empty if the attempt ended in another way."""
    if transcript.end_reason is not EndReason.FINISHED:
        return ""
    text = transcript.final_message
    is_opened = bool(transcript.turns) and transcript.turns[-1].begins_in_thought
    for begin, end in reversed(part_answer(text, no_calls, is_opened=is_opened).thoughts):
        text = text[:begin] + text[end:]
    return text.strip()


def _refuse_message(message: str, reply: WantedReply, paths: Mapping[str, bytes]) -> str:
    """Reason why a message does not solve the problem. Empty: it does."""
    if not 0 < len(message) <= _MAX_CHARACTERS:
        return f"final message of {len(message)} characters, wanted 1 to {_MAX_CHARACTERS}"
    if not reply.places:
        claim = find_claim(message)
        return f"says that something is or was wrong: {claim}" if claim else ""
    named = list(read_places(message, paths))
    if others := [place for place in named if not any(_fits(place, one) for one in reply.places)]:
        return f"names other places: {', '.join(map(str, others[:3]))}"
    found = sum(any(_fits(place, one) for place in named) for one in reply.places)
    wanted = len(reply.places) if reply.needs_all else 1
    return "" if found >= wanted else f"names {found} places as path:line, wanted {wanted}"


def _fits(named: CodePlace, accepted: CodePlace) -> bool:
    """Whether a named place lies in an accepted one, apart from a small margin."""
    if named.path != accepted.path:
        return False
    first = max(named.first_line, accepted.first_line)
    shared = min(named.last_line, accepted.last_line) - first + 1
    return shared > 0 and named.last_line - named.first_line + 1 - shared <= MARGIN_LINES


def read_places(message: str, paths: Mapping[str, bytes]) -> Iterator[CodePlace]:
    """Places that a text names: `a/b.py:12-14`, `a/b.py line 12`, `lines 12 and 15 of a/b.py`, `a/b.py#L12`, in
    Markdown or not. A line without a file is one of the file named last. `paths`: files of the repository, whose
    ends also name them where only one fits.
    """
    path, waiting = "", ""
    for match in _REFERENCE.finditer(" ".join(message.split())):
        numbers = match["before"] or match["after"] or match["alone"] or ""
        if stated := match["of"] or match["path"]:
            resolved = _resolve(stated, paths)
            if not numbers and resolved not in paths:
                continue  # a word with a dot
            path, numbers = resolved, f"{numbers} {waiting}"
        waiting = "" if path else f"{waiting} {numbers}"  # for the file that is named first
        for one in _NUMBERS.finditer(re.sub(r":\d+", "", numbers)) if path else ():
            first = int(one[1])
            if first:
                last = max(first, int(one[2] or first))
                yield CodePlace(path=path, first_line=first, last_line=last)


def _resolve(stated: str, paths: Mapping[str, bytes]) -> str:
    """The file of the repository that a text names. The text itself if none or several fit."""
    stated = stated.removeprefix("/repo/").removeprefix("./").lstrip("/")
    if stated in paths:
        return stated
    fitting = [path for path in paths if path.endswith(f"/{stated}") or stated.endswith(f"/{path}")]
    return fitting[0] if len(fitting) == 1 else stated


def find_claim(message: str) -> str:
    """The first sentence which says that something was wrong, or was changed. Empty: none."""
    sentences = re.split(r"(?<=[.!?])\s+|\n+", message)
    claims = (text for text in sentences if _CLAIMS.search(text) and not _DENIES.search(text))
    return next((text.strip()[:120] for text in claims if not text.rstrip().endswith("?")), "")
