"""Strategies for pipelines. Apart from these, so that spawned workers need not import Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from stateful_pipes.testing.strategies import rngs, seeds
from tests.property.pipelines import DATASET, ENDLESS, FOREIGN_BELOW, ORDERS, SHAPES, Case, Engine, is_kept

SEEDS = seeds()
RNGS = rngs()


@st.composite
def cases(draw, shapes=SHAPES, orders=ORDERS):
    shape = draw(st.one_of(st.just(DATASET), st.sampled_from(shapes)))  # the common door more often
    length = draw(st.integers(1, 40))
    order = draw(st.sampled_from(orders))
    unbatched = shape not in ("unbatcher_above", "two_batchers") and draw(st.integers(0, 4)) == 4
    drop_last = not unbatched and draw(st.booleans())
    # A sized epoch that gives no batch is refused at construction; foreign sources have no size, and may be empty.
    sized = len([index for index in range(length) if is_kept(index)]) if shape == "index_filter" else length
    most = sized if drop_last and (shape not in FOREIGN_BELOW or draw(st.booleans())) and order not in ENDLESS else 12
    batch_size = None if unbatched else draw(st.integers(1, min(most, 12)))
    collate = draw(st.sampled_from(["default", "drawing"] if unbatched else ["default", "drawing", "boxes"]))
    return Case(shape, length, order, batch_size, drop_last, collate, draw(RNGS), draw(st.integers(1, 3)))


def engines(workers):
    return st.builds(Engine, st.sampled_from(workers), st.integers(1, 4))
