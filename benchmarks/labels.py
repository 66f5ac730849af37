"""What does a balanced order of fifty million labelled samples cost, to have and to resume in the middle of a cycle?

    python benchmarks/labels.py [--json PATH] [--smoke]

The labels are int64, of 300 classes in random order, the largest class thirty times the smallest. To have: making a
`ClassBalancedBatchSampler` and a `BalancedBatchSampler` of them, against one `numpy.argsort` of the same labels. Memory is
how far that raises the peak of resident memory (`ru_maxrss`) of a process that has been forked with the labels in place;
unlike `tracemalloc`, that counts NumPy's scratch memory, too. To resume, of a tenth as many labels: from
`load_state_dict` in the middle of a cycle to the first batch, against the first batch of another cycle, which takes
making that cycle's list. Before that the batches are checked: those after a resume are those of the sampler that was not
interrupted, and each group's share of a cycle is the one that was asked for. It takes some minutes and 4 GB of memory.

Latest, on two cores of an AMD EPYC, otherwise idle:

    what                                              unit  times  lower q.  median  upper q.       target  reached
    numpy.argsort                                        s      5     9.073    9.77     9.844            -        -
    ClassBalancedBatchSampler, built / argsort           x      5    0.4083  0.4259    0.4379    at most 3      yes
    ClassBalancedBatchSampler, memory / labels           x      1     2.257   2.257     2.257    at most 3      yes
    BalancedBatchSampler, built / argsort                x      5    0.3924  0.4272    0.4596    at most 3      yes
    BalancedBatchSampler, memory / labels                x      1     2.257   2.257     2.257    at most 3      yes
    ClassBalancedBatchSampler, a cycle of 17,477,120     s     10     4.966   5.071     5.239            -        -
    ClassBalancedBatchSampler, resume / cycle's list     x     10    0.9439  0.9802     1.063  at most 1.1      yes
    BalancedBatchSampler, a cycle of 17,477,120          s     10     2.841    2.99     3.018            -        -
    BalancedBatchSampler, resume / cycle's list          x     10    0.9315  0.9797    0.9929  at most 1.1      yes
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
from harness import Figure, arguments, in_turn, ratios, report, require, timed

from stateful_pipes import BalancedBatchSampler, ClassBalancedBatchSampler

CLASSES = 300
BATCH = 256
Labels = npt.NDArray[np.int64]
Sampler = BalancedBatchSampler | ClassBalancedBatchSampler
KINDS = (ClassBalancedBatchSampler, BalancedBatchSampler)


def skewed(count: int) -> Labels:
    """Classes whose chances fall geometrically from the first to the last, to a thirtieth."""
    chances = 30.0 ** -np.linspace(0, 1, CLASSES)
    return np.random.default_rng(0).choice(CLASSES, count, p=chances / chances.sum())


def build(kind: Callable[..., Sampler], labels: Labels) -> Sampler:
    sampler: Sampler = kind(labels, BATCH, labels=labels, seed=0)
    return sampler


def peak() -> int:
    """Bytes of this process's resident memory, at the most so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory(kind: Callable[..., Sampler], labels: Labels) -> float:
    """The memory that building takes besides the labels, as a multiple of theirs."""
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()

    def child() -> None:
        before = peak()
        build(kind, labels)
        found.put((peak() - before) / labels.nbytes)

    process = context.Process(target=child)
    process.start()
    process.join()
    require(process.exitcode == 0, f"building a {kind.__name__} in a process of its own failed")
    return found.get()


def middle(sampler: Sampler) -> int:
    """How many batches have been consumed when a cycle is half through."""
    return len(sampler) // 2


def check(kind: Callable[..., Sampler], labels: Labels) -> None:
    sampler, resumed = build(kind, labels), build(kind, labels)
    expected = list(islice(sampler, middle(sampler), middle(sampler) + 3))
    sampler.advance_batch(middle(sampler))
    resumed.load_state_dict(sampler.state_dict())
    require(list(islice(resumed, 3)) == expected, "batches after a resume are other ones")
    shares = np.bincount(labels[sampler.indices(0, range(sampler.samples))])
    require(int(np.ptp(shares)) <= 1, "the classes' shares of a cycle differ by more than one sample")


def first_batch(sampler: Sampler) -> None:
    next(iter(sampler))


def fresh_cycle(sampler: Sampler) -> float:
    """Seconds from the start of another epoch, so of another cycle, to its first batch."""
    sampler.set_epoch(sampler.epoch + 1)
    return timed(first_batch, sampler)


def resume(sampler: Sampler) -> float:
    """Seconds from a load to the first batch, half through the cycle of another epoch."""
    sampler.set_epoch(sampler.epoch + 1)
    sampler.advance_batch(middle(sampler))
    state = sampler.state_dict()

    def load() -> None:
        sampler.load_state_dict(state)
        first_batch(sampler)

    return timed(load)


def main() -> None:
    options = arguments(__doc__)
    count, rounds = (10**6, 2) if options.smoke else (50 * 10**6, 5)
    labels = skewed(count)
    few = labels[: count // 10].copy()
    for kind in KINDS:
        check(kind, few)
    contestants = {kind.__name__: partial(timed, build, kind, labels) for kind in KINDS}
    seconds = in_turn({"argsort": partial(timed, np.argsort, labels), **contestants}, rounds)
    figures = [Figure("numpy.argsort", "s", seconds["argsort"])]
    for kind in KINDS:
        name = kind.__name__
        figures += [
            Figure(f"{name}, built / argsort", "x", ratios(seconds[name], seconds["argsort"]), target=3, at_most=True),
            Figure(f"{name}, memory / labels", "x", [memory(kind, labels)], target=3, at_most=True),
        ]
    for kind in KINDS:
        name, sampler = kind.__name__, build(kind, few)
        made = in_turn({"list": partial(fresh_cycle, sampler), "resume": partial(resume, sampler)}, 2 * rounds)
        figures += [
            Figure(f"{name}, a cycle of {sampler.samples:,}", "s", made["list"]),
            Figure(f"{name}, resume / cycle's list", "x", ratios(made["resume"], made["list"]), target=1.1, at_most=True),
        ]
    report("labels", figures, options)


if __name__ == "__main__":
    main()
