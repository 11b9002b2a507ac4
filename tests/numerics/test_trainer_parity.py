"""The Megatron model computes the project's formulae."""

import pytest
import torch

from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.spec import ModelSpec
from tests.fakes.logits import forward_logits
from tests.fakes.small_spec import make_spec
from tests.numerics.plain_model import plain_draft, plain_hidden, plain_logits

SPEC = make_spec(97, 48, experts=(6, 2, 32), max_sequence_tokens=64, drafts=(2, 40))


def perturbed_model(spec: ModelSpec) -> TrainerModel:
    """A model whose norms and biases are off their initial values."""
    model = build_trainer_model(spec, seed=3)
    generator = torch.Generator().manual_seed(4)
    weights = model.export_weights()
    for name, weight in weights.items():
        if "norm" in name or "bias" in name:
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    model.import_weights(weights)
    return model


@pytest.mark.parametrize("scaling", [1.0, 3.0])
def test_logits_equal_plain_formulae(scaling: float) -> None:
    spec = SPEC.model_copy(update={"rope_scaling_factor": scaling})
    model = perturbed_model(spec)
    tokens_BT = torch.randint(
        0, spec.vocab_size, (3, 21), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        logits_BTV = forward_logits(model, tokens_BT)
    weights = model.export_weights()
    for row, tokens_T in enumerate(tokens_BT):
        # fp32 sums in another order
        torch.testing.assert_close(
            logits_BTV[row], plain_logits(tokens_T, weights, spec), atol=1e-5, rtol=1e-5
        )


def test_token_logprobs_equal_log_softmax_of_logits() -> None:
    model = perturbed_model(SPEC)
    tokens_BT = torch.randint(
        0, SPEC.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1)
    )
    hidden_TBD = model.forward_hidden(tokens_BT)
    logprobs_BT, entropy_BT = model.score_hidden(hidden_TBD, tokens_BT, with_entropy=True)
    expected_BTV = torch.log_softmax(forward_logits(model, tokens_BT), dim=-1)
    expected = expected_BTV[:, :-1].gather(-1, tokens_BT[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs_BT[:, 1:], expected, atol=1e-5, rtol=1e-5)
    assert not logprobs_BT[:, 0].any()
    entropy = -(expected_BTV.exp() * expected_BTV).sum(-1)[:, :-1]
    torch.testing.assert_close(entropy_BT[:, 1:], entropy, atol=1e-5, rtol=1e-5)


def test_draft_layers_equal_plain_formulae() -> None:
    model = perturbed_model(SPEC)
    weights = model.export_weights()
    tokens_T = torch.randint(0, SPEC.vocab_size, (9,), generator=torch.Generator().manual_seed(2))
    hidden_TD = plain_hidden(tokens_T, weights, SPEC)
    with torch.no_grad():
        embeddings_TBD = model.embedding_VD[tokens_T[:, None]]
        states = model.draft_states(model.forward_hidden(tokens_T[None]), embeddings_TBD)
        draft_logits = [(state_SBD @ model.embedding_VD.T).transpose(0, 1) for state_SBD in states]
    first_D, logits_V = plain_draft(hidden_TD[4], int(tokens_T[5]), weights, 0, SPEC)
    torch.testing.assert_close(draft_logits[0][0, 4], logits_V, atol=1e-5, rtol=1e-5)
    _, logits_V = plain_draft(first_D, int(tokens_T[6]), weights, 1, SPEC)
    torch.testing.assert_close(draft_logits[1][0, 4], logits_V, atol=1e-5, rtol=1e-5)
