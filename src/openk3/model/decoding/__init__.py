"""Decoding many sequences at once, prepared for one token of each; CUDA graphs on a GPU."""

from openk3.model.decoding.stepper import BatchStepper

__all__ = ["BatchStepper"]
