"""Recipes: parse and print round trips, overrides, and errors that say what, got and allowed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.errors import RecipeError
from kvslim.presets import PRESETS
from kvslim.recipe import LayerOverride, Recipe, Side, Step

names = st.sampled_from(["affine", "none", "table", "rotate", "x9_y"])
arguments = st.sampled_from(["4", "asym", "scale=channel", "scale=32", "clip=0.25", "kind=a-b", "n=1.5", "a=b=c"])
steps = st.builds(Step, names, st.lists(arguments, max_size=3).map(tuple))
sides = st.builds(Side, st.lists(steps, max_size=2).map(tuple), steps)
overrides = st.builds(
    lambda first, span, letter, side: LayerOverride(first, first + span, letter, side),
    st.integers(0, 90),
    st.integers(0, 5),
    st.sampled_from("kv"),
    sides,
)


@st.composite
def recipes(draw) -> Recipe:
    immediate = draw(st.booleans())
    return Recipe(
        draw(sides),
        draw(sides),
        block=8 * draw(st.integers(1, 512)),
        sinks=draw(st.integers(0, 4096)),
        recent=0 if immediate else draw(st.integers(0, 1 << 20)),
        immediate=immediate,
        exact=draw(st.sampled_from(["auto", "fp16", "bf16", "fp32"])),
        layers=tuple(draw(st.lists(overrides, max_size=3))),
        label=draw(st.text(max_size=8)),
    )


@given(recipes())
@settings(max_examples=200, deadline=None)
def test_parse_inverts_str(recipe):
    assert Recipe.parse(str(recipe)) == recipe


@given(recipes())
@settings(max_examples=100, deadline=None)
def test_from_json_inverts_to_json(recipe):
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert again.label == (recipe.label or str(recipe))


@pytest.mark.parametrize("name", [*PRESETS, "k8v4", "k2v3", "kivi4+sinks=0+recent=0", "int8+exact=fp32"])
def test_names_round_trip(name):
    recipe = Recipe.parse(name)
    assert Recipe.parse(str(recipe)) == recipe
    assert recipe.label == name
    assert Recipe.parse(recipe) is recipe


@given(st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_text_parses_or_is_refused(text):
    try:
        recipe = Recipe.parse(text)
    except RecipeError as error:
        assert str(error)
    else:
        assert Recipe.parse(str(recipe)) == recipe


@given(st.sampled_from(["block", "sinks", "recent", "exact", "layer.1", "layer.1-2.k", "k", "zz"]), st.text(max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_option_value_parses_or_is_refused(name, value):
    try:
        recipe = Recipe.parse(f"kivi4+{name}={value}")
    except RecipeError as error:
        assert str(error)
    else:
        assert Recipe.parse(str(recipe)) == recipe


def test_what_a_preset_stands_for():
    recipe = Recipe.parse("kivi4")
    assert str(recipe.key) == "affine:4:asym:scale=channel"
    assert str(recipe.value) == "affine:4:asym:scale=32"
    assert (recipe.block, recipe.sinks, recipe.recent, recipe.immediate, recipe.exact) == (32, 4, 32, False, "auto")
    assert recipe.layers == ()


def test_pair_takes_bits_of_each_side():
    recipe = Recipe.parse("k8v2")
    assert recipe.key.codec.args[0] == "8"
    assert recipe.value.codec.args[0] == "2"


def test_options_change_only_what_they_name():
    recipe = Recipe.parse("int8+block=64+sinks=0+recent=7+exact=bf16")
    assert (recipe.block, recipe.sinks, recipe.recent, recipe.exact) == (64, 0, 7, "bf16")
    assert recipe.key == Recipe.parse("int8").key


def test_immediate_drops_the_recent_window():
    assert Recipe.parse("int8+immediate").recent == 0
    assert "immediate" in str(Recipe.parse("int8+immediate"))


def test_label_does_not_make_two_recipes_differ():
    assert Recipe.parse("kivi4") == Recipe.parse(str(Recipe.parse("kivi4")))


def test_layer_overrides_later_ones_win():
    recipe = Recipe.parse("int4+layer.2-4=int8+layer.3.k=none")
    int4, int8 = Recipe.parse("int4"), Recipe.parse("int8")
    assert recipe.sides(1) == (int4.key, int4.value)
    assert recipe.sides(2) == (int8.key, int8.value)
    assert recipe.sides(3) == (Side.parse("none"), int8.value)
    assert recipe.sides(4) == (int8.key, int8.value)
    assert recipe.sides(5) == (int4.key, int4.value)


def test_layer_override_takes_a_pair_or_bits_for_one_side():
    recipe = Recipe.parse("kivi4+layer.0=k8v4+layer.1.v=8")
    pair = Recipe.parse("k8v4")
    assert recipe.sides(0) == (pair.key, pair.value)
    assert recipe.sides(1)[1] == Recipe.parse("k8v8").value
    assert recipe.sides(1)[0] == Recipe.parse("kivi4").key


def test_with_sides():
    recipe = Recipe.parse("kivi4").with_sides(key="int8", value="affine:2:asym:scale=16")
    assert recipe.key == Recipe.parse("int8").key
    assert str(recipe.value) == "affine:2:asym:scale=16"
    assert recipe.block == 32
    assert "int8" in recipe.label
    assert Recipe.parse("kivi4").with_sides() == Recipe.parse("kivi4")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kivi5", ["'kivi5'", "kivi4", "k8v4", "Did you mean 'kivi4'?"]),
        ("Kivi4", ["'Kivi4'", "Did you mean 'kivi4'?"]),
        ("k9v4", ["'k9v4'", "k8v4"]),
        ("", ["non-empty", "''"]),
        ("k=affine:4", ["each side once", "k=SIDE+v=SIDE"]),
        ("k=affine:4+v=none+k=none", ["each side once"]),
        ("k=+v=none", ["''", "name:argument"]),
        ("k=none\n+v=none", ["name:argument"]),
        ("k=affine 4+v=none", ["'affine 4'", "affine:4:asym"]),
        ("k=/affine:4+v=none", ["''", "affine:4:asym"]),
        ("int8+blok=32", ["'blok=32'", "block=N", "Did you mean 'block'?"]),
        ("int8+block", ["'block'", "block=N"]),
        ("int8+block=x", ["'block=x'", "block=N"]),
        ("int8+block=\u00b2", ["block=N"]),
        ("int8+block=123456789012", ["block=N"]),
        ("int8+block=4", ["block=4", "8 to 4096"]),
        ("int8+block=9000", ["block=9000", "8 to 4096"]),
        ("int8+block=20", ["block=20", "multiple of 8", "128"]),
        ("int8+sinks=5000", ["sinks=5000", "0 to 4096"]),
        ("int8+recent=-1", ["'recent=-1'", "recent=N"]),
        ("int8+exact=fp8", ["'exact=fp8'", "fp16|bf16|fp32"]),
        ("int8+immediate+recent=32", ["immediate", "recent=32"]),
        ("int8+layer.5-3=int4", ["layer.5-3", "layer.3-5"]),
        ("int8+layer.x=int4", ["'layer.x=int4'", "layer.A-B=PRESET"]),
        ("int8+layer.1=", ["''"]),
        ("int8+", ["''", "block=N"]),
    ],
)
def test_errors_name_what_and_what_is_allowed(text, says):
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(text)
    for part in says:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [None, 4, b"kivi4", "   "])
def test_what_is_no_text_is_refused(value):
    with pytest.raises(RecipeError, match="non-empty string"):
        Recipe.parse(value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", "null", '{"version": 1}', '{"recipe": "int8"}', '{"version": 1, "recipe": 5}']
)
def test_json_that_is_no_recipe(text):
    with pytest.raises(RecipeError):
        Recipe.from_json(text)


def test_json_of_a_newer_version_is_refused():
    data = json.loads(Recipe.parse("int8").to_json())
    data["version"] += 1
    with pytest.raises(RecipeError, match="version 2.*update kvslim"):
        Recipe.from_json(json.dumps(data))


def test_recipes_are_values():
    recipe = Recipe.parse("int8")
    assert hash(recipe) == hash(Recipe.parse("int8"))
    with pytest.raises(AttributeError):
        recipe.block = 8
