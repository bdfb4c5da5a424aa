"""KDA on a GPU: chunks prepared, scanned, their gradients, decoding. Plain Triton, and Gluon for Hopper."""
