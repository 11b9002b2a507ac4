"""The fields of a published `config.json`, each read once; what nobody read is refused by name."""

from collections.abc import Mapping
from typing import Any

from ostinato.models.spec import RopeBands

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
    "rope_interleaved",  # false wherever it stands; the llama family has one form
    "transformers.js_config",
}
# Fields that may stand there with the value that means "no": any other changes the network.
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
        """Value of a field, `default` where it is absent or null. ValueError without a default."""
        self._read.add(name)
        value = self._config.get(name)
        if value is not None:
            return value
        if default:
            return default[0]
        raise ValueError(f"config.json ({self._model_type}) has no {name!r}, wanted a value")

    def expect(self, name: str, wanted: Any, *default: Any) -> None:
        """Refuses another value than the one supported."""
        value = self.take(name, *default)
        if value != wanted:
            raise ValueError(
                f"config.json ({self._model_type}): {name} = {value!r}, only {wanted!r} is supported"
            )

    def rope(self, max_tokens: int, fraction: float = 1.0) -> dict[str, Any]:
        """The fields of `ModelSpec` that say how positions rotate heads.

        Newer files have `rope_parameters`, older ones `rope_theta` and `rope_scaling`. `fraction` is
        the part of a head that is rotated where the file is silent.
        """
        scaling = dict(self.take("rope_scaling", {}) or {})
        scaling |= dict(self.take("rope_parameters", {}) or {})
        base = scaling.pop("rope_theta", None) or self.take("rope_theta", 10_000.0)
        fraction = self.take("partial_rotary_factor", fraction)
        fraction = scaling.pop("partial_rotary_factor", fraction)
        self.take("rope_theta", None)
        kind = scaling.pop("rope_type", None) or scaling.pop("type", "default")
        scaling.pop("type", None)
        result: dict[str, Any] = {"rope_base": float(base), "rotary_fraction": float(fraction)}
        if kind == "linear":
            result["rope_scaling_factor"] = float(scaling.pop("factor"))
        elif kind == "llama3":
            result["rope_bands"] = RopeBands(
                factor=scaling.pop("factor"),
                low_frequency_factor=scaling.pop("low_freq_factor"),
                high_frequency_factor=scaling.pop("high_freq_factor"),
                original_tokens=scaling.pop("original_max_position_embeddings", max_tokens),
            )
        elif kind != "default":
            raise ValueError(
                f"config.json ({self._model_type}): rope_type = {kind!r}, wanted one of default, "
                "linear, llama3"
            )
        if scaling:
            raise ValueError(
                f"config.json ({self._model_type}): RoPE field {sorted(scaling)[0]!r} is not "
                f"understood (rope_type {kind!r})"
            )
        return result

    def refuse_unread(self) -> None:
        """ValueError with the first field that nobody read and that could change the network."""
        for name, value in self._config.items():
            if name in self._read or name in IGNORED:
                continue
            if name in NEUTRAL and (not NEUTRAL[name] or value in NEUTRAL[name]):
                continue
            wanted = f"only {NEUTRAL[name][0]!r} is supported" if name in NEUTRAL else "remove it"
            if name not in NEUTRAL:
                wanted = "this field is not understood"
            raise ValueError(f"config.json ({self._model_type}): {name} = {value!r}, {wanted}")
