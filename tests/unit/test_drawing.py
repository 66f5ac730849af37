"""Pictures of pipelines, written out; and that names of any kind break none of them."""

from __future__ import annotations

import re

import pytest
import torchdata.nodes as tn
from torchdata.nodes.samplers.multi_node_weighted_sampler import MultiNodeWeightedSampler

from stateful_pipes import (
    ExternalSource,
    IndexFilter,
    Mixer,
    Node,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.drawing import Branch, branches, chain, drawn, mermaid
from stateful_pipes.nodes.foreign import as_node


def sampler(length=5, **kwargs):
    return SamplerNode(SequentialSampler(length), **kwargs)


def mapper(source, **kwargs):
    return SeededMapper(source, abs, rng=(), **kwargs)


def mixed():
    return SeededBatcher(Mixer({"en": mapper(sampler(2)), "de": sampler(3)}, [1, 3], seed=7), 2, collate_fn=list, seed=8)


def sampler_line(name, length, consumed=0):
    order = f"order='SequentialSampler', length={length}, world_size=1, uneven='pad', epoch=0, consumed={consumed}"
    return f"{name}: SamplerNode({order})"


# The tree.


def test_branches():
    inner = Branch("a", [Branch("b", [Branch("c")]), Branch("d")])
    assert list(branches(Branch("top", [inner, Branch("e", [Branch("f")])]))) == [
        "top",
        "├─ a",
        "│  ├─ b",
        "│  │  └─ c",
        "│  └─ d",
        "└─ e",
        "   └─ f",
    ]


def test_branches_are_made_when_they_are_asked_for():
    def endless():
        yield Branch("below", endless())

    lines = branches(Branch("top", endless()))
    assert [len(next(lines)) for _ in range(5000)][-1] > 5000  # beyond Python's recursion limit, too


def test_a_mixture():
    loader = StatefulDataLoader(mixed())
    assert loader.describe().splitlines() == [
        "batcher: SeededBatcher(batch_size=2, drop_last=False, seed=8)",
        "└─ mixer: Mixer(sources='[\"en\", \"de\"]', weights='0:1/4,3/4', "
        "stop_criteria='CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED', seed=7, world_size=1, uneven='pad', epoch=0, consumed=0, "
        "exhausted='00')",
        "   ├─ en 1/4 ── mapper: SeededMapper(rng='')",
        f"   │  └─ {sampler_line('sampler', 2)}",
        f"   └─ de 3/4 ── {sampler_line('sampler_2', 3)}",
    ]


def test_a_schedule_of_weights():
    node = Mixer([sampler(), sampler()], {0: [1, 1], 100: [1, 2]}, seed=1)
    shown = drawn(node, {})
    assert "├─ 0 1/2, from 100 on 1/3 ── sampler: SamplerNode()\n" in shown
    assert shown.endswith("└─ 1 1/2, from 100 on 2/3 ── sampler_2: SamplerNode()")


def test_nodes_in_a_foreign_one_with_what_they_held():
    node = tn.Prefetcher(tn.Batcher(mapper(sampler()), 2, drop_last=False), 1, snapshot_frequency=1)
    loader = StatefulDataLoader(node)
    next(iter(loader))
    assert loader.describe().splitlines() == [
        "prefetcher: Prefetcher(epoch=0, position=1)",
        "└─ mapper: SeededMapper(rng='')",
        f"   └─ {sampler_line('sampler', 5, consumed=2)}",
    ]


def test_several_pipelines_in_a_foreign_one():
    node = MultiNodeWeightedSampler({"a": sampler(2, name="one"), "b": mapper(sampler(3))}, {"a": 1.0, "b": 1.0}, seed=0)
    assert StatefulDataLoader(node).describe().splitlines() == [
        "multi_node_weighted_sampler: MultiNodeWeightedSampler(epoch=0, position=0)",
        f"├─ {sampler_line('one', 2)}",
        "└─ mapper: SeededMapper(rng='')",
        f"   └─ {sampler_line('sampler', 3)}",
    ]


class Silent(tn.BaseNode):
    """Holds a node and keeps its state in a form of its own."""

    def __init__(self, source):
        super().__init__()
        self.source = source

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.source.reset(initial_state and initial_state["held"][0])

    def next(self):
        return next(self.source)

    def get_state(self):
        return {"held": [self.source.state_dict()["nodes"]]}


def test_what_a_foreign_state_does_not_show_is_left_out():
    shown = StatefulDataLoader(Silent(sampler())).describe()
    assert shown == "silent: Silent(epoch=0, position=0)\n└─ sampler: SamplerNode()"


def test_a_foreign_node_below_ours():
    loader = StatefulDataLoader(mapper(tn.Prefetcher(sampler(), 1), name="top"))
    assert [line.partition("(")[0] for line in loader.describe().splitlines()] == [
        "top: SeededMapper",
        "└─ prefetcher: Prefetcher",
        "   └─ sampler: SamplerNode",
    ]


def test_long_values_are_cut():
    shown = drawn(sampler(), {"sampler": {"type": "SamplerNode", "text": "x" * 1000, "seed": 1}})
    assert shown == f"sampler: SamplerNode(text='{'x' * 56}..., seed=1)"


def test_workers_are_named_where_they_start():
    node = ProcessPrefetcher(mapper(sampler()), 2)
    assert drawn(node, {}).splitlines()[0] == "prefetcher: ProcessPrefetcher(), all below in 2 workers"
    assert drawn(ProcessPrefetcher(sampler(), 0), {}).splitlines()[0] == "prefetcher: ProcessPrefetcher()"


# In one line.


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (sampler, "SamplerNode"),
        (mixed, "[SamplerNode -> SeededMapper | SamplerNode] -> Mixer -> SeededBatcher"),
        (lambda: Mixer([sampler()], [1], seed=0), "SamplerNode -> Mixer"),
        (lambda: as_node(tn.Prefetcher(tn.Batcher(sampler(), 2), 1)), "SamplerNode -> Prefetcher"),
        (
            lambda: Mixer([sampler() for _ in range(1000)], [1] * 1000, seed=0),
            "[SamplerNode | SamplerNode | SamplerNode | SamplerNode | 996 more] -> Mixer",
        ),
    ],
)
def test_chain(make, shown):
    assert chain(make()) == shown


def test_the_loader_s_repr():
    loader = StatefulDataLoader(mixed())
    assert repr(loader) == "StatefulDataLoader([SamplerNode -> SeededMapper | SamplerNode] -> Mixer -> SeededBatcher)"


# Mermaid.


def test_mermaid_of_a_mixture():
    assert mermaid(mixed()).splitlines() == [
        "flowchart LR",
        '  subgraph p0["main process"]',
        '    n0["sampler: SamplerNode"]',
        '    n1["mapper: SeededMapper"]',
        '    n2["sampler_2: SamplerNode"]',
        '    n3["mixer: Mixer"]',
        '    n4["batcher: SeededBatcher"]',
        "  end",
        "  n0 --> n1",
        '  n1 -->|"en 1/4"| n3',
        '  n2 -->|"de 3/4"| n3',
        "  n3 --> n4",
    ]


def boxes(text):
    """Title of each subgraph, and the names in it."""
    found = {}
    for line in text.splitlines():
        if title := re.fullmatch(r'  subgraph p\d+\["(.*)"\]', line):
            found[title[1]] = within = []
        elif node := re.fullmatch(r'    n\d+\["(.*): \w+"\]', line):
            within.append(node[1])
    return found


def test_what_runs_in_workers():
    node = mapper(ProcessPrefetcher(mapper(IndexFilter(sampler(), lambda index: True)), 2), name="above")
    assert boxes(mermaid(node)) == {
        "main process": ["sampler", "index_filter", "prefetcher", "above"],
        "2 workers of prefetcher": ["mapper"],
    }
    source = ProcessPrefetcher(ExternalSource(lambda place: place, batch=False), 1)
    assert boxes(mermaid(source)) == {"main process": ["prefetcher"], "1 worker of prefetcher": ["external_source"]}
    assert list(boxes(mermaid(ProcessPrefetcher(mapper(sampler()), 0)))) == ["main process"]


def test_a_generator_is_read_in_the_main_process():
    with pytest.warns(UserWarning, match="not captured"):
        source = ExternalSource(iter([1, 2]))
    assert boxes(mermaid(ProcessPrefetcher(mapper(source), 1))) == {
        "main process": ["external_source", "prefetcher"],
        "1 worker of prefetcher": ["mapper"],
    }


def test_foreign_nodes_and_theirs_run_in_the_main_process_but_for_workers_of_their_own():
    inner = ProcessPrefetcher(mapper(sampler()), 2)
    node = ProcessPrefetcher(mapper(tn.Prefetcher(inner, 1), name="outer"), 2)
    assert boxes(mermaid(node)) == {
        "main process": ["sampler", "prefetcher", "prefetcher", "prefetcher_2"],
        "2 workers of prefetcher_2": ["outer"],
        "2 workers of prefetcher": ["mapper"],
    }


def test_two_pools_of_one_name_are_two():
    one, other = [ProcessPrefetcher(mapper(sampler(), name=name), 1) for name in "ab"]
    node = MultiNodeWeightedSampler({"a": one, "b": other}, {"a": 1.0, "b": 1.0}, seed=0)
    assert [names for names in boxes(mermaid(as_node(node))).values()][1:] == [["a"], ["b"]]


def test_as_many_nodes_and_arrows_as_there_are():
    text = mermaid(Mixer([sampler() for _ in range(300)], [1] * 300, seed=0))
    assert len(set(re.findall(r"^    (n\d+)\[", text, re.M))) == 301
    assert text.count("-->") == 300


NAMES = [
    'quo"ted',
    "end",
    "a;b#c",
    "%%{init: {}}%%",
    "%% comment",
    "style x:#y;",
    "<script>&amp;",
    "`mark`",
    "1. list",
    "- list",
    "two\nlines",
    "]) -->",
    "\u202eevil",
    "\x1b[31m",
    "größe 数",
    "**bold**",
    "\ud800",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name(name):
    node = Mixer({name: sampler(name=name)}, {name: 1}, seed=0)
    for line in mermaid(node).splitlines():
        label = re.search(r'"(.*)"', line)
        if label:  # nothing that Mermaid reads in another way: signs stand as #number;
            assert re.fullmatch(r"(?:[\w (),=/]|: |#\d+;)*", label[1])
    drawing = drawn(node, {})
    assert len(drawing.splitlines()) == 2
    assert all(line.isprintable() for line in drawing.splitlines())


def test_a_label_says_the_name_again():
    (line,) = [line for line in mermaid(sampler(name='a"b<c>: #1;')).splitlines() if "n0[" in line]
    text = re.sub(r"#(\d+);", lambda found: chr(int(found[1])), line)
    assert text == '    n0["a"b<c>: #1;: SamplerNode"]'


def test_drawing_moves_nothing():
    loader = StatefulDataLoader(mixed())
    expected = list(StatefulDataLoader(mixed()))
    found = [next(iter(loader))]
    state = loader.state_dict()
    for _ in range(2):
        loader.describe(), loader.describe("mermaid"), repr(loader)
    assert loader.state_dict() == state
    assert [*found, *loader] == expected


def test_a_node_of_one_s_own():
    class Doubled(Node):
        def run(self, ticket):
            return [2 * item for item in self.sources[0].run(ticket)]

    node = Doubled(SamplerNode(RandomSampler(3, seed=1)))
    assert drawn(node, {}) == "doubled: Doubled()\n└─ sampler: SamplerNode()"
    assert chain(node) == "SamplerNode -> Doubled"
