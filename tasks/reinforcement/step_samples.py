"""Samples of a step, with hints if the objective distils them.

The record of a problem says which line is wrong. For an attempt that its first edit did not solve,
the hint names that line in one more tool result before the turn of that edit.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ostinato.infra.agent.transcript import Transcript, TurnRecord
from ostinato.infra.platform.errors import TrainingError
from ostinato.models.rendering import Renderer, load_renderer
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.records import Group, Hint, LineEdit, Problem, Sample, Trajectory
from ostinato.tasks.reinforcement.learning.batches.credit import (
    is_edit,
    sampled_ranges,
    samples_of_step,
)
from ostinato.tasks.reinforcement.records import ReinforcementRequest


class StepSamples:
    """Samples of one run's groups."""

    def __init__(self, request: ReinforcementRequest) -> None:
        self._objective = request.learning.objective
        self._renderer: Renderer | None = None
        self._edits: dict[str, LineEdit] = {}
        if self._objective.hint_coefficient:
            self._renderer = load_renderer(Path(request.checkpoint_directory))
            problems = load_problems(Path(request.problems_directory), request.split)
            self._edits = {
                problem.problem_id: edit for problem in problems for edit in _only(problem)
            }

    def of(self, groups: Iterable[Group]) -> list[Sample]:
        """Samples of a step, in the order of `samples_of_step`."""
        groups = tuple(groups)
        samples = samples_of_step(groups, self._objective)
        if self._renderer is None:
            return samples
        hints: dict[str, tuple[int, Hint]] = {}
        for group in groups:
            edit = self._edits.get(group.problem_id)
            if edit is None:
                continue
            for member in group.trajectories:
                found = find_hint(member, edit, self._renderer)
                if found is not None:
                    hints[member.trajectory_id] = found
        return list(_with_hints(samples, hints))


def find_hint(
    trajectory: Trajectory, edit: LineEdit, renderer: Renderer
) -> tuple[int, Hint] | None:
    """Number of the segment with the first edit, and the hint before that edit. None if there is no edit, or if a
    single edit solved the problem.
    """
    transcript = trajectory.transcript
    edits = sum(map(is_edit, transcript.turns))
    if not edits or (trajectory.is_solved and edits == 1):
        return None
    number, start, end = _first_edit(transcript)
    tokens = transcript.segments[number].token_ids_T[:start].tolist()
    header = renderer.append_results([])
    if tokens[-len(header) :] != header:
        raise TrainingError(
            f"{trajectory.trajectory_id}: tokens before its first edit end in {tokens[-len(header) :]}, "
            f"wanted the answer's header {header}"
        )
    hint_tokens = renderer.append_results([describe_place(transcript.turns, edit)])
    context = (*tokens[: -len(header)], *hint_tokens)
    return number, Hint(turn_start=start, turn_end=end, context_tokens=context)


def describe_place(turns: Sequence[TurnRecord], edit: LineEdit) -> str:
    """Text of the hint. It names the wrong line by its tag if the attempt saw that tag before its first edit."""
    shown = re.compile(rf"^(<L\d+>){re.escape(edit.broken_text)}$", re.MULTILINE)
    place = f"line {edit.line_number} of {edit.path}"
    for turn in turns:
        if is_edit(turn):
            break
        for result in turn.results:
            if tagged := shown.search(result):
                place = tagged[1]
    return f"the mistake is at {place}"


def _only(problem: Problem) -> tuple[LineEdit, ...]:
    """The wrong line of a problem, or nothing if it has several."""
    return problem.edits if len(problem.edits) == 1 and not problem.blocks else ()


def _first_edit(transcript: Transcript) -> tuple[int, int, int]:
    """Segment and token range of the first turn that edits."""
    for number, start, end, turn in sampled_ranges(transcript):
        if turn is not None and is_edit(turn):
            return number, start, end
    raise TrainingError("no range of sampled tokens belongs to the first edit, wanted one per turn")


def _with_hints(samples: Sequence[Sample], hints: dict[str, tuple[int, Hint]]) -> Iterator[Sample]:
    """The samples. Each hint is attached to the first sample of its segment that trains its turn."""
    for sample in samples:
        number, hint = hints.get(sample.trajectory_id, (-1, None))
        part = sample.sample_id.rpartition("/")[2].partition(".")[0]
        if hint is None or int(part) != number or not sample.segment.loss_mask_T[hint.turn_start]:
            yield sample
            continue
        yield sample.model_copy(update={"hint": hint})
