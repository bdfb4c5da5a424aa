"""The scripts around the code: set-up names what is missing, sizes and slow results are counted right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def set_up(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """`make setup` of a checkout with nothing but the script; commands in `folder` come first."""
    script = folder / "checkout" / "tools" / "setup.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup.sh", script)
    environment = os.environ | {"PYTHON": str(python), "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        (None, "does not run; install Python 3.11 or newer"),
        ('case "$2" in *print*) echo 3.9;; *) exit 1;; esac', "is Python 3.9, openk3 needs 3.11 or newer"),
        ('case "$2" in *print*) echo 3.11;; *venv*) exit 1;; esac', "sudo apt-get install python3.11-venv"),
    ],
    ids=["no python", "old python", "no venv module"],
)
def test_set_up_that_cannot_work_gives_one_line_with_the_remedy(tmp_path, python, reason):
    name = tmp_path / "python-of-this-test"
    if python is not None:
        executable(name, f"#!/bin/sh\n{python}\n")
    executable(tmp_path / "id", "#!/bin/sh\necho 1000\n")  # not root: apt-get is not for us to call
    done = set_up(name, tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: ") and reason in line


def test_root_on_debian_gets_the_missing_venv_module_by_itself(tmp_path):
    """The stand-in python gains the module when the stand-in apt-get runs; it makes no environment."""
    python = executable(
        tmp_path / "python-of-this-test",
        f"""#!/bin/sh
        case "$2" in *print*) echo 3.12;; venv) exit 1;; *venv*) test -e {tmp_path}/installed;; esac""",
    )
    executable(tmp_path / "id", "#!/bin/sh\necho 0\n")
    executable(
        tmp_path / "apt-get",
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ntest $1 = update || touch {tmp_path}/installed',
    )
    done = set_up(python, tmp_path)
    assert (tmp_path / "asked").read_text().splitlines() == ["update -qq", "install -y -qq python3.12-venv"]
    assert "could not make the virtual environment" in done.stderr


def check_sizes(root: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "tools" / "check_file_sizes.py"
    return subprocess.run([sys.executable, script, root], capture_output=True, text=True)


def test_a_file_over_its_limit_is_named_and_kernels_may_be_longer(tmp_path):
    folder = tmp_path / "src" / "openk3" / "ops" / "kda"
    folder.mkdir(parents=True)
    (folder / "eager.py").write_text("x = 1\n" * 500)
    (folder / "kernels.py").write_text("x = 1\n" * 700)
    assert check_sizes(tmp_path).returncode == 0
    (folder / "eager.py").write_text("x = 1\n" * 501)
    (folder / "kernels.py").write_text("x = 1\n" * 701)
    done = check_sizes(tmp_path)
    assert done.returncode == 1
    assert [line.partition(";")[0] for line in done.stdout.splitlines()] == [
        "src/openk3/ops/kda/eager.py: 501 lines, at most 500",
        "src/openk3/ops/kda/kernels.py: 701 lines, at most 700",
    ]


def test_slow_results_count_what_passed_failed_and_was_skipped(tmp_path):
    test = tmp_path / "test_three_endings.py"
    test.write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_right_too(): pass\n"
        "def test_wrong(): assert False\n"
        "def test_absent(): pytest.skip('nothing here')\n"
    )
    report, out = tmp_path / "slow.xml", tmp_path / "results" / "slow.json"
    isolated = ["-c", os.devnull, "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *isolated, f"--junitxml={report}", test], capture_output=True
    )
    script = ROOT / "tools" / "record_slow.py"
    subprocess.run(
        [sys.executable, script, report, "--seed", "7", "--out", out], check=True, capture_output=True
    )
    result = json.loads(out.read_text())
    assert {name: result[name] for name in ("seed", "tests", "passed", "failed", "skipped")} == {
        "seed": 7,
        "tests": 4,
        "passed": 2,
        "failed": 1,
        "skipped": 1,
    }
    assert result["files"] == {"test_three_endings.py": 4}


def test_the_recorded_slow_results_are_of_a_run_in_which_everything_passed():
    path = ROOT / "bench" / "results" / "slow.json"
    if not path.exists():
        pytest.skip("no slow run is recorded yet; `make test-slow` does")
    result = json.loads(path.read_text())
    assert result["failed"] == 0
    assert result["passed"] > 0
