"""Offline generation: the calls of vLLM's ``LLM`` class."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from trivet.batch import run_batch
from trivet.beam_search import BeamSearch, search_all, step_params, whole_params
from trivet.conversations import Message, conversations_of, template_variables
from trivet.engine import Engine
from trivet.errors import EngineUnhealthyError, RequestError
from trivet.output.stage import OutputStage
from trivet.progress import Progress, UseTqdm
from trivet.scoring import cosine_score, head_score, joined_prompt, pair_up
from trivet.submission import AnyParams, Preparer, Submission, default_sampling_params, eos_token_ids, single_prompt
from trivet.watchdog import Monitor
from trivet_schemas.errors import ParameterError
from trivet_schemas.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from trivet_schemas.sampling import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trivet.roles.tokenizer import Tokenizer
    from trivet.timeline import RequestTimeline
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.prompts import PromptType

_LOOK_SECONDS = 1.0
PoolingTask = Literal["embed", "score", "classify"]


class LLM:
    """A model that answers batches of prompts.

    ::

        llm = LLM("Qwen/Qwen3-0.6B", max_num_seqs=16)
        for output in llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8)):
            print(output.outputs[0].text)

    Calls are thread-safe and run one after the other. Use it as a context manager, or call :meth:`shutdown`.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        revision: str | None = None,
        device: str = "auto",
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        plugins: Mapping[str, Any] | Sequence[object] = (),
        **options: Any,
    ) -> None:
        """Load a model and start the engine.

        Args:
            model: Hub id, folder, GGUF file, or ``demo``.
            tokenizer: Where the tokenizer is, if not with the model.
            dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
            seed: Seeds what requests without a seed of their own draw.
            max_model_len: Most tokens of prompt and output together; None takes the model's limit.
            revision: Branch, tag or commit of the model on the hub.
            device: ``auto`` or a torch device.
            trust_remote_code: Run Python code that comes with the model.
            chat_template: A file or the Jinja text; None takes the tokenizer's.
            plugins: Either the ``plugins`` section of a configuration (role → name or mapping), or plugin objects.
            options: Flat arguments that plugins declare (``max_num_seqs``, ``enable_prefix_caching``, …).

        Raises:
            trivet_schemas.errors.ConfigError: For arguments that nothing knows or that break a rule.
            trivet.errors.TrivetError: For a model or a set of plugins that cannot be used.
        """
        section = plugins if isinstance(plugins, Mapping) else {}
        objects = () if isinstance(plugins, Mapping) else tuple(plugins)
        values = {
            "model": model,
            "tokenizer": tokenizer,
            "dtype": dtype,
            "seed": seed,
            "max_model_len": max_model_len,
            "revision": revision,
            "device": device,
            "trust_remote_code": trust_remote_code,
            "chat_template": chat_template,
            "plugins": section,
            **options,
        }
        self._attach(Engine(values, objects))

    @classmethod
    def from_config(cls, config: EngineConfig | Mapping[str, Any] | str | Path, plugins: Sequence[object] = ()) -> Self:
        """Start from a YAML file, a mapping like one, or a configuration; ``plugins`` are plugin objects."""
        return cls.from_engine(Engine(config, plugins))

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """Use an engine that nothing else uses; it is shut down with this object."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: Engine) -> None:
        self.engine = engine
        self._preparer = Preparer(engine.tokenizer, engine.config.seed)
        self._stage = OutputStage(
            engine.tokenizer,
            stop=lambda request, num_tokens, stop_string: engine.stop(request.request_id, num_tokens, stop_string),
            abort=lambda requests: engine.abort([request.request_id for request in requests]),
            eos_token_ids=eos_token_ids(engine),
        )
        self._eos_ids = eos_token_ids(engine)
        self._defaults: SamplingParams | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._next_id = 0
        self._monitor = Monitor(engine, lambda _: None)  # it logs what it finds, and the engine takes no more work

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt; the results are in the order of the prompts.

        A request that fails while it runs (a grammar that cannot be compiled, a plugin's fault) does not raise: its
        output has finish reason ``error`` and the message in ``error``, and the others are complete.

        Args:
            prompts: Text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``; or a list of those.
            sampling_params: For all prompts, or one per prompt; None: :meth:`get_default_sampling_params`.
            use_tqdm: Show a progress bar; or a function that makes one, called like ``tqdm``.
            priority: One per prompt; lower runs first under a scheduling policy that looks at it.

        Raises:
            RequestError: If a prompt or its parameters are refused, with the prompt's index; nothing has run then.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._run(prompts, params, SamplingParams, use_tqdm, priority, RequestOutput)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several; see :meth:`generate`.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or a list of such lists.
            sampling_params: For all conversations, or one per conversation.
            use_tqdm: Show a progress bar; or a function that makes one.
            tools: Descriptions of functions, for templates that show them to the model.
            chat_template: Jinja text to use instead of the model's.
            add_generation_prompt: End the prompt with the beginning of an answer.
            continue_final_message: Leave the last message open, for the model to go on with.
            chat_template_kwargs: Further variables of the template.

        Raises:
            RequestError: Also if there is no chat template, or it refuses the messages.
        """
        conversations = conversations_of(messages)
        variables = template_variables(chat_template_kwargs)
        tokenizer = self._preparer.tokenizer
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                text = tokenizer.chat(
                    conversation,
                    tools=tools,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **variables,
                )
            except RequestError as exc:
                raise _located(exc, index, len(conversations), "conversation") from None
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)  # type: ignore[arg-type]

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest outputs of each prompt; the results are in the order of the prompts.

        All beams of all prompts are one batch per token. What beams have in common is computed once where the KV cache
        has a prefix cache.

        Args:
            prompts: As for :meth:`generate`.
            params: For all prompts.
            use_tqdm: Show a progress bar; or a function that makes one.
            concurrency_limit: Search for so many prompts at once; None: for all.

        Raises:
            RequestError: If a prompt or the limit is refused, or the sampler reports no logprobs.
        """
        step = step_params(params, self._eos_ids, self.engine.model.vocab_size)
        items = _as_list(prompts)
        whole = whole_params(params, step)
        together = _concurrency(concurrency_limit) or len(items) or 1
        with self._lock:
            searches = [
                BeamSearch(
                    self._prepare(item, whole, None, index, len(items)),
                    params,
                    eos_token_ids=self._eos_ids,
                    max_model_len=self.engine.max_model_len,
                )
                for index, item in enumerate(items)
            ]
            with Progress(len(items), use_tqdm) as progress:
                for start in range(0, len(searches), together):
                    search_all(
                        searches[start : start + together],
                        step,
                        lambda submissions: run_batch(
                            self.engine, self._stage, submissions, lambda _: None, self._check_open
                        ),
                        lambda _: progress.advance(),
                    )
        return [search.output(self.engine.tokenizer) for search in searches]

    # ------------------------------------------------------------------ pooling

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool the hidden states of each prompt as ``pooling_params`` say: ``outputs.data`` is ``[dim]`` float32 (None
        after an error). ``pooling_task`` replaces the parameters' ``task``. Else like :meth:`generate`."""
        params = PoolingParams() if pooling_params is None else pooling_params
        if pooling_task is not None:
            params = _for_task(params, pooling_task)
        return self._run(prompts, params, PoolingParams, use_tqdm, None, PoolingRequestOutput)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embed each prompt: ``outputs.embedding`` is a list of floats (empty after an error). Else like
        :meth:`encode`."""
        outputs = self.encode(prompts, _for_task(pooling_params, "embed"), use_tqdm=use_tqdm)
        return [
            EmbeddingRequestOutput(
                *_facts(o, EmbeddingOutput([] if o.outputs.data is None else o.outputs.data.tolist()))
            )
            for o in outputs
        ]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
    ) -> list[ClassificationRequestOutput]:
        """Classify each prompt: ``outputs.probs`` are the probabilities of the classes (empty after an error), or the
        scores of the model's head with ``use_activation=False``. Else like :meth:`encode`.

        Raises:
            RequestError: Also if the model has no head for classes.
        """
        outputs = self.encode(prompts, _for_task(pooling_params, "classify"), use_tqdm=use_tqdm)
        return [
            ClassificationRequestOutput(
                *_facts(o, ClassificationOutput([] if o.outputs.data is None else o.outputs.data.tolist()))
            )
            for o in outputs
        ]

    def score(
        self,
        text_1: PromptType | Sequence[PromptType],
        text_2: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one with each of several, or each with its counterpart.

        A model with a head for one score reads both texts as one prompt and says how well they go together; of other
        models it is the cosine of the texts' embeddings, each of which is computed once.

        Args:
            text_1: One text, or as many as ``text_2``.
            text_2: One text or several.
            pooling_params: ``use_activation`` for a head, or how texts are embedded.
            use_tqdm: Show a progress bar; or a function that makes one.

        Raises:
            RequestError: If a text is refused, the numbers do not fit, or the model's head has several scores.
        """
        first, second = _as_list(text_1), _as_list(text_2)
        pairs = pair_up(first, second)
        tasks = self.engine.model.tasks
        if "score" in tasks:
            prompts = [joined_prompt(self.engine.tokenizer, first[i], second[j]) for i, j in pairs]
            params = _for_task(pooling_params, "score")
            return [head_score(output) for output in self.encode(prompts, params, use_tqdm=use_tqdm)]  # type: ignore[arg-type]
        if "classify" in tasks:
            raise RequestError(
                f"this model has {self.engine.model.num_labels} classes and no single score; use LLM.classify",
                param="task",
            )
        outputs = self.encode([*first, *second], _for_task(pooling_params, "embed"), use_tqdm=use_tqdm)
        return [cosine_score(outputs[i], outputs[len(first) + j]) for i, j in pairs]

    # ------------------------------------------------------------------ the rest

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises RequestError when the engine has none."""
        return self._preparer.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what :meth:`generate` and :meth:`chat` use when they are given none: what the model's
        ``generation_config.json`` recommends (temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens),
        and the defaults of :class:`SamplingParams` for the rest; ``generation_config="vllm"`` leaves the file out."""
        if self._defaults is None:
            self._defaults = default_sampling_params(self.engine)
        return self._defaults.detached()

    def timeline(self, request_id: str) -> RequestTimeline | None:
        """The whole story of a request that ended not long ago, see :meth:`trivet.Engine.timeline`: what it waited for,
        how long, and when it ran. Output ``i`` of several is ``id#i``. None for unknown ones."""
        with self._lock:
            return self.engine.timeline(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget what the KV cache keeps of earlier requests, in tiers too; for example after weights were changed.

        Returns:
            Whether it was forgotten: not while blocks are in use, which is never the case between two calls of this
            object.
        """
        with self._lock:
            while self.engine.has_work:
                self.engine.step()
            return self.engine.parts.cache.reset()

    def shutdown(self) -> None:
        """Stop the engine and release its memory; a call that runs in another thread raises EngineUnhealthyError. A
        second call has no effect."""
        self._closing = True
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            if self.engine.fault is not None:  # a step that hangs never gives the lock back
                self._monitor.stop()
                self.engine.shutdown()
                return
        try:
            self._monitor.stop()
            self.engine.shutdown()
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if self._closing:
            raise EngineUnhealthyError("the engine has been shut down")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: Any,
        params: Any,
        kind: type[AnyParams],
        use_tqdm: UseTqdm,
        priority: Sequence[int] | None,
        result: type[Any],
    ) -> list[Any]:
        items = _as_list(prompts)
        each = _per_prompt(params, kind, len(items))
        if priority is not None and not hasattr(priority, "__len__"):
            raise RequestError(f"priority: must be a list with one per prompt, got {priority!r}", param="priority")
        if priority is not None and len(priority) != len(items):
            raise RequestError(f"priority: got {len(priority)} values for {len(items)} prompts", param="priority")
        with self._lock:
            submissions = [
                self._prepare(item, each[i], None if priority is None else priority[i], i, len(items))
                for i, item in enumerate(items)
            ]
            with Progress(len(items), use_tqdm) as progress:
                outputs = run_batch(self.engine, self._stage, submissions, progress.report, self._check_open)
        assert all(isinstance(output, result) for output in outputs)
        return outputs

    def _prepare(self, prompt: Any, params: AnyParams, priority: int | None, index: int, count: int) -> Submission:
        request_id = str(self._next_id)
        self._next_id += 1
        try:
            submission = self._preparer.prepare(
                request_id, prompt, params, priority=priority, output_kind=RequestOutputKind.FINAL_ONLY
            )
            submission.validate(self.engine)
        except (RequestError, ParameterError) as exc:
            raise _located(exc, index, count, "prompt") from None
        return submission


def _for_task(params: Any, task: PoolingTask) -> Any:
    """``params`` with ``task``; what is no parameter is refused later."""
    if params is None:
        return PoolingParams(task=task)
    if isinstance(params, PoolingParams):
        return params if params.task == task else params.replace(task=task)
    several = isinstance(params, Sequence) and not isinstance(params, str | bytes)
    return [_for_task(one, task) for one in params] if several else params


def _facts(output: PoolingRequestOutput[PoolingOutput], outputs: Any) -> tuple[Any, ...]:
    """The fields of ``output`` in order, with other ``outputs``."""
    return (
        output.request_id,
        outputs,
        output.prompt_token_ids,
        output.finished,
        output.num_cached_tokens,
        output.metrics,
        output.error,
    )


def _as_list(prompts: Any) -> list[Any]:
    one = single_prompt(prompts) or not isinstance(prompts, Iterable)  # the latter is refused as a prompt
    return [prompts] if one else list(prompts)


def _per_prompt(params: Any, kind: type[AnyParams], count: int) -> list[AnyParams]:
    if isinstance(params, kind):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, kind) for item in params):
        raise TypeError(f"params must be {kind.__name__} or a list of them, got {params!r}")
    if len(params) != count:
        raise RequestError(f"params: got {len(params)} for {count} prompts; give one for all, or one per prompt")
    return list(params)


def _concurrency(limit: int | None) -> int | None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise RequestError(
            f"concurrency_limit: must be an integer of at least 1, or None, got {limit!r}", param="concurrency_limit"
        )
    return limit


def _located(error: RequestError | ParameterError, index: int, count: int, what: str) -> RequestError:
    """The error with the place of the prompt, if there are several."""
    param = error.param if isinstance(error, RequestError) else error.problems[0].path
    return RequestError(f"{what} {index}: {error}" if count > 1 else str(error), param=param)
