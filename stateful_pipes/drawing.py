"""Pictures of a pipeline: as a tree, in one line, and as a Mermaid flowchart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from stateful_pipes.contract import NodeContract
from stateful_pipes.nodes.external_source import ExternalSource
from stateful_pipes.nodes.foreign import ForeignNode, sources_of
from stateful_pipes.nodes.index_filter import IndexFilter
from stateful_pipes.nodes.mixer import Mixer
from stateful_pipes.nodes.plain_sampler import PlainSamplerNode
from stateful_pipes.nodes.sampler import SamplerNode
from stateful_pipes.prefetch.prefetcher import has_workers
from stateful_pipes.progress import states_in
from stateful_pipes.wording import counted, short_repr, shortened

__all__ = ["Branch", "branches", "chain", "drawn", "mermaid"]

_LONGEST = 60
_MOST_SIDE_BY_SIDE = 4
_Entries = Mapping[str, Mapping[str, Any]]


class Branch(NamedTuple):
    """A line of a tree, and what hangs below it."""

    label: str
    below: Iterable[Branch] = ()


def branches(top: Branch) -> Iterator[str]:
    """The lines of a tree, each made when it is asked for.

    >>> print(*branches(Branch("top", [Branch("one", [Branch("leaf")]), Branch("other")])), sep="\\n")
    top
    ├─ one
    │  └─ leaf
    └─ other
    """
    todo = [("", "", top)]
    while todo:
        before, stem, branch = todo.pop()
        yield f"{before}{stem}{branch.label}"
        before += {"": "", "├─ ": "│  ", "└─ ": "   "}[stem]
        for number, one in enumerate(reversed(list(branch.below))):
            todo.append((before, "├─ " if number else "└─ ", one))


def drawn(top: NodeContract, entries: _Entries) -> str:
    """A pipeline as a tree with the top first and the sources at its leaves.

    A line is a node's name, its type and what its state holds, long values cut; at a mixture's sources also their names and
    weights. Our nodes inside foreign ones hang below those, with what they held when the foreign node made its own state.

    Args:
        top: The node at the top.
        entries: "nodes" of its state.
    """
    return "\n".join(branches(_branch("", top, entries)))


def chain(top: NodeContract) -> str:
    """The types of a pipeline's nodes in one line, from the sources up; several sources stand side by side in brackets."""
    below = [chain(one.node) for one in _below(top)]
    if len(below) > 1:
        more = [f"{len(below) - _MOST_SIDE_BY_SIDE} more"] if len(below) > _MOST_SIDE_BY_SIDE else []
        below = [f"[{' | '.join([*below[:_MOST_SIDE_BY_SIDE], *more])}]"]
    return " -> ".join([*below, top.type_name])


def mermaid(top: NodeContract) -> str:
    """A pipeline as the text of a Mermaid flowchart, from the sources on the left to the top on the right.

    Each node stands in the processes that its part of the work runs in: what makes and deals out indices, a generator, other
    libraries' nodes and what they hold in the main process, the rest below a `ProcessPrefetcher` in its workers.
    """
    boxes: dict[str, list[str]] = {"main process": []}
    arrows: list[str] = []
    _place(top, "main process", boxes, arrows)
    lines = ["flowchart LR"]
    for number, (title, nodes) in enumerate(boxes.items()):
        lines += [f"  subgraph p{number}[{_quoted(title)}]", *(f"    {node}" for node in nodes), "  end"] if nodes else []
    return "\n".join([*lines, *(f"  {arrow}" for arrow in arrows)])


class _Below(NamedTuple):
    node: NodeContract
    edge: str
    """What stands at the way up from it."""


def _below(node: NodeContract) -> list[_Below]:
    if isinstance(node, Mixer):
        return [_Below(*one) for one in zip(node.sources, _shares(node), strict=True)]
    return [_Below(one, "") for one in sources_of(node)]


def _shares(mixer: Mixer[Any]) -> Iterator[str]:
    """For each source its name and weights, such as "en 1/3, from 1000 on 1/2"."""
    stages = [stage.split(":") for stage in str(mixer.settings()["weights"]).split(";")]
    for number, name in enumerate(mixer.names):
        weights = [(start, shares.split(",")[number]) for start, shares in stages]
        told = [weight if start == "0" else f"from {start} on {weight}" for start, weight in weights]
        yield f"{_plain(str(name))} {shortened(', '.join(told), _LONGEST)}"


def _branch(edge: str, node: NodeContract, entries: _Entries) -> Branch:
    held = [
        f"{key}={short_repr(value, _LONGEST)}"
        for key, value in entries.get(node.name, {}).items()
        if key not in ("type", "state")
    ]
    label = f"{_plain(node.name)}: {node.type_name}({', '.join(held)})"
    if has_workers(node):
        label += f", all below in {counted(node.num_workers, 'worker')}"
    inner = _inner_entries(node, entries) if isinstance(node, ForeignNode) else None
    below = _below(node)
    found = [entries] * len(below) if inner is None else inner
    parts = zip(below, found, strict=True)
    return Branch(f"{edge} ── {label}" if edge else label, (_branch(one.edge, one.node, held) for one, held in parts))


def _inner_entries(node: ForeignNode, entries: _Entries) -> list[_Entries]:
    """What a foreign node's state holds of each pipeline in it; nothing where it is not plain which is whose."""
    tops = list(node.inner())
    state = json.loads(str(entries.get(node.name, {}).get("state", "null")))
    found: list[_Entries] = [one["nodes"] for _, one in states_in(state)]
    alike = len(found) == len(tops) and all(_top_of(top) >= set(held) for top, held in zip(tops, found, strict=True))
    return found if alike else [{} for _ in tops]


def _top_of(node: NodeContract) -> set[str]:
    return {node.name}.union(*(_top_of(source) for source in node.sources))


def _place(node: NodeContract, process: str, boxes: dict[str, list[str]], arrows: list[str]) -> str:
    """Puts a node and all below it into boxes; returns its id."""
    within = process
    if isinstance(node, ForeignNode):
        within = process = "main process"
    elif has_workers(node):
        within = f"{counted(node.num_workers, 'worker')} of {node.name}"
        if within in boxes:  # one inside another library's node may have the name of one outside
            within += f" ({len(boxes)})"
    elif isinstance(node, (SamplerNode, PlainSamplerNode, IndexFilter)) or _reads_onwards(node):
        process = "main process"
    boxes.setdefault(within, [])
    below = [(_place(one.node, within, boxes, arrows), one.edge) for one in _below(node)]
    made = f"n{sum(map(len, boxes.values()))}"
    boxes[process].append(f"{made}[{_quoted(f'{node.name}: {node.type_name}')}]")
    arrows += [f"{one} -->{f'|{_quoted(edge)}|' if edge else ''} {made}" for one, edge in below]
    return made


def _reads_onwards(node: NodeContract) -> bool:
    """Whether it is read where the cursor is, since it can be read only once."""
    return isinstance(node, ExternalSource) and not node.ends_in_run


def _quoted(text: str) -> str:
    """A label that Mermaid takes for text whatever it holds: all but letters, digits and a few signs by their numbers."""
    spaced = " ".join(text.split())
    return '"' + re.sub(r"[^\w (),=/:]|:(?! )", lambda found: f"#{ord(found[0])};", _plain(spaced)) + '"'


def _plain(name: str) -> str:
    return name if name.isprintable() else repr(name)
