"""Configurations of common decoders without transformers, whose import takes most of a second and 17 MiB.

Only what needs no interpretation is taken: a known model type, all sizes given, rotary embeddings of the default kind,
no field whose meaning is not known here. For anything else the answer is None, and transformers reads the
configuration, or refuses it with its own message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_Check = Callable[[Any], bool]
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_float(value: Any) -> bool:
    return type(value) in {int, float}


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_str(value: Any) -> bool:
    return type(value) is str


def _is_ids(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, list) and all(_is_int(item) for item in value))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(_is_str(item) for item in value)


def _is_rope(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"rope_theta", "rope_type"}
        and value.get("rope_type", "default") == "default"
        and _is_float(value.get("rope_theta"))
    )


def _is_layer_types(value: Any) -> bool:
    return _is_names(value) and _LAYER_TYPES.issuperset(value)


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


# Fields that must be there, ...
_SIZES: Mapping[str, _Check] = MappingProxyType(
    {
        "model_type": _is_str,
        "vocab_size": _is_size,
        "hidden_size": _is_size,
        "intermediate_size": _is_size,
        "num_hidden_layers": _is_size,
        "num_attention_heads": _is_size,
        "num_key_value_heads": _is_size,
        "max_position_embeddings": _is_size,
        "rms_norm_eps": _is_float,
        "tie_word_embeddings": _is_bool,
        "rope_parameters": _is_rope,
        "eos_token_id": _or_none(_is_ids),
    }
)
# ... that may be, with transformers' default, ...
_TOKENS: Mapping[str, tuple[Any, _Check]] = MappingProxyType(
    {name: (None, _or_none(_is_ids)) for name in ("bos_token_id", "pad_token_id")}
)
_SILU: tuple[str, _Check] = ("silu", _is_str)
_FALSE: tuple[bool, _Check] = (False, _is_bool)
# ... and that change nothing.
_NEUTRAL: Mapping[str, _Check] = MappingProxyType(
    {
        "architectures": _or_none(_is_names),
        "attention_dropout": _is_float,
        "dtype": _is_str,
        "torch_dtype": _is_str,
        "initializer_range": _is_float,
        "max_window_layers": _is_int,
        "transformers_version": _is_str,
        "use_cache": _is_bool,
        "_name_or_path": _is_str,
        "_model_name_or_path": _is_str,
    }
)


@dataclass(frozen=True, slots=True)
class _Type:
    """A model type: what its configuration must and may have beside the sizes, and what follows from that."""

    needs: Mapping[str, _Check] = field(default_factory=dict)
    has: Mapping[str, tuple[Any, _Check]] = field(default_factory=dict)
    nested_rope: bool = False


_FULL = ("full_attention",)
_WINDOWS: Mapping[str, tuple[Any, _Check]] = MappingProxyType(
    # A window is in force only with use_sliding_window, which is left to transformers.
    {
        "use_sliding_window": (False, lambda value: value is False),
        "sliding_window": (None, _or_none(_is_int)),
        "layer_types": (None, lambda value: value is None or (_is_layer_types(value) and set(value) <= set(_FULL))),
    }
)
_GEMMA_NEEDS: Mapping[str, _Check] = MappingProxyType(
    {
        "head_dim": _is_size,
        "query_pre_attn_scalar": _is_size,
        "sliding_window": _is_size,
        "layer_types": _is_layer_types,
        "attn_logit_softcapping": _or_none(_is_float),
        "final_logit_softcapping": _or_none(_is_float),
    }
)
_GEMMA_HAS: Mapping[str, tuple[Any, _Check]] = MappingProxyType(
    {
        "hidden_activation": ("gelu_pytorch_tanh", _is_str),
        "attention_bias": _FALSE,
    }
)
_TYPES: Mapping[str, _Type] = MappingProxyType(
    {
        "llama": _Type(
            has={
                "hidden_act": _SILU,
                "head_dim": (None, _or_none(_is_size)),
                "attention_bias": _FALSE,
                "mlp_bias": _FALSE,
                "pretraining_tp": (1, _is_int),
            }
        ),
        "mistral": _Type(
            needs={"sliding_window": _or_none(_is_size)},
            has={"hidden_act": _SILU, "head_dim": (None, _or_none(_is_size))},
        ),
        "qwen2": _Type(has={"hidden_act": _SILU, **_WINDOWS}),
        "qwen3": _Type(needs={"head_dim": _is_size}, has={"hidden_act": _SILU, "attention_bias": _FALSE, **_WINDOWS}),
        "gemma2": _Type(needs=_GEMMA_NEEDS, has=_GEMMA_HAS),
        "gemma3_text": _Type(
            needs=_GEMMA_NEEDS,
            has={
                **_GEMMA_HAS,
                "use_bidirectional_attention": (False, lambda value: value is False),
                "_sliding_window_pattern": (6, _is_int),
                "unk_token_id": (None, _or_none(_is_int)),
            },
            nested_rope=True,
        ),
    }
)


class PlainConfig:
    """The fields of a configuration as attributes, as transformers' classes have them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Keep ``values``, which are complete."""
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"the configuration has no field {name!r}") from None

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return dict(self._values)


def plain_config(values: Mapping[str, Any]) -> PlainConfig | None:
    """The configuration that ``values``, the fields of a ``config.json``, describe; None: transformers must read it."""
    model_type = values.get("model_type")
    kind = _TYPES.get(model_type) if isinstance(model_type, str) else None
    if kind is None:
        return None
    given = _with_rope_parameters(values)
    needs = {**_SIZES, **kind.needs}
    if kind.nested_rope:
        needs["rope_parameters"] = _is_nested_rope
    has = {**_TOKENS, **kind.has}
    checks = {**_NEUTRAL, **{name: check for name, (_, check) in has.items()}, **needs}
    if not needs.keys() <= given.keys() or not given.keys() <= checks.keys():
        return None
    if not all(checks[name](value) for name, value in given.items()):
        return None
    if not all(name.endswith("ForCausalLM") for name in given.get("architectures") or ()):
        return None  # what other heads have (labels) is derived from several fields
    return _completed({name: default for name, (default, _) in has.items()} | given)


def _with_rope_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the older ``rope_theta`` beside an empty ``rope_scaling`` in their present form."""
    given = dict(values)
    if "rope_parameters" not in given and "rope_theta" in given and given.get("rope_scaling") is None:
        given.pop("rope_scaling", None)
        given["rope_parameters"] = {"rope_theta": given.pop("rope_theta"), "rope_type": "default"}
    return given


def _is_nested_rope(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == _LAYER_TYPES and all(_is_rope(part) for part in value.values())


def _completed(values: dict[str, Any]) -> PlainConfig | None:
    """What transformers derives from other fields, and its checks of one against another."""
    layers, heads = values["num_hidden_layers"], values["num_attention_heads"]
    if values["hidden_size"] % heads or heads % values["num_key_value_heads"]:
        return None
    if "head_dim" in values and values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // heads
    if values.get("use_sliding_window") is False:
        values["sliding_window"] = None
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"] or list(_FULL) * layers
        if len(values["layer_types"]) != layers:
            return None
    return PlainConfig(values)
