"""Mixtures of experts in Triton against a loop over tokens and experts, and what compilers say of the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _compile import TARGETS, Compiled, compile_for
from torch import Tensor

from trivet_kernels import moe
from trivet_kernels.moe import StackedExperts
from trivet_kernels.reference import moe as reference
from trivet_kernels.triton.activation import SILU
from trivet_kernels.triton.moe import CLAMPED, mixture, tiles

#: relative to the largest result: float32 in another order; rounding of the type, which the interpreter does by cutting
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def stacked(
    count: int, hidden: int, size: int, *, dtype: torch.dtype = torch.float32, bias: bool = False, **given: Any
) -> StackedExperts:
    def tensor(seed: int, *shape: int) -> Tensor:
        return random(*shape, seed=seed, scale=shape[-1] ** -0.5 if len(shape) == 3 else 1.0).to(dtype)

    return StackedExperts(
        tensor(1, count, 2 * size, hidden),
        tensor(2, count, hidden, size),
        **{"activation": "silu"} | given,
        gate_up_bias=tensor(3, count, 2 * size) if bias else None,
        down_bias=tensor(4, count, hidden) if bias else None,
    )


def routed(tokens: int, count: int, top_k: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    weights, chosen = random(tokens, count, seed=seed).softmax(1).topk(top_k, dim=1)
    return chosen, weights


def check(x: Tensor, chosen: Tensor, weights: Tensor, experts: StackedExperts) -> Tensor:
    got = mixture(x, chosen, weights, experts)
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    expected = reference.mixture(x, chosen, weights, experts).float()
    bound = TOLERANCE[x.dtype] * float(expected.abs().max())
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=bound)
    return got


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped"])
def test_tokens_get_what_their_experts_make_of_them(dtype: torch.dtype, bias: bool, activation: str) -> None:
    given = {"slope": 1.702, "limit": 0.7} if activation == "clamped" else {}
    experts = stacked(4, 40, 24, dtype=dtype, bias=bias, activation=activation, **given)
    check(random(9, 40).to(dtype), *routed(9, 4, 2), experts)


@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (3, 3), (8, 2), (40, 8), (130, 4)])
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_any_number_of_experts_and_tokens(count: int, top_k: int, tokens: int) -> None:
    check(random(tokens, 16), *routed(tokens, count, top_k), stacked(count, 16, 8))


@pytest.mark.parametrize(("hidden", "size"), [(32, 32), (64, 128), (70, 33), (1100, 5)])
def test_sizes_at_and_off_the_tiles(hidden: int, size: int) -> None:
    check(random(5, hidden), *routed(5, 3, 2), stacked(3, hidden, size))


def test_an_expert_with_all_tokens_and_experts_with_none() -> None:
    experts = stacked(6, 16, 8)
    for number in (0, 5):
        chosen = torch.full((33, 1), number)
        check(random(33, 16), chosen, torch.ones(33, 1), experts)
    # 16 and 17 tokens fill a tile of float32's and one more row.
    chosen = torch.tensor([[2]] * 16 + [[4]] * 17)
    check(random(33, 16), chosen, torch.ones(33, 1), experts)


def test_no_tokens() -> None:
    assert mixture(random(0, 16), *routed(0, 3, 2), stacked(3, 16, 8)).shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    experts = stacked(4, 40, 24, dtype=dtype, bias=True)
    x, (chosen, weights) = random(70, 40).to(dtype), routed(70, 4, 2)
    together = mixture(x, chosen, weights, experts)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    assert torch.equal(mixture(x[order], chosen[order], weights[order], experts), together[order])
    for part in (slice(0, 1), slice(17, 18), slice(3, 22)):
        assert torch.equal(mixture(x[part], chosen[part], weights[part], experts), together[part])


def test_rows_may_be_far_from_each_other() -> None:
    wide = random(7, 3 * 16)
    check(wide[:, 16:32], *routed(7, 3, 2), stacked(3, 16, 8))


def test_a_token_without_numbers_spoils_no_other() -> None:
    experts = stacked(3, 16, 8, activation="clamped", slope=1.702, limit=0.7)
    x, (chosen, weights) = random(6, 16), routed(6, 3, 2)
    expected = mixture(x, chosen, weights, experts)
    x[2] = torch.nan
    got = mixture(x, chosen, weights, experts)
    assert got[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], expected[others])


def test_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *args, **kwargs: None

    for name in ("gate_kernel", "down_kernel", "sum_kernel"):
        monkeypatch.setattr(f"trivet_kernels.triton.moe.{name}", Kernel())
    experts = stacked(128, 256, 96, dtype=torch.bfloat16)
    meta = StackedExperts(experts.gate_up.to("meta"), experts.down.to("meta"), "silu")
    for tokens in (1, 1000):
        x = torch.empty(tokens, 256, dtype=torch.bfloat16, device="meta")
        chosen = torch.empty(tokens, 8, dtype=torch.int64, device="meta")
        assert moe.mixture(x, chosen, torch.empty(tokens, 8, device="meta"), meta).shape == x.shape
    # A token has eight pairs; of 8,000 in tiles of 64, each of 128 experts may have one that is not full.
    assert [grid[0] for grid in grids] == [8, 8, 1, 253, 253, 1000]


#: name, hidden size, size of an expert, number of experts, experts of a token, bias and clamped activation
MODELS = {
    "qwen3_moe": (2048, 768, 128, 8, False),
    "gpt_oss": (2880, 2880, 32, 4, True),
}


def compiled(target: str, kernel: str, model: str, dtype: str = "bf16") -> Compiled:
    hidden, size, count, top_k, clamped = MODELS[model]
    pair = tiles({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype], target)
    signature = {"out": f"*{dtype}", "weight": f"*{dtype}", "order": "*i64", "starts": "*i32"}
    constants: dict[str, Any] = {"experts": count, "hidden": hidden, "size": size, "block_e": count}
    if clamped:
        signature["bias"] = f"*{dtype}"
    else:
        constants["bias"] = None
    if kernel == "gate":
        signature |= {"x": f"*{dtype}", "x_row_stride": "i32", "slope": "fp32", "limit": "fp32"}
        constants |= {"top_k": top_k, "kind": (CLAMPED if clamped else SILU).value}
    else:
        signature["gated"] = f"*{dtype}"
    tile = pair[0 if kernel == "gate" else 1]._asdict()
    launch = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    name = f"trivet_kernels.triton.moe:{kernel}_kernel"
    return compile_for(name, signature, constants | tile, target, unaligned=("x_row_stride",), **launch)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ["gate", "down"])
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("qwen3_moe", "bf16"),
        pytest.param("gpt_oss", "bf16", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "fp16", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "fp32", marks=pytest.mark.full),
    ],
)
def test_products_compile_without_spills(target: str, kernel: str, model: str, dtype: str) -> None:
    record = compiled(target, kernel, model, dtype)
    assert 0 < record.shared <= record.shared_limit
    assert record.spills == 0


@pytest.mark.parametrize("target", TARGETS)
def test_sums_compile(target: str) -> None:
    signature = {"out": "*bf16", "outputs": "*bf16", "weights": "*fp32"}
    constants = {"top_k": 8, "hidden": 2048, "block": 1024}
    assert compile_for("trivet_kernels.triton.moe:sum_kernel", signature, constants, target).spills == 0
