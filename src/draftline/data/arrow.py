"""Arrow's numbers as numpy's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def numbers(array: pa.Array) -> np.ndarray:
    """The values of a numeric or boolean array without nulls; read-only, and not copied unless they are booleans.

    pyarrow's `to_numpy` imports pandas the first time, and swallows a Ctrl-C that comes meanwhile.
    """
    n, start = len(array), array.offset
    if str(array.type) == "bool":
        bits = np.frombuffer(array.buffers()[1], np.uint8) if n else np.empty(0, np.uint8)
        return np.unpackbits(bits, count=start + n, bitorder="little")[start:].astype(bool)
    dtype = np.dtype(str(array.type))
    return np.frombuffer(array.buffers()[1], dtype, n, start * dtype.itemsize) if n else np.empty(0, dtype)
