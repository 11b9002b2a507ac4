"""Hints of train problems: the wrong line, told before the turn of the first edit that missed it."""

from pathlib import Path

import pytest

from ostinato.infra.agent.transcript import TurnRecord
from ostinato.models.rendering import Renderer, load_renderer
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.records import Group, Problem, Split, Trajectory
from ostinato.tasks.reinforcement.learning.config import LearningConfig, ObjectiveConfig
from ostinato.tasks.reinforcement.records import ReinforcementRequest
from ostinato.tasks.reinforcement.step_samples import StepSamples, find_hint
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.miniature import make_checkpoint, make_problem_set
from tests.fakes.rollouts import make_trajectory
from tests.fakes.transcripts import make_call, masked_segment, transcript_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    make_checkpoint(directory / "start")
    make_problem_set(directory / "problems")
    return directory


def problem_of(run: Path) -> Problem:
    return load_problems(run / "problems", Split.TRAIN)[0]


def attempt(
    renderer: Renderer, problem: Problem, index: int, edits: int, *, solved: bool
) -> Trajectory:
    """Reads the function, then edits as often as told, then says a last word."""
    [edit] = problem.edits
    view = f"<L1>def f():\n<L2>{edit.broken_text}"
    spoken = ["read", *["edit"] * edits, "Done."]
    calls = ["read_file", *["edit_file"] * edits, None]
    results = [view, *["ok"] * edits, None]
    ids, mask, turns = renderer.start(problem.prompt), [], []
    mask += [False] * len(ids)
    for text, tool, result in zip(spoken, calls, results, strict=True):
        answer = renderer.encode_answer(text)
        ids, mask = [*ids, *answer], [*mask, *[True] * len(answer)]
        made = ()
        if tool is not None and result is not None:
            made = (make_call(tool),)
            told = renderer.append_results([result])
            ids, mask = [*ids, *told], [*mask, *[False] * len(told)]
        turns.append(
            TurnRecord(
                generated_tokens=len(answer),
                text=text,
                calls=made,
                results=() if result is None else (result,),
            )
        )
    segment = masked_segment(mask, ids, layers=2, experts=2)
    transcript = transcript_of(turns, (segment,), message="Done.")
    request = AttemptRequest(f"g.t{index}", "g", problem, index, retry=0, seed=index)
    return make_trajectory(request, solved=solved).model_copy(update={"transcript": transcript})


def test_the_hint_is_a_result_with_the_tag_of_the_wrong_line(run: Path) -> None:
    renderer, problem = load_renderer(run / "start"), problem_of(run)
    missed = attempt(renderer, problem, 0, edits=2, solved=False)
    found = find_hint(missed, problem.edits[0], renderer)
    assert found is not None
    number, hint = found
    tokens = missed.transcript.segments[number].token_ids_T.tolist()
    turn = tokens[hint.turn_start : hint.turn_end]
    assert turn == renderer.encode_answer("edit")
    told = renderer.append_results(["the mistake is at <L2>"])
    header = renderer.append_results([])
    assert list(hint.context_tokens) == [
        *tokens[: hint.turn_start - len(header)],
        *told,
    ]
    assert tokens[: hint.turn_start][-len(header) :] == header == told[-len(header) :]


def test_an_edit_that_solved_and_an_attempt_without_any_need_no_hint(run: Path) -> None:
    renderer, problem = load_renderer(run / "start"), problem_of(run)
    [edit] = problem.edits
    for edits, solved, is_hinted in ((1, True, False), (0, False, False), (2, True, True)):
        made = attempt(renderer, problem, 0, edits, solved=solved)
        assert (find_hint(made, edit, renderer) is not None) == is_hinted


@pytest.mark.parametrize("credit", ["trajectory", "edit"])
def test_each_hinted_turn_stands_on_one_sample_that_trains_it(run: Path, credit: str) -> None:
    renderer, problem = load_renderer(run / "start"), problem_of(run)
    objective = ObjectiveConfig.model_validate({"hint_coefficient": 0.1, "credit": credit})
    request = ReinforcementRequest(
        run_id="r",
        checkpoint_directory=str(run / "start"),
        problems_directory=str(run / "problems"),
        learning=LearningConfig(objective=objective),
    )
    group = Group(
        group_id="g",
        problem_id=problem.problem_id,
        trajectories=tuple(
            attempt(renderer, problem, index, edits, solved=solved)
            for index, (edits, solved) in enumerate([(1, False), (1, True), (3, True)])
        ),
    )
    samples = StepSamples(request).of([group])
    hinted = [sample for sample in samples if sample.hint is not None]
    assert [sample.trajectory_id for sample in hinted] == ["g.t0", "g.t2"]
    for sample in hinted:
        assert sample.hint is not None
        span = slice(sample.hint.turn_start, sample.hint.turn_end)
        assert sample.segment.loss_mask_T[span].all()
    off = request.model_copy(update={"learning": LearningConfig()})
    assert all(sample.hint is None for sample in StepSamples(off).of([group]))
