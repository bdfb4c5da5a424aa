"""No kernel is compiled anew because a count changed from one step to the next.

Triton compiles a kernel again where a whole number is 1, or is a multiple of 16 and was none before. Strides
keep that, as 16-byte accesses need it, and a model's sizes never change; counts of tokens, of sequences and
of what is cut from them change with every batch. Read from the sources, so without Triton.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "src/openk3"

# Names of counts that a batch decides, as kernels take them.
COUNTS = {
    "T",
    "Tq",
    "R",
    "N",
    "slots",
    "chunks",
    "count",
    "blocks",
    "span",
    "queries",
    "max_length",
    "most",
    "groups",
}
# Where such a name is a size of the model, or a tensor.
OTHERS = {
    "ops/attention/kernels/paged.py": {"slots"},
    "ops/attnres/kernels/bank.py": {"queries"},
    "ops/decoding/kernels/products.py": {"blocks"},
    "ops/decoding/kernels/rows.py": {"slots"},
    "ops/kda/kernels/decode.py": {"slots"},
    "ops/kda/kernels/decode_hopper.py": {"slots"},
    "ops/kda/kernels/replay.py": {"slots"},
    "ops/moe/kernels/entry_products.py": {"N"},
    "ops/moe/kernels/few.py": {"N"},
    "ops/moe/kernels/gradients.py": {"N"},
    "ops/moe/kernels/mx_many.py": {"N"},
    "ops/moe/kernels/plan.py": {"span"},
    "ops/moe/kernels/products.py": {"N"},
    "optim/fused/kernels.py": {"blocks"},
}


def launched() -> Iterator[tuple[str, str, set[str], set[str]]]:
    """File, name, arguments and `do_not_specialize` of each kernel that some launcher starts."""
    texts = {path: path.read_text() for path in sorted(SOURCES.rglob("*.py"))}
    everything = "\n".join(texts.values())
    for path, text in texts.items():
        if "jit" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for decorator in function.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                started = re.search(rf"\b{function.name}\[(\(|grid\])", everything)
                if ast.unparse(called) not in ("triton.jit", "gluon.jit") or not started:
                    continue
                keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
                left = {
                    n for k in keywords if k.arg == "do_not_specialize" for n in ast.literal_eval(k.value)
                }
                arguments = {
                    a.arg
                    for a in function.args.args
                    if a.annotation is None or "constexpr" not in ast.unparse(a.annotation)
                }
                yield str(path.relative_to(SOURCES)), function.name, arguments, left


KERNELS = list(launched())


def test_all_launched_kernels_are_found():
    names = {name for _, name, *_ in KERNELS}
    assert {"forward", "attention_forward_hopper", "_plan", "_order", "_symmetric", "_select"} <= names
    assert "load_row" not in names


@pytest.mark.parametrize(
    ("file", "name", "arguments", "left"), KERNELS, ids=[":".join(kernel[:2]) for kernel in KERNELS]
)
def test_counts_of_a_batch_do_not_decide_what_is_compiled(file, name, arguments, left):
    counts = (arguments & COUNTS) - OTHERS.get(file, set())
    assert counts <= left, f"{file}: {name} specialises on {sorted(counts - left)}"
