"""The prefix cache, windows and cache tiers with real weights: the same tokens as without, or a proven near-tie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trivet import LLM, SamplingParams
from trivet.hookspecs import hookimpl

BLOCK = 16
STORY = "The log of the lighthouse, as its keepers wrote it down: " + " ".join(
    f"In the year {1790 + i} the lamp burnt {i * 11 % 97} barrels of oil and {i * 17 % 53} ships went by."
    for i in range(90)
)
Prompts = list[list[int]]


class Reference:
    """Transformers with the weights that the engine uses, in float32: what decides whether two tokens are a near-tie.

    In float32 the engine's logits differ from these by the order of summation: at most 1e-3 over all the tests of real
    models, so tokens that swap lie within twice that. In bfloat16 each of two computations is off by its own
    roundings. The last one, of the logits themselves, is half a spacing, ``2 ** -8`` of the number; those of the layers
    before it add to that, mostly cancelling. Two spacings each are allowed, so tokens that swap lie within four, which
    are ``4 * 2 ** -7`` of the largest logit at most. Both must be near the largest, too: nothing else was a
    candidate."""

    def __init__(self, path: Path, dtype: str) -> None:
        from trivet_torch.weights import load_causal_lm

        model, _ = load_causal_lm(str(path), dtype=getattr(torch, dtype), attn_implementation="eager")
        self._model, self._dtype = model.float(), dtype

    def logits(self, ids: list[int], count: int = 1) -> torch.Tensor:
        """Of the last ``count`` positions, ``[count, vocab]`` float32."""
        with torch.inference_mode():
            found: torch.Tensor = self._model(torch.tensor([ids]), logits_to_keep=count).logits[0]
        return found

    def bound(self, best: float) -> float:
        """The largest gap that may be a near-tie."""
        return 2e-3 if self._dtype == "float32" else 4 * 2**-7 * abs(best)

    def compare(self, prompt: list[int], got: list[int], want: list[int]) -> None:
        """The tokens are equal, or the first that differs is a near-tie: what follows it had other inputs."""
        if got == want:
            return
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        row = self.logits([*prompt, *got[:at]])[0]
        best = float(row.max())
        behind = best - min(float(row[got[at]]), float(row[want[at]]))
        assert behind <= self.bound(best), (
            f"token {at}: {got[at]} and {want[at]} are up to {behind:.3g} behind the best"
        )


class Budget:
    """Sets the token budget of every step."""

    tokens = 1 << 20

    @hookimpl(wrapper=True)
    def trivet_schedule(self, inputs: Any) -> Any:
        inputs.token_budget = min(inputs.token_budget, self.tokens)
        return (yield)


def config(model: Path, dtype: str, max_model_len: int, cache: dict[str, Any], **roles: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": max_model_len,
        "plugins": {
            "cache": {"use": "paged", "block_size": BLOCK, **cache},
            "scheduler": {"use": "continuous", "max_num_seqs": 8},
            **roles,
        },
    }


def run(llm: LLM, prompts: Prompts, count: int | list[int]) -> tuple[Prompts, list[int], int]:
    """Tokens, how many of each prompt's were found, and how many of those in tiers; then nothing is in use."""
    counts = [count] * len(prompts) if isinstance(count, int) else count
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in counts]
    cache = llm.engine.parts.cache
    before = cache.stats().tier_hits
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    llm.engine.check_integrity()
    cache.check_integrity()
    stats = cache.stats()
    assert stats.free == stats.total
    found = [output.num_cached_tokens for output in outputs]
    assert all(n is not None for n in found)
    return [list(o.outputs[0].token_ids) for o in outputs], [n or 0 for n in found], stats.tier_hits - before


def check_tiers(
    model: Path, dtype: str, folder: Path, shared: int, tails: tuple[int, ...], max_model_len: int, num_blocks: int
) -> None:
    """Prompts with a common beginning: without caching, cold, warm, from host memory, from disk after a restart."""
    reference = Reference(model, dtype)
    with LLM.from_config(config(model, dtype, max_model_len, {"prefix_caching": False})) as llm:
        ids = llm.get_tokenizer().encode(STORY)
        prompts = [[*ids[:shared], *ids[1000 + 50 * i :][:tail]] for i, tail in enumerate(tails)]
        # Together more than the pool holds.
        fillers = [ids[::-1][: max_model_len - 2], ids[::-1][1000:1096]]
        want, found, _ = run(llm, prompts, 8)
        assert set(found) == {0}
    findable = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    tier = {"use": "offload", "host_memory": "512MiB", "path": str(folder), "disk_memory": "512MiB"}
    tiered = config(model, dtype, max_model_len, {"num_blocks": num_blocks}, cache_tier=[tier])
    with LLM.from_config(tiered) as llm:
        one_by_one = [run(llm, [prompt], 8) for prompt in prompts]
        cold = [tokens[0] for tokens, _, _ in one_by_one]
        assert one_by_one[0][1] == [0]
        assert all(found[0] >= shared // BLOCK * BLOCK for _, found, _ in one_by_one[1:])
        warm, found, _ = run(llm, prompts, 8)
        assert found == findable
        evicted = llm.engine.parts.cache.stats().evicted
        run(llm, fillers, 1)
        assert llm.engine.parts.cache.stats().evicted - evicted >= shared // BLOCK
        loaded, found, tier_hits = run(llm, prompts, 8)
        assert found == findable
        assert tier_hits > 0
        run(llm, fillers, 1)  # what was in the pool alone goes to the tier
    with LLM.from_config(tiered) as llm:
        restarted, found, tier_hits = run(llm, prompts, 8)
        assert tier_hits >= shared // BLOCK * BLOCK
        assert found == findable
    for tokens in (cold, warm, loaded, restarted):
        for prompt, a, b in zip(prompts, tokens, want, strict=True):
            reference.compare(prompt, a, b)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_gemma_over_700_tokens_with_hybrid_windows(demo_model: Path, tmp_path: Path, dtype: str) -> None:
    # A request holds at most 49 blocks in each of six groups.
    check_tiers(demo_model, dtype, tmp_path, 720, (16, 5, 33), 784, 1 + 6 * 49 + 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_qwen(qwen_model: Path, tmp_path: Path, dtype: str) -> None:
    check_tiers(qwen_model, dtype, tmp_path, 150, (10, 3, 21, 26), 256, 1 + 16 + 4)


@pytest.mark.parametrize(
    ("budgets", "count"), [((128, 4096), 16), pytest.param((128, 512, 1024, 4096), 64, marks=pytest.mark.full)]
)
def test_gemma_windows_and_chunks(demo_model: Path, budgets: tuple[int, ...], count: int) -> None:
    budget = Budget()
    reference = Reference(demo_model, "float32")
    settings = config(demo_model, "float32", 1024, {})
    settings["plugins"]["scheduler"]["max_num_batched_tokens"] = 4096
    with LLM.from_config(settings, plugins=[budget]) as llm:
        ids = llm.get_tokenizer().encode(STORY)
        # The window is 512 tokens.
        prompts, counts = [ids[:700], ids[900:1411], ids[1000:1512], ids[1100:1613]], [count, 4, 4, 4]
        assert [len(prompt) for prompt in prompts] == [700, 511, 512, 513]
        rows = [
            reference.logits([*prompt, *output[:-1]], len(output))
            for prompt, output in zip(prompts, run(llm, prompts, counts)[0], strict=True)
        ]
        want = [row.argmax(-1).tolist() for row in rows]
        assert llm.engine.parts.cache.reset()
        for budget.tokens in budgets:
            cold, found, _ = run(llm, prompts, counts)
            assert set(found) == {0}
            warm, found, _ = run(llm, prompts, counts)
            assert found == [688, 496, 496, 512]
            for prompt, a, b, expected in zip(prompts, cold, warm, want, strict=True):
                reference.compare(prompt, a, expected)
                reference.compare(prompt, b, expected)
            assert llm.engine.parts.cache.reset()


def test_conversation_computes_only_what_is_new(demo_model: Path) -> None:
    turns, out = 20, 4
    with LLM.from_config(config(demo_model, "float32", 1024, {})) as llm:
        ids = llm.get_tokenizer().encode(STORY)
        history = ids[:30]
        (answer,), found, _ = run(llm, [history], out)
        assert found == [0]
        for turn in range(1, turns):
            known = len(history) + out - 1  # the last token drawn was never computed
            history = [*history, *answer, *ids[40 * turn :][: 9 + turn % 3]]
            (answer,), (cached,), _ = run(llm, [history], out)
            assert cached == known // BLOCK * BLOCK
            assert len(history) - cached <= 9 + 2 + 1 + BLOCK, "the new turn, and a block that was not full"
        assert len(history) > 250
        conversation = [*history, *answer]
    # The whole of it, computed by transformers at once: every answer is what it would have said.
    reference = Reference(demo_model, "float32")
    row = reference.logits(conversation[:-1], out)
    reference.compare(history, answer, row.argmax(-1).tolist())


def test_qwen_chat_of_20_turns(qwen_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    messages: list[dict[str, str]] = []
    before: list[int] = []
    with LLM.from_config(config(qwen_model, "bfloat16", 1024, {})) as llm:
        for turn in range(20):
            messages.append({"role": "user", "content": f"Name town {turn + 1}."})
            output = llm.chat(messages, params, use_tqdm=False)[0]
            prompt = list(output.prompt_token_ids or [])
            assert prompt[: len(before)] == before, "a turn goes on from the prompt of the one before"
            assert (output.num_cached_tokens or 0) >= (len(before) - 1) // BLOCK * BLOCK
            if turn:
                # The answer before, the new message, the template's words around both, and a block that was not full.
                assert len(prompt) - (output.num_cached_tokens or 0) <= 4 + 8 + 12 + BLOCK
            messages.append({"role": "assistant", "content": output.outputs[0].text})
            before = prompt
        assert len(before) > 20 * 15
        stats = llm.engine.parts.cache.stats()
        assert stats.free == stats.total
