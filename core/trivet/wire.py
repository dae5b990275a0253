"""Plans and results as bytes (MessagePack), the same for every executor that crosses a process boundary."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from trivet.plan import StepPlan
from trivet.result import StepResult
from trivet_schemas.errors import ParameterError
from trivet_schemas.sampling import PoolingParams, SamplingParams

_ARRAY = 1
_PARAMS = 2
_MODELS: dict[str, type[SamplingParams | PoolingParams]] = {
    "SamplingParams": SamplingParams,
    "PoolingParams": PoolingParams,
}


class WireError(ValueError):
    """Bytes that are no plan or no result, or a plan or result that cannot become bytes; says what is wrong where."""


def encode(value: StepPlan | StepResult) -> bytes:
    """The bytes of a plan or a result.

    Raises:
        WireError: If it holds something that bytes cannot carry.
    """
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError) as exc:
        raise WireError(f"{type(value).__name__} cannot be encoded: {exc}") from exc


def encode_params(params: SamplingParams | PoolingParams) -> bytes:
    """The bytes of parameters, defaults left out. Raises TypeError, ValueError or OverflowError for what bytes cannot
    carry (of a plugin's ``extra_args``, say)."""
    return _encoder.encode(params.model_dump(exclude_defaults=True))


def decode_plan(data: bytes) -> StepPlan:
    """The plan in ``data``; its arrays are read-only views of the message.

    Raises:
        WireError: If ``data`` is no plan.
    """
    try:
        return _plan_decoder.decode(data)
    except _DECODING as exc:
        raise WireError(f"{len(data)} bytes are no step plan: {exc}") from exc


def decode_result(data: bytes) -> StepResult:
    """The result in ``data``; its arrays are read-only views of the message.

    Raises:
        WireError: If ``data`` is no result.
    """
    try:
        return _result_decoder.decode(data)
    except _DECODING as exc:
        raise WireError(f"{len(data)} bytes are no step result: {exc}") from exc


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"an array of {value.dtype} cannot cross processes")
        data = np.ascontiguousarray(value)
        return msgspec.msgpack.Ext(_ARRAY, _encoder.encode((data.dtype.str, value.shape, data.tobytes())))
    if isinstance(value, SamplingParams | PoolingParams):
        name = "SamplingParams" if isinstance(value, SamplingParams) else "PoolingParams"
        return msgspec.msgpack.Ext(_PARAMS, name.encode() + b"\0" + encode_params(value))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a plan or result cannot carry {type(value).__name__} across processes")


def _ext(code: int, data: memoryview) -> Any:
    if code == _ARRAY:
        dtype, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
        return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)
    if code == _PARAMS:
        name, _, body = bytes(data).partition(b"\0")
        model = _MODELS.get(name.decode())
        if model is None:
            raise ValueError(f"unknown parameters {name.decode()!r}")
        return model(**msgspec.msgpack.decode(body, ext_hook=_ext, type=dict[str, Any]))
    raise ValueError(f"unknown extension code {code}")


@lru_cache(maxsize=64)
def _dtype(kind: Any) -> np.dtype[Any] | None:
    """The element type of an annotation such as ``NDArray[np.int32]``; None for anything else."""
    if get_origin(kind) is not np.ndarray:
        return None
    scalar: type[np.generic] = get_args(get_args(kind)[1])[0]
    return np.dtype(scalar)


def _decode(kind: type, value: Any) -> Any:
    # msgspec asks for every annotation it does not know itself; ours are numpy arrays, already built by _ext.
    wanted = _dtype(kind)
    if wanted is None:
        raise TypeError(f"cannot decode a {kind}")
    if not isinstance(value, np.ndarray) or value.dtype != wanted:
        found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else repr(value)
        raise ValueError(f"expected an array of {wanted}, got {found}")
    return value


#: what msgspec and the hooks above raise for wrong bytes
_DECODING = (msgspec.MsgspecError, ParameterError, SyntaxError, TypeError, ValueError, OverflowError, RecursionError)
_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
_plan_decoder = msgspec.msgpack.Decoder(StepPlan, ext_hook=_ext, dec_hook=_decode)
_result_decoder = msgspec.msgpack.Decoder(StepResult, ext_hook=_ext, dec_hook=_decode)
