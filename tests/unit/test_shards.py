"""The arithmetic of shards, passes and batches, against plain counting."""

from __future__ import annotations

import itertools

import pytest

from stateful_pipes import LastBatchPolicy
from stateful_pipes.nodes.shards import BatchPlan, Shards

FILL, DROP, PARTIAL = LastBatchPolicy.FILL, LastBatchPolicy.DROP, LastBatchPolicy.PARTIAL
GRID = [
    (Shards(files, num_shards, shard_id, stick), batch_size)
    for files in range(1, 12)
    for num_shards in range(1, min(files, 5) + 1)
    for shard_id in range(num_shards)
    for stick in (False, True)
    for batch_size in (1, 2, 3, 4, 7, 13)
]


def walked(shards, padded, batch_size):
    """(pass, place, sample) of the endless sequence, pass by pass."""
    bounds = [(i * shards.files // shards.num_shards, (i + 1) * shards.files // shards.num_shards) for i in range(99)]
    largest = max(stop - first for first, stop in bounds[: shards.num_shards])
    for number in itertools.count():
        first, stop = bounds[shards.shard_id if shards.stick else (shards.shard_id + number) % shards.num_shards]
        samples = list(range(first, stop))
        if padded:
            samples += samples[-1:] * (-(-largest // batch_size) * batch_size - len(samples))
        yield from ((number, place, sample) for place, sample in enumerate(samples))


def batches(plan, epoch):
    """The samples of each batch."""
    found = []
    for place in range(0, plan.places(epoch), plan.batch_size):
        samples = []
        for number, start, count in plan.stretches(epoch, place, plan.batch_size):
            first, stop = plan.shards.bounds(number)
            samples += [min(first + start + i, stop - 1) for i in range(count)]
        found.append(samples[: plan.kept(epoch, place, plan.batch_size)])
    return found


@pytest.mark.parametrize("padded", [False, True])
def test_stretches_walk_the_passes(padded):
    for shards, batch_size in GRID:
        plan = BatchPlan(shards, padded, batch_size, DROP if padded else FILL)  # else an epoch is a pass, and ends with it
        expected = list(itertools.islice(walked(shards, padded, batch_size), 60))
        for offset, count in [(0, 60), (0, 1), (1, 7), (5, 13), (23, 37), (59, 1)]:
            found = [(number, place + i) for number, place, steps in plan.stretches(0, offset, count) for i in range(steps)]
            assert found == [(number, place) for number, place, _ in expected[offset : offset + count]], (plan, offset)


def counted(shards, batch_size, epochs):
    """Batches of each epoch, not padded, under FILL: every shard's reader reads batches until it is through its shard, and
    what it has read beyond counts for its next one. All read as many as the one that needs most; where none needs any,
    the epoch is passed over and counting begins anew."""
    sizes = [
        shards.files * (i + 1) // shards.num_shards - shards.files * i // shards.num_shards for i in range(shards.num_shards)
    ]
    ahead, found, at = [0] * len(sizes), [], 0
    while len(found) < epochs:
        due = [sizes[i] if shards.stick else sizes[(i + at) % len(sizes)] for i in range(len(sizes))]
        needed = max(-(-(size - read) // batch_size) for size, read in zip(due, ahead, strict=True))
        if needed == 0:
            ahead, at = [0] * len(sizes), 0
            continue
        found.append(needed)
        ahead = [read + needed * batch_size - size for size, read in zip(due, ahead, strict=True)]
        at += 1
    return found


def test_unpadded_epochs_last_until_every_shard_is_read():
    for shards, batch_size in GRID:
        plan = BatchPlan(shards, False, batch_size, FILL)
        found = [plan.places(epoch) // batch_size for epoch in range(40)]
        assert found == counted(shards, batch_size, 40), plan
        assert plan.begin(40) == batch_size * sum(found)  # nothing is read twice, and nothing left out


@pytest.mark.parametrize(
    ("padded", "policy", "last", "following"),
    [
        (True, FILL, [7, 7], 1),
        (False, FILL, [7, 1], 2),
        (True, PARTIAL, [7], 1),
        (False, PARTIAL, [7], 2),
        (True, DROP, [5, 6], 1),
        (False, DROP, [5, 6], 2),
    ],
)
def test_seven_samples_in_batches_of_two(padded, policy, last, following):
    plan = BatchPlan(Shards(7, 1, 0, False), padded, 2, policy)
    assert [sample + 1 for sample in batches(plan, 0)[-1]] == last
    assert batches(plan, 1)[0][0] + 1 == following


def test_a_smaller_shard_has_an_empty_batch():
    plan = BatchPlan(Shards(9, 2, 0, False), False, 2, PARTIAL)
    assert batches(plan, 0) == [[0, 1], [2, 3], []]
    assert batches(plan, 1) == [[6, 7], [8, 0], [1]]


def test_a_batch_of_padding_is_left_for_the_next_epoch():
    plan = BatchPlan(Shards(9, 2, 0, False), True, 2, DROP)
    assert batches(plan, 0) == [[0, 1], [2, 3]]
    assert batches(plan, 1) == [[3, 3], [4, 5]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", LastBatchPolicy)
def test_all_shards_have_as_many_batches(padded, policy):
    for shards, batch_size in GRID:
        plans = [BatchPlan(shards._replace(shard_id=i), padded, batch_size, policy) for i in range(shards.num_shards)]
        for epoch in range(5):
            assert len({(plan.begin(epoch), plan.places(epoch)) for plan in plans}) == 1


def test_padded_shards_are_read_whole_each_epoch():
    for shards, batch_size in GRID:
        for policy in (FILL, PARTIAL):
            plans = [BatchPlan(shards._replace(shard_id=i), True, batch_size, policy) for i in range(shards.num_shards)]
            for epoch in range(4):
                read = [sample for plan in plans for batch in batches(plan, epoch) for sample in batch]
                assert sorted(set(read)) == list(range(shards.files))
                assert policy is FILL or len(read) == shards.files


def test_a_far_epoch_is_as_near():
    plan = BatchPlan(Shards(1_281_167, 8, 3, False), False, 256, FILL)
    epoch = 10**15
    assert plan.begin(epoch) == -(-epoch * 1_281_167 // 8 // 256) * 256
    number, place, steps = next(plan.stretches(epoch, 0, 256))
    assert 0 <= place < plan.shards.size(number)
    assert steps == 256
    assert number in (epoch, epoch - 1, epoch + 1)  # what is read beyond one epoch counts for the next: it never drifts
