"""Pure functions on tensors, one folder per operator: reference (the equation), eager (PyTorch), kernels (GPU)."""
