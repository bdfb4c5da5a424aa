"""The routed experts on the GPU, training and prefill: choice, plan, grouped products and their gradients."""
