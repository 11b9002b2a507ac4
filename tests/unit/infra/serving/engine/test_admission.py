"""Who waits comes in by priority and in order, over a real router with a bound."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.platform.admission import AdmissionQueue
from ostinato.infra.serving.engine.admission import RANKS, Ticket
from ostinato.infra.serving.engine.router import RequestRouter, RouterLimits
from ostinato.models.decode.protocol import Priority


class Door:
    """A queue before a router; notes the order of entry."""

    def __init__(self, replicas: int, limit: int) -> None:
        self.router = RequestRouter(
            [f"r{index}" for index in range(replicas)],
            limits=RouterLimits(max_outstanding_tokens=limit),
        )
        self.queue: AdmissionQueue[Ticket] = AdmissionQueue()
        self.entered: list[Ticket] = []
        self.left: list[Ticket] = []

    def come(self, name: str, tokens: int, priority: Priority) -> Ticket:
        ticket = Ticket(name, tokens, 0, priority, lambda: None)
        self.queue.push(ticket, ticket, rank=RANKS[priority])
        self.open()
        return ticket

    def open(self) -> None:
        self.queue.place(self._place)

    def _place(self, ticket: Ticket) -> bool:
        found = self.router.try_choose(ticket.session_id, ticket.tokens, priority=ticket.priority)
        if found is not None:
            self.entered.append(ticket)
        return ticket.place_on(found)

    def inside(self) -> list[Ticket]:
        return [ticket for ticket in self.entered if ticket not in self.left]

    def leave(self, ticket: Ticket) -> None:
        assert ticket.replica_id is not None
        self.left.append(ticket)
        self.router.finish(ticket.replica_id, ticket.tokens)
        self.open()


def test_users_come_before_evaluation_before_training() -> None:
    door = Door(1, 100)
    first = door.come("first", 100, Priority.USER)
    for priority in (Priority.TRAINING, Priority.EVALUATION, Priority.USER):
        door.come(priority.value, 100, priority)
    assert [door.queue.num_waiting(rank) for rank in RANKS.values()] == [1, 1, 1]
    door.leave(first)
    for _ in range(2):
        door.leave(door.entered[-1])
    assert [t.session_id for t in door.entered] == ["first", "user", "evaluation", "training"]


def test_training_leaves_room_for_a_user() -> None:
    door = Door(1, 100)
    for index in range(20):
        door.come(f"t{index}", 10, Priority.TRAINING)
    assert len(door.entered) == 9
    assert door.come("user", 10, Priority.USER).replica_id == "r0"


def test_a_request_larger_than_the_bound_gets_an_empty_replica() -> None:
    door = Door(2, 100)
    door.come("small", 10, Priority.TRAINING)
    assert door.come("huge", 5000, Priority.TRAINING).replica_id == "r1"


def test_a_caller_that_gives_up_does_not_hold_the_line() -> None:
    door = Door(1, 100)
    first = door.come("first", 100, Priority.USER)
    second = door.come("second", 100, Priority.USER)
    third = door.come("third", 100, Priority.USER)
    door.queue.remove(second)
    door.queue.remove(second)
    door.leave(first)
    assert third.replica_id == "r0"
    assert second.replica_id is None
    assert len(door.queue) == 0


arrivals = st.lists(
    st.tuples(st.integers(1, 120), st.sampled_from(list(Priority)), st.booleans()), max_size=60
)


@given(arrivals, st.integers(1, 4))
def test_everyone_enters_once_in_order_and_the_bound_holds(history, replicas: int) -> None:
    door = Door(replicas, 100)
    tickets = []
    for index, (tokens, priority, leaves) in enumerate(history):
        tickets.append(door.come(f"s{index}", tokens, priority))
        if leaves and (inside := door.inside()):
            door.leave(inside[0])
        _check_bound(door)
    while inside := door.inside():
        door.leave(inside[0])
    order = [tickets.index(ticket) for ticket in door.entered]
    assert sorted(order) == list(range(len(tickets)))
    for priority in Priority:
        numbers = [number for number in order if tickets[number].priority is priority]
        assert numbers == sorted(numbers)


def _check_bound(door: Door) -> None:
    requests = door.router.outstanding_requests()
    for name, tokens in door.router.outstanding_tokens().items():
        assert tokens <= 100 or requests[name] == 1
