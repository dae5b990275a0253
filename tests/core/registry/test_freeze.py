"""The freeze: what ``trivet_extend`` builds, hooks that plugins offer, and the refusal of every later change."""

from __future__ import annotations

from typing import Any

import pytest

from trivet.errors import PluginError
from trivet.hookspecs import hookimpl, hookspec
from trivet.roles import Side


class Extending:
    """A plugin whose ``trivet_extend`` returns what a test gives it."""

    def __init__(self, *built: Any) -> None:
        self.built = built
        self.sides: list[Side] = []

    @hookimpl
    def trivet_extend(self, context: Any) -> Any:
        self.sides.append(context.side)
        return list(self.built)


class Watcher:
    def __init__(self) -> None:
        self.told: list[Any] = []

    @hookimpl
    def trivet_step_finished(self, event: Any) -> None:
        self.told.append(event)


class TestExtend:
    def test_what_it_returns_is_registered_after_the_plugins(self, world: Any) -> None:
        first, second = Watcher(), Watcher()
        registry = world.registry(None, Extending(second), first)
        hooks = registry.freeze()
        hooks.step_finished("event")
        assert first.told == second.told == ["event"]
        assert registry.hook_order()["trivet_step_finished"] == ["Watcher", "Extending.Watcher"]

    def test_it_is_asked_once_on_each_side(self, world: Any) -> None:
        plugin = Extending()
        registry = world.registry(None, plugin)
        registry.freeze()
        registry.worker_context(max_num_seqs=1, max_num_batched_tokens=1)
        assert plugin.sides == [Side.ENGINE, Side.WORKER]

    def test_it_may_use_the_context(self, world: Any, my_scheduler: Any) -> None:
        seen: list[Any] = []

        class Curious:
            @hookimpl
            def trivet_extend(self, context: Any) -> Any:
                seen.append((context.get("scheduler"), context.config.model))
                return []

        world.registry(None, my_scheduler, Curious()).freeze()
        assert seen == [(my_scheduler, "demo")]

    def test_what_it_returns_is_validated_like_a_plugin(self, world: Any) -> None:
        class Bad:
            @hookimpl
            def trivet_schedule(self, inputs: Any) -> Any: ...

            @hookimpl
            def trivet_step_finished(self, evnt: Any) -> None: ...

            @hookimpl
            def trivet_providers(self) -> Any: ...

        registry = world.registry(None, Extending(Bad(), Watcher, 3))
        with pytest.raises(PluginError) as caught:
            registry.freeze()
        text = str(caught.value)
        for part in (
            "plugin 'Extending.Bad'",
            "implements a phase",
            "takes 'evnt'",
            "'trivet_providers' is asked before trivet_extend",
            "Watcher is a class, not an object; have you forgotten the ()?",
            "3 has no hook implementation",
        ):
            assert part in text

    def test_a_roles_object_is_not_offered_this_way(self, world: Any, my_scheduler: Any) -> None:
        with pytest.raises(PluginError, match="offer a role's object through trivet_providers"):
            world.registry(None, Extending(my_scheduler)).freeze()

    def test_one_that_raises_is_named(self, world: Any) -> None:
        class Faulty:
            @hookimpl
            def trivet_extend(self, context: Any) -> Any:
                raise ValueError("boom")

        with pytest.raises(PluginError, match="plugin 'Faulty' .*trivet_extend at .* raised ValueError: boom"):
            world.registry(None, Faulty()).freeze()

    def test_extensions_of_an_installed_plugin_have_its_distribution(self, world: Any) -> None:
        world.plugin(
            "mark",
            "class W:\n    @hookimpl\n    def trivet_step_finished(self, event): ...\n\n"
            "@hookimpl\ndef trivet_extend(context):\n    return [W()]\n",
            distribution="acme-mark",
        )
        registry = world.registry({"extension": ["mark"]})
        registry.freeze()
        (found,) = (plugin for plugin in registry.plugins() if plugin.name == "mark.W")
        assert (found.origin, found.distribution, found.active) == ("extension", "acme-mark", True)

    def test_entry_points_are_shared_but_extensions_belong_to_one_engine(self, world: Any) -> None:
        world.plugin(
            "count",
            """
            MADE = {}

            class W:
                def __init__(self):
                    self.seen = MADE[id(self)] = []

                @hookimpl
                def trivet_step_finished(self, event):
                    self.seen.append(event)

            @hookimpl
            def trivet_extend(context):
                return [W()]
            """,
        )
        first, second = (world.registry({"extension": ["count"]}).freeze() for _ in range(2))
        first.step_finished(1)
        second.step_finished(2)
        import count_plugin

        assert sorted(count_plugin.MADE.values()) == [[1], [2]]


class Specs:
    """Hooks that a plugin offers to others."""

    @hookspec
    def acme_paint(self, colour: str) -> str:  # type: ignore[empty-body]
        """Answer with the painted colour."""


class Offering:
    @hookimpl
    def trivet_add_hookspecs(self) -> Any:
        return [Specs]


class Painter:
    @hookimpl
    def acme_paint(self, colour: str) -> str:
        return f"painted {colour}"


class TestOfferedHooks:
    def test_a_plugin_offers_hooks_to_others_whatever_the_order(self, world: Any) -> None:
        for objects in ((Offering(), Painter()), (Painter(), Offering())):
            registry = world.registry(None, *objects)
            with pytest.raises(PluginError, match="before the freeze"):
                registry.engine_context.hook("acme_paint")
            registry.freeze()
            assert registry.engine_context.hook("acme_paint")(colour="red") == ["painted red"]

    def test_they_are_validated_like_the_cores(self, world: Any) -> None:
        class Misspelt:
            @hookimpl
            def acme_paint(self, color: str = "red") -> str:
                return color

        assert "takes 'color', which the hook does not have; did you mean 'colour'?" in world.problem(
            None, Offering(), Misspelt()
        )

    def test_the_offering_plugin_must_be_active(self, world: Any) -> None:
        world.plugin(
            "paint",
            "class Specs:\n    @hookspec\n    def acme_paint(self, colour): ...\n\n"
            "@hookimpl\ndef trivet_add_hookspecs():\n    return [Specs]\n",
        )
        problem = world.problem(None, Painter())
        assert "unknown hook 'acme_paint'" in problem
        assert "plugin 'paint' (acme-paint 1.0" in problem
        assert "is not active; name it in the configuration" in problem
        assert world.registry({"extension": ["paint"]}, Painter()).freeze()

    def test_two_plugins_that_offer_one_hook(self, world: Any) -> None:
        class Again(Offering):
            pass

        problem = world.problem(None, Offering(), Again())
        assert "plugin 'Again'" in problem
        assert "offers the hook 'acme_paint', which plugin 'Offering'" in problem

    def test_the_cores_hooks_are_the_engines_to_call(self, world: Any) -> None:
        registry = world.registry(None, Offering())
        registry.freeze()
        with pytest.raises(PluginError, match="unknown hook offered by a plugin 'trivet_schedule'"):
            registry.engine_context.hook("trivet_schedule")


class TestFrozen:
    def test_nothing_can_be_changed_afterwards(self, world: Any) -> None:
        registry = world.registry(None, Watcher())
        registry.freeze()
        manager = registry.engine_context.manager
        assert manager is not None
        ((name, registered),) = ((n, p) for n, p in manager.list_name_plugin() if n.endswith("Watcher"))
        for change in (
            lambda: manager.register(Watcher()),
            lambda: manager.unregister(registered),
            lambda: manager.unregister(name=name),
            lambda: manager.set_blocked(name),
            lambda: manager.unblock(name),
            lambda: manager.add_hookspecs(Specs),
        ):
            with pytest.raises(PluginError, match="the plugins of a running engine are frozen"):
                change()
        assert manager.get_plugin(name) is registered

    def test_the_freeze_happens_once(self, world: Any) -> None:
        registry = world.registry()
        registry.freeze()
        with pytest.raises(PluginError, match="frozen already"):
            registry.freeze()

    def test_every_engine_and_worker_has_a_manager_of_its_own(self, world: Any) -> None:
        first, second = world.registry(), world.registry()
        first.freeze()
        second.freeze()
        worker = first.worker_context(max_num_seqs=1, max_num_batched_tokens=1)
        managers = {id(context.manager) for context in (first.engine_context, second.engine_context, worker)}
        assert len(managers) == 3
