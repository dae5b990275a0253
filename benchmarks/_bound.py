"""How fast a model could be if its matrix products were all that a step takes.

The steps of a workload are simulated (see :func:`steps_of`), and each is charged what the products of all layers and of
the LM head take for its rows: packed weights of every layer in turn, so that they come from memory, between measured
numbers of rows by interpolation.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _kernel_timing import Timer
from workloads import Work

from trivet_torch.linear import Linear, make_linear

#: measured numbers of rows
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
#: bytes of layers that take turns at least, if the model has that many
_SPREAD = 1 << 29


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a decoder's configuration its matrices follow from."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> Sizes:
        """From the ``config.json`` of a dense decoder in a Hugging Face folder."""
        path = folder / "config.json"
        if not path.is_file():
            raise SystemExit(f"{path} does not exist; MODEL must be a Hugging Face folder")
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        try:
            heads = config["num_attention_heads"]
            return cls(
                hidden=config["hidden_size"],
                intermediate=config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocabulary=config["vocab_size"],
            )
        except KeyError as error:
            raise SystemExit(f"{path} has no {error}; only dense decoders are supported") from error

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of a layer's products: queries, keys and values in one, gate and up in one."""
        attended = self.heads * self.head_dim
        return (
            (self.hidden, attended + 2 * self.kv_heads * self.head_dim),
            (attended, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of the layers' products and of the LM head's."""

    tokens: int
    draws: int


def steps_of(work: Work, *, token_budget: int, max_num_seqs: int) -> list[Step]:
    """The steps of continuous batching: those that run get a token each, the rest of the budget goes to prompts in
    order of arrival, which may be cut anywhere; all requests are there from the start."""
    # Tokens of the prompt to compute, and tokens to draw; the last one drawn is never computed.
    waiting = [[len(prompt), count] for prompt, count in reversed(work)]
    running: list[list[int]] = []
    steps = []
    while waiting or running:
        budget, draws = token_budget, 0
        for row in running:
            if row[0] == 0 and budget:
                budget -= 1
                row[1] -= 1
                draws += 1
        filling = [row for row in running if row[0]]
        while budget > 0 and (filling or (waiting and len(running) < max_num_seqs)):
            if not filling:
                running.append(waiting.pop())
                filling = running[-1:]
            row = filling.pop(0)
            taken = min(budget, row[0])
            budget -= taken
            row[0] -= taken
            if row[0] == 0:
                row[1] -= 1
                draws += 1
        running = [row for row in running if row[0] or row[1]]
        steps.append(Step(token_budget - budget, draws))
    return steps


class Products:
    """A model's matrix products with random weights, timed for any number of rows."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, timer: Timer) -> None:
        self._sizes, self._dtype, self._timer = sizes, dtype, timer
        layer_bytes = sum(inputs * outputs for inputs, outputs in sizes.matrices) * dtype.itemsize
        self._copies = min(sizes.layers, max(1, -(-_SPREAD // layer_bytes)))
        self._layers = [[self._linear(*shape) for shape in sizes.matrices] for _ in range(self._copies)]
        self._head = self._linear(sizes.hidden, sizes.vocabulary)
        self._times: dict[tuple[str, int], float] = {}

    def _linear(self, inputs: int, outputs: int) -> Linear:
        weight = torch.randn(outputs, inputs, dtype=torch.float32).to(self._dtype)
        return make_linear([weight], dtype=self._dtype, device="cpu")

    def body(self, rows: int) -> float:
        """Seconds of all layers."""
        return self._interpolated("body", rows)

    def head(self, rows: int) -> float:
        """Seconds of the LM head."""
        return self._interpolated("head", rows) if rows else 0.0

    def _interpolated(self, part: str, rows: int) -> float:
        if rows > _ROWS[-1]:
            return self._measured(part, _ROWS[-1]) * rows / _ROWS[-1]
        upper = _ROWS[bisect.bisect_left(_ROWS, rows)]
        if upper == rows:
            return self._measured(part, rows)
        lower = _ROWS[bisect.bisect_left(_ROWS, rows) - 1]
        low, high = self._measured(part, lower), self._measured(part, upper)
        return low + (high - low) * (rows - lower) / (upper - lower)

    def _measured(self, part: str, rows: int) -> float:
        if (part, rows) not in self._times:
            if part == "head":
                x = torch.randn(rows, self._sizes.hidden).to(self._dtype)
                time = self._timer.measure([lambda _: self._head(x)])[0]
            else:
                inputs = [torch.randn(rows, size).to(self._dtype) for size, _ in self._sizes.matrices]

                def run(_: int) -> None:
                    for layer in self._layers:
                        for product, x in zip(layer, inputs, strict=True):
                            product(x)

                time = self._timer.measure([run])[0] * self._sizes.layers / self._copies
            self._times[part, rows] = time
        return self._times[part, rows]


def bound(products: Products, work: Work, steps: list[Step]) -> dict[str, float]:
    """Seconds of the products of a workload's steps, and tokens per second that they would allow."""
    body = sum(products.body(rows) * count for rows, count in Counter(step.tokens for step in steps).items())
    head = sum(products.head(rows) * count for rows, count in Counter(step.draws for step in steps).items())
    produced, prompts = sum(count for _, count in work), sum(len(prompt) for prompt, _ in work)
    return {
        "steps": len(steps),
        "body_s": body,
        "head_s": head,
        "output_tokens_per_s": produced / (body + head),
        "total_tokens_per_s": (produced + prompts) / (body + head),
    }
