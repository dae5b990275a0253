"""What the engine half tells the worker halves about a transfer: places, in the order of its blocks."""

from __future__ import annotations

import msgspec

NONE = -1  #: no place


class Moves(msgspec.Struct, array_like=True, gc=False):
    """Where the content of a transfer's blocks is or goes. One entry per block that is not the null block, group after
    group; places are numbers of host or disk slots."""

    number: int  #: unique within an engine
    generation: int  #: raised by every reset: content of others is void
    #: stores: the host slots to fill; loads: the host slots to read, or ``NONE`` where the disk slot is to be read
    host: list[int]
    disk: list[int] = []
    #: loads from disk: host slots that get the content too, or ``NONE``
    promote: list[int] = []
    #: ``(host slot, disk slot)``: old content of host slots to write to disk before anything else
    demote: list[tuple[int, int]] = []


def encode(moves: Moves) -> bytes:
    """As the payload of a transfer."""
    return msgspec.msgpack.encode(moves)


def decode(payload: bytes) -> Moves:
    """The opposite of :func:`encode`."""
    return msgspec.msgpack.decode(payload, type=Moves)
