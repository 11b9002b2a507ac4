"""Chooses a node for a box: the best of a few drawn at random, by live pressure.

A draw instead of a look at all nodes keeps bursts from landing on the one that was emptiest in the
last report. When none of the drawn can take the box all others are asked.
"""

import random
from collections.abc import Iterable, Sequence

from ostinato.infra.sandbox.fleet.records import Template
from ostinato.infra.sandbox.fleet.view import BoxState, NodeState

_NUM_CANDIDATES = 8
PROMISED_CEILING = 0.9  # share of a node's limit that boxes may declare
_USED_CEILING = 0.92  # used and unseen memory and disk over capacity
_MEMORY_STALL_CEILING = 0.10  # a node that stalls more for memory takes no box
_STALL_WEIGHT = 0.5  # score added at a stall ratio of 1
_NEW_TEMPLATE_SCORE = 0.05  # added where the template was never started before


def has_room(node: NodeState, template: Template) -> bool:
    """Whether another box of the template fits: promises within the limit, pressure in bounds."""
    promised = node.promised.plus(template.declared)
    used, capacity = node.pressure.used.plus(node.unseen), node.spec.capacity
    return (
        promised.fits(node.limit, PROMISED_CEILING)
        and node.pressure.memory_stall_ratio <= _MEMORY_STALL_CEILING
        and used.memory_bytes <= capacity.memory_bytes * _USED_CEILING
        and used.disk_bytes <= capacity.disk_bytes * _USED_CEILING
    )


def score(node: NodeState, template: Template) -> float:
    """Load of the node, 0 for idle. Lower is better. The tightest resource counts, each as the
    larger of what is promised and what is observed plus what no report can have shown yet.
    """
    limit, capacity, unseen, used = node.limit, node.spec.capacity, node.unseen, node.pressure.used
    # unseen boxes are taken at the price that seen ones turned out to have: their declared share of
    # the limit, not of the bare capacity
    load = max(
        node.promised.plus(template.declared).ratio(limit),
        node.pressure.load_per_cpu + unseen.cpus / limit.cpus,
        used.memory_bytes / capacity.memory_bytes + unseen.memory_bytes / limit.memory_bytes,
        used.disk_bytes / capacity.disk_bytes + unseen.disk_bytes / limit.disk_bytes,
    )
    total = load + _STALL_WEIGHT * node.pressure.stall_ratio
    return total + (0.0 if template.name in node.templates_seen else _NEW_TEMPLATE_SCORE)


def choose_start_node(
    nodes: Sequence[NodeState],
    template: Template,
    *,
    rng: random.Random,
    now_seconds: float,
) -> NodeState | None:
    """A node that has room and may start a box now."""

    def best(candidates: Iterable[NodeState]) -> NodeState | None:
        able = [
            node
            for node in candidates
            if len(node.starting) < node.spec.most_starting
            and node.bucket.seconds_until_token(now_seconds) == 0
            and has_room(node, template)
        ]
        return min(able, key=lambda node: score(node, template), default=None)

    if len(nodes) > _NUM_CANDIDATES:
        drawn = [nodes[rng.randrange(len(nodes))] for _ in range(_NUM_CANDIDATES)]
        chosen = best(drawn)
        if chosen is not None:
            return chosen
    return best(nodes)


def choose_warm_box(boxes: Sequence[BoxState], rng: random.Random) -> BoxState | None:
    """The one of a few on the least loaded node. All are warm and of one template."""
    if len(boxes) > _NUM_CANDIDATES:
        boxes = rng.sample(boxes, _NUM_CANDIDATES)
    return min(boxes, key=lambda box: score(box.node, box.template), default=None)
