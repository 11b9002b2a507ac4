"""A session of a client as a graph of sampled answers, each linked to the answer that its request continued.

A request repeats the messages before it. If they equal the session's messages up to some answer, the request continues
the tokens of that answer's context as sampled, and the later messages are rendered after them. Anything else that a
client does (compaction, sub-agents, stripped thoughts, edited histories, parallel and repeated requests) is a branch
from the last answer that the request still repeats.

Every path from the first request to an answer that nothing continued is a segment. A sampled token is trained in the
first segment that holds it and is context in the others. The trainer finds the shared parts of segments by tokens and
routes, and computes them once (learning/batches/packing.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ostinato.infra.agent.loop.segments import SegmentBuilder
from ostinato.infra.agent.transcript import Segment, TurnRecord


@dataclass(eq=False, slots=True)
class SampledTurn:
    """One answer, with all tokens that it was sampled from."""

    builder: SegmentBuilder  # the context, the answer, and the tokens that close it
    record: TurnRecord
    parent: "SampledTurn | None"
    session_id: str  # the engine's, which may hold the context in its cache
    is_continued: bool = False

    @property
    def path(self) -> "list[SampledTurn]":
        """The answers in its context, in order, and itself."""
        turns: list[SampledTurn] = []
        turn: SampledTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


@dataclass(slots=True)
class SessionGraph:
    """The answers of one session. A key identifies a history of messages up to and including an answer."""

    turns: list[SampledTurn] = field(default_factory=list)
    _by_key: dict[str, SampledTurn] = field(default_factory=dict)

    def find(self, keys: Sequence[str]) -> tuple[SampledTurn | None, int]:
        """The last known answer that a request repeats, and the number of messages up to it. `keys`: one per message
        of the request. Of answers with the same key, the newest is returned.
        """
        for place in range(len(keys), 0, -1):
            turn = self._by_key.get(keys[place - 1])
            if turn is not None:
                return turn, place
        return None, 0

    def add(self, turn: SampledTurn, key: str | None) -> None:
        """Adds an answer. `key` None: nothing can continue it, because its text is not all that was sampled."""
        self.turns.append(turn)
        if turn.parent is not None:
            turn.parent.is_continued = True
        if key is not None:
            self._by_key[key] = turn

    def branches(self) -> list[list[SampledTurn]]:
        """For each segment the answers that are trained in it, in the order of their tokens."""
        inner = {id(turn.parent) for turn in self.turns}
        seen: set[int] = set()
        branches: list[list[SampledTurn]] = []
        for leaf in self.turns:
            if id(leaf) in inner:
                continue
            branches.append([turn for turn in leaf.path if id(turn) not in seen])
            seen.update(id(turn) for turn in leaf.path)
        return branches

    def segments(self) -> tuple[Segment, ...]:
        """One segment per branch, in the order of `branches`."""
        segments = []
        for branch in self.branches():
            trained = {id(turn) for turn in branch}
            path = branch[-1].path
            context = [turn.builder for turn in path[:-1] if id(turn) not in trained]
            earlier = [turn.builder for turn in path[:-1] if id(turn) in trained]
            segments.append(path[-1].builder.build(earlier=earlier, context=context))
        return tuple(segments)
