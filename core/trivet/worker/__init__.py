"""The worker's half of the state, without tensors: what every runner needs, whatever computes its forward pass."""

from trivet.worker.batch import BatchChanges, PersistentBatch
from trivet.worker.forward import forward_batch
from trivet.worker.grammar import GrammarPool
from trivet.worker.inputs import StepInputs, prepare_inputs
from trivet.worker.step_runner import StepRunner
from trivet.worker.transfers import TransferEndpoints

__all__ = [
    "BatchChanges",
    "GrammarPool",
    "PersistentBatch",
    "StepInputs",
    "StepRunner",
    "TransferEndpoints",
    "forward_batch",
    "prepare_inputs",
]
