"""How requests end, and what is left of an engine after faults, interrupts and its shutdown."""

from __future__ import annotations

import threading
from typing import Any

import machine_kit as kit
import numpy as np
import pytest
from engine_kit import check_free, config, drain, engine, expect, greedy, prompts

from trivet.context import Hold
from trivet.errors import RequestError
from trivet.hookspecs import hookimpl
from trivet.plan import Ragged
from trivet.roles.base import Side
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet_schemas.sampling import PoolingParams, SamplingParams

WORK = {str(i): (p, 12) for i, p in enumerate(prompts(8, seed=2))}


def submit(e: Any, work: dict[str, Any] = WORK, **fields: Any) -> None:
    for request_id, (prompt, count) in work.items():
        e.add_request(request_id, prompt, greedy(count, **fields))


def structured(regex: str, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, structured_outputs={"regex": regex})


def drain_into(e: Any, done: dict[str, Any]) -> None:
    while e.has_work:
        done |= {end.request.request_id: end.request for end in e.step().finished}
        e.check_integrity()


# ---------------------------------------------------------------------- stops


def test_a_stop_cannot_lie_beyond_the_tokens_there_are() -> None:
    with engine() as e:
        e.add_request("a", [1, 2], greedy(9))
        e.step()
        for wrong in (2, -1):
            with pytest.raises(RequestError, match=f"after {wrong} tokens: it has 1"):
                e.stop("a", wrong)
        e.step()
        e.stop("a", 1, "x")
        e.stop("gone", 5)
        done = drain(e)
        assert done["a"].output_ids == reference_tokens([1, 2], 1)
        assert (done["a"].finish_reason, done["a"].stop_reason) == ("stop", "x")


def test_a_structured_output_that_the_last_allowed_token_completes_is_complete() -> None:
    with engine(kit, grammar=[{"use": "parity"}]) as e:
        e.add_request("exact", [1, 2], structured("alternating:5", 5))
        e.add_request("cut", [1, 2], structured("alternating:6", 5))
        done = drain(e)
        assert (done["exact"].finish_reason, len(done["exact"].output_ids)) == ("stop", 5)
        assert (done["cut"].finish_reason, len(done["cut"].output_ids)) == ("length", 5)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_that_a_grammar_forces_do_not_mix_with_steps_in_flight(depth: int) -> None:
    outputs: list[dict[str, list[int]]] = []
    for steps in (1, depth):
        with engine(kit, grammar=[{"use": "parity"}], executor={"use": "held", "depth": steps}) as e:
            for i, prompt in enumerate(prompts(10, seed=5)):
                e.add_request(str(i), prompt, structured("forcing:14", 20))
            outputs.append({i: r.output_ids for i, r in drain(e).items()})
    assert outputs[0] == outputs[1]
    for tokens in outputs[0].values():
        for first, second, third in zip(tokens, tokens[1:], tokens[2:], strict=False):
            assert first >= 16 or (second, third) == (first + 17, first + 18)


def test_logprobs_end_where_a_stop_cuts_the_tokens() -> None:
    """Several tokens of a row may be accepted at once; those behind a stop token are no outputs."""

    class Both:
        @hookimpl(wrapper=True)
        def trivet_commit(self, plan: Any, result: Any) -> Any:
            events = yield
            for i, values in events.logprobs:
                assert values.token_ids[:, 0].tolist() == events.tokens.row(i).tolist()
            return events

    import drafting

    prompt = [1, 2, 3]
    stop = reference_tokens(prompt, 12)[7]
    with engine(drafting, Both(), drafter=[{"use": "random_tree"}]) as e:
        for i in range(8):
            e.add_request(str(i), prompt, greedy(12, stop_token_ids=[stop], logprobs=0))
        done = drain(e)
        assert e.fault is None
        assert all(r.output_ids[-1] == stop for r in done.values())


def test_the_last_step_of_a_request_is_offered_to_the_cache_before_it_ends() -> None:
    """A prompt whose request needs one step only is found again by the next one."""
    prompt = list(range(20))
    with engine(cache={"use": "paged", "block_size": 4}) as e:
        found = []
        for params in (greedy(1), greedy(1), PoolingParams(task="embed"), PoolingParams(task="embed")):
            e.add_request("a", prompt, params)
            found.append(drain(e)["a"].num_cached_tokens)
        assert found == [0, 16, 16, 16]
        e.add_request("new", prompt[::-1], PoolingParams(task="embed"))
        e.add_request("later", prompt[::-1], greedy(1))
        drain(e)
        e.add_request("b", prompt[::-1], greedy(1))
        assert drain(e)["b"].num_cached_tokens == 16


def test_a_worker_that_returns_nothing_for_a_row_ends_its_request() -> None:
    class Mute:
        @hookimpl(wrapper=True)
        def trivet_sample(self, logits: Any, rows: Any) -> Any:
            sampled = yield
            tokens = [sampled.accepted.row(i) for i in range(len(sampled.accepted))]
            tokens[0] = np.empty(0, np.int32)
            sampled.accepted = Ragged.from_rows(tokens)
            return sampled

    with engine(Mute()) as e:
        e.add_request("a", [1, 2], greedy(4))
        done = drain(e, steps=50)
        assert done["a"].finish_reason == "error"
        assert "neither a token nor a pooled output" in done["a"].message
        check_free(e)


@pytest.mark.parametrize("use", ["static", "continuous"])
def test_positions_for_a_drafter_do_not_reach_beyond_the_greatest_length(use: str) -> None:
    """A batch whose lengths just fit runs to its end, although the drafter would like more room."""
    cache = {"use": "paged", "block_size": 1, "num_blocks": 1 + 40}
    plans: list[Any] = []
    with engine(kit.Far(), max_model_len=20, scheduler={"use": use}, cache=cache, drafter=[{"use": "far"}]) as e:
        e.hooks.run, run = lambda plan: plans.append(plan) or run(plan), e.hooks.run
        for name in ("a", "b"):
            e.add_request(name, [1, 2, 3], greedy(17, ignore_eos=True))
        done = drain(e, steps=100)
        assert done["a"].output_ids == done["b"].output_ids == reference_tokens([1, 2, 3], 17)
        assert done["a"].num_preemptions == done["b"].num_preemptions == 0
    for plan in plans:
        assert (plan.num_computed + plan.num_scheduled + plan.lookahead <= 20).all()


# ---------------------------------------------------------------------- holds


def test_a_hold_may_be_released_from_another_thread_before_the_next_plan() -> None:
    with engine() as e:
        e.add_request("a", [1, 2], greedy(30))
        e.step()
        e.context.hold("a", Hold("k", "test", "why", 0.0))
        slot = e.parts.lifecycle.requests["a"].slot
        thread = threading.Thread(target=e.context.release, args=("a", "test", "k"))
        thread.start()
        thread.join()
        assert e.table.held[slot], "nothing but the engine's thread touches the columns"
        assert e.explain("a") is None
        e.context.release("a", "test", "k")
        e.context.hold("a", Hold("k", "test", "again", 0.0))
        assert "again" in e.explain("a").detail, "a release takes back the holds before it, not those after it"
        e.context.release("a", "test", "k")
        assert drain(e)["a"].output_ids == reference_tokens([1, 2], 30)


def test_a_release_does_not_reach_a_later_request_of_the_same_id() -> None:
    with engine() as e:
        e.add_request("a", [1, 2], greedy(3))
        e.context.hold("a", Hold("k", "test", "first", 0.0))
        e.context.release("a", "test", "k")
        e.abort("a")
        e.add_request("a", [1, 2], greedy(3))
        e.context.hold("a", Hold("k", "test", "second", 0.0))
        e.step()
        assert "second" in e.explain("a").detail
        e.context.release("a", "test", "k")
        drain(e)


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize("kind", ["fragile", "blind"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_a_matcher_that_raises_ends_its_own_request_only(kind: str, drafts: bool) -> None:
    import drafting

    roles: dict[str, Any] = {"drafter": [{"use": "random_tree"}]} if drafts else {}
    with engine(kit, *([drafting] if drafts else []), grammar=[{"use": "parity"}], **roles) as e:
        submit(e)
        e.add_request("bad", [1, 2], structured(f"{kind}:9", 9))
        done = drain(e)
        assert done["bad"].finish_reason == "error"
        assert "the grammar's matcher failed" in done["bad"].message
        assert len(done["bad"].output_ids) <= 2
        expect(done, WORK)
        check_free(e)


class Raises:
    """Raises when a request of the given id enters its slot."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error

    @hookimpl
    def trivet_extend(self, context: Any) -> list[object]:
        if context.side is Side.WORKER:
            sampler, name, error = context.get("sampler"), self.name, self.error
            original = sampler.add

            def add(request: Any) -> None:
                if request.request_id == name:
                    raise error
                original(request)

            sampler.add = add
        return []


@pytest.mark.parametrize("depth", [1, 3])
def test_a_plain_exception_at_the_entry_of_a_request_ends_one_plan_only(depth: int) -> None:
    """The other new requests of that plan were told to nobody; their removal must not fail a later plan."""
    executor = {"use": "held", "depth": depth}
    scheduler = {"use": "continuous", "max_num_batched_tokens": 200, "max_num_seqs": 4}
    with engine(kit, Raises("1", ValueError("no")), executor=executor, scheduler=scheduler) as e:
        submit(e)
        done = drain(e)
        failed = {i for i, r in done.items() if r.finish_reason == "error"}
        assert failed == {"0", "1", "2", "3"}, "those of the plan that brought it"
        expect(done, {i: w for i, w in WORK.items() if i not in failed})
        check_free(e)


def test_a_request_without_a_row_ends_with_the_plan_that_brought_it() -> None:
    """Its grammar, of which nobody was told, would never be reported ready."""
    with engine(kit, Raises("bad", ValueError("no")), grammar=[{"use": "parity"}]) as e:
        e.add_request("bad", [1, 2], greedy(3))
        e.add_request("held", [1, 2], structured("alternating:3", 5))
        done = drain(e, steps=100)
        assert {i: r.finish_reason for i, r in done.items()} == {"bad": "error", "held": "error"}
        e.add_request("held", [1, 2], structured("alternating:3", 5))
        assert drain(e)["held"].finish_reason == "stop"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plan_that_breaks_off_before_its_transfers_reports_them_failed(depth: int) -> None:
    """Blocks that are stored are kept until the store ends: it must end although it never began."""
    roles = {
        "connector": {"use": "depot", "store": 1},
        "executor": {"use": "held", "depth": depth},
        "scheduler": {"use": "continuous", "max_num_seqs": 1},
    }
    with engine(kit, Raises("1", ValueError("no")), **roles) as e:
        submit(e)
        done = drain(e, steps=500)
        assert done["1"].finish_reason == "error"
        expect(done, {i: w for i, w in WORK.items() if i != "1"})
        check_free(e)


@pytest.mark.parametrize("depth", [1, 3])
def test_what_a_step_reports_counts_although_a_wrapper_of_run_raised(depth: int) -> None:
    """The report that a grammar is ready is made once."""
    chaos = kit.Chaos()
    grammar = [{"use": "parity"}]
    with engine(kit, chaos, grammar=grammar, executor={"use": "held", "depth": depth}) as e:
        e.add_request("held", [1, 2], structured("alternating:3", 5))
        e.step()
        e.add_request("a", [1, 2], greedy(9))
        done: dict[str, Any] = {}
        for _ in range(12):
            chaos.armed["after run"] = RuntimeError("chaos")
            done |= {end.request.request_id: end.request for end in e.step().finished}
            if "a" not in e.parts.lifecycle.requests:
                e.add_request("a", [1, 2], greedy(9))
            if "held" in done:
                break
        chaos.armed.clear()
        done |= drain(e, steps=200)
        assert done["held"].finish_reason in ("error", "stop")
        assert e.fault is None
        check_free(e)


def test_a_plan_that_did_not_get_out_frees_nothing_that_steps_in_flight_use() -> None:
    with engine(kit, executor={"use": "held", "depth": 3}) as e:
        executor = e.context.get("executor")
        submit(e)
        for _ in range(3):
            e.step()
        flying = e._flying[0][0]
        e.abort([r.request_id for r in e.table.requests if r is not None])
        retired = e.parts.cache.stats().retired
        assert retired > 0
        e.add_request("more", [1, 2, 3], greedy(2))
        e._flying.pop()
        executor._waiting.pop()
        executor.refuse = 1
        settled: list[int] = []
        settle = e.parts.lifecycle.settle
        e.parts.lifecycle.settle = lambda step: settled.append(step) or settle(step)
        e.step()
        assert settled == [flying.step_id], "a step that was never sent settles nothing"


@pytest.mark.parametrize("ending", ["fault", "shutdown"])
def test_nothing_is_left_to_do_after_a_fault_or_a_shutdown(ending: str) -> None:
    """Transfers that are under way will not be reported any more."""

    class Breaks:
        armed = False

        @hookimpl(wrapper=True)
        def trivet_commit(self, plan: Any, result: Any) -> Any:
            if self.armed:
                raise RuntimeError("lost")
            return (yield)

    breaks = Breaks()
    with engine(kit, breaks, connector={"use": "depot", "load": 1, "seed": 3}) as e:
        submit(e)
        while not e.parts.lifecycle.has_transfers:
            e.step()
        if ending == "fault":
            breaks.armed = True
        else:
            e.shutdown()
        for _ in range(10):
            if e.has_work:
                e.step()
        assert not e.has_work


def test_an_engine_can_be_shut_down_while_a_transfer_never_ends() -> None:
    """Its blocks are kept, so it is work, but nobody has to wait for it."""
    import asyncio

    import transfers

    from trivet import AsyncEngine

    settings = config(connector={"use": "shelf", "load": False, "store": True, "steps": 10**9})

    async def serve() -> None:
        async with AsyncEngine(settings, [fakes, transfers]) as served:
            async for output in served.generate([1, 2], greedy(3)):
                last = output
            assert last.outputs[0].token_ids == reference_tokens([1, 2], 3)
            assert served.engine.has_work
            assert not served.engine.has_unfinished

    asyncio.run(asyncio.wait_for(serve(), 30))


def test_observers_hear_of_the_requests_that_a_shutdown_aborts() -> None:
    seen: list[str] = []

    class Watch:
        @hookimpl
        def trivet_requests_added(self, event: Any) -> None:
            seen.extend(f"added {r.request_id}" for r in event.requests)

        @hookimpl
        def trivet_requests_finished(self, event: Any) -> None:
            seen.extend(f"{f.reason} {f.request.request_id}" for f in event.finished)

        @hookimpl
        def trivet_engine_stopped(self, reason: str) -> None:
            seen.append(reason)

    with engine(Watch()) as e:
        e.add_request("a", [1], greedy(5))
        e.step()
        e.add_request("b", [1], greedy(5))
    assert seen == ["added a", "added b", "abort a", "abort b", "shutdown"]


@pytest.mark.parametrize("where", ["before forward", "after run"])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_leaves_an_engine_that_goes_on(where: str, depth: int) -> None:
    chaos = kit.Chaos()
    with engine(kit, chaos, executor={"use": "held", "depth": depth}) as e:
        submit(e)
        e.step()
        chaos.armed[where] = KeyboardInterrupt()
        done: dict[str, Any] = {}
        with pytest.raises(KeyboardInterrupt):
            drain_into(e, done)
        assert not chaos.armed
        drain_into(e, done)
        assert set(done) == set(WORK)
        expect(done, {i: w for i, w in WORK.items() if done[i].finish_reason != "error"})
        check_free(e)
        e.add_request("again", [1, 2], greedy(5))
        assert drain(e)["again"].output_ids == reference_tokens([1, 2], 5)
