"""Runs a scenario: the fleet's real scheduler against simulated nodes and holders on SimPy's clock.

Decisions are the scheduler's alone; here is only what a machine, a network and a holder would do.
"""

import random
from collections.abc import Callable, Generator
from typing import Any

import simpy

from ostinato.infra.sandbox.fleet.records import (
    CleanBox,
    NodeReport,
    NodeSpec,
    Order,
    StartBox,
    StopBox,
)
from ostinato.infra.sandbox.fleet.scheduler import FleetScheduler
from ostinato.infra.sandbox.simulator.holders import Holders
from ostinato.infra.sandbox.simulator.machine import SimulatedNode, Usage
from ostinato.infra.sandbox.simulator.measurements import Measurements, Sample, SimulationFigures
from ostinato.infra.sandbox.simulator.scenario import NodeLoss, Scenario

Process = Generator[simpy.Event, Any, None]


class FleetSimulation:
    """One run; make a new one for another."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.environment = simpy.Environment()
        self.scheduler = FleetScheduler(scenario.templates, scenario.policy)
        self.measurements = Measurements()
        self.nodes: dict[str, SimulatedNode] = {}
        # one generator a purpose: a change of policy leaves what is asked for as it was
        self._placing, self._asking, self._costing, self._failing = (
            random.Random(f"{seed}/{purpose}") for purpose in ("place", "ask", "cost", "fail")
        )
        self.holders = Holders(
            self.environment, scenario, self.scheduler, self.measurements, self._asking
        )

    def run(self) -> SimulationFigures:
        """Simulate from an empty fleet to the end of the workload."""
        scenario, start = self.scenario, self.environment.process
        for spec in scenario.nodes:
            self._join(spec)
        start(self._tick())
        self.holders.start()
        start(self._sample())
        for loss in scenario.workload.losses:
            start(self._lose_nodes(loss))
        self.environment.run(until=scenario.workload.length_seconds)
        return self._figures()

    # ---- the scheduler's clock and messages

    def _tick(self) -> Process:
        while True:
            self.scheduler.tick(self.environment.now, self._placing)
            self._collect()
            yield self.environment.timeout(self.scenario.tick_seconds)

    def _collect(self) -> None:
        for order in self.scheduler.take_orders():
            self._later(self.scenario.message_seconds, lambda order=order: self._obey(order))
        for notice in self.scheduler.take_notices():
            self.holders.tell(notice)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        timeout = self.environment.timeout(seconds)
        assert timeout.callbacks is not None
        timeout.callbacks.append(lambda _: act())

    def _obey(self, order: Order) -> None:
        node = self.nodes.get(order.node_id)
        if node is None or not node.is_alive:
            return
        if isinstance(order, StartBox):
            self.environment.process(self._start_box(node, order))
        elif isinstance(order, CleanBox):
            self.environment.process(self._clean_box(node, order))
        else:
            self._stop_box(node, order)

    # ---- nodes

    def _join(self, spec: NodeSpec) -> None:
        node = SimulatedNode(self.environment, spec, self.scenario.copies_at_once)
        self.nodes[spec.node_id] = node
        self.scheduler.join(spec, self.environment.now)
        self.environment.process(self._heartbeats(node))

    def _heartbeats(self, node: SimulatedNode) -> Process:
        scenario, number = self.scenario, 0
        yield self.environment.timeout(self._costing.random() * scenario.heartbeat_seconds)
        while node.is_alive:
            counts_boxes = number % scenario.count_every == 0
            asked_at_seconds = self.environment.now
            report = NodeReport(
                node_id=node.spec.node_id,
                pressure=node.pressure(),
                boxes=frozenset(node.boxes) if counts_boxes else None,
                counted_at_seconds=asked_at_seconds,
            )
            yield self.environment.timeout(scenario.message_seconds)
            if node.is_alive:
                self.scheduler.report(report, self.environment.now)
                self._collect()
            number += 1
            yield self.environment.timeout(scenario.heartbeat_seconds - scenario.message_seconds)

    def _start_box(self, node: SimulatedNode, order: StartBox) -> Process:
        environment, costs = self.environment, self.scenario.costs
        if self._failing.random() < self.scenario.workload.lost_start_share:
            return
        if order.copy_from is not None and order.state_id not in node.states:
            yield from self._copy_state(node, order)
        with node.start_lanes.request() as lane:
            yield lane
            cpu_seconds = costs.start_cpu_seconds * self._costing.lognormvariate(
                0.0, costs.start_spread
            )
            yield environment.timeout(cpu_seconds * node.slowdown())
        yield environment.timeout(self.scenario.message_seconds)
        if not node.is_alive:
            return
        self._use(node, order)
        self.measurements.note_start(environment.now)
        if order.state_id is not None:
            self.measurements.counts["copied" if order.copy_from else "home"] += 1
        self.scheduler.box_up(order.box_id, environment.now)
        self._collect()

    def _copy_state(self, node: SimulatedNode, order: StartBox) -> Process:
        """Fetch a state once, however many boxes wait for it."""
        state_id = str(order.state_id)
        arrived = node.arriving.get(state_id)
        if arrived is not None:
            yield arrived
            return
        node.arriving[state_id] = arrived = self.environment.event()
        with node.copy_lanes.request() as lane:
            yield lane
            seconds = self.scenario.habits.state_bytes / self.scenario.copy_bytes_per_second
            yield self.environment.timeout(seconds)
        node.states.add(state_id)
        del node.arriving[state_id]
        arrived.succeed()

    def _use(self, node: SimulatedNode, order: StartBox) -> None:
        """The start-up peak, then what the box steadily uses."""
        habits, costs, draw = self.scenario.habits, self.scenario.costs, self._costing
        declared = self.scheduler.templates[order.template].declared
        steady = Usage(
            cpus=min(declared.cpus, draw.expovariate(1.0 / habits.steady_cpus)),
            memory_bytes=costs.idle_memory_bytes
            + int(declared.memory_bytes * min(1.0, 2 * habits.steady_memory_ratio * draw.random())),
            disk_bytes=int(declared.disk_bytes * draw.random()),
        )
        peak_memory_bytes = int(declared.memory_bytes * habits.peak_memory_ratio)
        peak = Usage(
            cpus=habits.peak_cpus,
            memory_bytes=max(steady.memory_bytes, costs.idle_memory_bytes + peak_memory_bytes),
            disk_bytes=steady.disk_bytes,
        )
        node.set_usage(order.box_id, peak)
        self._kill_for_memory(node)

        def calm_down() -> None:
            if order.box_id in node.boxes:
                node.set_usage(order.box_id, steady)

        self._later(habits.peak_seconds, calm_down)

    def _kill_for_memory(self, node: SimulatedNode) -> None:
        while (box_id := node.out_of_memory()) is not None:
            node.set_usage(box_id, None)
            self.measurements.counts["memory_kills"] += 1
            self._later(
                self.scenario.message_seconds, lambda box_id=box_id: self._report_death(box_id)
            )

    def _report_death(self, box_id: str) -> None:
        self.scheduler.box_failed(box_id, self.environment.now)
        self._collect()

    def _clean_box(self, node: SimulatedNode, order: CleanBox) -> Process:
        with node.start_lanes.request() as lane:
            yield lane
            seconds = self.scenario.costs.clean_cpu_seconds * node.slowdown()
            yield self.environment.timeout(seconds + self.scenario.message_seconds)
        if node.is_alive and order.box_id in node.boxes:
            self.scheduler.box_up(order.box_id, self.environment.now)
            self._collect()

    def _stop_box(self, node: SimulatedNode, order: StopBox) -> None:
        node.set_usage(order.box_id, None)

        def confirm() -> None:
            if node.is_alive:
                self.scheduler.box_stopped(order.box_id)

        self._later(self.scenario.message_seconds, confirm)

    def _lose_nodes(self, loss: NodeLoss) -> Process:
        yield self.environment.timeout(loss.at_seconds)
        alive = [node for node in self.nodes.values() if node.is_alive]
        lost = self._failing.sample(alive, min(loss.num_nodes, len(alive)))
        for node in lost:
            self.measurements.counts["boxes_on_lost_nodes"] += len(node.boxes)
            node.die()
        yield self.environment.timeout(loss.away_seconds)
        for node in lost:
            self._join(node.spec)
        self._collect()

    # ---- figures

    def _sample(self) -> Process:
        while True:
            alive = [node for node in self.nodes.values() if node.is_alive]
            cpu_ratios = [node.cpu_ratio() for node in alive]
            counts = self.measurements.counts
            counts["overcommitted_nodes"] += sum(
                node.promised_memory_bytes > node.limit.memory_bytes
                or node.promised_cpus > node.limit.cpus * (1 + 1e-9)
                or node.promised_disk_bytes > node.limit.disk_bytes
                for node in self.scheduler.view.nodes.values()
            )
            self.measurements.samples.append(
                Sample(
                    at_seconds=self.environment.now,
                    alive=counts["alive"],
                    waiting=len(self.scheduler.queue),
                    started=counts["started"],
                    worst_memory_ratio=max(node.memory_ratio() for node in alive),
                    mean_cpu_ratio=sum(cpu_ratios) / len(alive),
                    worst_cpu_ratio=max(cpu_ratios),
                )
            )
            yield self.environment.timeout(1.0)

    def _figures(self) -> SimulationFigures:
        counts, measured = self.measurements.counts, self.measurements
        length_seconds = self.scenario.workload.length_seconds
        return SimulationFigures(
            scenario=self.scenario.name,
            seed=self.seed,
            simulated_seconds=length_seconds,
            num_nodes=len(self.scenario.nodes),
            asked=counts["asked"],
            started=counts["started"],
            peak_alive=counts["peak_alive"],
            starts_per_second_mean=counts["started"] / length_seconds,
            starts_per_second_peak=measured.peak_starts_per_second(),
            waits=measured.wait_figures(),
            refused=dict(sorted(measured.refused.items())),
            reaped=counts["reaped"],
            dead_holders=counts["dead_holders"],
            moved_leases=counts["moved"],
            lost_leases=counts["lost"],
            unaccounted_requests=self.holders.num_unaccounted(),
            forks_at_home=counts["home"],
            forks_copied=counts["copied"],
            warm_hits=self.scheduler.num_warm_hits,
            memory_kills=counts["memory_kills"],
            worst_memory_ratio=max(sample.worst_memory_ratio for sample in measured.samples),
            worst_cpu_ratio=max(sample.worst_cpu_ratio for sample in measured.samples),
            overcommitted_nodes=counts["overcommitted_nodes"],
            samples=tuple(measured.samples),
        )
