"""Codes of packed rows: a token's id, with flags of the token in the bits above it.

A corpus of plain text packed without masks has only ids. If documents are masked, or only answers are
counted, rows are uint32 with two flags, so that a corpus is one array [num_rows, T + 1] in any case.
"""

import numpy as np

BEGINS = 1 << 30  # the token is the first of a document
UNCOUNTED = 1 << 29  # the token is only context: its prediction does not count in the loss
ID_BITS = UNCOUNTED - 1


def ids(rows: np.ndarray) -> np.ndarray:
    """The tokens' ids."""
    return rows & rows.dtype.type(ID_BITS) if rows.dtype.itemsize > 2 else rows


def is_counted(targets: np.ndarray) -> np.ndarray:
    """Whether each target counts in the loss; the first token of a document does not."""
    if targets.dtype.itemsize <= 2:
        return np.ones(targets.shape, bool)
    return (targets & targets.dtype.type(BEGINS | UNCOUNTED)) == 0
