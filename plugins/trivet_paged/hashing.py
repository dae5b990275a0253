"""Names of blocks: a hash over all tokens up to a block's end, and over whatever else its content depends on."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from trivet.plan import Int32

if TYPE_CHECKING:
    from trivet.state import Request

_TOKEN = 4  # bytes of an int32


class Hasher:
    """Chained digests ``[num_full_blocks]`` of 32 bytes per request.

    Each covers its parent's digest, the block's tokens and its context. The first parent covers the request's tags
    (adapter, salt, whatever a plugin adds), so equal tokens under different tags never meet. A request's digests are
    kept as long as the request. They do not depend on the process, so what was stored under them is found after a
    restart."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._chains: WeakKeyDictionary[Request, list[bytes]] = WeakKeyDictionary()

    def chain(self, request: Request, tokens: Int32, num_tokens: int) -> list[bytes]:
        """Digests of the full blocks among the first ``num_tokens`` of ``tokens``, and of those that were asked for
        before; the list grows with later calls."""
        chain = self._chains.get(request)
        if chain is None:
            chain = self._chains[request] = []
        have, count = len(chain), num_tokens // self._size
        if have < count:
            self.extend(chain, request, tokens[have * self._size : count * self._size])
        return chain

    def extend(self, chain: list[bytes], request: Request | None, tokens: Int32) -> None:
        """Append the digests of further full blocks to a request's chain."""
        assert request is not None
        parent = chain[-1] if chain else root(request.cache_tags)
        data, step, ranged = tokens.tobytes(), self._size * _TOKEN, bool(request.ranges)
        for start in range(0, len(data), step):
            content = parent + data[start : start + step]
            if ranged:
                content += self._ranges(request, len(chain) * self._size)
            parent = sha256(content).digest()
            chain.append(parent)

    def _ranges(self, request: Request, start: int) -> bytes:
        """What stands for the tokens of a block that take embeddings: whose, which of them, and where."""
        found = []
        for one in request.ranges:
            first, last = max(one.start, start), min(one.start + one.length, start + self._size)
            if first < last:
                place = (one.offset + first - one.start, first - start, last - first)
                found.append(_framed(one.digest) + b"".join(_number(n) for n in place))
        return b"".join(found)


def root(tags: Mapping[str, bytes]) -> bytes:
    """The parent of first blocks, from the context by tag."""
    framed = (_framed(name.encode()) + _framed(value) for name, value in sorted(tags.items()))
    return sha256(b"trivet prefix 1" + b"".join(framed)).digest()


def _framed(value: bytes) -> bytes:
    """With its length, so that neighbours cannot be taken for each other's ends."""
    return _number(len(value)) + value


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
