"""Pooled outputs: one vector per request from the hidden states of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.plan import Task
from trivet.result import Pooled, RequestFailure

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trivet.plan import Bool, Float32, Int32, NewRequest, StepPlan
    from trivet.roles.model import Model, ModelInfo
    from trivet.worker.inputs import StepInputs

_SMALLEST_NORM = 1e-12


@dataclass(slots=True)
class _Request:
    """A request that pools. ``parts`` are sums of hidden states ``[hidden_size]`` by the position they begin at."""

    task: int
    params: Any
    kind: str
    num_prompt: int
    parts: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def grows(self) -> bool:
        """Whether more than the step that ends the prompt counts."""
        return self.kind != "last"

    def take(self, start: int, states: Float32) -> None:
        """States ``[n, hidden_size]`` of the tokens from ``start`` on. What a step that was undone brought for them is
        replaced."""
        self.parts = {at: part for at, part in self.parts.items() if at < start}
        if self.kind == "mean":
            self.parts[start] = states.sum(axis=0, dtype=np.float64)
        elif start == 0:
            self.parts[0] = states[0].astype(np.float64)

    def vector(self) -> NDArray[np.float64]:
        """The pooled hidden state ``[hidden_size]``."""
        if self.kind == "mean":
            return np.asarray(sum(self.parts.values())) / self.num_prompt
        return self.parts[0]


class Pooler:
    """Follows the requests that pool, over all chunks of their prompts.

    ``last`` takes the hidden state of the last token, ``cls`` that of the first, ``mean`` the mean of all. What comes
    from more than one step is summed up in float64, in the order of the tokens.
    """

    def __init__(
        self, model: Model, info: ModelInfo, floats: Callable[[Any], Any], tensor: Callable[[Any], Any]
    ) -> None:
        """Pool what ``model`` computes; ``floats`` makes a float32 numpy array of it and ``tensor`` goes back."""
        self._model, self._info, self._floats, self._tensor = model, info, floats, tensor
        self._requests: dict[int, _Request] = {}
        self._growing: set[int] = set()

    def add(self, request: NewRequest) -> None:
        """A request enters its slot."""
        if request.task == Task.GENERATE:
            return
        kind = getattr(request.params, "pooling_type", None) or self._info.pooling_type
        made = _Request(request.task, request.params, kind, request.num_prompt)
        self._requests[request.slot] = made
        if made.grows:
            self._growing.add(request.slot)

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""
        self._requests.pop(slot, None)
        self._growing.discard(slot)

    def wants_hidden(self, plan: StepPlan, pools: Bool) -> bool:
        """Whether hidden states of this step count."""
        return bool(pools.any()) or (bool(self._growing) and not self._growing.isdisjoint(plan.slots.tolist()))

    def pool(
        self, hidden: Any, plan: StepPlan, inputs: StepInputs, void: Bool
    ) -> tuple[list[Pooled], list[RequestFailure]]:
        """Take over the step's hidden states.

        Args:
            hidden: ``[T, hidden_size]`` of the step's tokens.
            plan: The step's plan.
            inputs: Says which tokens are whose.
            void: ``[R]`` rows whose outcome must not count.

        Returns:
            The vectors of the rows that reached the end of their prompts, and failures for those whose hidden states
            are not finite.
        """
        pools = plan.pools & ~void
        if self._growing:
            self._grow(hidden, plan, inputs, void)
        pooled: list[Pooled] = []
        errors: list[RequestFailure] = []
        for row, vector in self._vectors(hidden, plan, inputs, pools):
            slot, epoch = int(plan.slots[row]), int(plan.epochs[row])
            data, problem = self._finished(self._requests[slot], np.asarray(vector, np.float32))
            if problem is None:
                pooled.append(Pooled(slot, epoch, data))
            else:
                errors.append(RequestFailure(slot, epoch, problem))
        return pooled, errors

    def _grow(self, hidden: Any, plan: StepPlan, inputs: StepInputs, void: Bool) -> None:
        for row, slot in enumerate(plan.slots.tolist()):
            if slot in self._growing and not void[row]:
                first, end = inputs.query_start[row : row + 2].tolist()
                self._requests[slot].take(int(plan.num_computed[row]), self._floats(hidden[first:end]))

    def _vectors(self, hidden: Any, plan: StepPlan, inputs: StepInputs, pools: Bool) -> Iterator[tuple[int, Float32]]:
        """What the model makes of each row's pooled state; rows of one task are given to it together."""
        groups: dict[tuple[int, bool], list[int]] = {}
        for row in np.flatnonzero(pools).tolist():
            request = self._requests[int(plan.slots[row])]
            groups.setdefault((request.task, request.grows), []).append(row)
        for (_, grows), rows in groups.items():
            slots: Int32 = plan.slots[rows]
            if grows:
                states = [self._requests[slot].vector() for slot in slots.tolist()]
                made = self._model.pool(
                    self._tensor(np.stack(states).astype(np.float32)), np.arange(len(rows), dtype=np.int32), slots
                )
            else:
                made = self._model.pool(hidden, inputs.query_start[1:][rows] - 1, slots)
            yield from zip(rows, self._floats(made), strict=True)

    def _finished(self, request: _Request, vector: Float32) -> tuple[Float32, str | None]:
        """The vector as the request wants it, or what is wrong with it."""
        if not np.isfinite(vector).all():
            return vector, "the model's hidden state is not finite"
        params = request.params
        if request.task != Task.EMBED:
            wanted = getattr(params, "use_activation", None)
            return (vector.copy() if wanted is False else activate(vector, self._info.problem_type)), None
        dimensions = getattr(params, "dimensions", None)
        if dimensions is not None and dimensions > len(vector):
            return vector, f"dimensions={dimensions} exceeds the embedding's {len(vector)}"
        data = vector[:dimensions].copy()
        normalize = getattr(params, "normalize", None)
        if self._info.normalizes if normalize is None else normalize:
            data /= max(float(np.linalg.norm(data)), _SMALLEST_NORM)
        return data, None


def activate(scores: Float32, problem_type: str | None) -> Float32:
    """Scores ``[num_labels]`` as probabilities, as transformers' ``problem_type`` asks for: those of a regression stay,
    each of several labels has one of its own, classes share one. Without a type, a single score is a label's."""
    if problem_type == "regression":
        return scores.copy()
    if problem_type == "multi_label_classification" or len(scores) == 1:
        made = 0.5 * (1.0 + np.tanh(0.5 * scores.astype(np.float64)))
    else:
        powers = np.exp(scores.astype(np.float64) - float(scores.max()))
        made = powers / powers.sum()
    return np.asarray(made, np.float32)
