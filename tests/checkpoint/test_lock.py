"""Two processes never write into one folder, and a dead one blocks nobody."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from openk3.checkpoint.lock import only_writer
from openk3.errors import StorageError

HOLDER = """
import sys, time
from pathlib import Path
from openk3.checkpoint.lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_refused_while_another_process_holds_it_and_free_when_that_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(StorageError, match="another process"), only_writer(tmp_path):
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
    with only_writer(tmp_path):
        pass
    with only_writer(tmp_path):  # and again: nothing stays behind
        pass


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    with pytest.raises(StorageError, match="absent"), only_writer(tmp_path / "absent"):
        pass
