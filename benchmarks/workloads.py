"""The five workloads: what is read for one sample, and how many make a batch.

Each dataset holds its data in memory and claims to be longer than it is, so that no measurement meets the end of an
epoch. Random draws are Python's, the cheapest of the three generators and the same for every contestant. With
`arrays=True` the same samples come as NumPy arrays, read with NumPy, for peers whose own currency they are.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Callable
from functools import partial
from importlib.metadata import distribution
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

LENGTH = 2**18
CROP = 224


class Held(Dataset[Any]):
    """A dataset of which `held` samples are in memory, again and again."""

    def __len__(self) -> int:
        return LENGTH


class Tiny(Held):
    """16 float32 and an int."""

    def __init__(self, arrays: bool) -> None:
        features = torch.rand(4096, 16, generator=torch.Generator().manual_seed(0))
        self.features: Any = features.numpy() if arrays else features

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.features[index % 4096], index


class Images(Held):
    """A random crop of 224, in half of all cases flipped, out of 3x256x256 uint8."""

    def __init__(self, arrays: bool) -> None:
        images = torch.randint(256, (256, 3, 256, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.images: Any = images.numpy() if arrays else images
        self.flip: Callable[..., Any] = np.flip if arrays else torch.flip

    def __getitem__(self, index: int) -> Any:
        top, left = int(random.random() * 33), int(random.random() * 33)
        crop = self.images[index % 256][:, top : top + CROP, left : left + CROP]
        return self.flip(crop, (2,)) if random.random() < 0.5 else crop


class FloatImages(Images):
    """The same, to float32 / 255."""

    def __init__(self, arrays: bool) -> None:
        super().__init__(arrays)
        self.to_float = methodcaller("astype", np.float32) if arrays else methodcaller("float")

    def __getitem__(self, index: int) -> Any:
        return self.to_float(super().__getitem__(index)) / 255


class Tokens(Held):
    """Inputs and targets: two int64 views of 2,048 tokens, one token apart."""

    def __init__(self, arrays: bool) -> None:
        tokens = torch.randint(50_000, (512 * 2048 + 1,), generator=torch.Generator().manual_seed(0))
        self.tokens: Any = tokens.numpy() if arrays else tokens

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        start = index % 512 * 2048
        return self.tokens[start : start + 2048], self.tokens[start + 1 : start + 2049]


class Photographs(Held):
    """One of scikit-learn's two sample photographs: decoded, a random part of it resized to 224; uint8, channels first."""

    def __init__(self, arrays: bool) -> None:
        self.jpegs = photographs()
        self.arrays = arrays

    def __getitem__(self, index: int) -> Any:
        image = Image.open(io.BytesIO(self.jpegs[index % 2])).convert("RGB")
        pixels = np.array(image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=random_box(*image.size)))
        if self.arrays:
            return np.ascontiguousarray(pixels.transpose(2, 0, 1))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


class Repeatable(Held):
    """The dataset with its draws seeded by the index: whoever reads a sample, it is the same."""

    def __init__(self, dataset: Held) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        random.seed(index)
        return self.dataset[index]


class Workload(NamedTuple):
    """What the contestants load.

    Attributes:
        name: In tables.
        arrays: Makes the same dataset of NumPy's arrays.
        batches: To be measured at a time; about a second or two of a torch DataLoader.
    """

    name: str
    dataset: Held
    arrays: Callable[[], Held]
    batch_size: int
    batches: int

    def repeatable(self) -> Workload:
        return self._replace(dataset=Repeatable(self.dataset), arrays=lambda: Repeatable(self.arrays()))


TABLE: dict[str, tuple[Callable[[bool], Held], int, int]] = {
    "tiny": (Tiny, 64, 1500),
    "u8": (Images, 64, 200),
    "f32": (FloatImages, 64, 60),
    "tokens": (Tokens, 32, 1000),
    "jpeg": (Photographs, 32, 60),
}


def add_workloads(parser: argparse.ArgumentParser) -> None:
    """`--workloads`, for `arguments`."""
    parser.add_argument("--workloads", nargs="+", choices=TABLE, default=list(TABLE), help="only these", metavar="NAME")


def workload(name: str, smoke: bool = False) -> Workload:
    """A workload of the table by its name; with `smoke` of few small batches."""
    make, batch_size, batches = TABLE[name]
    return Workload(name, make(False), partial(make, True), *((8, 4) if smoke else (batch_size, batches)))


def photographs() -> list[bytes]:
    """scikit-learn's two sample photographs, 427x640, as JPEG."""
    locate = distribution("scikit-learn").locate_file  # which imports nothing
    return [Path(str(locate(f"sklearn/datasets/images/{name}.jpg"))).read_bytes() for name in ("china", "flower")]


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """A part of 8 to 100% of the area, its sides as 3:4 to 4:3, as is usual in training; cut where it does not fit."""
    area = width * height * (0.08 + 0.92 * random.random())
    aspect = (3 / 4) * (16 / 9) ** random.random()
    w, h = min(width, (area * aspect) ** 0.5), min(height, (area / aspect) ** 0.5)
    left, top = (width - w) * random.random(), (height - h) * random.random()
    return left, top, left + w, top + h
