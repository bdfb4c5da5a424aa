"""Decoding with the recipe r1 on a GPU: a step of 1, 64 and 256 sequences at context 2,048, as CUDA graphs.

    python bench/decode_r1.py [h200] [--profile] [--variants]

First logits are compared with the whole forward in float64, on four layers of r1. Then `r1_decode_b1`, `_b64`
and `_b256`: the share of the byte floor that a greedy step reaches, logits and choice included. The floor
counts what must be read and written whatever the code: weights of the experts that tokens really go to, KDA
states twice, MLA latents, the head; at the bandwidth of a copy. States are random, tokens are those that
the model chooses. The peer is the plain loop: `K3.forward` on each step's tokens.
`--profile` prints a step's kernels by time; `--variants`
tries other forms and sizes than those that run for many sequences.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from unittest.mock import patch

import torch
from gpu_timing import ceilings
from rows import row
from steps import Steps, add_options

from openk3.config import ModelConfig
from openk3.config.presets import preset
from openk3.model import K3, DecodeState, KdaState, MlaState
from openk3.model.decoding import BatchStepper, ffn
from openk3.model.decoding.slots import KdaSlots
from openk3.ops.decoding import choose_experts, most_likely

Tensor = torch.Tensor
CONTEXT = 2048
R1 = preset("r1")
LIMIT = 2.0  # times the plain loop's error: experts that nearly tie fall differently in each


def filled(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> K3:
    """A random model whose sublayers all matter."""
    make = torch.Generator("cuda").manual_seed(0)
    model = K3(config, dtype=dtype, device="cuda")
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                x.fill_(1)
            elif "dt_bias" in name:
                x.normal_(-3, 1, generator=make)
            elif "A_log" in name or "e_score_correction_bias" in name:
                x.zero_()
            else:
                x.normal_(0, x.shape[-1] ** -0.5, generator=make)
    return model.eval()


def in_float64(model: K3) -> K3:
    other = K3(model.config, dtype=torch.float64, device="cuda")
    other.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    return other.eval()


@torch.inference_mode()
def check(n: int, steps: int = 4, form: str = "") -> None:
    """Relative L2 errors of a step's logits, ours and the plain loop's, over `steps` steps after prompts."""
    model = filled(R1.model_copy(update={"num_layers": 4, "vocab_size": 4096}))
    exact = in_float64(model)
    make = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, 70, (n,), generator=make).tolist()
    tokens = torch.randint(0, 4096, (sum(lengths),), generator=make).cuda()
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    states = {name: each(tokens, cu).state for name, each in (("plain", model), ("exact", exact))}
    stepper = BatchStepper(model, n + 1, 128, implementation="triton")
    slots = torch.randperm(n + 1, generator=make)[:n]
    stepper.load(slots.tolist(), states["plain"], lengths)
    ours, plain = [], []
    one_each = torch.arange(n + 1, dtype=torch.int32, device="cuda")
    for _ in range(steps):
        tokens = torch.randint(0, 4096, (n,), generator=make).cuda()
        logits = {"ours": stepper(tokens, slots.int().cuda()).double()}
        for name, each in (("plain", model), ("exact", exact)):
            out = each(tokens, one_each, state=states[name])
            states[name] = out.state
            logits[name] = each.logits(out.hidden).double()
        right = logits["exact"]
        ours.append(float((logits["ours"] - right).norm() / right.norm()))
        plain.append(float((logits["plain"] - right).norm() / right.norm()))
    mine, theirs = (sum(errors) / steps for errors in (ours, plain))
    print(
        f"n={n}{form}: relative L2 error of logits {mine:.2e}, of the plain loop's {theirs:.2e}", flush=True
    )
    if not mine < LIMIT * theirs:
        raise RuntimeError("the logits are wrong")


class Sequences:
    """n sequences of CONTEXT tokens in random states, continued greedily."""

    def __init__(self, model: K3, n: int) -> None:
        self.model, self.n = model, n
        torch.manual_seed(n)
        self.stepper = BatchStepper(model, n, CONTEXT + 256, implementation="triton")
        self.slots = torch.arange(n, dtype=torch.int32, device="cuda")
        self.tokens = torch.randint(0, R1.vocab_size, (n,), device="cuda")
        self.rewind()
        with torch.inference_mode():
            for layer in self.stepper.memory.layers:
                if isinstance(layer, KdaSlots):
                    layer.S.normal_(0, 0.1)
                    layer.conv.normal_()
                else:
                    layer.latents.normal_()

    def rewind(self) -> None:
        with torch.inference_mode():
            self.stepper.memory.lengths[:-1].fill_(CONTEXT)

    @staticmethod
    def choose(logits: Tensor) -> Tensor:
        return most_likely(logits, implementation="triton")

    def step(self) -> None:
        self.tokens = self.choose(self.stepper(self.tokens, self.slots))

    def milliseconds(self, steps: int = 100) -> float:
        """Of a step, in a row of steps that the host launches without waiting."""
        self.rewind()
        for _ in range(10):
            self.step()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            self.step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / steps

    @torch.inference_mode()
    def experts_hit(self) -> int:
        """Different experts that a step's tokens go to, added up over layers."""
        ids: list[Tensor] = []

        def recorded(*arguments: object, **options: object) -> tuple[Tensor, Tensor]:
            chosen = choose_experts(*arguments, **options)  # type: ignore[arg-type]
            ids.append(chosen[0])
            return chosen

        with patch.object(ffn, "choose_experts", recorded):
            self.stepper._step(self.tokens, self.slots)
        return sum(len(layer.unique()) for layer in ids)

    @torch.inference_mode()
    def plain_milliseconds(self, steps: int = 3) -> float:
        """The same by the whole forward, states of the same sizes."""
        layers: list[KdaState | MlaState] = []
        borders = torch.arange(self.n + 1, dtype=torch.int32, device="cuda")
        for layer in self.stepper.memory.layers:
            if isinstance(layer, KdaSlots):
                layers.append(KdaState(layer.S[: self.n].clone(), layer.conv[: self.n].clone()))
            else:
                latents = layer.latents[: self.n, :CONTEXT].flatten(0, 1)
                layers.append(MlaState(latents, borders * CONTEXT))
        state = DecodeState(tuple(layers), torch.full((self.n,), CONTEXT, device="cuda", dtype=torch.int32))
        times, tokens = [], self.tokens
        for _ in range(steps):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = self.model(tokens, borders, state=state)
            tokens = self.model.logits(out.hidden).argmax(-1)
            end.record()
            end.synchronize()
            state = out.state
            times.append(start.elapsed_time(end))
        return min(times)

    def profile(self) -> None:
        """Kernels of five steps: time of one step, launches in it."""
        self.rewind()
        for _ in range(3):
            self.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(5):
                self.step()
            torch.cuda.synchronize()
        kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for event in trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels[event.name][0] += event.device_time / 5
                kernels[event.name][1] += 1 / 5
        total = sum(time for time, _ in kernels.values())
        print(f"b{self.n}: {total:.0f} us in {sum(count for _, count in kernels.values()):.0f} kernels")
        for name, (time, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[:16]:
            print(f"  {time:8.1f} us  {count:5.1f} x {time / count:6.2f}  {name[:90]}")


def floor_bytes(n: int, experts: int) -> dict[str, float]:
    """What a step moves at least, in bytes."""
    kda, mla, moe, d = R1.kda, R1.mla, R1.moe, R1.hidden_size
    assert kda and mla and moe
    mla_layers = len(R1.mla_layer_numbers)
    return {
        "experts": experts * 3 * moe.expert_width * (moe.latent_width or d) * 2,
        "KDA states": n * (R1.num_layers - mla_layers) * kda.num_heads * kda.head_dim**2 * 4 * 2,
        "MLA latents": n * mla_layers * CONTEXT * (mla.kv_lora_rank + mla.qk_rope_head_dim) * 2,
        "head": R1.vocab_size * d * 2,
    }


def measure(model: K3, n: int, bandwidth: float, steps: Steps, *, profile: bool, alone: bool) -> None:
    sequences = Sequences(model, n)
    time = sequences.milliseconds()
    experts = sequences.experts_hit()
    parts = floor_bytes(n, experts)
    floor = 1e3 * sum(parts.values()) / bandwidth
    amounts = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in parts.items())
    hit = f"{experts} experts hit in {R1.num_layers - R1.dense_layers} layers"
    shape = f"{n} sequences, context {CONTEXT}, bf16, greedy, {time:.4g} ms; floor: {amounts} ({hit})"

    def keep(peers: dict[str, float]) -> None:
        work = f"r1_decode_b{n}"
        steps.keep(row(work, floor / time, "share", "higher", peers=peers, floor=1.0, shape=shape))

    keep({})
    print(f"r1_decode_b{n}: {time:.4f} ms, floor {floor:.4f} ms; {amounts}", flush=True)
    if profile:
        steps(f"profile of {n}", sequences.profile)
    if alone:
        return
    plain = sequences.plain_milliseconds()
    print(f"r1_decode_b{n}: plain loop {plain:.2f} ms", flush=True)
    keep({"plain loop": floor / plain})


Change = tuple[object, str, object]  # module, name, value


def changed(changes: Iterable[Change]) -> ExitStack:
    patches = ExitStack()
    for module, attribute, value in changes:
        patches.enter_context(patch.object(module, attribute, value))
    return patches


def forms(n: int) -> Iterator[tuple[str, list[Change]]]:
    """Names of settings, and what each changes."""
    from openk3.ops.attention.kernels import paged_operator as mla
    from openk3.ops.decoding.kernels import early, many, products, streams

    Tile, Launch = products.Tile, mla.Launch
    argmax = [(Sequences, "choose", staticmethod(lambda logits: logits.argmax(-1)))]
    yield "as it is", []
    first = [
        (many, "JOINED", 0),
        (products, "MIXED", 0),
        (products, "TILES", [(2**31, Tile(64, 16))]),
        (products, "WHOLE", ()),
        (mla, "PLAIN_PROGRAMS_PER_PROCESSOR", 8),
        (mla, "STAGES_OF_WHOLE", 2),
        *argmax,
    ]
    yield "first form", first
    yield "no streams", [(many, "streams_fit", lambda *of: False)]
    for launch in ((1, 3), (1, 4), (1, 5), (1, 6), (2, 3)):
        yield f"streams, {launch} of each", [(streams, "UNITS", launch), (streams, "DOWNS", launch)]
    others = {
        "sums apart": [(many, "JOINED", 0)],
        "mix by a general kernel": [(products, "MIXED", 0)],
        "torch's argmax": argmax,
        "OVERLAP off": [(early, "OVERLAP", False)],
        "attention, 8 programs a processor": [(mla, "PLAIN_PROGRAMS_PER_PROCESSOR", 8)],
        "attention, 4 programs a processor": [(mla, "PLAIN_PROGRAMS_PER_PROCESSOR", 4)],
        "attention, 5 stages": [(mla, "launch", lambda *sizes: Launch(16, 64, 4, 5))],
        "attention, 2 stages": [(mla, "STAGES_OF_WHOLE", 2)],
    }
    for tile in (Tile(64, 16), Tile(64, 32), Tile(64, 64)):
        if tile != next(tile for most, tile in products.TILES if n <= most):
            others[f"products {tuple(tile)}"] = [(products, "TILES", [(2**31, tile)])]
    for tile in (None, Tile(16, 16), Tile(16, 32), Tile(32, 32)):
        if tile != next((tile for most, tile in products.WHOLE if n <= most), None):
            whole = () if tile is None else ((2**31, tile),)
            name = "in steps" if tile is None else str(tuple(tile))
            others[f"into the stream {name}"] = [(products, "WHOLE", whole)]
    for name, changes in others.items():
        yield name, changes


@torch.inference_mode()
def variants(model: K3, steps: Steps) -> None:
    """A step in other forms and sizes, each alone; beside the time how far logits are from the present's."""
    for n in (64, 256):
        present = None
        for name, changes in forms(n):
            if steps.passed():
                print(f"n={n} {name}: out of time", flush=True)
                continue
            with changed(changes):
                try:
                    sequences = Sequences(model, n)
                    logits = sequences.stepper(sequences.tokens, sequences.slots).float()
                    present = logits if present is None else present
                    error = float((logits - present).norm() / present.norm())
                    time = sequences.milliseconds(50)
                    print(f"n={n} {name}: {time:.4f} ms, logits differ by {error:.1e}", flush=True)
                except Exception:  # noqa: BLE001 - the next variant may run
                    print(f"n={n} {name}: failed", flush=True)
                    traceback.print_exc()


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("device", nargs="?", default="h200", help="names the file of results")
    options.add_argument("--profile", action="store_true", help="print the kernels of a step")
    options.add_argument("--variants", action="store_true", help="try sizes after the rows")
    add_options(options)
    given = options.parse_args()
    if not torch.cuda.is_available():
        print("bench/decode_r1.py needs a CUDA device")
        return 0
    steps = Steps(None if given.ours_alone else given.device, given.budget)
    for n in (1, 3, 5, 64, 100, 256):
        steps.check(f"errors of {n}", lambda n=n: check(n))  # type: ignore[misc]
    bandwidth = ceilings().bandwidth
    model = filled(R1)
    for n in (1, 64, 256):
        steps(
            f"{n} sequences",
            lambda n=n: measure(  # type: ignore[misc]
                model, n, bandwidth, steps, profile=given.profile, alone=given.ours_alone
            ),
        )
    if given.variants:
        steps("variants", lambda: variants(model, steps))
    return steps.status()


if __name__ == "__main__":
    sys.exit(main())
