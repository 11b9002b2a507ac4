"""Process groups of a rank: torch's and Megatron's, opened and closed together.

Functions import Megatron locally: its import takes 4 s of processor time, and processes that only
start ranks import this module too.
"""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers "fake" too

from ostinato.models.device import BACKENDS, DeviceKind, current_device, rank_device, use_device
from ostinato.models.layout import ParallelLayout

MEETING_SECONDS = (
    60.0  # limit between the starts of the first and the last rank; imports take seconds
)


def open_process_groups(
    rank: int = 0,
    world_size: int = 1,
    meeting: Store | str | None = None,
    timeout_seconds: float = 1800.0,
    layout: ParallelLayout | None = None,
    kind: DeviceKind | None = None,
) -> None:
    """Opens torch's and Megatron's process groups on this rank's device: gloo on CPUs, NCCL on
    GPUs. Does nothing if they are open.

    A single process and a dry run need no `meeting`. Several processes meet in a store that all can
    reach: the first gets the store of `host_meeting`, the others its URL. Raises TimeoutError if a
    rank does not arrive within `MEETING_SECONDS`. A collective that lasts longer than
    `timeout_seconds` fails. `layout` None: data parallel only. `kind` None: the device of the open
    groups, else the CPU.
    """
    from megatron.core import parallel_state  # noqa: PLC0415 - see the head of this file

    if not dist.is_initialized():
        kind = kind or "cpu"
        use_device(rank_device(kind, rank))
        if kind == "meta":
            store: Any = FakeStore()
        elif world_size == 1:
            store = HashStore()
        elif meeting is None:
            raise ValueError(f"meeting is None, wanted a store or URL for world_size={world_size}")
        else:
            store = _meet(meeting, rank, world_size)
        dist.init_process_group(
            BACKENDS[kind],
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    if kind not in (None, current_device().type):
        raise ValueError(
            f"process groups are open on {current_device().type!r}, wanted {kind!r}; close them first"
        )
    if dist.get_world_size() != world_size:
        raise ValueError(
            f"process groups are open for {dist.get_world_size()} ranks, wanted {world_size}"
        )
    if not parallel_state.model_parallel_is_initialized():
        one = layout or ParallelLayout(data=world_size)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=one.tensor,
            pipeline_model_parallel_size=one.pipeline,
            virtual_pipeline_model_parallel_size=one.interleave if one.interleave > 1 else None,
            context_parallel_size=one.context,
            expert_model_parallel_size=one.expert,
            expert_tensor_parallel_size=one.expert_tensor,
            distributed_timeout_minutes=timeout_seconds / 60,  # type: ignore[arg-type]  # of any length
            create_gloo_process_groups=current_device().type != "meta",
        )


def host_meeting(host: str) -> tuple[TCPStore, str]:
    """The store in which ranks meet, and its URL. It listens only on `host`, an address of this machine."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=MEETING_SECONDS),
        master_listen_fd=listener.detach(),
    )
    return store, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _meet(meeting: Store | str, rank: int, world_size: int) -> Any:
    """The store, once all ranks have arrived. gloo itself would wait for a dead rank as long as for
    a collective.
    """
    limit = timedelta(seconds=MEETING_SECONDS)
    store: Any = meeting
    if isinstance(meeting, str):
        store, _, _ = next(rendezvous(meeting, rank, world_size, timeout=limit))
    store.set(f"here-{rank}", b"")
    try:
        store.wait([f"here-{other}" for other in range(world_size)], limit)
    except dist.DistError as error:
        absent = [other for other in range(world_size) if not store.check([f"here-{other}"])]
        raise TimeoutError(
            f"ranks {absent} of {world_size} did not arrive within {MEETING_SECONDS:.0f} s, rank {rank} waited; "
            "read their logs, or leave the machine more processor time and run the same command again"
        ) from error
    return store


def close_process_groups() -> None:
    """Closes what `open_process_groups` opened."""
    from megatron.core import parallel_state  # noqa: PLC0415

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
