"""The rolling loss counts each token once, with half a window before it, and equals the model's own."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.evaluation.base_models.run import measure_codebase, rolling_windows
from tests.fakes.small_spec import make_spec


@given(st.integers(1, 500), st.integers(2, 64))
def test_every_token_is_scored_once_after_half_a_window(num_tokens: int, window: int) -> None:
    scored = []
    for start, first, stop in rolling_windows(num_tokens, window):
        assert stop - start <= window
        assert first - start >= min(first, window // 2)
        scored += range(first, stop)
    assert scored == list(range(1, num_tokens))


def test_loss_is_the_models_in_bits_per_byte() -> None:
    model = build_trainer_model(make_spec(50, 32, max_sequence_tokens=64), seed=1).eval()
    tokens_T = torch.randint(0, 50, (60,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = -float(model.token_logprobs(tokens_T[None]).sum()) / math.log(2) / 120
    told: list[int] = []
    found = measure_codebase(model, tokens_T.tolist(), 120, 64, told.append)
    assert found.bits_per_byte == pytest.approx(wanted, rel=1e-5)
    assert told[-1] == 60
    # a shorter context is another distribution, and all windows are batched
    rolled = measure_codebase(model, tokens_T.tolist(), 120, 8, told.append)
    assert rolled.bits_per_byte == pytest.approx(math.log2(50) * 60 / 120, rel=0.5)
    assert rolled.bits_per_byte != found.bits_per_byte
