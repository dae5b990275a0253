"""From what a user gives (a prompt in any form, parameters) to what the engine takes (ids, one request per output)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trivet.errors import RequestError
from trivet_schemas.errors import ParameterError
from trivet_schemas.prompts import parse_prompt
from trivet_schemas.sampling import PoolingParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trivet.engine import Engine
    from trivet.roles.tokenizer import Tokenizer
    from trivet.state import Request

AnyParams = SamplingParams | PoolingParams
_SEED_SPAN = 2**64


@dataclass(frozen=True, slots=True)
class Submission:
    """A request ready for the engine.

    ``children[i]`` are the id and the parameters of output ``i``: a single child has the request's own id, several have
    ``{request_id}#{i}`` and ``n = 1``. With ``best_of`` there are more than ``n`` of them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: AnyParams
    children: tuple[tuple[str, AnyParams], ...]
    priority: int = 0
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    cache_tags: Mapping[str, bytes] | None = None

    @property
    def child_ids(self) -> list[str]:
        """The ids that the engine knows."""
        return [child for child, _ in self.children]

    def validate(self, engine: Engine) -> None:
        """Raise what :meth:`add` would for a rule that the request breaks, and queue nothing."""
        for _, params in self.children[:2]:  # the others differ in their seeds only
            engine.validate(self.prompt_token_ids, params)

    def add(self, engine: Engine, index: int, *, arrival_time: float | None = None) -> Request:
        """Queue child ``index``, child 0 first; raises what :meth:`trivet.engine.Engine.add_request` raises."""
        child_id, params = self.children[index]
        return engine.add_request(
            child_id,
            self.prompt_token_ids,
            params,
            priority=self.priority,
            arrival_time=arrival_time,
            prompt=self.prompt,
            cache_tags=self.cache_tags,
            parent=self.children[0][0] if index else None,
        )


class Preparer:
    """Makes submissions. Its methods touch no state of the engine and may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer | None, seed: int) -> None:
        """Tokenise with ``tokenizer``; ``seed`` is where seeds of unseeded requests with several outputs start."""
        self._tokenizer = tokenizer
        self._seeds = random.Random(f"outputs {seed}")  # noqa: S311  # not a secret

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises RequestError when the engine has none."""
        if self._tokenizer is None:
            raise RequestError(
                "this engine has no tokenizer; give prompts as token ids (prompt_token_ids)", param="prompt"
            )
        return self._tokenizer

    def prepare(
        self,
        request_id: str,
        prompt: Any,
        params: AnyParams,
        *,
        priority: int | None = None,
        output_kind: RequestOutputKind | None = None,
    ) -> Submission:
        """Parse and tokenise ``prompt`` and split the request by outputs.

        Args:
            request_id: The request's id.
            prompt: Whatever :func:`trivet_schemas.prompts.parse_prompt` accepts.
            params: Copied, so that later changes by the caller do not matter.
            priority: Overrides the one in ``params``.
            output_kind: Overrides the one in ``params``.

        Raises:
            RequestError: If the prompt has a wrong shape, or is text and there is no tokenizer.
            TypeError: If ``params`` is of another class.
        """
        if not isinstance(params, SamplingParams | PoolingParams):
            raise TypeError(f"params must be SamplingParams or PoolingParams, got {type(params).__name__}")
        params = params.detached()
        try:
            parsed = parse_prompt(prompt)
        except ParameterError as exc:
            raise request_error(exc) from None
        if parsed.multi_modal_data is not None:
            raise RequestError("multi_modal_data: this engine takes text only", param="multi_modal_data")
        token_ids = parsed.token_ids
        if token_ids is None:
            token_ids = self.tokenizer.encode(parsed.text or "")
            if not token_ids:
                raise RequestError("prompt: the tokenizer made no token of it", param="prompt")
        kind = RequestOutputKind.FINAL_ONLY
        if isinstance(params, SamplingParams):
            kind = output_kind or params.output_kind
            if params.num_sampled > params.n and kind is RequestOutputKind.CUMULATIVE:
                kind = RequestOutputKind.FINAL_ONLY  # before the end nobody knows which outputs are returned
            if params.stop and self._tokenizer is None:
                raise RequestError("stop: strings are found in text, and this engine has no tokenizer", param="stop")
        return Submission(
            request_id,
            parsed.text,
            token_ids,
            params,
            self._children(request_id, params),
            params.priority if priority is None else priority,
            kind,
            None if parsed.cache_salt is None else {"cache_salt": parsed.cache_salt.encode()},
        )

    def _children(self, request_id: str, params: AnyParams) -> tuple[tuple[str, AnyParams], ...]:
        if not isinstance(params, SamplingParams):
            return ((request_id, params),)
        count = params.num_sampled
        if count == 1:
            return ((request_id, params if params.best_of is None else params.model_copy(update={"best_of": None})),)
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        # Every output has the same prompt, so one child reports its logprobs.
        common: dict[str, Any] = {"n": 1, "best_of": None}
        if count > params.n and params.logprobs is None and params.logprob_token_ids is None:
            common["logprobs"] = 0  # outputs are ranked by them; they are shown only if they were asked for
        changes = [common | {"seed": _signed(seed + i)} for i in range(count)]
        if params.prompt_logprobs is not None:
            for change in changes[1:]:
                change["prompt_logprobs"] = None
        return tuple((f"{request_id}#{i}", params.replace(**change)) for i, change in enumerate(changes))


def _signed(seed: int) -> int:
    """``seed`` brought into the 64 bits that a seed may have."""
    return (seed + _SEED_SPAN // 2) % _SEED_SPAN - _SEED_SPAN // 2


def eos_token_ids(engine: Engine) -> frozenset[int]:
    """Every id that ends a generation, according to the model and to the tokenizer."""
    own = () if engine.tokenizer is None else engine.tokenizer.eos_token_ids
    return frozenset((*engine.model.eos_token_ids, *own))


def default_sampling_params(engine: Engine) -> SamplingParams:
    """What a request without parameters is sampled with: the model's own recommendation, see ``generation_config``.

    Raises:
        trivet.errors.ModelLoadError: The file that recommends is missing or damaged.
    """
    from trivet.model_defaults import default_sampling_values

    return SamplingParams(**default_sampling_values(engine.config))


def request_error(error: ParameterError, where: str = "") -> RequestError:
    """The refusal of a request that a broken rule of its parameters or prompt makes."""
    param = error.problems[0].path or None if error.problems else None
    return RequestError(f"{where}{error}", param=param)


def single_prompt(prompts: Any) -> bool:
    """Whether ``prompts`` is one prompt (text, token ids, a mapping) and not a sequence of prompts."""
    if isinstance(prompts, str | bytes | Mapping):
        return True
    if getattr(prompts, "ndim", None) in {0, 1}:
        return True  # a single number is refused as a prompt
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    return all(isinstance(item, int) or getattr(item, "ndim", None) == 0 for item in prompts)
