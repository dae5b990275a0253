"""Plugins for the engine's state machine: everything that may delay, cut, fail or reorder, under the test's control."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from drafting import RandomTreeDrafter
from grammars import Alternating
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from pydantic import Field

from trivet.errors import RequestFault
from trivet.hookspecs import hookimpl
from trivet.plan import StepPlan, Transfer
from trivet.provider import Provider
from trivet.result import StepResult
from trivet.roles import (
    Connector,
    Executor,
    ExternalHit,
    Grammar,
    KVLayout,
    Matcher,
    TransferReport,
    TransferWorker,
    WorkerInfo,
)
from trivet.roles.base import Side
from trivet.testing.fake_model import _embed, _salt
from trivet.wire import decode_plan, decode_result, encode
from trivet_schemas.options import Options


class HeldOptions(Options):
    """When steps run."""

    depth: int = Field(1, ge=1)
    """Steps in flight."""
    feedback: bool = True
    """Whether the worker feeds its own tokens into its next step."""
    mode: str = "lazy"
    """A step runs ``eager`` when it is submitted, ``lazy`` when its result is taken, ``thread`` on another thread."""
    wire: bool = False
    """Whether plans and results travel as bytes."""


class HeldExecutor(Executor):
    """A worker in this process whose results are taken late; ``refuse`` is how many submissions fail."""

    def __init__(self, context: Any, options: HeldOptions) -> None:
        self._context, self._options = context, options
        self.max_in_flight = options.depth
        self.token_feedback = options.feedback and options.depth > 1
        self._waiting: deque[_Step] = deque()
        self._pool = ThreadPoolExecutor(1) if options.mode == "thread" else None
        self.refuse = 0

    def start(self) -> WorkerInfo:
        self._worker = self._context.worker_context(rank=0, world_size=1)
        self.runner: Any = self._worker.get("runner")
        info = self.runner.load()
        self.runner._grammars._pool = self._compiling = Compiling()
        return info

    def configure_cache(self, layout: KVLayout) -> None:
        self.runner.allocate(layout)

    def submit(self, plan: StepPlan) -> _Step:
        if self.refuse:
            self.refuse -= 1
            raise ConnectionError("the worker takes no plan")
        step = _Step(self, encode(plan) if self._options.wire else plan)
        if self._pool is not None:
            step.future = self._pool.submit(self._run, step.plan)
        elif self._options.mode == "eager":
            step.future = Future()
            try:
                step.future.set_result(self._run(step.plan))
            except Exception as error:  # noqa: BLE001 - raised where the result is taken
                step.future.set_exception(error)
        self._waiting.append(step)
        return step

    def _run(self, plan: Any) -> Any:
        self._compiling.pass_a_step()
        if isinstance(plan, bytes):
            return encode(self.runner.execute(decode_plan(plan)))
        return self.runner.execute(plan)

    def take(self, step: _Step) -> StepResult:
        assert self._waiting[0] is step, "results are taken in the order of submission"
        if step.future is None:
            step.future = Future()
            try:
                step.future.set_result(self._run(step.plan))
            except BaseException as error:
                step.future.set_exception(error if isinstance(error, Exception) else RuntimeError("broken off"))
                if isinstance(error, KeyboardInterrupt):
                    raise
        self._waiting.popleft()
        result = step.future.result()
        return decode_result(result) if isinstance(result, bytes) else result

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.runner, method)(*args)]

    def check_integrity(self) -> None:
        if not self._waiting:
            self.runner.check_integrity()

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.shutdown_all()


class _Step:
    def __init__(self, executor: HeldExecutor, plan: Any) -> None:
        self._executor, self.plan = executor, plan
        self.future: Future[Any] | None = None

    def done(self) -> bool:
        return self.future is not None and self.future.done()

    def result(self) -> StepResult:
        return self._executor.take(self)


# ---------------------------------------------------------------------- grammars


class Compiling:
    """A pool that needs up to three steps for a task, however long those take."""

    def __init__(self) -> None:
        self._tasks: list[list[Any]] = []
        self._count = 0

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        self._count += 1
        self._tasks.append([self._count % 4, Future(), function, args])
        return self._tasks[-1][1]

    def pass_a_step(self) -> None:
        for task in self._tasks:
            task[0] -= 1
        due, self._tasks = [t for t in self._tasks if t[0] < 0], [t for t in self._tasks if t[0] >= 0]
        for _, future, function, args in due:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except ValueError as error:
                    future.set_exception(error)

    def shutdown(self, **how: Any) -> None:
        self._tasks.clear()


class Forcing(Alternating):
    """Alternating, but a token below 16 must be followed by the two that come 17 and 18 after it."""

    def allowed(self, token_id: int) -> bool:
        forced = self.forced()
        return token_id == forced[0] if forced else super().allowed(token_id)

    def forced(self) -> Sequence[int]:
        *_, before, last = [99, 99, *self._accepted]
        if last < 16:
            return [last + 17, last + 18]
        return [last + 1] if before < 16 else ()


class Fragile(Alternating):
    """Raises at its third token."""

    def accept(self, token_id: int) -> bool:
        if len(self._accepted) == 2:
            raise MemoryError("too many states")
        return super().accept(token_id)


class Blind(Alternating):
    """Raises when it is asked for the third token's mask."""

    def fill_bitmask(self, out: Any) -> None:
        if len(self._accepted) == 2:
            raise ValueError("no way on")
        super().fill_bitmask(out)


def matcher_of(regex: str) -> Alternating:
    kind, _, limit = regex.partition(":")
    kinds = {"alternating": Alternating, "forcing": Forcing, "fragile": Fragile, "blind": Blind}
    if kind not in kinds:
        raise ValueError(f"regex: cannot compile {regex!r}")
    return kinds[kind](int(limit))


class ParityGrammar(Grammar):
    """Serves ``alternating:N`` and ``forcing:N``; nothing else compiles."""

    def __init__(self, context: Any, options: Any) -> None:
        pass

    def validate(self, params: Any) -> bool:
        return params.structured_outputs.regex is not None

    def compile(self, params: Any, output_ids: Sequence[int]) -> Matcher:
        matcher = matcher_of(params.structured_outputs.regex)
        for token in output_ids:
            assert matcher.accept(token), "the outputs so far must obey the grammar"
        return matcher


# ---------------------------------------------------------------------- drafts


class FarDrafter(RandomTreeDrafter):
    """Writes keys and values of its own, far beyond the last token."""

    lookahead = 20


class Far:
    """The plugin that offers it: what an embedder passes of this role is in use."""

    @hookimpl
    def trivet_providers(self) -> list[Provider]:
        return [Provider("drafter", "far", "machine_kit:FarDrafter")]


# ---------------------------------------------------------------------- transfers


class DepotOptions(Options):
    """What the depot does."""

    load: int = Field(0, ge=0)
    """Every how manieth admission finds its tokens here; 0: none."""
    store: int = Field(0, ge=0)
    """Every how manieth finished request is stored; 0: none."""
    seed: int = 0
    """Of everything random: durations, failures, whether a load blocks."""


class Depot(Connector):
    """Offers part of the known tokens, as if another instance had computed them."""

    endpoint = "depot"

    def __init__(self, context: Any, options: DepotOptions) -> None:
        self._options = options
        self._rng = random.Random(options.seed)
        self._context = context

    def match(self, request: Any, start: int) -> ExternalHit | None:
        if not self._options.load or self._rng.randrange(self._options.load):
            return None
        known = self._context.table.known_tokens(request)
        salt = np.array([_salt(request.adapter)], np.int64).tobytes()
        count = self._rng.randint(0, len(known) - start)
        return ExternalHit(count, blocking=self._rng.random() < 0.3, payload=salt + known.tobytes())

    def finished(self, request: Any, tables: Any) -> ExternalHit | None:
        if not self._options.store or self._rng.randrange(self._options.store):
            return None
        return ExternalHit(self._rng.randint(0, request.num_prompt))


class DepotWorker(TransferWorker):
    """Writes the first layer's words; fails at random, with or without naming the blocks that are damaged."""

    endpoint = "depot"

    def __init__(self, context: Any, options: DepotOptions) -> None:
        self._rng = random.Random(options.seed + 1)
        self._under_way: list[list[Any]] = []

    def bind(self, attention: Any) -> None:
        self._attention = attention

    def submit(self, transfer: Transfer, *, store: bool) -> None:
        if self._rng.random() < 0.1:
            raise OSError("no route to the depot")
        self._under_way.append([0 if transfer.blocking else self._rng.randrange(4), transfer, store])

    def poll(self) -> TransferReport:
        report = TransferReport(invalid_blocks=[[]])
        named = self._rng.random() < 0.7
        for entry in self._under_way:
            entry[0] -= 1
        for _, transfer, store in [e for e in self._under_way if e[0] < 0]:
            bad = [] if store else self._load(transfer)
            (report.failed if bad else report.finished).append(transfer.transfer_id)
            if named:
                report.invalid_blocks[0] += bad
        self._under_way = [e for e in self._under_way if e[0] >= 0]
        return report

    def _load(self, transfer: Transfer) -> list[int]:
        keys, _ = self._attention.kv(0)
        salt = np.frombuffer(transfer.payload[:8], np.int64).astype(np.uint64)
        size, known = keys.shape[1], np.frombuffer(transfer.payload[8:], np.int32)
        good = len(transfer.blocks[0]) if self._rng.random() < 0.6 else self._rng.randrange(len(transfer.blocks[0]))
        for p in range(transfer.start_token, transfer.start_token + transfer.num_tokens):
            block = p // size - transfer.start_token // size
            if block < good:
                keys[transfer.blocks[0][block], p % size] = _embed(known[p : p + 1], [p], salt)
        return [int(b) for b in transfer.blocks[0][good:]]


# ---------------------------------------------------------------------- faults


class Chaos:
    """Wrappers and observers that do what the test asked for: raise in a phase, lower limits, hold requests."""

    def __init__(self) -> None:
        self.armed: dict[str, Exception] = {}
        self.token_budget: int | None = None
        self.max_num_seqs: int | None = None
        self.holds: dict[str, str] = {}
        #: (slot, epoch) of what was in a plan that was sent or committed, emptied by the test
        self.advanced: set[tuple[int, int]] = set()
        self.cache: Any = None
        self.groups: Any = ()
        self.blocks: dict[int, Any] = {}  # by step: those that its rows read or write
        self.started: list[str] = []
        self.ended: list[str] = []

    def _strike(self, phase: str) -> None:
        error = self.armed.pop(phase, None)
        if error is not None:
            raise error

    @hookimpl(wrapper=True)
    def trivet_schedule(self, inputs: Any) -> Iterator[None]:
        if self.token_budget is not None:
            inputs.token_budget = self.token_budget
        if self.max_num_seqs is not None:
            inputs.max_num_seqs = self.max_num_seqs
        inputs.holds.update(self.holds)
        plan = yield
        assert not {n.request_id for n in plan.new} & set(self.holds)
        return plan

    @hookimpl(wrapper=True)
    def trivet_run(self, plan: Any) -> Iterator[None]:
        self._note(plan)
        if self.cache is not None:
            blocks = [np.empty(0, np.int32)]
            for slot, computed in zip(plan.slots.tolist(), plan.num_computed.tolist(), strict=True):
                for group, table in zip(self.groups, self.cache.tables(slot), strict=True):
                    first = 0 if group.window is None else max(computed - group.window + 1, 0)
                    blocks.append(table[first // group.block_size :])
            self.blocks[plan.step_id] = np.concatenate(blocks)
        self._strike("before run")
        pending = yield
        self._strike("after run")
        return pending

    @hookimpl(wrapper=True)
    def trivet_commit(self, plan: Any, result: Any) -> Iterator[None]:
        self._note(plan)
        return (yield)

    @hookimpl
    def trivet_extend(self, context: Any) -> list[object]:
        if context.side is Side.WORKER:
            sampler = context.get("sampler")
            add = sampler.add

            def entering(request: Any) -> None:
                self._strike("entry")
                add(request)

            sampler.add = entering
        return []

    def _note(self, plan: StepPlan) -> None:
        self.advanced.update(zip(plan.slots.tolist(), plan.epochs.tolist(), strict=True))
        self.advanced.update((new.slot, new.epoch) for new in plan.new)

    @hookimpl(wrapper=True)
    def trivet_forward(self, batch: Any) -> Iterator[None]:
        self._strike("before forward")
        output = yield
        self._strike("after forward")
        return output

    @hookimpl(wrapper=True)
    def trivet_sample(self, logits: Any, rows: Any) -> Iterator[None]:
        self._strike("before sample")
        sampled = yield
        self._strike("after sample")
        return sampled

    @hookimpl(wrapper=True)
    def trivet_draft(self, inputs: Any) -> Iterator[None]:
        self._strike("before draft")
        drafts = yield
        self._strike("after draft")
        return drafts

    @hookimpl
    def trivet_requests_added(self, event: Any) -> None:
        self.started += [r.request_id for r in event.requests]

    @hookimpl
    def trivet_requests_finished(self, event: Any) -> None:
        self.ended += [f.request.request_id for f in event.finished]


#: where :attr:`Chaos.armed` may strike; ``entry``: when a request enters its slot
PHASES = ["entry", *(f"{at} {phase}" for phase in ("run", "forward", "sample", "draft") for at in ("before", "after"))]


class Touchy:
    """An observer that raises the first time."""

    @hookimpl
    def trivet_step_finished(self, event: Any) -> None:
        raise RuntimeError("observer broke")


def fault_of(ids: Sequence[str]) -> RequestFault:
    return RequestFault({i: f"{i} is not wanted" for i in ids})


@hookimpl
def trivet_providers() -> list[Provider]:
    return [
        Provider("executor", "held", "machine_kit:HeldExecutor", options=HeldOptions),
        Provider("grammar", "parity", "machine_kit:ParityGrammar"),
        Provider("connector", "depot", "machine_kit:Depot", DepotOptions, worker_factory="machine_kit:DepotWorker"),
    ]


def lives(machine: type[RuleBasedStateMachine], examples: int, steps: int, *, same: bool = False) -> None:
    """Run so many random lives of a machine, of so many steps at most; ``same``: the same ones every time."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=same,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
