"""What the worker's tests share: tiny models, a slow attention, a greedy sampler, and plans written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trivet.context import WorkerContext
from trivet.plan import BlockDelta, InputSource, LogitsRows, NewRequest, Ragged, StepPlan, Task
from trivet.result import RequestFailure, StepResult
from trivet.roles import (
    Attention,
    AttentionExtras,
    AttentionMetadata,
    AttentionSupport,
    KVGroup,
    KVLayout,
    KVStorage,
    LayerKVSpec,
    Sampled,
    Sampler,
    SampleRows,
)

VOCAB = 97

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}


def make_model(family: str, **changes: Any) -> Any:
    """A random model in float32 whose logits vary by more than 1, in evaluation mode."""
    import transformers

    name, own = FAMILIES[family]
    values = {**_COMMON, **own, **changes}
    if values.get("num_key_value_heads") is None:
        del values["num_key_value_heads"]
    config = getattr(transformers, name)(**values)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            model.get_output_embeddings().weight.mul_(2)
    return model.train(mode=False)


def save_model(model: Any, folder: Path) -> str:
    """The folder as a model name."""
    model.save_pretrained(folder)
    return str(folder)


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Plain greedy continuation, the whole context computed again for every token."""
    ids = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@torch.inference_mode()
def all_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """``[len(ids), vocab]`` of one forward pass with transformers' eager attention."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


class SlowAttention(Attention):
    """Row by row, head by head from the definition; keys are found through the block table one position at a time."""

    def support(self, spec: LayerKVSpec) -> AttentionSupport:
        return AttentionSupport()

    def allocate(self, layout: KVLayout) -> None:
        specs = {s.layer: s for s in layout.specs}
        sizes = {layer: g.block_size for g in layout.groups for layer in g.layers}
        self.layers = {g.index: g.layers for g in layout.groups}
        self.storage: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for buffer in layout.storage:
            for layer in buffer.layers:
                spec = specs[layer]
                shape = (buffer.num_blocks, sizes[layer], spec.num_kv_heads)
                # What was never written must never be read: it would show as nan.
                self.storage[layer] = (
                    torch.full((*shape, spec.head_dim), float("nan")),
                    torch.full((*shape, spec.v_head_dim or spec.head_dim), float("nan")),
                )

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.storage[layer]

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        extras: AttentionExtras | None = None,
    ) -> torch.Tensor:
        keys, values = (part.flatten(0, 1) for part in self.storage[layer])
        keys[meta.slot_mapping], values[meta.slot_mapping] = key, value
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
        repeats = query.shape[1] // key.shape[1]
        for row in range(len(meta.seq_lens)):
            begin, end = int(meta.query_start[row]), int(meta.query_start[row + 1])
            length, tree = int(meta.seq_lens[row]), int(meta.tree_lens[row]) if meta.tree_lens is not None else 0
            for token in range(begin, end):
                place = length - (end - token)
                node = place - (length - tree)
                if node >= 0:
                    seen = [length - tree + k for k in range(tree) if meta.tree_mask[row, node, k]]
                    depth = len(seen)
                    seen = [*range(length - tree), *seen]
                    position = length - tree - 1 + depth
                else:
                    seen, position = list(range(place + 1)), place
                if window is not None:
                    ranks = [p if p < length - tree else position - (len(seen) - 1 - i) for i, p in enumerate(seen)]
                    seen = [p for p, rank in zip(seen, ranks, strict=True) if rank > position - window]
                where = [
                    int(meta.block_table[row, p // meta.block_size]) * meta.block_size + p % meta.block_size
                    for p in seen
                ]
                k = keys[where].repeat_interleave(repeats, 1)
                v = values[where].repeat_interleave(repeats, 1)
                scores = torch.einsum("hd,khd->hk", query[token].float(), k.float()) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.float()[:, None]], 1)
                weights = torch.softmax(scores, -1)[:, : len(where)]
                out[token] = torch.einsum("hk,khd->hd", weights, v.float()).to(query.dtype)
        return out

    def copy_blocks(self, group: int, pairs: torch.Tensor) -> None:
        for layer in self.layers[group]:
            for part in self.storage[layer]:
                part[pairs[:, 1]] = part[pairs[:, 0]].clone()

    def zero_blocks(self, group: int, blocks: torch.Tensor) -> None:
        for layer in self.layers[group]:
            for part in self.storage[layer]:
                part[blocks] = 0

    def move_tokens(self, group: int, source: torch.Tensor, destination: torch.Tensor) -> None:
        for layer in self.layers[group]:
            for part in self.storage[layer]:
                flat = part.flatten(0, 1)
                flat[destination] = flat[source].clone()


class GreedySampler(Sampler):
    """The most likely allowed token; drafts are accepted while they equal it."""

    fields = frozenset({"temperature", "max_tokens", "ignore_eos"})

    def __init__(self) -> None:
        self.seen: list[SampleRows] = []
        self.logits: list[torch.Tensor] = []
        self.epochs: dict[int, int] = {}

    def bind(self, vocab_size: int, tokenizer_size: int, max_num_seqs: int, processors: Sequence[Any]) -> None:
        self.vocab_size = vocab_size

    def add(self, request: NewRequest) -> None:
        self.epochs[request.slot] = request.epoch

    def remove(self, slot: int) -> None:
        del self.epochs[slot]

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> Sampled:
        self.seen.append(rows)
        self.logits.append(logits.clone())
        if rows.bitmask is not None:
            bits = (rows.bitmask[:, :, None] >> torch.arange(32)) & 1
            logits = logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))
        best = logits.argmax(-1).tolist()
        accepted: list[list[int]] = []
        paths: list[list[int]] = []
        errors: list[RequestFailure] = []
        for s in range(len(rows.slots)):
            first = int(rows.starts[s])
            if torch.isnan(logits[first]).any():
                slot = int(rows.slots[s])
                errors.append(RequestFailure(slot, self.epochs[slot], "its logits are nan"))
                accepted.append([])
                paths.append([])
                continue
            drafts = rows.drafts.row(s).tolist()
            parents = (
                rows.draft_parents.row(s).tolist()
                if rows.draft_parents is not None
                else list(range(-1, len(drafts) - 1))
            )
            tokens, path, node = [best[first]], [], -1
            while True:
                children = [j for j, p in enumerate(parents) if p == node and drafts[j] == tokens[-1]]
                if not children:
                    break
                node = children[0]
                path.append(node)
                tokens.append(best[first + 1 + node])
            accepted.append(tokens)
            paths.append(path)
        tree = rows.draft_parents is not None
        return Sampled(Ragged.from_rows(accepted), errors=errors, path=Ragged.from_rows(paths) if tree else None)


class Hooks:
    """The facade without wrappers: a phase is the bound method, until a test puts something around it."""

    def bind(self, phase: str, method: Any) -> None:
        setattr(self, phase, method)


class Context(WorkerContext):
    """A worker's context with the providers that a test gives it."""

    def __init__(self, model: str, *, max_num_seqs: int = 8, max_model_len: int | None = None, **roles: Any) -> None:
        self.config = SimpleNamespace(  # type: ignore[assignment]
            model=model, revision=None, dtype="float32", max_model_len=max_model_len, trust_remote_code=False
        )
        self.rank, self.world_size, self.device = 0, 1, "cpu"
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, 512
        self.tokenizer_size = None
        self.roles = roles
        self.hooks = Hooks()

    def get(self, role: str) -> Any:
        return self.roles.get(role)

    def all(self, role: str) -> Sequence[Any]:
        return self.roles.get(role, ())

    def build(self, role: str, name: str, **options: Any) -> Any:
        raise NotImplementedError

    def component(self, kind: str, name: str, **keywords: Any) -> Any:
        raise NotImplementedError

    def options(self, plugin: str) -> dict[str, Any]:
        return {}


def make_layout(specs: Sequence[LayerKVSpec], block_size: int, num_blocks: int = 200) -> KVLayout:
    """One group per kind of layer, each layer with a buffer of its own."""
    kinds = sorted({(s.kind, s.window or 0) for s in specs})
    groups = [
        KVGroup(
            i, tuple(s.layer for s in specs if (s.kind, s.window or 0) == kind), kind[0], block_size, kind[1] or None
        )
        for i, kind in enumerate(kinds)
    ]
    storage = tuple(KVStorage((s.layer,), num_blocks) for s in specs)
    return KVLayout(tuple(specs), tuple(groups), storage)


class Driver:
    """A hand-cranked engine: it knows each request's tokens and writes every plan itself."""

    def __init__(self, runner: Any, layout: KVLayout, num_blocks: int = 200) -> None:
        self.runner, self.layout = runner, layout
        self.free = [list(range(num_blocks - 1, 0, -1)) for _ in layout.groups]
        self.requests: dict[int, SimpleNamespace] = {}
        self.step_id = self.epoch = 0
        self.plan = StepPlan(0)
        self.preempted: list[tuple[int, int]] = []
        self.finished: list[tuple[int, int]] = []
        self.new: list[SimpleNamespace] = []

    def add(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        output: Sequence[int] = (),
        task: Task = Task.GENERATE,
        params: Any = None,
        name: str = "",
    ) -> SimpleNamespace:
        """Admit a request to a slot in the next plan."""
        self.epoch += 1
        request = SimpleNamespace(
            name=name or f"r{self.epoch}",
            slot=slot,
            epoch=self.epoch,
            tokens=[*prompt, *output],
            num_prompt=len(prompt),
            computed=0,
            blocks=[[] for _ in self.layout.groups],
            sent=len(prompt) + len(output),
            task=task,
            params=params,
            drafts=[],
            parents=None,
        )
        self.requests[slot] = request
        self.new.append(request)
        return request

    def drop(self, slot: int, *, preempt: bool = False) -> SimpleNamespace:
        """Finish or preempt; the slot's blocks are filled with nan, as if others had written them."""
        request = self.requests.pop(slot)
        (self.preempted if preempt else self.finished).append((slot, request.epoch))
        for group, blocks in enumerate(request.blocks):
            for layer in self.layout.groups[group].layers:
                for part in self.runner._attention.kv(layer):
                    part[blocks] = float("nan")
            self.free[group] += blocks
        return request

    def step(
        self,
        counts: Mapping[int, int] | None = None,
        *,
        prompt_logprobs: bool = False,
        device: Sequence[int] = (),
        **changes: Any,
    ) -> StepResult:
        """Run one plan; ``counts`` limits the tokens of slots (default: everything that is pending)."""
        rows = [r for r in self.requests.values() if counts is None or r.slot in counts]
        self.step_id += 1
        ahead = {r.slot: r.slot in device for r in rows}
        totals = [len(r.tokens) + ahead[r.slot] + len(r.drafts) for r in rows]
        scheduled = [
            total - r.computed if counts is None else counts[r.slot] for r, total in zip(rows, totals, strict=True)
        ]
        ends = [r.computed + n for r, n in zip(rows, scheduled, strict=True)]
        drafts = [max(0, end - len(r.tokens) - ahead[r.slot]) for r, end in zip(rows, ends, strict=True)]
        samples = [
            end >= len(r.tokens) + ahead[r.slot] and r.task == Task.GENERATE for r, end in zip(rows, ends, strict=True)
        ]
        pools = [end >= len(r.tokens) and r.task != Task.GENERATE for r, end in zip(rows, ends, strict=True)]
        deltas = []
        for group in range(len(self.layout.groups)):
            slots, blocks = [], []
            for r, end in zip(rows, ends, strict=True):
                missing = -(-end // self.layout.groups[group].block_size) - len(r.blocks[group])
                added = [self.free[group].pop() for _ in range(max(0, missing))]
                r.blocks[group] += added
                if added and r not in self.new:
                    slots.append(r.slot)
                    blocks.append(added)
            deltas.append(BlockDelta(np.array(slots, np.int32), Ragged.from_rows(blocks)))
        tokens = [[] if r in self.new else r.tokens[r.sent :] for r in rows]
        logits = [
            LogitsRows.DRAFTS if d else LogitsRows.LAST if s else LogitsRows.NONE
            for d, s in zip(drafts, samples, strict=True)
        ]
        if prompt_logprobs:
            logits = [
                LogitsRows.PROMPT if r.computed < r.num_prompt - 1 else x for r, x in zip(rows, logits, strict=True)
            ]
        plan = StepPlan(
            self.step_id,
            new=[
                NewRequest(
                    r.name,
                    r.slot,
                    r.epoch,
                    np.array(r.tokens, np.int32),
                    r.num_prompt,
                    r.computed,
                    [np.array(b, np.int32) for b in r.blocks],
                    params=r.params,
                    task=r.task,
                )
                for r in self.new
            ],
            preempted=np.array([s for s, _ in self.preempted], np.int32),
            preempted_epochs=np.array([e for _, e in self.preempted], np.int64),
            finished=np.array([s for s, _ in self.finished], np.int32),
            finished_epochs=np.array([e for _, e in self.finished], np.int64),
            slots=np.array([r.slot for r in rows], np.int32),
            epochs=np.array([r.epoch for r in rows], np.int64),
            num_computed=np.array([r.computed for r in rows], np.int32),
            num_scheduled=np.array(scheduled, np.int32),
            num_drafts=np.array(drafts, np.int32),
            draft_ids=Ragged.from_rows([r.drafts[:d] for r, d in zip(rows, drafts, strict=True)])
            if any(drafts)
            else None,
            draft_parents=self._parents(rows, drafts),
            lookahead=np.zeros(len(rows), np.int32),
            new_blocks=deltas,
            logits_rows=np.array(logits, np.uint8),
            samples=np.array(samples, np.bool_),
            pools=np.array(pools, np.bool_),
            input_source=np.array([InputSource.DEVICE if ahead[r.slot] else InputSource.KNOWN for r in rows], np.uint8),
            tokens=Ragged.from_rows(tokens),
            draft_k=np.zeros(len(rows), np.int32),
            adapter=np.full(len(rows), -1, np.int32),
        )
        for key, value in changes.items():
            setattr(plan, key, value)
        self.new, self.preempted, self.finished = [], [], []
        for r in rows:
            r.sent = len(r.tokens)
        self.plan = plan
        result: StepResult = self.runner.execute(plan)
        if not result.undone:
            for i, (r, end, d) in enumerate(zip(rows, ends, drafts, strict=True)):
                got = result.accepted.row(i).tolist()
                r.computed = end - (d - max(len(got) - 1, 0) if d else 0)
                r.tokens += got
                if result.forced is not None:
                    r.tokens += result.forced.row(i).tolist()
                r.drafts, r.parents = [], None
                if result.next_drafts is not None:
                    r.drafts = result.next_drafts.row(i).tolist()
                    r.parents = None if result.next_draft_parents is None else result.next_draft_parents.row(i).tolist()
        return result

    def outputs(self, slot: int) -> list[int]:
        """The tokens that a slot's request has got so far."""
        request = self.requests[slot]
        return request.tokens[request.num_prompt :]

    def _parents(self, rows: list[SimpleNamespace], drafts: list[int]) -> Ragged | None:
        if all(r.parents is None for r in rows):
            return None
        return Ragged.from_rows([(r.parents or list(range(-1, d - 1)))[:d] for r, d in zip(rows, drafts, strict=True)])


def make_runner(
    model: str, block_size: int = 4, *, num_blocks: int = 200, max_num_seqs: int = 8, **roles: Any
) -> Driver:
    """A loaded runner with the transformers model, slow attention and greedy sampling, behind a driver."""
    from trivet_torch.options import RunnerOptions
    from trivet_torch.runner import TorchRunner
    from trivet_transformers.model import TransformersModel

    context = Context(model, max_num_seqs=max_num_seqs, max_model_len=roles.pop("max_model_len", None))
    context.roles = {"attention": SlowAttention(), "sampler": GreedySampler(), **roles}
    context.roles.setdefault("model", TransformersModel(context))
    runner = TorchRunner(context, RunnerOptions())
    info = runner.load()
    layout = make_layout(info.specs, block_size, num_blocks)
    runner.allocate(layout)
    driver = Driver(runner, layout, num_blocks)
    driver.context, driver.info = context, info  # type: ignore[attr-defined]
    return driver
