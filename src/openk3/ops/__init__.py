"""Pure functions on tensors, a folder for each: reference (the equation), eager (PyTorch), kernels (GPU)."""
