"""The configuration of an engine: the model, each role's plugin with its options, and the launcher's sections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator, model_serializer
from pydantic_core import PydanticKnownError

from trivet_schemas._flat import distribute_flat
from trivet_schemas._section import Section
from trivet_schemas.errors import ConfigError, Place, Problem, SchemaError, join_path, show
from trivet_schemas.options import KnownFlat
from trivet_schemas.sampling import SamplingParams
from trivet_schemas.validation import format_validation_error, validate_options

__all__ = [
    "EngineConfig",
    "GenerateSection",
    "PluginSelection",
    "WatchdogSection",
    "format_validation_error",
    "validate_options",
]

AUTO = "auto"
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(:\d+)?")
_Text = Annotated[str, Field(min_length=1)]


class PluginSelection(Section):
    """The provider that was chosen for a role, and its options, which its own model validates later.

    In a file: ``paged`` or ``{use: paged, block_size: 16}``; every key besides ``use`` is an option.
    """

    use: _Text = AUTO
    """Name of the provider; ``auto`` takes the bundled one that suits the machine and the model best."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The provider's options as they were given."""

    @classmethod
    def parse(cls, value: Any, path: str = "") -> PluginSelection:
        """The selection that the short or the long form of a file describes.

        Raises:
            ConfigError: Under ``path``, if the value has another shape.
        """
        if isinstance(value, PluginSelection):
            return value
        if isinstance(value, str) and value:
            return cls(use=value)
        if not isinstance(value, Mapping):
            rule = "must be the name of a plugin, or a mapping with 'use' and its options"
            raise ConfigError(Problem(path, f"{rule}, got {show(value)}"))
        options = dict(value)
        use = options.pop("use", AUTO)
        problems = [
            Problem(join_path(path, str(key)), f"options must be named by strings, got {show(key)}")
            for key in options
            if not isinstance(key, str)
        ]
        if not isinstance(use, str) or not use:
            problems.append(Problem(join_path(path, "use"), f"must be the name of a plugin, got {show(use)}"))
        if problems:
            raise ConfigError(problems)
        return cls(use=use, options=options)

    @model_serializer
    def to_file_form(self) -> dict[str, Any]:
        """The long form of a file: ``use`` and the options in one mapping."""
        return {"use": self.use, **self.options}


def _parse_plugins(value: Any) -> dict[str, PluginSelection | list[PluginSelection]]:
    if not isinstance(value, Mapping):
        raise PydanticKnownError("dict_type")
    parsed: dict[str, PluginSelection | list[PluginSelection]] = {}
    problems: list[Problem] = []
    for role, given in value.items():
        path = str(role)
        if not isinstance(role, str) or not role.isidentifier():
            problems.append(Problem(path, f"a role is a word like 'scheduler', got {show(role)}"))
            continue
        try:
            if isinstance(given, list | tuple):
                parsed[role] = [PluginSelection.parse(item, join_path(path, i)) for i, item in enumerate(given)]
            else:
                parsed[role] = PluginSelection.parse(given, path)
        except ConfigError as exc:
            problems.extend(exc.problems)
    if problems:
        raise ConfigError(problems)
    return parsed


def _watchdog_off(value: Any) -> Any:
    return WatchdogSection(seconds=None) if value is None or value is False else value


def _string_keys(value: Any) -> Any:
    """``SamplingParams`` takes keywords, so that other keys must be caught before."""
    if isinstance(value, Mapping):
        problems = [Problem(str(key), "must be named by a string") for key in value if not isinstance(key, str)]
        if problems:
            raise SchemaError(problems)
    return value


class GenerateSection(Section):
    """What ``trivet generate`` does when the command line says nothing else."""

    prompts: list[_Text] = Field(default_factory=list)
    """The prompts."""
    sampling: Annotated[SamplingParams, BeforeValidator(_string_keys)] = Field(default_factory=SamplingParams)
    """Sampling parameters for every prompt."""
    chat: bool = False
    """Send each prompt as a user's message through the chat template."""


class WatchdogSection(Section):
    """When an engine that gets nowhere gives up, and what it leaves for whoever looks for the reason."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 300.0
    """How long nothing may happen while requests are unfinished: no token, no request that comes or goes, no hold that
    is released, no transfer that ends. The first step may take four times that. None: for ever."""
    dump: _Text | None = None
    """File for the reasons, recent steps and stacks as JSON, for ``trivet explain``; None: they are logged in short."""


class EngineConfig(Section):
    """Everything an engine is made from, as one YAML file holds it.

    Raises:
        ConfigError: With every problem and its path.
    """

    model: _Text
    """Hub id, folder, GGUF file, or ``demo``."""
    tokenizer: _Text | None = None
    """Where the tokenizer is, if not with the model."""
    revision: _Text | None = None
    """Branch, tag or commit of the model on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; ``auto`` takes the model's own. ``half`` is float16, ``float`` is float32."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda``, ``cuda:1`` or another torch device."""
    seed: int = 0
    """Seeds what requests without a seed of their own draw."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of prompt and output together; None takes the model's own limit."""
    max_logprobs: Annotated[int, Field(ge=-1)] = -1
    """Most logprobs per token that a request may ask for, of its output or its prompt; -1: as many as the vocabulary
    has tokens."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    chat_template: _Text | None = None
    """Chat template: a file, or the Jinja text itself; None takes the tokenizer's."""
    generation_config: _Text = "auto"
    """Where the sampling parameters of calls that give none come from: ``auto`` takes what the model's
    ``generation_config.json`` recommends, as vLLM does, ``vllm`` the defaults of :class:`SamplingParams`, and a folder
    the file that it holds."""
    served_model_name: _Text | Annotated[list[_Text], Field(min_length=1)] | None = None
    """Names under which the server offers the model; None takes ``model``."""
    plugins: Annotated[dict[str, PluginSelection | list[PluginSelection]], BeforeValidator(_parse_plugins)] = Field(
        default_factory=dict
    )
    """The plugin for each role; roles that take many plugins have a list. A role that is not named is ``auto``."""
    recent_steps: Annotated[int, Field(ge=1)] = 1024
    """Steps that the engine remembers one by one, to explain what requests waited for."""
    watchdog: Annotated[
        WatchdogSection,
        BeforeValidator(_watchdog_off, json_schema_input_type=WatchdogSection | Literal[False] | None),
    ] = Field(default_factory=WatchdogSection)
    """When the engine gives up because nothing happens; ``false`` or null: never."""
    generate: GenerateSection = Field(default_factory=GenerateSection)
    """Prompts and parameters of ``trivet generate``."""
    serve: dict[str, Any] = Field(default_factory=dict)
    """Options of the server (``port``, ...), which the frontend validates."""

    _source: str | None = PrivateAttr(default=None)
    _places: dict[str, Place] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as exc:
            raise ConfigError(format_validation_error(exc, "", EngineConfig)) from None

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_alias(cls, value: Any) -> Any:
        return _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value

    @field_validator("device")
    @classmethod
    def _device_name(cls, value: str) -> str:
        if value.partition(":")[0] == "gpu":
            meant = value.replace("gpu", "cuda", 1)
            raise ValueError(f"must be a torch device, got {value!r}; did you mean {meant!r}?")
        if not _DEVICE.fullmatch(value):
            raise ValueError(f"must be 'auto' or a device like 'cpu', 'cuda' or 'cuda:1', got {show(value)}")
        return value

    @classmethod
    def from_flat(cls, values: Mapping[str, Any], known_flat: KnownFlat | None = None) -> Self:
        """Make a configuration from keys that include flat arguments, as ``LLM(model, max_num_seqs=8)`` gives them.

        Args:
            values: Keys of this class and flat arguments.
            known_flat: What :func:`trivet_schemas.options.collect_flat_names` found; each flat argument sets the
                options listed for its name.

        Raises:
            ConfigError: For a key that is neither (with the nearest of both), an argument that is given a second time
                under ``plugins``, and everything that this class refuses.
        """
        spread = distribute_flat(values, known_flat or {}, cls.model_fields)
        return cls._with_problems(spread.values, spread.problems)

    @classmethod
    def _with_problems(cls, values: Mapping[str, Any], problems: Iterable[Problem]) -> Self:
        """Construct, and report ``problems`` together with those that construction finds."""
        found = list(problems)
        try:
            config = cls(**values)
        except ConfigError as exc:
            raise ConfigError([*found, *exc.problems]) from None
        if found:
            raise ConfigError(found)
        return config

    @property
    def source(self) -> str | None:
        """The file this came from, None if it was made in Python."""
        return self._source

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how the file and the overrides were combined."""
        return self._notes

    @property
    def served_names(self) -> list[str]:
        """The names under which a server offers the model."""
        names = self.served_model_name
        if names is None:
            return [self.model]
        return [names] if isinstance(names, str) else list(names)

    def selections(self, role: str) -> list[PluginSelection]:
        """The selections for ``role`` in order; empty if the configuration does not name the role."""
        chosen = self.plugins.get(role, [])
        return [chosen] if isinstance(chosen, PluginSelection) else list(chosen)

    def locate(self, path: str) -> Place:
        """Where the value at a dotted path was written: its own line, or that of the nearest section around it."""
        return nearest_place(self._places, path)

    def error(self, problems: str | Problem | Iterable[Problem]) -> ConfigError:
        """An error about this configuration, with its file and the line of each problem."""
        found = ConfigError(problems).problems
        return ConfigError([problem.at(self.locate(problem.path)) for problem in found], self._source)


def nearest_place(places: Mapping[str, Place], path: str) -> Place:
    """The place of ``path`` or of the nearest path around it; an empty place if none is known."""
    while path:
        if path in places:
            return places[path]
        path = path.rpartition(".")[0]
    return Place()
