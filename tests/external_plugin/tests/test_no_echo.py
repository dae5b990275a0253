"""The logits processor passes the suite of its role: batches, drafts in chains and trees, requests that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from trivet.testing.suites import LogitsProcessorSuite


class TestNoEcho(LogitsProcessorSuite):
    use = "acme_no_echo"
    cases: ClassVar[Sequence[Any]] = ({"acme_no_echo": True}, {"acme_no_echo": 1.5}, {"acme_no_echo": 9})
    idle: ClassVar[Any] = {"acme_no_echo": False}
    refused: ClassVar[Sequence[Any]] = ({"acme_no_echo": -1}, {"acme_no_echo": "yes"}, {"acme_no_echo": 0})

    def reference(self, logits: Any, tokens: Sequence[int], num_prompt: int, params: Any) -> Any:
        value = params.extra_args["acme_no_echo"]
        logits[tokens[-1]] -= 3.0 if value is True else value
        return logits
