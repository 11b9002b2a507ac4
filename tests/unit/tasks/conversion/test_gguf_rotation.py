"""The scaled rotations of GGUF files, in and out."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter, RopeScalingType

from ostinato.infra.platform.errors import ConfigError
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.gguf_rotation import FACTORS, rotation_factors, with_factors
from ostinato.tasks.conversion.gguf_writing import GGUF_FILE
from ostinato.tasks.conversion.importing import import_model
from tests.fakes.gguf_files import rewrite_gguf
from tests.fakes.llama_cpp import read_with_llama_cpp
from tests.fakes.logits import forward_logits
from tests.fakes.published_model import write_published_model

NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
LLAMA_3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LONG = "def add(a, b):\n    return a + b  # 12 and 3 <|im_end|>\n" * 4


def write_files(folder: Path, rope: dict[str, Any]) -> Path:
    """A directory of the Hugging Face layout with a GGUF file of the same llama."""
    write_published_model(folder / "published", rope_parameters=rope)
    import_model(str(folder / "published"), folder / "checkpoint", folder / "cache")
    out = folder / "out"
    export_model(folder / "checkpoint", out, name="x", lineage=[], dtype=None, with_gguf=True)
    return out


def stored_factors(path: Path) -> np.ndarray:
    return next(tensor.data for tensor in GGUFReader(path).tensors if tensor.name == FACTORS)


def of_converter(rope: dict[str, Any], width: int) -> np.ndarray:
    """The table as llama.cpp's convert_hf_to_gguf.py computes it: frequency by frequency, in fp32."""
    factor, low, high, original = (rope[name] for name in NUMBERS)
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    table = []
    for frequency in 1.0 / rope["rope_theta"] ** exponents:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            table.append(1.0)
        elif wavelength > original / low:
            table.append(factor)
        else:
            kept = (original / wavelength - low) / (high - low)
            table.append(1 / ((1 - kept) / factor + kept))
    return torch.tensor(table, dtype=torch.float32).numpy()


@pytest.mark.parametrize("rope", [LLAMA_3, LINEAR], ids=lambda rope: rope["rope_type"])
def test_imported_file_computes_what_transformers_does_from_the_directory(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    out = write_files(tmp_path, rope)
    import_model(str(out / GGUF_FILE), tmp_path / "again", tmp_path / "cache")
    first, again = (load_checkpoint(tmp_path / name) for name in ("checkpoint", "again"))
    epsilon = first.spec.norm_epsilon  # fp32 in the file
    assert again.spec.model_copy(update={"norm_epsilon": epsilon}) == first.spec
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, again.weights[name]), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokens_BT = transformers.AutoTokenizer.from_pretrained(out)(LONG, return_tensors="pt").input_ids
    assert tokens_BT.shape[1] > 3 * LLAMA_3["original_max_position_embeddings"]
    ours = build_trainer_model(again.spec).eval()
    ours.import_weights(again.weights)
    with torch.no_grad():
        wanted_TV = theirs(input_ids=tokens_BT).logits[0]
        torch.testing.assert_close(forward_logits(ours, tokens_BT)[0], wanted_TV, atol=1e-4, rtol=0)
    ids, logits_TV = read_with_llama_cpp(out / GGUF_FILE, LONG)
    assert ids == tokens_BT[0].tolist()
    torch.testing.assert_close(logits_TV, wanted_TV, atol=1e-4, rtol=1e-5)


def test_a_table_goes_out_as_it_came_in(tmp_path: Path) -> None:
    out, again = write_files(tmp_path, LLAMA_3), tmp_path / "again"
    table = stored_factors(out / GGUF_FILE)
    assert np.array_equal(table, of_converter(LLAMA_3, 16))
    import_model(str(out / GGUF_FILE), again, tmp_path / "cache")
    export_model(again, tmp_path / "twice", name="x", lineage=[], dtype=None, with_gguf=True)
    assert np.array_equal(stored_factors(tmp_path / "twice" / GGUF_FILE), table)


@pytest.mark.parametrize(("base", "width"), [(500_000.0, 64), (500_000.0, 128), (1e6, 80)])
def test_numbers_are_found_from_the_converters_table(base: float, width: int) -> None:
    plain = {"rope_type": "default", "rope_theta": base}
    originals = (32, 48, 1000, 6144, 8192, 100_000)
    for factor, low, high, original in product(
        (2.7, 8.0, 32.0), (1.0, 2.0), (2.0, 4.0, 5.5), originals
    ):
        values = (factor, low, low * high, original)
        rope = {**plain, "rope_type": "llama3", **dict(zip(NUMBERS, values, strict=True))}
        table = of_converter(rope, width)
        assert np.array_equal(rotation_factors(rope, width), table)
        found = with_factors(Path("x"), plain, table, width)
        np.testing.assert_allclose(rotation_factors(found, width), table, rtol=1e-6)
        num_blended = ((table > 1) & (table < np.float32(factor))).sum()
        if low == 1 and num_blended > 1:  # else other numbers give the same table
            assert found == rope


def test_a_stretch_that_no_wavelength_reaches_is_found() -> None:
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    rope = {**plain, **LLAMA_3, "original_max_position_embeddings": 131_072}
    table = of_converter(rope, 128)
    assert 1 < table.max() < 8
    assert with_factors(Path("x"), plain, table, 128) == rope
    assert with_factors(Path("x"), plain, np.ones(64, np.float32), 128) == plain


def nudged(table: np.ndarray) -> np.ndarray:
    """The factor of a long wavelength a little smaller."""
    return np.where(np.arange(len(table)) == len(table) // 2, table * np.float32(0.999), table)


@pytest.mark.parametrize("change", [1 - 1e-4, 1 + 1e-4])
@pytest.mark.parametrize(("factor", "width"), [(8.0, 128), (32.0, 64)])
def test_each_factor_of_a_published_table_counts(factor: float, width: int, change: float) -> None:
    plain = {"rope_type": "default", "rope_theta": 500_000.0}
    rope = {**LLAMA_3, **plain, "factor": factor, "original_max_position_embeddings": 8192}
    table = of_converter(rope, width)
    for index in range(len(table)):
        changed = table.copy()
        changed[index] *= np.float32(change)
        with pytest.raises(ConfigError, match=r"tensor rope_freqs\.weight .* Llama 3's scaling"):
            with_factors(Path("x"), plain, changed, width)


TAMPERED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a factor nudged": nudged,
    "backwards": lambda table: table[::-1].copy(),
    "all doubled": lambda table: 2 * table,
    "one for all": lambda table: np.full_like(table, 2.0),
    "none": np.zeros_like,
    "too many": lambda table: np.concatenate([table, table[-1:]]),
    "no number": lambda table: table * np.float32("nan"),
    "no end": lambda table: np.where(table > 1, np.float32("inf"), table),
}


@pytest.mark.parametrize("fault", TAMPERED)
@pytest.mark.sampled(3)
def test_a_table_that_no_numbers_give_is_refused(fault: str, tmp_path: Path) -> None:
    out = write_files(tmp_path, LLAMA_3)
    rewrite_gguf(
        out / GGUF_FILE,
        tmp_path / "x.gguf",
        lambda name, rows: (TAMPERED[fault](rows) if name == FACTORS else rows, Kind.F32),
    )
    says = r"x\.gguf: tensor rope_freqs\.weight \([89],\) has factors .*, wanted 8 .*import the directory"
    with pytest.raises(ConfigError, match=says):
        import_model(str(tmp_path / "x.gguf"), tmp_path / "work" / "again", tmp_path / "cache")
    assert not list(tmp_path.glob("work/*"))


def test_a_table_in_a_file_that_is_scaled_already_is_refused(tmp_path: Path) -> None:
    out = write_files(tmp_path, LINEAR)
    rewrite_gguf(out / GGUF_FILE, tmp_path / "x.gguf", more={FACTORS: of_converter(LLAMA_3, 16)})
    with pytest.raises(
        ConfigError, match=r"factors 1 to 8 of a linear rotation, wanted 8 .* default"
    ):
        import_model(str(tmp_path / "x.gguf"), tmp_path / "again", tmp_path / "cache")


def test_another_scaling_is_refused_by_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = GGUFWriter.add_rope_scaling_type
    monkeypatch.setattr(
        GGUFWriter, "add_rope_scaling_type", lambda self, _: add(self, RopeScalingType.YARN)
    )
    out = write_files(tmp_path, LINEAR)
    says = (
        r"model\.gguf: llama\.rope\.scaling\.type = 'yarn' with factor 4\.0, wanted none or linear"
    )
    with pytest.raises(ConfigError, match=says):
        import_model(str(out / GGUF_FILE), tmp_path / "again", tmp_path / "cache")
