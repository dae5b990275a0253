"""Sampling and pooling parameters of a request, with the names and defaults of vLLM's."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticKnownError

from trivet_schemas.errors import ParameterError, Problem, show
from trivet_schemas.structured import StructuredOutputsParams
from trivet_schemas.validation import format_validation_error

__all__ = [
    "ENGINE_FIELDS",
    "GREEDY_TEMPERATURE",
    "MAX_OUTPUTS",
    "MAX_TEMPERATURE",
    "BeamSearchParams",
    "PoolingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

MAX_OUTPUTS = 16_384
"""Most outputs of one request: each is a request of its own inside, so that one number must not fill the memory."""
MAX_TEMPERATURE = 2.0
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: logits divided by so little only overflow."""

ENGINE_FIELDS: frozenset[str] = frozenset(
    {
        "n",
        "best_of",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "max_tokens",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "output_kind",
        "priority",
        "cache_salt",
        "extra_args",
    }
)
"""Fields that the engine, its output stage and its other plugins carry out; a sampler has no part in them."""


EXTRA_HINT = "data for plugins goes into extra_args"
MOVED_FIELDS: Mapping[str, str] = {
    "guided_decoding": "use structured_outputs",
    "logits_processors": "processors are plugins: name them under plugins.logits_processor of the configuration, and "
    "give a request's arguments in extra_args",
    "truncate_prompt_tokens": "shorten the prompt before the call",
    "use_beam_search": "call LLM.beam_search with BeamSearchParams",
}
"""Fields of vLLM's parameters, of today or formerly, that are found elsewhere, and where."""


class RequestOutputKind(StrEnum):
    """What each output of a request holds while it streams."""

    CUMULATIVE = "cumulative"
    """Everything generated so far."""
    DELTA = "delta"
    """What is new since the output before."""
    FINAL_ONLY = "final"
    """Everything, once, when the request has finished; the value ``final_only``, vLLM's name, is taken too."""

    @classmethod
    def _missing_(cls, value: object) -> RequestOutputKind | None:
        return cls.FINAL_ONLY if value == "final_only" else None


def _integer(value: Any) -> int:
    """An int from an int or a numpy integer; not from a bool, a float or text, which hide slips."""
    if type(value) is int:
        return value
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise PydanticKnownError("int_type")


def _number(value: Any) -> float:
    """A float from any real number, of numpy too; not from a bool or text."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return value
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise PydanticKnownError("float_type")
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise PydanticKnownError("bool_type")
    return value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _string_list(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else _plain_list(value)


def _optional_list(value: Any) -> Any:
    return [] if value is None else _plain_list(value)


def _plain_list(value: Any) -> Any:
    """A list from a tuple, set or one-dimensional array; anything else stays, for the type check to refuse."""
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") and getattr(value, "ndim", 0) == 1 else value


def _unseeded(value: Any) -> Any:
    return None if value == -1 and not isinstance(value, bool | float) else value


def _disabled_top_k(value: int) -> int:
    return 0 if value == -1 else value


def _token_key(value: Any) -> int:
    """A token id that is the key of a mapping; JSON and YAML keys arrive as text."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    return _integer(value)


def _structured(value: Any) -> Any:
    return StructuredOutputsParams.from_mapping(value) if isinstance(value, Mapping) else value


# Limits stand before the function: they then belong to the number's own schema, and the JSON Schema shows them.
_INTEGER = BeforeValidator(_integer)
_NUMBER = BeforeValidator(_number)
_Bool = Annotated[bool, BeforeValidator(_boolean)]
_Text = Annotated[str, Field(min_length=1)]
# What goes to a worker fits the integers there; nothing that is counted comes near these limits.
_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
_Priority = Annotated[int, Field(ge=-_MAX_INT64 - 1, le=_MAX_INT64), _INTEGER]
_Logprobs = Annotated[int, Field(ge=-1, le=_MAX_INT32), _INTEGER]
_MaxTokens = Annotated[int, Field(ge=1, le=_MAX_INT64), _INTEGER]
_TokenId = Annotated[int, Field(ge=0), _INTEGER]
_Texts = Annotated[list[_Text], BeforeValidator(_string_list, json_schema_input_type=str | list[str] | None)]
_TokenIds = Annotated[list[_TokenId], BeforeValidator(_optional_list, json_schema_input_type=list[int] | None)]
_Penalty = Annotated[float, Field(ge=-2.0, le=2.0), _NUMBER]
_Bias = Annotated[float, Field(ge=-100.0, le=100.0), _NUMBER]


class _Params(BaseModel):
    """Base: unknown fields are refused, and every error is a :class:`ParameterError` with all problems."""

    # The validators are built when the first parameters are made, which keeps the import short.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)
    _moved: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as exc:
            problems = format_validation_error(
                exc, "", type(self), noun="field", remedies=self._moved, hint=EXTRA_HINT if self._moved else ""
            )
            wrong = {error["loc"][0] for error in exc.errors()}
            rest = {name: value for name, value in values.items() if name not in wrong}
            if not any(field.is_required() and name in wrong for name, field in type(self).model_fields.items()):
                super().__init__(**rest)
                # The fields at fault hold their defaults now: a rule that reads one would report what nobody wrote.
                problems += [problem for names, problem in self._broken_rules() if not wrong & names]
            raise ParameterError(problems) from None
        problems = [problem for _, problem in self._broken_rules()]
        if problems:
            raise ParameterError(problems)

    def __setattr__(self, name: str, value: Any) -> None:
        changed = self.replace(**{name: value})
        self.__dict__.update(changed.__dict__)
        self.__pydantic_fields_set__.add(name)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated like a new one.

        Raises:
            ParameterError: If the outcome breaks a rule; nothing has changed then.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**(given | changes))

    def detached(self) -> Self:
        """A copy whose lists and mappings are its own: what is done to this object, or within it, leaves it as it is.
        What ``extra_args`` holds is shared."""
        made = self.model_copy()
        for name, value in made.__dict__.items():
            if isinstance(value, list):
                made.__dict__[name] = list(value)
            elif isinstance(value, dict):
                made.__dict__[name] = dict(value)
        return made

    def _broken_rules(self) -> Iterator[tuple[frozenset[str], Problem]]:
        """The rules between fields that are broken, each with the fields it reads."""
        yield from ()


class SamplingParams(_Params):
    """How the tokens of a request are chosen, where it ends, and what is returned.

    Names and defaults are vLLM's. Assigning to a field validates the whole again.

    Raises:
        ParameterError: With every broken rule: field, value and rule.
    """

    _moved = MOVED_FIELDS

    n: Annotated[int, Field(ge=1, le=MAX_OUTPUTS), _INTEGER] = 1
    """Outputs for the prompt; output ``i`` samples with ``seed + i``."""
    best_of: Annotated[int, Field(ge=1, le=MAX_OUTPUTS), _INTEGER] | None = None
    """Sample this many outputs and return the ``n`` whose tokens have the highest sum of logprobs, best first; None:
    as many as are returned. Nothing can be streamed before the last of them has ended."""
    presence_penalty: _Penalty = 0.0
    """Subtracted from the logits of tokens that are in the output."""
    frequency_penalty: _Penalty = 0.0
    """Subtracted from a token's logit once for each time it is in the output."""
    repetition_penalty: Annotated[float, Field(gt=0.0), _NUMBER] = 1.0
    """Divides positive and multiplies negative logits of tokens that are in the prompt or the output."""
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE), _NUMBER] = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0), _NUMBER] = 1.0
    """Keep the most likely tokens whose probabilities sum to at least this."""
    top_k: Annotated[
        int, Field(ge=0, le=_MAX_INT32), BeforeValidator(_disabled_top_k, json_schema_input_type=int), _INTEGER
    ] = 0
    """Keep this many of the most likely tokens; 0 (or -1, which becomes 0) keeps all."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0), _NUMBER] = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    seed: Annotated[
        Annotated[int, Field(ge=-(2**63), lt=2**63), _INTEGER] | None,
        BeforeValidator(_unseeded, json_schema_input_type=int | None),
    ] = None
    """Makes the outputs reproducible; None (or -1, which becomes None) lets the engine draw one."""
    stop: _Texts = Field(default_factory=list)
    """Texts that end the output; a single string becomes a list of one."""
    stop_token_ids: _TokenIds = Field(default_factory=list)
    """Tokens that end the output, besides the model's end of sequence."""
    include_stop_str_in_output: _Bool = False
    """Leave the stop string at the end of the text."""
    ignore_eos: _Bool = False
    """Go on after the model's end of sequence."""
    max_tokens: _MaxTokens | None = 16
    """Most tokens to generate; None: until the context is full."""
    min_tokens: Annotated[int, Field(ge=0), _INTEGER] = 0
    """Tokens before which neither the end of sequence nor a stop token is sampled."""
    logprobs: _Logprobs | None = None
    """Return each token's logprob and those of this many most likely tokens; 0: the token's alone, -1: all."""
    prompt_logprobs: _Logprobs | None = None
    """The same for the tokens of the prompt."""
    logprob_token_ids: Annotated[list[_TokenId], Field(min_length=1), BeforeValidator(_plain_list)] | None = None
    """Return the logprobs of exactly these tokens, in this order, with each generated token's own; with ``logprobs``,
    after those of the most likely ones. Their ranks are not computed."""
    detokenize: _Bool = True
    """Turn the tokens into text."""
    skip_special_tokens: _Bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: _Bool = True
    """Put blanks between special tokens in the text."""
    logit_bias: dict[Annotated[int, Field(ge=0), BeforeValidator(_token_key)], _Bias] | None = None
    """Added to the logits of these tokens, -100 to 100."""
    allowed_token_ids: Annotated[list[_TokenId], Field(min_length=1), BeforeValidator(_plain_list)] | None = None
    """Sample only from these tokens."""
    bad_words: _Texts = Field(default_factory=list)
    """Texts that the output does not contain: the last of a text's tokens is never sampled where the output ends with
    those before it. Both at the start of a word and within: each is encoded with and without a blank before it."""
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        BeforeValidator(_structured, json_schema_input_type=StructuredOutputsParams | None),
    ] = None
    """A constraint on the shape of the output."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each streamed output holds."""
    priority: _Priority = 0
    """Lower runs first, under a scheduling policy that looks at it."""
    cache_salt: _Text | None = None
    """Requests share cached prompt blocks only with those of the same salt."""
    extra_args: dict[str, Any] | None = None
    """Arguments for logits processors and other plugins, which validate them at admission."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_sampled(self) -> int:
        """Outputs that are sampled: ``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def all_stop_token_ids(self) -> frozenset[int]:
        """The request's own stop tokens; the engine adds the model's end-of-sequence ids unless ``ignore_eos``."""
        return frozenset(self.stop_token_ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the vocabulary of ``vocab_size`` tokens lacks, and more logprobs than it has tokens.

        Raises:
            ParameterError: One problem per field that asks for such.
        """
        problems = []
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            outside = sorted({token for token in getattr(self, name) or () if token >= vocab_size})
            if outside:
                rule = f"token ids must be below the vocabulary size {vocab_size}"
                problems.append(Problem(name, f"{rule}, got {show(outside)}"))
        problems += self._too_many_logprobs(vocab_size, f"must not exceed the vocabulary size {vocab_size} (-1: all)")
        if problems:
            raise ParameterError(problems)

    def check_logprobs(self, max_logprobs: int) -> None:
        """Refuse more logprobs per token than ``max_logprobs``, and all of them (-1); a limit of -1 is none.

        Raises:
            ParameterError: One problem per field that asks for more.
        """
        if max_logprobs >= 0:
            rule = f"must be at most {max_logprobs} and not -1, the limit of the configuration's max_logprobs"
            problems = self._too_many_logprobs(max_logprobs, rule, all_allowed=False)
            if problems:
                raise ParameterError(problems)

    def _too_many_logprobs(self, most: int, rule: str, *, all_allowed: bool = True) -> list[Problem]:
        asked = [(name, getattr(self, name)) for name in ("logprobs", "prompt_logprobs")]
        return [
            Problem(name, f"{rule}, got {count}")
            for name, count in asked
            if count is not None and (count > most or (count == -1 and not all_allowed))
        ]

    def check_context(self, num_prompt_tokens: int, max_model_len: int) -> None:
        """Refuse a prompt that leaves no room for a token, or for ``min_tokens``, within ``max_model_len`` tokens.

        Raises:
            ParameterError: If it does not fit, or the prompt is empty.
        """
        if num_prompt_tokens < 1:
            raise ParameterError(Problem("prompt", "must have at least one token, got none"))
        room = max_model_len - num_prompt_tokens
        size = f"the prompt has {num_prompt_tokens} tokens and the context holds {max_model_len} (max_model_len)"
        if room < 1:
            raise ParameterError(Problem("prompt", f"{size}, which leaves no room to generate; shorten the prompt"))
        if self.min_tokens > room:
            message = f"{size}, which leaves room for {room}, got min_tokens={self.min_tokens}"
            raise ParameterError(Problem("min_tokens", message))

    def token_limit(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """Most tokens this request may generate: ``max_tokens``, or what the context leaves if that is less."""
        room = max_model_len - num_prompt_tokens
        return room if self.max_tokens is None else min(self.max_tokens, room)

    def unsupported(self, supported: frozenset[str]) -> list[str]:
        """The fields that are set to something else than their default and are not in ``supported``, in field order.

        A sampler declares the fields it implements; the engine adds those of :data:`ENGINE_FIELDS` that it carries out
        itself, and refuses a request for which this is not empty.
        """
        defaults = type(self)().__dict__
        return [name for name, value in defaults.items() if name not in supported and getattr(self, name) != value]

    def _broken_rules(self) -> Iterator[tuple[frozenset[str], Problem]]:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}"
            yield frozenset({"min_tokens", "max_tokens"}), Problem("min_tokens", message)
        if self.n > 1 and self.greedy:
            message = f"must be 1 with temperature={self.temperature:g} (greedy outputs are all equal), got {self.n}"
            yield frozenset({"n", "temperature"}), Problem("n", message)
        if self.best_of is not None:
            yield from self._best_of_problems(self.best_of)
        if self.stop and not self.detokenize:
            message = f"needs detokenize=True (strings are found in text), got {show(self.stop)}; use stop_token_ids"
            yield frozenset({"stop", "detokenize"}), Problem("stop", message)

    def _best_of_problems(self, best_of: int) -> Iterator[tuple[frozenset[str], Problem]]:
        if best_of < self.n:
            message = f"must be at least n={self.n} (outputs are chosen among as many), got {best_of}"
            yield frozenset({"best_of", "n"}), Problem("best_of", message)
        if best_of > 1 and self.n == 1 and self.greedy:
            message = f"must be 1 with temperature={self.temperature:g} (greedy outputs are all equal), got {best_of}"
            yield frozenset({"best_of", "n", "temperature"}), Problem("best_of", message)
        if best_of > self.n and self.output_kind is RequestOutputKind.DELTA:
            message = (
                f"must equal n={self.n} when output is streamed (which outputs are returned is known at the end only), "
                f"got {best_of} with output_kind='delta'"
            )
            yield frozenset({"best_of", "n", "output_kind"}), Problem("best_of", message)


class BeamSearchParams(_Params):
    """How a beam search goes, with the names and defaults of vLLM's.

    Raises:
        ParameterError: With every broken rule: field, value and rule.
    """

    beam_width: Annotated[int, Field(ge=1), _INTEGER]
    """Beams that are kept after each token, and sequences that are returned."""
    max_tokens: _MaxTokens
    """Most tokens to generate; what the context has room for if that is less."""
    ignore_eos: _Bool = False
    """Go on after the model's end of sequence."""
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE), _NUMBER] = 0.0
    """Above 0 a token is drawn for every beam at this temperature and extends it too, besides the most likely ones;
    logprobs are the model's own in any case."""
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0), _NUMBER] = 1.0
    """Sequences are ranked by the sum of their logprobs divided by their length to this power, -10 to 10."""
    include_stop_str_in_output: _Bool = False
    """Leave the end of sequence in ``tokens`` and ``text``."""


class PoolingParams(_Params):
    """What a request that generates no text wants: an embedding, a score or class probabilities."""

    task: Literal["embed", "score", "classify"] = "embed"
    """What the pooled hidden state becomes."""
    dimensions: Annotated[int, Field(ge=1), _INTEGER] | None = None
    """Cut the embedding to this many numbers (models trained for it); None keeps all."""
    normalize: _Bool | None = None
    """Scale the embedding to length 1; None leaves it to the model, which means to do so unless its files say no."""
    pooling_type: Annotated[Literal["last", "cls", "mean"] | None, BeforeValidator(_lower)] = None
    """What the embedding is made of: the hidden state of the last token, that of the first, or the mean of all; None
    leaves it to the model, which means the last unless its files say otherwise."""
    use_activation: _Bool | None = None
    """Whether scores and classes are probabilities; False returns what the model's head puts out."""
    priority: _Priority = 0
    """Lower runs first, under a scheduling policy that looks at it."""
    extra_args: dict[str, Any] | None = None
    """Arguments for plugins."""

    def _broken_rules(self) -> Iterator[tuple[frozenset[str], Problem]]:
        if self.use_activation is not None and self.task == "embed":
            message = f"is for task='score' and 'classify' only, got {self.use_activation} with task='embed'"
            yield frozenset({"use_activation", "task"}), Problem("use_activation", message)
        for name in ("dimensions", "normalize", "pooling_type"):
            if self.task != "embed" and getattr(self, name) is not None:
                message = f"is for task='embed' only, got {show(getattr(self, name))} with task={self.task!r}"
                yield frozenset({name, "task"}), Problem(name, message)
