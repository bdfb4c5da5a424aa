"""`openk3 doctor`: what this machine has, and which implementation of each operator will run on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

OPTIONAL = {
    "tokenizers": "trains tokenizers (extra: data)",
    "datasketch": "finds near duplicates (extra: data)",
    "pyarrow": "reads parquet (extra: data)",
    "triton": "GPU kernels",
}


@app.command()
def doctor(
    device: Annotated[str | None, typer.Option(help="Device to ask about, e.g. cpu or cuda.")] = None,
) -> None:
    """Say what is installed, what is missing and what it would bring, and what each operator runs as here."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from openk3.ops.dispatch import triton_problem

    console = Console()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    facts = Table("machine", "", show_header=False, box=None)
    facts.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    facts.add_row("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores")
    facts.add_row("device", _device_line(where))
    facts.add_row("memory", _memory_line())
    facts.add_row("disk here", f"{shutil.disk_usage('.').free / 2**30:.0f} GiB free")
    console.print(facts)

    packages = Table("package", "version", "what for", title="optional packages", title_justify="left")
    for name, purpose in OPTIONAL.items():
        present = importlib.util.find_spec(name) is not None
        packages.add_row(name, importlib.metadata.version(name) if present else "missing", purpose)
    console.print(packages)

    problem = triton_problem(where.type)
    operators = Table("operator", "runs as", "why", title=f"operators on {where.type}", title_justify="left")
    for name in operator_names():
        has_kernel = importlib.util.find_spec(f"openk3.ops.{name}.kernels") is not None
        if where.type == "cpu":
            operators.add_row(name, "eager", "the CPU path")
        elif not has_kernel:
            operators.add_row(name, "eager", "no GPU kernel yet")
        elif problem:
            operators.add_row(name, "error", problem)
        else:
            operators.add_row(name, "triton", "")
    console.print(operators)


def operator_names() -> list[str]:
    """The operators there are, by the folders of `openk3.ops`."""
    folder = Path(__file__).parents[1] / "ops"
    return sorted(path.parent.name for path in folder.glob("*/reference.py"))


def _device_line(device: object) -> str:
    import torch

    assert isinstance(device, torch.device)
    if device.type != "cuda":
        return f"{device.type} ({platform.processor() or platform.machine()})"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _memory_line() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 2**30:.0f} GiB"
