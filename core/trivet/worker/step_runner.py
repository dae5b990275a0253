"""A step in the worker, whatever computes its tensors: deltas, phases, faults, the result."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from trivet.errors import ModelLoadError, RequestFault, TrivetError
from trivet.plan import Bool, InputSource, Int32, Ragged, StepPlan
from trivet.result import RequestFailure, RowLogprobs, StepResult
from trivet.roles.drafter import DraftInputs, Drafts
from trivet.roles.runner import Runner, WorkerInfo
from trivet.worker.batch import PersistentBatch
from trivet.worker.drafting import DrafterPool
from trivet.worker.forward import forward_batch
from trivet.worker.grammar import GrammarPool
from trivet.worker.inputs import StepInputs, prepare_inputs
from trivet.worker.layers import LayerRelay
from trivet.worker.pooling import Pooler
from trivet.worker.transfers import TransferEndpoints

if TYPE_CHECKING:
    from trivet.context import WorkerContext
    from trivet.roles import (
        Attention,
        ForwardBatch,
        ForwardOutput,
        KVLayout,
        Model,
        ModelInfo,
        Sampled,
        Sampler,
        SampleRows,
        TransferWorker,
    )

#: how long a plan without rows waits for a grammar or a transfer, in seconds
_PATIENCE = 0.005


class StepRunner(Runner):
    """The runner's logic in numpy; a subclass says how arrays become tensors and how much memory there is.

    State lives in a :class:`trivet.worker.PersistentBatch` keyed by slot.
    """

    role: ClassVar[str] = "runner"
    #: most structured outputs that are compiled at once
    grammar_threads: int = 2

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._grammars: GrammarPool | None = None
        self._transfers: TransferEndpoints | None = None
        self._drafters = DrafterPool((), context.max_num_seqs)
        #: whether somebody is told of every layer of a forward pass
        self._relays = False
        #: slot → who was told of its request, and is told when it leaves
        self._told: dict[int, list[Any]] = {}
        #: slot → epoch of requests that ended with an error here; the engine may not know yet
        self._failed: dict[int, int] = {}
        self._errors: list[RequestFailure] = []

    # ------------------------------------------------------------------ what depends on the device

    def _prepare_device(self) -> str:
        """Choose the device before anything is loaded; returns its name."""
        return "cpu"

    def _available_bytes(self, info: ModelInfo) -> int:
        """Memory left for the KV cache after loading."""
        return 1 << 30

    def _tensor(self, array: Any) -> Any:
        """A numpy array as the model, attention and sampler want it."""
        return array

    def _floats(self, values: Any) -> Any:
        """What the model or attention computed, as a float32 numpy array."""
        return np.asarray(values, np.float32)

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        """The forward pass of a step; a subclass may replay a recorded one instead."""
        return self._model.forward(batch)

    # ------------------------------------------------------------------ start

    def load(self) -> WorkerInfo:
        started = time.perf_counter()
        context = self._context
        context.device = self._prepare_device()
        self._model: Model = context.get("model")
        info = self._model.load()
        limit = context.config.max_model_len
        if limit is not None and limit > info.max_model_len:
            raise ModelLoadError(
                f"max_model_len: {limit} exceeds the {info.max_model_len} positions that {context.config.model} "
                "supports; lower it"
            )
        context.max_model_len = min(info.max_model_len, limit or info.max_model_len)
        self._vocab_size = info.vocab_size
        self._attention: Attention = context.get("attention")
        self._sampler: Sampler = context.get("sampler")
        tokens = min(context.tokenizer_size or info.vocab_size, info.vocab_size)
        self._sampler.bind(info.vocab_size, tokens, context.max_num_seqs, context.all("logits_processor"))
        self._drafters = DrafterPool(context.all("drafter"), context.max_num_seqs)
        context.hooks.bind("forward", self._forward)
        context.hooks.bind("sample", self._sampler.sample)
        if self._drafters:
            context.hooks.bind("draft", self._drafters.propose)
        self._grammars = GrammarPool(context.all("grammar"), info.vocab_size, self.grammar_threads)
        self._pooler = Pooler(self._model, info, self._floats, self._tensor)
        specs = [*self._model.kv_specs()]
        specs += self._drafters.kv_specs(1 + max((spec.layer for spec in specs), default=-1))
        return WorkerInfo(
            model=info,
            specs=tuple(specs),
            support=tuple(self._attention.support(spec) for spec in specs),
            available_bytes=self._available_bytes(info),
            device=context.device,
            weight_bytes=self._model.weight_bytes,
            sampling_fields=self._sampler.fields,
            draft_tokens=self._drafters.num_tokens,
            draft_lookahead=self._drafters.lookahead,
            timings={"load": time.perf_counter() - started},
        )

    def allocate(self, layout: KVLayout) -> None:
        context = self._context
        context.layout = layout
        self._attention.allocate(layout)
        connector = context.get("connector")
        workers: list[TransferWorker] = [*context.all("cache_tier"), *([] if connector is None else [connector])]
        listeners = [worker for worker in workers if worker.wants_layers]
        self._relays = bool(listeners)
        attention = LayerRelay(self._attention, listeners) if listeners else self._attention
        self._model.bind(attention, layout)
        self._drafters.bind(attention, layout)
        self._windows = [group.window for group in layout.groups]
        sizes = [group.block_size for group in layout.groups]
        self._batch = PersistentBatch(context.max_num_seqs, context.max_model_len, sizes)
        for worker in workers:
            worker.bind(self._attention)
        self._transfers = TransferEndpoints(workers, len(layout.groups))

    # ------------------------------------------------------------------ a step

    def execute(self, plan: StepPlan) -> StepResult:
        timings: dict[str, float] = {}
        result = StepResult(plan.step_id, plan.slots, plan.epochs, Ragged.empty(plan.num_rows), timings=timings)
        assert self._transfers is not None, "execute before load and allocate"
        assert self._grammars is not None
        self._context.plan_extensions, self._context.result_extensions = plan.extensions, {}
        with _Timed(timings, "apply"):
            try:
                invalid = self._apply(plan)
            except BaseException:
                # The engine keeps the blocks of a transfer until it hears of its end.
                self._transfers.give_up(plan)
                raise
            self._grammars.poll()
        if not plan.num_rows:
            self._wait_for_news()
            return self._report(result)
        void = self._void_rows(plan, invalid)
        with _Timed(timings, "prepare"):
            inputs = prepare_inputs(self._batch, plan, void)
            pools = plan.pools & ~void
            pooling = self._pooler.wants_hidden(plan, pools)
            hidden = pooling or self._drafters.wants_hidden
            layers = self._drafters.hidden_layers
            batch = forward_batch(plan, inputs, self._batch, self._tensor, wants_hidden=hidden, hidden_layers=layers)
        try:
            with _Timed(timings, "forward"):
                output: ForwardOutput = self._context.hooks.forward(batch)
            path: Ragged | None = None
            # A pipeline stage before the last one has no logits, and nothing to sample.
            if len(inputs.logits_indices) and output.logits is not None:
                with _Timed(timings, "sample"):
                    path = self._sample(plan, inputs, output, result)
        except RequestFault as fault:
            self._errors += self._failures(fault, plan)
            result = StepResult(
                plan.step_id, plan.slots, plan.epochs, Ragged.empty(plan.num_rows), undone=True, timings=timings
            )
            return self._report(result)
        if pooling:
            result.pooled, errors = self._pooler.pool(output.hidden, plan, inputs, void)
            self._errors += errors
        if self._drafters:
            with _Timed(timings, "draft"):
                self._draft(plan, batch, output, result, path)
        if self._transfers.pending:
            self._transfers.poll()
        return self._report(result)

    def check_integrity(self) -> None:
        self._batch.check_integrity()

    def shutdown(self) -> None:
        if self._grammars is not None:
            self._grammars.shutdown()

    # ------------------------------------------------------------------ deltas

    def _apply(self, plan: StepPlan) -> list[Int32]:
        """Carry out everything that precedes the forward; returns the blocks that a failed load left invalid, per
        group."""
        assert self._transfers is not None
        assert self._grammars is not None
        changes = self._batch.apply(plan)
        listeners: list[Any] = [self._model, self._sampler, self._drafters, self._grammars, self._pooler]
        self._tell_removed([request.slot for request in changes.removed])
        for request in changes.added:
            told: list[Any] = []
            self._told[request.slot] = told
            try:
                for listener in listeners:
                    listener.add(request)
                    told.append(listener)
            except (RequestFault, TrivetError) as exc:
                self._fail(RequestFailure(request.slot, request.epoch, str(exc)))
        self._transfers.start_stores(plan)
        for group, blocks in enumerate(plan.zeroing):
            if len(blocks):
                self._attention.zero_blocks(group, self._tensor(blocks))
        for group, pairs in enumerate(plan.copies):
            if len(pairs):
                self._attention.copy_blocks(group, self._tensor(pairs))
        return self._transfers.start_loads(plan)

    def _tell_removed(self, slots: list[int]) -> None:
        """Every listener is told, whatever the one before it raises; the first exception is raised in the end."""
        raised: list[Exception] = []
        for slot in slots:
            self._failed.pop(slot, None)
            for listener in self._told.pop(slot, ()):  # nobody, if the step that brought the request broke off
                try:
                    listener.remove(slot)
                except Exception as exc:  # noqa: BLE001 - raised below
                    raised.append(exc)
        if raised:
            raise raised[0]

    def _void_rows(self, plan: StepPlan, invalid: list[Int32]) -> Bool:
        """``[R]`` rows whose outcome must not count. A row whose input the step before did not draw, because it was
        undone or the row was void there, is one of them: the engine gives it a new epoch when it learns of that."""
        batch, slots = self._batch, plan.slots
        void = np.zeros(len(slots), np.bool_)
        if self._failed:
            void |= np.isin(slots, list(self._failed))
        for group, blocks in enumerate(invalid):
            if len(blocks):
                table = batch.tables[group][slots]
                places = np.arange(table.shape[1])
                # What lies beyond a table's end is left over from earlier requests.
                own = places < batch.table_lengths[group][slots][:, None]
                window = self._windows[group]
                if window is not None:
                    # What left the window may be others' by now; the workers are not told.
                    first = np.maximum(plan.num_computed - window + 1, 0) // batch.block_sizes[group]
                    own &= places >= first[:, None]
                void |= (np.isin(table, blocks) & own).any(axis=1)
        missing = (batch.lengths[slots] < plan.num_computed + plan.num_scheduled - plan.num_drafts) & ~void
        if not missing.any():
            return void
        unknown = missing & (plan.input_source != InputSource.DEVICE)
        if not unknown.any():
            return void | missing
        row = int(unknown.argmax())
        slot = int(slots[row])
        raise ValueError(
            f"plan {plan.step_id} computes slot {slot} up to token {plan.num_computed[row] + plan.num_scheduled[row]}, "
            f"but only {batch.lengths[slot]} are known here"
        )

    # ------------------------------------------------------------------ phases

    def _sample(self, plan: StepPlan, inputs: StepInputs, output: ForwardOutput, result: StepResult) -> Ragged | None:
        """Returns the accepted paths through trees of drafts, per plan row."""
        assert self._grammars is not None
        rows = inputs.sampling(self._batch)
        mask = self._grammars.bitmask(rows)
        if mask is not None:
            rows.bitmask, rows.constrained = self._tensor(mask), (mask != -1).any(axis=1)
        sampled: Sampled = self._context.hooks.sample(output.logits, rows)
        for failure in sampled.errors:
            self._fail(failure)
        result.prompt_logprobs = sampled.prompt_logprobs
        if inputs.tree is not None:
            self._compact(inputs, rows, sampled)
        advanced = self._grammars.advance(rows, sampled)
        for failure in advanced.errors:
            self._fail(failure)
        result.accepted = _spread(advanced.accepted, rows.plan_rows, plan.num_rows)
        if advanced.logprobs:
            plan_rows = rows.plan_rows.tolist()
            result.logprobs = [RowLogprobs(plan_rows[entry.row], entry.values) for entry in advanced.logprobs]
        known = advanced.accepted
        if any(len(tokens) for tokens in advanced.forced):
            forced = Ragged.from_rows(advanced.forced)
            result.forced = _spread(forced, rows.plan_rows, plan.num_rows)
            pairs = [np.concatenate([known.row(s), forced.row(s)]) for s in range(len(known))]
            room = self._batch.tokens.shape[1] - inputs.known[rows.plan_rows]
            known = Ragged.from_rows([tokens[:n] for tokens, n in zip(pairs, room.tolist(), strict=True)])
        self._batch.set_known(rows.slots, inputs.known[rows.plan_rows], known)
        return None if sampled.path is None else _spread(sampled.path, rows.plan_rows, plan.num_rows)

    def _compact(self, inputs: StepInputs, rows: SampleRows, sampled: Sampled) -> None:
        """Bring the keys and values of an accepted path through a tree to where a chain would have put them."""
        path = sampled.path
        if path is None:
            raise ValueError("the sampler verified a tree of drafts without saying which path it accepted")
        counts = path.lengths
        within = np.arange(len(path.values), dtype=np.int64) - np.repeat(path.offsets[:-1], counts)
        first = np.repeat(inputs.known[rows.plan_rows], counts).astype(np.int64)
        moved = path.values != within
        if not moved.any():
            return
        slots = np.repeat(rows.slots, counts)[moved]
        sources, destinations = (first + path.values)[moved], (first + within)[moved]
        for group in range(len(self._batch.block_sizes)):
            source = self._tensor(self._batch.locations(group, slots, sources))
            destination = self._tensor(self._batch.locations(group, slots, destinations))
            self._attention.move_tokens(group, source, destination)

    def _draft(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        output: ForwardOutput,
        result: StepResult,
        path: Ragged | None,
    ) -> None:
        wanted = result.accepted.lengths > 0
        if result.forced is not None:
            # The tokens that follow are known; proposals for what comes after them would be out of place.
            wanted &= result.forced.lengths == 0
        k = np.where(wanted, plan.draft_k, 0).astype(np.int32)
        if self._drafters.lookahead:
            # A drafter with a cache writes the newest token and all proposals but the last, where there are blocks.
            room = plan.num_computed + plan.num_scheduled + plan.lookahead - self._batch.lengths[plan.slots] + 1
            k = np.minimum(k, np.maximum(room, 0))
        if not k.any() and not self._drafters.follows:
            return
        state = self._batch
        inputs = DraftInputs(
            plan.slots,
            k,
            state.tokens,
            state.lengths,
            batch,
            output,
            accepted=result.accepted,
            num_drafts=plan.num_drafts,
            path=path,
            tables=state.tables,
            block_sizes=state.block_sizes,
        )
        try:
            drafts: Drafts = self._context.hooks.draft(inputs)
        except RequestFault as fault:
            # Tokens were drawn already, and proposals change none of them: only the named requests end.
            self._errors += self._failures(fault, plan)
            return
        tokens = drafts.tokens
        if len(tokens) != plan.num_rows or (tokens.lengths > k).any():
            raise ValueError(
                f"the drafter was asked for {k.tolist()} tokens per row and proposed {tokens.lengths.tolist()}"
            )
        if len(tokens.values) and not 0 <= int(tokens.values.min()) <= int(tokens.values.max()) < self._vocab_size:
            raise ValueError(f"the drafter proposed a token id outside 0 … {self._vocab_size - 1}")
        result.next_drafts, result.next_draft_parents = tokens, drafts.parents

    # ------------------------------------------------------------------ faults and events

    def _fail(self, failure: RequestFailure) -> None:
        self._failed[failure.slot] = failure.epoch
        self._errors.append(failure)

    def _failures(self, fault: RequestFault, plan: StepPlan) -> list[RequestFailure]:
        """The failures that a fault names; a fault that names no request of the plan is the plugin's own."""
        failures: list[RequestFailure] = []
        for slot, epoch in zip(plan.slots.tolist(), plan.epochs.tolist(), strict=True):
            request = self._batch.requests[slot]
            if request is not None and request.request_id in fault.reasons:
                failures.append(RequestFailure(slot, epoch, fault.reasons[request.request_id]))
        if not failures:
            raise fault
        self._failed.update((f.slot, f.epoch) for f in failures)
        return failures

    def _wait_for_news(self) -> None:
        assert self._transfers is not None
        assert self._grammars is not None
        deadline = time.monotonic() + _PATIENCE
        while not (self._grammars.has_news or self._transfers.has_news or self._errors):
            left = deadline - time.monotonic()
            if left <= 0 or not (self._grammars.compiling or self._transfers.pending):
                return
            if self._transfers.pending:
                left = min(left, _PATIENCE / 5)
                self._transfers.poll()
            if self._grammars.compiling:
                self._grammars.poll(left)
            else:
                time.sleep(left)

    def _report(self, result: StepResult) -> StepResult:
        """Add every event since the last result; events of a step that raised are kept for the next one."""
        assert self._transfers is not None
        assert self._grammars is not None
        result.errors, self._errors = self._errors, []
        result.constraints = self._grammars.take_news()
        result.extensions = self._context.result_extensions
        self._transfers.report(result)
        return result


def _spread(values: Ragged, rows: Int32, num_rows: int) -> Ragged:
    """Rows of sampling as rows of the plan; ``rows`` is ascending, so the values stay in order."""
    if len(rows) == num_rows and values.values.dtype == np.int32:
        return values  # all of them
    counts = np.zeros(num_rows, np.int32)
    counts[rows] = values.lengths
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return Ragged(offsets, np.asarray(values.values, np.int32))


class _Timed:
    """Notes how long the block within took, however it ends."""

    __slots__ = ("_phase", "_started", "_timings")

    def __init__(self, timings: dict[str, float], phase: str) -> None:
        self._timings, self._phase = timings, phase

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._timings[self._phase] = time.perf_counter() - self._started
