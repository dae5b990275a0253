"""Plans and results as bytes (MessagePack), the same for every executor that crosses a process boundary."""

from __future__ import annotations

from typing import Any, get_origin

import msgspec
import numpy as np

from trivet.plan import StepPlan
from trivet.result import StepResult
from trivet_schemas.sampling import PoolingParams, SamplingParams

_MODELS: dict[str, type[SamplingParams | PoolingParams]] = {
    "SamplingParams": SamplingParams,
    "PoolingParams": PoolingParams,
}
_ARRAY = 1
_PARAMS = 2


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        return msgspec.msgpack.Ext(_ARRAY, _encoder.encode((data.dtype.str, data.shape, data.tobytes())))
    if isinstance(value, SamplingParams | PoolingParams):
        body = value.model_dump_json(exclude_defaults=True).encode()
        return msgspec.msgpack.Ext(_PARAMS, type(value).__name__.encode() + b"\0" + body)
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"a plan or result cannot carry {type(value).__name__} across processes")


def _ext(code: int, data: memoryview) -> Any:
    if code == _ARRAY:
        dtype, shape, raw = msgspec.msgpack.decode(data)
        return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)
    if code == _PARAMS:
        name, _, body = bytes(data).partition(b"\0")
        model = _MODELS[name.decode()]
        return model.model_validate_json(body)
    raise ValueError(f"unknown extension code {code} in a plan or result")


def _decode(kind: type, value: Any) -> Any:
    # msgspec asks for every annotation it does not know itself; ours are numpy arrays, already built by _ext.
    if get_origin(kind) is np.ndarray or kind is np.ndarray:
        return value
    raise TypeError(f"cannot decode a {kind}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
_plan_decoder = msgspec.msgpack.Decoder(StepPlan, ext_hook=_ext, dec_hook=_decode)
_result_decoder = msgspec.msgpack.Decoder(StepResult, ext_hook=_ext, dec_hook=_decode)


def encode(value: StepPlan | StepResult) -> bytes:
    """The bytes of a plan or a result."""
    return _encoder.encode(value)


def decode_plan(data: bytes) -> StepPlan:
    """The plan in ``data``; its arrays are read-only views of the message."""
    return _plan_decoder.decode(data)


def decode_result(data: bytes) -> StepResult:
    """The result in ``data``; its arrays are read-only views of the message."""
    return _result_decoder.decode(data)
