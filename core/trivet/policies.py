"""What policies of a scheduler are made of: base classes for the order of a queue and for who is preempted.

A policy is a component (:class:`trivet.provider.Component`) of the kind ``scheduling_policy`` or ``victim_policy``: its
factory is a class derived from one of these, or a function that returns a plain function (``key(request)``, or
``choose(slots, table)``). A configuration names it, with options if it declares any::

    scheduler: {use: continuous, policy: {use: shortest_first, ageing: 200}, victim: least_computed}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from trivet.errors import PluginError, RequestError
from trivet_schemas.errors import ConfigError, Problem, show
from trivet_schemas.options import Options
from trivet_schemas.validation import validate_options

if TYPE_CHECKING:
    from trivet.context import Context, EngineContext
    from trivet.plan import Int32
    from trivet.state import Request, RequestTable


class NoOptions(Options):
    """A policy without options."""


class Policy:
    """Common part. ``options`` is an object of :attr:`options_model`, made from the keywords.

    Raises :class:`trivet_schemas.errors.ConfigError` for unknown keywords and bad values."""

    #: declares the options that a configuration may give, each with a default
    options_model: ClassVar[type[Options]] = NoOptions

    def __init__(self, **options: Any) -> None:
        self.options: Any = validate_options(self.options_model, options, "")

    def bind(self, context: EngineContext) -> None:
        """Called once before the first request, with table, cache and components in reach."""


class SchedulingPolicy(Policy, ABC):
    """The order of a waiting queue. All methods run on the engine's thread.

    Requests wait in *groups*, of which there is one unless :meth:`group` says otherwise. Within a group they are in
    ascending order of :meth:`key`, ties by arrival; the next request of the queue is the first one of the group with
    the least :meth:`rank`. Keys are read once, when a request is queued (again), and kept in a heap. Ranks may
    change with every step, and are asked for at each admission, once per group that waits: a step costs time per group,
    not per request."""

    #: whether a waiting request may take the place of a running one whose key is greater
    preempts: bool = False
    #: whether the token budget, and memory, go by key among running requests too, and not by admission
    orders_running: bool = False

    def validate(self, request: Request) -> None:
        """Raise :class:`trivet.errors.RequestError` for a request that this policy cannot place. It is not queued."""

    @abstractmethod
    def key(self, request: Request) -> Any:
        """The place of a request in its group; any value that can be compared with the others'."""

    def group(self, request: Request) -> Hashable:
        """The group that a request waits in; must not change."""
        return None

    def rank(self, group: Hashable) -> Any:
        """The place of a group among those that have waiting requests; the least is next."""
        return 0

    def queued(self, request: Request) -> None:
        """A request is about to be queued: a new one, or one that was preempted (``num_preemptions`` > 0)."""

    def admitted(self, request: Request) -> None:
        """A request left the queue and runs, with its slot and whatever was found in the cache."""

    def removed(self, request: Request) -> None:
        """A request left the queue by its end."""

    def begin_step(self) -> None:
        """A step is about to be planned; called only for policies that define it."""


class VictimPolicy(Policy, ABC):
    """Who is preempted when a running request lacks memory."""

    def order(self, slots: Int32, table: RequestTable) -> Int32:
        """``[n]`` running ``slots`` in the order in which memory goes to them; those that come after the one that lacks
        some may be chosen. The first must get on until it ends, or nobody would. Not asked when the scheduling policy
        orders running requests. ``slots`` are in admission order, which is the answer by default."""
        return slots

    @abstractmethod
    def choose(self, slots: Int32, table: RequestTable) -> int:
        """One of ``slots`` ``[n]``, n ≥ 1: those that may lose their blocks, in the order in which memory goes to
        them (by admission, unless one of the policies says otherwise), beginning with the one that lacks some."""


class KeyFunction(SchedulingPolicy):
    """A scheduling policy that is a plain function of the request."""

    def __init__(self, function: Callable[[Request], Any]) -> None:
        super().__init__()
        self._function = function

    def key(self, request: Request) -> Any:
        """See :meth:`SchedulingPolicy.key`."""
        return self._function(request)


class ChoiceFunction(VictimPolicy):
    """A victim policy that is a plain function of slots and table."""

    def __init__(self, function: Callable[[Int32, RequestTable], int]) -> None:
        super().__init__()
        self._function = function

    def choose(self, slots: Int32, table: RequestTable) -> int:
        """See :meth:`VictimPolicy.choose`."""
        return self._function(slots, table)


def make_scheduling_policy(
    context: Context, choice: str | Mapping[str, Any], path: str = "plugins.scheduler.policy"
) -> SchedulingPolicy:
    """The policy that a configuration names, with the options that it gives.

    Args:
        context: Where components are found.
        choice: A name, or a mapping with the name as ``use`` beside options.
        path: Where ``choice`` stands in the configuration.

    Raises:
        PluginError: If there is no such policy, or its factory made something else.
        ConfigError: If its options are wrong; names the place of each.
    """
    made = _make(context, "scheduling_policy", choice, path)
    if isinstance(made, SchedulingPolicy):
        return made
    if callable(made):
        return KeyFunction(made)
    raise PluginError(
        f"{path}: the factory made {made!r}, which is neither a trivet.policies.SchedulingPolicy nor a key"
    )


def make_victim_policy(
    context: Context, choice: str | Mapping[str, Any], path: str = "plugins.scheduler.victim"
) -> VictimPolicy:
    """As :func:`make_scheduling_policy`, for who is preempted."""
    made = _make(context, "victim_policy", choice, path)
    if isinstance(made, VictimPolicy):
        return made
    if callable(made):
        return ChoiceFunction(made)
    raise PluginError(
        f"{path}: the factory made {made!r}, which is neither a trivet.policies.VictimPolicy nor a function"
    )


def _make(context: Context, kind: str, choice: str | Mapping[str, Any], path: str) -> Any:
    options = {} if isinstance(choice, str) else {key: value for key, value in choice.items() if key != "use"}
    name = choice if isinstance(choice, str) else choice["use"]
    try:
        return context.component(kind, name, **options)
    except ConfigError as error:
        raise context.config.error([problem.under(path) for problem in error.problems]) from None
    except PluginError as error:
        place = context.config.locate(path)
        source = f"{context.config.source}: " if place.line is not None and context.config.source else ""
        raise PluginError([f"{source}{Problem(path, problem).at(place)}" for problem in error.problems]) from None
    except TypeError as error:
        if not options:
            raise
        # A function says nothing of its keywords before it is called.
        raise PluginError(f"{path}: {kind} {name!r} cannot be made with {options}: {error}") from error


def request_detail(request: Request, name: str) -> Any:
    """What a request says of itself to plugins: ``extra[name]`` as text, else ``extra_args[name]`` of its parameters,
    else None.

    Raises :class:`trivet.errors.RequestError` when the bytes of ``extra`` are no UTF-8."""
    raw = request.extra.get(name)
    if raw is not None:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            where = detail_place(request, name)
            raise RequestError(f"{where}: must be UTF-8, got {show(raw)}", param=where) from None
    return (getattr(request.params, "extra_args", None) or {}).get(name)


def detail_place(request: Request, name: str) -> str:
    """Where :func:`request_detail` found ``name``, for messages: ``extra['user']`` or ``extra_args.user``."""
    return f"extra[{name!r}]" if name in request.extra else f"extra_args.{name}"
