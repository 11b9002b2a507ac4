"""`ostinato show` for stored attempts of RL runs, evaluations and users."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from ostinato.infra.agent.transcript import Segment, Transcript
from ostinato.infra.platform.cluster.workspace import REQUEST, RequestEnvelope, read_record
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.ledger.rows import InteractionRow, JournalRow
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.models.rendering.renderer import TOKENIZER_FILE
from ostinato.tasks.evaluation.attempts import EVALUATION, TRAJECTORIES_FILE
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.realtime.config import DistilConfig
from ostinato.tasks.realtime.feedback.distil import reward_of
from ostinato.tasks.rollout.payload import group_from_bytes

_FILE_KEY = "{}/files/{}"  # key of an artifact's file: prefix and name
_PROBLEM_KINDS = ("environments", "problems", "suite")
_WITHOUT_ARRAYS = {"transcript": {"segments"}}

TokenTexts = tuple[str, ...]  # by token id


@dataclass(frozen=True)
class Attempt:
    """A stored attempt."""

    facts: dict[str, Any]  # the record as JSON; without a record, the ledger's row
    segments: tuple[Segment, ...] = ()  # empty for evaluations, which do not store them
    token_texts: TokenTexts | None = None  # by token id; None: the tokenizer is not stored

    @property
    def is_solved(self) -> bool | None:
        """Whether the verdict was passed. None: there is no verdict."""
        verdict = self.facts.get("verdict")
        return None if verdict is None else verdict["passed"]

    @property
    def reward(self) -> float | None:
        """Sum of the reward's terms. None: the attempt was not graded, as those of users."""
        return total_reward(self.facts)


def find_attempts(settings: Settings, name: str) -> list[Attempt]:
    """Attempts by the id of a trajectory, group, run, interaction or session, with their prompts. ConfigError when
    nothing has this id.
    """
    objects = open_object_store(settings)
    with contextlib.closing(open_ledger(settings)) as ledger:
        found = _attempts_named(settings, ledger, objects, name)
        if not found:
            raise ConfigError(
                f"nothing is called {name!r}, wanted kind/name@version of an artifact, or the id of an RL "
                "run (its folder in runs/), of a group, a trajectory, an interaction or a session"
            )
        problem_ids = [attempt.facts.get("problem_id", "") for attempt in found]
        prompts = _prompts(ledger, objects, set(problem_ids))
    return [
        replace(attempt, facts={"prompt": prompts.get(problem_id), **attempt.facts})
        for attempt, problem_id in zip(found, problem_ids, strict=True)
    ]


def _attempts_named(
    settings: Settings, ledger: Ledger, objects: ObjectStore, name: str
) -> list[Attempt]:
    if name.startswith(f"{EVALUATION}."):
        return list(_attempts_of_evaluation(ledger, objects, name))
    if rows := ledger.journal.named(name):
        return list(_attempts_of_run(settings, ledger, objects, rows))
    return [_attempt_of_user(ledger, objects, row) for row in ledger.interactions.named(name)]


def find_examples(settings: Settings, run_id: str) -> dict[str, Attempt]:
    """The attempts with the best, the median and the worst reward in the last step of an RL run, by rank. Empty before
    the first step.
    """
    rows = open_ledger(settings).journal.named(run_id)
    last = max((row.trained_step for row in rows if row.trained_step is not None), default=None)
    trained = [row for row in rows if row.trained_step is not None and row.trained_step == last]
    graded = [(row.reward, row.trajectory_id) for row in trained if row.reward is not None]
    if not graded:
        return {}
    ordered = [name for _, name in sorted(graded)]
    names = {"best": ordered[-1], "median": ordered[len(ordered) // 2], "worst": ordered[0]}
    return {
        f"{rank} reward of step {last}": find_attempts(settings, name)[0]
        for rank, name in names.items()
    }


def _attempts_of_run(
    settings: Settings, ledger: Ledger, objects: ObjectStore, rows: Sequence[JournalRow]
) -> Iterator[Attempt]:
    texts = _token_texts_of_run(settings, ledger, objects, rows[0].run_id)
    for key, members in groupby(rows, key=lambda row: row.object_key):
        stored = {}
        if key is not None and objects.exists(key):
            group = group_from_bytes(objects.get_bytes(key))
            stored = {item.trajectory_id: item for item in group.trajectories}
        for row in members:
            journal = row.model_dump(mode="json")
            trajectory = stored.get(row.trajectory_id)
            if trajectory is None:  # the attempt's machine failed, or its group is not stored
                yield Attempt(journal)
            else:
                facts = trajectory.model_dump(mode="json", exclude=_WITHOUT_ARRAYS)
                yield Attempt(facts | {"journal": journal}, trajectory.transcript.segments, texts)


def _attempt_of_user(ledger: Ledger, objects: ObjectStore, row: InteractionRow) -> Attempt:
    """A user's turn. Its prompt is the text that the model read before its first sampled token."""
    facts = {
        "trajectory_id": row.interaction_id,
        "group_id": row.session_id,
        "interaction": row.model_dump(mode="json"),
    }
    if not objects.exists(row.object_key):
        return Attempt(facts)
    transcript = Transcript.from_bytes(objects.get_bytes(row.object_key))
    kept = transcript.model_dump(mode="json", exclude={"segments"})
    facts |= {"outcome": transcript.end_reason, "reason": transcript.detail, "transcript": kept}
    total, terms = reward_of(transcript, row.problem_kind, row.feedback, DistilConfig())
    facts["interaction"] |= {"reward": {"total": total, "terms": terms}}
    kind, _, version = row.checkpoint_id.partition("/")
    rows = ledger.artifacts.list(kind)
    served = [found for found in rows if f"{found.name}@{found.version}" == version]
    texts = _token_texts_of(objects, served[0].object_prefix) if served else None
    if transcript.segments and texts is not None:
        first = transcript.segments[0]
        read = first.token_ids_T[: int(first.loss_mask_T.argmax())]
        facts["prompt"] = "".join(texts[token] for token in read)
    return Attempt(facts, transcript.segments, texts)


def _token_texts_of_run(
    settings: Settings, ledger: Ledger, objects: ObjectStore, run_id: str
) -> TokenTexts | None:
    """Token texts of a run's checkpoint. For an unfinished run: of the checkpoint that it started from."""
    kind, _, fingerprint = run_id.partition("-")
    for row in ledger.artifacts.list(kind):
        if row.fingerprint == fingerprint:
            return _token_texts_of(objects, row.object_prefix)
    for path in (settings.home / "runs").glob(f"*/{run_id}/{REQUEST}"):
        envelope = read_record(path, RequestEnvelope)
        if envelope is not None:
            file = Path(envelope.request["checkpoint_directory"]) / TOKENIZER_FILE
            return _token_texts(file.read_bytes()) if file.exists() else None
    return None


def _token_texts_of(objects: ObjectStore, prefix: str) -> TokenTexts | None:
    key = _FILE_KEY.format(prefix, TOKENIZER_FILE)
    return _token_texts(objects.get_bytes(key)) if objects.exists(key) else None


@cache
def _token_texts(tokenizer_file: bytes) -> TokenTexts:
    """The text of each token. Bytes that do not form a whole character become U+FFFD."""
    tokenizer = Tokenizer.from_str(tokenizer_file.decode())
    decoder = ByteLevel()
    tokens = (tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size()))
    return tuple("" if token is None else decoder.decode([token]) for token in tokens)


def _attempts_of_evaluation(ledger: Ledger, objects: ObjectStore, name: str) -> Iterator[Attempt]:
    """The attempt or group, from the newest evaluation that contains it."""
    for card in sorted(ledger.artifacts.list("scorecard"), key=lambda row: -row.created_at):
        key = _FILE_KEY.format(card.object_prefix, TRAJECTORIES_FILE)
        if not objects.exists(key):
            continue
        attempts = [json.loads(line) for line in objects.get_bytes(key).splitlines()]
        found = [item for item in attempts if name in (item["trajectory_id"], item["group_id"])]
        if found:
            evaluation = f"{card.kind}/{card.name}@{card.version}"
            yield from (Attempt({**attempt, "evaluation": evaluation}) for attempt in found)
            return


def _prompts(ledger: Ledger, objects: ObjectStore, problem_ids: set[str]) -> dict[str, str]:
    """Prompts of problems, from the problem sets of this ledger."""
    prompts: dict[str, str] = {}
    for row in (row for kind in _PROBLEM_KINDS for row in reversed(ledger.artifacts.list(kind))):
        key = _FILE_KEY.format(row.object_prefix, PROBLEMS_FILE)
        if prompts.keys() >= problem_ids or not objects.exists(key):
            continue
        for line in objects.get_bytes(key).splitlines():
            problem = json.loads(line)
            if problem["problem_id"] in problem_ids:
                prompts.setdefault(problem["problem_id"], problem["prompt"])
    return prompts


def describe(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Lines for the console: a single attempt in full, or a line per attempt."""
    if len(attempts) == 1:
        yield from _describe_whole(attempts[0].facts)
    else:
        yield from (summarise(attempt.facts) for attempt in attempts)


def summarise(facts: dict[str, Any]) -> str:
    """A line about an attempt."""
    parts = [facts.get("outcome") or "no outcome"]
    if "interaction" in facts:
        parts += _feedback(facts["interaction"])
    else:
        reward = total_reward(facts)
        parts.append("no reward" if reward is None else f"reward {reward:+.3f}")
        journal = facts.get("journal", facts)
        parts += [journal["state"]] if "state" in journal else []
    return f"{facts['trajectory_id']}  {', '.join(parts)}"


def total_reward(facts: dict[str, Any]) -> float | None:
    """The reward of an attempt. None: not graded, as for users' attempts."""
    reward = facts.get("reward")
    return reward["total"] if isinstance(reward, dict) else reward


def _describe_whole(facts: dict[str, Any]) -> Iterator[str]:
    for name, value in headline(facts).items():
        yield f"{name}: {value}"
    yield f"\nPROMPT\n{facts['prompt'] or 'its problem set or tokenizer is not in this ledger'}"
    if "transcript" not in facts:
        yield "\nno more of it was stored"
        return
    turns = facts["transcript"]["turns"]
    if branches := branches_of(facts):
        yield "\nBRANCHES"
        yield from branches
    for number, turn in enumerate(turns, 1):
        yield f"\nTURN {number}, {turn['generated_tokens']} tokens\n{turn['text']}"
        for index, call in enumerate(turn["calls"]):
            yield f"CALL {call['tool']} {call['arguments']}: {call['status']}"
            yield from turn["results"][index : index + 1]
        if not turn["calls"]:  # a foreign harness's reading of the answer
            yield from (f"REPLY\n{text}" for text in turn["results"])
    for patch in facts.get("changed_files", {}).values():
        yield f"\nDIFF\n{patch}"
    if lines := list(network_lines(facts)):
        yield "\nNETWORK"
        yield from lines
    if facts.get("verdict") is not None:
        yield f"\nVERDICT {verdict_text(facts['verdict'])}"
    if facts.get("reward") is not None:
        yield f"\nREWARD {facts['reward']['total']:+.3f}"
        yield from (f"  {line}" for line in reward_lines(facts["reward"]))


def branches_of(facts: dict[str, Any]) -> list[str]:
    """The branches of an attempt as lines. Empty for an attempt with one branch or without a transcript."""
    turns = facts.get("transcript", {}).get("turns", ())
    return list(draw_branches([turn.get("continues") for turn in turns]))


def draw_branches(continues: Sequence[int | None]) -> Iterator[str]:
    """A line per branch of a session: the number of the turn it continues from, then those of its own turns. Yields
    nothing for a session with one branch. `continues`: TurnRecord's field, for each turn.
    """
    if not any(place is not None for place in continues):
        return
    depths: list[int] = []
    lines: list[str] = []
    for place, continued in enumerate(continues):
        parent = place - 1 if continued is None else continued
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        if continued is None and lines:
            lines[-1] += f" - {place + 1:>2}"
        elif parent >= 0:
            lines.append(f"{' ' * 5 * depths[parent]}{parent + 1:>2} - {place + 1:>2}")
        else:
            lines.append(f"{place + 1:>2}")
    yield from lines


def headline(facts: dict[str, Any]) -> dict[str, str]:
    """An attempt's ids, outcome and origin, by name."""
    found = {
        name.replace("_", " "): str(facts[name])
        for name in ("trajectory_id", "problem_id", "evaluation", "outcome", "reason")
        if facts.get(name)
    }
    journal = facts.get("journal", facts)
    if "state" in journal:
        step = journal["trained_step"]
        trained = "" if step is None else f" at step {step}"
        found["journal"] = (
            f"{journal['state']}{trained}, weight version {journal['weight_version']}"
        )
    if "interaction" in facts:
        talk = facts["interaction"]
        found["session"] = talk["session_id"]
        found["answered by"] = (
            f"{talk['checkpoint_id'] or 'an unknown checkpoint'}, arm {talk['arm']}, "
            f"weight version {talk['weight_version']}"
        )
        found["user"] = f"tenant {talk['tenant']}, serving line {talk['line']}"
        found["feedback"] = ", ".join(_feedback(talk)) or "none"
        if reward := talk.get("reward"):
            terms = ", ".join(f"{name} {term:+g}" for name, term in reward["terms"].items())
            found["reward in a cycle"] = f"{reward['total']:+g} with the default weights: {terms}"
    return found


def _feedback(interaction: dict[str, Any]) -> list[str]:
    return [f"{one['signal']} {one['value']:g}" for one in interaction["feedback"]]


def verdict_text(verdict: dict[str, Any]) -> str:
    """The verdict as a sentence."""
    word = "passed" if verdict["passed"] else "not passed"
    seen = f"{verdict['tests_passed']} of {verdict['tests_required']} tests"
    return f"{word}, {seen}. {verdict['detail']}"


def network_lines(facts: dict[str, Any]) -> Iterator[str]:
    """A line for each request of the attempt's box to the network."""
    for asked in facts.get("network", ()):
        word = "allowed" if asked["allowed"] else "refused"
        size = f"{asked['sent_bytes']} bytes sent, {asked['received_bytes']} received"
        what = f"{asked['method']} {asked['host']} {asked['path']}"
        yield f"{word}: {what}: {size}{asked['reason'] and ': '}{asked['reason']}"


def reward_lines(reward: dict[str, Any]) -> Iterator[str]:
    """A line for each term of a reward with a weight other than 0, for each segment with its own, and for each flag."""
    for name, term in reward["terms"].items():
        weight = reward["weights"].get(name)
        if weight != 0:
            how = "" if weight is None else f" = {reward['values'][name]:g} x {weight:g}"
            yield f"{name} {term:+.3f}{how}"
    offsets = enumerate(reward.get("segments", ()))
    yield from (f"segment {number} {offset:+.3f}" for number, offset in offsets)
    yield from (f"flag {pattern}: {evidence}" for pattern, evidence in reward["flags"].items())
