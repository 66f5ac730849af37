"""Input pipelines for PyTorch that resume bit for bit.

The house, each room importing only from those above it:

    caught  errors  integers  naming  wording      ground
    fields  encoding  rng
    state  permutation
    samplers/                                      orders: pure functions of (seed, epoch, position)
    skips  ticket  pulled  stream  contract        the cursor half and the pure half of a pipeline
    pipeline_state  node  nodes/
    prefetch/                                      worker processes
    progress  drawing                              how far a state is, and what a pipeline looks like
    checkpoint  sealed_file  checkpoint_manager    files
    agreement  door  stats  view  iterator         the top
    elsewhere  moves  loader  alike_pipelines  joint_step  multi_view  multi_pipeline  dataset
    integrations/                                  other libraries' pipelines as nodes, each with an extra of its own
    training/                                      a whole training, paused and resumed
    testing/                                       what shows that a resume is exact
    cli/                                           the command line
"""

import logging

from stateful_pipes.checkpoint_manager import Checkpoint, CheckpointManager
from stateful_pipes.dataset import IterableDatasetReader, as_dataset
from stateful_pipes.errors import StatefulPipesError, get_error_message
from stateful_pipes.fields import Field
from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.multi_pipeline import MultiPipelineLoader, MultiPipelineState
from stateful_pipes.node import Node
from stateful_pipes.nodes.batcher import SeededBatcher
from stateful_pipes.nodes.external_source import BatchInfo, ExternalSource, SampleInfo
from stateful_pipes.nodes.file_reader import FileReader
from stateful_pipes.nodes.flat_mapper import SeededFlatMapper
from stateful_pipes.nodes.foreign import as_node
from stateful_pipes.nodes.index_filter import IndexFilter
from stateful_pipes.nodes.last_batch import LastBatchPolicy
from stateful_pipes.nodes.mapper import SeededMapper
from stateful_pipes.nodes.mixer import Mixer
from stateful_pipes.nodes.sampler import SamplerNode
from stateful_pipes.prefetch.prefetcher import ProcessPrefetcher
from stateful_pipes.samplers import (
    BalancedBatchSampler,
    ClassBalancedBatchSampler,
    InfiniteRandomSampler,
    NaiveBatchSampler,
    Order,
    OrderSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    build_batch_sampler,
)
from stateful_pipes.skips import LEFT_OUT
from stateful_pipes.state import LIBRARY_VERSION, LoaderState, SamplerState
from stateful_pipes.stats import Stats
from stateful_pipes.ticket import Mark, Ticket, positions_of
from stateful_pipes.view import Position

__all__ = [
    "LEFT_OUT",
    "BalancedBatchSampler",
    "BatchInfo",
    "Checkpoint",
    "CheckpointManager",
    "ClassBalancedBatchSampler",
    "ExternalSource",
    "Field",
    "FileReader",
    "IndexFilter",
    "InfiniteRandomSampler",
    "IterableDatasetReader",
    "LastBatchPolicy",
    "LoaderState",
    "Mark",
    "Mixer",
    "MultiPipelineLoader",
    "MultiPipelineState",
    "NaiveBatchSampler",
    "Node",
    "Order",
    "OrderSampler",
    "Position",
    "ProcessPrefetcher",
    "RandomSampler",
    "SampleInfo",
    "SamplerNode",
    "SamplerState",
    "SeededBatcher",
    "SeededFlatMapper",
    "SeededMapper",
    "SequentialSampler",
    "StatefulDataLoader",
    "StatefulPipesError",
    "Stats",
    "Ticket",
    "WeightedRandomSampler",
    "as_dataset",
    "as_node",
    "build_batch_sampler",
    "get_error_message",
    "positions_of",
]

__version__ = LIBRARY_VERSION

# Silent unless the program says where to: without it, warnings would go to stderr.
logging.getLogger("stateful_pipes").addHandler(logging.NullHandler())
