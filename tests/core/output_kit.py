"""An output stage behind an engine that plays from a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trivet.events import CommitEvents
from trivet.output import Output, OutputStage
from trivet.submission import Preparer, Submission
from trivet.testing.scripted import EOS, ScriptedEngine
from trivet_schemas.outputs import RequestOutput
from trivet_schemas.sampling import PoolingParams, SamplingParams

PROMPT = [5, 6, 7]


class Play:
    """An engine, a stage that runs ``late`` commits behind, and everything the stage gave out."""

    def __init__(self, engine: ScriptedEngine, *, late: int = 0) -> None:
        self.engine, self.late = engine, late
        tokenizer = engine.tokenizer
        self.stage = OutputStage(
            tokenizer,
            stop=lambda request, count, text: engine.stop(request.request_id, count, text),
            abort=lambda requests: engine.abort([r.request_id for r in requests]),
            eos_token_ids=(EOS,),
        )
        self._preparer = Preparer(tokenizer, 0)
        self.outputs: dict[str, list[Output]] = {}

    def add(
        self, params: SamplingParams | PoolingParams, prompt: Sequence[int] = PROMPT, request_id: str = "r"
    ) -> Submission:
        submission = self._preparer.prepare(request_id, {"prompt_token_ids": list(prompt)}, params)
        for index in range(len(submission.children)):
            self.stage.add(submission, index, submission.add(self.engine, index))
        return submission

    def run(self) -> Play:
        waiting: list[CommitEvents] = []
        for _ in range(10_000):
            if self.engine.has_work:
                waiting.append(self.engine.step())
            elif not waiting:
                return self
            while waiting and (len(waiting) > self.late or not self.engine.has_work):
                self.take(self.stage.process(waiting.pop(0)))
        raise AssertionError("the engine never ends")

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def final(self, request_id: str = "r") -> RequestOutput:
        output = self.outputs[request_id][-1]
        assert isinstance(output, RequestOutput)
        assert output.finished
        return output


def play(
    script: Sequence[int], params: SamplingParams, *, chunks: Sequence[int] = (1,), late: int = 0, **engine: Any
) -> Play:
    """Run one request whose output is ``script``."""
    played = Play(ScriptedEngine({tuple(PROMPT): script}, chunks=chunks, **engine), late=late)
    played.add(params)
    return played.run()
