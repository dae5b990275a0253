"""An engine that the command's own thread drives, with text in and text out."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from trivet.engine import Engine
from trivet.errors import OverloadedError, RequestError, TrivetError
from trivet.launcher.errors import complain
from trivet.output.stage import OutputStage
from trivet.submission import Preparer, Submission, eos_token_ids
from trivet.watchdog import Monitor

if TYPE_CHECKING:
    from trivet.roles.tokenizer import Tokenizer
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.outputs import RequestOutput
    from trivet_schemas.sampling import RequestOutputKind, SamplingParams


class Session:
    """Requests are queued at any time, and :meth:`step` runs those that the engine takes.

    Unlike :meth:`trivet.LLM.generate`, which has all its requests before it begins, this serves an input that is read
    on the way and shows text as it is made. A context manager; the engine is shut down at the end.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start an engine. Raises :class:`trivet.errors.TrivetError` for what cannot be used."""
        if sys.stderr.isatty():
            complain(f"loading {config.model}", kind="note")
        self.engine = Engine(config)
        self._preparer = Preparer(self.engine.tokenizer, config.seed)
        self._stage = OutputStage(
            self.engine.tokenizer,
            stop=lambda request, num_tokens, stop_string: self.engine.stop(request.request_id, num_tokens, stop_string),
            abort=lambda requests: self.engine.abort([request.request_id for request in requests]),
            eos_token_ids=eos_token_ids(self.engine),
        )
        self._unfinished: dict[str, Submission] = {}
        self._waiting: deque[tuple[Submission, int]] = deque()
        self._monitor = Monitor(self.engine, lambda _: None)  # it logs what it finds, and the engine takes no more work

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._monitor.stop()
        self.engine.shutdown()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises RequestError when the engine has none."""
        return self._preparer.tokenizer

    @property
    def num_unfinished(self) -> int:
        """Requests that are queued or running."""
        return len(self._unfinished)

    @property
    def max_unfinished(self) -> int:
        """How many requests keep the engine busy and leave its scheduler something to choose from."""
        return 4 * self.engine.parts.limits.max_num_seqs

    def prepare(
        self, request_id: str, prompt: Any, params: SamplingParams, output_kind: RequestOutputKind
    ) -> Submission:
        """Tokenise a prompt (text, token ids) and check the request. Raises RequestError when it is refused."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                # Half a surrogate pair: bytes of the command line that are no UTF-8, or such an escape in JSON.
                message = f"prompt: is not valid Unicode at character {error.start}: {text[error.start]!r}"
                raise RequestError(message, param="prompt") from None
        submission = self._preparer.prepare(request_id, prompt, params, output_kind=output_kind)
        submission.validate(self.engine)
        return submission

    def prepare_chat(
        self,
        request_id: str,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        output_kind: RequestOutputKind,
    ) -> Submission:
        """The same for a conversation, by the chat template."""
        if not self.tokenizer.has_chat_template:
            raise RequestError(
                f"the model {self.engine.config.model!r} has no chat template; use a model made for chat, or set "
                "`chat_template` to a file with one",
                param="messages",
            )
        text = self.tokenizer.chat(messages)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.prepare(request_id, {"prompt": text, "prompt_token_ids": ids}, params, output_kind)

    def queue(self, submission: Submission) -> None:
        """Take a request; :meth:`step` reports on it by its id."""
        self._unfinished[submission.request_id] = submission
        self._waiting.extend((submission, index) for index in range(len(submission.children)))

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; returns what it added to requests.

        Raises:
            TrivetError: The engine stopped because of something that the user can mend (a plugin that breaks a rule).
        """
        self._feed()
        outputs: list[Any] = self._stage.process(self.engine.step())
        if isinstance(self.engine.fault_cause, TrivetError):
            raise self.engine.fault_cause
        for output in outputs:
            if output.finished:
                del self._unfinished[output.request_id]
        return outputs

    def abandon(self) -> None:
        """Abort everything and let the steps in flight settle."""
        self.engine.abort([child for submission in self._unfinished.values() for child in submission.child_ids])
        for submission in self._unfinished.values():
            self._stage.drop(submission)
        self._unfinished.clear()
        self._waiting.clear()
        while self.engine.has_unfinished:
            self.engine.step()

    def _feed(self) -> None:
        """Give the engine what it takes; a bounded queue refuses the rest as overload, which waits here."""
        while self._waiting:
            submission, index = self._waiting[0]
            if submission.request_id in self._unfinished:  # else a sibling failed, and the request with it
                try:
                    request = submission.add(self.engine, index)
                except OverloadedError:
                    if not self.engine.has_work:
                        raise  # nothing will ever make room
                    return
                self._stage.add(submission, index, request)
            self._waiting.popleft()
