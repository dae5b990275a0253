"""An engine without a model: the real scheduler, cache and bookkeeping, and steps that end at once.

For capacity planning, memory studies and the cost of a step without the forward pass::

    executor = SimulatedExecutor(simple_layers(24), vocab_size=32_000, max_model_len=4096, available_bytes=4 << 30)
    engine = Engine({"model": "none", "plugins": {"cache": {"use": "paged"}}}, [executor, IdTokenizer(32_000)])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trivet.plan import Int32, Ragged, StepPlan
from trivet.result import StepResult
from trivet.roles import (
    AttentionSupport,
    Detokenizer,
    Executor,
    KVLayout,
    LayerKVSpec,
    ModelInfo,
    PendingStep,
    Tokenizer,
    WorkerInfo,
)
from trivet_schemas.sampling import SamplingParams

TokenRule = int | Callable[[Int32, Int32], Int32]
"""The tokens that rows draw: always the same id, or a function of ``slots`` ``[n]`` and of the ``[n]`` positions that
the tokens will have in their sequences (the first after a prompt of 5 tokens has position 5), which returns ids."""

#: what would have to be computed from logits, which there are not
_IMPOSSIBLE = {"logprobs", "prompt_logprobs", "structured_outputs"}


def simple_layers(
    num_layers: int,
    *,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    windows: Sequence[int | None] = (None,),
) -> tuple[LayerKVSpec, ...]:
    """Attention layers of one shape. ``windows`` is repeated over the layers: ``[512] * 5 + [None]`` are five layers
    with a sliding window of 512 tokens for each one that keeps all tokens."""
    chosen = [windows[layer % len(windows)] for layer in range(num_layers)]
    return tuple(
        LayerKVSpec(layer, "full" if window is None else "sliding", num_kv_heads, head_dim, dtype, window)
        for layer, window in enumerate(chosen)
    )


class _Ended:
    """A step that has ended."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class SimulatedExecutor(Executor):
    """Answers every plan by itself: a row that samples gets one token, loads and stores end with the step that starts
    them. No worker is started, and no role of the worker's side is needed.

    Args:
        specs: Attention layers, which decide what a token costs; see :func:`simple_layers`.
        vocab_size: Ids are ``0 … vocab_size - 1``.
        max_model_len: Positions that the model would support.
        available_bytes: Memory for the KV cache.
        max_in_flight: Steps that may be submitted before the first one's result is taken; with more than one, rows take
            tokens that the engine has not seen yet.
        tokens: What rows draw.
    """

    def __init__(
        self,
        specs: Sequence[LayerKVSpec],
        *,
        vocab_size: int,
        max_model_len: int,
        available_bytes: int,
        max_in_flight: int = 1,
        tokens: TokenRule = 0,
    ) -> None:
        self.max_in_flight, self.token_feedback = max_in_flight, max_in_flight > 1
        self._tokens = tokens
        self._info = WorkerInfo(
            ModelInfo(vocab_size, max_model_len, num_layers=len(specs), architecture="simulated"),
            tuple(specs),
            tuple(AttentionSupport(dtypes=("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")) for _ in specs),
            available_bytes,
            sampling_fields=frozenset(set(SamplingParams.model_fields) - _IMPOSSIBLE),
        )

    def start(self) -> WorkerInfo:
        """See :meth:`Executor.start`."""
        return self._info

    def configure_cache(self, layout: KVLayout) -> None:
        """There is no storage."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """See :meth:`Executor.submit`; the step has ended when this returns."""
        offsets = np.zeros(len(plan.slots) + 1, np.int32)
        np.cumsum(plan.samples, out=offsets[1:])
        moved = [transfer.transfer_id for transfer in (*plan.loads, *plan.stores)]
        result = StepResult(plan.step_id, plan.slots, plan.epochs, Ragged(offsets, self._draw(plan, int(offsets[-1]))))
        if moved:
            result.transfers_finished = np.array(moved, np.int64)
        return _Ended(result)

    def _draw(self, plan: StepPlan, count: int) -> Int32:
        if isinstance(self._tokens, int):
            return np.full(count, self._tokens, np.int32)
        positions = plan.num_computed + plan.num_scheduled
        return np.asarray(self._tokens(plan.slots[plan.samples], positions[plan.samples]), np.int32)

    def call(self, method: str, *args: Any) -> list[Any]:
        """There is no worker: AttributeError."""
        raise AttributeError(f"a simulated executor has no worker whose {method!r} could be called")


class _IdDetokenizer(Detokenizer):
    def __init__(self, *, first: bool) -> None:
        self._first = first

    def push(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        lead, self._first = "" if self._first else " ", False
        return lead + " ".join(map(str, token_ids))

    def flush(self) -> str:
        return ""


class IdTokenizer(Tokenizer):
    """Text that consists of token ids: ``"17 4 17"``. For engines whose model is simulated.

    Args:
        vocab_size: Ids are ``0 … vocab_size - 1``.
        eos_token_ids: Ids that end an output.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        self._size, self._eos = vocab_size, tuple(eos_token_ids)

    @property
    def size(self) -> int:
        """See :attr:`Tokenizer.size`."""
        return self._size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """See :attr:`Tokenizer.eos_token_ids`."""
        return self._eos

    @property
    def bos_token_id(self) -> int | None:
        """There is none."""
        return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See :meth:`Tokenizer.encode`; words that are no numbers get ids by the sum of their bytes."""
        return [int(word) if word.isdecimal() else sum(word.encode()) % self._size for word in text.split()]

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """See :meth:`Tokenizer.decode`."""
        return _IdDetokenizer(first=True).push(token_ids)

    def detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """See :meth:`Tokenizer.detokenizer`."""
        return _IdDetokenizer(first=True)

    def token_text(self, token_id: int) -> str:
        """See :meth:`Tokenizer.token_text`."""
        return str(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """See :meth:`Tokenizer.token_bytes`."""
        return str(token_id).encode()

    @property
    def has_chat_template(self) -> bool:
        """There is none."""
        return False

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The messages' contents, one after the other."""
        return " ".join(str(message.get("content", "")) for message in messages)
