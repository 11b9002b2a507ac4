"""Chooses a node for a box: the best of a few drawn at random, by live pressure.

It changes nothing.

A draw of K nodes instead of a look at all keeps bursts from all landing on the node that was
emptiest in the last report, and costs the same on 10 nodes and on 10,000. When none of the K
can take the box all others are asked, so None means that no node can.
"""

import random
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.fleet.cluster_view import NodeState
from ostinato.infra.sandbox.fleet.records import Priority, Template


class PlacementPolicy(Record):
    """Numbers of placement."""

    num_candidates: int = Field(default=8, ge=1, description="nodes drawn; the best one is taken")
    memory_ceiling_ratio: float = Field(
        default=0.92, gt=0, le=1, description="used and unseen memory over capacity"
    )
    disk_ceiling_ratio: float = Field(default=0.92, gt=0, le=1)
    memory_stall_ceiling_ratio: float = Field(
        default=0.10, ge=0, description="a node that stalls more for memory takes no box"
    )
    stall_weight: float = Field(default=0.5, ge=0, description="score added at a stall ratio of 1")
    new_template_score: float = Field(
        default=0.05, ge=0, description="added where the template was never started before"
    )
    uses_observations: bool = Field(
        default=True, description="False: by promises alone, whatever nodes report"
    )
    headroom: Mapping[Priority, float] = Field(
        default={Priority.TRAINING: 0.90, Priority.EVALUATION: 0.95, Priority.VERIFIER: 1.0},
        description="share of a node's limit that boxes may fill before this priority is kept out",
    )


def has_room(
    node: NodeState, template: Template, priority: Priority, policy: PlacementPolicy
) -> bool:
    """Whether another box of the template fits: promises within the limit, pressure in bounds."""
    promised = node.promised.plus(template.declared)
    if not promised.fits(node.limit, policy.headroom[priority]):
        return False
    if not policy.uses_observations:
        return True
    used, capacity = node.used.plus(node.unseen), node.spec.capacity
    return (
        node.memory_stall_ratio <= policy.memory_stall_ceiling_ratio
        and used.memory_bytes <= capacity.memory_bytes * policy.memory_ceiling_ratio
        and used.disk_bytes <= capacity.disk_bytes * policy.disk_ceiling_ratio
    )


def score(node: NodeState, template: Template, policy: PlacementPolicy) -> float:
    """Load of the node, 0 for idle. Lower is better. The tightest resource counts, each as the
    larger of what is promised and what is observed plus what no report can have shown yet.
    """
    limit, capacity, used, unseen = node.limit, node.spec.capacity, node.used, node.unseen
    total = node.promised.plus(template.declared).ratio(limit)
    if policy.uses_observations:
        # unseen boxes are taken at the price that seen ones turned out to have: their declared share
        # of the limit, not of the bare capacity
        observed = max(
            max(used.cpus / capacity.cpus, node.load_per_cpu) + unseen.cpus / limit.cpus,
            used.memory_bytes / capacity.memory_bytes + unseen.memory_bytes / limit.memory_bytes,
            used.disk_bytes / capacity.disk_bytes + unseen.disk_bytes / limit.disk_bytes,
        )
        total = max(total, observed) + policy.stall_weight * node.stall_ratio
    if template.name not in node.templates_seen:
        total += policy.new_template_score
    return total


def choose_start_node(
    nodes: Sequence[NodeState],
    template: Template,
    priority: Priority,
    policy: PlacementPolicy,
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
            and has_room(node, template, priority, policy)
        ]
        return min(able, key=lambda node: score(node, template, policy), default=None)

    if policy.num_candidates < len(nodes):
        drawn = [nodes[rng.randrange(len(nodes))] for _ in range(policy.num_candidates)]
        chosen = best(drawn)
        if chosen is not None:
            return chosen
    return best(nodes)


def choose_warm_node(
    nodes: Sequence[NodeState], template: Template, policy: PlacementPolicy, *, rng: random.Random
) -> NodeState | None:
    """The least loaded of a few nodes. Each of `nodes` has a warm box of the template."""
    if len(nodes) > policy.num_candidates:
        nodes = rng.sample(nodes, policy.num_candidates)
    return min(nodes, key=lambda node: score(node, template, policy), default=None)
