"""Writes a safetensors file of bfloat16 tensors.

The format is eight bytes of header length, a JSON header, then the bytes. Written here, since the
library's own writer for raw bytes changes its signature between releases and knows no bfloat16
for numpy arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def to_bfloat16(values: FloatArray) -> npt.NDArray[np.uint16]:
    """Bit patterns of bfloat16, rounded to nearest even. Values must be finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = ((bits >> 16) & 1) + 0x7FFF
    return ((bits + rounding) >> 16).astype(np.uint16)


def write(
    target: Path, shapes: dict[str, tuple[int, ...]], load: Callable[[str], FloatArray]
) -> None:
    """Write the tensors in the order of `shapes`; `load` is asked for one at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with target.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, shape in shapes.items():
            values = load(name)
            assert values.shape == shape, f"{name}: {values.shape} is not {shape}"
            file.write(to_bfloat16(values).tobytes())
