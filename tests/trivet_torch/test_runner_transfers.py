"""Transfers in the runner: loads that block or not, stores, failures, and what is reported when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from worker_kit import Driver, greedy, make_model, make_runner, save_model

from trivet.plan import Transfer
from trivet.result import StepResult
from trivet.roles import TransferReport, TransferWorker

PROMPT = [3 + (7 * i) % 90 for i in range(10)]
BLOCK = 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    model = make_model("llama")
    return save_model(model, tmp_path_factory.mktemp("llama")), model


class Shelf(TransferWorker):
    """Keeps blocks by key; ends transfers at once, after ``delay`` polls, or never well."""

    endpoint = "shelf"

    def __init__(self, delay: int = 0) -> None:
        self.delay, self.kept, self.waiting = delay, {}, []
        self.broken: set[bytes] = set()

    def bind(self, attention: Any) -> None:
        self.attention = attention

    def submit(self, transfer: Transfer, *, store: bool) -> None:
        if transfer.payload == b"raise":
            raise OSError("the shelf is not there")
        self.waiting.append([self.delay, transfer, store])

    def poll(self) -> TransferReport:
        report = TransferReport()
        for item in list(self.waiting):
            if item[0] > 0:
                item[0] -= 1
                continue
            self.waiting.remove(item)
            self._carry_out(item[1], item[2], report)
        return report

    def _carry_out(self, transfer: Transfer, store: bool, report: TransferReport) -> None:
        for key, block in zip(transfer.keys, transfer.blocks[0].tolist(), strict=True):
            if key in self.broken:
                report.failed.append(transfer.transfer_id)
                return
            for layer, parts in self.attention.storage.items():
                if store:
                    self.kept[key, layer] = [part[block].clone() for part in parts]
                else:
                    for part, saved in zip(parts, self.kept[key, layer], strict=True):
                        part[block] = saved
        report.finished.append(transfer.transfer_id)


def transfer(number: int, request: Any, blocks: list[int], **changes: Any) -> Transfer:
    keys = changes.pop("keys", [f"k{i}".encode() for i in range(len(blocks))])
    values: dict[str, Any] = {"start_token": 0, "num_tokens": len(blocks) * BLOCK, "keys": keys, **changes}
    return Transfer(number, "shelf", request.slot, request.epoch, blocks=[np.array(blocks, np.int32)], **values)


def ended(driver: Driver, result: StepResult) -> list[int]:
    """Transfers that end in this result or in those of a few plans without rows."""
    for _ in range(20):
        if len(result.transfers_finished):
            break
        result = driver.step({})
    return result.transfers_finished.tolist()


def stored(name: str, shelf: Shelf) -> Driver:
    """A runner whose shelf holds the first two blocks of the prompt."""
    driver = make_runner(name, BLOCK, cache_tier=[shelf])
    first = driver.add(0, PROMPT)
    driver.step()
    result = driver.step({}, stores=[transfer(1, first, first.blocks[0][:2])])
    assert ended(driver, result) == [1]
    driver.drop(0)
    return driver


def load(driver: Driver, slot: int, **changes: Any) -> Transfer:
    """Admit the prompt with its first two blocks to be loaded."""
    request = driver.add(slot, PROMPT)
    request.blocks[0] = [driver.free[0].pop(), driver.free[0].pop()]
    request.computed = 2 * BLOCK
    return transfer(2, request, request.blocks[0], **changes)


def test_a_blocking_load_is_complete_before_the_forward_reads(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = stored(name, Shelf())
    result = driver.step(loads=[load(driver, 3, blocking=True)])
    assert result.transfers_finished.tolist() == [2]
    driver.step()
    assert driver.outputs(3) == greedy(model, PROMPT, 2)


def test_a_slow_load_is_reported_by_a_later_plan_without_rows(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = stored(name, Shelf(delay=3))
    result = driver.step({}, loads=[load(driver, 3)])
    assert ended(driver, result) == [2]
    driver.step()
    assert driver.outputs(3) == greedy(model, PROMPT, 1)


def test_a_load_that_fails_reports_its_blocks_and_spoils_nobody(llama: tuple[str, Any]) -> None:
    name, model = llama
    shelf = Shelf()
    driver = stored(name, shelf)
    shelf.broken.add(b"k1")
    driver.add(1, PROMPT[:5])
    wanted = load(driver, 3, blocking=True)
    result = driver.step(loads=[wanted], prompt_logprobs=True)
    assert result.transfers_failed.tolist() == [2]
    seen = driver.context.roles["sampler"].seen[-1]
    assert {slot for slot, *_ in seen.prompt_rows} == {1}, "nor prompt logprobs"
    assert result.invalid_blocks[0].tolist() == sorted(wanted.blocks[0].tolist())
    assert result.accepted.lengths.tolist() == [1, 0], "the row that read them must not give a token"
    assert not result.errors
    # The engine computes the tokens again.
    driver.requests[3].computed = 0
    driver.step()
    assert driver.outputs(3) == greedy(model, PROMPT, 1)
    assert driver.outputs(1) == greedy(model, PROMPT[:5], 2)


def test_the_blocks_that_an_endpoint_names_are_the_invalid_ones(llama: tuple[str, Any]) -> None:
    class Exact(Shelf):
        def poll(self) -> TransferReport:
            report = super().poll()
            if report.failed:
                report.invalid_blocks = [[self.last]]
            return report

        def submit(self, transfer: Transfer, *, store: bool) -> None:
            self.last = int(transfer.blocks[0][1])
            super().submit(transfer, store=store)

    shelf = Exact()
    driver = stored(llama[0], shelf)
    shelf.broken.add(b"k1")
    wanted = load(driver, 3, blocking=True)
    result = driver.step(loads=[wanted])
    assert result.invalid_blocks[0].tolist() == [wanted.blocks[0][1]]


@pytest.mark.parametrize("changes", [{"payload": b"raise"}, {"endpoint": "attic"}], ids=["raises", "unknown"])
def test_a_load_that_cannot_start_has_failed(
    llama: tuple[str, Any], changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    driver = stored(llama[0], Shelf())
    wanted = load(driver, 3, blocking=True)
    for key, value in changes.items():
        setattr(wanted, key, value)
    result = driver.step(loads=[wanted])
    assert result.transfers_failed.tolist() == [2]
    assert len(result.invalid_blocks[0]) == 2
    assert result.accepted.lengths.tolist() == [0]
    assert "attic" in caplog.text or "could not start transfer 2" in caplog.text


def test_a_failed_store_leaves_its_blocks_valid(llama: tuple[str, Any]) -> None:
    shelf = Shelf()
    shelf.broken.add(b"k0")
    driver = make_runner(llama[0], BLOCK, cache_tier=[shelf])
    request = driver.add(0, PROMPT)
    driver.step()
    result = driver.step({}, stores=[transfer(1, request, request.blocks[0][:1])])
    assert result.transfers_failed.tolist() == [1]
    assert not result.invalid_blocks


def test_an_endpoint_that_leaves_a_blocking_load_open_breaks_its_contract(llama: tuple[str, Any]) -> None:
    driver = stored(llama[0], Shelf(delay=1))
    with pytest.raises(RuntimeError, match="'shelf' did not complete blocking load 2"):
        driver.step(loads=[load(driver, 3, blocking=True)])


def test_a_store_reads_what_the_same_plan_overwrites(llama: tuple[str, Any]) -> None:
    class Eager(Shelf):
        def submit(self, transfer: Transfer, *, store: bool) -> None:
            self._carry_out(transfer, store, self.report)

        report = TransferReport()

        def poll(self) -> TransferReport:
            report, self.report = self.report, TransferReport()
            return report

    shelf = Eager()
    driver = make_runner(llama[0], BLOCK, connector=shelf)
    request = driver.add(0, PROMPT)
    driver.step()
    block = request.blocks[0][0]
    before = driver.runner._attention.kv(0)[0][block].clone()
    driver.step({}, stores=[transfer(1, request, [block])], zeroing=[np.array([block], np.int32)])
    torch.testing.assert_close(shelf.kept[b"k0", 0][0], before)
    assert not driver.runner._attention.kv(0)[0][block].any()


def test_an_event_of_a_step_that_raised_is_in_the_next_result(llama: tuple[str, Any]) -> None:
    driver = stored(llama[0], Shelf())
    inner = driver.context.hooks.forward

    def broken(batch: Any) -> Any:
        raise RuntimeError("no forward today")

    driver.context.hooks.forward = broken
    with pytest.raises(RuntimeError, match="no forward today"):
        driver.step(loads=[load(driver, 3, blocking=True)])
    driver.context.hooks.forward = inner
    assert driver.step({}).transfers_finished.tolist() == [2]


class Sender(Shelf):
    """Looks at every layer while the step goes on."""

    wants_layers = True

    def __init__(self, places: Any = None) -> None:
        super().__init__()
        self.places, self.told = places, []

    def layer_written(self, layer: int) -> None:
        unwritten = [torch.isnan(self.attention.storage[i][0][self.places]).any().item() for i in range(3)]
        self.told.append((layer, unwritten))


def test_a_layer_can_be_sent_while_later_ones_are_computed(llama: tuple[str, Any]) -> None:
    name, model = llama
    sender = Sender()
    driver = make_runner(name, BLOCK, connector=sender)
    request = driver.add(0, PROMPT[: 2 * BLOCK])
    request.blocks[0] = [driver.free[0].pop(), driver.free[0].pop()]
    sender.places = list(request.blocks[0])
    result = driver.step(stores=[transfer(1, request, request.blocks[0])])
    assert [layer for layer, _ in sender.told] == [0, 1, 2]
    assert [unwritten for _, unwritten in sender.told] == [[False, True, True], [False, False, True], [False] * 3]
    assert ended(driver, result) == [1]
    assert driver.outputs(0) == greedy(model, PROMPT[: 2 * BLOCK], 1)


class Rumour(Shelf):
    """Reports blocks as unusable that no transfer of its own names."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[list[int]] = []

    def poll(self) -> TransferReport:
        report = super().poll()
        report.invalid_blocks, self.bad = self.bad, []
        return report


def test_a_block_that_left_the_window_may_be_lost_to_others(tmp_path: Any) -> None:
    """The worker's table still names it, and the row must go on all the same."""
    model = make_model("gemma3")
    shelf = Rumour()
    driver = make_runner(save_model(model, tmp_path), BLOCK, cache_tier=[shelf])
    driver.add(0, PROMPT * 2)
    driver.step()
    windowed = next(g.index for g in driver.layout.groups if g.window == 8)
    blocks = driver.requests[0].blocks[windowed]
    waiting = driver.add(3, PROMPT)
    waiting.blocks[0] = [driver.free[0].pop()]
    shelf.delay = 1000
    driver.step({0: 1}, loads=[transfer(1, waiting, waiting.blocks[0])])
    for inside in (False, True):
        first = (driver.requests[0].computed - 8 + 1) // BLOCK
        lost = blocks[first] if inside else blocks[first - 1]
        shelf.bad = [[lost] if g == windowed else [] for g in range(len(driver.layout.groups))]
        assert len(driver.step({0: 1}).accepted.row(0)) == 1 - inside
