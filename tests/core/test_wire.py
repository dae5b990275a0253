"""Plans and results as bytes: every field comes back as it was, and wrong bytes are named."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trivet import plan as p
from trivet import result as r
from trivet.wire import WireError, decode_plan, decode_result, encode
from trivet_schemas.sampling import PoolingParams, RequestOutputKind, SamplingParams

SHAPES = st.integers(0, 5)


def array(dtype: Any, *more: int) -> st.SearchStrategy[Any]:
    return SHAPES.flatmap(lambda n: arrays.arrays(np.dtype(dtype), (n, *more)))


I32, I64, U8, BOOL, F32 = array("i4"), array("i8"), array("u1"), array("?"), array("f4")
TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
BYTES = st.binary(max_size=9)
SLOT, EPOCH = st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1)
RAGGED = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3), max_size=3).map(p.Ragged.from_rows)
FLOATS = st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), FLOATS, TEXT, BYTES),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(TEXT, inner, max_size=2)),
    max_leaves=4,
)
STRUCTURED = st.one_of(
    st.fixed_dictionaries({"regex": TEXT.filter(bool)}),
    st.fixed_dictionaries({"json": st.just({"type": "object", "properties": {"ä": {"type": "integer"}}})}),
    st.fixed_dictionaries({"choice": st.lists(TEXT.filter(bool), min_size=1, max_size=2)}),
    st.just({"json_object": True}),
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.1, 2.0),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.lists(TEXT.filter(bool), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, 2**31), max_size=3),
        "max_tokens": st.one_of(st.none(), st.integers(1, 2**40)),
        "logit_bias": st.dictionaries(st.integers(0, 999), st.floats(-100, 100), max_size=2),
        "structured_outputs": STRUCTURED,
        "output_kind": st.sampled_from(RequestOutputKind),
        "extra_args": st.dictionaries(TEXT, PLAIN, max_size=2),
        "prompt_logprobs": st.integers(-1, 3),
        "ignore_eos": st.booleans(),
    },
).map(lambda fields: SamplingParams(**fields))
POOLING = st.fixed_dictionaries(
    {}, optional={"dimensions": st.integers(1, 99), "normalize": st.booleans(), "priority": st.integers(-9, 9)}
).map(lambda fields: PoolingParams(**fields))

NEW = st.builds(
    p.NewRequest,
    request_id=TEXT,
    slot=SLOT,
    epoch=EPOCH,
    token_ids=I32,
    num_prompt=SLOT,
    num_computed=SLOT,
    blocks=st.lists(I32, max_size=2),
    params=st.one_of(SAMPLING, POOLING, st.none()),
    task=st.sampled_from(p.Task),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_ids=I32,
    bad_words=st.one_of(st.none(), RAGGED),
    adapter=st.one_of(st.none(), TEXT),
    parent_slot=st.integers(-1, 99),
    resumed=st.booleans(),
    extra=st.dictionaries(TEXT, BYTES, max_size=2),
)
TRANSFER = st.builds(
    p.Transfer,
    transfer_id=EPOCH,
    endpoint=TEXT,
    slot=SLOT,
    epoch=EPOCH,
    start_token=SLOT,
    num_tokens=SLOT,
    blocks=st.lists(I32, max_size=2),
    keys=st.lists(BYTES, max_size=2),
    blocking=st.booleans(),
    payload=BYTES,
)
RANGE = st.builds(p.MultimodalRange, slot=SLOT, item=TEXT, start=SLOT, length=SLOT, offset=SLOT)
PLAN = st.builds(
    p.StepPlan,
    step_id=EPOCH,
    new=st.lists(NEW, max_size=2),
    resumed=I32,
    preempted=I32,
    preempted_epochs=I64,
    finished=I32,
    finished_epochs=I64,
    slots=I32,
    epochs=I64,
    num_computed=I32,
    num_scheduled=I32,
    num_drafts=I32,
    draft_ids=st.one_of(st.none(), RAGGED),
    draft_parents=st.one_of(st.none(), RAGGED),
    lookahead=I32,
    new_blocks=st.lists(st.builds(p.BlockDelta, slots=I32, blocks=RAGGED), max_size=2),
    copies=st.lists(array("i4", 2), max_size=2),
    zeroing=st.lists(I32, max_size=2),
    loads=st.lists(TRANSFER, max_size=2),
    stores=st.lists(TRANSFER, max_size=2),
    logits_rows=U8,
    samples=BOOL,
    pools=BOOL,
    input_source=U8,
    tokens=RAGGED,
    draft_k=I32,
    adapter=I32,
    adapters=st.lists(TEXT, max_size=2),
    multimodal=st.lists(RANGE, max_size=2),
    extensions=st.dictionaries(TEXT, BYTES, max_size=2),
)
LOGPROBS = st.builds(r.TokenLogprobs, token_ids=array("i4", 3), logprobs=array("f4", 3), ranks=I32)
RESULT = st.builds(
    r.StepResult,
    step_id=EPOCH,
    slots=I32,
    epochs=I64,
    accepted=RAGGED,
    logprobs=st.lists(st.builds(r.RowLogprobs, row=SLOT, values=LOGPROBS), max_size=2),
    prompt_logprobs=st.lists(
        st.builds(r.PromptLogprobs, slot=SLOT, epoch=EPOCH, start=SLOT, values=LOGPROBS), max_size=2
    ),
    pooled=st.lists(st.builds(r.Pooled, slot=SLOT, epoch=EPOCH, data=F32), max_size=2),
    next_drafts=st.one_of(st.none(), RAGGED),
    next_draft_parents=st.one_of(st.none(), RAGGED),
    num_next_drafts=st.one_of(st.none(), I32),
    forced=st.one_of(st.none(), RAGGED),
    constraints=st.lists(
        st.builds(r.ConstraintStatus, slot=SLOT, epoch=EPOCH, state=st.sampled_from(r.ConstraintState), message=TEXT),
        max_size=2,
    ),
    transfers_finished=I64,
    transfers_failed=I64,
    invalid_blocks=st.lists(I32, max_size=2),
    errors=st.lists(st.builds(r.RequestFailure, slot=SLOT, epoch=EPOCH, message=TEXT), max_size=2),
    undone=st.booleans(),
    timings=st.dictionaries(TEXT, FLOATS, max_size=2),
    extensions=st.dictionaries(TEXT, BYTES, max_size=2),
)


def same(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b) or (isinstance(a, int) and isinstance(b, int)), (where, a, b)
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            same(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert a.tobytes() == b.tobytes(), where
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{where}[{i}]")
    elif isinstance(a, SamplingParams | PoolingParams):
        assert a.model_dump() == b.model_dump(), where
    else:
        assert a == b, where


def test_the_strategies_fill_every_field() -> None:
    """A field that is added must be added here too."""
    for strategy, kind in ((PLAN, p.StepPlan), (RESULT, r.StepResult), (NEW, p.NewRequest), (TRANSFER, p.Transfer)):
        named = set(strategy.wrapped_strategy.kwargs) if hasattr(strategy, "wrapped_strategy") else set()
        assert named == {field.name for field in dataclasses.fields(kind)}


@settings(max_examples=150, deadline=None)
@given(PLAN)
def test_a_plan_comes_back_as_it_was(plan: p.StepPlan) -> None:
    same(plan, decode_plan(encode(plan)))


@settings(max_examples=100, deadline=None)
@given(RESULT)
def test_a_result_comes_back_as_it_was(result: r.StepResult) -> None:
    same(result, decode_result(encode(result)))


def test_arrays_that_are_views_or_of_no_length_come_back() -> None:
    matrix = np.arange(20, dtype=np.int32).reshape(4, 5)
    plan = p.StepPlan(1, slots=matrix[:, 2], copies=[matrix[:0, :2], matrix[::2, 1:3]])
    same(plan.copies, decode_plan(encode(plan)).copies)
    assert decode_plan(encode(plan)).slots.tolist() == [2, 7, 12, 17]
    scalars = p.NewRequest("a", np.int32(3), np.int64(4), matrix[0], 5, 0, [], seed=np.int64(-5))
    back = decode_plan(encode(p.StepPlan(1, new=[scalars]))).new[0]
    assert (back.slot, back.epoch, back.seed) == (3, 4, -5)


def test_parameters_of_a_subclass_travel_as_the_class_that_workers_know() -> None:
    class Mine(SamplingParams):
        pass

    new = p.NewRequest("a", 0, 1, np.zeros(1, np.int32), 1, 0, [], params=Mine(temperature=0.5))
    back = decode_plan(encode(p.StepPlan(1, new=[new]))).new[0].params
    assert type(back) is SamplingParams
    assert back.temperature == 0.5


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_garbage_is_no_plan_and_no_result(data: bytes) -> None:
    for decode, name in ((decode_plan, "plan"), (decode_result, "result")):
        with pytest.raises(WireError, match=f"{len(data)} bytes are no step {name}: "):
            decode(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_give_a_wire_error_or_something_of_the_right_shape(data: Any) -> None:
    plan = p.StepPlan(
        7,
        new=[p.NewRequest("r", 0, 1, np.arange(3, dtype=np.int32), 3, 0, [], params=SamplingParams(stop=["a"]))],
        slots=np.arange(2, dtype=np.int32),
    )
    good = bytearray(encode(plan))
    place = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        good[place] ^= data.draw(st.integers(1, 255))
    else:
        del good[place:]
    with contextlib.suppress(WireError):
        assert isinstance(decode_plan(bytes(good)).slots, np.ndarray)


def message(**changes: Any) -> bytes:
    def hook(value: Any) -> Any:
        return msgspec.msgpack.Ext(1, msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes())))

    return msgspec.msgpack.encode({"step_id": 1} | changes, enc_hook=hook)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slots": np.zeros(2, np.int64)}, "expected an array of int32, got an array of int64"),
        ({"slots": 5}, "expected an array of int32, got 5"),
        ({"slots": msgspec.msgpack.Ext(9, b"")}, "unknown extension code 9"),
        ({"slots": msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("<i4", [3], b"123")))}, "buffer size"),
        ({"slots": msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("|O", [1], b"12345678")))}, "OBJECT"),
        ({"new": [{"request_id": "a"}]}, r"missing required field `slot` - at `\$.new"),
        ({"step_id": "x"}, r"Expected `int`, got `str` - at `\$.step_id`"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(WireError, match=text):
        decode_plan(message(**changes))


def test_what_cannot_travel_is_named() -> None:
    for value, text in ((object(), "cannot carry object"), (np.array([None]), "array of object"), (2**70, "ints")):
        with pytest.raises(WireError, match=f"StepPlan cannot be encoded: .*{text}"):
            encode(p.StepPlan(1, extensions={"mine": value}))  # type: ignore[dict-item]
