"""What the suites share: how a provider is named and built, engines on the fakes, and messages that name the rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from trivet.testing import fakes

if TYPE_CHECKING:
    from hypothesis import settings as Settings  # noqa: N812

    from trivet.engine import Engine
    from trivet.registry import EngineContextImpl, WorkerContextImpl
    from trivet_schemas.config import EngineConfig

_FAKE_ROLES = ("model", "attention", "sampler", "runner", "tokenizer")


def require(holds: object, rule: str, where: object, /, **found: object) -> None:
    """Fail with the rule that was broken, where it is documented, and what was found instead.

    Args:
        holds: Whether the rule holds.
        rule: The rule, as a sentence about what a provider must do.
        where: The method, property or class whose docstring has the rule, or the name of a page.
        found: Values that show how it was broken.
    """
    __tracebackhide__ = True
    if holds:
        return
    lines = [f"broken rule: {rule}", f"  documented at: {place(where)}"]
    lines += [f"  {name.replace('_', ' ')}: {value}" for name, value in found.items()]
    raise AssertionError("\n".join(lines))


def place(where: object) -> str:
    """``trivet.roles.Cache.extend`` for a function, property or class; a string stays as it is."""
    if isinstance(where, str):
        return where
    target: Any = where.fget if isinstance(where, property) else where
    module = "trivet.roles" if target.__module__.startswith("trivet.roles") else target.__module__
    return f"{module}.{target.__qualname__}"


Test = TypeVar("Test", bound=Callable[..., None])


def promised(*flags: str) -> Callable[[Test], Test]:
    """Marks a test that is run only when all class attributes ``flags`` are set."""

    def mark(test: Test) -> Test:
        test.__dict__["promises"] = flags
        return test

    return mark


class Suite:
    """Base of the conformance suites. A subclass in a test file names the provider; pytest runs the tests.

    ::

        class TestMyCache(CacheSuite):
            plugins = (my_package.plugin,)
            use = "my_cache"
            options = {"block_size": 8}

    Class attributes that a subclass sets say what the provider promises beyond its role's contract; tests of promises
    that it does not make are not run."""

    role: ClassVar[str]
    #: modules, objects or descriptors that offer the provider; none are needed for an installed entry point
    plugins: ClassVar[Sequence[object]] = ()
    #: the provider's name
    use: ClassVar[str]
    #: its options, as in a configuration file
    options: ClassVar[Mapping[str, Any]] = {}
    #: what ``config.model`` names; providers that load files override it
    model: ClassVar[str] = "fake"
    #: torch's name of the device that contexts are given
    device: ClassVar[str] = "cpu"
    #: how many random cases each property is tried with
    examples: ClassVar[int] = 20

    #: tests of promises, whether a class makes them or not
    _promised: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Hide the tests of promises that ``cls`` does not make; pytest takes None for no test."""
        super().__init_subclass__(**keywords)
        inherited = [getattr(base, "_promised", {}) for base in reversed(cls.__mro__)]
        own = {name: test for name, test in vars(cls).items() if getattr(test, "promises", ())}
        cls._promised = {name: test for tests in (*inherited, own) for name, test in tests.items()}
        for name, test in cls._promised.items():
            setattr(cls, name, test if all(getattr(cls, flag) for flag in test.promises) else None)

    # ------------------------------------------------------------------ building

    def make(self, context: Any, **options: Any) -> Any:
        """A new provider object; override it for one that is not built from its descriptor.

        Args:
            context: A real engine's or worker's context, whichever side the role lives on.
            options: Options of this one object, beside :attr:`options`.
        """
        return context.build(self.role, self.use, **{**self.options, **options})

    def config(self, **fields: Any) -> EngineConfig:
        """The configuration behind the contexts; fakes for the roles that it does not name."""
        from trivet_schemas.config import EngineConfig

        roles: dict[str, Any] = {role: {"use": "fake"} for role in _FAKE_ROLES if role != self.role}
        plugins = roles | {"executor": {"use": "inline"}, "cache": {"use": "paged"}, "scheduler": {"use": "continuous"}}
        plugins |= {self.role: self.selection()} | fields.pop("plugins", {})
        return EngineConfig(
            **{"model": self.model, "dtype": "float32", "device": self.device, "plugins": plugins} | fields
        )

    def selection(self, **options: Any) -> Any:
        """The provider as the configuration names it; a list for roles that take many."""
        from trivet.roles.base import CARDINALITY, Cardinality

        one = {"use": self.use, **self.options, **options}
        many = CARDINALITY[self.role] in {Cardinality.MANY, Cardinality.PER_REQUEST}
        return [one] if many else one

    def all_plugins(self, *more: object) -> list[object]:
        """The fakes, the provider's plugins and ``more``, each once."""
        found: list[object] = [fakes]
        for plugin in (*self.plugins, *more):
            if not any(plugin is known for known in found):
                found.append(plugin)
        return found

    def engine_context(self, *more: object, **fields: Any) -> EngineContextImpl:
        """A new context of the engine's side, without an engine; with ``more`` plugins and other configuration."""
        from trivet.registry import Registry

        return Registry(self.config(**fields), self.all_plugins(*more), required=()).engine_context

    def worker_context(
        self, *more: object, max_num_seqs: int = 8, tokenizer_size: int | None = None, **fields: Any
    ) -> Any:
        """A new context of a worker's side, without an engine; with ``more`` plugins and other configuration."""
        from trivet.registry import Registry

        registry = Registry(self.config(**fields), self.all_plugins(*more), required=())
        context: WorkerContextImpl = registry.worker_context(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=256, tokenizer_size=tokenizer_size
        )
        return context

    @contextmanager
    def engine(self, *more: object, max_model_len: int | None = 96, **roles: Any) -> Iterator[Engine]:
        """A real engine in which the provider has its role and fakes have most of the others.

        Args:
            more: Further plugins.
            max_model_len: Context length.
            roles: Selections for roles, in place of the suite's own.
        """
        from trivet.engine import Engine

        small = {
            "cache": {"use": "paged", "block_size": 4},
            "scheduler": {"use": "continuous", "max_num_batched_tokens": 32, "max_num_seqs": 8},
        }
        small.pop(self.role, None)
        engine = Engine(self.config(max_model_len=max_model_len, plugins=small | roles), self.all_plugins(*more))
        try:
            yield engine
        finally:
            engine.shutdown()

    def budget(self, **changes: Any) -> Settings:
        """How hypothesis explores: :attr:`examples` cases, the same ones in every run."""
        from hypothesis import HealthCheck, settings

        given = {
            "max_examples": self.examples,
            "deadline": None,
            "derandomize": True,
            "database": None,
            "report_multiple_bugs": False,
        }
        return settings(**given | {"suppress_health_check": list(HealthCheck)} | changes)


class ArraySuite(Suite):
    """Base of the suites whose providers work on tensors. A subclass says how numpy arrays become tensors and back;
    here they stay numpy arrays. For torch, derive from ``trivet_torch.testing.TorchArrays`` first."""

    #: floating point types that :meth:`tensor` can make
    float_types: ClassVar[Sequence[str]] = ("float32",)

    @cached_property
    def worker(self) -> Any:
        """A worker's context that the objects of one test share."""
        return self.worker_context(max_num_seqs=16)

    def tensor(self, array: Any, dtype: str | None = None) -> Any:
        """A tensor of ``array`` on the provider's device; ``dtype`` names another type, such as ``bfloat16``."""
        return array if dtype is None else array.astype(dtype)

    def numpy(self, tensor: Any) -> Any:
        """A numpy array of a tensor; types that numpy lacks become float32."""
        import numpy as np

        return np.asarray(tensor)
