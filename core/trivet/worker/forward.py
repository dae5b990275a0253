"""The batch of a forward pass, from the flat arrays that :func:`trivet.worker.prepare_inputs` made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trivet.roles.attention import AttentionMetadata
from trivet.roles.model import ForwardBatch

if TYPE_CHECKING:
    from trivet.plan import StepPlan
    from trivet.worker.batch import PersistentBatch
    from trivet.worker.inputs import StepInputs

ToTensor = Callable[[Any], Any]


def forward_batch(
    plan: StepPlan,
    inputs: StepInputs,
    batch: PersistentBatch,
    tensor: ToTensor,
    *,
    wants_hidden: bool,
    hidden_layers: tuple[int, ...] = (),
) -> ForwardBatch:
    """The batch of a forward pass, with attention metadata for every KV group."""
    tree = inputs.tree
    return ForwardBatch(
        slots=inputs.slots,
        input_ids=tensor(inputs.input_ids),
        positions=tensor(inputs.positions),
        query_lens=inputs.query_lens,
        seq_lens=inputs.seq_lens,
        logits_indices=tensor(inputs.logits_indices),
        logits_rows=plan.logits_rows,
        samples=plan.samples,
        attention=_attention(inputs, batch, tensor),
        wants_hidden=wants_hidden,
        hidden_layers=hidden_layers,
        tree_parents=None if tree is None else tensor(tree.parents),
        multimodal=list(plan.multimodal),
        adapters=plan.adapter if len(plan.adapter) and plan.adapters else None,
        adapter_names=plan.adapters,
    )


def _attention(inputs: StepInputs, batch: PersistentBatch, tensor: ToTensor) -> list[AttentionMetadata]:
    query_start = tensor(inputs.query_start)
    seq_lens = tensor(inputs.seq_lens)
    max_query_len, max_seq_len = int(inputs.query_lens.max()), int(inputs.seq_lens.max())
    tree_lens = tree_mask = None
    if inputs.tree is not None:
        tree_lens, tree_mask = tensor(inputs.tree.lengths), tensor(inputs.tree.mask)
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
                block_table=tensor(table),
                slot_mapping=tensor(batch.locations(group, inputs.token_slots, inputs.places)),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                tree_lens=tree_lens,
                tree_mask=tree_mask,
            )
        )
    return metas
