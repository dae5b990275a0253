"""What comes later, rehearsed with small fakes: the tokens stay those of the naive loop, whatever runs in between."""

from __future__ import annotations

from typing import Any

import caches
import draft_model
import drafting
import grammars
import messages
import numpy as np
import pytest
import ranks
import transfers
from rehearsal_kit import engine, expect, greedy, prompts, run

from trivet.hookspecs import hookimpl
from trivet.testing.fake_model import reference_logits, reference_states, reference_tokens
from trivet_schemas.sampling import PoolingParams, SamplingParams

SMALL = {"use": "paged", "block_size": 4, "num_blocks": 26}
TIGHT = {"use": "continuous", "max_num_batched_tokens": 7, "max_num_seqs": 8}


class Nobody:
    """What a worker process gets in place of an observer of the engine's."""

    @hookimpl
    def trivet_engine_started(self, context: Any) -> None:
        pass


def submit(e: Any, work: Any, **fields: Any) -> None:
    for request_id, (prompt, count) in work.items():
        e.add_request(request_id, prompt, greedy(count, **fields))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("cache", [{"use": "paged", "block_size": 4}, SMALL], ids=["ample", "small"])
def test_several_steps_in_flight(work: Any, depth: int, cache: Any) -> None:
    with engine(depth=depth, cache=cache) as e:
        submit(e, work)
        done = run(e)
        expect(done, work)
        assert (sum(r.num_preemptions for r in done.values()) > 0) == (cache is SMALL)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cache", [{"use": "paged", "block_size": 4}, SMALL], ids=["ample", "small"])
def test_a_random_drafter_with_trees(work: Any, depth: int, cache: Any) -> None:
    with engine(drafting, depth=depth, cache=cache, drafter=[{"use": "random_tree"}]) as e:
        submit(e, work)
        steps = [0]
        e.hooks.commit, commit = lambda p, r: steps.append(int(p.num_drafts.sum())) or commit(p, r), e.hooks.commit
        expect(run(e), work)
        assert sum(steps) > 100, "drafts were verified"


def test_drafts_in_a_token_budget_that_cuts_them(work: Any) -> None:
    with engine(drafting, scheduler=TIGHT, drafter=[{"use": "random_tree"}]) as e:
        submit(e, work)
        expect(run(e), work)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "roles",
    [{}, {"cache": SMALL, "scheduler": TIGHT}, {"cache": {"use": "paged", "block_size": 1, "num_blocks": 110}}],
    ids=["ample", "small", "single"],
)
def test_a_draft_model_with_a_cache_of_its_own(work: Any, depth: int, roles: Any) -> None:
    with engine(draft_model, depth=depth, drafter=[{"use": "own_cache"}], **roles) as e:
        assert [spec.layer for spec in e.parts.layout.specs] == [0, 1], "the drafter's layer is behind the model's"
        submit(e, work)
        verified = []
        e.hooks.commit, commit = lambda p, r: verified.append(agreed(p, r)) or commit(p, r), e.hooks.commit
        expect(run(e), work)
        proposed, accepted = np.sum(verified, axis=0)
        assert proposed > 100
        assert accepted == proposed, "with the target's own tokens in its cache, the draft model is always right"


def agreed(plan: Any, result: Any) -> tuple[int, int]:
    """Drafts verified in a step, and those accepted."""
    rows = plan.num_drafts > 0
    return int(plan.num_drafts.sum()), int((result.accepted.lengths[rows] - 1).sum())


def test_every_request_has_its_drafter(work: Any) -> None:
    both = [{"use": "own_cache"}, {"use": "random_tree"}]
    with engine(draft_model, drafting, drafter=both) as e:
        for request_id, (prompt, count) in work.items():
            extra = {"drafter": b"tree"} if int(request_id) % 2 else None
            e.add_request(request_id, prompt, greedy(count), extra=extra)
        trees, chains, slots = [], [], {}
        commit = e.hooks.commit

        def look(plan: Any, result: Any) -> Any:
            slots.update({(n.slot, n.epoch): n.request_id for n in plan.new})
            for row in np.flatnonzero(plan.num_drafts).tolist():
                odd = int(slots[int(plan.slots[row]), int(plan.epochs[row])]) % 2
                accepted = len(result.accepted.row(row)) - 1
                (trees if odd else chains).append(accepted == plan.num_drafts[row])
            return commit(plan, result)

        e.hooks.commit = look
        expect(run(e), work)
        assert all(chains), "the draft model proposed for the even ones"
        assert not all(trees), "and the random one for the others"


def obeying(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for i in range(count):
        scores = reference_logits(tokens, 64, (None,))[-1]
        tokens.append(int(np.where(np.arange(64) % 2 == i % 2, scores, -np.inf).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("cache", [{"use": "paged", "block_size": 4}, SMALL], ids=["ample", "small"])
def test_a_grammar_that_compiles_for_some_steps_and_rejects_drafts(work: Any, drafts: bool, cache: Any) -> None:
    roles: dict[str, Any] = {"drafter": [{"use": "random_tree"}]} if drafts else {}
    with engine(grammars, *([drafting] if drafts else []), grammar=[{"use": "slow"}], cache=cache, **roles) as e:
        for request_id, (prompt, count) in work.items():
            regex = f"alternating:{count}" if int(request_id) % 2 else None
            fields = {"structured_outputs": {"regex": regex}} if regex else {}
            e.add_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=count, **fields))
        bad = SamplingParams(temperature=0, structured_outputs={"regex": "nonsense"})
        e.add_request("bad", [1, 2], bad)
        e.step()
        wait = e.explain("1")
        assert wait is not None
        assert wait.kind == "hold"
        assert "grammar" in wait.detail
        done = run(e)
        assert done["bad"].finish_reason == "error"
        assert "cannot compile 'nonsense'" in done["bad"].message
        for request_id, (prompt, count) in work.items():
            expected = obeying(prompt, count) if int(request_id) % 2 else reference_tokens(prompt, count)
            assert done[request_id].output_ids == expected, request_id


@pytest.mark.parametrize("depth", [1, 2])
def test_two_kv_groups(work: Any, depth: int) -> None:
    windows = [None, 5, None]
    cache = {"use": "paged", "block_size": 4}
    with engine(model={"windows": windows}, cache=cache, depth=depth) as e:
        assert {g.window for g in e.parts.layout.groups} == {None, 5}
        submit(e, work)
        expect(run(e), work, windows=windows)


@pytest.mark.parametrize("good", [0, 1, 3, 1000])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_load_that_fails_half_way(work: Any, good: int, depth: int) -> None:
    with engine(transfers, connector={"use": "shelf", "good_blocks": good, "steps": 30}, depth=depth) as e:
        submit(e, work)
        e.step()
        long_one = next(i for i, (prompt, _) in work.items() if len(prompt) > 4)
        wait = e.explain(long_one)
        assert wait is not None
        assert (wait.kind, "shelf" in wait.detail) == ("hold", True)
        expect(run(e), work)
        assert e.context.get("connector").offered >= 20


def test_an_abort_while_its_load_is_under_way(work: Any) -> None:
    with engine(transfers, connector={"use": "shelf", "steps": 20}) as e:
        submit(e, work)
        e.step()
        e.abort(["0", "1", "2", "3"])
        assert e.parts.cache.stats().leased > 0, "the load still writes"
        done = run(e)
        assert {done[i].finish_reason for i in "0123"} == {"abort"}
        expect(done, {k: v for k, v in work.items() if k not in "0123"})


@pytest.mark.parametrize("depth", [1, 2])
def test_delayed_free(work: Any, depth: int) -> None:
    connector = {"use": "shelf", "load": False, "store": True, "steps": 4}
    with engine(transfers, connector=connector, depth=depth, cache=SMALL) as e:
        submit(e, work)
        leased = 0
        done = {}
        while e.has_work:
            done |= {end.request.request_id: end.request for end in e.step().finished}
            e.check_integrity()
            leased = max(leased, e.parts.cache.stats().leased)
        expect(done, work)
        assert leased > 0, "blocks outlived their request while they were stored"
        assert e.context.get("connector").stored == len(work)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fails", [False, True], ids=["stored", "failed"])
def test_a_cache_that_stores_while_requests_run(work: Any, depth: int, fails: bool) -> None:
    """A store that fails costs the tier a block and no request anything."""
    connector = {"use": "shelf", "load": False, "steps": 2, "store_fails": fails}
    cache = {"use": "storing", "block_size": 4, "prefix_caching": False}
    with engine(caches, transfers, connector=connector, cache=cache, depth=depth) as e:
        submit(e, work)
        done = run(e)
        expect(done, work)
        assert all(r.num_recomputed_tokens == 0 for r in done.values())
        long_enough = sum(len(prompt) + count > 4 for prompt, count in work.values())
        assert e.parts.cache.ended == [not fails] * long_enough


def test_results_reduced_over_ranks(work: Any) -> None:
    with engine(ranks, transfers, messages, executor={"use": "two_ranks"}, connector={"use": "shelf"}) as e:
        submit(e, work)
        seen = []
        e.hooks.commit, commit = lambda p, r: seen.append((p, r.extensions)) or commit(p, r), e.hooks.commit
        expect(run(e), work)
        assert any(plan.num_rows for plan, _ in seen)
        for plan, extensions in seen:
            answer = plan.step_id.to_bytes(4, "little") * 2 if plan.num_rows else None
            assert extensions.get("rank") == answer, "the declared reducer joined what both ranks answered"


@pytest.mark.parametrize("block_size", [1, 4, 5])
@pytest.mark.parametrize("use", ["paged", "contiguous"])
def test_four_forks_of_a_prompt(use: str, block_size: int) -> None:
    def sample(cache: Any, ids: list[str], parent: str | None) -> dict[str, list[int]]:
        with engine(cache=cache) as e:
            for p, prompt in enumerate(prompts(5, seed=3)):
                for i in range(4):
                    params = SamplingParams(temperature=1, max_tokens=12, seed=100 * p + i)
                    e.add_request(f"{p}#{i}", prompt, params, parent=f"{p}#0" if parent and i else None)
            most = 0
            done: dict[str, Any] = {}
            while e.has_work:
                done |= {end.request.request_id: end.request.output_ids for end in e.step().finished}
                most = max(most, e.parts.cache.stats().used)
                e.check_integrity()
            done["most"] = most
            return done

    apart = sample({"use": "paged", "block_size": block_size, "prefix_caching": False}, [], None)
    shared = sample({"use": use, "block_size": block_size}, [], "yes")
    apart_most, shared_most = apart.pop("most"), shared.pop("most")
    assert shared == apart
    assert len({tuple(v) for v in shared.values()}) == 20, "each child draws with its own seed"
    if use == "paged" and block_size == 1:
        assert shared_most < apart_most, "the prompt's blocks are shared"


def test_pooling() -> None:
    with engine(scheduler=TIGHT, cache=SMALL) as e:
        texts = prompts(10, seed=4)
        for i, prompt in enumerate(texts):
            e.add_request(f"p{i}", prompt, PoolingParams(task="embed"))
            e.add_request(f"g{i}", prompt, greedy(5))
        pooled: dict[str, Any] = {}
        done: dict[str, Any] = {}
        while e.has_work:
            events = e.step()
            pooled |= {r.request_id: p.data for r, p in events.pooled}
            done |= {end.request.request_id: end.request for end in events.finished}
        for i, prompt in enumerate(texts):
            state = reference_states(prompt, (None,))[-1:] >> np.uint64(11)
            assert pooled[f"p{i}"] == pytest.approx(state.astype(np.float64) / 2.0**53, rel=1e-6)
            assert done[f"p{i}"].output_ids == []
            assert done[f"g{i}"].output_ids == reference_tokens(prompt, 5)


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_in_chunks_under_preemption(work: Any, depth: int) -> None:
    with engine(scheduler=TIGHT, cache=SMALL, depth=depth) as e:
        submit(e, work, prompt_logprobs=2)
        got: dict[str, dict[int, Any]] = {request_id: {} for request_id in work}
        done: dict[str, Any] = {}
        while e.has_work:
            events = e.step()
            for request, chunk in events.prompt_logprobs:
                for i in range(len(chunk.values.ranks)):
                    entry = (chunk.values.token_ids[i].tolist(), chunk.values.logprobs[i].tolist())
                    place = got[request.request_id].setdefault(chunk.start + i, entry)
                    assert place == entry, "a position computed again gives the same"
            done |= {end.request.request_id: end.request for end in events.finished}
        expect(done, work)
        assert sum(r.num_preemptions for r in done.values()) > 0
        for request_id, (prompt, _) in work.items():
            assert sorted(got[request_id]) == list(range(1, len(prompt)))
            logits = reference_logits(prompt, 64, (None,))
            for position, (ids, values) in got[request_id].items():
                row = logits[position - 1]
                logprobs = row - np.log(np.exp(row - row.max()).sum()) - row.max()
                assert ids == [prompt[position], *np.argsort(-row)[:2].tolist()]
                assert values == pytest.approx(logprobs[ids].tolist(), rel=1e-5)


def test_a_cache_tagged_by_adapter() -> None:
    prompt = prompts(1, seed=9)[0] * 3
    told: list[Any] = []

    class Watch:
        trivet_import = ("test_rehearsal:Nobody", {})

        @hookimpl
        def trivet_blocks_stored(self, event: Any) -> None:
            told.append(event.blocks)

        @hookimpl
        def trivet_blocks_evicted(self, event: Any) -> None:
            told.append("cleared" if event.cleared else event.hashes)

    with engine(Watch(), cache={"use": "paged", "block_size": 4}) as e:
        hits = []
        for adapter in (None, "a", "b", "a", None, "b"):
            e.add_request("x", prompt, greedy(6), adapter=adapter)
            before = e.parts.cache.stats().prefix_hits
            done = run(e)
            assert done["x"].output_ids == reference_tokens(prompt, 6, adapter=adapter)
            hits.append(e.parts.cache.stats().prefix_hits - before)
            assert done["x"].num_cached_tokens == hits[-1]
        found = (len(prompt) - 1) // 4 * 4
        assert hits == [0, 0, 0, found, found, found]
        blocks = [block for some in told for block in some]
        assert len(blocks) == len(set(blocks)), "every block is told of once"
        assert len(blocks) == 3 * ((len(prompt) + 5) // 4)
        assert e.parts.cache.reset()
        e.add_request("after", prompt, greedy(1))
        assert run(e)["after"].num_cached_tokens == 0
        assert "cleared" in told


@pytest.mark.parametrize("late", [0, 1, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_string_found_late(work: Any, late: int, depth: int) -> None:
    """The fake output stage sees tokens ``late`` steps after they were committed; what it makes of them stays the
    same."""
    stops = {i: reference_tokens(prompt, count)[-2:] for i, (prompt, count) in work.items() if count > 4}
    with engine(depth=depth) as e:
        submit(e, {i: (prompt, count + 10 * (int(i) % 2)) for i, (prompt, count) in work.items()})
        queue: list[Any] = []
        seen: dict[str, list[int]] = {i: [] for i in work}
        reason: dict[str, str] = {}
        while e.has_work or queue:
            queue.append(e.step())
            for events in queue[: -late or None]:
                for i, request in enumerate(events.requests):
                    tokens = seen[request.request_id]
                    for token in events.tokens.row(i).tolist():
                        if request.request_id in reason:
                            continue
                        tokens.append(token)
                        if tokens[-2:] == stops.get(request.request_id):
                            reason[request.request_id] = "stop"
                            e.stop(request.request_id, len(tokens), "the pair")
                for end in events.finished:
                    reason.setdefault(end.request.request_id, end.reason)
            queue = queue[-late:] if late and e.has_work else []
        for request_id, (prompt, count) in work.items():
            longer = count + 10 * (int(request_id) % 2)
            full, stop = reference_tokens(prompt, longer), stops.get(request_id)
            cut = next((n for n in range(2, longer + 1) if full[n - 2 : n] == stop), longer)
            assert seen[request_id] == full[:cut]
            assert reason[request_id] == ("stop" if stop else "length")
