"""How tokens reach experts of other ranks: by the backend of the process groups, and with the same result.

Megatron's all-to-all opens streams of a GPU, which stand still here; the exchange itself is gloo's.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher as megatron_dispatcher
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)

from ostinato.models import device as device_module
from ostinato.models.device import token_dispatcher
from ostinato.models.layout import ParallelLayout
from ostinato.models.network.build import build_trainer_model
from ostinato.models.process_groups import open_process_groups
from ostinato.models.spec import ModelSpec
from ostinato.models.training.data_parallel import run_ranks
from ostinato.models.training.gradients import LayoutGradients
from tests.fakes.small_spec import make_spec

pytest_plugins = ["tests.fakes.process_groups"]

SPEC = make_spec(40, 32, heads=(4, 2, 8), max_sequence_tokens=64)
Seen = tuple[torch.Tensor, dict[str, torch.Tensor], str]


@pytest.mark.parametrize(
    ("kind", "wanted"), [("cpu", "allgather"), ("cuda", "alltoall"), ("meta", "alltoall")]
)
def test_the_backend_decides_the_dispatcher(kind: str, wanted: str) -> None:
    assert token_dispatcher(torch.device(kind)) == wanted


@pytest.mark.usefixtures("closed_groups")
def test_layers_of_a_device_that_is_no_cpu_get_the_all_to_all() -> None:
    open_process_groups(0, 2, layout=ParallelLayout.over(2, expert=2), kind="meta")
    model = build_trainer_model(SPEC, world_size=2)
    assert {type(layer.mlp.token_dispatcher) for layer in model.layers} == {
        MoEAlltoAllTokenDispatcher
    }
    assert model.trunk.config.moe_token_dispatcher_type == "alltoall"


def wait_for_nobody(patch: pytest.MonkeyPatch) -> None:
    """Events of streams that stand still, and counts that are on the CPU already."""
    event = SimpleNamespace(synchronize=lambda: None)
    patch.setattr(torch.cpu.Stream, "record_event", lambda self: event)
    patch.setattr(
        megatron_dispatcher,
        "maybe_move_tensor_to_cpu",
        lambda given, as_numpy=False, **_: (
            given.numpy() if as_numpy and isinstance(given, torch.Tensor) else given
        ),
    )


def run_under(given: tuple[ModelSpec, str, str], rank: int) -> Seen:
    """Log-probabilities and gradients of a rank's rows, and the dispatcher's name."""
    spec, kind, kind_of_rows = given
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device_module.TOKEN_DISPATCHERS, "gloo", kind)
        wait_for_nobody(patch)
        model = build_trainer_model(spec, world_size=torch.distributed.get_world_size(), seed=1)
        gradients = LayoutGradients(model)
        gradients.clear()
        # ranks that share matrices have the same rows, those that share experts may have shorter ones
        shared = model.trunk.config.tensor_model_parallel_size > 1
        generator = torch.Generator().manual_seed(0 if shared else rank)
        length = 16 - 6 * rank if kind_of_rows == "uneven" else 16
        tokens_BT = torch.randint(0, spec.vocab_size, (3, length), generator=generator)
        logprobs_BT = model.token_logprobs(tokens_BT)
        logprobs_BT.sum().backward()
        gradients.reduce()
        names = {id(tensor): name for name, tensor in model.canonical_tensors().items()}
        summed = {
            names[id(one)]: one.grad.clone() for one in gradients.parameters if one.grad is not None
        }
        return logprobs_BT.detach(), summed, type(model.layers[0].mlp.token_dispatcher).__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "rows"),
    [
        ({"expert": 2}, "uneven"),
        ({"expert_tensor": 2}, "even"),  # gloo gathers no parts of different size
        ({"expert": 2, "tensor": 2}, "even"),
    ],
)
@pytest.mark.nightly
def test_both_dispatchers_give_the_same_layer(degrees: dict[str, int], rows: str) -> None:
    layout = ParallelLayout.over(2, **degrees)
    wanted, wanted_gradients, gathering = run_ranks(run_under, (SPEC, "allgather", rows), layout)
    seen, seen_gradients, exchanging = run_ranks(run_under, (SPEC, "alltoall", rows), layout)
    assert gathering == MoEAllGatherTokenDispatcher.__name__
    assert exchanging == MoEAlltoAllTokenDispatcher.__name__
    torch.testing.assert_close(seen, wanted, atol=1e-5, rtol=1e-5)
    assert seen_gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(seen_gradients[name], gradient, atol=1e-4, rtol=1e-4, msg=name)
