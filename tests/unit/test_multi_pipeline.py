"""Several pipelines stepped together: a step is consumed by all or by none."""

from __future__ import annotations

import dis
import gc
import itertools
import json
import re
import sys
import weakref

import pytest

from stateful_pipes import (
    ExternalSource,
    FileReader,
    MultiPipelineLoader,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.errors import IteratorInvalidError, LoaderFailedError, ResumableModeRequiredError, StateMismatchError
from tests.streams import place_of

SHARDS = 3


class Reading:
    """Fails at an index, until it is mended."""

    def __init__(self, fails=None):
        self.fails = fails

    def __call__(self, index):
        if index == self.fails:
            raise ValueError("broken")
        return index


def shards(seed=1, workers=0, size=2, fails=None, length=21):
    nodes = []
    for rank in range(SHARDS):
        node = SamplerNode(RandomSampler(length, seed=seed), rank=rank, world_size=SHARDS)
        node = SeededBatcher(SeededMapper(node, Reading(fails), rng=()), size, collate_fn=list, seed=5)
        nodes.append(ProcessPrefetcher(node, workers))
    return nodes


def epochs(loader, count):
    return [list(loader) for _ in range(count)]


def places_of(loader):
    return [(one.epoch, one.consumed) for one in loader.positions]


@pytest.fixture
def truth():
    return epochs(MultiPipelineLoader(shards()), 3)


def test_a_batch_of_each_a_step(truth):
    alone = [epochs(StatefulDataLoader(node), 3) for node in shards()]
    assert truth == [[list(step) for step in zip(*epoch, strict=True)] for epoch in zip(*alone, strict=True)]
    assert sorted(index for step in truth[0] for batch in step for index in batch) == list(range(21))
    assert [len(epoch) for epoch in truth] == [4] * 3 == [len(MultiPipelineLoader(shards()))] * 3


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cut", range(9))
def test_a_resume_at_every_cut(truth, cut, workers):
    flat = [step for epoch in truth for step in epoch]
    with MultiPipelineLoader(shards(workers=workers)) as loader:
        read = 0
        while read < cut:
            for step in loader:
                assert step == flat[read]
                read += 1
                if read == cut:
                    break
        states = json.loads(json.dumps(loader.state_dict()))
        checkpoints = loader.checkpoints()
    with MultiPipelineLoader(shards(seed=9, workers=workers)) as resumed:
        resumed.load_state_dict(states)
        assert resumed.is_restored_from_checkpoint
        assert resumed.checkpoints() == checkpoints
        assert [step for _ in range(3) for step in resumed][: 12 - cut] == flat[cut:]
    with MultiPipelineLoader(shards(seed=9, workers=workers), checkpoint=checkpoints) as resumed:
        assert [step for _ in range(3) for step in resumed][: 12 - cut] == flat[cut:]


@pytest.mark.parametrize("rank", range(SHARDS))
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_step_that_one_pipeline_fails_is_nobody_s(truth, rank, place):
    index = truth[0][place][rank][0]
    loader = MultiPipelineLoader(shards(fails=index))
    steps = iter(loader)
    assert [next(steps) for _ in range(place)] == truth[0][:place]
    before = loader.state_dict()
    with pytest.raises(ValueError, match="broken"):
        next(steps)
    assert loader.state_dict() == before
    with pytest.raises(LoaderFailedError):
        next(iter(loader))
    for one in loader.loaders:
        one.close()
        one.pipeline.sources[0].sources[0].map_fn.fails = None
    assert list(loader) == truth[0][place:]


def test_an_interrupt_within_a_step_is_nobody_s_step(truth):
    """As Ctrl-C while the second pipeline reads."""

    class Interrupted(Reading):
        def __call__(self, index):
            if index == self.fails:
                self.fails = None
                raise KeyboardInterrupt
            return index

    nodes = shards()
    nodes[1].sources[0].sources[0].map_fn = Interrupted(truth[0][2][1][1])
    loader = MultiPipelineLoader(nodes)
    found = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(iter(loader))
    found = list(loader)
    assert found == truth[0][len(truth[0]) - len(found) :]
    assert len(found) == 2


# After these instructions CPython looks whether a signal has come.
LOOKS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}
OURS = ("multi_pipeline.py", "joint_step.py")


class InterruptedOnce:
    """Raises KeyboardInterrupt in one of these files, at the n-th place where a signal's handler may run."""

    def __init__(self, at, files):
        self.left = at
        self.files = files
        self.came = False
        self.before = {}

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.came:
            before = self.before.get(frame)
            self.before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            # A method of Python's that it returns from is no place: there are none between a commit and the loop's variable.
            if before in LOOKS and self.before[frame] != "RETURN_VALUE":
                self.left -= 1
                if self.left < 0:
                    self.came = True
                    raise KeyboardInterrupt
        return self

    def around(self, function):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt:
            assert self.came
        finally:
            sys.settrace(before)


def plain(seed=1):
    samplers = [RandomSampler(6, seed=seed + rank) for rank in range(2)]
    return MultiPipelineLoader([SeededBatcher(SamplerNode(one), 2, collate_fn=list, seed=5) for one in samplers])


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("start", [0, 2])
def test_ctrl_c_at_any_moment_loses_no_step_and_repeats_none(start, close):
    """Neither in what goes on, nor in what resumes."""
    whole = epochs(plain(), 2)
    flat = [step for epoch in whole for step in epoch]
    for at in itertools.count():
        loader = plain()
        found = [step for _, step in zip(range(start), loader, strict=False)]
        trace = InterruptedOnce(at, (*OURS, "stream.py"))

        def read(loader=loader, found=found):
            for step in loader:
                found.append(step)
                if len(found) == 1:
                    break

        trace.around(read)
        assert len(set(places_of(loader))) == 1, at
        checkpoints = loader.checkpoints()
        if close or any(one.pipeline.stream._inside for one in loader.loaders):  # which close() sets free
            loader.close()
            assert loader.checkpoints() == checkpoints
        for going_on in (loader, MultiPipelineLoader(plain(7).loaders, checkpoint=checkpoints)):
            assert going_on.checkpoints() == checkpoints
            rest = [step for _ in range(2) for step in going_on]
            assert (found + rest)[: len(flat)] == flat, at
        if not trace.came:
            break
    assert at > 60


def ragged(seed=1):
    nodes = [SamplerNode(RandomSampler(length, seed=seed)) for length in (3, 2)]
    return MultiPipelineLoader([*nodes, ExternalSource(lasting, batch_info=True)], allow="position")


def test_ctrl_c_at_any_moment_leaves_every_epoch_its_steps():
    """Also where one ends before the others, which then leave theirs, or is empty for one of them."""
    whole = epochs(ragged(), 6)
    assert [len(epoch) for epoch in whole] == [2, 0, 0, 2, 2, 0]
    flat = [step for epoch in whole for step in epoch]
    for at in itertools.count():
        loader, found = ragged(), []
        trace = InterruptedOnce(at, OURS)

        def read(loader=loader, found=found):
            for _ in range(3):
                for step in loader:
                    found.append(step)  # extend would lose what it was given

        trace.around(read)
        resumed = ragged(7)
        resumed.load_state_dict(loader.state_dict())
        for going_on in (resumed, loader):
            rest = [step for _ in range(6) for step in going_on]
            assert (found + rest)[: len(flat)] == flat, at
        if not trace.came:
            break
    assert at > 100


def test_a_resume_at_every_cut_where_epochs_end_together():
    flat = [step for epoch in epochs(ragged(), 6) for step in epoch]
    loader, read = ragged(), 0
    for _ in range(5):
        for step in loader:
            assert step == flat[read]
            read += 1
            resumed = ragged(7)
            resumed.load_state_dict(loader.state_dict())
            assert [step for _ in range(6) for step in resumed][: len(flat) - read] == flat[read:]
    assert read == len(flat) == 6


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_was_given_in_a_step_that_was_interrupted_is_read_once(rank):
    """So also what can be read only onwards loses nothing."""

    class Counted:
        def __init__(self, interrupts):
            self.number, self.interrupts = -1, interrupts

        def __call__(self):
            if self.number == 3 and self.interrupts:
                self.interrupts = False
                raise KeyboardInterrupt
            self.number += 1
            return self.number

    with pytest.warns(UserWarning, match="not captured"):
        loader = MultiPipelineLoader([ExternalSource(Counted(number == rank)) for number in range(3)])
    found = []
    while len(found) < 6:
        try:
            for step in loader:
                found.append(step)
                if len(found) == 6:
                    break
        except KeyboardInterrupt:
            pass
    for other in {0, 1, 2} - {rank}:  # the interrupted one loses what it had read ahead, as it does alone
        assert [step[other] for step in found] == list(range(6))


@pytest.mark.parametrize(
    "move",
    [
        lambda loader, state: loader.load_state_dict(state),
        lambda loader, _: loader.set_epoch(1),
        lambda loader, _: loader.restart(),
    ],
)
def test_ctrl_c_at_any_moment_moves_all_or_none(move):
    other = plain(3)
    next(iter(other))
    state = other.state_dict()
    for at in itertools.count():
        loader = plain()
        for _ in zip(range(2), loader, strict=False):
            pass
        before = loader.state_dict()
        trace = InterruptedOnce(at, OURS)
        trace.around(lambda loader=loader: move(loader, state))
        arrived = plain()
        arrived.load_state_dict(before)
        move(arrived, state)
        after = loader.state_dict()
        assert after in (before, arrived.state_dict()), at
        assert trace.came or after == arrived.state_dict() != before
        resumed = plain(7)
        resumed.load_state_dict(after)
        assert list(loader) == list(resumed)
        if not trace.came:
            break
    assert at > 20


@pytest.mark.parametrize("given", ["bytes", "path", "state"])
def test_one_checkpoint_of_all(truth, tmp_path, given):
    loader = MultiPipelineLoader(shards())
    list(zip(range(2), loader, strict=False))
    path = tmp_path / "all.json"
    data = loader.checkpoint(path, user={"step": 2})
    checkpoint = {"bytes": data, "path": path, "state": loader.state_dict()}[given]
    resumed = MultiPipelineLoader(shards(seed=9), checkpoint=checkpoint)
    assert resumed.user == (None if given == "state" else {"step": 2})
    assert resumed.is_restored_from_checkpoint
    assert resumed.checkpoint(user={"step": 2}) == data == path.read_bytes()
    assert list(resumed) == truth[0][2:]
    with pytest.raises(StateMismatchError, match="not a state of 3 pipelines"):
        MultiPipelineLoader(shards(), checkpoint=loader.checkpoints()[0])
    with pytest.raises(StateMismatchError):
        StatefulDataLoader(shards()[0], checkpoint=data)


def test_an_error_says_of_which_pipeline_it_is(truth):
    nodes = shards()
    nodes[1].sources[0].sources[0].map_fn = Reading(truth[0][1][1][0])
    loader = MultiPipelineLoader(nodes)
    with pytest.raises(ValueError, match="broken") as caught:
        list(loader)
    assert caught.value.__notes__.count("in pipeline 1") == 1
    with pytest.raises(LoaderFailedError) as caught:
        next(iter(loader))
    assert caught.value.__notes__ == ["in pipeline 1"]
    state = loader.state_dict()
    state["pipelines"]["2"]["nodes"]["sampler"]["length"] = 4
    for refuse in (loader.load_state_dict, loader.validate_state_dict, lambda one: MultiPipelineLoader(shards(), checkpoint=one)):
        with pytest.raises(StateMismatchError) as caught:
            refuse(state)
        assert caught.value.__notes__ == ["in pipeline 2"]


def test_moves(truth):
    loader = MultiPipelineLoader(shards())
    next(iter(loader))
    loader.restart()
    assert list(loader) == truth[0]
    loader.set_epoch(2)
    assert list(loader) == truth[2]


def test_epochs_of_different_lengths_are_told_and_nothing_is_lost():
    nodes = [SamplerNode(SequentialSampler(length)) for length in (3, 2)]
    loader = MultiPipelineLoader(nodes)
    steps = iter(loader)
    assert [next(steps), next(steps)] == [[0, 0], [1, 1]]
    with pytest.raises(RuntimeError, match=re.escape("the epochs of pipelines [1] of 2 have fewer batches")):
        next(steps)
    assert places_of(loader) == [(0, 2), (1, 0)]


def test_nothing_goes_on_while_they_stand_in_different_epochs():
    nodes = [SamplerNode(SequentialSampler(length)) for length in (3, 2)]
    loader = MultiPipelineLoader(nodes)
    list(zip(range(2), loader, strict=False))
    state = loader.state_dict()
    assert places_of(loader) == [(0, 2), (1, 0)]
    with pytest.raises(RuntimeError, match="stand in different epochs"):
        iter(loader)
    with pytest.raises(ValueError, match="different positions"):
        loader.load_state_dict(state)
    loader.set_epoch(1)
    assert next(iter(loader)) == [0, 0]


def test_an_iterator_that_failed_raises_from_then_on(truth):
    loader = MultiPipelineLoader(shards(fails=truth[0][1][1][0]))
    steps = iter(loader)
    next(steps)
    with pytest.raises(ValueError, match="broken"):
        next(steps)
    for _ in range(2):
        with pytest.raises(LoaderFailedError):
            next(steps)


def lasting(info):
    """Epochs of lengths of their own; what it is called with."""
    if info.iteration >= (2, 0, 0, 3)[info.epoch_idx % 4]:
        raise StopIteration
    return tuple(info)


def test_an_epoch_may_be_empty():
    loader = MultiPipelineLoader([ExternalSource(lasting, batch_info=True) for _ in range(2)])
    expected = [[[(index, epoch)] * 2 for index in range(length)] for epoch, length in enumerate((2, 0, 0, 3))]
    found = []
    for epoch in range(4):
        assert [one.epoch for one in loader.positions] == [epoch] * 2
        resumed = MultiPipelineLoader([ExternalSource(lasting, batch_info=True) for _ in range(2)])
        resumed.load_state_dict(loader.state_dict())
        assert epochs(resumed, 4 - epoch) == expected[epoch:]
        found.append(list(loader))
    assert found == expected


def test_an_epoch_that_is_empty_for_one_of_them():
    nodes = [ExternalSource(lasting, batch_info=True), SamplerNode(SequentialSampler(2))]
    loader = MultiPipelineLoader(nodes, allow="position")
    assert [len(epoch) for epoch in epochs(loader, 3)] == [2, 0, 0]
    assert [one.epoch for one in loader.positions] == [3, 3]
    loader = MultiPipelineLoader(loader.loaders)
    loader.set_epoch(1)
    with pytest.raises(RuntimeError, match=re.escape("the epochs of pipelines [0] of 2 have fewer")):
        list(loader)
    assert places_of(loader) == [(1, 0), (1, 0)]


def test_an_iterator_belongs_to_its_epoch(truth):
    loader = MultiPipelineLoader(shards())
    old = iter(loader)
    assert list(loader) == truth[0]
    assert list(old) == []
    old = iter(loader)
    loader.close()
    with pytest.raises(IteratorInvalidError):
        next(old)


def test_what_is_led_back_is_counted_back():
    """A sample that the first one left out, in a step that the second one failed."""
    nodes = []
    for fails, skips in ((2, 1), (3, 0)):
        source = SamplerNode(SequentialSampler(8))
        nodes.append(SeededBatcher(SeededMapper(source, Reading(fails), rng=(), max_skipped=skips), 2, collate_fn=list, seed=1))
    loader = MultiPipelineLoader(nodes)
    steps = iter(loader)
    assert next(steps) == [[0, 1], [0, 1]]
    with pytest.raises(ValueError, match="broken"):
        next(steps)
    assert loader.state_dict()["pipelines"]["0"]["nodes"]["mapper"]["skipped"] == 0
    loader.loaders[1].close()
    nodes[1].sources[0].map_fn.fails = None
    assert next(iter(loader)) == [[3], [2, 3]]
    assert loader.state_dict()["pipelines"]["0"]["nodes"]["mapper"]["skipped"] == 1


def test_the_user_s_own_moves_count(truth):
    loader = MultiPipelineLoader(shards())
    next(iter(loader))
    for one in loader.loaders:
        one.set_epoch(2)
    assert list(loader) == truth[2]


def test_a_load_that_fails_halfway_changes_nothing(truth, monkeypatch):
    """As where a foreign node refuses only when it is reset."""
    loader, other = MultiPipelineLoader(shards()), MultiPipelineLoader(shards(seed=7))
    next(iter(other))
    state = other.state_dict()

    def refuse(state_dict):
        raise StateMismatchError("not now")

    monkeypatch.setattr(loader.loaders[2], "load_state_dict", refuse)
    before = loader.state_dict()
    with pytest.raises(StateMismatchError, match="not now"):
        loader.load_state_dict(state)
    assert loader.state_dict() == before
    assert [one.is_restored_from_checkpoint for one in loader.loaders] == [False] * 3
    assert list(loader) == truth[0]


def test_loaders_that_a_refused_checkpoint_had_moved_are_put_back():
    other = MultiPipelineLoader(shards())
    first = other.loaders[1].checkpoint(user="first")
    next(iter(other))
    second = [one.checkpoint(user="second") for one in other.loaders]
    loaders = [StatefulDataLoader(node, checkpoint=first if rank == 1 else None) for rank, node in enumerate(shards())]
    with pytest.raises(ValueError, match="some were not"):
        MultiPipelineLoader(loaders, checkpoint=[*second[:2], None])
    assert [place_of(one) for one in loaders] == [(0, 0)] * 3
    assert [one.user for one in loaders] == [None, "first", None]
    assert [one.is_restored_from_checkpoint for one in loaders] == [False, True, False]
    MultiPipelineLoader(loaders, checkpoint=second)
    assert [one.user for one in loaders] == ["second"] * 3


def test_loaders_that_were_given_stay_open_where_they_are_refused(truth):
    loaders = [StatefulDataLoader(node) for node in shards()[:2]]
    batches = iter(loaders[0])
    assert next(batches) == truth[0][0][0]
    with pytest.raises(ValueError, match="different positions"):
        MultiPipelineLoader(loaders)
    assert list(batches) == [step[0] for step in truth[0][1:]]


def test_one_that_cannot_be_put_back_keeps_no_other_from_it():
    """The first one begins anew, but is not led back, and the last one does neither."""
    with pytest.warns(UserWarning, match="not captured"):
        sources = [ExternalSource([1, 2]), SamplerNode(SequentialSampler(2)), ExternalSource(iter([1, 2]))]
    loader = MultiPipelineLoader(sources)
    with pytest.raises(ResumableModeRequiredError, match="only onwards"):
        loader.set_epoch(3)
    assert places_of(loader) == [(3, 0), (0, 0), (0, 0)]


def different_lengths(consumed):
    """The second one was restored, from where so many were consumed."""
    loader = StatefulDataLoader(SamplerNode(SequentialSampler(2)))
    list(zip(range(consumed), loader, strict=False))
    nodes = [SamplerNode(SequentialSampler(length)) for length in (3, 2)]
    return MultiPipelineLoader(nodes, checkpoint=[None, loader.checkpoint()], allow="unrestored")


def test_what_is_allowed_stays_what_was_asked_for():
    """That the restored one stands elsewhere than the others may be, until the next load."""
    loader = different_lengths(1)
    apart, alike = loader.state_dict(), different_lengths(0).state_dict()
    assert list(loader) == [[0, 1]]
    for _ in range(2):
        with pytest.raises(ValueError, match="different positions"):
            loader.load_state_dict(apart)
        assert [len(list(loader)) for _ in range(2)] == [2, 2]
    loader.load_state_dict(alike)
    with pytest.raises(RuntimeError, match="make them equal, or give allow='position'"):
        list(loader)


def test_ctrl_c_at_any_moment_of_a_load_changes_what_may_be_with_it():
    alike = different_lengths(0).state_dict()
    arrived = []
    for at in itertools.count():
        loader = different_lengths(1)
        before = loader.state_dict()
        trace = InterruptedOnce(at, (*OURS, "alike_pipelines.py"))
        trace.around(lambda loader=loader: loader.load_state_dict(alike))
        arrived.append(loader.state_dict() != before)
        if arrived[-1]:
            with pytest.raises(RuntimeError, match="make them equal"):
                list(loader)
        else:
            assert list(loader) == [[0, 1]]
        if not trace.came:
            break
    assert set(arrived) == {False, True}
    assert at > 20


def test_what_a_loader_of_one_tells(truth):
    loader = MultiPipelineLoader(shards())
    list(zip(range(2), loader, strict=False))
    assert loader.position[:4] == (0, 2, 12, 2)
    assert [one["delivered"] for one in loader.stats()] == [2] * 3
    pictures = loader.describe().split("pipeline ")
    assert pictures[0] == ""
    for number, picture in enumerate(pictures[1:]):
        assert picture.rstrip("\n") == f"{number}\n{loader.loaders[number].describe()}"
    assert repr(loader).startswith("MultiPipelineLoader([StatefulDataLoader(SamplerNode -> ")
    list(loader)
    assert loader.position[:3] == (1, 0, 0)


def test_pipelines_that_stand_apart_have_no_one_position():
    loader = different_lengths(1)
    with pytest.raises(RuntimeError, match="stand at different positions; ask for one's"):
        _ = loader.position
    assert list(loader) == [[0, 1]]
    assert loader.position[:3] == (1, 0, 0)


def test_states_of_different_shuffles_are_refused(folder):
    def make(seed):
        changes = ({"shuffle_after_epoch_seed": seed}, {"shuffle_after_epoch_seed": seed})
        return MultiPipelineLoader(readers(folder, *changes, shuffle_after_epoch=True))

    one, other = make(1), make(2)
    before = one.state_dict()
    mixed = {"pipelines": {"0": other.state_dict()["pipelines"]["0"], "1": before["pipelines"]["1"]}}
    with pytest.raises(ValueError, match="differ in shuffle_after_epoch_seed"):
        one.load_state_dict(mixed)
    assert one.state_dict() == before


def test_an_empty_state_does_nothing(truth):
    loader = MultiPipelineLoader(shards())
    loader.validate_state_dict({})
    loader.load_state_dict({})
    assert not loader.is_restored_from_checkpoint
    assert list(loader) == truth[0]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: state["pipelines"].pop("1"), "not a state of 3 pipelines"),
        (lambda state: state["pipelines"].update({"3": {}}), "not a state of 3 pipelines"),
        (lambda state: state["pipelines"]["2"]["nodes"]["sampler"].update(length=4), r"sampler\.length: saved 4, here 21"),
        (lambda state: state.update(pipelines=None), "not a state of 3 pipelines"),
        (lambda state: state.update(pipelines=dict(enumerate(state["pipelines"].values()))), "not a state of 3 pipelines"),
    ],
)
def test_a_refused_state_changes_nothing(truth, change, match):
    loader = MultiPipelineLoader(shards())
    state = loader.state_dict()
    next(iter(loader))
    before = loader.state_dict()
    change(state)
    for load in (loader.load_state_dict, loader.validate_state_dict):
        with pytest.raises(StateMismatchError, match=match):
            load(state)
    assert loader.state_dict() == before
    assert list(loader) == truth[0][1:]


def test_checkpoints_of_some_or_of_different_places():
    loader = MultiPipelineLoader(shards())
    first = loader.checkpoints()
    next(iter(loader))
    second = loader.checkpoints()
    with pytest.raises(ValueError, match="some pipelines were restored from a checkpoint and some were not"):
        MultiPipelineLoader(shards(), checkpoint=[None, *first[1:]])
    with pytest.raises(ValueError, match="one for each of 3 pipelines, got 2"):
        MultiPipelineLoader(shards(), checkpoint=first[:2])
    with pytest.raises(ValueError, match="different positions"):
        MultiPipelineLoader(shards(), checkpoint=[second[0], *first[1:]])
    mixed = MultiPipelineLoader(shards(), checkpoint=[None, *second[1:]], allow="unrestored")
    assert [one.consumed for one in mixed.positions] == [0, 6, 6]
    assert not mixed.is_restored_from_checkpoint
    assert [len(epoch) for epoch in epochs(mixed, 2)] == [3, 4]  # the first of them to end ends it for all
    assert len(MultiPipelineLoader(shards(), checkpoint=[None, *first[1:]], allow="unrestored")) == 4
    with pytest.raises(ValueError, match="allow may name"):
        MultiPipelineLoader(shards(), allow="seed")
    with pytest.raises(ValueError, match="one or more"):
        MultiPipelineLoader([])


def test_batch_sizes_have_to_be_equal():
    with pytest.raises(ValueError, match="pipelines 0 and 1 differ in batch_size"):
        MultiPipelineLoader([shards(size=2)[0], shards(size=3)[1]])


@pytest.fixture
def folder(tmp_path):
    for number in range(7):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]))
    return tmp_path


def readers(folder, *changes, size=2, count=7, **both):
    nodes = []
    for shard, change in enumerate(changes):
        files = [f"{number}.bin" for number in range(change.pop("count", count))]
        reader = FileReader(folder, files, **{"shard_id": shard, "num_shards": len(changes), **both, **change})
        nodes.append(SeededBatcher(reader, size, collate_fn=label_of, seed=1))
    return nodes


def label_of(samples):
    return [label.item() for _, label in samples]


def test_readers_of_files(folder):
    loader = MultiPipelineLoader(readers(folder, {}, {}))
    assert list(loader) == [[[0, 1], [3, 4]], [[2, 3], [5, 6]]]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"count": 6}, "epoch_size"),
        ({"num_shards": 3}, "number_of_shards"),
        ({"pad_last_batch": True}, "pad_last_batch"),
        ({"stick_to_shard": True}, "stick_to_shard"),
        ({"shuffle_after_epoch": True}, "stick_to_shard"),
    ],
)
def test_readers_have_to_be_alike(folder, change, key):
    with pytest.raises(ValueError, match=f"pipelines 0 and 1 differ in .*{key}"):
        MultiPipelineLoader(readers(folder, {}, change))


def test_readers_have_to_shuffle_alike_and_to_read_shards_of_their_own(folder):
    seeds = [{"shuffle_after_epoch_seed": seed} for seed in (1, 2)]
    with pytest.raises(ValueError, match="differ in shuffle_after_epoch_seed"):
        MultiPipelineLoader(readers(folder, *seeds, shuffle_after_epoch=True))
    with pytest.raises(ValueError, match=re.escape("a shard of its own, got shard_id [1, 1]")):
        MultiPipelineLoader(readers(folder, {"shard_id": 1}, {}))


def test_each_is_a_loader_or_pipeline_of_its_own():
    loader = StatefulDataLoader(SamplerNode(SequentialSampler(2)))
    with pytest.raises(ValueError, match="given twice"):
        MultiPipelineLoader([loader, loader])
    with pytest.raises(TypeError, match="must be a torchdata node, got list"):
        MultiPipelineLoader([[1, 2, 3], [4, 5, 6]])
    assert list(loader) == [0, 1]


def test_dropping_frees_all(truth):
    loader = MultiPipelineLoader(shards(workers=1))
    held = [weakref.ref(one) for one in (loader, *loader.loaders, *(one.pipeline for one in loader.loaders))]
    enabled = gc.isenabled()
    gc.disable()
    try:
        steps = iter(loader)
        assert next(steps) == truth[0][0]
        del loader, steps
        assert [one() for one in held] == [None] * 7
    finally:
        if enabled:
            gc.enable()


def test_the_user_s_own_loads_within_a_step_that_failed_count(truth):
    """As the error's remedy says for each: what was given is then not handed out."""
    loader = MultiPipelineLoader(shards(fails=truth[0][1][1][0]))
    with pytest.raises(ValueError, match="broken"):
        list(loader)
    other = MultiPipelineLoader(shards())
    list(zip(range(2), other, strict=False))
    for one, state in zip(loader.loaders, other.state_dict()["pipelines"].values(), strict=True):
        one.load_state_dict(state)
    assert loader.state_dict() == other.state_dict()
    assert list(loader) == truth[0][2:]


def test_what_was_given_in_a_step_that_failed_outlives_close(truth):
    loader = MultiPipelineLoader(shards(fails=truth[0][3][1][0]))
    found = []
    with pytest.raises(ValueError, match="broken"):
        found.extend(iter(loader))
    before = loader.checkpoints()
    loader.close()
    loader.loaders[1].pipeline.sources[0].sources[0].map_fn.fails = None
    assert loader.checkpoints() == before
    assert list(loader) == truth[0][3:]


def test_what_was_refused_is_free_again(folder):
    nodes = readers(folder, {"shard_id": 1}, {})
    with pytest.raises(ValueError, match="a shard of its own"):
        MultiPipelineLoader(nodes)
    assert next(iter(StatefulDataLoader(nodes[0]))) == [3, 4]
