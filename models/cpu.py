"""What Megatron-core needs to run without CUDA, in one place.

The stand-ins for the CUDA calls Megatron makes unconditionally, and the opening of process groups
over gloo. With a CUDA device present the stand-ins are not installed.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe import moe_utils
from torch._C._distributed_c10d import FileStore, HashStore

from ostinato.kernels.accelerator import load_gpu_kernels
from ostinato.kernels.fp32_products import choose_fp32_products
from ostinato.models.layout import ParallelLayout

MEETING_SECONDS = 60.0  # from a rank's start to that of the last; imports take seconds


def prepare_cpu() -> None:
    """Installs the stand-ins once per process. Does nothing where CUDA works."""
    if load_gpu_kernels():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    # Megatron reads this name although only Transformer Engine defines it.
    moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    # Megatron forks a CUDA generator for the dropout of cut sequences; ours drop nothing.
    initialize_rng_tracker(inference_rng_tracker=True)
    choose_fp32_products()
    # Two OpenMP threads on a shared pair of cores train 2-4x slower than one; use ranks.
    torch.set_num_threads(1)


def open_process_groups(
    rank: int = 0,
    world_size: int = 1,
    rendezvous_file: Path | None = None,
    patience_seconds: float = 1800.0,
    layout: ParallelLayout | None = None,
) -> None:
    """Opens torch's and Megatron's process groups over gloo. A second call with groups open changes
    nothing.

    One process needs no rendezvous. Several meet in `rendezvous_file`, which must not exist before
    the first of them starts. A rank that does not come within `MEETING_SECONDS` is an error, and so
    is a collective that lasts longer than `patience_seconds`. `layout` None: data parallel only.
    """
    prepare_cpu()
    if not dist.is_initialized():
        if world_size == 1:
            store: Any = HashStore()
        elif rendezvous_file is None:
            raise ValueError(f"rendezvous_file is None, wanted a path for world_size={world_size}")
        else:
            store = FileStore(str(rendezvous_file), world_size)
            _meet(store, rank, world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=patience_seconds),
        )
    if dist.get_world_size() != world_size:
        raise ValueError(
            f"process groups are open for {dist.get_world_size()} ranks, wanted {world_size}"
        )
    if not parallel_state.model_parallel_is_initialized():
        one = layout or ParallelLayout(data=world_size)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=one.tensor,
            expert_model_parallel_size=one.expert,
            expert_tensor_parallel_size=one.expert_tensor,
        )


def _meet(store: Any, rank: int, world_size: int) -> None:
    """Waits for all ranks: gloo itself would wait for a dead one as long as for a collective."""
    store.set(f"here-{rank}", b"")
    store.wait([f"here-{other}" for other in range(world_size)], timedelta(seconds=MEETING_SECONDS))


def close_process_groups() -> None:
    """Closes what `open_process_groups` opened."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
