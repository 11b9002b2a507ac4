"""Compiled decoding computes what the plain model computes, and a row never sees its neighbours."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ostinato.models.decode.cache import SlotCache
from ostinato.models.decode.compiled.kernels import (
    exponential,
    multiply_packed,
    normalize_row,
    softmax_in_place,
)
from ostinato.models.decode.compiled.loader import drop_stale_code, load_native_trunk
from ostinato.models.decode.compiled.packed import pack_matrix, whole_vectors
from ostinato.models.decode.compiled.sampling import race_drafts, race_rows
from ostinato.models.decode.compiled.vectors import largest_of
from ostinato.models.decode.engine import CachePolicy, DecodeEngine, EngineConfig
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.decode.sampling import exponential_noise, sample_rows, seed_key
from ostinato.models.decode.weights import prepare_weights
from ostinato.models.spec import ModelSpec
from tests.fakes.engine_runs import run_in_order
from tests.fakes.tiny_model import TINY, random_weights
from tests.numerics.plain_model import plain_logits

pytestmark = pytest.mark.timeout(300)  # the first run on a machine compiles for 20 s of CPU

# 48 = one panel of 32 and one of 16 lanes; 70 tokens and 6 experts leave padding.
SPEC = TINY.model_copy(
    update={
        "vocab_size": 70,
        "hidden_size": 48,
        "head_dim": 16,
        "num_experts": 6,
        "expert_hidden_size": 16,
        "mtp_hidden_size": 32,
    }
)
CANONICAL = random_weights(SPEC)
WEIGHTS = prepare_weights(SPEC, CANONICAL, 0)
LATER = prepare_weights(SPEC, random_weights(SPEC, seed=1), 1)


def make_engine(**changes: object) -> DecodeEngine:
    config = EngineConfig(**({"slots": 8} | changes))  # type: ignore[arg-type]
    return DecodeEngine(SPEC, WEIGHTS, config)


def requests(count: int, new_tokens: int = 24) -> list[GenerateRequest]:
    rng = np.random.default_rng(3)
    return [
        GenerateRequest(
            f"r{index}",
            f"s{index}",
            tuple(rng.integers(0, SPEC.vocab_size, int(rng.integers(1, 40))).tolist()),
            new_tokens,
            (),
            temperature=(1.0, 0.7, 0.0)[index % 3],
            top_p=0.9 if index % 4 == 3 else 1.0,
            seed=index,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 5, 16), (7, 33, 208), (4, 64, 64)])
def test_a_packed_product_adds_the_matrix_product(rows: int, depth: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    x_NK = rng.normal(size=(rows, depth)).astype(np.float32)
    w_KO = rng.normal(size=(depth, columns)).astype(np.float32)
    y_NO = rng.normal(size=(rows, columns)).astype(np.float32)
    expected = y_NO.astype(np.float64) + x_NK.astype(np.float64) @ w_KO
    packed, flat = pack_matrix(torch.from_numpy(w_KO)), y_NO.reshape(-1).copy()
    multiply_packed(x_NK.reshape(-1), 0, depth, packed, 0, flat, 0, columns, rows, depth, columns)
    np.testing.assert_allclose(flat.reshape(rows, columns), expected, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13])
def test_a_products_row_is_the_same_bit_for_bit_alone_and_among_others(rows: int) -> None:
    rng = np.random.default_rng(0)
    x_NK = rng.normal(size=(rows, 48)).astype(np.float32)
    packed = pack_matrix(torch.from_numpy(rng.normal(size=(48, 112)).astype(np.float32)))
    together = np.zeros(rows * 112, dtype=np.float32)
    multiply_packed(x_NK.reshape(-1), 0, 48, packed, 0, together, 0, 112, rows, 48, 112)
    for row in range(rows):
        alone = np.zeros(112, dtype=np.float32)
        multiply_packed(x_NK[row].copy(), 0, 48, packed, 0, alone, 0, 112, 1, 48, 112)
        np.testing.assert_array_equal(alone, together[row * 112 : (row + 1) * 112])


def test_a_product_that_is_new_overwrites_what_stood_there() -> None:
    rng = np.random.default_rng(0)
    x_NK = rng.normal(size=(5, 48)).astype(np.float32).reshape(-1)
    packed = pack_matrix(torch.from_numpy(rng.normal(size=(48, 80)).astype(np.float32)))
    added, new = np.zeros(400, dtype=np.float32), np.full(400, np.nan, dtype=np.float32)
    multiply_packed(x_NK, 0, 48, packed, 0, added, 0, 80, 5, 48, 80)
    multiply_packed(x_NK, 0, 48, packed, 0, new, 0, 80, 5, 48, 80, 1)
    np.testing.assert_array_equal(new, added)


def test_packed_arrays_begin_at_cache_lines() -> None:
    arrays = [array for part in (WEIGHTS.trunk, *WEIGHTS.drafts) for array in part]
    assert all(array.ctypes.data % 64 == 0 for array in arrays if len(array))


@pytest.mark.parametrize("count", [1, 5, 8, 16, 17, 63, 64, 77, 300])
def test_softmax_and_norm_are_right_at_any_length(count: int) -> None:
    row = np.random.default_rng(count).normal(size=count).astype(np.float32)
    exact = np.exp(row.astype(np.float64))
    softened, normal = row.copy(), row.copy()
    softmax_in_place(softened)
    np.testing.assert_allclose(softened, exact / exact.sum(), rtol=1e-6)
    assert largest_of(row) == row.max()
    normalize_row(row, 0, normal, 0, count, np.float32(1e-6))
    mean_square = np.mean(row.astype(np.float64) ** 2)
    np.testing.assert_allclose(normal, row / np.sqrt(mean_square + 1e-6), rtol=1e-6)


def test_the_exponential_is_exact_to_rounding() -> None:
    for x in np.linspace(-80, 80, 997, dtype=np.float32):
        assert exponential(x) == pytest.approx(np.exp(np.float64(x)), rel=3e-7)


def test_sampling_draws_what_rows_under_limits_would_draw() -> None:
    rows, vocab = 600, 70
    logits_RV = np.random.default_rng(1).normal(size=(rows, vocab)).astype(np.float32)
    temperature_R = np.tile(np.array([1.0, 0.5, 0.0], dtype=np.float32), rows // 3)
    seeds_R, positions_R = np.full(rows, seed_key(9)), np.arange(rows)
    limits = np.ones(rows, np.float32), np.zeros(rows, np.int64)
    noise_RV = exponential_noise(vocab, seeds_R, positions_R)
    tokens_R, logprobs_R = sample_rows(
        torch.from_numpy(logits_RV), temperature_R, *limits, noise_RV
    )
    step = whole_vectors(vocab)
    padded = np.zeros((rows, step), dtype=np.float32)
    padded[:, :vocab] = logits_RV
    found_R, found_logprobs_R = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    scratch = np.zeros(vocab, np.float32)
    race_rows(
        padded.reshape(-1),
        step,
        vocab,
        seeds_R,
        positions_R,
        temperature_R,
        scratch,
        found_R,
        found_logprobs_R,
    )
    np.testing.assert_array_equal(found_R, tokens_R)
    np.testing.assert_allclose(found_logprobs_R, logprobs_R, atol=2e-6)


@pytest.mark.parametrize("held", [0, 1, 3])
def test_drafts_are_drawn_up_to_the_first_that_fails(held: int) -> None:
    rows, vocab, step = 4, 70, whole_vectors(70)
    logits = np.random.default_rng(2).normal(size=3 * rows * step).astype(np.float32)
    places_R = np.arange(3 * rows) % rows
    keys_R, temperature_R = np.full(3 * rows, seed_key(9)), np.ones(3 * rows, np.float32)
    scratch = np.zeros(vocab, np.float32)
    all_R, all_logprobs_R = np.zeros(3 * rows, np.int64), np.zeros(3 * rows, np.float32)
    rules = keys_R, places_R, temperature_R, scratch
    race_rows(logits, step, vocab, *rules, all_R, all_logprobs_R)
    first = rows  # of the second of three slots
    fed_m = np.array([0, *all_R[first : first + rows - 1]])
    if held < rows - 1:
        fed_m[held + 1] += 1
    found_R, logprobs_R = np.full(3 * rows, -1), np.full(3 * rows, np.nan, np.float32)
    drawn = race_drafts(logits, step, vocab, first, fed_m, *rules, found_R, logprobs_R)
    assert drawn == held + 1
    is_drawn_R = (np.arange(3 * rows) >= first) & (np.arange(3 * rows) < first + drawn)
    np.testing.assert_array_equal(found_R, np.where(is_drawn_R, all_R, -1))
    np.testing.assert_array_equal(logprobs_R, np.where(is_drawn_R, all_logprobs_R, np.nan))


def plain_logprobs(
    one: GenerateRequest, generation: Generation, weights: dict[str, torch.Tensor]
) -> np.ndarray:
    context = torch.tensor(one.token_ids + generation.token_ids)
    logprobs_TV = plain_logits(context, weights, SPEC).log_softmax(-1)
    places = torch.arange(len(one.token_ids) - 1, len(context) - 1)
    return logprobs_TV[places, context[places + 1]].numpy()


@pytest.mark.parametrize("depth", [0, 2])
def test_native_logprobs_equal_the_plain_models(depth: int) -> None:
    unlimited = [dataclasses.replace(one, temperature=1.0, top_p=1.0) for one in requests(12)]
    engine = make_engine(prefill_tokens_per_step=16, draft_layers=depth)
    for one, generation in zip(unlimited, run_in_order(engine, unlimited), strict=True):
        difference = generation.logprobs_T - plain_logprobs(one, generation, CANONICAL)
        assert np.abs(difference).max() < 3e-5


def test_native_logprobs_are_the_same_bit_for_bit_in_any_batch_and_chunking() -> None:
    wanted = requests(9)
    together = run_in_order(make_engine(), wanted)
    for one, expected in zip(wanted, together, strict=True):
        if one.top_p < 1:
            continue  # torch sorts whole batches
        alone = run_in_order(make_engine(slots=1, prefill_tokens_per_step=5), [one])[0]
        assert alone.token_ids == expected.token_ids
        np.testing.assert_array_equal(alone.logprobs_T, expected.logprobs_T)


@pytest.mark.parametrize("group", [2, 5, 9, 16])
def test_rows_of_one_slot_attend_together_as_they_would_alone(group: int) -> None:
    tokens_T = np.random.default_rng(4).integers(0, SPEC.vocab_size, 64)

    def feed(group: int) -> tuple[np.ndarray, np.ndarray]:
        cache = SlotCache(SPEC, 3, 64)
        native = load_native_trunk(SPEC, cache, 64)
        states, routes = [], []
        for start in range(0, 64, group):
            places = np.arange(start, min(64, start + group))
            slots_N = np.repeat([2, 0], len(places))
            positions_N = np.tile(places, 2)
            found = native.forward(WEIGHTS, tokens_T[positions_N], positions_N, slots_N)
            routes.append(found[: len(places)].copy())
            hidden, _ = native.project(WEIGHTS, np.arange(2 * len(places)))
            np.testing.assert_array_equal(hidden[: len(places)], hidden[len(places) :])
            states.append(hidden[: len(places)].copy())
        return np.concatenate(states), np.concatenate(routes)

    for together, alone in zip(feed(group), feed(1), strict=True):
        np.testing.assert_array_equal(together, alone)


@pytest.mark.slow  # compiles everything once more
@pytest.mark.nightly
def test_the_process_that_compiles_has_the_bits_of_those_that_find_it_compiled(
    tmp_path: Path,
) -> None:
    program = """if True:
        from tests.fakes.engine_runs import run_in_order
        from tests.unit.models.decode.test_native import make_engine, requests
        for made in run_in_order(make_engine(draft_layers=2), requests(4, 90)):
            print(made.token_ids, made.logprobs_T.tobytes().hex())
        """
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    first, second = (
        subprocess.run(command, env=environment, check=True, capture_output=True).stdout
        for _ in range(2)
    )
    assert any(tmp_path.rglob("*.nbc"))
    assert first == second


@pytest.mark.slow  # compiles products twice
def test_products_have_the_same_bits_in_the_tiles_of_any_processor(tmp_path: Path) -> None:
    program = """if True:
        import numpy, torch
        from ostinato.models.decode.compiled.kernels import multiply_packed
        from ostinato.models.decode.compiled.packed import aligned_floats, pack_matrix
        generator = torch.Generator().manual_seed(0)
        depth = 37
        for columns in (16, 48, 64, 176):
            matrix_KO = torch.randn(depth, columns, generator=generator)
            packed = pack_matrix(matrix_KO)
            rows_NK = torch.randn(14, depth, generator=generator)
            exact_NO = rows_NK.double() @ matrix_KO.double()
            x = aligned_floats(rows_NK.numel())
            x[:] = rows_NK.numpy().ravel()
            for rows in range(1, 15):
                y = aligned_floats(rows * columns)
                multiply_packed(x, 0, depth, packed, 0, y, 0, columns, rows, depth, columns, 1)
                found_NO = torch.from_numpy(y.reshape(rows, columns))
                # 37 roundings of sums up to 30
                torch.testing.assert_close(found_NO.double(), exact_NO[:rows], atol=1e-4, rtol=0)
                print(found_NO[0].numpy().tobytes().hex(), y.tobytes().hex())
        """
    short = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}
    here, without_long_registers = (
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), **environment},
            check=True,
            capture_output=True,
        ).stdout
        for environment in ({}, short)
    )
    assert here
    assert here == without_long_registers


def test_native_decoding_follows_a_swap() -> None:
    engine = make_engine(cache_policy=CachePolicy.EXACT)
    one = requests(1)[0]
    engine.submit(one)
    for _ in range(6):
        engine.step()
    made = len(engine.sampled_tokens(one.request_id, 0))
    engine.swap_weights(LATER)
    finished: list[Generation] = []
    while engine.has_work:
        finished += engine.step()
    expected_T = plain_logprobs(one, finished[0], random_weights(SPEC, seed=1))
    np.testing.assert_allclose(finished[0].logprobs_T[made:], expected_T[made:], atol=3e-5)
    assert finished[0].weight_versions_T.tolist() == [0] * made + [1] * (24 - made)


@pytest.mark.parametrize(
    ("change", "wanted"), [({"head_dim": 8}, 16), ({"mtp_hidden_size": 12}, 8)]
)
def test_shapes_that_do_not_fill_vectors_are_refused_by_name(
    change: dict[str, int], wanted: int
) -> None:
    spec: ModelSpec = SPEC.model_copy(update=change)
    with pytest.raises(ValueError, match=f"{next(iter(change))}=.*, wanted a multiple of {wanted}"):
        prepare_weights(spec, random_weights(spec), 0)


def test_code_compiled_from_other_sources_is_dropped(tmp_path: Path) -> None:
    source, compiled = tmp_path / "native_tiles.py", tmp_path / "__pycache__" / "native_trunk.f.nbi"
    source.write_text("one")
    drop_stale_code(tmp_path)
    compiled.write_bytes(b"code that calls native_tiles")
    drop_stale_code(tmp_path)
    assert compiled.exists()
    source.write_text("two")
    drop_stale_code(tmp_path)
    assert not compiled.exists()


def test_dense_model_computes_the_same_whatever_its_spec_says_of_a_router() -> None:
    experts = {"num_experts": 0, "experts_per_token": 0, "expert_hidden_size": 0}
    layers = {"num_dense_layers": SPEC.num_layers, "dense_hidden_size": 16}
    dense = SPEC.model_copy(update=experts | layers)
    canonical = random_weights(dense)

    def answers(spec: ModelSpec) -> list[list[float]]:
        engine = DecodeEngine(spec, prepare_weights(spec, canonical, 0), EngineConfig(slots=8))
        return [answer.logprobs_T.tolist() for answer in run_in_order(engine, requests(2))]

    wanted = answers(dense)
    for change in ({"router_scale": 2.5}, {"router_normalizes": False}):
        assert answers(dense.model_copy(update=change)) == wanted
