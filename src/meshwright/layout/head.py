"""The head by chunks of tokens, as steps on CPU take it: logits of a chunk make way for those of the next."""

from meshwright.notation.einsum import Contraction, Reshard

# Tokens of a device in a chunk, about: as its positions divide.
CHUNK_TOKENS = 512
# The scope of the gradients that the forward pass makes then: the audit reads passes off names.
BACKWARD = "backward"


def takes_chunks(head: Contraction, states: Reshard) -> bool:
    """Whether a device can take the head chunk by chunk: positions and vocabulary are whole, nothing moves.

    head: the product that makes logits[B, T, V]. states: how its x[B, T, D] comes to it.
    """
    moves = (states.forward, states.backward, head.out_reshard.forward, head.out_reshard.backward)
    return not (any(moves) or head.lhs_computed.axes_of("T") or head.product.axes_of("V"))
