"""The steps of sampling, each in the best version that there is for where the logits are."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trivet_kernels.reference import logits as reference_logits
from trivet_kernels.reference import sampling as reference
from trivet_kernels.transfer import to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trivet_kernels.cpu.sampling import NativeSampling
    from trivet_kernels.reference.logits import SparseTokens

#: largest vocabulary that the fused kernels take
_MAX_FUSED = 1 << 19
#: likeliest tokens that kernels list one after the other; for more torch sorts
_MAX_LISTED, _MAX_FUSED_LISTED = 1024, 64
#: logits that torch works on at once: few enough to stay in a processor's cache, or enough to fill a GPU
_VALUES, _FUSED_VALUES = 1 << 20, 1 << 26
#: rows that torch's operations draw from at once; float32 copies of their logits are held meanwhile
_BLOCK = 64


class DrawParams(NamedTuple):
    """How rows are sampled, in columns ``[n]``."""

    temperature: NDArray[np.float32]  #: 0 takes the likeliest token, whatever the other columns say
    top_k: NDArray[np.int64]  #: 0 keeps all
    top_p: NDArray[np.float64]  #: above 0; 1 keeps all
    min_p: NDArray[np.float64]  #: below 1; 0 keeps all
    seeds: NDArray[np.int64]  #: all 64 bits count
    positions: NDArray[np.int64]  #: position of the token in the output

    def at(self, places: NDArray[np.int64]) -> DrawParams:
        """The parameters of some of the rows."""
        return DrawParams(
            self.temperature[places],
            self.top_k[places],
            self.top_p[places],
            self.min_p[places],
            self.seeds[places],
            self.positions[places],
        )


def argmax(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest logit of each row among the first ``size`` ids, in the dtype they have, without a copy.

    Args:
        logits: ``[n, vocab_size]``.
        size: Ids to look at.

    Returns:
        ``[n]`` int64 ids, the lowest of equals (a NaN counts as largest), and ``[n]`` their logits.
    """
    native = _native() if logits.is_cpu else None
    return reference.argmax(logits, size) if native is None else native.argmax(logits, size)


def likeliest(logits: Tensor, size: int) -> NDArray[np.int32] | None:
    """What :func:`draw` draws from every row at a temperature of 0, on the host and without parameters.

    Args:
        logits: ``[n, vocab_size]``, not changed.
        size: Ids that may be drawn.

    Returns:
        ``[n]`` ids; None where that takes no less than a draw, or the largest logit of a row is not finite.
    """
    native = _native() if logits.is_cpu else None
    return native.likeliest(logits, size) if native is not None and native.serves(logits) else None


def fused(logits: Tensor) -> bool:
    """Whether :mod:`trivet_kernels.triton.sampling` and :mod:`trivet_kernels.triton.logprobs` serve these logits."""
    return logits.is_cuda and logits.shape[1] <= _MAX_FUSED and _has_triton()


def draw(logits: Tensor, changed: Tensor | None, source: NDArray[np.int64], size: int, params: DrawParams) -> Tensor:
    """Draw a token for each row: divide by the temperature, cut by min-p, top-k and top-p, draw by Gumbel-max.

    Args:
        logits: ``[l, vocab_size]``, not changed.
        changed: ``[m, vocab_size]`` rows that some are drawn from instead.
        source: ``[n]`` row of ``logits`` that each is drawn from, or where that is negative, ``~row`` of ``changed``.
        size: Ids that may be drawn.
        params: Of the ``n`` rows.

    Returns:
        ``[2, n]`` int32, where the logits are: ids, and the bits of the float32 largest of each row's logits, divided
        by the temperature; NaN if the row has one. The id means nothing where that is not finite.
    """
    native = _native() if logits.is_cpu else None
    if native is not None and native.serves(logits) and (changed is None or native.serves(changed)):
        ids, highest = native.draw(logits, changed, source, size, params)
        return torch.from_numpy(np.stack([ids, highest.view(np.int32)]))
    function = _draw_fused if fused(logits) else _draw_plain
    found, order = [torch.empty(2, 0, dtype=torch.int32, device=logits.device)], []
    for part, rows, at in ((logits, source, source >= 0), (changed, ~source, source < 0)):
        places = np.flatnonzero(at)
        if len(places):
            assert part is not None
            found.append(function(part, rows[places], size, params.at(places)))
            order.append(places)
    if len(order) < 2:
        return found[-1]
    return torch.cat(found, 1)[:, to_device(np.argsort(np.concatenate(order)), logits.device)]


def logprobs(
    logits: Tensor, rows: NDArray[np.int64], tokens: Tensor, count: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens and of the most likely ones, as shares of all that the model gives logits for.

    Args:
        logits: ``[l, vocab_size]``, not changed.
        rows: ``[n]`` of them.
        tokens: ``[n]`` int64 an id for each, where the logits are.
        count: How many of the most likely ones to list, at most ``size``.
        size: Ids that are listed and count for ranks.

    Returns:
        Where the logits are: ``[n, 1 + count]`` int32 ids, the token first, ``[n, 1 + count]`` float32 logprobs, NaN
        where a row has NaN or infinite logits, and ``[n]`` int32 the token's rank, 1 = most likely.
    """
    native = _native() if logits.is_cpu else None
    if native is not None and native.serves(logits) and count <= _MAX_LISTED:
        ids, values, ranks = native.logprobs(logits, rows, tokens.numpy(), count, size)
        return torch.from_numpy(ids), torch.from_numpy(values), torch.from_numpy(ranks)
    step = max(1, (_FUSED_VALUES if fused(logits) else _VALUES) // logits.shape[1])
    index = to_device(rows, logits.device)
    blocks = [
        _logprobs_of(logits[index[at : at + step]], tokens[at : at + step], count, size)
        for at in range(0, len(rows), step)
    ]
    found = [torch.cat(parts) for parts in zip(*blocks, strict=True)]
    return found[0], found[1], found[2]


def _logprobs_of(logits: Tensor, tokens: Tensor, count: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    if fused(logits) and count <= _MAX_FUSED_LISTED:
        from trivet_kernels.triton import logprobs as kernels

        return kernels.logprobs(logits, tokens, count, size)
    return reference.logprobs(logits, tokens, count, size)


def float_rows(logits: Tensor, rows: NDArray[np.int64], bitmask: Tensor | None, memory: Tensor | None) -> Tensor:
    """Float32 copies of some rows, with masked tokens at -inf.

    Args:
        logits: ``[l, vocab_size]``.
        rows: ``[m]`` of them.
        bitmask: ``[m, ceil(vocab_size / 32)]`` int32, bit ``t % 32`` of word ``t // 32`` set for tokens that are kept.
        memory: What an earlier call returned, to be written over.

    Returns:
        ``[k, vocab_size]`` with ``k`` at least ``m``; the first ``m`` rows are the copies.
    """
    fits = memory is not None and memory.shape[1] == logits.shape[1] and memory.device == logits.device
    if memory is None or not fits or len(memory) < len(rows):
        # Fresh memory costs more than the copying, so the next larger batch finds room.
        count = 1 << (len(rows) - 1).bit_length() if logits.is_cpu else len(rows)
        memory = torch.empty(count, logits.shape[1], dtype=torch.float32, device=logits.device)
    native = _native() if logits.is_cpu else None
    if native is not None and native.serves(logits):
        native.float_rows(logits, rows, bitmask, memory)
        return memory
    work = memory[: len(rows)]
    work.copy_(logits[to_device(rows, logits.device)])
    if bitmask is not None:
        apply_bitmask(work, bitmask)
    return memory


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens whose bit is not set to -inf, in place.

    Args:
        logits: ``[n, vocab_size]``.
        bitmask: ``[n, ceil(vocab_size / 32)]`` int32, bit ``t % 32`` of word ``t // 32`` for token ``t``.
    """
    if fused(logits):
        from trivet_kernels.triton import logits as triton_logits

        triton_logits.apply_bitmask(logits, bitmask)
    else:
        reference.apply_bitmask(logits, bitmask)


def add_bias(logits: Tensor, tokens: SparseTokens, bias: Tensor) -> None:
    """:func:`trivet_kernels.reference.logits.add_bias`."""
    _logits_module(logits).add_bias(logits, tokens, bias)


def apply_penalties(
    logits: Tensor, tokens: SparseTokens, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """:func:`trivet_kernels.reference.logits.apply_penalties`."""
    _logits_module(logits).apply_penalties(logits, tokens, counts, repetition, frequency, presence)


def _logits_module(logits: Tensor) -> Any:
    if not fused(logits):
        return reference_logits
    from trivet_kernels.triton import logits as triton_logits

    return triton_logits


def _draw_fused(logits: Tensor, rows: NDArray[np.int64], size: int, params: DrawParams) -> Tensor:
    """All rows at once, whose parameters go to the device in one copy."""
    from trivet_kernels.triton.sampling import draw as fused_draw
    from trivet_kernels.triton.sampling import parameters

    packed = parameters(*params, pin=logits.is_cuda)
    if len(rows) != len(logits) or (np.diff(rows) != 1).any():
        logits = logits[to_device(rows, logits.device)]
    return fused_draw(logits, size, packed.to(logits.device))


def _draw_plain(logits: Tensor, rows: NDArray[np.int64], size: int, params: DrawParams) -> Tensor:
    out = torch.zeros(2, len(rows), dtype=torch.int32, device=logits.device)
    for greedy in (True, False):
        chosen = np.flatnonzero((params.temperature == 0) == greedy)
        for at in range(0, len(chosen), _BLOCK):
            block = chosen[at : at + _BLOCK]
            part = logits[to_device(rows[block], logits.device)]
            if greedy:
                ids, highest = argmax(part, size)
            else:
                columns = (to_device(column[block], logits.device) for column in params)
                ids, highest = reference.sample(part, size, *columns)
            places = to_device(block, logits.device)
            out[0, places], out[1, places] = ids.int(), highest.float().view(torch.int32)
    return out


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _native() -> NativeSampling | None:
    from trivet_kernels.cpu.build import library

    if (found := library()) is None:
        return None
    from trivet_kernels.cpu.sampling import NativeSampling

    return NativeSampling(found)
