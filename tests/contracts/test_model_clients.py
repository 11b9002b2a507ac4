"""What every engine behind the model client's protocol must do, ours and vLLM's alike."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.engine.local import LocalEngine
from ostinato.infra.serving.engine.start import Engine
from ostinato.models.decode.protocol import GenerateRequest, Generation, StopReason
from tests.contracts.model_clients import (
    ENGINES,
    MARKS,
    SPEC,
    VERSION,
    gives_routes,
    make_weights,
)
from tests.fakes.engine_runs import read_some
from tests.numerics.plain_model import plain_logits

pytestmark = pytest.mark.asyncio(loop_scope="module")
_PARAMS = [pytest.param(name, marks=MARKS.get(name, ())) for name in ENGINES]
PROMPT = (5, 9, 33, 71, 2, 40)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=_PARAMS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """One engine a kind for all contracts: vLLM takes a minute to start."""
    opened = ENGINES[request.param]()
    yield opened
    opened.close()


_numbers = iter(range(10**6))


def ask(**changes: object) -> GenerateRequest:
    number = next(_numbers)
    base = GenerateRequest(f"r{number}", f"s{number}", PROMPT, 16, (), seed=11)
    return dataclasses.replace(base, **changes)


def plain_logprobs(generation: Generation, prompt: tuple[int, ...], seed: int = 0) -> np.ndarray:
    context = torch.tensor(prompt + generation.token_ids)
    logprobs_TV = plain_logits(context, make_weights(seed), SPEC).log_softmax(-1)
    places = torch.arange(len(prompt) - 1, len(context) - 1)
    return logprobs_TV[places, context[places + 1]].numpy()


async def test_greedy_answers_are_the_plain_models(engine: Engine) -> None:
    generation = await engine.generate(ask(temperature=0.0))
    context = torch.tensor(PROMPT + generation.token_ids)
    best_T = plain_logits(context, make_weights(), SPEC).argmax(-1)
    assert generation.token_ids == tuple(best_T[len(PROMPT) - 1 : -1].tolist())
    assert generation.stop_reason is StopReason.LENGTH


async def test_logprobs_are_those_of_the_model_sampled_from(engine: Engine) -> None:
    generations = await asyncio.gather(*(engine.generate(ask(seed=seed)) for seed in range(12)))
    differences = np.concatenate(
        [one.logprobs_T - plain_logprobs(one, PROMPT) for one in generations]
    )
    assert np.mean(np.expm1(differences) - differences) <= 1e-6
    assert len({one.token_ids for one in generations}) > 3


async def test_a_seed_gives_the_same_answer_in_any_company(engine: Engine) -> None:
    alone = await engine.generate(ask(seed=4))
    others = (engine.generate(ask(seed=seed, token_ids=PROMPT[: 2 + seed])) for seed in range(4))
    together = (await asyncio.gather(engine.generate(ask(seed=4)), *others))[0]
    assert together.token_ids == alone.token_ids


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine: Engine) -> None:
    whole = await engine.generate(ask(temperature=1.5))
    stop = whole.token_ids[5]
    cut = await engine.generate(ask(temperature=1.5, stop_token_ids=(stop,)))
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert cut.stop_reason is StopReason.STOP_TOKEN


async def test_a_stop_sequence_ends_the_answer_and_is_part_of_it(engine: Engine) -> None:
    whole = await engine.generate(ask(temperature=1.5))
    run = whole.token_ids[6:8]
    first = next(at for at in range(15) if whole.token_ids[at : at + 2] == run)
    cut = await engine.generate(ask(temperature=1.5, stop_sequences=(run,)))
    assert cut.token_ids == whole.token_ids[: first + 2]
    assert len(cut.logprobs_T) == len(cut.token_ids)
    assert cut.stop_reason is StopReason.STOP_SEQUENCE


async def test_the_likeliest_token_alone_is_greedy(engine: Engine) -> None:
    limited = await engine.generate(ask(top_k=1))
    greedy = await engine.generate(ask(temperature=0.0))
    assert limited.token_ids == greedy.token_ids
    np.testing.assert_allclose(limited.logprobs_T, 0, atol=1e-6)


async def test_top_p_renormalises_its_logprobs(engine: Engine) -> None:
    generation = await engine.generate(ask(top_p=0.5, temperature=2.0))
    context = torch.tensor(PROMPT + generation.token_ids)
    shares_TV = (plain_logits(context, make_weights(), SPEC) / 2.0).softmax(-1)
    for at, token in enumerate(generation.token_ids):
        shares, order = shares_TV[len(PROMPT) - 1 + at].sort(descending=True)
        kept = int((shares.cumsum(0) - shares < 0.5).sum())
        place = order[:kept].tolist().index(token)
        expected = (shares[place] / shares[:kept].sum()).log().item()
        assert generation.logprobs_T[at] == pytest.approx(expected, abs=1e-4)


async def test_likeliest_tokens_are_those_of_the_distribution_sampled_from(engine: Engine) -> None:
    generation = await engine.generate(ask(top_logprobs=5))
    context = torch.tensor(PROMPT + generation.token_ids)
    logprobs_TV = plain_logits(context, make_weights(), SPEC).log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert len(generation.likeliest_T) == len(generation.token_ids)
    for pairs, logprobs_V in zip(generation.likeliest_T, logprobs_TV, strict=True):
        told, best = dict(pairs), logprobs_V.topk(5).values
        assert list(told.values()) == sorted(told.values(), reverse=True)
        np.testing.assert_allclose(list(told.values()), best, atol=1e-4)
        assert told == pytest.approx({token: logprobs_V[token].item() for token in told}, abs=1e-4)
    alone = await engine.generate(ask(top_logprobs=5, top_k=2, top_p=0.9))
    assert all(1 <= len(pairs) <= 2 for pairs in alone.likeliest_T)
    mass = [sum(np.exp(logprob) for _, logprob in pairs) for pairs in alone.likeliest_T]
    np.testing.assert_allclose(mass, 1, atol=1e-4)


async def test_a_full_context_is_an_answer(engine: Engine) -> None:
    full = await engine.generate(ask(token_ids=(1,) * 96))
    nearly = await engine.generate(ask(token_ids=(1,) * 90, max_new_tokens=50))
    assert (len(full.token_ids), full.stop_reason) == (0, StopReason.CONTEXT)
    assert (len(nearly.token_ids), nearly.stop_reason) == (6, StopReason.CONTEXT)


async def test_routes_name_the_experts_of_every_fed_position(engine: Engine) -> None:
    one = ask(temperature=0.0, token_ids=(*PROMPT, 17))
    generation = await engine.generate(one)
    rows = generation.routed_experts
    if not gives_routes(engine):
        assert rows.shape == (0, SPEC.num_layers, SPEC.experts_per_token)
        return
    assert rows.shape == (
        len(one.token_ids) + len(generation.token_ids) - 1,
        SPEC.num_layers,
        SPEC.experts_per_token,
    )
    again = await engine.generate(
        ask(token_ids=one.token_ids + generation.token_ids[:-1], max_new_tokens=1)
    )
    np.testing.assert_array_equal(np.sort(rows), np.sort(again.routed_experts))
    assert rows.min() >= 0
    assert len(np.unique(rows)) > 1


async def test_a_wrong_request_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"wanted 0\.\.95"):
        await engine.generate(ask(token_ids=(96,)))


async def test_a_caller_that_gives_up_leaves_the_engine_working(engine: Engine) -> None:
    task = asyncio.ensure_future(engine.generate(ask(max_new_tokens=80)))
    await asyncio.sleep(0)  # the request is held now; no engine makes 80 tokens in one turn
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len((await engine.generate(ask())).token_ids) == 16


async def test_unsound_weights_are_refused_and_the_old_ones_stay(engine: Engine) -> None:
    weights = make_weights(1)
    weights["model.norm.weight"][0] = float("nan")
    version = engine.version
    with pytest.raises(EngineError, match="not finite"):
        await engine.swap_weights(weights, version + 1)
    assert engine.version == version
    assert set((await engine.generate(ask())).weight_versions_T.tolist()) == {version}


async def test_new_weights_make_the_next_answer_and_old_caches_do_not(engine: Engine) -> None:
    before = await engine.generate(ask(temperature=0.0))
    report = await engine.swap_weights(make_weights(1), VERSION + 1)
    after = await engine.generate(ask(temperature=0.0))
    difference = after.logprobs_T - plain_logprobs(after, PROMPT, seed=1)
    assert np.mean(np.expm1(difference) - difference) <= 1e-6
    assert set(before.weight_versions_T.tolist()) == {VERSION}
    assert set(after.weight_versions_T.tolist()) == {VERSION + 1} == {report.version}
    await engine.swap_weights(make_weights(0), VERSION)
    assert (await engine.generate(ask(temperature=0.0))).token_ids == before.token_ids


async def test_a_running_answer_goes_on_under_new_weights_and_each_token_has_its_version(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = 1
    if not isinstance(engine, LocalEngine) and not torch.cuda.is_available():
        # vLLM's CPU build pauses, goes on and counts as on a GPU, but cannot take other weights meanwhile
        seed = 0

        async def keep_weights(*_: object, **__: object) -> None:
            await asyncio.sleep(0.2)

        monkeypatch.setattr(engine, "_reloads_in_place", True)
        monkeypatch.setattr(vars(engine)["_engine"], "collective_rpc", keep_weights)
    request = ask(temperature=0.0, max_new_tokens=100)
    stream = engine.stream(request)
    read = await read_some(stream, least=3)

    await engine.swap_weights(make_weights(seed), VERSION + 1)

    read += [token async for tokens in stream for token in tokens]
    whole = stream.close()
    versions = whole.weight_versions_T.tolist()
    assert tuple(read) == whole.token_ids
    assert versions == sorted(versions)
    assert {*versions} == {VERSION, VERSION + 1}
    first = versions.count(VERSION)
    plain = plain_logprobs(whole, PROMPT)
    np.testing.assert_allclose(whole.logprobs_T[:first], plain[:first], atol=1e-4)
    new = await engine.generate(ask(temperature=0.0))  # with no key or value of the old weights
    np.testing.assert_allclose(new.logprobs_T, plain_logprobs(new, PROMPT, seed), atol=1e-4)
    await engine.swap_weights(make_weights(), VERSION)


async def test_swaps_leave_the_files_of_one_version(engine: Engine) -> None:
    await engine.swap_weights(make_weights(), VERSION)
    if not isinstance(engine, LocalEngine):  # ours keeps no files
        assert len(list(Path(vars(engine)["_directory"].name).iterdir())) == 1


async def test_a_stream_is_the_answer_that_is_generated(engine: Engine) -> None:
    whole = await engine.generate(ask(temperature=0.0))
    stream = engine.stream(ask(temperature=0.0))
    read = [token async for tokens in stream for token in tokens]
    ended = stream.close()
    assert tuple(read) == ended.token_ids == whole.token_ids
    assert ended.stop_reason is StopReason.LENGTH
    np.testing.assert_allclose(ended.logprobs_T, whole.logprobs_T, atol=1e-5)


async def test_a_stream_that_is_closed_early_ends_with_what_was_sampled(engine: Engine) -> None:
    whole = await engine.generate(ask(temperature=0.0, max_new_tokens=40))
    stream = engine.stream(ask(temperature=0.0, max_new_tokens=40))
    read = await read_some(stream, least=3)
    ended = stream.close()
    assert ended.stop_reason is StopReason.CANCELLED
    assert len(read) <= len(ended.token_ids) < 40
    assert ended.token_ids == whole.token_ids[: len(ended.token_ids)]
    assert len(ended.logprobs_T) == len(ended.weight_versions_T) == len(ended.token_ids)
    # the engine goes on for others
    again = await engine.generate(ask(temperature=0.0))
    assert again.token_ids == whole.token_ids[:16]
