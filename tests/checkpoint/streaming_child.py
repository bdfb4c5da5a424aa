"""A process that generates from a checkpoint and says what that took; tests and the benchmark start it.

streaming_child.py FOLDER BUDGET PROMPT TOKENS   BUDGET in bytes, 0 to load the checkpoint whole

Prints one JSON object. Memory is the largest resident size during the work, less that after the imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from openk3.checkpoint.official.folder import OfficialFolder
from openk3.checkpoint.official.load import load_official
from openk3.checkpoint.streamed.model import StreamedK3
from openk3.model.generate import Sampling, generate


def spend(folder: Path, budget: int, *, prompt: int = 24, tokens: int = 16) -> dict:
    """Run this file in a process of its own and return what it printed."""
    words = [sys.executable, __file__, str(folder), str(budget), str(prompt), str(tokens)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def resident(what: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most since the last reset."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) * 1024


def main() -> None:
    path, budget, prompt, tokens = sys.argv[1:]
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident size starts anew
    start = resident("VmRSS")
    numbers = torch.Generator().manual_seed(0)
    result: dict[str, object] = {}
    if int(budget):
        with (
            OfficialFolder.open(path) as folder,
            StreamedK3(folder, int(budget)) as model,
        ):
            ids = torch.randint(model.config.vocab_size, (int(prompt),), generator=numbers).tolist()
            result["tokens"] = list(generate(model, ids, int(tokens), sampling=Sampling(seed=1)))
            decode, division = model.usage.decode, model.division
            result |= {
                "held": division.held,
                "streamed": len(division.streamed),
                "slots": division.slots,
                "hit_rate": decode.hit_rate,
                "bytes": decode.bytes / decode.tokens,
                "seconds": decode.seconds / decode.tokens,
            }
    else:
        whole = load_official(path)
        ids = torch.randint(whole.config.vocab_size, (int(prompt),), generator=numbers).tolist()
        began = time.perf_counter()
        written = []
        for token in generate(whole, ids, int(tokens), sampling=Sampling(seed=1)):
            if not written:
                began = time.perf_counter()  # the prompt is over
            written.append(token)
        result |= {"tokens": written, "seconds": (time.perf_counter() - began) / max(len(written) - 1, 1)}
    sys.stdout.write(json.dumps(result | {"memory": resident("VmHWM") - start}))


if __name__ == "__main__":
    main()
