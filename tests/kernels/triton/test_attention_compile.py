"""The attention kernels, compiled for GPUs that need not be there: what they take must be there, and nothing spills."""

from __future__ import annotations

from typing import Any

import pytest
from _compile import TARGETS, Compiled, compile_for

from trivet_kernels.triton.attention import padded
from trivet_kernels.triton.compat import converts_e4m3
from trivet_kernels.triton.tune import Shape, default_tiles

_LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_OPTIONAL = {
    "sinks": "*bf16",
    "alibi_slopes": "*fp32",
    "key_scale": "*fp32",
    "value_scale": "*fp32",
    "tree_lens": "*i32",
    "tree_mask": "*u8",
    "tree_depth": "*i32",
}
#: what a launch does not specialise on
_UNSPECIALIZED = ("num_rows", "min_queries", "slots", "max_queries", "q_tiles", "queries", "query_token_stride")
_UNSPECIALIZED += ("table_stride", "window", "tree_size", "key_scale_stride", "value_scale_stride")
_STRIDES = [f"{side}_{part}_stride" for side in ("key", "value") for part in ("block", "token", "head")]


def compiled(
    target: str,
    kernel: str,
    *,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    group: int = 4,
    kv_heads: int = 8,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    block_size: int = 16,
    span: str = "full",
    softcap: bool = False,
    given: tuple[str, ...] = (),
    queries: int = 1,
    parts: bool = True,
) -> Compiled:
    """A kernel as a launch with the default tiles would have it; ``given`` are the optional tensors, and ``parts`` says
    whether a decode's rows may be cut."""
    kv_dtype, v_head_dim = kv_dtype or dtype, v_head_dim or head_dim
    shape = Shape(head_dim, v_head_dim, kv_heads, group, _LONG[dtype], _LONG[kv_dtype], span != "full", target)
    tiles = default_tiles(shape)
    kind = kv_dtype if kv_dtype in {"e4m3", "e5m2"} else "none"
    cache = "*u8" if kind != "none" else f"*{kv_dtype}"
    signature = {"out": f"*{dtype}", "query": f"*{dtype}", "key_cache": cache, "value_cache": cache}
    signature |= dict.fromkeys(("query_start", "seq_lens", "block_table"), "*i32")
    signature |= {name: _OPTIONAL[name] for name in given}
    integers = ["query_token_stride", "query_head_stride", "table_stride", *_STRIDES]
    integers += ["key_scale_stride", "value_scale_stride", "tree_size", "window"]
    signature |= dict.fromkeys(integers, "i32") | dict.fromkeys(("scale", "scale_out", "cap"), "fp32")
    constants: dict[str, Any] = {name: None for name in _OPTIONAL if name not in given}
    constants |= {
        "num_heads": group * kv_heads,
        "group": group,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "block_d": padded(head_dim),
        "block_v": padded(v_head_dim),
        "block_size": block_size,
        "kind": kind,
        "native": converts_e4m3(target),
        "span": span,
        "softcap": softcap,
    }
    if kernel == "prefill":
        tile = tiles.tree_tile() if "tree_mask" in given else tiles.prefill
        signature |= dict.fromkeys(("num_rows", "min_queries"), "i32")
    else:
        tile = tiles.decode_tile(tiles.decode_rows(group, queries))
        if parts:
            signature |= {"part_out": "*fp32", "part_sum": "*fp32"}
        else:
            constants |= {"part_out": None, "part_sum": None}
        signature |= dict.fromkeys(("slots", "max_queries", "q_tiles"), "i32")
        constants |= {"max_parts": tiles.max_parts(kv_heads), "min_keys": tiles.min_keys}
    constants |= {"heads": min(group, tile.block_m), "block_m": tile.block_m, "block_n": tile.block_n}
    return compile_for(
        f"trivet_kernels.triton._{kernel}:{kernel}_kernel",
        signature,
        constants,
        target,
        unaligned=_UNSPECIALIZED,
        **tile.launch_options(),
    )


def check(record: Compiled) -> None:
    assert 0 < record.shared <= record.shared_limit
    assert record.spills == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_the_usual_model(target: str, kernel: str) -> None:
    check(compiled(target, kernel))


@pytest.mark.parametrize("target", TARGETS)
def test_decodes_of_rows_too_short_to_be_cut(target: str) -> None:
    check(compiled(target, "decode", parts=False))


#: layers as they come: Gemma 2 and 3, GPT-OSS, Phi-3, BLOOM, drafts under verification, 8-bit caches
LAYERS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256, "group": 2, "span": "sliding", "softcap": True},
    "gpt-oss": {"head_dim": 64, "group": 8, "span": "sliding", "given": ("sinks",)},
    "phi": {"head_dim": 96, "group": 1},
    "bloom": {"head_dim": 80, "group": 1, "given": ("alibi_slopes",)},
    "llama4": {"span": "chunked", "group": 5},
    "drafts": {"queries": 8, "given": ("tree_lens", "tree_mask", "tree_depth")},
    "e4m3": {"kv_dtype": "e4m3", "given": ("key_scale", "value_scale")},
    "e5m2": {"kv_dtype": "e5m2", "dtype": "fp16"},
    "float32": {"dtype": "fp32"},
    "large-blocks": {"block_size": 128},
    "many-heads": {"group": 128, "kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
}
_FEW = [("sm_90", "prefill", "gemma"), ("sm_80", "prefill", "e4m3"), ("sm_90", "decode", "drafts")]
_FEW += [("sm_90", "decode", "e4m3"), ("gfx942", "decode", "gpt-oss"), ("gfx942", "prefill", "gemma")]
_FULL = [
    (target, kernel, layer)
    for target in TARGETS
    for kernel in ("prefill", "decode")
    for layer in LAYERS
    if (target, kernel, layer) not in _FEW
]


@pytest.mark.parametrize(
    ("target", "kernel", "layer"), [*_FEW, *(pytest.param(*case, marks=pytest.mark.full) for case in _FULL)]
)
def test_other_layers(target: str, kernel: str, layer: str) -> None:
    check(compiled(target, kernel, **LAYERS[layer]))


@pytest.mark.parametrize("target", TARGETS)
def test_the_reduction_of_parts(target: str) -> None:
    signature = {"out": "*bf16", "part_out": "*fp32", "part_sum": "*fp32", "query_start": "*i32", "seq_lens": "*i32"}
    signature |= {"sinks": "*bf16"} | dict.fromkeys(("slots", "max_queries", "queries", "window"), "i32")
    constants = {"num_heads": 32, "v_head_dim": 128, "block_v": 128, "block_n": 64, "span": "full"}
    constants |= {"max_parts": 32, "min_keys": 256, "chunk": 16}
    kernel = "trivet_kernels.triton._decode:reduce_kernel"
    check(compile_for(kernel, signature, constants, target, unaligned=_UNSPECIALIZED))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cache", ["bf16", "u8"])
def test_cache_writes(target: str, cache: str) -> None:
    signature = {"tokens": "*bf16", "cache": f"*{cache}", "slot_mapping": "*i64", "scale": "*fp32"}
    signature |= dict.fromkeys(("token_stride", "head_stride", "block_stride", "scale_stride"), "i32")
    constants = {"num_heads": 8, "head_dim": 128, "block_size": 16, "piece": 1024, "factor": None, "most": None}
    constants |= {"kind": "none" if cache == "bf16" else "e4m3"}
    kernel = "trivet_kernels.triton.cache:write_kernel"
    record = compile_for(kernel, signature, constants, target, unaligned=("token_stride", "scale_stride"))
    assert record.spills == 0


#: which side of a copy has an index, or None where there is no source
_COPIES = {"gather": "source_index", "scatter": "target_index", "zeros": None}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", _COPIES)
def test_cache_copies(target: str, kind: str) -> None:
    strides = ("source_stride", "target_stride", "index_stride", "target_index_stride", "source_outer", "target_outer")
    signature = {"source": "*i16", "target": "*i16", "source_index": "*i64", "target_index": "*i64"}
    signature |= dict.fromkeys(strides, "i32")
    constants: dict[str, Any] = {"size": 1024, "source_inner": 1024, "target_inner": 1024, "piece": 1024}
    given = {"target", *strides, *({"source", _COPIES[kind]} if kind != "zeros" else {"target_index"})}
    constants |= {name: None for name in signature if name not in given}
    record = compile_for(
        "trivet_kernels.triton.cache:copy_kernel",
        {name: kind for name, kind in signature.items() if name in given},
        constants,
        target,
        unaligned=strides[2:],
    )
    assert record.spills == 0
