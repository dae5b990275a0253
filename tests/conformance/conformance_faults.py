"""Providers with one fault each; ``FAULTS`` says which suite's test must find it, and in which words."""

from __future__ import annotations

from typing import Any

import numpy as np
from conformance_providers import NoRepeat

from trivet.roles import StepWaits
from trivet.testing.fake_model import FakeModel
from trivet.testing.fake_sampler import FakeSampler
from trivet.testing.fakes import FakeDetokenizer, FakeRunner, FakeTokenizer
from trivet.testing.reference_attention import ReferenceAttention
from trivet_continuous.scheduler import ContinuousScheduler
from trivet_inline.executor import InlineExecutor

#: suite, class, test and its arguments, words of the message
FAULTS: list[tuple[str, type, str, dict[str, Any], str]] = []


def found_by(suite: str, test: str, words: str, **arguments: Any) -> Any:
    """Registers the class."""

    def register(cls: type) -> type:
        FAULTS.append((suite, cls, test, arguments, words))
        return cls

    return register


LOOP: dict[str, Any] = {"seqs": 8, "budget": 5, "memory": {"use": "paged", "block_size": 4, "num_blocks": 26}}


# ---------------------------------------------------------------- schedulers


class _Scheduler(ContinuousScheduler):
    def __init__(self, context: Any, options: Any) -> None:
        from trivet_continuous.options import ContinuousOptions

        super().__init__(context, ContinuousOptions(max_num_seqs=4, max_num_batched_tokens=7))


@found_by("SchedulerSuite", "test_tokens_are_those_of_the_naive_loop", "explain gives a reason", **LOOP)
class ExplainsNothing(_Scheduler):
    def explain(self, request: Any) -> Any:
        return None


@found_by("SchedulerSuite", "test_tokens_are_those_of_the_naive_loop", "num_waiting counts", **LOOP)
class LosesPreemptedRequests(_Scheduler):
    def requeue(self, request: Any) -> None:
        pass


@found_by("SchedulerSuite", "test_tokens_are_those_of_the_naive_loop", "no step leaves the engine unhealthy", **LOOP)
class ExceedsTheBudget(_Scheduler):
    def _share(self, slots: Any, pending: Any) -> Any:
        return pending


@found_by("SchedulerSuite", "test_tokens_are_those_of_the_naive_loop", "in the order of their arrival", **LOOP)
class NewestFirst(_Scheduler):
    def bind(self, context: Any) -> None:
        super().bind(context)
        self._policy.key = lambda request: -request.index


@found_by("SchedulerSuite", "test_an_end_in_the_queue", "remove drops a waiting request")
class KeepsAbortedRequests(_Scheduler):
    def remove(self, request: Any) -> None:
        pass


@found_by("SchedulerSuite", "test_no_request_starves", "although others keep coming")
class PrefersShortPrompts(_Scheduler):
    def bind(self, context: Any) -> None:
        super().bind(context)
        self._policy.key = lambda request: request.num_prompt


@found_by(
    "SchedulerSuite",
    "test_tokens_are_those_of_the_naive_loop",
    "advances in every step",
    **LOOP | {"memory": {"use": "paged"}},
)
class PromptsFirst(_Scheduler):
    def _share(self, slots: Any, pending: Any) -> Any:
        order = np.argsort(-pending, kind="stable")
        wanted = pending[order]
        counts = np.zeros_like(pending)
        counts[order] = np.clip(self._planner.tokens_left - (np.cumsum(wanted) - wanted), 0, wanted)
        return counts


@found_by("SchedulerSuite", "test_reasons_of_a_whole_step", "why the next request was not admitted", short=False)
class SaysNothingOfAWholeStep(_Scheduler):
    def waits(self) -> Any:
        return StepWaits()


# ---------------------------------------------------------------- attention


@found_by("AttentionSuite", "test_windows", "within its window")
class CountsTheWindowWrong(ReferenceAttention):
    def forward(self, *args: Any, window: int | None = None, **rest: Any) -> Any:
        return super().forward(*args, window=None if window is None else window + 1, **rest)


@found_by("AttentionSuite", "test_soft_caps", "causal softmax")
class IgnoresSoftCaps(ReferenceAttention):
    def forward(self, *args: Any, softcap: float | None = None, **rest: Any) -> Any:
        return super().forward(*args, softcap=None, **rest)


@found_by("AttentionSuite", "test_sinks", "causal softmax")
class IgnoresSinks(ReferenceAttention):
    def forward(self, *args: Any, sinks: Any = None, **rest: Any) -> Any:
        return super().forward(*args, sinks=None, **rest)


@found_by("AttentionSuite", "test_trees_of_drafts", "causal softmax")
class TakesTreesForChains(ReferenceAttention):
    def forward(self, layer: int, query: Any, key: Any, value: Any, meta: Any, **rest: Any) -> Any:
        meta.tree_lens = meta.tree_mask = None
        return super().forward(layer, query, key, value, meta, **rest)


@found_by("AttentionSuite", "test_tokens_are_moved_all_at_once", "reads every source before it writes")
class MovesOneByOne(ReferenceAttention):
    def move_tokens(self, group: int, source: Any, destination: Any) -> None:
        for pair in zip(source, destination, strict=True):
            super().move_tokens(group, *(np.array([place]) for place in pair))


@found_by("AttentionSuite", "test_blocks_are_copied_and_zeroed", "zero_blocks fills whole blocks")
class ZeroesNothing(ReferenceAttention):
    def zero_blocks(self, group: int, blocks: Any) -> None:
        pass


@found_by("AttentionSuite", "test_prompts_and_decodes_in_one_batch", "causal softmax")
class ReadsWholeBlocks(ReferenceAttention):
    """Multiplies what is beyond a row's tokens by zero, and nan stays nan."""

    def forward(self, layer: int, query: Any, key: Any, value: Any, meta: Any, **rest: Any) -> Any:
        out = super().forward(layer, query, key, value, meta, **rest)
        for row in range(len(meta.seq_lens)):
            used = -(-int(meta.seq_lens[row]) // meta.block_size)
            beyond = self._kv[layer][1][meta.block_table[row, used - 1]].reshape(-1)[-1] * 0
            out[meta.query_start[row] : meta.query_start[row + 1]] += beyond
        return out


# ---------------------------------------------------------------- models and runners


@found_by("ModelSuite", "test_chunks", "in chunks")
class CountsPositionsInTheBatch(FakeModel):
    def forward(self, batch: Any) -> Any:
        batch.positions = np.arange(len(batch.positions))
        return super().forward(batch)


@found_by("ModelSuite", "test_drafts_in_trees", "as drafts in a tree")
class TakesTreesForChainsToo(FakeModel):
    def forward(self, batch: Any) -> Any:
        for meta in batch.attention:
            meta.tree_lens = meta.tree_mask = None
        return super().forward(batch)


@found_by("ModelSuite", "test_only_the_rows_asked_for", "one row per index")
class GivesEveryRow(FakeModel):
    def forward(self, batch: Any) -> Any:
        batch.logits_indices = np.arange(len(batch.input_ids))
        return super().forward(batch)


@found_by("ModelSuite", "test_what_the_model_says_of_itself", "plan_weights says before the load")
class PlansWeightsThatItLacks(FakeModel):
    def plan_weights(self) -> int:
        return 1 << 20


class _Runner(FakeRunner):
    def __init__(self, context: Any, options: Any) -> None:
        from trivet.testing.fakes import FakeRunnerOptions

        super().__init__(context, FakeRunnerOptions())


@found_by("RunnerSuite", "test_copies_precede_writes", "after a fork")
class CopiesNothing(_Runner):
    def execute(self, plan: Any) -> Any:
        plan.copies = []
        return super().execute(plan)


@found_by("RunnerSuite", "test_random_plans", "slots and epochs repeat")
class ForgetsEpochs(_Runner):
    def execute(self, plan: Any) -> Any:
        result = super().execute(plan)
        result.epochs = result.epochs * 0
        return result


@found_by("RunnerSuite", "test_a_fault_of_one_request", "RequestFault becomes a result")
class ForgetsFaults(_Runner):
    def execute(self, plan: Any) -> Any:
        result = super().execute(plan)
        result.undone, result.errors = False, []
        return result


# ---------------------------------------------------------------- executors


class _Late:
    def __init__(self, step: Any, other: Any = None) -> None:
        self._step, self._other = step, other

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return (self._other or self._step).result()


@found_by("ExecutorSuite", "test_results_come_in_the_order_of_submission", "a step's result is that of its plan")
class MixesUpResults(InlineExecutor):
    last: Any = None

    def submit(self, plan: Any) -> Any:
        step, self.last = _Late(super().submit(plan), self.last), super().submit(plan)
        return step


@found_by("ExecutorSuite", "test_calls_of_the_runners_methods", "DID NOT RAISE")
class CallsAnything(InlineExecutor):
    def call(self, method: str, *args: Any) -> list[Any]:
        return [None]


@found_by("ExecutorSuite", "test_a_fault_is_raised_where_the_result_is_taken", "DID NOT RAISE")
class SwallowsFaults(InlineExecutor):
    def submit(self, plan: Any) -> Any:
        from trivet.result import StepResult
        from trivet_inline.executor import FinishedStep

        step: Any = super().submit(plan)
        return FinishedStep(StepResult(plan.step_id)) if isinstance(step.outcome, Exception) else step


# ---------------------------------------------------------------- samplers


@found_by("SamplerSuite", "test_a_row_depends_on_nothing_but_itself", "depends on nothing but its own")
class MixesTheRowIntoTheNoise(FakeSampler):
    def _draw(self, values: Any, rows: Any, row: int, request: Any) -> Any:
        rows.positions = rows.positions + row
        try:
            return super()._draw(values, rows, row, request)
        finally:
            rows.positions = rows.positions - row


@found_by("SamplerSuite", "test_chains_of_drafts", "drafts are accepted while")
class AcceptsEveryDraft(FakeSampler):
    def _walk(self, logits: Any, rows: Any, s: int, request: Any, drafts: Any, parents: Any) -> Any:
        token = super()._walk(logits, rows, s, request, [], [])[0]
        return [*drafts, *token], list(range(len(drafts))), []


@found_by("SamplerSuite", "test_the_distribution", "softmax(logits / temperature)")
class ForgetsTheTemperature(FakeSampler):
    def add(self, request: Any) -> None:
        if request.params.temperature:
            request.params = request.params.model_copy(update={"temperature": 1.0})
        super().add(request)


@found_by("SamplerSuite", "test_padding_is_never_drawn", "are never drawn")
class DrawsPadding(FakeSampler):
    def bind(self, vocab_size: int, tokenizer_size: int, *rest: Any) -> None:
        super().bind(vocab_size, vocab_size, *rest)


@found_by("SamplerSuite", "test_bitmasks", "only tokens whose bit is set")
class IgnoresBitmasks(FakeSampler):
    def sample(self, logits: Any, rows: Any) -> Any:
        rows.bitmask = None
        return super().sample(logits, rows)


# ---------------------------------------------------------------- tokenizers and logits processors


class _Waiting(FakeDetokenizer):
    def __init__(self) -> None:
        self._all: list[int] = []

    def push(self, token_ids: Any) -> str:
        self._all += token_ids
        return ""

    def flush(self) -> str:
        return super().push(self._all)


@found_by("TokenizerSuite", "test_text_in_any_pieces", "as soon as it is final")
class WaitsForTheEnd(FakeTokenizer):
    def detokenizer(self, *args: Any, **settings: Any) -> Any:
        return _Waiting()


@found_by("TokenizerSuite", "test_any_tokens_in_any_pieces", "equals decode of all tokens", skip=True)
class DropsPieces(FakeTokenizer):
    def decode(self, token_ids: Any, **settings: Any) -> str:
        return super().decode(token_ids)[:7]


@found_by("TokenizerSuite", "test_messages_of_a_wrong_shape", "DID NOT RAISE", messages=["hello"])
class ChatsAboutAnything(FakeTokenizer):
    def chat(self, messages: Any, **variables: Any) -> str:
        return str(messages)


@found_by("LogitsProcessorSuite", "test_draft_rows", "as a draft", trees=False)
class OverlooksDrafts(NoRepeat):
    def apply(self, logits: Any, rows: Any, selected: Any) -> Any:
        for row in np.asarray(selected).tolist():
            slot = int(rows.row_slots[row])
            logits[row, rows.tokens[slot, : rows.lengths[slot]][-self._window[slot] :]] = -np.inf
        return logits


@found_by("LogitsProcessorSuite", "test_rows_of_a_batch", "only rows in selected may change")
class ChangesEveryRow(NoRepeat):
    def apply(self, logits: Any, rows: Any, selected: Any) -> Any:
        return super().apply(logits, rows, selected) - 1


@found_by("LogitsProcessorSuite", "test_rows_of_a_batch", "keeps_argmax promises")
class BreaksItsPromise(NoRepeat):
    keeps_argmax = True


@found_by("LogitsProcessorSuite", "test_slots_are_used_again", "returns whether the processor applies")
class KeepsWhatHasGone(NoRepeat):
    def add(self, request: Any) -> bool:
        return super().add(request) or request.slot in self._window

    def remove(self, slot: int) -> None:
        pass
