"""Role ``model``: weights and forward pass."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from trivet.plan import Bool, Int32, NewRequest, UInt8
from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.roles.attention import Attention, AttentionMetadata
    from trivet.roles.kv import KVLayout, LayerKVSpec


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine needs to know of a model; plain data."""

    vocab_size: int  #: rows of the LM head; ids that the tokenizer lacks are never drawn (see ``Sampler.bind``)
    max_model_len: int  #: positions that the model supports
    eos_token_ids: tuple[int, ...] = ()
    num_layers: int = 0
    hidden_size: int = 0
    dtype: str = "float32"
    architecture: str = ""
    tasks: tuple[str, ...] = ("generate",)
    #: what a request may bring besides tokens: ``adapter``, ``ranges``; others are refused at admission
    takes: tuple[str, ...] = ()
    num_labels: int = 0  #: scores of a model with a head for classes, which the tasks ``classify`` and ``score`` return
    problem_type: str | None = None  #: transformers' name for what the scores mean, which decides their activation
    pooling_type: str = "last"  #: ``last``, ``cls`` or ``mean``: what is pooled where a request does not say
    normalizes: bool = False  #: whether embeddings have length 1 where a request does not say


@dataclass(slots=True)
class ForwardBatch:
    """The batch of one forward pass. ``T`` tokens of ``R`` rows, flattened row after row; tensors are on the device.

    ``tree_parents`` (None: all rows are chains) gives for each of the ``T`` tokens the flat index of its parent
    when it is a draft in a tree, -1 otherwise; a tree node attends to its ancestors and to all tokens before the
    drafts."""

    slots: Int32  #: [R]
    input_ids: Any  #: [T] int64
    positions: Any  #: [T] int64
    query_lens: Int32  #: [R] tokens of each row
    seq_lens: Int32  #: [R] context length after this step
    logits_indices: Any  #: [L] int64, flat positions that reach the LM head
    logits_rows: UInt8  #: [R] which of a row's positions those are
    samples: Bool  #: [R]
    attention: list[AttentionMetadata]  #: one per KV group
    wants_hidden: bool = False  #: whether ``ForwardOutput.hidden`` is read (pooling, drafters)
    hidden_layers: tuple[int, ...] = ()  #: layers whose ``ForwardOutput.layer_outputs`` are read (drafters)
    tree_parents: Any = None
    multimodal: list[Any] = field(default_factory=list)
    adapters: Int32 | None = None  #: [R] index into ``adapter_names``, -1 = base model
    adapter_names: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ForwardOutput:
    """``logits`` ``[L, vocab_size]`` in the model's dtype or float32, None on a pipeline stage before the last one;
    ``hidden`` ``[T, hidden_size]`` after the final norm if wanted."""

    logits: Any
    hidden: Any = None
    layer_outputs: dict[int, Any] = field(default_factory=dict)  #: wanted layer → ``[T, hidden_size]``


class Model(Role):
    """Loads weights and runs the forward pass; attention goes through the bound attention provider."""

    role: ClassVar[str] = "model"
    #: whether :meth:`forward` of a decode step can be recorded into a CUDA graph, and replayed with other contents of
    #: the same tensors: it reads nothing from the device and takes no decision from what tensors hold
    capturable: bool = False
    #: which part of the model stands against it where :attr:`capturable` is False, for the log; set by :meth:`load`
    capture_problem: str | None = None

    def check(self) -> None:
        """Raise :class:`trivet.errors.ModelLoadError` for what the configuration alone rules out, such as quantised
        weights where they would be ignored. Reads no weights and allocates nothing: ``config check`` calls it instead
        of :meth:`load`, which begins with the same."""

    def plan_weights(self) -> int | None:
        """Bytes of memory that the weights will take with this configuration: what :attr:`weight_bytes` will be.

        ``config check`` calls it instead of :meth:`load`, after :meth:`check` and ``Runner.estimate``, which settles
        ``context.device``. It reads headers only, and downloads nothing. None (the default) where they do not tell, as
        for weights that are not there yet: then the numbers in the files are counted in the model's dtype. Raises
        :class:`trivet.errors.ModelLoadError` for weights that :meth:`load` would refuse."""
        return None

    @abstractmethod
    def load(self) -> ModelInfo:
        """Load the weights of ``context.config.model`` onto ``context.device``. Raises
        :class:`trivet.errors.ModelLoadError` naming the file or parameter at fault."""

    @abstractmethod
    def kv_specs(self) -> list[LayerKVSpec]:
        """One per attention layer, in layer order; called after :meth:`load`."""

    @abstractmethod
    def bind(self, attention: Attention, layout: KVLayout) -> None:
        """Called after the attention provider has allocated its storage, and again if it allocates anew."""

    def add(self, request: NewRequest) -> None:
        """A request enters its slot; ``request.extra`` may hold what the model needs of it (features of an image)."""

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass, writing keys and values to the cache. Bound to the ``trivet_forward`` phase."""

    def pool(self, hidden: Any, last: Int32, slots: Int32) -> Any:
        """What is reported of rows that pool: ``[n, dim]``, by default the pooled hidden states.

        ``hidden`` is ``[T, hidden_size]`` as in :class:`ForwardOutput`, ``last`` ``[n]`` the flat index of each row's
        last token, ``slots`` ``[n]`` whose rows they are; all are of the same task. For requests that pool otherwise
        ``hidden`` holds their pooled states in float32 and ``last`` counts them. A model with a head for scores or
        classes applies it here."""
        return hidden[last.tolist()]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the loaded weights."""
        return 0
