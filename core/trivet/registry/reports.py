"""What ``trivet plugins list | show | check`` print: plain records about roles and plugins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivet import hookspecs
from trivet.registry.validation import PHASE_HOOKS
from trivet.roles.base import CARDINALITY, ROLE_SIDES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trivet.registry.records import Plugin
    from trivet.registry.selection import RoleSelection


@dataclass(frozen=True, slots=True)
class ChosenProvider:
    """A selected provider and why it was. ``distribution`` and ``version`` are None for an embedder's object."""

    provider: str
    plugin: str
    why: str
    distribution: str | None
    version: str | None
    file: str | None
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """What a bundled provider answered to ``use: auto``; ``rank`` None: it cannot serve."""

    provider: str
    rank: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class RoleReport:
    """A role: what was chosen for it. ``problem`` says why nothing was, where something could have been."""

    role: str
    side: str
    cardinality: str
    chosen: list[ChosenProvider]
    candidates: list[CandidateReport]
    problem: str | None


@dataclass(frozen=True, slots=True)
class HookReport:
    """A hook that a plugin implements. ``order`` is its place among the active plugins', from 1; None if inactive."""

    hook: str
    kind: str  #: provides | wraps | observes | extends (a hook that another plugin offers)
    order: int | None
    place: str


@dataclass(frozen=True, slots=True)
class PluginReport:
    """A discovered plugin, whatever became of it. ``origin`` is bundled | installed | object | extension."""

    name: str
    origin: str
    active: bool
    distribution: str | None
    version: str | None
    file: str | None
    entry_point: str | None
    providers: list[tuple[str, str]] = field(default_factory=list)  #: (role, name)
    components: list[tuple[str, str]] = field(default_factory=list)  #: (kind, name)
    hooks: list[HookReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def report_role(selection: RoleSelection) -> RoleReport:
    """The record of one role."""
    return RoleReport(
        role=selection.role,
        side=ROLE_SIDES[selection.role].value,
        cardinality=CARDINALITY[selection.role].value,
        chosen=[
            ChosenProvider(
                provider=choice.offer.name,
                plugin=choice.offer.plugin.name,
                why=choice.why,
                distribution=choice.offer.plugin.distribution,
                version=choice.offer.plugin.version,
                file=choice.offer.plugin.file,
                options=choice.options if choice.model is None else choice.model.model_dump(mode="json"),
            )
            for choice in selection.choices
        ],
        candidates=[CandidateReport(c.offer.name, c.rank, c.reason) for c in selection.candidates],
        problem=selection.problem,
    )


def report_plugin(plugin: Plugin, active: Sequence[Plugin], order: Mapping[str, Sequence[str]]) -> PluginReport:
    """The record of one plugin; ``order`` gives plugin names per hook in call order."""
    is_active = plugin in active
    return PluginReport(
        name=plugin.name,
        origin=plugin.origin.value,
        active=is_active,
        distribution=plugin.distribution,
        version=plugin.version,
        file=plugin.file,
        entry_point=plugin.entry_point,
        providers=[(offer.role, offer.name) for offer in plugin.offers],
        components=[(component.kind, component.name) for component in plugin.components],
        hooks=[
            HookReport(
                hook=impl.hook,
                kind=_kind(impl.hook),
                order=_position(plugin.name, order.get(impl.hook, ())) if is_active else None,
                place=impl.place,
            )
            for impl in plugin.hooks
        ],
        problems=list(plugin.problems),
    )


def _kind(hook: str) -> str:
    if hook in PHASE_HOOKS:
        return "wraps"
    if hook in hookspecs.OBSERVER_HOOKS:
        return "observes"
    return "provides" if hook in hookspecs.PROVIDER_HOOKS else "extends"


def _position(name: str, names: Sequence[str]) -> int | None:
    return names.index(name) + 1 if name in names else None
