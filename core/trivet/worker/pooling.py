"""Pooled outputs: one vector per request from the hidden states of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.result import Pooled, RequestFailure

if TYPE_CHECKING:
    from trivet.plan import Bool, StepPlan
    from trivet.worker.batch import PersistentBatch


def pool_last(
    vectors: Any, plan: StepPlan, batch: PersistentBatch, rows: Bool
) -> tuple[list[Pooled], list[RequestFailure]]:
    """What the model pooled of each row (:meth:`trivet.roles.Model.pool`), cut and scaled as its request asks.

    Args:
        vectors: ``[n, dim]`` float32, one for each of ``rows``.
        plan: The step's plan.
        batch: Holds the requests' parameters: ``dimensions`` cuts the vector, then ``normalize`` scales it to length 1.
        rows: ``[R]`` rows to pool.

    Returns:
        The vectors, and failures for rows whose hidden state is not finite.
    """
    chosen = np.flatnonzero(rows)
    pooled: list[Pooled] = []
    errors: list[RequestFailure] = []
    for row, vector in zip(chosen.tolist(), vectors, strict=True):
        slot, epoch = int(plan.slots[row]), int(plan.epochs[row])
        if not np.isfinite(vector).all():
            errors.append(RequestFailure(slot, epoch, "the model's hidden state is not finite"))
            continue
        request = batch.requests[slot]
        params = request.params if request is not None else None
        dimensions = getattr(params, "dimensions", None)
        if dimensions is not None and dimensions > len(vector):
            errors.append(RequestFailure(slot, epoch, f"dimensions={dimensions} exceeds the embedding's {len(vector)}"))
            continue
        data = vector[:dimensions].copy()
        if getattr(params, "normalize", None):
            data /= max(float(np.linalg.norm(data)), 1e-12)
        pooled.append(Pooled(slot, epoch, data))
    return pooled, errors
