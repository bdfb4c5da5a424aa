"""The engine's own work on a CPU, without a model: finding prefixes, and how much of a trace is found.

    python bench/engine.py [cpu]

`prefix_lookup_1m_ms`: hashing a prompt of 1,000,000 tokens (int32) in units of 512 and finding its deepest
boundary, all of it in the cache; the median of ten. `serve_agent_hit_share`: tokens that were reused in a
trace of 8 sessions of 20 turns each that share a system prompt, over those that could have been: whole units
in which a prompt equals an earlier prompt with its answer, but the last token. Sessions take turns in random
order; answers are random. Pages are plenty: what is missing is what the policy of checkpoints misses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
from rows import merge, row

from openk3.engine.core import Engine, Limits
from openk3.engine.hashing import HashChain
from openk3.engine.pool import PagePool
from openk3.engine.prefix_cache import PrefixCache
from openk3.engine.runner import Work

UNIT, PAGE, GROUPS = 512, 6144, 3


def lookup() -> dict[str, object]:
    tokens = np.random.default_rng(0).integers(0, 163_840, 1_000_000, dtype=np.int32)
    pool = PagePool(len(tokens) // PAGE + 2 + GROUPS)
    cache = PrefixCache(pool, unit=UNIT, page=PAGE, checkpoint_pages=GROUPS)
    chain = HashChain(UNIT)
    chain.extend(tokens)
    pages = pool.take(-(-len(tokens) // PAGE), promised=False) or []
    for i, name in enumerate(chain.hashes):
        cache.register(name, pages[i * UNIT // PAGE], i % (PAGE // UNIT))
    state = pool.take(GROUPS, promised=False) or []
    cache.add_checkpoint(chain.hashes[-1], len(chain.hashes) * UNIT, state, moving=False)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        asked = HashChain(UNIT)
        asked.extend(tokens)
        hit = cache.look_up(asked.hashes, len(tokens))
        times.append(1e3 * (time.perf_counter() - began))
        assert hit.boundary == len(chain.hashes) * UNIT
        cache.release([*hit.pages, *([hit.partial] if hit.partial is not None else [])])
        if hit.checkpoint is not None:
            cache.release_checkpoint(hit.checkpoint)
    shape = "1,000,000 tokens int32, unit 512, pages of 6,144, all cached; hashing and look-up, one core"
    return row("prefix_lookup_1m_ms", statistics.median(times), "ms", "lower", shape=shape)


class Writer:
    """Instead of a model: random tokens."""

    page, groups = 64, 3

    def __init__(self) -> None:
        self._draw = random.Random(1)

    def execute(self, works: Sequence[Work]) -> dict[int, int]:
        return {work.request: self._draw.randrange(163_840) for work in works if work.scores}


def trace(unit: int = 16) -> dict[str, object]:
    draw = random.Random(0)
    engine = Engine(Writer(), 200_000, lambda request, token: token, Limits(unit=unit, step_tokens=4096))
    text = lambda most: [draw.randrange(163_840) for _ in range(draw.randrange(most // 4, most))]  # noqa: E731
    system = text(1600)
    sessions = [list(system) for _ in range(8)]
    turns = [[len(system)] for _ in sessions]
    seen: list[list[int]] = []
    hit = possible = 0
    for number in draw.sample([s for s in range(8) for _ in range(20)], 160):
        prompt = sessions[number] + text(400)
        shared = max((common(prompt, other) for other in seen), default=0)
        possible += min(shared, len(prompt) - 1) // unit * unit
        request = engine.add(prompt, len(text(300)), turns=turns[number])
        while request.finish is None:
            engine.step()
        hit += request.cached
        sessions[number] = list(request.tokens)
        turns[number] = [*turns[number], len(request.tokens)]
        seen.append(request.tokens[:-1])  # the last token was written, but never read
    shape = f"8 sessions of 20 turns over one system prompt, unit {unit}, {possible} tokens could be reused"
    return row("serve_agent_hit_share", hit / possible, "share", "higher", shape=shape, floor=1.0)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="cpu", help="names the file of results")
    device = parser.parse_args().device
    for measured in (lookup(), trace()):
        print(measured)
        merge([measured], device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
