"""That a pipeline which was cut anywhere and resumed goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Sequence

from stateful_pipes.testing.pieces import Factory
from stateful_pipes.testing.verification import verify

__all__ = ["assert_pipeline_resume"]


def assert_pipeline_resume(
    factory: Factory,
    *,
    batches: int = 64,
    seed: int = 0,
    cuts: int = 8,
    workers: Sequence[int] = (0, 2),
    kills: int = 2,
    new_process: bool = True,
) -> None:
    """Reads a pipeline straight through, then cut at random and resumed, and compares every batch bit for bit and in order.

    Each resume is of a state that went through JSON, in a pipeline that `factory` makes anew, whose seeds are others until the
    state brings its own. Between batches, and before a pipeline is made, the global generators are moved. Tried are:

    * the same once more from the first state, without a cut;
    * a chain of resumes: before the first batch, after the last one of an epoch, at random places, and at one place twice;
    * the same with other numbers of workers in turn;
    * the same with workers killed by SIGKILL;
    * one resume that is read to the end;
    * a chain in a new process: with another PYTHONHASHSEED, directory listings the other way round, and the wall clock on
      another day (where the factory cannot be pickled, in a fork, without the first).

    Where a batch differs, it is read again and again with one thing changed at a time, to find out why.

    Args:
        factory: Makes a `StatefulDataLoader` or a torchdata node, a new one at each call, with the same arguments. One with a
            parameter `num_workers` is called with that; else the ProcessPrefetcher of what it makes is set. A function of a
            module, to be tried in a new process.
        batches: How many are read at most, also of an endless pipeline; and at most two epochs.
        seed: Of the cuts and kills, at least 0.
        cuts: How many at random in each chain, beside those that are always made.
        workers: Numbers of worker processes. The straight run has the first.
        kills: How many workers are killed, in all.
        new_process: Whether to start one, which takes as long as importing torch.

    Memory: that of the batches. Time: some five to six times that of the straight run. The caller's generators are as before.

    Raises:
        AssertionError: a batch differs. It names the trial, the epoch and number of the batch, the sample in it (place,
            position, index), the path of the leaf, and the likeliest cause: an unseeded, private or global generator, a
            counter or cache, time, an unordered listing, changed data... or that it is not known, and what was tried.
        TypeError: what the factory makes is no pipeline, or has no batch.
        ResumableModeRequiredError: it has no state.

    >>> from stateful_pipes import StatefulDataLoader
    >>> from stateful_pipes.testing import assert_pipeline_resume
    >>> def factory():
    ...     return StatefulDataLoader(range(10), batch_size=3, shuffle=True)
    >>> assert_pipeline_resume(factory, workers=(0,), new_process=False)
    """
    verdict = verify(factory, batches=batches, seed=seed, cuts=cuts, workers=workers, kills=kills, new_process=new_process)
    if not verdict.is_exact:
        raise AssertionError(f"the pipeline does not resume exactly\n{verdict}")
