"""Strict params: every mistake names its key and the way out."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Literal

import pytest

from athanor.base.errors import ParamsError
from athanor.base.strict import _check_range, build, load_section, param, read_yaml
from athanor.runtime.schema import schemas


@dataclass(frozen=True)
class A:
    type: Literal["a"]
    size: int = param(min=1, max=9)


@dataclass(frozen=True)
class B:
    type: Literal["b"]
    path: str


@dataclass(frozen=True)
class Section:
    lr: float = param(min=0)
    mode: str = param(choices=("cosine", "wsd"))
    flag: bool = param()
    limit: int | None = param(min=0)
    shares: dict[str, float] = param()
    sources: tuple[A | B, ...] = param()


GOOD = {
    "lr": 1,
    "mode": "wsd",
    "flag": True,
    "limit": None,
    "shares": {"x": 0.5},
    "sources": [{"type": "a", "size": 3}, {"type": "b", "path": "p"}],
}


def test_good_values_are_converted():
    section = build(Section, GOOD, "s")
    assert section.lr == 1.0 and isinstance(section.lr, float)
    assert section.sources == (A("a", 3), B("b", "p"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lrr": 1}, r"s\.lrr: unknown key.*did you mean 's\.lr'"),
        ({"lr": "1e-3x"}, r"s\.lr: expected a number"),
        ({"lr": True}, r"s\.lr: expected a number"),
        ({"lr": -1}, r"s\.lr: -1.* out of range.*≥ 0"),
        ({"lr": float("nan")}, r"s\.lr: expected a finite number"),
        ({"mode": "wds"}, r"s\.mode: 'wds' is not allowed.*did you mean 'wsd'"),
        ({"flag": 1}, r"s\.flag: expected true or false"),
        ({"limit": -2}, r"s\.limit: -2 is out of range"),
        ({"shares": {"x": "y"}}, r"s\.shares\.x: expected a number"),
        ({"sources": [{"type": "a", "size": 10}]}, r"s\.sources\[0\]\.size: 10 is out of range.*from 1 to 9"),
        ({"sources": [{"type": "c"}]}, r"s\.sources\[0\]\.type: 'c' is not allowed.*a, b"),
        ({"sources": [{"size": 1}]}, r"s\.sources\[0\]\.type: key is missing"),
        ({"sources": 3}, r"s\.sources: expected a list"),
    ],
)
def test_every_mistake_names_its_key(change, message):
    with pytest.raises(ParamsError, match=message):
        build(Section, {**GOOD, **change}, "s")


@pytest.mark.parametrize("value", [True, False])
def test_true_is_no_whole_number(value):
    """For Python it is one: `isinstance(True, int)`."""
    with pytest.raises(ParamsError, match=r"s\.limit: expected a whole number"):
        build(Section, {**GOOD, "limit": value}, "s")


def test_every_missing_key_is_named_at_once():
    """A source of one's own once needed a start for each key that it lacked."""
    with pytest.raises(ParamsError, match=r"s\.mode, \.limit: keys are missing\. Fix: add them"):
        build(Section, {k: v for k, v in GOOD.items() if k not in ("mode", "limit")}, "s")


def test_missing_key_is_named():
    with pytest.raises(ParamsError, match=r"s\.mode: key is missing"):
        build(Section, {k: v for k, v in GOOD.items() if k != "mode"}, "s")


def test_yaml_1_2_floats_like_dvc_reads_them(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("s:\n  lr: 1e-3\n  on: on\n")
    assert read_yaml(path)["s"] == {"lr": 0.001, "on": "on"}


@pytest.mark.parametrize("text", ["a: [1", "a: 1\na: 2", "- 1"])
def test_broken_yaml_is_one_error(tmp_path, text):
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ParamsError, match="params.yaml"):
        load_section(path, "a", A)


def test_missing_section_and_file(tmp_path):
    with pytest.raises(ParamsError, match="file not found"):
        load_section(tmp_path / "params.yaml", "s", Section)
    (tmp_path / "params.yaml").write_text("t: 1")
    with pytest.raises(ParamsError, match="section 's' is missing"):
        load_section(tmp_path / "params.yaml", "s", Section)


@dataclass(frozen=True)
class Short:
    name: str
    size: int = param(min=1, max=9, default=3)
    note: str | None = None


def test_a_key_with_a_default_may_be_left_out_and_is_the_same_written_out():
    assert build(Short, {"name": "a"}, "s") == build(Short, {"name": "a", "size": 3, "note": None}, "s") == Short("a")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 3}, r"s\.name: key is missing. Fix: add it: docs/params.md"),
        ({"name": "a", "size": 10}, r"s\.size: 10 is out of range.*from 1 to 9"),
        ({"name": "a", "size": None}, r"s\.size: expected a whole number"),
        ({"name": "a", "sizes": 3}, r"s\.sizes: unknown key.*did you mean 's\.size'"),
    ],
)
def test_a_default_hides_no_mistake(values, message):
    with pytest.raises(ParamsError, match=message):
        build(Short, values, "s")


def test_what_holds_where_a_key_is_left_out_may_also_be_written():
    checked = 0
    for schema in {found for section in schemas().values() for found in _dataclasses(section)}:
        hints = typing.get_type_hints(schema)
        for field in dataclasses.fields(schema):
            if field.default is not dataclasses.MISSING and not dataclasses.is_dataclass(field.default):
                assert build(hints[field.name], field.default, field.name) == field.default
                _check_range(field.default, field.metadata, field.name)
                checked += 1
    assert checked > 100


@dataclass(frozen=True)
class Limits:
    low: int = param(min=0, max=9)
    high: int | None = param(min=0, max=99, default=None)


@dataclass(frozen=True)
class Limited:
    usual: Limits = Limits(low=3, high=50)


def test_a_mapping_names_only_what_differs_from_a_default_that_is_a_dataclass():
    assert build(Limited, {}, "x") == Limited()
    assert build(Limited, {"usual": {"high": 60}}, "x") == Limited(Limits(low=3, high=60))
    assert build(Limited, {"usual": {"high": None}}, "x").usual == Limits(low=3, high=None)
    for wrong, where in (({"low": 10}, "x.usual.low"), ({"hihg": 1}, "x.usual.hihg"), (7, "x.usual")):
        with pytest.raises(ParamsError) as caught:
            build(Limited, {"usual": wrong}, "x")
        assert caught.value.where == where


def _dataclasses(schema) -> set[type]:
    if not dataclasses.is_dataclass(schema):
        return {found for inner in typing.get_args(schema) for found in _dataclasses(inner)}
    hints = typing.get_type_hints(schema).values()
    return {schema}.union(*(_dataclasses(hint) for hint in hints))
