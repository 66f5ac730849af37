"""A DALI pipeline as a node that resumes bit for bit."""

from __future__ import annotations

import base64
import hashlib
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from torchdata.nodes import BaseNode

from stateful_pipes.caught import brief
from stateful_pipes.errors import Difference, LoaderFailedError, ResumableModeRequiredError, StateMismatchError
from stateful_pipes.integrations.dali_batches import DALIBatches, Pipeline
from stateful_pipes.integrations.dali_graph import Graph, check_resumable
from stateful_pipes.nodes.last_batch import LastBatchPolicy

__all__ = ["DALIPipelineNode", "LastBatchPolicy"]

_REMEDIES = {"reader_sizes": "readers or files were added or removed; put back those that were there"}


class DALIPipelineNode(BaseNode[dict[str, Any]]):
    """Yields the batches of a DALI pipeline; its state is DALI's own checkpoint, as of the last batch handed out.

    A torchdata node: it stands below torchdata's nodes and `Loader`, below this library's nodes, `Mixer` and
    `StatefulDataLoader`, in the main process. A resume builds a new pipeline from the checkpoint and gives the very batches
    that would have followed, however far DALI has read ahead.

    Epochs end as with DALI's `DALIGenericIterator`: with `reader_name` by its length and `last_batch_policy`, some with an
    empty batch; without, only where an `external_source` ends. `reset(None)` goes to the next epoch at an epoch's end; DALI
    cannot leave one in the middle, so elsewhere it does nothing, and the epoch goes on: nothing is lost or read twice. A loop
    that leaves early, as over some validation batches, loads a state of the epoch's start each time; `restart` is refused.
    torchdata's `Loader`, whatever its node is, tells an old state from then on if it was resumed at an epoch's end;
    `StatefulDataLoader` does not.

    A state fits the pipeline with the same operators, arguments, batch size and seed, over as many samples; threads, queue
    depths, the executor and the device may be others, and the factory's code may have moved. A refusal names the operators and
    arguments that are others. Not compared are what an `external_source` calls and what is in the files. A plain checkpoint of
    DALI's knows the operators' names only: by default their numbers in the graph, which shift when one is added, so give those
    with a state a `name=`.

    With one pipeline a rank, as with `shard_id=rank`, a state is its rank's own. `torch.distributed.checkpoint` keeps one copy
    of equal keys, so save it under a key of the rank's own: `dcp.save({f"loader_{rank}": loader})`, and load it so.

    The pipeline works in the process that made it only. A forked child, such as a worker of `ProcessPrefetcher`, may come and
    go; asked there, the node raises RuntimeError.

    Args:
        pipeline_factory: Callable of a checkpoint (bytes, or None for a fresh start) that returns a new, unbuilt pipeline with
            `enable_checkpointing=True` and that `checkpoint`: call the `pipeline_def` function in it. It is called once at
            construction and once at each load, and once more where a load is refused.
        output_names: A key for each output of the pipeline.
        reader_name: `name` of the reader that tells how long an epoch is.
        last_batch_policy: What becomes of an epoch's last batch if it is not full: FILL, PARTIAL or DROP, of this library's
            `LastBatchPolicy` or DALI's, or that name; needs `reader_name`.
        ragged: Outputs that are lists whatever their shapes; others are where the shapes in a batch differ.
        checkpoint: Where to start: what a DALI pipeline's `checkpoint()` or an iterator's `checkpoints()` gave.

    Yields:
        A dict of each output's samples: a tensor of shape (batch, *sample), or a list of tensors; of DALI's dtype, on the
        output's device. They are copies, which later batches leave alone.

    State: DALI's checkpoint in base64 (about 500 bytes for 5 operators) and its hash; hashes of the pipeline and of each of its
    operators (35 bytes each; none of more than 64); batch size, seed (-1 for none), how many samples its readers have, the
    arguments. Cost of a state: about 10 us for each operator with a state. Cost of a resume: building a pipeline, at any
    position (as long at iteration 10 as at 40,000: some 10 ms over 4,000 files, up to a second over 200,000).

    Raises:
        ResumableModeRequiredError: the pipeline keeps no checkpoints, an operator in it has none, or it is fed from outside
            or from an `external_source` whose position DALI does not capture.
        StateMismatchError (also at a load): the state or checkpoint is of another pipeline; the error tells what DALI says.
        ValueError: output_names, reader_name or last_batch_policy do not fit the pipeline.
        TypeError: pipeline_factory is a pipeline or a `pipeline_def` function itself, or returns something else.

    >>> def factory(checkpoint):  # doctest: +SKIP
    ...     return my_pipeline(batch_size=8, num_threads=2, device_id=None, enable_checkpointing=True, checkpoint=checkpoint)
    >>> node = DALIPipelineNode(factory, output_names=["image", "label"], reader_name="Reader")  # doctest: +SKIP
    >>> loader = StatefulDataLoader(SeededMapper(node, augment))  # doctest: +SKIP
    """

    def __init__(
        self,
        pipeline_factory: Callable[[bytes | None], Any],
        *,
        output_names: Sequence[str],
        reader_name: str | None = None,
        last_batch_policy: LastBatchPolicy | str = LastBatchPolicy.FILL,
        ragged: Collection[str] = (),
        checkpoint: bytes | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it unannotated
        _check_factory(pipeline_factory)
        self._factory = pipeline_factory
        self._names = _names(output_names)
        self._ragged = _names(ragged) if ragged else ()
        if not set(self._ragged) <= set(self._names):
            raise ValueError(f"ragged must be among {list(self._names)}, got {list(self._ragged)}")
        self._reader_name = reader_name
        self._policy = _policy(last_batch_policy)
        if reader_name is None and self._policy is not LastBatchPolicy.FILL:
            raise ValueError(f"last_batch_policy={self._policy.name} needs a reader_name, which tells where an epoch ends")
        self._pid = os.getpid()
        self._failure = ""
        self._batches, self._graph = self._built(checkpoint)

    def reset(self, initial_state: Mapping[str, Any] | bytes | None = None) -> None:
        """Goes to a state, or to a plain checkpoint of DALI's; with None to the next epoch, where this one has ended.

        Raises:
            StateMismatchError: the state does not fit; nothing is changed.
        """
        self._refuse_fork()
        if initial_state is None:
            self._check()
        super().reset(None)
        if isinstance(initial_state, bytes):
            self._batches, self._graph = self._built(initial_state)
            self._failure = ""
        elif initial_state is not None:
            self._batches, self._graph = self._restored(initial_state)
            self._failure = ""
        else:
            with self._failing():
                if self._batches.ended:
                    self._batches.next_epoch()

    def next(self) -> dict[str, Any]:
        """The next batch of this epoch.

        Raises:
            LoaderFailedError: an earlier batch failed, after which a DALI pipeline cannot go on; a load makes another.
        """
        self._refuse_fork()
        self._check()
        with self._failing():
            return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """Plain JSON types: where the pipeline stood after the last batch handed out; LoaderFailedError as for `next`."""
        self._refuse_fork()
        self._check()
        checkpoint = base64.b64encode(self._batches.checkpoint())
        return {
            **self._arguments(self._batches, self._graph),
            "checkpoint": checkpoint.decode(),
            "sha256": hashlib.sha256(checkpoint).hexdigest(),
        }

    def __len__(self) -> int:
        """Batches in an epoch, as DALI's iterators tell it; TypeError without `reader_name`."""
        if self._reader_name is None:
            raise TypeError("without reader_name it is not known how long an epoch is")
        return len(self._batches)

    def reader_meta(self) -> dict[str, Any]:
        """What DALI's `Pipeline.reader_meta` tells of the reader `reader_name`; nothing without one."""
        return self._batches.reader_meta()

    @property
    def batch_size(self) -> int:
        """The pipeline's."""
        return self._batches.batch_size

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; make one there and load the state")

    def _arguments(self, batches: DALIBatches, graph: Graph) -> dict[str, Any]:
        """What must be equal at a load."""
        return {
            **graph.entries(),
            "reader_sizes": list(batches.reader_sizes),
            "output_names": list(self._names),
            "ragged": list(self._ragged),
            "reader_name": self._reader_name or "",
            "last_batch_policy": self._policy.name,
        }

    def _restored(self, state: Mapping[str, Any]) -> tuple[DALIBatches, Graph]:
        try:
            checkpoint = base64.b64decode(state["checkpoint"], validate=True)
            whole = state["sha256"] == hashlib.sha256(state["checkpoint"].encode()).hexdigest()
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatchError(f"it holds no DALI checkpoint: {error!r}", remedy="The state is damaged") from error
        if not whole:
            raise StateMismatchError("its DALI checkpoint is not what was saved", remedy="The state is damaged")
        refusal = ""
        try:
            batches, graph = self._built(checkpoint)
        except StateMismatchError as error:
            refusal, batches, graph = error.detail, self._batches, self._graph
        found = graph.differences(state) + tuple(
            Difference("", name, state.get(name), here, _REMEDIES.get(name, "Make the node with what was saved"))
            for name, here in self._arguments(batches, graph).items()
            if name not in graph.entries() and state.get(name) != here
        )
        if found or refusal:
            raise StateMismatchError(refusal, differences=found)
        return batches, graph

    def _built(self, checkpoint: bytes | None) -> tuple[DALIBatches, Graph]:
        """The batches of a new pipeline, which stands at the checkpoint; and what that pipeline is."""
        pipeline = self._factory(checkpoint)
        if not isinstance(pipeline, Pipeline):
            raise _not_a_pipeline(pipeline)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Checkpointing enabled in a pipeline with external source")  # an error of ours
            try:
                pipeline.start_py_workers()  # by fork, mostly, and so before DALI touches a GPU
                serialized = pipeline.serialize()
            except RuntimeError as error:
                raise ResumableModeRequiredError(f"DALI does not tell what is in this pipeline: {error}") from error
        check_resumable(serialized, pipeline)
        try:
            pipeline.build()
            self._check_names(pipeline)
            batches = DALIBatches(pipeline, self._names, self._ragged, self._reader_name, self._policy)
        except StateMismatchError:
            raise
        except Exception as error:  # DALI raises errors of many types over a checkpoint, and the same over data
            if checkpoint is not None:
                self._built(None)  # if this fails too, then it was not the checkpoint
                raise StateMismatchError(f"DALI refuses the checkpoint: {error}") from error
            if "Checkpointing is not implemented" in str(error):
                raise ResumableModeRequiredError(f"DALI keeps no checkpoints of this pipeline: {error}") from error
            raise
        if checkpoint is not None and not pipeline.is_restored_from_checkpoint:
            raise ResumableModeRequiredError(
                "pipeline_factory left out the checkpoint", remedy="Let it hand checkpoint= on to the pipeline that it makes"
            )
        return batches, Graph(serialized)

    def _check_names(self, pipeline: Pipeline) -> None:
        readers = list(pipeline.reader_meta())
        if self._reader_name is not None and self._reader_name not in readers:
            raise ValueError(f"reader_name must be one of the pipeline's readers {readers}, got {self._reader_name!r}")
        if len(self._names) != pipeline.num_outputs:
            raise ValueError(f"output_names must name {pipeline.num_outputs} outputs, got {list(self._names)}")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """After an error here, Ctrl-C included, the pipeline may have read what was not handed out."""
        try:
            yield
        except StopIteration:
            raise
        except BaseException as error:
            self._failure = brief(error)
            raise

    def _check(self) -> None:
        if self._failure:
            raise LoaderFailedError(self._failure, remedy="Load a state, which makes a new pipeline")

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a DALI pipeline works only in the process that made it, not in a fork of that")


def _check_factory(given: object) -> None:
    """A pipeline, or the function that `pipeline_def` made, which would take the checkpoint for an argument of its own."""
    function = given.func if isinstance(given, partial) else given
    if not callable(given) or isinstance(given, Pipeline) or hasattr(function, "_is_pipeline_def"):
        kind = "a function of pipeline_def" if hasattr(function, "_is_pipeline_def") else f"a {type(given).__name__}"
        raise TypeError(
            "pipeline_factory must be a function of a checkpoint: lambda checkpoint: my_pipe(..., checkpoint=checkpoint); "
            f"got {kind}"
        )


def _not_a_pipeline(found: object) -> Exception:
    if hasattr(found, "next_epoch"):
        return ResumableModeRequiredError(
            "the state of a reader of DALI's dynamic mode tells neither how much of an epoch is left nor whose shard is next, "
            "and fits any reader of its type",
            remedy="Make a pipeline with nvidia.dali.pipeline_def",
        )
    return TypeError(f"pipeline_factory must return a nvidia.dali.Pipeline, got {type(found).__name__}")


def _names(names: Collection[str]) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in found) or len(set(found)) != len(found):
        raise ValueError(f"names of outputs must be distinct strings, got {names!r}")
    return found


def _policy(policy: object) -> LastBatchPolicy:
    name = getattr(policy, "name", policy)
    if name not in LastBatchPolicy.__members__:
        raise ValueError(f"last_batch_policy must be one of {list(LastBatchPolicy.__members__)}, got {policy!r}")
    return LastBatchPolicy[str(name)]
