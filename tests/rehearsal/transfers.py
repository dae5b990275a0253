"""A connector over a dictionary of computed words: loads run for some steps, may fail half-way, stores delay the
freeing."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from trivet.hookspecs import hookimpl
from trivet.plan import Transfer
from trivet.provider import Provider
from trivet.roles import Connector, ExternalHit, TransferReport, TransferWorker
from trivet.testing.fake_model import _embed
from trivet_schemas.options import Options


class ShelfOptions(Options):
    """What the shelf does."""

    steps: int = Field(3, ge=0)
    """Polls that a transfer takes."""
    good_blocks: int = Field(1000, ge=0)
    """Blocks of a load that arrive; the rest is reported invalid."""
    load: bool = True
    """Whether prompts are loaded at all."""
    store_fails: bool = False
    """Whether stores end badly."""
    store: bool = False
    """Whether finished requests are stored."""


class ShelfConnector(Connector):
    """Offers every token of a prompt but the last one, as if another instance had computed them."""

    endpoint = "shelf"

    def __init__(self, context: Any, options: ShelfOptions) -> None:
        self._options = options
        self.offered = self.stored = 0

    def match(self, request: Any, start: int) -> ExternalHit | None:
        if not self._options.load:
            return None
        self.offered += 1
        known = np.asarray([*request.prompt_ids, *request.output_ids], np.int32)
        return ExternalHit(len(known) - 1 - start, payload=known.tobytes())

    def finished(self, request: Any, tables: Any) -> ExternalHit | None:
        self.stored += self._options.store
        return ExternalHit(request.num_prompt) if self._options.store else None


class ShelfWorker(TransferWorker):
    """Writes the first layer's words of the prompt into the blocks; block 0 of a failing rest stays as it was."""

    endpoint = "shelf"

    def __init__(self, context: Any, options: ShelfOptions) -> None:
        self._options = options
        self._under_way: list[list[Any]] = []

    def bind(self, attention: Any) -> None:
        self._attention = attention

    def submit(self, transfer: Transfer, *, store: bool) -> None:
        self._under_way.append([self._options.steps, transfer, store])

    def poll(self) -> TransferReport:
        report = TransferReport(invalid_blocks=[[]])
        for entry in self._under_way:
            entry[0] -= 1
        for _, transfer, store in [e for e in self._under_way if e[0] < 0]:
            bad = [] if store else self._load(transfer)
            failed = self._options.store_fails if store else bool(bad)
            (report.failed if failed else report.finished).append(transfer.transfer_id)
            report.invalid_blocks[0] += bad
        self._under_way = [e for e in self._under_way if e[0] >= 0]
        return report

    def _load(self, transfer: Transfer) -> list[int]:
        keys, _ = self._attention.kv(0)
        size, prompt = keys.shape[1], np.frombuffer(transfer.payload, np.int32)
        for p in range(transfer.start_token, transfer.start_token + transfer.num_tokens):
            block = p // size - transfer.start_token // size
            if block < self._options.good_blocks:
                keys[transfer.blocks[0][block], p % size] = _embed(prompt[p : p + 1], [p], 0)
        return transfer.blocks[0][self._options.good_blocks :].tolist()


@hookimpl
def trivet_providers() -> list[Provider]:
    worker = "transfers:ShelfWorker"
    return [Provider("connector", "shelf", "transfers:ShelfConnector", ShelfOptions, worker_factory=worker)]
