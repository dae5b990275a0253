"""Tensors of a step, from the flat arrays that :func:`trivet.worker.prepare_inputs` made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from trivet.roles.attention import AttentionMetadata
from trivet.roles.model import ForwardBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trivet.plan import StepPlan
    from trivet.worker import PersistentBatch, StepInputs


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A tensor of the array's type on the device; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def forward_batch(
    plan: StepPlan, inputs: StepInputs, batch: PersistentBatch, device: torch.device, *, wants_hidden: bool
) -> ForwardBatch:
    """The batch of a forward pass, with attention metadata for every KV group."""
    tree = inputs.tree
    return ForwardBatch(
        slots=inputs.slots,
        input_ids=to_device(inputs.input_ids, device),
        positions=to_device(inputs.positions, device),
        query_lens=inputs.query_lens,
        seq_lens=inputs.seq_lens,
        logits_indices=to_device(inputs.logits_indices, device),
        logits_rows=plan.logits_rows,
        samples=plan.samples,
        attention=_attention(inputs, batch, device),
        wants_hidden=wants_hidden,
        tree_parents=None if tree is None else to_device(tree.parents, device),
        multimodal=list(plan.multimodal),
        adapters=plan.adapter if len(plan.adapter) and plan.adapters else None,
        adapter_names=plan.adapters,
    )


def _attention(inputs: StepInputs, batch: PersistentBatch, device: torch.device) -> list[AttentionMetadata]:
    query_start = to_device(inputs.query_start, device)
    seq_lens = to_device(inputs.seq_lens, device)
    max_query_len, max_seq_len = int(inputs.query_lens.max()), int(inputs.seq_lens.max())
    tree_lens = tree_mask = None
    if inputs.tree is not None:
        tree_lens, tree_mask = to_device(inputs.tree.lengths, device), to_device(inputs.tree.mask, device)
    metas: list[AttentionMetadata] = []
    for group, size in enumerate(batch.block_sizes):
        width = -(-max_seq_len // size)
        table = batch.tables[group][inputs.slots, :width]
        metas.append(
            AttentionMetadata(
                group=group,
                block_size=size,
                query_start=query_start,
                seq_lens=seq_lens,
                block_table=to_device(table, device),
                slot_mapping=to_device(batch.locations(group, inputs.token_slots, inputs.places), device),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                tree_lens=tree_lens,
                tree_mask=tree_mask,
            )
        )
    return metas
