"""`openk3 doctor`: what this machine has, and which implementation of each operator will run on it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from openk3.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from openk3.ops.dispatch import Kernel

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

    from openk3.ops.dispatch import BY_DEFAULT, triton_problem

    console = Console()
    where = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
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
    kernels = Table("kernels of", "take", "checked on", title="GPU kernels", title_justify="left")
    compiled: dict[str, list[str]] = {}
    modules = {name: f"openk3.ops.{name}" for name in sorted([*operator_names(), "activation"])}
    for name, module in {**modules, "optim": "openk3.optim.fused"}.items():
        own = getattr(importlib.import_module(module), "KERNELS", ())
        for kernel in own:
            function = f"{name}.{kernel.function}"
            kernels.add_row(function, kernel.takes, kernel.checked_on)
            if kernel.compiles_for:
                compiled.setdefault(", ".join(kernel.compiles_for), []).append(function)
        if where.type == "cpu":
            operators.add_row(name, "eager", "the CPU path")
        elif not own:
            operators.add_row(name, "eager", "no GPU kernel yet")
        elif not any(kernel.checked for kernel in own):
            operators.add_row(name, "eager", "no card has run its kernels yet: only where asked for")
        elif not BY_DEFAULT:
            operators.add_row(name, "eager", "OPENK3_KERNELS=off: only where asked for")
        elif problem:
            operators.add_row(name, "error", problem)
        else:
            operators.add_row(name, "triton", "; ".join(_kernel_line(kernel, where) for kernel in own))
    console.print(operators)
    console.print(kernels)
    for cards, functions in compiled.items():
        console.print(f"Compile for {cards} too, and were not run there: {', '.join(functions)}.")
    console.print("What kernels do not take runs as eager, or is refused where a kernel is asked for.")


def operator_names() -> list[str]:
    """The operators there are, by the folders of `openk3.ops`."""
    folder = Path(__file__).parents[1] / "ops"
    return sorted(path.parent.name for path in folder.glob("*/reference.py"))


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInput(f"--device {name}: torch knows no such device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"--device {name}: torch {torch.__version__} sees no CUDA device here")
    return device


def _kernel_line(kernel: Kernel, device: torch.device) -> str:
    """What is worth saying of a kernel that will run: whether anyone has run it on such a device."""
    import torch

    here = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if here in kernel.checked_on:
        return kernel.function
    known = "compiles for" if here in kernel.compiles_for else "never compiled for"
    return f"{kernel.function}, {known} {here}, not run there"


def _device_line(device: torch.device) -> str:
    import torch

    if device.type != "cuda":
        return f"{device.type} ({platform.processor() or platform.machine()})"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _memory_line() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 2**30:.0f} GiB"
