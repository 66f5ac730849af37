"""The picture of a profile: a lane for the training loop and one for each worker."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from stateful_pipes.cli.profile_run import Profile

__all__ = ["draw"]

# Okabe and Ito's, which the colour-blind can tell apart.
_WAITING, _STEP, _TASK = ["#D55E00"], ["#009E73"], ["#56B4E9", "#0072B2"]  # tasks in turn, so that each is seen
_HEIGHT = 0.8


def draw(found: Profile, path: Path) -> Figure:
    """Writes it as PNG; time begins with the first batch that counts."""
    begun, ended = found.steps[0].done, found.steps[-1].done
    lanes = len(found.spans)
    figure = Figure(figsize=(12, 1.6 + 0.5 * (1 + lanes)), layout="constrained")
    axes = figure.add_subplot()

    def bars(lane: int, spans: list[tuple[int, int]], colors: list[str], label: str) -> None:
        shown = [((begin - begun) / 1e9, (end - begin) / 1e9) for begin, end in spans if begun <= end and begin <= ended]
        axes.broken_barh(shown, (lane - _HEIGHT / 2, _HEIGHT), facecolors=colors, linewidth=0, label=label)

    bars(0, [(step.asked, step.got) for step in found.steps[1:]], _WAITING, "waits for a batch")
    bars(0, [(step.got, step.done) for step in found.steps[1:]], _STEP, "training step")
    for lane, spans in enumerate(found.spans, 1):
        bars(lane, spans, _TASK, "makes a batch" if lane == 1 else "")
    axes.set_yticks(range(1 + lanes), ["main process", *(f"worker {number}" for number in range(lanes))])
    axes.invert_yaxis()
    axes.set_xlim(0, max((ended - begun) / 1e9, 1e-9))
    axes.set_xlabel("time since the first batch [s]")
    waits = found.waiting / found.seconds if found.seconds else 0.0
    use = f", the workers are busy {found.worker_use:.0%} of it" if found.workers else ""
    axes.set_title(f"The loop waits for data {waits:.0%} of the time{use}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3, frameon=False)
    figure.savefig(path, format="png", dpi=120)
    return figure
