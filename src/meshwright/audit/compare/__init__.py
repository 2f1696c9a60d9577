"""The planned beside the emitted: which are the same, what the differences cost and how to mend them."""
