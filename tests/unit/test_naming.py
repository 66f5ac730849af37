"""The names by which nodes stand in the state."""

from __future__ import annotations

import pytest

from stateful_pipes.naming import instance_name, snake_case, told_apart


@pytest.mark.parametrize(
    ("camel", "snake"),
    [
        ("IterableWrapper", "iterable_wrapper"),
        ("Mapper", "mapper"),
        ("DALIPipelineNode", "dali_pipeline_node"),
        ("ReadURL", "read_url"),
        ("Decode2D", "decode2_d"),
        ("already_snake", "already_snake"),
        ("X", "x"),
        ("", ""),
    ],
)
def test_snake_case(camel, snake):
    assert snake_case(camel) == snake


def test_a_kind_is_numbered_when_it_recurs():
    taken: list[str] = []
    for _ in range(4):
        taken.append(instance_name(None, "mapper", taken))
    assert taken == ["mapper", "mapper_2", "mapper_3", "mapper_4"]


def test_numbering_steps_over_names_that_are_taken():
    assert instance_name(None, "mapper", ["mapper", "mapper_2", "x"]) == "mapper_3"
    assert instance_name(None, "mapper", ["mapper_2"]) == "mapper"
    assert instance_name(None, "mapper", ["mapper", "mapper_3"]) == "mapper_2"


def test_a_given_name_is_taken_as_it_is():
    assert instance_name("decode", "mapper", ["mapper"]) == "decode"


def test_one_name_for_two_nodes_is_refused():
    with pytest.raises(ValueError, match=r"two nodes of this pipeline are named 'decode'.*name="):
        instance_name("decode", "mapper", ["decode"])
    with pytest.raises(ValueError, match="'sampler'"):
        instance_name(None, "mixer", ["sampler", "mapper", "sampler"])


@pytest.mark.parametrize("name", ["", 3, b"mapper", ["mapper"], True])
def test_a_name_is_a_string_with_something_in_it(name):
    with pytest.raises(TypeError, match="name must be a non-empty string, got"):
        instance_name(name, "mapper", [])


def test_names_of_several_pipelines_are_told_apart():
    """Those that were given stay; kinds are numbered past every name that is there so far."""
    names = [("mapper", "mapper"), ("mapper_2", None), ("mapper", "mapper"), ("own", None), ("own", None), ("mapper", "mapper")]
    assert told_apart(names) == ["mapper", "mapper_2", "mapper_3", "own", "own", "mapper_4"]
