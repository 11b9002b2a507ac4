"""`ostinato show RUN|GROUP|TRAJECTORY`: attempts of RL runs and evaluations, as they were stored."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.ledger.rows import JournalRow
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.evaluation.attempts import EVALUATION, TRAJECTORIES_FILE
from ostinato.tasks.problem_sets import PROBLEMS_FILE
from ostinato.tasks.rollout.payload import group_from_bytes

_FILES = "{}/files/{}"  # of an artifact, below its prefix
_PROBLEM_KINDS = ("environments", "problems")
_WITHOUT_ARRAYS = {"transcript": {"segments"}}


def find_attempts(settings: Settings, name: str) -> list[dict[str, Any]]:
    """Attempts of a trajectory, group or run by its id, with their prompts. ConfigError when there is
    none.
    """
    ledger, objects = open_ledger(settings), open_object_store(settings)
    if name.startswith(f"{EVALUATION}."):
        found = list(_evaluated(ledger, objects, name))
    else:
        found = list(_rolled_out(objects, ledger.journal.named(name)))
    if not found:
        raise ConfigError(
            f"nothing is called {name!r}, wanted kind/name@version of an artifact, or the id of an RL "
            "run (its folder in runs/), of a group or of a trajectory"
        )
    prompts = _prompts(ledger, objects, {attempt["problem_id"] for attempt in found})
    return [{"prompt": prompts.get(one["problem_id"]), **one} for one in found]


def _rolled_out(objects: ObjectStore, rows: Sequence[JournalRow]) -> Iterator[dict[str, Any]]:
    for key, members in groupby(rows, key=lambda row: row.object_key):
        stored = {}
        if key is not None and objects.exists(key):
            group = group_from_bytes(objects.get_bytes(key))
            stored = {one.trajectory_id: one for one in group.trajectories}
        for row in members:
            journal = row.model_dump(mode="json")
            whole = stored.get(row.trajectory_id)
            if whole is None:  # the machine failed, or its group is not stored
                yield journal
            else:
                yield whole.model_dump(mode="json", exclude=_WITHOUT_ARRAYS) | {"journal": journal}


def _evaluated(ledger: Ledger, objects: ObjectStore, name: str) -> Iterator[dict[str, Any]]:
    """The attempt or group in the newest evaluation that has it."""
    for card in sorted(ledger.artifacts.list("scorecard"), key=lambda row: -row.created_at):
        key = _FILES.format(card.object_prefix, TRAJECTORIES_FILE)
        if not objects.exists(key):
            continue
        attempts = [json.loads(line) for line in objects.get_bytes(key).splitlines()]
        found = [one for one in attempts if name in (one["trajectory_id"], one["group_id"])]
        if found:
            evaluation = f"{card.kind}/{card.name}@{card.version}"
            yield from ({**one, "evaluation": evaluation} for one in found)
            return


def _prompts(ledger: Ledger, objects: ObjectStore, problem_ids: set[str]) -> dict[str, str]:
    """Prompts of problems, from the problem sets of this ledger."""
    prompts: dict[str, str] = {}
    for row in (row for kind in _PROBLEM_KINDS for row in reversed(ledger.artifacts.list(kind))):
        key = _FILES.format(row.object_prefix, PROBLEMS_FILE)
        if prompts.keys() >= problem_ids or not objects.exists(key):
            continue
        for line in objects.get_bytes(key).splitlines():
            problem = json.loads(line)
            if problem["problem_id"] in problem_ids:
                prompts.setdefault(problem["problem_id"], problem["prompt"])
    return prompts


def describe(attempts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines for the console: all of one attempt, a line each of several."""
    if len(attempts) == 1:
        yield from _whole(attempts[0])
        return
    for attempt in attempts:
        journal = attempt.get("journal", attempt)
        reward = journal["reward"]
        total = reward["total"] if isinstance(reward, dict) else reward
        worth = "no reward" if total is None else f"reward {total:+.3f}"
        state = f", {journal['state']}" if "state" in journal else ""
        yield f"{attempt['trajectory_id']}  {attempt['outcome']}, {worth}{state}"


def _whole(attempt: dict[str, Any]) -> Iterator[str]:
    for name in ("trajectory_id", "problem_id", "evaluation", "outcome", "reason"):
        if attempt.get(name):
            yield f"{name.replace('_', ' ')}: {attempt[name]}"
    journal = attempt.get("journal", attempt)
    if "state" in journal:
        step = journal["trained_step"]
        trained = "" if step is None else f" at step {step}"
        yield f"journal: {journal['state']}{trained}, weight version {journal['weight_version']}"
    yield f"\nPROMPT\n{attempt['prompt'] or 'its problem set is not in this ledger'}"
    if "transcript" not in attempt:
        yield "\nnothing more was stored of it"
        return
    for number, turn in enumerate(attempt["transcript"]["turns"], 1):
        yield f"\nTURN {number}, {turn['generated_tokens']} tokens\n{turn['text']}"
        for index, call in enumerate(turn["calls"]):
            yield f"CALL {call['tool']} {call['arguments']}: {call['status']}"
            yield from turn["results"][index : index + 1]
    yield from _judged(attempt)


def _judged(attempt: dict[str, Any]) -> Iterator[str]:
    for patch in attempt["changed_files"].values():
        yield f"\nDIFF\n{patch}"
    verdict = attempt["verdict"]
    if verdict is not None:
        word = "passed" if verdict["passed"] else "not passed"
        seen = f"{verdict['tests_passed']} of {verdict['tests_required']} tests"
        yield f"\nVERDICT {word}, {seen}. {verdict['detail']}"
    reward = attempt["reward"]
    yield f"\nREWARD {reward['total']:+.3f}"
    for name, term in reward["terms"].items():
        weight = reward["weights"].get(name)
        if weight != 0:
            how = "" if weight is None else f" = {reward['values'][name]:g} x {weight:g}"
            yield f"  {name} {term:+.3f}{how}"
    for pattern, evidence in reward["flags"].items():
        yield f"  flag {pattern}: {evidence}"
