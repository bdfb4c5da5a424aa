"""What can go wrong, by name. Each error is also the builtin that a caller would expect."""

from __future__ import annotations


class OpenK3Error(Exception):
    """Base of all errors that openk3 raises on purpose."""


class InvalidInput(OpenK3Error, ValueError):
    """An argument, file or message is wrong; the text says what, where, and what would be right."""


class KernelUnavailable(OpenK3Error, RuntimeError):
    """The requested implementation cannot run on this device; the text names the reason."""


class MissingDependency(OpenK3Error, ImportError):
    """An optional package is not installed; the text names the package and the extra that brings it."""


class CheckpointError(OpenK3Error, RuntimeError):
    """A checkpoint is incomplete, damaged, or of another configuration; the text names the file or tensor."""


class StorageError(OpenK3Error, OSError):
    """A write failed (disk full, no permission); what was there before is still there."""


class TrainingDiverged(OpenK3Error, ArithmeticError):
    """The loss or a gradient is not finite; the text names the step and the last good checkpoint."""
