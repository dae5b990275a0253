"""Contexts: providers are built on first use by their factories, and shut down in reverse order."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trivet.context import Hold
from trivet.errors import PluginError
from trivet.provider import Provider
from trivet.registry import Registry
from trivet.roles import Cache, Scheduler

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32}

# Classes that record what happens to them; a test reads `parts.LOG`.
PARTS = """
from fakes import concrete

LOG = []


class Recorded:
    def __init__(self, context, options):
        self.context, self.options = context, options
        LOG.append(f"build {self.role}")

    def shutdown(self):
        LOG.append(f"stop {self.role}")


def recorded(role):
    base = concrete(role)
    members = {name: getattr(Recorded, name) for name in ("__init__", "shutdown")}
    return type("Recorded" + base.__name__, (base,), members)


Scheduler, Cache, Tokenizer, Model = map(recorded, ("scheduler", "cache", "tokenizer", "model"))


class NeedsCache(Scheduler):
    def __init__(self, context, options):
        super().__init__(context, options)
        self.cache = context.get("cache")


class NeedsScheduler(Cache):
    def __init__(self, context, options):
        super().__init__(context, options)
        self.scheduler = context.get("scheduler")


class FailsToStop(Cache):
    def shutdown(self):
        raise RuntimeError("stuck")


class NoBase:
    def __init__(self, context, options): ...


class OneArgument(Scheduler):
    def __init__(self, context): ...


from trivet.roles import Cache as AbstractCache, Connector, TransferWorker


class Half(AbstractCache):
    def stats(self): ...


number = 3


def make_none(context, options):
    return None


class Worker(TransferWorker):
    def __init__(self, context, options):
        self.context, self.options = context, options

    def bind(self, attention): ...
    def submit(self, transfer, *, store): ...
    def poll(self): ...

    def shutdown(self):
        LOG.append("stop worker half")
"""


def setup(world: Any, **factories: str) -> Registry:
    """A registry whose provider of each role is the named class of the module ``parts``."""
    world.module("parts", PARTS)
    objects = [Provider(role, f"the_{role}", f"parts:{name}") for role, name in factories.items()]
    return world.registry(None, *objects)


def log() -> list[str]:
    import parts

    return parts.LOG


class TestBuilding:
    def test_a_provider_is_built_on_first_use_and_once(self, world: Any) -> None:
        registry = setup(world, scheduler="Scheduler", cache="Cache")
        context = registry.engine_context
        first = context.get("scheduler")
        assert context.get("scheduler") is first
        assert isinstance(first, Scheduler)
        assert first.context is context
        assert log() == ["build scheduler"]

    def test_the_factory_is_imported_only_when_needed(self, world: Any) -> None:
        import sys

        registry = setup(world, cache="Cache")
        assert "parts" not in sys.modules
        registry.engine_context.get("cache")
        assert "parts" in sys.modules

    def test_one_provider_may_ask_for_another(self, world: Any) -> None:
        context = setup(world, scheduler="NeedsCache", cache="Cache").engine_context
        assert context.get("scheduler").cache is context.get("cache")

    def test_a_circle_is_named(self, world: Any) -> None:
        context = setup(world, scheduler="NeedsCache", cache="NeedsScheduler").engine_context
        circle = "scheduler 'the_scheduler' -> cache 'the_cache' -> scheduler 'the_scheduler'"
        with pytest.raises(PluginError, match=circle):
            context.get("scheduler")
        with pytest.raises(PluginError, match="need each other"):  # and nothing is left half-built
            context.get("cache")

    def test_a_further_instance_has_its_own_options_and_is_not_kept(self, world: Any) -> None:
        offer = Provider("drafter", "ngram", "fakes:Drafter", options="fakes:SizeOptions")
        context = world.registry(None, offer).engine_context
        other = context.build("drafter", "ngram", size=9)
        assert other.options.size == 9
        (own,) = context.all("drafter")
        assert own is not other
        assert own.options.size == 4
        with pytest.raises(PluginError, match="unknown key 'siez'; did you mean 'size'?"):
            context.build("drafter", "ngram", siez=9)
        with pytest.raises(PluginError, match="unknown plugin 'ngrm' for role 'drafter'; did you mean 'ngram'?"):
            context.build("drafter", "ngrm")

    def test_a_further_instance_may_see_another_configuration(self, world: Any) -> None:
        context = setup(world, scheduler="Scheduler", cache="NeedsScheduler").engine_context
        other = context.config.model_copy(update={"model": "draft"})
        second = context.build("scheduler", "the_scheduler", config=other)
        assert second.context.config.model == "draft"
        dependent = context.build("cache", "the_cache", config=other)
        assert dependent.scheduler is context.get("scheduler"), "what it asks for is the engine's own"
        assert context.get("scheduler").context.config is context.config

    def test_a_provider_without_options_gets_an_empty_model(self, world: Any) -> None:
        assert setup(world, cache="Cache").engine_context.get("cache").options.model_dump() == {}

    @pytest.mark.parametrize(
        ("name", "part"),
        [
            ("NoBase", "must be derived from trivet.roles.Cache"),
            ("Half", "does not implement admit, allocate"),
            ("Missing", "module 'parts' has no 'Missing'"),
            ("number", "cannot be called"),
            ("make_none", "which is no trivet.roles.Cache"),
        ],
    )
    def test_a_factory_that_cannot_be_used(self, world: Any, name: str, part: str) -> None:
        context = setup(world, cache=name).engine_context
        if name == "Half":
            part = "does not implement " + ", ".join(sorted(set(Cache.__abstractmethods__) - {"stats"}))
        with pytest.raises(PluginError, match=part) as caught:
            context.get("cache")
        assert "provider 'the_cache' of plugin 'the_cache'" in str(caught.value)

    def test_a_factory_with_another_signature(self, world: Any) -> None:
        with pytest.raises(PluginError, match=r"is called as factory\(context, options\), but takes \(context\)"):
            setup(world, scheduler="OneArgument").engine_context.get("scheduler")

    def test_a_factory_that_does_not_import(self, world: Any) -> None:
        context = world.registry(None, Provider("cache", "c", "no_such_module:Cache")).engine_context
        with pytest.raises(PluginError, match="'no_such_module:Cache' cannot be imported: ModuleNotFoundError"):
            context.get("cache")

    def test_all_factories_are_checked_at_once_before_the_freeze(self, world: Any) -> None:
        world.module("parts", PARTS)
        world.bundle(
            a="@hookimpl\ndef trivet_providers():\n"
            '    return [Provider("cache", "c", "parts:NoBase"), Provider("scheduler", "s", "parts:OneArgument")]\n'
        )
        with pytest.raises(PluginError) as caught:
            world.registry({"cache": "c", "scheduler": "s"}).freeze()
        assert len(caught.value.problems) == 2

    def test_a_reducer_that_does_not_import(self, world: Any) -> None:
        registry = world.registry(
            {"cache": "c"}, Provider("cache", "c", "fakes:Cache", reducers={"stats": "fakes:no_such_function"})
        )
        with pytest.raises(PluginError, match="reducer 'stats' 'fakes:no_such_function'"):
            registry.freeze()

    def test_reducers_of_selected_providers(self, world: Any) -> None:
        from trivet.result import first

        registry = world.registry(
            None, Provider("cache", "c", "fakes:Cache", reducers={"stats": "trivet.result:first"})
        )
        assert registry.reducers() == {"stats": first}


class TestRoles:
    def test_one_and_many(self, world: Any) -> None:
        context = world.registry(None, world.object("grammar"), world.object("grammar")).engine_context
        assert len(context.all("grammar")) == 2
        assert context.get("connector") is None
        assert context.all("cache_tier") == ()
        with pytest.raises(PluginError, match="takes several providers; use all"):
            context.get("grammar")
        with pytest.raises(PluginError, match="unknown role 'grammer'; did you mean 'grammar'?"):
            context.all("grammer")

    def test_a_role_of_the_other_side_is_out_of_reach(self, world: Any, my_scheduler: Any) -> None:
        registry = world.registry(None, my_scheduler, world.object("model"))
        with pytest.raises(PluginError, match="role 'model' lives on the worker's side"):
            registry.engine_context.get("model")
        worker = registry.worker_context(**SIZES)
        assert worker.get("model") is not None
        with pytest.raises(PluginError, match="role 'scheduler' lives on the engine's side"):
            worker.get("scheduler")

    def test_the_engine_and_the_worker_have_their_own_grammars(self, world: Any) -> None:
        registry = world.registry({"grammar": ["g"]}, Provider("grammar", "g", "fakes:Grammar"))
        worker = registry.worker_context(**SIZES)
        (ours,), (theirs,) = registry.engine_context.all("grammar"), worker.all("grammar")
        assert ours is not theirs
        assert (ours.context, theirs.context) == (registry.engine_context, worker)

    def test_a_worker_in_the_engines_process_shares_its_tokenizer(self, world: Any) -> None:
        registry = setup(world, tokenizer="Tokenizer")
        worker = registry.worker_context(**SIZES)
        assert worker.get("tokenizer") is registry.engine_context.get("tokenizer")
        assert log() == ["build tokenizer"]

    def test_a_worker_gets_the_worker_halves_of_connectors_and_tiers(self, world: Any) -> None:
        world.module("parts", PARTS)
        registry = world.registry(
            None,
            Provider("connector", "c", "fakes:Connector", worker_factory="parts:Worker", options="fakes:SizeOptions"),
            Provider("cache_tier", "with", "fakes:CacheTier", worker_factory="parts:Worker"),
            Provider("cache_tier", "without", "fakes:CacheTier"),
        )
        worker = registry.worker_context(**SIZES)
        half = worker.get("connector")
        assert type(half).__name__ == "Worker"
        assert half.context is worker
        assert half.options.size == 4
        assert type(registry.engine_context.get("connector")).__name__ == "Connector"
        assert len(worker.all("cache_tier")) == 1
        assert len(registry.engine_context.all("cache_tier")) == 2

    def test_a_worker_half_of_another_class(self, world: Any) -> None:
        registry = world.registry(None, Provider("connector", "c", "fakes:Connector", worker_factory="fakes:Connector"))
        with pytest.raises(PluginError, match=r"is no trivet.roles.TransferWorker"):
            registry.worker_context(**SIZES).get("connector")

    def test_an_object_without_a_worker_half_has_none(self, world: Any) -> None:
        worker = world.registry(None, world.object("connector")).worker_context(**SIZES)
        assert worker.get("connector") is None

    def test_what_a_worker_is_told(self, world: Any) -> None:
        context = world.registry().engine_context
        context.prepare_workers(max_num_seqs=4, max_num_batched_tokens=32, tokenizer_size=99)
        worker = context.worker_context(rank=1, world_size=2, device="cpu")
        assert (worker.rank, worker.world_size, worker.device) == (1, 2, "cpu")
        assert (worker.max_num_seqs, worker.max_num_batched_tokens, worker.tokenizer_size) == (4, 32, 99)
        assert worker.side.value == "worker"
        assert context.worker_context().device == "auto"


class TestShutdown:
    def test_in_reverse_order_of_building_and_once(self, world: Any) -> None:
        registry = setup(world, scheduler="NeedsCache", cache="Cache", tokenizer="Tokenizer")
        registry.engine_context.get("tokenizer")
        registry.engine_context.get("scheduler")
        registry.shutdown()
        registry.shutdown()
        assert log()[-3:] == ["stop scheduler", "stop cache", "stop tokenizer"]
        assert len(log()) == 6

    def test_one_that_fails_is_logged_and_the_others_are_stopped(
        self, world: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        registry = setup(world, tokenizer="Tokenizer", cache="FailsToStop")
        registry.engine_context.get("tokenizer")
        registry.engine_context.get("cache")
        with caplog.at_level(logging.ERROR, logger="trivet.registry"):
            registry.shutdown()
        assert log()[-1] == "stop tokenizer"
        (record,) = caplog.records
        assert "provider 'the_cache'" in record.getMessage()
        assert "stuck" in str(record.exc_info)

    def test_an_embedders_objects_are_stopped_once_even_if_nobody_asked_for_them(self, world: Any) -> None:
        stopped: list[str] = []
        make = [
            world.object(role, shutdown=lambda self: stopped.append(self.role))
            for role in ("scheduler", "model", "logits_processor")
        ]
        registry = world.registry(None, *make)
        worker = registry.worker_context(**SIZES)
        worker.get("model")
        worker.shutdown_all()
        assert stopped == ["model", "logits_processor"]
        registry.shutdown()
        assert sorted(stopped) == ["logits_processor", "model", "scheduler"]

    def test_workers_left_over_are_stopped_with_the_registry(self, world: Any) -> None:
        registry = setup(world, model="Model", connector="Connector")
        registry.worker_context(**SIZES).get("model")
        registry.shutdown()
        assert log() == ["build model", "stop model"]


class TestHolds:
    def test_holds_are_the_engines(self, world: Any) -> None:
        context = world.registry().engine_context
        calls: list[Any] = []
        hold = Hold("grammar", "outlines", "compiling", 0.0)
        with pytest.raises(RuntimeError, match="once the engine runs"):
            context.hold("r1", hold)
        context.on_hold = lambda *arguments: calls.append(("hold", *arguments))
        context.on_release = lambda *arguments: calls.append(("release", *arguments))
        context.hold("r1", hold)
        context.release("r1", "outlines", "grammar")
        assert calls == [("hold", "r1", hold), ("release", "r1", "outlines", "grammar")]
