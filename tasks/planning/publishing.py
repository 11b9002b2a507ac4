"""Publishing of weights: bytes of a version at the precision published, host memory and disk that publishing needs."""

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.models.decode.config import Precision
from ostinato.models.spec import ModelSpec
from ostinato.tasks.planning.inputs import Costs, Inputs
from ostinato.tasks.planning.shapes import model_parameters

PRECISION_BYTES = {Precision.BF16: 2, Precision.FP32: 4}


class PublishBytes(Record):
    """Bytes of published weights."""

    precision: Precision
    anchor: float = Field(description="all weights")
    delta: float = Field(description="the weights that a step changes")

    def delta_seconds(self, inputs: Inputs) -> float:
        """Seconds of a delta through the network port of one GPU."""
        return self.delta / inputs.network_bytes_per_second

    def anchor_seconds(self, gpus: int, inputs: Inputs) -> float:
        """Seconds of all weights through the ports of an engine's GPUs."""
        return self.anchor / gpus / inputs.network_bytes_per_second


class PublishNeeds(Record):
    """Host memory and disk for published weights."""

    rank_host_bytes: float = Field(description="bytes on the host of each trainer rank")
    replica_host_bytes: float = Field(description="bytes on the host of each engine replica")
    chain_bytes: float = Field(description="largest size of the weight chain, before compression")


def publish_bytes(
    spec: ModelSpec, costs: Costs, precision: Precision = Precision.BF16
) -> PublishBytes:
    """Bytes that one publish moves to each cluster of engines. In fp32 nearly every weight changes in a step, so that
    a delta is as large as an anchor.
    """
    parameters = model_parameters(spec)
    anchor = float(PRECISION_BYTES[precision] * parameters)
    changed = costs.changed_share * parameters * costs.delta_bytes
    delta = changed if precision is Precision.BF16 else anchor
    return PublishBytes(precision=precision, anchor=anchor, delta=delta)


def publish_needs(
    published: PublishBytes, ranks: int, *, earlier: int, newest: int, anchor_every: int
) -> PublishNeeds:
    """Needs of a trainer of `ranks` ranks, which share the tensors and compare tokens of `earlier` versions, and of a
    chain that keeps the `newest` versions.
    """
    # the version being uploaded, the start of its delta, the newest and earlier ones; an export in fp32
    exported = published.anchor * 4 / PRECISION_BYTES[published.precision]
    # the older of two anchors leads to the oldest kept version
    chain = 2 * published.anchor + (anchor_every + newest - 2) * published.delta
    return PublishNeeds(
        rank_host_bytes=((3 + earlier) * published.anchor + exported) / ranks,
        replica_host_bytes=2 * published.anchor,  # held and fetched
        chain_bytes=min(chain, (newest + 1) * published.anchor),
    )
