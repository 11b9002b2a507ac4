"""Mapping of a published architecture to and from `ModelSpec` and canonical weights.

Configurations are plain dictionaries (`config.json`). Weights pass one tensor at a time. This
module opens no file.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ostinato.models.families.config_fields import ConfigFields
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import weight_shapes

# Rows of a canonical tensor that one published tensor holds; the first index may be an expert's.
Place = tuple[int | slice, ...]
Fetch = Callable[[str], Tensor]
SHARED = "mlp.shared_experts."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DENSE_PARTS = ("mlp.gate_up_proj.weight", SHARED + "gate_up_proj.weight")


@dataclass(frozen=True, slots=True)
class Family:
    """One published architecture."""

    model_type: str  # of config.json
    architecture: str  # class name in transformers and vLLM
    read_config: Callable[[ConfigFields], ModelSpec]
    # The fields of config.json. None: the family cannot state this shape.
    write_config: Callable[[ModelSpec], dict[str, Any] | None]
    # An equivalent shape that the family can state: added weights are written as zeros, an added
    # output matrix as a copy of the embedding.
    widen: Callable[[ModelSpec], ModelSpec] = lambda spec: spec
    has_latent_attention: bool = False
    # Matrices that the files hold as rows of another matrix: name -> that matrix's name, and rows.
    fused: Callable[[ModelSpec], dict[str, tuple[str, slice]]] = lambda spec: {}

    def spec_of(self, config: Mapping[str, Any]) -> ModelSpec:
        """The shape. Raises ValueError for a missing, unknown or unsupported field."""
        fields = ConfigFields(config, self.model_type)
        spec = self.read_config(fields)
        fields.refuse_unread()
        return spec

    def config_of(self, spec: ModelSpec) -> dict[str, Any] | None:
        """The fields of `config.json`. None: the family cannot state this shape."""
        if (spec.latent is not None) != self.has_latent_attention:
            return None
        fields = self.write_config(self.widen(without_drafts(spec)))
        if fields is None:
            return None
        return {"architectures": [self.architecture], "model_type": self.model_type} | fields

    def published_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights that `write_weights` yields, in its order."""
        return _published_shapes(self.widen(without_drafts(spec)))

    def origins(self, spec: ModelSpec) -> dict[str, str]:
        """The canonical source of each weight of `write_weights`."""
        known, wide = weight_shapes(spec), self.widen(without_drafts(spec))
        return {
            published: EMBEDDING if name == HEAD and HEAD not in known else name
            for name in weight_shapes(wide)
            for published, _ in parts_of(wide, name)
        }

    def source_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights that `read_weights` fetches."""
        shapes, fused = _published_shapes(spec), self.fused(spec)
        for name, (source, rows) in fused.items():
            num_columns = shapes.pop(name)[1]
            shapes[source] = (max(rows.stop, shapes.get(source, (0,))[0]), num_columns)
        return shapes

    def sources_of(self, spec: ModelSpec, name: str) -> list[str]:
        """Names of the files' tensors from which a canonical one is read."""
        fused = self.fused(spec)
        return [fused.get(part, (part,))[0] for part, _ in parts_of(spec, name)]

    def read_weights(self, spec: ModelSpec, fetch: Fetch) -> Iterator[tuple[str, Tensor]]:
        """Yields canonical names and tensors. `fetch` reads a published tensor."""
        fused = self.fused(spec)

        def read(name: str) -> Tensor:
            source, rows = fused.get(name, (name, slice(None)))
            return fetch(source)[rows]

        for name, shape in weight_shapes(spec).items():
            parts = parts_of(spec, name)
            if len(parts) == 1:
                yield name, read(parts[0][0])
                continue
            whole: Tensor | None = None
            for published, place in parts:
                part = read(published)
                if whole is None:
                    whole = torch.empty(shape, dtype=part.dtype)
                whole = whole.to(torch.promote_types(whole.dtype, part.dtype))
                whole[place] = part
            assert whole is not None
            yield name, whole

    def write_weights(self, spec: ModelSpec, fetch: Fetch) -> Iterator[tuple[str, Tensor]]:
        """Yields published names and tensors. `fetch` reads a canonical tensor."""
        known, wide = weight_shapes(spec), self.widen(without_drafts(spec))
        for name, shape in weight_shapes(wide).items():
            source = EMBEDDING if name == HEAD and HEAD not in known else name
            tensor = fetch(source) if source in known else torch.zeros(shape)
            for published, place in parts_of(wide, name):
                yield published, tensor[place].contiguous()


def _published_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weight_shapes(spec).items():
        for published, place in parts_of(spec, name):
            shapes[published] = _shape_at(place, shape)
    return shapes


def _shape_at(place: Place, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a part of a tensor. Sizes that no tensor can have are allowed."""
    chosen = zip(place, shape[: len(place)], strict=True)
    kept = [part.indices(size) for part, size in chosen if isinstance(part, slice)]
    return (*(stop - start for start, stop, _ in kept), *shape[len(place) :])


def without_drafts(spec: ModelSpec) -> ModelSpec:
    """The trunk's shape. No published family has draft layers of our form."""
    return spec.model_copy(update={"mtp_depth": 0, "mtp_hidden_size": 0})


def parts_of(spec: ModelSpec, name: str) -> list[tuple[str, Place]]:
    """Published tensors that one canonical tensor consists of, each with its place in it.

    Gate and up matrices of an MLP are published separately, and so is each expert.
    """
    for ending in DENSE_PARTS:
        if name.endswith(ending):
            stem = name.removesuffix("gate_up_proj.weight")
            inner = spec.shared_expert_hidden_size if SHARED in name else spec.dense_hidden_size
            return [
                (f"{stem}gate_proj.weight", (slice(0, inner),)),
                (f"{stem}up_proj.weight", (slice(inner, 2 * inner),)),
            ]
    inner, experts = spec.expert_hidden_size, range(spec.num_experts)
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        halves = (("gate_proj", slice(0, inner)), ("up_proj", slice(inner, 2 * inner)))
        return [
            (f"{stem}{expert}.{half}.weight", (expert, rows))
            for expert in experts
            for half, rows in halves
        ]
    if name.endswith("experts.down_proj"):
        stem = name.removesuffix("down_proj")
        return [(f"{stem}{expert}.down_proj.weight", (expert,)) for expert in experts]
    return [(name, (slice(None),))]
