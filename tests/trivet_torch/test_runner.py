"""The runner, driven by plans written by hand, against transformers' own forward pass on tiny random models."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker_kit import VOCAB, GreedySampler, all_logits, greedy, make_model, make_runner, save_model

from trivet.errors import ModelLoadError, RequestFault
from trivet.plan import Task
from trivet_schemas.sampling import PoolingParams

LONG = [3 + (7 * i) % 90 for i in range(23)]
SHORT = [5, 9, 40, 11, 60]
TINY = [8]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    model = make_model("llama")
    return save_model(model, tmp_path_factory.mktemp("llama")), model


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Layers with a window of 8 and layers without one: two KV groups."""
    model = make_model("gemma3")
    return save_model(model, tmp_path_factory.mktemp("gemma")), model


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_a_mixed_batch_gives_the_tokens_of_plain_greedy(llama: tuple[str, Any], block_size: int) -> None:
    name, model = llama
    driver = make_runner(name, block_size)
    driver.add(5, LONG)
    driver.step()
    driver.add(2, SHORT)
    driver.step()
    driver.add(0, TINY)
    for _ in range(8):
        driver.step()
    for slot, prompt in ((5, LONG), (2, SHORT), (0, TINY)):
        got = driver.outputs(slot)
        assert got == greedy(model, prompt, len(got))
        assert len(got) >= 8
    driver.runner.check_integrity()


@pytest.mark.parametrize("cuts", [[1] * 23, [1, 22], [22, 1], [7, 9, 7], [16, 7], [4, 4, 4, 4, 4, 3]], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_prompt_in_chunks_has_the_logits_of_the_whole(
    request: pytest.FixtureRequest, family: str, cuts: list[int]
) -> None:
    name, model = request.getfixturevalue(family)
    driver = make_runner(name, 4)
    driver.add(1, LONG)
    for cut in cuts[:-1]:
        result = driver.step({1: cut})
        assert len(result.accepted.values) == 0
    assert not driver.context.roles["sampler"].seen, "rows that do not sample must not reach the head"
    driver.step({1: cuts[-1]})
    logits = driver.context.roles["sampler"].logits[-1]
    assert logits.shape == (1, VOCAB)
    torch.testing.assert_close(logits[0], all_logits(model, LONG)[-1], atol=1e-5, rtol=0)
    driver.step()
    driver.step()
    assert driver.outputs(1) == greedy(model, LONG, 3)


def test_every_way_to_cut_a_short_prompt(llama: tuple[str, Any]) -> None:
    name, model = llama
    wanted = greedy(model, SHORT, 2)
    driver = make_runner(name, 2)
    for flags in itertools.product([False, True], repeat=len(SHORT) - 1):
        edges = [0, *(i + 1 for i, flag in enumerate(flags) if flag), len(SHORT)]
        driver.add(3, SHORT)
        for begin, end in itertools.pairwise(edges):
            driver.step({3: end - begin})
        driver.step()
        assert driver.outputs(3) == wanted, edges
        driver.drop(3)


def test_a_preempted_request_goes_on_in_another_slot_as_if_nothing_happened(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = make_runner(name, 4)
    driver.add(0, LONG)
    driver.add(1, SHORT)
    for _ in range(4):
        driver.step()
    old = driver.drop(0, preempt=True)
    driver.step()
    driver.drop(1)
    # In one plan: the slot of the finished request is taken by the preempted one, its old slot by a third.
    driver.add(1, LONG, output=old.tokens[len(LONG) :])
    driver.add(0, TINY)
    driver.step({1: 9, 0: 1})
    for _ in range(4):
        driver.step()
    assert driver.outputs(1) == greedy(model, LONG, 8)
    assert driver.outputs(0) == greedy(model, TINY, 5)


@pytest.mark.parametrize("block_size", [1, 8])
def test_layers_with_and_without_window_keep_tables_of_their_own(gemma: tuple[str, Any], block_size: int) -> None:
    name, model = gemma
    driver = make_runner(name, block_size)
    assert [(g.kind, g.window, g.layers) for g in driver.layout.groups] == [
        ("full", None, (2,)),
        ("sliding", 8, (0, 1, 3)),
    ]
    # The groups draw from different ends, so that a table used for the wrong group is noticed.
    driver.free[1].reverse()
    driver.add(0, LONG)
    driver.add(4, SHORT)
    for _ in range(12):
        driver.step()
    assert driver.outputs(0) == greedy(model, LONG, 12)
    assert driver.outputs(4) == greedy(model, SHORT, 12)


def test_blocks_that_left_the_window_are_never_read(gemma: tuple[str, Any]) -> None:
    name, model = gemma
    driver = make_runner(name, 4)
    driver.add(0, LONG)
    for _ in range(6):
        driver.step()
        table = driver.runner._batch.tables[1]
        # What a cache does with blocks outside the window: the null block takes their place, others write into them.
        table[0, : (driver.requests[0].computed - 8) // 4] = 0
    assert driver.outputs(0) == greedy(model, LONG, 6)


@pytest.mark.parametrize("chunk", [16, 64, 100])
@pytest.mark.parametrize("length", [63, 64, 65, 90])
def test_a_prompt_around_the_window_equals_transformers(
    tmp_path_factory: pytest.TempPathFactory, length: int, chunk: int
) -> None:
    model = make_model("gemma3", sliding_window=64)
    driver = make_runner(save_model(model, tmp_path_factory.mktemp("window")), 16)
    prompt = [3 + (11 * i + i // 7) % 90 for i in range(length)]
    driver.add(0, prompt)
    while not driver.outputs(0):
        driver.step({0: min(chunk, length - driver.requests[0].computed)})
    for _ in range(5):
        driver.step()
    assert driver.outputs(0) == greedy(model, prompt, 6)


def test_a_row_may_take_the_token_that_the_engine_has_not_seen(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = make_runner(name, 4)
    wanted = greedy(model, SHORT, 3)
    driver.add(1, SHORT)
    driver.step()
    # As with two steps in flight: the engine plans the next step before it knows the first token.
    driver.requests[1].tokens = SHORT[:]
    result = driver.step(device=[1])
    assert result.accepted.row(0).tolist() == wanted[1:2]
    driver.requests[1].tokens = [*SHORT, *wanted[:2]]
    assert driver.step().accepted.row(0).tolist() == wanted[2:]


def test_a_row_whose_input_is_missing_is_an_error_that_names_it(llama: tuple[str, Any]) -> None:
    driver = make_runner(llama[0], 4)
    driver.add(1, SHORT)
    driver.step()
    driver.requests[1].sent += 1
    driver.requests[1].tokens += [7, 7]
    with pytest.raises(ValueError, match="computes slot 1 up to token 8"):
        driver.step()


def test_a_stale_epoch_is_an_error(llama: tuple[str, Any]) -> None:
    driver = make_runner(llama[0], 4)
    driver.add(1, SHORT)
    driver.step()
    driver.requests[1].epoch += 1
    with pytest.raises(ValueError, match="names slot 1 with epoch 2, here it is 1"):
        driver.step()


def test_prompt_logprob_rows_cover_every_prompt_token_once(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = make_runner(name, 4)
    driver.add(1, LONG)
    driver.add(2, SHORT)
    sampler: GreedySampler = driver.context.roles["sampler"]
    seen: dict[int, torch.Tensor] = {}
    for counts in ({1: 10, 2: 5}, {1: 12}, {1: 1}):
        driver.step(counts, prompt_logprobs=True)
        rows, logits = sampler.seen[-1], sampler.logits[-1]
        for slot, epoch, position, first, number in rows.prompt_rows:
            assert epoch == driver.requests[slot].epoch
            assert (rows.row_slots[first : first + number] == slot).all()
            if slot == 1:
                seen.update({position + i: logits[first + i] for i in range(number)})
    expected = all_logits(model, LONG)
    assert sorted(seen) == list(range(1, len(LONG)))
    for position, row in seen.items():
        torch.testing.assert_close(row, expected[position - 1], atol=1e-5, rtol=0)
    assert driver.outputs(1) == greedy(model, LONG, 1)
    assert driver.outputs(2) == greedy(model, SHORT, 1)


def test_output_positions_count_from_the_first_output_token(llama: tuple[str, Any]) -> None:
    driver = make_runner(llama[0], 4)
    driver.add(3, LONG)
    driver.add(1, SHORT, output=[4, 6])
    driver.step()
    driver.step()
    rows = driver.context.roles["sampler"].seen
    assert [r.positions.tolist() for r in rows] == [[0, 2], [1, 3]]
    assert [r.row_slots.tolist() for r in rows] == [[3, 1], [3, 1]]
    assert rows[1].tokens[1, : rows[1].lengths[1]].tolist()[:7] == [*SHORT, 4, 6]


@torch.inference_mode()
def test_pooled_vectors_are_the_last_hidden_states(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = make_runner(name, 4)
    driver.add(0, LONG, task=Task.EMBED, params=PoolingParams(normalize=False))
    driver.add(1, SHORT, task=Task.EMBED, params=PoolingParams(normalize=True, dimensions=8))
    driver.add(2, TINY)
    assert not driver.step({0: 20, 1: 2, 2: 1}).pooled
    pooled = {p.slot: p.data for p in driver.step().pooled}
    for slot, prompt in ((0, LONG), (1, SHORT)):
        hidden = model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        if slot == 1:
            hidden = hidden[:8] / np.linalg.norm(hidden[:8])
        np.testing.assert_allclose(pooled[slot], hidden, atol=1e-5)
        assert pooled[slot].dtype == np.float32
    assert driver.outputs(2) == greedy(model, TINY, 2), "a pooled neighbour must not disturb generation"


def test_a_model_decides_what_is_pooled_and_knows_its_requests(llama: tuple[str, Any]) -> None:
    name, _ = llama
    driver = make_runner(name)
    told: list[Any] = []
    head = torch.arange(32.0)

    def pool(hidden: torch.Tensor, last: Any, slots: Any) -> torch.Tensor:
        return hidden[last.tolist()] @ head[:, None] + torch.from_numpy(slots)[:, None]

    model = driver.context.roles["model"]
    model.add, model.remove = lambda request: told.append(request.request_id), told.append
    raw = PoolingParams(task="score", use_activation=False)
    plain, scored = make_runner(name), driver
    for one in (plain, scored):
        one.add(3, SHORT, task=Task.SCORE, params=raw, name="a")
    model.pool = pool
    hidden, score = plain.step().pooled[0].data, scored.step().pooled[0].data
    assert score == pytest.approx([float(hidden @ head.numpy()) + 3], rel=1e-5)
    scored.drop(3)
    scored.step({})
    assert told == ["a", 3]


def test_a_stage_without_logits_draws_nothing_and_learns_tokens_from_the_plan(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = make_runner(name)
    forward = driver.context.hooks.forward
    driver.context.hooks.forward = lambda batch: replace(forward(batch), logits=None)
    request = driver.add(0, SHORT)
    for token in greedy(model, SHORT, 3):
        result = driver.step()
        assert not len(result.accepted.values)
        request.tokens.append(token)
    driver.context.hooks.forward = forward
    assert driver.step().accepted.row(0).tolist() == greedy(model, SHORT, 4)[3:]


def test_plugins_of_a_worker_read_the_plans_extensions_and_fill_the_results(llama: tuple[str, Any]) -> None:
    driver = make_runner(llama[0])
    context, seen = driver.context, []
    forward = context.hooks.forward

    def wrapped(batch: Any) -> Any:
        seen.append(dict(context.plan_extensions))
        context.result_extensions["echo"] = context.plan_extensions["word"] * 2
        return forward(batch)

    context.hooks.forward = wrapped
    driver.add(0, SHORT)
    assert driver.step(extensions={"word": b"ab"}).extensions == {"echo": b"abab"}
    assert seen == [{"word": b"ab"}]
    assert driver.step({}).extensions == {}, "nothing is left of an earlier step"


def test_an_embedding_cannot_have_more_dimensions_than_the_model(llama: tuple[str, Any]) -> None:
    driver = make_runner(llama[0], 4)
    driver.add(0, SHORT, task=Task.EMBED, params=PoolingParams(dimensions=33))
    result = driver.step()
    assert not result.pooled
    assert "dimensions=33 exceeds the embedding's 32" in result.errors[0].message


@pytest.mark.parametrize("phase", ["forward", "sample"])
def test_a_request_fault_undoes_the_step_and_names_the_request(llama: tuple[str, Any], phase: str) -> None:
    name, model = llama
    driver = make_runner(name, 4)
    driver.add(0, LONG, name="good")
    driver.add(1, SHORT, name="bad")
    driver.step()
    inner = getattr(driver.context.hooks, phase)
    faults = iter([RequestFault({"bad": "not like this"})])

    def wrapper(*args: Any) -> Any:
        out = inner(*args)
        for fault in faults:
            raise fault
        return out

    setattr(driver.context.hooks, phase, wrapper)
    result = driver.step()
    assert result.undone
    assert len(result.accepted.values) == 0
    assert [(e.slot, e.message) for e in result.errors] == [(1, "not like this")]
    driver.drop(1)
    for _ in range(3):
        driver.step()
    assert driver.outputs(0) == greedy(model, LONG, 4)


def test_a_fault_that_names_nobody_in_the_step_is_the_plugins_own(llama: tuple[str, Any]) -> None:
    driver = make_runner(llama[0], 4)
    driver.add(0, SHORT)

    def broken(batch: Any) -> Any:
        raise RequestFault({"someone else": "?"})

    driver.context.hooks.forward = broken
    with pytest.raises(RequestFault, match="someone else"):
        driver.step()


def test_after_an_exception_the_next_step_finds_the_state_of_its_plan(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = make_runner(name, 4)
    driver.add(0, LONG)
    driver.step()
    driver.add(1, SHORT)
    inner = driver.context.hooks.forward

    def broken(batch: Any) -> Any:
        raise RuntimeError("the device is on fire")

    driver.context.hooks.forward = broken
    with pytest.raises(RuntimeError, match="on fire"):
        driver.step()
    driver.context.hooks.forward = inner
    driver.drop(0)
    driver.drop(1)
    driver.add(0, SHORT)
    driver.step()
    assert driver.outputs(0) == greedy(model, SHORT, 1)
    driver.runner.check_integrity()


def test_a_row_with_nan_logits_fails_alone(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = make_runner(name, 4)
    driver.add(0, LONG)
    driver.add(1, SHORT)
    driver.step()
    inner = driver.context.hooks.sample

    def poison(logits: torch.Tensor, rows: Any) -> Any:
        logits[rows.row_slots == 1] = float("nan")
        return inner(logits, rows)

    driver.context.hooks.sample = poison
    result = driver.step()
    assert [(e.slot, e.message) for e in result.errors] == [(1, "its logits are nan")]
    assert result.accepted.lengths.tolist() == [1, 0]
    driver.drop(1)
    driver.step()
    assert driver.outputs(0) == greedy(model, LONG, 3)


def test_a_parameter_that_the_sampler_refuses_ends_that_request_only(llama: tuple[str, Any]) -> None:
    class Strict(GreedySampler):
        def add(self, request: Any) -> None:
            if request.params == "nonsense":
                raise RequestFault({request.request_id: "cannot sample nonsense"})
            super().add(request)

    name, model = llama
    driver = make_runner(name, 4, sampler=Strict())
    driver.add(0, LONG)
    driver.add(1, SHORT, params="nonsense", name="bad")
    result = driver.step()
    assert [(e.slot, e.message) for e in result.errors] == [(1, "bad: cannot sample nonsense")]
    assert result.accepted.lengths.tolist() == [1, 0]
    driver.drop(1)
    driver.step()
    assert driver.outputs(0) == greedy(model, LONG, 2)


def test_copied_and_zeroed_blocks(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = make_runner(name, 4)
    driver.add(0, SHORT)
    driver.step()
    parent = driver.requests[0]
    # A fork: the child shares the full block and copies the one that is partly filled.
    child = driver.add(1, SHORT)
    child.computed, shared = 4, parent.blocks[0][:1]
    child.blocks[0] = [*shared, driver.free[0].pop()]
    pair = np.array([[parent.blocks[0][1], child.blocks[0][1]]], np.int32)
    clean = driver.free[0].pop()
    driver.step(copies=[pair], zeroing=[np.array([clean], np.int32)])
    child.blocks[0] = child.blocks[0][1:]  # the shared one stays the parent's
    assert driver.outputs(0)[:2] == greedy(model, SHORT, 2)
    assert driver.outputs(1) == greedy(model, SHORT, 1)
    keys, values = driver.runner._attention.kv(0)
    assert not keys[clean].any()
    assert not values[clean].any()


def test_steady_decoding_costs_the_same_calls_for_many_rows_as_for_few(llama: tuple[str, Any]) -> None:
    """Hooks are called once per step, not per row, and per-row objects are not touched."""
    driver = make_runner(llama[0], 4, max_num_seqs=64)
    calls: list[str] = []
    for phase in ("forward", "sample"):
        inner = getattr(driver.context.hooks, phase)
        setattr(driver.context.hooks, phase, lambda *a, inner=inner, phase=phase: (calls.append(phase), inner(*a))[1])
    for slot in range(48):
        driver.add(slot, SHORT)
    driver.step()
    driver.step()
    assert calls == ["forward", "sample"] * 2


def test_timings_name_the_phases(llama: tuple[str, Any]) -> None:
    driver = make_runner(llama[0], 4)
    driver.add(0, SHORT)
    assert {"apply", "prepare", "forward", "sample"} <= set(driver.step().timings)


def test_the_worker_describes_itself(llama: tuple[str, Any]) -> None:
    name, model = llama
    info = make_runner(name, 4).info
    assert info.model.vocab_size == VOCAB
    assert info.model.max_model_len == 256
    assert info.model.eos_token_ids == (2,)
    assert info.model.architecture == "LlamaForCausalLM"
    assert info.weight_bytes >= sum(p.numel() * 4 for p in model.parameters())
    assert info.available_bytes > 1 << 20
    assert "temperature" in info.sampling_fields
    assert info.device == "cpu"


def test_a_context_beyond_the_models_positions_is_refused(llama: tuple[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="max_model_len: 300 exceeds the 256 positions"):
        make_runner(llama[0], 4, max_model_len=300)


def test_a_device_that_torch_lacks_is_refused() -> None:
    from trivet_torch.runner import resolve_device

    with pytest.raises(ModelLoadError, match="device: torch does not know 'gpu7'"):
        resolve_device("gpu7")
    assert resolve_device("cpu").type == "cpu"


@pytest.mark.parametrize("name", ["meta", "vulkan"])
def test_a_device_that_cannot_compute_is_refused(name: str) -> None:
    from trivet_torch.runner import resolve_device

    with pytest.raises(ModelLoadError, match=f"device: torch cannot compute on '{name}': .*; use device: cpu"):
        resolve_device(name)


def test_importing_the_plugin_imports_no_torch(repository: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, trivet_torch.plugin, trivet_transformers.plugin, trivet_inline.plugin\n"
        "for m in (trivet_torch.plugin, trivet_transformers.plugin, trivet_inline.plugin): m.trivet_providers()\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    path = ":".join(str(repository / part) for part in ("core", "schemas", "plugins"))
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False).returncode == 0
