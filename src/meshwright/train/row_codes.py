"""What one number of a packed row says: a token's id, and in the bits above it what is made of the token.

A corpus of plain text packed without masks has ids alone. Where documents are masked, or only answers
count, rows are uint32 with two flags, so that they are still one array [num_rows, T + 1].
"""

import numpy as np

BEGINS = 1 << 30  # the token is the first of a document
UNCOUNTED = 1 << 29  # the token is context: the loss does not count how well it is predicted
ID_BITS = UNCOUNTED - 1


def ids(rows: np.ndarray) -> np.ndarray:
    """The tokens' ids."""
    return rows & rows.dtype.type(ID_BITS) if rows.dtype.itemsize > 2 else rows


def is_counted(targets: np.ndarray) -> np.ndarray:
    """Whether the loss counts each of these targets; never one that begins a document."""
    if targets.dtype.itemsize <= 2:
        return np.ones(targets.shape, bool)
    return (targets & targets.dtype.type(BEGINS | UNCOUNTED)) == 0
