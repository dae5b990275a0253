from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from trivet_schemas.errors import ConfigError
from trivet_schemas.options import Options, Size, collect_flat_names, flat, format_size, parse_size
from trivet_schemas.validation import format_validation_error, validate_options


class Tier(Options):
    path: str
    """Folder of the files."""


class PagedOptions(Options):
    """Options of a cache."""

    block_size: int = Field(16, ge=1, json_schema_extra=flat("block_size"))
    """Tokens per block."""
    memory: Size | None = None
    """Memory for the blocks."""
    prefix_caching: bool = Field(True, json_schema_extra=flat("enable_prefix_caching"))
    watermark: float = Field(0.0, ge=0, le=1, description="Given in the field.")
    """Not this text."""
    eviction: Literal["lru", "fifo"] = "lru"
    tiers: list[Tier] = Field(default_factory=list)
    limit: int | Literal["auto"] = "auto"

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value


def problems(options: dict[str, Any], model: type[BaseModel] = PagedOptions) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        validate_options(model, options, "plugins.cache")
    return {problem.path: problem.message for problem in caught.value.problems}


class TestValidateOptions:
    def test_valid_options_make_the_model(self) -> None:
        made = validate_options(
            PagedOptions, {"block_size": 8, "memory": "1MiB", "tiers": [{"path": "x"}]}, "plugins.cache"
        )
        assert (made.block_size, made.memory, made.tiers[0].path) == (8, 2**20, "x")

    @pytest.mark.parametrize(
        ("options", "path", "message"),
        [
            ({"blok_size": 1}, "blok_size", "unknown key 'blok_size'; did you mean 'block_size'?"),
            ({"block_size": 0}, "block_size", "must be at least 1, got 0"),
            ({"block_size": 12}, "block_size", "must be a power of two, got 12"),
            ({"block_size": True}, "block_size", "must be a whole number, got True"),
            ({"block_size": None}, "block_size", "must be a whole number, got None"),
            ({"block_size": "many"}, "block_size", "must be a whole number, got 'many'"),
            ({"watermark": True}, "watermark", "must be a number, got True"),
            ({"watermark": float("nan")}, "watermark", "must be a finite number, got nan"),
            ({"prefix_caching": "perhaps"}, "prefix_caching", "must be true or false, got 'perhaps'"),
            (
                {"eviction": "lur"},
                "eviction",
                "must be one of 'lru' or 'fifo' (did you mean 'lru'?), got 'lur'",
            ),
            ({"tiers": [{"path": "x"}, {"pth": "y"}]}, "tiers.1.pth", "unknown key 'pth'; did you mean 'path'?"),
            ({"tiers": [{"path": 5}]}, "tiers.0.path", "must be a string, got 5 (in YAML, put quotes around it)"),
            ({"limit": "atuo"}, "limit", "must be a whole number or must be 'auto' (did you mean 'auto'?), got 'atuo'"),
            ({"memory": "4 gigs"}, "memory", "got '4 gigs'"),
            ({"memory": -1}, "memory", "must not be negative, got -1"),
        ],
    )
    def test_a_problem_has_its_path_the_rule_and_the_value(
        self, options: dict[str, Any], path: str, message: str
    ) -> None:
        found = problems(options)
        assert f"plugins.cache.{path}" in found
        assert message in found[f"plugins.cache.{path}"]

    def test_a_list_of_what_is_allowed_has_null_too_where_that_is(self) -> None:
        class Choices(Options):
            group: Literal[32, 64] | None = 64
            kind: Literal["a"] | None = None
            mixed: bool | Literal[4, 8] | None = None
            inner: list[Literal["a", "b"]] | None = None

        given = {"group": 48, "kind": "b", "mixed": 5, "inner": ["c"]}
        assert problems(given, Choices) == {
            "plugins.cache.group": "must be one of 32 or 64, or null, got 48",
            "plugins.cache.kind": "must be 'a', or null, got 'b'",
            "plugins.cache.mixed": "must be true or false or must be one of 4 or 8, or null, got 5",
            "plugins.cache.inner.0": "must be one of 'a' or 'b', got 'c'",
        }

    def test_a_missing_option_is_named(self) -> None:
        assert problems({"tiers": [{}]}) == {"plugins.cache.tiers.0.path": "is required, and missing"}

    def test_text_that_means_a_boolean_is_read_as_one(self) -> None:
        assert not validate_options(PagedOptions, {"prefix_caching": "false"}, "").prefix_caching

    def test_all_problems_come_at_once_in_one_message(self) -> None:
        with pytest.raises(ConfigError) as caught:
            validate_options(PagedOptions, {"block_size": 0, "x": 1, "tiers": 3}, "plugins.cache")
        assert [problem.path.rpartition(".")[2] for problem in caught.value.problems] == ["block_size", "tiers", "x"]
        assert str(caught.value).startswith("3 problems in the configuration:\n  - plugins.cache.block_size: ")

    def test_keys_that_are_no_text_are_refused(self) -> None:
        assert list(problems({5: 1})) == ["plugins.cache.5"]  # type: ignore[dict-item]

    def test_a_rule_of_the_whole_model_has_the_path_of_the_section(self) -> None:
        class Range(Options):
            low: int = 0
            high: int = 1

            @model_validator(mode="after")
            def _ordered(self) -> Range:
                if self.low > self.high:
                    raise ValueError(f"low must not exceed high={self.high}, got {self.low}")
                return self

        assert problems({"low": 5}, Range) == {"plugins.cache": "low must not exceed high=1, got 5"}

    def test_options_do_not_change(self) -> None:
        options = PagedOptions()
        with pytest.raises(ValidationError, match="frozen"):
            options.block_size = 3  # type: ignore[misc]

    @given(
        st.dictionaries(
            st.one_of(st.sampled_from(list(PagedOptions.model_fields)), st.text(max_size=5)),
            st.recursive(
                st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
                lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
                max_leaves=4,
            ),
            max_size=5,
        )
    )
    def test_any_options_are_valid_or_have_problems_under_the_path(self, options: dict[str, Any]) -> None:
        outcome: PagedOptions | ConfigError
        try:
            outcome = validate_options(PagedOptions, options, "plugins.cache")
        except ConfigError as exc:
            outcome = exc
        if isinstance(outcome, PagedOptions):
            assert set(options) <= set(PagedOptions.model_fields)
            assert validate_options(PagedOptions, outcome.model_dump(), "") == outcome
        else:
            assert outcome.problems
            assert all(f"{problem.path}.".startswith("plugins.cache.") for problem in outcome.problems)
            assert all("\n" not in problem.message for problem in outcome.problems)

    @given(st.sampled_from(list(PagedOptions.model_fields)), st.data())
    def test_a_slip_of_one_letter_is_suggested(self, name: str, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(name) - 1))
        misspelt = name[:position] + name[position + 1 :]
        assert problems({misspelt: 1})[f"plugins.cache.{misspelt}"].endswith(f"did you mean {name!r}?")


def test_format_validation_error_works_for_any_pydantic_model() -> None:
    class Inner(BaseModel):
        size: int

    class Foreign(BaseModel):
        by_name: dict[str, list[Inner]]
        either: Inner | str = "x"

    with pytest.raises(ValidationError) as caught:
        Foreign.model_validate({"by_name": {"a": [{"size": "x"}]}, "either": {"size": "y"}})
    found = format_validation_error(caught.value, "top", Foreign)
    assert [(p.path, p.message) for p in found] == [
        ("top.by_name.a.0.size", "must be a whole number, got 'x'"),
        ("top.either.size", "must be a whole number, got 'y'"),
    ]
    assert format_validation_error(caught.value)[0].path == "by_name.a.0.size"


class TestSize:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            (0, 0),
            (4096, 4096),
            (1.5e9, 1_500_000_000),
            ("4096", 4096),
            ("4GiB", 4 * 2**30),
            ("512MB", 512_000_000),
            ("1.5G", 3 * 2**29),
            ("1.5GB", 1_500_000_000),
            (" 2 kib ", 2048),
            ("2K", 2048),
            ("2kB", 2000),
            (".5MiB", 2**19),
            ("1TiB", 2**40),
            ("7b", 7),
            ("4e9", 4_000_000_000),
            ("0.1K", 102),
        ],
    )
    def test_forms(self, text: Any, size: int) -> None:
        assert parse_size(text) == size

    @pytest.mark.parametrize(
        "text", ["", "GiB", "-1", "4 gigs", "4iB", "1..5G", "1e5G", "1e999", True, None, 1.5, -2, [], "٤G"]
    )
    def test_other_forms_are_refused_with_the_value(self, text: Any) -> None:
        with pytest.raises(ValueError, match=r"must .*, got ") as caught:
            parse_size(text)
        assert repr(text) in str(caught.value)

    @given(st.integers(0, 10**6), st.sampled_from(["", "K", "M", "G", "T", "P"]), st.sampled_from(["", "B", "iB"]))
    def test_whole_numbers_of_units_are_exact(self, number: int, letter: str, suffix: str) -> None:
        if not letter and suffix == "iB":
            suffix = "B"
        base = 1000 if suffix == "B" else 1024
        assert parse_size(f"{number} {letter}{suffix}") == number * base ** "_KMGTP".index(letter or "_")

    @given(st.integers(0, 2**60))
    def test_a_formatted_size_reads_back(self, size: int) -> None:
        text = format_size(size)
        if text.startswith("~"):
            assert 0 < size - parse_size(text[1:]) < size / 100 + 1
        else:
            assert parse_size(text) == size

    @given(st.text(max_size=12))
    def test_any_text_is_a_size_or_a_clear_error(self, text: str) -> None:
        try:
            assert parse_size(text) >= 0
        except ValueError as exc:
            assert "4GiB" in str(exc)  # noqa: PT017  either outcome is right


class TestFlatNames:
    def test_names_lead_to_every_role_that_declares_them(self) -> None:
        class A(Options):
            max_num_seqs: int = Field(1, json_schema_extra=flat("max_num_seqs", "max_batch"))

        class B(Options):
            rows: int = Field(1, json_schema_extra={"alias_of_flat": "max_num_seqs"})

        known = collect_flat_names({"scheduler": {"a": A, "a2": A}, "runner": {"b": B, "plain": None}})
        assert known == {
            "max_num_seqs": [("scheduler", "max_num_seqs"), ("runner", "rows")],
            "max_batch": [("scheduler", "max_num_seqs")],
        }

    def test_two_options_of_one_role_under_one_name_are_an_error(self) -> None:
        class A(Options):
            x: int = Field(1, json_schema_extra=flat("size"))

        class B(Options):
            y: int = Field(1, json_schema_extra=flat("size"))

        with pytest.raises(ConfigError, match=r"cache.b: the flat name 'size' sets 'y' here, but 'x' in cache.a"):
            collect_flat_names({"cache": {"a": A, "b": B}})

    def test_a_name_that_is_a_key_of_the_configuration_is_an_error(self) -> None:
        class A(Options):
            s: int = Field(1, json_schema_extra=flat("seed"))

        with pytest.raises(ConfigError, match="'seed'"):
            collect_flat_names({"sampler": {"a": A}})


def test_docstrings_under_options_become_descriptions() -> None:
    properties = PagedOptions.model_json_schema()["properties"]
    assert properties["block_size"]["description"] == "Tokens per block."
    assert properties["watermark"]["description"] == "Given in the field."
    assert "description" not in properties["eviction"]


def test_docstrings_are_inherited() -> None:
    class Wider(PagedOptions):
        width: int = 1
        """Of the band."""

    properties = Wider.model_json_schema()["properties"]
    assert properties["block_size"]["description"] == "Tokens per block."
    assert properties["width"]["description"] == "Of the band."
