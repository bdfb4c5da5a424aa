"""GPU kernels of attention. Only their operators import them: they need Triton."""
