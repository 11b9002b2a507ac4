"""Trajectories and groups as safetensors: arrays as tensors, everything else as JSON metadata."""

import json

import numpy as np
from safetensors.numpy import load, save

from ostinato.infra.agent.transcript import Transcript
from ostinato.tasks.records import Group, Trajectory


def trajectory_to_bytes(trajectory: Trajectory) -> bytes:
    """One trajectory as one blob."""
    transcript = np.frombuffer(trajectory.transcript.to_bytes(), dtype=np.uint8)
    rest = trajectory.model_dump_json(exclude={"transcript"})
    return save({"transcript": transcript}, metadata={"trajectory": rest})


def trajectory_from_bytes(data: bytes) -> Trajectory:
    """Inverse of trajectory_to_bytes."""
    rest = json.loads(_metadata(data)["trajectory"])
    transcript = Transcript.from_bytes(load(data)["transcript"].tobytes())
    return Trajectory(**rest, transcript=transcript)


def group_to_bytes(group: Group) -> bytes:
    """One group as one blob."""
    tensors = {
        str(index): np.frombuffer(trajectory_to_bytes(member), dtype=np.uint8)
        for index, member in enumerate(group.trajectories)
    }
    rest = group.model_dump_json(exclude={"trajectories"})
    return save(tensors, metadata={"group": rest})


def group_from_bytes(data: bytes) -> Group:
    """Inverse of group_to_bytes."""
    rest = json.loads(_metadata(data)["group"])
    tensors = load(data)
    members = tuple(
        trajectory_from_bytes(tensors[str(index)].tobytes()) for index in range(len(tensors))
    )
    return Group(**rest, trajectories=members)


def _metadata(data: bytes) -> dict[str, str]:
    header_bytes = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + header_bytes])["__metadata__"]
