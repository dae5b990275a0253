"""Policies of the continuous scheduler, and what a policy of a plugin's own must look like.

A *scheduling policy* is a factory that returns ``key(request)``: waiting requests run in ascending order of their
keys, ties by arrival. A *victim policy* is a factory that returns ``choose(slots, table)``: given the slots that
may be preempted, in admission order, it returns one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trivet.plan import Int32
from trivet.state import Request, RequestTable

SchedulingPolicy = Callable[[Request], Any]
VictimPolicy = Callable[[Int32, RequestTable], int]


def fcfs() -> SchedulingPolicy:
    """First come, first served; a preempted request keeps its place."""
    return lambda _request: 0


def newest() -> VictimPolicy:
    """The request admitted last, which has the least to lose on average and lets older ones finish."""
    return lambda slots, _table: int(slots[-1])
