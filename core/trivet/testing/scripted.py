"""For tests of what sits in front of an engine: a tokenizer of chosen pieces, an engine that plays from a script."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from trivet.errors import EngineUnhealthyError, OverloadedError, RequestError
from trivet.events import CommitEvents, Finished
from trivet.plan import Ragged
from trivet.result import Pooled, PromptLogprobs, TokenLogprobs
from trivet.roles.model import ModelInfo
from trivet.roles.tokenizer import Detokenizer, Tokenizer
from trivet.state import Request
from trivet_schemas.config import EngineConfig
from trivet_schemas.sampling import PoolingParams

EOS = 0


class PieceDetokenizer(Detokenizer):
    """UTF-8, incrementally."""

    def __init__(self, owner: PieceTokenizer, skip_special: bool) -> None:
        self._owner, self._skip = owner, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        self._owner.pushes += 1
        if self._owner.poison in token_ids:
            raise RuntimeError("a poisonous token")
        return self._decoder.decode(self._owner.joined(token_ids, skip_special=self._skip))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceTokenizer(Tokenizer):
    """Token 0 is ``</s>``, a special token; the others are the pieces given. Encodes character by character."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [b"</s>", *pieces]
        self.pushes = 0
        self.poison = -1

    def joined(self, token_ids: Iterable[int], *, skip_special: bool) -> bytes:
        return b"".join(self.pieces[i] for i in token_ids if not (skip_special and i == EOS))

    @property
    def size(self) -> int:
        return len(self.pieces)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (EOS,)

    @property
    def bos_token_id(self) -> int | None:
        return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.pieces.index(letter.encode()) for letter in text]

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        return self.joined(token_ids, skip_special=skip_special_tokens).decode("utf-8", "replace")

    def detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        return PieceDetokenizer(self, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        return self.pieces[token_id].decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    @property
    def has_chat_template(self) -> bool:
        return True

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        if messages and messages[-1]["role"] == "assistant" and not variables.get("continue_final_message"):
            raise RequestError("the last message must not be the assistant's", param="messages")
        return "".join(str(message["content"]) for message in messages) + str(variables.get("suffix", ""))


LETTERS = PieceTokenizer([bytes([c]) for c in range(ord("a"), ord("z") + 1)] + [b" ", b"\xe2\x82", b"\xac", b"\xff"])


def logprobs_of(tokens: Sequence[int], k: int) -> TokenLogprobs:
    """Token ``t`` has logprob ``-t / 8`` and rank ``t + 1``; the ``k`` most likely are 0, 1, 2, ..."""
    ids = np.array([[t, *range(k)] for t in tokens], np.int32).reshape(len(tokens), 1 + k)
    return TokenLogprobs(ids, (-ids / 8).astype(np.float32), np.array([t + 1 for t in tokens], np.int32))


class ScriptedEngine:
    """Plays the part of an engine: each request has a script of tokens, and each step emits a chunk of every one.

    ``scripts`` maps a prompt (tuple of ids) to what the model would say, after which it repeats the end of sequence;
    ``chunks`` are the numbers of tokens per step, used in turn. ``faults`` maps a prompt to (tokens before, message).
    At most ``max_queued`` requests are taken at once. ``log`` records additions, aborts and stops; ``before_step`` is
    called with the engine.
    """

    def __init__(
        self,
        scripts: Mapping[tuple[int, ...], Sequence[int]],
        *,
        tokenizer: Tokenizer | None = LETTERS,
        chunks: Sequence[int] = (1,),
        max_queued: int = 1000,
        max_model_len: int = 10_000,
    ) -> None:
        self.scripts, self.tokenizer, self.max_model_len = scripts, tokenizer, max_model_len
        self.chunks, self.max_queued = list(chunks), max_queued
        self.model = ModelInfo(vocab_size=1000, max_model_len=max_model_len, eos_token_ids=(EOS,))
        self.config = EngineConfig(model="scripted", generation_config="vllm")
        self.faults: dict[tuple[int, ...], tuple[int, str]] = {}
        self.requests: dict[str, Request] = {}
        self.given: dict[str, int] = {}
        self.ended: list[Finished] = []
        self.log: list[tuple[Any, ...]] = []
        self.fault: str | None = None
        self.steps = 0
        self.before_step: Any = None
        self.is_shut_down = False
        self.watchdog = SimpleNamespace(seconds=None)

    # ------------------------------------------------------------------ what Engine offers

    def validate(self, prompt_token_ids: Sequence[int], params: Any) -> None:
        if len(prompt_token_ids) >= self.max_model_len:
            raise RequestError(f"prompt: has {len(prompt_token_ids)} tokens", param="prompt")

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: Any,
        *,
        priority: int | None = None,
        arrival_time: float | None = None,
        prompt: str | None = None,
        cache_tags: Mapping[str, bytes] | None = None,
        parent: str | None = None,
    ) -> Request:
        if self.fault is not None:
            raise EngineUnhealthyError(self.fault)
        if request_id in self.requests:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request", param="request_id")
        self.validate(prompt_token_ids, params)
        if len(self.requests) >= self.max_queued:
            raise OverloadedError("the queue is full")
        limit = (
            1 if isinstance(params, PoolingParams) else params.token_limit(len(prompt_token_ids), self.max_model_len)
        )
        request = Request(
            request_id,
            np.array(prompt_token_ids, np.int32),
            params,
            len(prompt_token_ids) + limit,
            getattr(params, "seed", None) or 0,
            priority=priority or 0,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            prompt=prompt,
            parent=parent,
            cache_tags=dict(cache_tags or {}),
        )
        self.requests[request_id] = request
        self.given[request_id] = 0
        self.log.append(("add", request_id, parent))
        return request

    def abort(self, request_ids: Iterable[str], reason: str = "abort") -> None:
        for request_id in list(request_ids):
            if request_id in self.requests:
                self.log.append(("abort", request_id))
                self.finish(self.requests[request_id], reason)

    def stop(self, request_id: str, num_tokens: int, stop_reason: str) -> None:
        if request_id in self.requests:
            self.log.append(("stop", request_id, num_tokens, stop_reason))
            self.finish(self.requests[request_id], "stop", stop_reason)

    @property
    def has_unfinished(self) -> bool:
        """As :attr:`has_work`: nothing is transferred here."""
        return self.has_work

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.ended)

    def explain(self, request_id: str) -> Any:
        return f"waits: {request_id}" if request_id in self.requests else None

    def shutdown(self) -> None:
        self.is_shut_down = True

    def step(self) -> CommitEvents:
        if self.before_step is not None:
            self.before_step(self)
        events = CommitEvents(self.steps)
        chunk = self.chunks[self.steps % len(self.chunks)]
        self.steps += 1
        rows: list[list[int]] = []
        for request in list(self.requests.values()):
            if isinstance(request.params, PoolingParams):
                data = request.prompt_ids.astype(np.float32)
                events.pooled.append((request, Pooled(0, 0, data)))
                self.finish(request, "stop")
                continue
            tokens = self._next_tokens(request, chunk)
            if request.params.prompt_logprobs is not None and request.first_token_time is None:
                values = logprobs_of(request.prompt_ids.tolist()[1:], request.params.prompt_logprobs)
                events.prompt_logprobs.append((request, PromptLogprobs(0, 0, 1, values)))
            if tokens:
                if request.params.logprobs is not None:
                    events.logprobs.append((len(rows), logprobs_of(tokens, request.params.logprobs)))
                request.first_token_time = request.first_token_time or time.monotonic()
                events.requests.append(request)
                rows.append(tokens)
        events.tokens = Ragged.from_rows(rows)
        events.finished, self.ended = self.ended, []
        return events

    # ------------------------------------------------------------------ the play

    def _next_tokens(self, request: Request, chunk: int) -> list[int]:
        request.first_scheduled_time = request.first_scheduled_time or time.monotonic()
        key = tuple(request.prompt_ids.tolist())
        start, limit = self.given[request.request_id], request.max_total - request.num_prompt
        fault_after, message = self.faults.get(key, (None, ""))
        out: list[int] = []
        script = self.scripts[key]
        for position in range(start, min(start + chunk, limit)):
            token = script[position] if position < len(script) else EOS
            if fault_after is not None and start + len(out) >= fault_after:
                self.finish(request, "error", message=message)
                return out
            out.append(token)
            total = start + len(out)
            params = request.params
            stops = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
            if stops and total > params.min_tokens:
                self.finish(request, "stop", token if token in params.stop_token_ids else None)
                return out
        self.given[request.request_id] = start + len(out)
        if start + len(out) >= limit:
            self.finish(request, "length")
        return out

    def finish(
        self, request: Request, reason: str, stop_reason: int | str | None = None, message: str | None = None
    ) -> None:
        del self.requests[request.request_id]
        request.finish_reason, request.stop_reason = reason, stop_reason
        request.finished_time = time.monotonic()
        self.ended.append(Finished(request, reason, stop_reason, message))
