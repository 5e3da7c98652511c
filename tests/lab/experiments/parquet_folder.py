"""A small stand-in for the folder of image sets, in the layout of the hub."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image


def pixels(count: int, size: int, channels: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images whose brightness tells the class, so that a network can learn them; all ten classes occur."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count, dtype=np.int64) % 10
    noise = rng.integers(0, 20, size=(count, size, size, channels))
    return (noise + 22 * labels[:, None, None, None]).astype(np.uint8), labels


def encode(image: NDArray[np.uint8], encoding: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(buffer, encoding)
    return buffer.getvalue()


def write_parquet(
    path: Path, images: list[bytes | None], labels: list[int], *, column: str = "image", label: str = "label"
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": each, "path": f"{number}.png"} for number, each in enumerate(images)]
    pq.write_table(pa.table({column: pa.array(rows, kind), label: pa.array(labels, pa.int64())}), path)
    return path


def write_split(
    path: Path,
    count: int = 40,
    size: int = 28,
    channels: int = 1,
    *,
    seed: int = 0,
    encoding: str = "PNG",
    column: str = "image",
) -> NDArray[np.uint8]:
    """One Parquet file of `count` images; returns the pixels (N, H, W, C)."""
    images, labels = pixels(count, size, channels, seed)
    write_parquet(path, [encode(image, encoding) for image in images], labels.tolist(), column=column)
    return images
