"""State tracking after LoCoDiff: rebuild a file from its first state and later patches.

The measure is the mean distance in characters (Levenshtein), because exact equality is too coarse
for small models.
"""

import random
from collections.abc import Sequence
from statistics import fmean

from rapidfuzz.distance import Levenshtein

from ostinato.infra.platform.diffs import changed_lines
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.tasks.evaluation.base_models.completion import Prompt
from ostinato.tasks.evaluation.base_models.config import StateTracking

_FENCE = "```"


class TrackedFile(Record):
    """A file's first state, its patches as unified diffs, and its last state."""

    path: str
    before: str
    patches: tuple[str, ...]
    after: str


def make_files(
    texts: Sequence[str], *, count: int, lines: int, patches: int, seed: int
) -> list[TrackedFile]:
    """At most `count` pieces of source with patches that each remove or repeat a line, or swap it
    with the next. Skips pieces with the prompt's code fence. Raises ConfigError if none is left.
    """
    rng = random.Random(seed)
    pieces = [piece for text in texts for piece in _pieces(text, lines)]
    if not pieces:
        raise ConfigError(
            f"{len(texts)} sources hold no piece of tracked_lines={lines} lines without {_FENCE}, wanted at "
            "least one; name a longer code base or fewer lines"
        )
    rng.shuffle(pieces)
    return [
        _patched(f"module_{number}.py", piece, patches, rng)
        for number, piece in enumerate(pieces[:count])
    ]


def _pieces(text: str, lines: int) -> list[str]:
    rows = [line for line in text.splitlines() if line.strip()]
    pieces = ["\n".join(rows[at : at + lines]) for at in range(0, len(rows) - lines + 1, lines)]
    return [piece for piece in pieces if _FENCE not in piece]


def _patched(path: str, piece: str, patches: int, rng: random.Random) -> TrackedFile:
    state, diffs = piece.split("\n"), []
    for _ in range(patches):
        following = _change(state, rng)
        hunks = changed_lines("\n".join([*state, ""]), "\n".join([*following, ""]))
        diffs.append("\n".join((f"--- {path}", f"+++ {path}", *hunks)))
        state = following
    return TrackedFile(path=path, before=piece, patches=tuple(diffs), after="\n".join(state))


def _change(state: Sequence[str], rng: random.Random) -> list[str]:
    """A state that differs in one line."""
    changed = list(state)
    while changed == list(state):
        at = rng.randrange(len(changed))
        kind = rng.choice(("remove", "repeat", "swap"))
        if kind == "remove" and len(changed) > 1:
            del changed[at]
        elif kind == "repeat":
            changed.insert(at, changed[at])
        elif at + 1 < len(changed):
            changed[at], changed[at + 1] = changed[at + 1], changed[at]
    return changed


def prompt_of(file: TrackedFile, answer_tokens: int) -> Prompt:
    """First state, patches, and the opening of the last state."""
    patches = "\n\n".join(f"{_FENCE}diff\n{patch}\n{_FENCE}" for patch in file.patches)
    task = (
        f"The file {file.path}:\n\n{_FENCE}python\n{file.before}\n{_FENCE}\n\n"
        f"These patches were applied to it, in this order:\n\n{patches}\n\n"
    )
    return Prompt(
        name=file.path,
        text=f"{task}The file {file.path} after all of them:\n\n{_FENCE}python\n",
        ends=(f"\n{_FENCE}",),
        question=f"{task}Answer with {file.path} after all of them, whole, as one code block.",
        answer_tokens=answer_tokens,
    )


def score(files: Sequence[TrackedFile], answers: Sequence[str | None]) -> StateTracking:
    """Distances of the answers. A missing answer counts as an empty file."""
    texts = [answer or "" for answer in answers]
    distances = [
        Levenshtein.distance(text.strip("\n"), file.after)
        for file, text in zip(files, texts, strict=True)
    ]
    return StateTracking(
        mean_distance=fmean(distances),
        copied_distance=fmean(Levenshtein.distance(file.before, file.after) for file in files),
        exact=sum(distance == 0 for distance in distances),
        files=len(files),
        too_long=sum(answer is None for answer in answers),
    )
