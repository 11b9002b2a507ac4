"""Fields of a published `config.json`. A field that was not read is refused by name."""

import sys
from collections.abc import Mapping
from typing import Any

from ostinato.models.spec import RopeBands, Yarn

# Fields that do not change what the weights compute.
IGNORED = {
    "architectures",
    "model_type",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "_name_or_path",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "use_cache",
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
    "is_llama_config",  # a mark of SmolLM2
    "transformers.js_config",
    "_attn_implementation_autoset",
    "unsloth_fixed",
    "unsloth_version",
}
# Fields that are accepted with these values only (empty: any): other values change the network.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "max_window_layers": (),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "chunk_size_feed_forward": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "problem_type": (None,),
    "return_dict": (True,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "id2label": (),
    "label2id": (),
}


class ConfigFields:
    """A configuration that remembers which of its fields were read."""

    def __init__(self, config: Mapping[str, Any], model_type: str) -> None:
        self._config, self._model_type = config, model_type
        self._read: set[str] = set()

    def take(self, name: str, *default: Any) -> Any:
        """Value of a field, or `default` if it is absent or null. Raises ValueError without one."""
        self._read.add(name)
        value = self._config.get(name)
        if value is not None:
            return value
        if default:
            return default[0]
        raise ValueError(f"config.json ({self._model_type}) has no {name!r}, wanted a value")

    def is_null(self, name: str) -> bool:
        """Whether the field is present and null."""
        self._read.add(name)
        return name in self._config and self._config[name] is None

    def count(self, name: str, *default: int) -> int:
        """Value of a field that must be a positive whole number. Raises ValueError otherwise."""
        value = self.take(name, *default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"config.json ({self._model_type}): {name} = {value!r}, wanted a positive whole number"
            )
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers, empty if the field is absent."""
        value = self.take(name, [])
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ValueError(
                f"config.json ({self._model_type}): {name} = {value!r}, wanted a list of whole numbers"
            )
        return value

    def expect(self, name: str, wanted: Any, *default: Any) -> None:
        """Refuses any value but the supported one."""
        value = self.take(name, *default)
        if value != wanted:
            raise ValueError(
                f"config.json ({self._model_type}): {name} = {value!r}, only {wanted!r} is supported"
            )

    def rope(
        self, max_tokens: int, fraction: float = 1.0, *, with_yarn: bool = False
    ) -> dict[str, Any]:
        """Rotary fields of `ModelSpec`, with `yarn` if `with_yarn` is set.

        Newer files have `rope_parameters`, older ones `rope_theta` and `rope_scaling`. `fraction`
        is the rotated part of a head if the file does not state it.
        """
        scaling = self._object("rope_scaling") | self._object("rope_parameters")
        scaling.setdefault("rope_theta", self.take("rope_theta", 10_000.0))
        scaling.setdefault("partial_rotary_factor", self.take("partial_rotary_factor", fraction))
        base = self._number(scaling, "rope_theta")
        fraction = self._number(scaling, "partial_rotary_factor")
        kind = scaling.pop("rope_type", None) or scaling.pop("type", "default")
        scaling.pop("type", None)
        result: dict[str, Any] = {"rope_base": base, "rotary_fraction": fraction}
        if kind == "linear" and not with_yarn:
            result["rope_scaling_factor"] = self._number(scaling, "factor")
        elif kind == "llama3" and not with_yarn:
            scaling.setdefault("original_max_position_embeddings", max_tokens)
            result["rope_bands"] = RopeBands(
                factor=self._number(scaling, "factor"),
                low_frequency_factor=self._number(scaling, "low_freq_factor"),
                high_frequency_factor=self._number(scaling, "high_freq_factor"),
                original_tokens=int(self._number(scaling, "original_max_position_embeddings")),
            )
        elif kind == "yarn" and with_yarn:
            result["yarn"] = self._yarn(scaling, max_tokens)
        elif kind != "default":
            raise ValueError(
                f"config.json ({self._model_type}): rope_type = {kind!r}, wanted one of default, "
                + ("yarn" if with_yarn else "linear, llama3")
            )
        if scaling:
            raise ValueError(
                f"config.json ({self._model_type}): RoPE field {sorted(scaling)[0]!r} is not "
                f"understood (rope_type {kind!r})"
            )
        return result

    def _yarn(self, scaling: dict[str, Any], max_tokens: int) -> Yarn:
        """Removes YaRN's numbers from the RoPE fields and returns them."""
        defaults = {
            "original_max_position_embeddings": max_tokens,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.0,
            "mscale_all_dim": 0.0,
        }
        number = {
            name: self._number({name: default} | scaling, name)
            for name, default in {"factor": None, **defaults}.items()
        }
        for name in number:
            scaling.pop(name, None)
        return Yarn(
            factor=number["factor"],
            fast_turns=number["beta_fast"],
            slow_turns=number["beta_slow"],
            original_tokens=int(number["original_max_position_embeddings"]),
            mscale=number["mscale"],
            mscale_all_dim=number["mscale_all_dim"],
        )

    def _object(self, name: str) -> dict[str, Any]:
        """A copy of a field's object without nulls. Empty if the field is absent."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise ValueError(
                f"config.json ({self._model_type}): {name} = {value!r}, wanted an object"
            )
        return {key: item for key, item in value.items() if item is not None}

    def _number(self, scaling: dict[str, Any], name: str) -> float:
        """Removes a number from the RoPE fields and returns it."""
        value = scaling.pop(name, None)
        if value is None:
            raise ValueError(
                f"config.json ({self._model_type}): rope_scaling (or rope_parameters) has no "
                f"{name!r}, wanted a number"
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max:
            raise ValueError(
                f"config.json ({self._model_type}): {name} = {value!r:.80}, wanted a finite number"
            )
        return float(value)

    def refuse_unread(self) -> None:
        """Raises ValueError for the first unread field that could change the network."""
        for name, value in self._config.items():
            if name in self._read or name in IGNORED:
                continue
            if name in NEUTRAL and (not NEUTRAL[name] or value in NEUTRAL[name]):
                continue
            wanted = f"only {NEUTRAL[name][0]!r} is supported" if name in NEUTRAL else "remove it"
            if name not in NEUTRAL:
                wanted = "this field is not understood"
            raise ValueError(f"config.json ({self._model_type}): {name} = {value!r}, {wanted}")
