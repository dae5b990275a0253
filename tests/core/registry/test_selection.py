"""Selection: names, ``auto``, objects, cardinalities, options, extensions."""

from __future__ import annotations

from typing import Any

import pytest

from trivet.errors import PluginError
from trivet.hookspecs import hookimpl
from trivet.provider import Component, Provider
from trivet.registry import Registry
from trivet.registry.selection import BUNDLED_PACKAGES
from trivet_schemas.options import Options
from trivet_schemas.yaml_io import load_config_file


def provider(role: str, name: str, factory: str, **fields: str) -> str:
    """The source of a descriptor."""
    extra = "".join(f", {key}={value}" for key, value in fields.items())
    return f'Provider("{role}", "{name}", "fakes:{factory}"{extra})'


def offering(*offers: str, before: str = "") -> str:
    return f"{before}\n@hookimpl\ndef trivet_providers():\n    return [{', '.join(offers)}]\n"


def ranked(name: str, rank: int | None, reason: str) -> str:
    return provider("cache", name, "Cache", suits=f'lambda context: Suitability({rank}, "{reason}")')


def chosen(registry: Registry, role: str) -> list[str]:
    (report,) = (report for report in registry.report() if report.role == role)
    return [choice.provider for choice in report.chosen]


def why(registry: Registry, role: str) -> str:
    (report,) = (report for report in registry.report() if report.role == role)
    return report.chosen[0].why


class TestNamed:
    def test_an_unknown_name_suggests_and_lists(self, world: Any) -> None:
        world.bundle(a=offering(provider("scheduler", "continuous", "Scheduler"), provider("cache", "paged", "Cache")))
        problem = world.problem({"scheduler": {"use": "continous"}})
        for part in ("plugins.scheduler", "'continous'", "did you mean 'continuous'?", "available: 'continuous'"):
            assert part in problem
        assert "'paged' is a provider of role 'cache'" in world.problem({"scheduler": "paged"})

    def test_a_name_that_only_extends_is_told_where_it_goes(self, world: Any) -> None:
        world.plugin("spy", "@hookimpl\ndef trivet_engine_started(context): ...\n")
        assert "plugins.extension" in world.problem({"scheduler": "spy"})

    def test_the_line_of_the_file_is_named(self, world: Any, tmp_path: Any) -> None:
        file = tmp_path / "config.yaml"
        file.write_text("model: demo\nplugins:\n  scheduler:\n    use: nobody\n", encoding="utf-8")
        with pytest.raises(PluginError, match=r"plugins.scheduler \(line 3\): unknown plugin 'nobody'"):
            Registry(load_config_file(str(file)), required=())

    def test_two_providers_of_one_name_are_ambiguous(self, world: Any) -> None:
        first = world.offering("one", provider("scheduler", "mine", "Scheduler"), distribution="acme-one")
        second = world.offering("two", provider("scheduler", "mine", "Scheduler"), distribution="acme-two")
        problem = world.problem({"scheduler": "mine"})
        for part in ("'mine' is ambiguous", "acme-one 1.0", "acme-two 1.0", str(first), str(second)):
            assert part in problem
        assert chosen(world.registry(), "scheduler") == []  # no obstacle while nobody names it

    def test_a_strangers_provider_cannot_take_a_bundled_name_silently(self, world: Any) -> None:
        world.bundle(paged=offering(provider("cache", "paged", "Cache")))
        world.offering("theirs", provider("cache", "paged", "Cache"), distribution="acme-cache")
        problem = world.problem({"cache": "paged"})
        assert "trivet 7.7" in problem
        assert "acme-cache 1.0" in problem
        assert chosen(world.registry(required=["cache"]), "cache") == ["paged"]  # auto asks the bundled ones only

    @pytest.mark.parametrize(
        ("descriptor", "part"),
        [
            (provider("scheduler", "mine", "Scheduler", api="(2, 0)"), "for plugin API 2.0, this Trivet has 1.0"),
            (provider("scheduler", "mine", "Scheduler", api="(1, 7)"), "written for plugin API 1.7"),
            ('Provider("scheduler", "mine", "fakes.Scheduler")', "factory must be 'package.module:Class'"),
            ('Provider("scheduler", "mine", "fakes:Scheduler", options="fakes")', "options must be a model class"),
            ('Provider("scheduler", "mine", "fakes:Scheduler", suits=3)', "suits must be a function"),
            ('Provider("scheduler", "mine", "fakes:Scheduler", worker_factory="x")', "worker_factory must be"),
            ('Provider("scheduler", "mine", "fakes:Scheduler", reducers={"x": "y"})', "reducer 'x' must be"),
        ],
    )
    def test_a_wrong_descriptor_is_refused(self, world: Any, descriptor: str, part: str) -> None:
        world.offering("acme", descriptor, distribution="acme-sched")
        problem = world.problem({"scheduler": "mine"})
        assert part in problem
        assert "acme-sched 1.0" in problem
        assert world.registry() is not None

    def test_an_unknown_role_of_a_descriptor(self, world: Any) -> None:
        world.bundle(a=offering('Provider("schedular", "mine", "fakes:Scheduler")', provider("cache", "c", "Cache")))
        (problem,) = world.problems({"cache": "c"})
        assert "unknown role 'schedular'; did you mean 'scheduler'?" in problem

    def test_a_name_twice_in_one_plugin(self, world: Any) -> None:
        world.bundle(a=offering(provider("cache", "c", "Cache"), provider("cache", "c", "Cache")))
        assert "offers the provider 'c' for role 'cache' twice" in world.problem({"cache": "c"})

    def test_a_missing_extra_is_named(self, world: Any) -> None:
        needs = provider("cache", "c", "Cache", requires='{"no_such_module": "fast"}')
        world.bundle(a=offering(needs))
        assert 'pip install "trivet[fast]"' in world.problem({"cache": "c"})
        world.bundle()
        world.offering("theirs", needs, distribution="acme-cache")
        assert 'pip install "acme-cache[fast]"' in world.problem({"cache": "c"})

    def test_what_the_distribution_itself_brings_is_no_extra(self, world: Any) -> None:
        world.bundle(a=offering(provider("cache", "c", "Cache", requires='{"no_such_module": ""}')))
        assert world.problem({"cache": "c"}).endswith("which is not installed: pip install trivet")


class TestAuto:
    def test_the_highest_rank_wins_and_the_reasons_are_kept(self, world: Any) -> None:
        offers = ranked("low", 1, "a baseline"), ranked("high", 9, "it fits"), ranked("no", None, "no GPU")
        world.bundle(a=offering(*offers))
        registry = world.registry(required=["cache"])
        assert chosen(registry, "cache") == ["high"]
        assert why(registry, "cache") == "auto: it fits"
        (report,) = (report for report in registry.report() if report.role == "cache")
        assert {(c.provider, c.rank, c.reason) for c in report.candidates} == {
            ("low", 1, "a baseline"),
            ("high", 9, "it fits"),
            ("no", None, "no GPU"),
        }

    def test_a_tie_is_an_error_that_names_both(self, world: Any) -> None:
        world.bundle(a=offering(ranked("left", 5, "so fast")), b=offering(ranked("right", 5, "so small")))
        (problem,) = world.problems({"cache": "auto"})
        for part in ("auto cannot decide", "'left'", "so fast", "'right'", "so small", "rank 5"):
            assert part in problem

    def test_when_nobody_can_serve_every_reason_is_shown(self, world: Any) -> None:
        world.bundle(a=offering(ranked("x", None, "no GPU"), ranked("y", None, "wrong dtype")))
        (problem,) = world.problems(required=["cache"])
        assert "no bundled provider can serve role 'cache' here (x: no GPU; y: wrong dtype)" in problem

    def test_a_missing_extra_counts_as_unable(self, world: Any) -> None:
        requires = '{"no_such_module": "triton"}'
        gpu = provider("cache", "gpu", "Cache", requires=requires, suits="lambda c: Suitability(9, '')")
        world.bundle(a=offering(gpu, ranked("cpu", 1, "everywhere")))
        registry = world.registry(required=["cache"])
        assert chosen(registry, "cache") == ["cpu"]
        (report,) = (report for report in registry.report() if report.role == "cache")
        assert any('pip install "trivet[triton]"' in candidate.reason for candidate in report.candidates)

    def test_the_only_bundled_provider_needs_no_rank(self, world: Any) -> None:
        world.bundle(a=offering(provider("cache", "only", "Cache")))
        assert why(world.registry(required=["cache"]), "cache") == "auto: the only bundled provider"

    def test_among_several_only_those_with_a_rank_are_asked(self, world: Any) -> None:
        world.bundle(a=offering(provider("cache", "quiet", "Cache"), ranked("low", 0, "a baseline")))
        assert chosen(world.registry(required=["cache"]), "cache") == ["low"]

    def test_a_strangers_provider_is_never_chosen_automatically(self, world: Any) -> None:
        world.offering("theirs", ranked("theirs", 99, "the best"))
        (problem,) = world.problems(required=["cache"])
        assert "set plugins.cache.use to 'theirs'" in problem

    @pytest.mark.parametrize(
        ("suits", "part"),
        [("lambda context: 1 / 0", "suits raised ZeroDivisionError"), ("lambda context: 3", "must return")],
    )
    def test_suits_that_fails_is_an_error(self, world: Any, suits: str, part: str) -> None:
        world.bundle(a=offering(provider("cache", "odd", "Cache", suits=suits), ranked("ok", 1, "fine")))
        assert part in "".join(world.problems(required=["cache"]))

    def test_suits_sees_the_configuration(self, world: Any) -> None:
        suits = "lambda context: Suitability(1, context.config.model + ' ' + context.side.value)"
        world.bundle(a=offering(provider("cache", "c", "Cache", suits=suits)))
        assert why(world.registry(required=["cache"]), "cache") == "auto: demo engine"


class TestMissing:
    def test_a_role_without_a_provider_names_the_packages(self, world: Any) -> None:
        (problem,) = world.problems(required=["scheduler"])
        assert "role 'scheduler' has no provider" in problem
        assert "trivet_continuous, trivet_static" in problem

    def test_all_roles_of_cardinality_one_are_required(self, world: Any) -> None:
        found = "\n".join(world.problems(required=None))
        for role in ("scheduler", "cache", "executor", "runner", "model", "attention", "sampler", "tokenizer"):
            assert f"role {role!r} has no provider" in found
        assert "drafter" not in found

    def test_an_executor_of_the_embedder_may_do_without_worker_roles(self, world: Any) -> None:
        found = "\n".join(world.problems(None, world.object("executor"), required=None))
        assert "role 'scheduler' has no provider" in found
        assert "role 'model' has no provider" not in found

    def test_what_is_not_required_is_an_error_when_it_is_asked_for(self, world: Any) -> None:
        context = world.registry().engine_context
        with pytest.raises(PluginError, match="role 'scheduler' has no provider; offered by the bundled packages"):
            context.get("scheduler")

    def test_a_bundled_plugin_that_fails_to_import_is_noted(self, world: Any) -> None:
        world.module("trivet_static_broken", "raise RuntimeError('boom')")
        world.distribution("trivet", "7.7", {"static": "trivet_static.no_such_module"})
        (problem,) = world.problems(required=["scheduler"])
        assert "note: entry point 'static'" in problem

    def test_the_table_of_bundled_packages_is_true(self) -> None:
        from trivet.registry import Catalog

        packages: dict[str, set[str]] = {}
        for plugin in Catalog().plugins:
            if plugin.origin.value == "bundled":
                for offer in plugin.offers:
                    packages.setdefault(offer.role, set()).add(str(plugin.entry_point).partition(".")[0])
        assert packages == {role: set(names) for role, names in BUNDLED_PACKAGES.items()}


class TestObjects:
    def test_an_object_wins_unless_the_configuration_names_another(self, world: Any, my_scheduler: Any) -> None:
        world.bundle(a=offering(provider("scheduler", "continuous", "Scheduler")))
        registry = world.registry(None, my_scheduler)
        assert why(registry, "scheduler") == "passed as an object"
        assert registry.engine_context.get("scheduler") is my_scheduler
        assert chosen(world.registry({"scheduler": "auto"}, my_scheduler), "scheduler") == ["MyScheduler"]
        assert chosen(world.registry({"scheduler": "MyScheduler"}, my_scheduler), "scheduler") == ["MyScheduler"]

    def test_an_object_and_another_name_are_two_plugins_for_one_role(self, world: Any, my_scheduler: Any) -> None:
        world.bundle(a=offering(provider("scheduler", "continuous", "Scheduler")))
        problem = world.problem({"scheduler": "continuous"}, my_scheduler)
        for part in ("plugins.scheduler", "role 'scheduler' takes one provider", "'continuous'", "MyScheduler"):
            assert part in problem

    def test_two_objects_for_one_role(self, world: Any, my_scheduler: Any) -> None:
        problem = world.problem(None, my_scheduler, world.object("scheduler"))
        assert "'MyScheduler'" in problem
        assert "'MyScheduler#2'" in problem

    def test_options_for_an_object_are_refused_not_dropped(self, world: Any, my_scheduler: Any) -> None:
        problem = world.problem({"scheduler": {"max_num_seqs": 4}}, my_scheduler)
        assert "plugins.scheduler.max_num_seqs" in problem
        assert "takes no options" in problem

    def test_a_wrong_base_class(self, world: Any) -> None:
        from trivet.roles import Role

        class Pretender(Role):
            role = "scheduler"

        problem = world.problem(None, Pretender())
        assert "says role 'scheduler' but is not derived from trivet.roles.Scheduler" in problem

    def test_an_unknown_role(self, world: Any) -> None:
        from trivet.roles import Role

        class Stray(Role):
            role = "schedular"

        assert "unknown role 'schedular'; did you mean 'scheduler'?" in world.problem(None, Stray())

    def test_a_descriptor_is_an_object_too(self, world: Any) -> None:
        mine = Provider("scheduler", "mine", "fakes:Scheduler", options="fakes:SizeOptions")
        registry = world.registry({"scheduler": {"size": 9}}, mine)
        assert registry.engine_context.get("scheduler").options.size == 9

    def test_objects_join_a_role_with_many_providers(self, world: Any) -> None:
        world.offering("theirs", provider("logits_processor", "theirs", "LogitsProcessor"))
        mine = world.object("logits_processor")
        registry = world.registry({"logits_processor": ["theirs"]}, mine)
        assert chosen(registry, "logits_processor") == ["theirs", "MyLogitsProcessor"]
        registry = world.registry({"logits_processor": ["MyLogitsProcessor", "theirs"]}, mine)
        assert chosen(registry, "logits_processor") == ["MyLogitsProcessor", "theirs"]

    def test_an_object_may_serve_a_role_and_observe(self, world: Any) -> None:
        seen: list[str] = []

        def told(self: Any, reason: str) -> None:
            seen.append(reason)

        both = world.object("scheduler", trivet_engine_stopped=hookimpl(told))
        registry = world.registry(None, both)
        registry.freeze().engine_stopped("shutdown")
        assert seen == ["shutdown"]
        assert registry.engine_context.get("scheduler") is both


class TestCardinality:
    def test_one_provider_does_not_take_a_list(self, world: Any) -> None:
        world.bundle(a=offering(provider("cache", "a", "Cache"), provider("cache", "b", "Cache")))
        problem = world.problem({"cache": ["a", "b"]})
        assert "plugins.cache: role 'cache' takes one provider, got 'a', 'b'" in problem
        assert "got an empty list" in world.problem({"cache": []})
        assert chosen(world.registry({"cache": ["a"]}), "cache") == ["a"]

    def test_an_optional_role_has_no_provider_unless_it_is_named(self, world: Any) -> None:
        world.bundle(a=offering(provider("quantization", "int8", "Quantization")))
        assert chosen(world.registry(), "quantization") == []
        assert chosen(world.registry({"quantization": "auto"}), "quantization") == ["int8"]
        assert chosen(world.registry({"quantization": "int8"}), "quantization") == ["int8"]

    def test_many_keep_the_order_of_the_configuration(self, world: Any) -> None:
        names = ("c", "a", "b")
        world.bundle(a=offering(*(provider("logits_processor", name, "LogitsProcessor") for name in names)))
        assert chosen(world.registry({"logits_processor": ["b", "c", "a"]}), "logits_processor") == ["b", "c", "a"]
        assert chosen(world.registry({"logits_processor": "a"}), "logits_processor") == ["a"]

    def test_a_request_could_not_tell_two_of_one_name_apart(self, world: Any) -> None:
        world.bundle(a=offering(provider("drafter", "ngram", "Drafter")))
        assert "plugins.drafter.1: 'ngram' is named already" in world.problem({"drafter": ["ngram", "ngram"]})


class TestOptions:
    def test_options_are_validated_and_reach_the_factory(self, world: Any) -> None:
        world.bundle(a=offering(provider("cache", "c", "Cache", options='"fakes:SizeOptions"')))
        registry = world.registry({"cache": {"use": "c", "size": 8}})
        assert registry.engine_context.get("cache").options.size == 8
        assert registry.engine_context.options("c") == {"size": 8, "policy": "fcfs"}

    def test_a_bad_option_is_named_with_its_path(self, world: Any) -> None:
        world.bundle(a=offering(provider("cache", "c", "Cache", options='"fakes:SizeOptions"')))
        assert "plugins.cache.siez: unknown key 'siez'; did you mean 'size'?" in world.problem(
            {"cache": {"use": "c", "siez": 8}}
        )
        problem = world.problem({"cache": {"use": "c", "size": "big"}})
        assert "plugins.cache.size: must be a whole number, got 'big'" in problem

    def test_the_options_of_one_in_a_list_have_its_index(self, world: Any) -> None:
        world.bundle(a=offering(provider("drafter", "d", "Drafter", options='"fakes:SizeOptions"')))
        assert "plugins.drafter.0.siez" in world.problem({"drafter": [{"use": "d", "siez": 1}]})

    def test_options_for_a_provider_that_takes_none(self, world: Any) -> None:
        world.bundle(a=offering(provider("cache", "c", "Cache")))
        assert "plugins.cache.size: provider 'c' takes no options" in world.problem({"cache": {"use": "c", "size": 1}})

    @pytest.mark.parametrize(
        ("options", "part"),
        [
            ('"fakes:NoSuchModel"', "has no 'NoSuchModel'"),
            ('"nowhere:Model"', "cannot be imported"),
            ("dict", "subclass of"),
        ],
    )
    def test_a_wrong_option_model(self, world: Any, options: str, part: str) -> None:
        world.bundle(a=offering(provider("cache", "c", "Cache", options=options)))
        assert part in world.problem({"cache": "c"})


class TestExtension:
    WRAPPER = """
    from trivet_schemas.options import Options

    class trivet_options(Options):
        key: int = 3

    class Wrapper:
        def __init__(self, key):
            self.key = key

        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs):
            inputs.token_budget = self.key
            return (yield)

    @hookimpl
    def trivet_extend(context):
        return [Wrapper(context.options("mark")["key"])]
    """

    def test_a_plugin_that_only_wraps_is_named_by_its_entry_point(self, world: Any) -> None:
        world.plugin("mark", self.WRAPPER)
        for options, expected in (({}, 3), ({"key": 7}, 7)):
            registry = world.registry({"extension": [{"use": "mark", **options}]})
            hooks = registry.freeze(schedule=lambda inputs: inputs)
            assert hooks.wrappers("schedule") == ("mark.Wrapper",)
            assert registry.options("mark") == {"key": expected}

    def test_its_options_are_validated(self, world: Any) -> None:
        world.plugin("mark", self.WRAPPER)
        problem = world.problem({"extension": [{"use": "mark", "kye": 7}]})
        assert "plugins.extension.0.kye: unknown key 'kye'; did you mean 'key'?" in problem
        world.plugin("bare", "@hookimpl\ndef trivet_engine_started(context): ...\n")
        problem = world.problem({"extension": [{"use": "bare", "key": 7}]})
        assert "plugins.extension.0.key: extension 'bare' (its trivet_options) takes no options" in problem

    def test_an_unknown_extension_suggests_and_lists(self, world: Any) -> None:
        world.plugin("mark", self.WRAPPER)
        assert "unknown plugin 'amrk'; did you mean 'mark'?" in world.problem({"extension": ["amrk"]})

    def test_named_twice(self, world: Any) -> None:
        world.plugin("mark", self.WRAPPER)
        assert "'mark' is named already at plugins.extension.0" in world.problem({"extension": ["mark", "mark"]})

    def test_two_entry_points_of_one_name(self, world: Any) -> None:
        world.plugin("mark", self.WRAPPER, distribution="acme-one")
        world.distribution("acme-two", "1.0", {"mark": "mark_plugin"})
        problem = world.problem({"extension": ["mark"]})
        assert "acme-one 1.0" in problem
        assert "acme-two 1.0" in problem

    def test_a_plugin_that_only_provides_is_told_where_it_goes(self, world: Any) -> None:
        world.offering("theirs", provider("cache", "theirs", "Cache"))
        problem = world.problem({"extension": ["theirs"]})
        assert "wraps and observes nothing; name its providers under 'cache'" in problem

    def test_an_object_can_be_given_options(self, world: Any) -> None:
        class Watcher:
            class trivet_options(Options):  # noqa: N801 - the attribute that the registry reads
                key: int = 3

            @hookimpl
            def trivet_engine_started(self, context: Any) -> None: ...

        assert world.registry({"extension": [{"use": "Watcher", "key": 5}]}, Watcher()).options("Watcher") == {"key": 5}

    def test_naming_a_provider_activates_its_plugins_hooks(self, world: Any) -> None:
        extra = "\n@hookimpl\ndef trivet_engine_started(context): ...\n"
        world.offering("theirs", provider("cache", "theirs", "Cache"), extra=extra)
        assert world.registry({"cache": "theirs"}).freeze().has_observers("engine_started")


class TestComponents:
    def test_a_part_is_found_by_kind_and_name(self, world: Any) -> None:
        world.plugin(
            "parts",
            "def make(**keywords):\n    return keywords\n\n@hookimpl\ndef trivet_components():\n"
            '    return [Component("policy", "odd", "parts_plugin:make")]\n',
        )
        registry = world.registry()
        assert registry.engine_context.component("policy", "odd", a=1) == {"a": 1}
        assert registry.component_names("policy") == ["odd"]
        with pytest.raises(PluginError, match="unknown policy 'od'; did you mean 'odd'?"):
            registry.engine_context.component("policy", "od")

    def test_two_parts_of_one_name(self, world: Any) -> None:
        source = '@hookimpl\ndef trivet_components():\n    return [Component("policy", "odd", "fakes:concrete")]\n'
        world.plugin("one", source)
        world.plugin("two", source)
        with pytest.raises(PluginError, match=r"policy 'odd' is offered by .*acme-one 1.0.* and by .*acme-two 1.0"):
            world.registry().engine_context.component("policy", "odd")

    def test_active_plugins_with_one_name_cannot_start(self, world: Any) -> None:
        first, second = Component("policy", "odd", "fakes:concrete"), Component("policy", "odd", "fakes:SizeOptions")
        assert "policy 'odd' is offered by" in world.problem(None, first, second)

    @pytest.mark.parametrize(
        ("component", "part"),
        [
            (Component("policy", "odd", "fakes:concrete", api=(2, 0)), "plugin API 2.0"),
            (Component("policy", "odd", "fakes"), "factory must be 'package.module:name'"),
        ],
    )
    def test_a_wrong_part(self, world: Any, component: Component, part: str) -> None:
        assert part in world.problem(None, component)
