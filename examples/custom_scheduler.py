"""A scheduler of one's own, passed as an object: ``python examples/custom_scheduler.py [MODEL]``.

The queue is ordered by prompt length, so that short questions do not wait behind long documents. The planner keeps
slots, blocks and epochs consistent; the scheduler only decides. A package would offer the class under the entry point
group ``trivet`` instead, see ``docs/plugins.md``.
"""

from __future__ import annotations

import sys
from bisect import insort

import numpy as np

from trivet import LLM, Engine, EngineConfig, EngineContext, SamplingParams
from trivet.plan import StepPlan
from trivet.roles import ScheduleInputs, Scheduler, SchedulerLimits
from trivet.state import Request


class ShortestFirst(Scheduler):
    """Running requests first, then the waiting one with the shortest prompt."""

    def __init__(self, max_num_seqs: int = 8, max_num_batched_tokens: int = 512) -> None:
        self._limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens)
        self._queue: list[tuple[int, int, Request]] = []

    @property
    def limits(self) -> SchedulerLimits:
        """The sizes that the engine is built for."""
        return self._limits

    @property
    def num_waiting(self) -> int:
        """Queued requests."""
        return len(self._queue)

    def bind(self, context: EngineContext) -> None:
        """Keep the planner, which is ready by now."""
        self._planner = context.planner

    def add(self, request: Request) -> None:
        """Queue by prompt length; arrival decides between equals."""
        insort(self._queue, (request.num_prompt, request.index, request))

    def requeue(self, request: Request) -> None:
        """Queue a preempted request at the front, whatever its length."""
        insort(self._queue, (0, request.index, request))

    def remove(self, request: Request) -> None:
        """Drop an aborted request."""
        self._queue = [entry for entry in self._queue if entry[2] is not request]

    def schedule(self, inputs: ScheduleInputs) -> StepPlan:
        """Extend what runs, as far as budget and memory go; then admit, unless memory just ran out."""
        planner = self._planner
        planner.begin(inputs)
        slots = planner.runnable()
        while len(slots):
            pending = planner.pending(slots)
            before = np.cumsum(pending) - pending
            counts = np.clip(planner.tokens_left - before, 0, pending).astype(np.int32)
            funded = int(np.count_nonzero(counts))
            done = planner.extend(slots[:funded], counts[:funded])
            if done == funded:
                break
            # Out of memory: the newest gives its blocks to those before it.
            slots = slots[done:]
            planner.preempt(int(slots[-1]))
            slots = slots[:-1]
        for entry in list(self._queue) if not planner.num_preempted else []:
            if planner.is_held(entry[2]):
                continue
            if planner.tokens_left < 1 or not planner.admit(entry[2], planner.tokens_left).ok:
                break
            self._queue.remove(entry)
        return planner.finish()


def main(model: str = "demo") -> None:
    """Generate with the scheduler in an engine that was put together by hand."""
    config = EngineConfig(model=model, dtype="float32", max_model_len=512)
    prompts = ["word " * 200, "The capital of France is", "Once upon a time, long ago,"]
    with LLM.from_engine(Engine(config, plugins=[ShortestFirst()])) as llm:
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
            print(f"{len(output.prompt_token_ids or []):4} prompt tokens -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
