"""One writer per folder: two runs in one folder would take out each other's rows and checkpoints.

The lock is the kernel's, on an empty file: it ends with its process, whatever ends that, and never has to be
cleared away. A file system that has no locks (some of clusters) leaves this to the person.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from openk3.checkpoint.atomic import storage_errors
from openk3.errors import StorageError

LOCK = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold `folder`, which exists, for this process while the block runs.

    Raises:
        StorageError: another process holds it, or it cannot be written to.
    """
    path = folder / LOCK
    with storage_errors(path):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"{folder}: another process is at work in this folder; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise StorageError(f"{path}: cannot lock: {error.strerror}") from error
        yield
    finally:
        os.close(lock)
