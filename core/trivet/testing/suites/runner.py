"""Conformance of ``runner`` providers: plans in, results out, judged by the fake model's naive loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

from trivet.plan import LogitsRows, StepPlan, Task
from trivet.result import StepResult
from trivet.roles import Runner, WorkerInfo
from trivet.testing.fake_model import reference_logits, reference_states, reference_tokens
from trivet.testing.suites import _faults, _guess, _late
from trivet.testing.suites._base import Suite, promised, require
from trivet.testing.suites._drive import check_outputs, drive, greedy, make_work, submit
from trivet.testing.suites._plans import Drafted, PlanWriter, make_layout
from trivet.wire import decode_plan, decode_result, encode
from trivet_schemas.sampling import PoolingParams

NUM_BLOCKS = 80
SLOTS = 6
_SHORT = 26 * 4 * 16  # bytes per layer: one request of the full length and a little more


class RunnerSuite(Suite):
    """Runs a runner over the fake model, attention and sampler, whose tensors are numpy arrays: what the runner gives
    them must be readable by ``numpy.asarray``."""

    role: ClassVar[str] = "runner"
    #: drafts in trees
    trees: ClassVar[bool] = True
    #: pooled outputs
    pools: ClassVar[bool] = True
    #: the model's provider; name a subclass of the fake model whose hidden states are tensors if the runner needs that
    fake_model: ClassVar[str] = "fake"
    #: windows of the fake model's layers; several KV groups
    windows: ClassVar[tuple[int | None, ...]] = (None, 5, None)

    # ------------------------------------------------------------------ running

    @contextmanager
    def running(self, *more: object, seed: int = 0, **roles: Any) -> Iterator[Worker]:
        """A worker that is ready for plans."""
        plugins = {"model": {"use": self.fake_model, "windows": list(self.windows)}} | roles
        context = self.worker_context(*more, max_num_seqs=SLOTS, max_model_len=96, plugins=plugins)
        try:
            yield Worker(self.make(context), np.random.default_rng(seed))
        finally:
            context.shutdown_all()

    def reference(self, prompt: list[int], count: int) -> list[int]:
        """The naive loop's tokens."""
        return reference_tokens(prompt, count, windows=self.windows)

    def check_tokens(self, found: list[int], prompt: list[int], how: str, **details: object) -> None:
        """Accepted tokens are the naive loop's."""
        expected = self.reference(prompt, len(found))
        require(
            found == expected,
            f"a plan's rows get their own tokens ({how})",
            Runner.execute,
            found=found,
            expected=expected,
            **details,
        )

    # ------------------------------------------------------------------ plans

    def test_what_the_worker_says_of_itself(self) -> None:
        """``load`` reports the model's facts, and what attention can do for each layer."""
        with self.running() as worker:
            info = worker.info
            require(
                len(info.support) == len(info.specs) == len(self.windows), "support has one entry per spec", WorkerInfo
            )
            require(info.available_bytes > 0, "available_bytes is what is free for the KV cache", WorkerInfo)
            require(
                info.model.vocab_size == 64, "model is what the model's load returned", WorkerInfo, model=info.model
            )
            require(
                "temperature" in info.sampling_fields,
                "sampling_fields are the sampler's",
                WorkerInfo,
                fields=sorted(info.sampling_fields),
            )

    def test_random_plans(self) -> None:
        """Requests come, are computed in chunks, preempted, resumed and dropped; rows and keys are repeated."""
        rng = np.random.default_rng(0)
        with self.running() as worker:
            prompts: dict[int, list[int]] = {}
            for step in range(40):
                for slot in range(SLOTS):
                    if slot not in prompts and rng.random() < 0.4:
                        prompts[slot] = rng.integers(0, 64, rng.integers(1, 30)).tolist()
                        worker.writer.add(slot, prompts[slot], params=greedy(50))
                    elif slot in prompts and rng.random() < 0.05:
                        gone = worker.writer.drop(slot, preempt=True)
                        tokens, size = gone.tokens, gone.num_prompt
                        worker.writer.add(slot, tokens, num_prompt=size, params=greedy(50), request_id=gone.request_id)
                counts = {}
                for slot in prompts:
                    pending = worker.writer.pending(slot)
                    counts[slot] = pending if rng.random() < 0.6 else int(rng.integers(0, pending + 1))
                plan, result = worker.step(worker.writer.plan(counts))
                self.check_keys(plan, result)
                for slot, prompt in list(prompts.items()):
                    script = worker.writer.requests[slot]
                    self.check_tokens(script.tokens[len(prompt) :], prompt, "in random plans", step=step, slot=slot)
                    if len(script.tokens) > 60 or rng.random() < 0.05:
                        worker.writer.drop(slot)
                        del prompts[slot]
                worker.runner.check_integrity()

    def check_keys(self, plan: StepPlan, result: StepResult) -> None:
        """A result repeats the plan's keys and has tokens for the rows that sample."""
        keys = result.step_id == plan.step_id and np.array_equal(result.slots, plan.slots)
        require(
            keys and np.array_equal(result.epochs, plan.epochs), "slots and epochs repeat the plan's keys", StepResult
        )
        require(
            not result.errors and np.array_equal(result.accepted.lengths > 0, plan.samples),
            "accepted has tokens for the rows that sample, and none for the others",
            StepResult,
            accepted=result.accepted.lengths,
            samples=plan.samples,
            errors=result.errors,
        )

    def test_plans_as_bytes(self) -> None:
        """A plan that crossed a process boundary (its arrays are read-only) has the same result."""
        prompt = list(range(20))
        found = []
        for crosses in (False, True):
            with self.running() as worker:
                worker.writer.add(1, prompt, params=greedy(20))
                for counts in ({1: 7}, None, None, None):
                    plan = worker.writer.plan(counts)
                    worker.step(decode_plan(encode(plan)) if crosses else plan, crosses=crosses)
                found.append(worker.writer.requests[1].tokens[20:])
        require(found[0] == found[1], "a plan is the same in memory and as bytes", "trivet.wire", tokens=found)
        self.check_tokens(found[1], prompt, "as bytes")

    def test_chains_of_drafts(self) -> None:
        """Right drafts are accepted up to the first wrong one, and one more token is drawn."""
        with self.running() as worker:
            self._verify(worker, lambda right, wrong: Drafted([*right[:2], wrong, right[3]]), 3)

    @promised("trees")
    def test_trees_of_drafts(self) -> None:
        """The path that was right is accepted, and its keys and values are where a chain would have put them."""
        with self.running() as worker:
            self._verify(
                worker,
                lambda right, wrong: Drafted([wrong, right[0], wrong, right[1], right[2]], [-1, -1, 1, 1, 3]),
                4,
            )

    def _verify(self, worker: Worker, make: Any, accepted: int) -> None:
        for slot in range(3):
            worker.writer.add(slot, [7 * slot + i for i in range(5 + slot)], params=greedy(50))
        worker.step(worker.writer.plan())
        for _ in range(4):
            drafts = {}
            for slot in (0, 2):
                tokens = worker.writer.requests[slot].tokens
                right = self.reference(tokens, 4)
                drafts[slot] = make(right, (right[0] + right[2] + 1) % 64)
                if drafts[slot].tokens.count(right[0]) > 1 or (right[0] + right[2] + 1) % 64 in right:
                    drafts[slot] = Drafted([])
            drafts = {slot: d for slot, d in drafts.items() if d.tokens}
            plan, result = worker.step(worker.writer.plan(drafts=drafts))
            for row, slot in enumerate(plan.slots.tolist()):
                expected = accepted if slot in drafts else 1
                require(
                    len(result.accepted.row(row)) == expected,
                    "a row accepts its right drafts and draws one token after them",
                    Runner.execute,
                    drafts=drafts.get(slot),
                    accepted=result.accepted.row(row),
                )
        for slot in range(3):
            script = worker.writer.requests[slot]
            self.check_tokens(script.tokens[script.num_prompt :], script.tokens[: script.num_prompt], "with drafts")

    def test_prompt_logprobs(self) -> None:
        """Every prompt position but the first is reported once, in chunks, with the raw model's logprobs."""
        prompt = [int(t) for t in np.random.default_rng(3).integers(0, 64, 23)]
        logits = reference_logits(prompt, 64, self.windows)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        with self.running() as worker:
            worker.writer.add(0, prompt, params=greedy(5, prompt_logprobs=2))
            seen = []
            while worker.writer.pending(0):
                count = min(7, worker.writer.pending(0))
                plan, result = worker.step(worker.writer.plan({0: count}, prompt_logprobs=True))
                require(
                    not result.prompt_logprobs or plan.logits_rows[0] == LogitsRows.PROMPT,
                    "prompt logprobs come from rows that ask for them",
                    Runner.execute,
                )
                for chunk in result.prompt_logprobs:
                    for i, ids in enumerate(chunk.values.token_ids.tolist()):
                        position = chunk.start + i
                        seen.append(position)
                        expected = logprobs[position - 1]
                        best = np.argsort(-expected)[:2].tolist()
                        ok = ids == [prompt[position], *best] and np.allclose(
                            chunk.values.logprobs[i], expected[ids], atol=1e-4
                        )
                        require(
                            ok,
                            "values[i] is about the prompt token at start + i",
                            "trivet.result.PromptLogprobs",
                            position=position,
                            ids=ids,
                        )
                if len(worker.writer.requests[0].tokens) > len(prompt):
                    break
            require(
                seen == list(range(1, len(prompt))),
                "each prompt position is reported once",
                Runner.execute,
                positions=seen,
            )
            self.check_tokens(worker.writer.requests[0].tokens[23:], prompt, "with prompt logprobs")

    def test_the_next_step_before_the_result_is_taken(self) -> None:
        """A row whose input is ``DEVICE`` continues with the token that the step before drew."""
        prompt = list(range(9))
        with self.running() as worker:
            worker.writer.add(2, prompt, params=greedy(20))
            flying = [worker.writer.plan()]
            found: list[int] = []
            for _ in range(6):
                worker.runner_results.append(worker.runner.execute(flying[-1]))
                flying.append(worker.writer.plan())
                plan = flying.pop(0)
                result = worker.runner_results.pop(0)
                found += worker.writer.take(plan, result)[2]
            self.check_tokens(found, prompt, "with a step in flight")

    def test_copies_precede_writes(self) -> None:
        """Blocks are copied as they were before the step wrote anything, in every group."""
        prompt = list(range(11))
        with self.running() as worker:
            parent = worker.writer.add(0, prompt, params=greedy(20))
            worker.step(worker.writer.plan())
            child = worker.writer.add(3, prompt, params=greedy(20))
            child.computed = 10
            plan = worker.writer.plan()
            plan.new[0].num_computed = 10
            plan.copies = [
                np.stack([np.array(a, np.int32)[: len(b)], np.array(b, np.int32)], axis=1)
                for a, b in zip(parent.blocks, child.blocks, strict=True)
            ]
            worker.step(plan)
            worker.step(worker.writer.plan())
            for slot in (0, 3):
                self.check_tokens(worker.writer.requests[slot].tokens[11:], prompt, "after a fork", slot=slot)

    @promised("pools")
    def test_pooled_outputs(self) -> None:
        """A request that is pooled gets its last hidden state once all of it is computed, and draws nothing."""
        prompt = list(range(10))
        with self.running() as worker:
            worker.writer.add(0, prompt, params=PoolingParams(task="embed"), task=Task.EMBED)
            worker.writer.add(1, prompt, params=greedy(4))
            _, first = worker.step(worker.writer.plan({0: 6, 1: 10}))
            require(not first.pooled, "nothing is pooled before all tokens are computed", Runner.execute)
            _, second = worker.step(worker.writer.plan())
            state = float((reference_states(prompt, self.windows)[-1] >> np.uint64(11)) / 2.0**53)
            require(
                len(second.pooled) == 1 and np.allclose(second.pooled[0].data, state, rtol=1e-6),
                "the pooled output is the last position's hidden state",
                Runner.execute,
                pooled=second.pooled,
                expected=state,
            )
            require(not len(second.accepted.row(0)), "a pooled row draws nothing", Runner.execute)

    # ------------------------------------------------------------------ faults

    def test_a_plan_without_rows(self) -> None:
        """Only its deltas are applied."""
        with self.running() as worker:
            worker.writer.add(0, [1, 2, 3], params=greedy(9))
            worker.step(worker.writer.plan())
            worker.writer.drop(0)
            worker.writer.add(1, [4, 5, 6], params=greedy(9))
            plan, result = worker.step(worker.writer.plan({}))
            require(
                plan.num_rows == 0 and result.step_id == plan.step_id,
                "a plan without rows has a result",
                Runner.execute,
            )
            worker.step(worker.writer.plan())
            self.check_tokens(worker.writer.requests[1].tokens[3:], [4, 5, 6], "after a plan without rows")

    def test_an_exception_of_a_phase(self) -> None:
        """It leaves ``execute``; what the plan said of requests and blocks has taken effect all the same."""
        with self.poisoned() as worker:
            worker.writer.add(0, [1, 2, 3], params=greedy(9))
            worker.step(worker.writer.plan())
            worker.writer.add(1, [5, _faults.POISON], params=greedy(9))
            worker.writer.add(2, [6, 7, 8], params=greedy(9))
            plan = worker.writer.plan({1: 2})
            with pytest.raises(RuntimeError, match="poisoned"):
                worker.runner.execute(plan)
            worker.writer.drop(1)
            for _ in range(3):
                worker.step(worker.writer.plan({0: 1, 2: worker.writer.pending(2)}))
            self.check_tokens(worker.writer.requests[0].tokens[3:], [1, 2, 3], "after a failed step")
            self.check_tokens(worker.writer.requests[2].tokens[3:], [6, 7, 8], "admitted by a step that failed")

    def test_a_fault_of_one_request(self) -> None:
        """The step is undone, the fault names the request, and the others can be computed again."""
        with self.poisoned() as worker:
            worker.writer.add(0, [1, 2, 3], params=greedy(9), request_id="good")
            worker.writer.add(1, [4, 5], params=greedy(9, extra_args={_faults.FAULT: 1}), request_id="bad")
            worker.step(worker.writer.plan())
            plan = worker.writer.plan()
            result = worker.runner.execute(plan)
            named = [(e.slot, e.message) for e in result.errors]
            require(
                result.undone and [s for s, _ in named] == [1] and "to end after 1" in named[0][1],
                "a RequestFault becomes a result with undone set and an error per named request",
                Runner.execute,
                undone=result.undone,
                errors=result.errors,
            )
            require(
                not len(result.accepted.values),
                "nothing of an undone step counts",
                StepResult,
                accepted=result.accepted,
            )
            good = worker.writer.requests[0]
            good.computed, good.drawn = good.computed - 1, 0
            worker.writer.drop(1)
            worker.step(worker.writer.plan())
            self.check_tokens(good.tokens[3:], [1, 2, 3], "after a fault of another request")

    def poisoned(self) -> AbstractContextManager[Worker]:
        """A worker with the plugin that breaks steps."""
        return self.running(_faults, logits_processor=[{"use": "faulty"}])

    # ------------------------------------------------------------------ engines

    @pytest.mark.parametrize("short", [False, True], ids=["ample", "short"])
    @pytest.mark.parametrize(("depth", "drafts"), [(1, False), (2, False), (1, True), (3, True)])
    def test_in_an_engine(self, depth: int, drafts: bool, short: bool) -> None:
        """Under preemption, with steps in flight and drafts, tokens are those of the naive loop."""
        work = make_work(14, seed=depth)
        cache: dict[str, Any] = {"use": "paged", "block_size": 4}
        if short:
            cache["memory"] = _SHORT * len(self.windows)
        roles: dict[str, Any] = {"cache": cache, "model": {"use": self.fake_model, "windows": list(self.windows)}}
        roles["executor"] = {"use": "late", "depth": depth}
        if drafts:
            roles["drafter"] = [{"use": "guess", "trees": self.trees, "windows": list(self.windows)}]
        with self.engine(_guess, _late, **roles) as engine:
            submit(engine, work)
            check_outputs(drive(engine), work, Runner.execute, windows=self.windows)


class Worker:
    """A runner that has loaded and allocated, and the plans for it."""

    def __init__(self, runner: Runner, rng: Any) -> None:
        self.runner = runner
        self.info = runner.load()
        layout = make_layout(self.info.specs, self.info.support, 4, NUM_BLOCKS)
        runner.allocate(layout)
        self.writer = PlanWriter(layout, NUM_BLOCKS, rng)
        self.runner_results: list[StepResult] = []

    def step(self, plan: StepPlan, *, crosses: bool = False) -> tuple[StepPlan, StepResult]:
        """Execute a plan and take its result over."""
        result = self.runner.execute(plan)
        if crosses:
            result = decode_result(encode(result))
        self.writer.take(plan, result)
        return plan, result
