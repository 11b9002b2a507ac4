"""The chain's format as a stranger meets it: the reader printed in its README rebuilds every version."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ostinato.infra.serving.weights
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import weight_shapes
from tests.fakes.nano_spec import NANO
from tests.fakes.tiny_model import TINY, random_weights
from tests.unit.infra.serving.weights.strategies import same_bits


def reader_of_the_readme() -> Callable[[Path, str, int], dict[str, torch.Tensor]]:
    text = (Path(ostinato.infra.serving.weights.__file__).parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert "infra" not in code
    assert len(code[code.index("def ") :].splitlines()) <= 22
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope["read_version"]


def step(weights: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in weights.items():
        pick = torch.rand(tensor.shape, generator=generator) < share
        moved[name] = torch.where(pick, tensor * 1.5 + 1e-3, tensor)
    return moved


def test_format_a_reader_of_twenty_lines_rebuilds_anchors_and_deltas(tmp_path: Path) -> None:
    read_version = reader_of_the_readme()
    store = ObjectStore.from_url(f"file://{tmp_path}")
    publisher = ChainPublisher(store, "c", anchor_every=4)
    weights = {
        name: tensor.bfloat16() if index % 2 else tensor
        for index, (name, tensor) in enumerate(random_weights(TINY).items())
    }
    weights["sparse"] = torch.zeros(300_000)
    kinds = []
    for version in range(7):
        kinds.append(publisher.publish(version, weights).kind)
        assert same_bits(read_version(tmp_path, "c", version), weights)
        weights = step(weights, 0.02, version)
        weights["sparse"][version * 70_000 % 300_000] = float(version + 1)
    assert set(kinds) == {"anchor", "delta"}


def test_format_names_on_the_chain_are_the_hugging_face_names() -> None:
    """The map of a checkpoint import and the names on a chain are one table."""
    for spec in (NANO, TINY):
        assert isinstance(spec, ModelSpec)
        names = set(weight_shapes(spec))
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= names
        assert "model.layers.0.self_attn.q_proj.weight" in names
        assert "model.layers.0.mlp.experts.down_proj" in names
