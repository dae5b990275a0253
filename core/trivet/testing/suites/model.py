"""Conformance of ``model`` providers: one full forward pass over a sequence is the reference for every other way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trivet.plan import StepPlan
from trivet.roles import ForwardBatch, ForwardOutput, LayerKVSpec, Model, ModelInfo
from trivet.testing.suites._base import ArraySuite, promised, require
from trivet.testing.suites._plans import Drafted, PlanWriter, make_layout
from trivet.worker import PersistentBatch, StepInputs, prepare_inputs
from trivet.worker.forward import forward_batch

NUM_BLOCKS = 120
SLOTS = 6

Logits = NDArray[np.float64]


class ModelSuite(ArraySuite):
    """Computes sequences in chunks, in mixed batches and as drafts, over paged attention, and compares logits.

    Set :attr:`model` to a tiny model that the provider can load, and :attr:`attention` to the attention provider that
    it is to be tested with."""

    role: ClassVar[str] = "model"
    #: name of the attention provider
    attention: ClassVar[str] = "auto"
    #: largest difference of two logits, relative to the largest logit
    tolerance: ClassVar[float] = 1e-4
    #: tokens of the longest sequence
    longest: ClassVar[int] = 40
    block_size: ClassVar[int] = 4
    #: drafts in trees
    trees: ClassVar[bool] = True
    #: ``ForwardOutput.hidden``
    hidden: ClassVar[bool] = True

    def reference_logits(self, tokens: Sequence[int]) -> Logits | None:
        """``[len(tokens), vocab_size]`` by other means than the provider's; None (the default): a full forward pass of
        the provider's own is the reference."""
        return None

    # ------------------------------------------------------------------ running

    def loaded(self, seed: int = 0) -> LoadedModel:
        """The model on a worker, with storage for its layers and nothing computed."""
        context = self.worker_context(
            max_num_seqs=SLOTS, max_model_len=self.longest + 8, plugins={"attention": {"use": self.attention}}
        )
        model: Model = self.make(context)
        planned = model.plan_weights()
        info = model.load()
        context.max_model_len = min(info.max_model_len, self.longest + 8)
        return LoadedModel(self, context, model, info, planned, seed)

    def sequence(self, length: int, seed: int, vocab_size: int) -> list[int]:
        """Random tokens."""
        return [int(t) for t in np.random.default_rng(seed).integers(0, vocab_size, length)]

    def truth(self, tokens: Sequence[int]) -> Logits:
        """Logits of every position."""
        given = self.reference_logits(tokens)
        if given is not None:
            return np.asarray(given, np.float64)
        worker = self.loaded()
        try:
            worker.writer.add(0, tokens)
            return worker.forward()[0]
        finally:
            worker.close()

    def compare(self, found: Logits, expected: Logits, how: str, **details: object) -> None:
        """Two sets of logits are the same up to rounding."""
        scale = max(float(np.abs(expected).max()), 1.0)
        error = np.nan_to_num(np.abs(found - expected), nan=np.inf).max(axis=-1) / scale
        require(
            bool((error <= self.tolerance).all()),
            f"logits depend on the tokens alone, not on how they are computed ({how})",
            Model.forward,
            largest_difference=float(error.max()),
            allowed=self.tolerance,
            position=int(error.argmax()),
            **details,
        )

    # ------------------------------------------------------------------ tests

    def test_what_the_model_says_of_itself(self) -> None:
        """Plain facts that the engine builds on."""
        worker = self.loaded()
        try:
            info, specs = worker.info, worker.model.kv_specs()
            require(info.vocab_size > 0 and info.max_model_len > 0, "sizes are positive", ModelInfo, info=info)
            require(
                all(0 <= i < info.vocab_size for i in info.eos_token_ids), "EOS ids are token ids", ModelInfo, info=info
            )
            require(info.tasks, "a model has at least one task", ModelInfo, tasks=info.tasks)
            require(
                [s.layer for s in specs] == list(range(len(specs))),
                "kv_specs has one entry per attention layer, in layer order",
                Model.kv_specs,
                layers=[s.layer for s in specs],
            )
            for spec in specs:
                require(
                    spec.num_kv_heads > 0 and spec.head_dim > 0 and (spec.window is None) == (spec.kind == "full"),
                    "a layer has heads, and a window unless its attention is full",
                    LayerKVSpec,
                    spec=spec,
                )
            taken, planned = worker.model.weight_bytes, worker.planned
            require(taken >= 0, "weight_bytes counts bytes", Model.weight_bytes)
            require(
                planned is None or abs(planned - taken) <= taken / 1000,
                "plan_weights says before the load what weight_bytes says after it, or None",
                Model.plan_weights,
                planned=planned,
                weight_bytes=taken,
            )
        finally:
            worker.close()

    def test_chunks(self) -> None:
        """A prompt computed in chunks of any size gives the logits of one pass."""
        worker = self.loaded()
        try:
            for seed, chunk in enumerate((1, 3, self.block_size, self.block_size + 1, self.longest)):
                tokens = self.sequence(self.longest - seed, seed, worker.info.vocab_size)
                expected = self.truth(tokens)
                worker.writer.add(0, tokens)
                pieces = []
                while left := worker.writer.pending(0):
                    pieces.append(worker.forward({0: min(chunk, left)})[0])
                self.compare(np.concatenate(pieces), expected, "in chunks", chunk=chunk, tokens=len(tokens))
                worker.writer.drop(0)
        finally:
            worker.close()

    def test_mixed_batches(self) -> None:
        """Prompts, chunks and single tokens of several requests in one batch, over blocks that others used before."""
        rng = np.random.default_rng(1)
        worker = self.loaded(seed=1)
        try:
            texts: dict[int, list[int]] = {}
            pieces: dict[int, list[Logits]] = {}
            for step in range(16):
                for slot in range(SLOTS):
                    if slot not in texts and rng.random() < 0.5:
                        length = int(rng.integers(1, self.longest))
                        texts[slot] = self.sequence(length, 50 * step + slot, worker.info.vocab_size)
                        pieces[slot] = []
                        worker.writer.add(slot, texts[slot])
                counts = {}
                for slot in texts:
                    most = 1 if rng.random() < 0.4 else self.longest // 2
                    counts[slot] = min(worker.writer.pending(slot), int(rng.integers(0, most + 1)))
                for slot, logits in worker.forward(counts).items():
                    pieces[slot].append(logits)
                for slot in [s for s in texts if not worker.writer.pending(s)]:
                    self.compare(np.concatenate(pieces[slot]), self.truth(texts[slot]), "in a mixed batch", slot=slot)
                    worker.writer.drop(slot)
                    del texts[slot], pieces[slot]
        finally:
            worker.close()

    def test_only_the_rows_asked_for(self) -> None:
        """``logits`` has one row per index, in their order; none is fine."""
        worker = self.loaded()
        try:
            tokens = self.sequence(9, 3, worker.info.vocab_size)
            expected = self.truth(tokens)
            for slot, picked in enumerate(([8], [2, 5, 8], [])):
                worker.writer.add(slot, tokens)
                found = worker.forward({slot: 9}, pick=picked)[slot]
                shape = (len(picked), worker.info.vocab_size)
                require(
                    len(found) == len(picked) and (not picked or found.shape == shape),
                    "logits are [L, vocab_size], one row per index of logits_indices",
                    ForwardOutput,
                    shape=found.shape,
                    expected=shape,
                )
                if picked:
                    self.compare(found, expected[picked], "for some rows only", rows=picked)
        finally:
            worker.close()

    @promised("trees")
    def test_drafts_in_trees(self) -> None:
        """A draft in a tree has the logits that it has as the end of its own path."""
        worker = self.loaded(seed=2)
        try:
            rng = np.random.default_rng(2)
            for slot in range(4):
                prompt = self.sequence(int(rng.integers(2, self.longest - 8)), slot, worker.info.vocab_size)
                drafts = self.sequence(6, 100 + slot, worker.info.vocab_size)
                parents = [int(rng.integers(-1, node)) for node in range(6)]
                worker.writer.add(slot, prompt)
                found = worker.forward(drafts={slot: Drafted(drafts, parents)})[slot]
                for node in range(6):
                    path: list[int] = []
                    up = node
                    while up >= 0:
                        path.insert(0, drafts[up])
                        up = parents[up]
                    expected = self.truth(prompt + path)[-1:]
                    self.compare(
                        found[len(prompt) + node][None], expected, "as drafts in a tree", parents=parents, node=node
                    )
        finally:
            worker.close()

    @promised("hidden")
    def test_hidden_states(self) -> None:
        """``hidden`` has a row per token when it is wanted, and does not depend on the batch."""
        worker = self.loaded()
        try:
            tokens = self.sequence(12, 4, worker.info.vocab_size)
            states = []
            for slot, chunk in enumerate((12, 5)):
                worker.writer.add(slot, tokens)
                parts = []
                while left := worker.writer.pending(slot):
                    parts.append(worker.run({slot: min(chunk, left)}, hidden=True)[1])
                states.append(np.concatenate(parts))
            shape = (12, worker.info.hidden_size)
            require(states[0].shape == shape, "hidden is [T, hidden_size]", ForwardOutput, shape=states[0].shape)
            self.compare(states[1], states[0], "hidden states in chunks")
        finally:
            worker.close()


class LoadedModel:
    """A model with attention, storage and the worker's batch state."""

    def __init__(
        self, suite: ModelSuite, context: Any, model: Model, info: ModelInfo, planned: int | None, seed: int
    ) -> None:
        self._suite, self._context, self.model, self.info = suite, context, model, info
        self.planned = planned  #: what ``plan_weights`` said before the model was loaded
        attention = context.get("attention")
        specs = model.kv_specs()
        layout = make_layout(specs, [attention.support(s) for s in specs], suite.block_size, NUM_BLOCKS)
        attention.allocate(layout)
        for spec in specs:
            if "float" in spec.dtype:
                for part in attention.kv(spec.layer):
                    part[...] = float("nan")  # what was never written must not matter
        model.bind(attention, layout)
        sizes = [group.block_size for group in layout.groups]
        self._batch = PersistentBatch(SLOTS, context.max_model_len, sizes)
        self.writer = PlanWriter(layout, NUM_BLOCKS, np.random.default_rng(seed))

    def forward(
        self,
        counts: Mapping[int, int] | None = None,
        *,
        drafts: Mapping[int, Drafted] | None = None,
        pick: Sequence[int] | None = None,
    ) -> dict[int, Logits]:
        """Logits of every scheduled position by slot, or of the flat positions ``pick`` under the first slot."""
        return self.run(counts, drafts=drafts, pick=pick)[0]

    def run(
        self,
        counts: Mapping[int, int] | None = None,
        *,
        drafts: Mapping[int, Drafted] | None = None,
        pick: Sequence[int] | None = None,
        hidden: bool = False,
    ) -> tuple[dict[int, Logits], Logits]:
        """As :meth:`forward`, with the hidden states."""
        plan: StepPlan = self.writer.plan(counts, drafts=drafts)
        self._batch.apply(plan)
        if not plan.num_rows:
            return {}, np.empty((0, 0))
        inputs: StepInputs = prepare_inputs(self._batch, plan, plan.samples)
        inputs.logits_indices = np.arange(len(inputs.places)) if pick is None else np.array(pick, np.int64)
        batch: ForwardBatch = forward_batch(plan, inputs, self._batch, self._suite.tensor, wants_hidden=hidden)
        output = self.model.forward(batch)
        logits = self._suite.numpy(output.logits).astype(np.float64)
        states = self._suite.numpy(output.hidden).astype(np.float64) if hidden else np.empty((0, 0))
        if pick is not None:
            return {int(plan.slots[0]): logits}, states
        for slot in plan.slots.tolist():
            self.writer.requests[slot].drawn = 0  # nothing is sampled here
        ends = inputs.query_start.tolist()
        return {int(s): logits[a:b] for s, a, b in zip(plan.slots, ends, ends[1:], strict=False)}, states

    def close(self) -> None:
        """Shut the model and its attention down."""
        self.model.shutdown()
        self._context.shutdown_all()
