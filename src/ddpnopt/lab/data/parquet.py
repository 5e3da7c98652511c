"""Images from Parquet files in the Hugging Face hub's layout: a struct of bytes and path, and a label."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ddpnopt.lab.errors import DataError

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMN = "label"
# Large enough that a thread's work dwarfs handing it over, small enough that the threads end together.
ROWS_PER_TASK = 1000


@dataclass(frozen=True)
class Split:
    """One decoded file: uint8 images (N, C, H, W), int64 labels (N,), the encodings met (PNG, JPEG, ...)."""

    images: Tensor
    labels: Tensor
    encodings: frozenset[str]


def row_count(path: Path) -> int:
    """How many images the file holds, from its footer."""
    return int(_open(path).metadata.num_rows)


def decode(path: Path, *, channels: int, classes: int) -> Split:
    """Every image of the file, decoded in threads (Pillow releases the interpreter while it decompresses)."""
    parquet = _open(path)
    column = _image_column(parquet, path)
    try:
        batches = list(parquet.iter_batches(ROWS_PER_TASK, columns=[column, LABEL_COLUMN]))
    except (pa.ArrowException, OSError) as broken:
        raise _unreadable(path, broken) from broken
    firsts = np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()[:-1]

    def decode_batch(first: int, batch: pa.RecordBatch) -> tuple[NDArray[np.uint8], set[str]]:
        return _decode_rows(path, channels, first, batch.column(column).field("bytes").to_pylist())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(decode_batch, firsts, batches))
    if not parts:
        raise DataError(f"{path} holds no images")
    sizes = {part.shape[1:] for part, _ in parts}
    if len(sizes) > 1:
        raise DataError(f"{path} mixes images of different sizes; all images of a set must have one size")
    images = torch.from_numpy(np.concatenate([part for part, _ in parts]))
    labels = _labels(batches, path, classes)
    encodings = frozenset[str]().union(*(found for _, found in parts))
    return Split(images.permute(0, 3, 1, 2).contiguous(), labels, encodings)


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError as missing:
        raise DataError(f"{path} does not exist") from missing
    except (pa.ArrowException, OSError) as broken:
        raise _unreadable(path, broken) from broken


def _unreadable(path: Path, cause: Exception) -> DataError:
    first_line = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    return DataError(
        f"{path} is not a whole Parquet file ({first_line.rstrip('.')}); delete it and copy or fetch it again"
    )


def _image_column(parquet: pq.ParquetFile, path: Path) -> str:
    schema = parquet.schema_arrow
    found = ", ".join(schema.names)
    if LABEL_COLUMN not in schema.names:
        raise DataError(f"{path} has no column {LABEL_COLUMN!r} (it has: {found})")
    for name in IMAGE_COLUMNS:
        if name in schema.names:
            kind = schema.field(name).type
            if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
                return str(name)
            raise DataError(f"column {name!r} of {path} must be a struct with a field 'bytes', not {kind}")
    raise DataError(f"{path} has no image column ('image' or 'img'; it has: {found})")


def _decode_rows(
    path: Path, channels: int, first: int, rows: Iterable[bytes | None]
) -> tuple[NDArray[np.uint8], set[str]]:
    mode = "L" if channels == 1 else "RGB"
    pixels: list[NDArray[np.uint8]] = []
    encodings: set[str] = set()
    for row, encoded in enumerate(rows, start=first):
        if encoded is None:
            raise DataError(f"row {row} of {path} has a path but no image bytes")
        try:
            with Image.open(io.BytesIO(encoded)) as image:
                encodings.add(image.format or "unknown")
                pixels.append(np.asarray(image if image.mode == mode else image.convert(mode)))
        except (OSError, SyntaxError, ValueError) as broken:  # Pillow raises SyntaxError for a damaged PNG
            raise DataError(f"row {row} of {path} is not a readable image: {broken}") from broken
    try:
        stacked = np.stack(pixels)
    except ValueError as mixed:
        raise DataError(f"{path} mixes images of different sizes; all images of a set must have one size") from mixed
    return stacked.reshape(*stacked.shape[:3], channels), encodings


def _labels(batches: list[pa.RecordBatch], path: Path, classes: int) -> Tensor:
    column = pa.chunked_array([batch.column(LABEL_COLUMN) for batch in batches])
    if column.null_count or not pa.types.is_integer(column.type):
        raise DataError(f"column {LABEL_COLUMN!r} of {path} must hold whole numbers without gaps")
    labels = torch.tensor(column.to_numpy(), dtype=torch.int64)
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(f"{path} has labels from {low} to {high}; expected 0 to {classes - 1}")
    return labels
