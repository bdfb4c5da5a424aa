"""Random cases of each operator for bench/fuzz.py: what goes in, how it is called, what must hold exactly.

What kernels are compiled for (widths, kinds) comes from short lists; tokens, experts, lengths, offsets and
magnitudes are free. On a CPU, under Triton's interpreter, cases are small and in fp32.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from openk3.ops.activation import Activation
from openk3.ops.attention.gated import gated_mla
from openk3.ops.attention.paged import mla_append, mla_decode
from openk3.ops.attnres import attnres_add_mix_norm, attnres_bank_mixes, attnres_mix
from openk3.ops.cross_entropy import linear_cross_entropy
from openk3.ops.decoding import choose_experts, expert_sums
from openk3.ops.moe import MxExperts, expert_ffn, mx_expert_ffn, plan, route_and_project
from openk3.ops.mx import decode_mxfp4, encode_mxfp4, mxfp4_rounded, mxfp8_rounded
from openk3.ops.norm import gated_rms_norm, l2_norm, rms_norm
from openk3.ops.short_conv import short_conv

Tensor = torch.Tensor
Rng = random.Random


@dataclass
class Case:
    """inputs: by name, in the kernels' dtypes; the oracle has the floating ones in float64.

    call: outputs by name. wanted: inputs that want a gradient. facts: what is wrong besides, each in a line.
    """

    inputs: dict[str, Tensor]
    call: Callable[[dict[str, Tensor], Any], dict[str, Tensor]]
    wanted: tuple[str, ...] = ()
    facts: Callable[[], list[str]] | None = None
    traits: dict[str, Any] = field(default_factory=dict)


def draw(device: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers; half-precision ones are fp32 on a CPU, whose interpreter multiplies them wrongly."""
    x = torch.randn(*shape, device=device) * scale
    return x if device == "cpu" else x.to(dtype)


def magnitude(rng: Rng, decades: float = 2.0) -> float:
    return float(10 ** rng.uniform(-decades, decades))


def tokens(rng: Rng, device: str, most: int = 1500) -> int:
    """Few, many, and beside the borders of tiles."""
    if device == "cpu":
        return rng.choice([0, 1, 5, 17])
    return rng.choice(
        [0, 1, 2, 15, 63, 64, 65, 127, 128, 129, rng.randrange(1, most), rng.randrange(1, most)]
    )


def offsets(device: str, lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def some_ids(rng: Rng, device: str, T: int, k: int, E: int) -> Tensor:
    """Distinct experts of each token: even, skewed so that most experts have none, or all the same."""
    spread = rng.choice([0.0, 0.0, 3.0, 30.0])
    favour = spread * torch.randn(E, device=device)
    return (
        (torch.rand(T, E, device=device).log().neg().log().neg() + favour).argsort(dim=1)[:, :k].contiguous()
    )


def experts(rng: Rng, device: str) -> Case:
    widths = [(32, 24)] if device == "cpu" else [(256, 416), (128, 96), (64, 136), (72, 40)]
    width, F = rng.choice(widths)
    E = rng.choice([1, 2, 7, 64] if device != "cpu" else [1, 3])
    k, T = rng.randint(1, min(E, 8)), tokens(rng, device, 4000)
    kind = rng.choice(["situ", "situ", "swiglu", "glu"])
    inputs = {
        "x": draw(device, T, width, scale=magnitude(rng, 1)),
        "p": torch.rand(T, k, device=device),
        "w1": draw(device, E, F, width, scale=width**-0.5),
        "w3": draw(device, E, F, width, scale=width**-0.5),
        "w2": draw(device, E, width, F, scale=F**-0.5),
    }
    ids = some_ids(rng, device, T, k, E)

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        routes = plan(ids, E, implementation="triton")
        weights = own["w1"], own["w3"], own["w2"]
        u = expert_ffn(own["x"], own["p"], routes, *weights, Activation(kind), implementation=implementation)
        return {"u": u}

    def facts() -> list[str]:
        mine, right = plan(ids, E, implementation="triton"), plan(ids.cpu(), E)
        names = ("order", "tokens", "rows", "offsets")
        return [f"plan: {n}" for n in names if not torch.equal(getattr(mine, n).cpu(), getattr(right, n))]

    return Case(
        inputs, call, tuple(inputs), facts, {"T": T, "k": k, "E": E, "l": width, "F": F, "kind": kind}
    )


def mx_experts(rng: Rng, device: str) -> Case:
    width, F = (64, 32) if device == "cpu" else rng.choice([(256, 416), (288, 96), (512, 384)])
    E = rng.choice([1, 3, 16]) if device != "cpu" else 2
    k, T = rng.randint(1, min(E, 6)), tokens(rng, device)
    stored: list[Tensor] = []
    for rows, columns in ((F, width), (F, width), (width, F)):
        spread = 2.0 ** torch.randint(-3, 4, (E, rows, 1), device=device)
        stored += encode_mxfp4(torch.randn(E, rows, columns, device=device) * columns**-0.5 * spread)
    packed = MxExperts.from_checkpoint(*stored)
    ids = some_ids(rng, device, T, k, E)
    inputs = {"x": draw(device, T, width, scale=magnitude(rng, 1)), "p": torch.rand(T, k, device=device)}

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        routes = plan(ids, E, implementation="triton")
        return {
            "u": mx_expert_ffn(
                own["x"], own["p"], routes, packed, Activation(), implementation=implementation
            )
        }

    return Case(inputs, call, traits={"T": T, "k": k, "E": E, "l": width, "F": F})


def router(rng: Rng, device: str) -> Case:
    d, width = (16, 8) if device == "cpu" else rng.choice([(512, 256), (72, 40), (640, 0), (1024, 384)])
    E = rng.choice([5, 12]) if device == "cpu" else rng.randrange(2, 500)
    k, T = rng.randint(1, min(E, 16)), tokens(rng, device)
    inputs = {
        "x": draw(device, T, d),
        "router": draw(device, E, d, scale=d**-0.5 * magnitude(rng, 0.5)),
        "bias": torch.randn(E, device=device) * rng.choice([0.0, 0.05, 1.0]),
    }
    if width:
        inputs["down"] = draw(device, width, d, scale=d**-0.5)
    first = route_and_project(
        inputs["x"], inputs["router"], inputs.get("down"), inputs["bias"], k, implementation="triton"
    ).routing

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        entry = route_and_project(
            own["x"], own["router"], own.get("down"), own["bias"], k, scaling_factor=2.5,
            chosen=(first.ids, first.cutoff.to(own["bias"].dtype)), implementation=implementation,
        )  # fmt: skip
        return {"latent": entry.latent, "weights": entry.routing.weights}

    def facts() -> list[str]:
        biased = torch.sigmoid(inputs["x"].double() @ inputs["router"].double().T) + inputs["bias"]
        best = biased.sort(1, descending=True).values
        near = 1e-6 * max(1.0, d / 512) * max(1.0, float(inputs["bias"].abs().max()))
        wrong = []
        if T and (biased.gather(1, first.ids) - best[:, :k]).abs().max() > near:
            wrong.append("choice: not the largest")
        if k < E and T and (first.cutoff - best[:, k]).abs().max() > near:
            wrong.append("cutoff")
        if T and not bool((first.ids.sort(1).values.diff(dim=1) > 0).all()):
            wrong.append("choice: an expert twice")
        mine = plan(first.ids, E, counts=first.counts, implementation="triton")
        right = plan(first.ids.cpu(), E)
        names = ("order", "tokens", "rows", "offsets")
        return wrong + [
            f"plan: {n}" for n in names if not torch.equal(getattr(mine, n).cpu(), getattr(right, n))
        ]

    wanted = tuple(n for n in ("x", "router", "down") if n in inputs)
    return Case(inputs, call, wanted, facts, {"T": T, "d": d, "l": width, "E": E, "k": k})


def attention(rng: Rng, device: str) -> Case:
    K, S, V = (16, 16, 16) if device == "cpu" else rng.choice([(128, 64, 128), (128, 64, 128), (64, 32, 64)])
    H, small = rng.randint(1, 4), device == "cpu"
    pairs = []
    for _ in range(rng.randint(1, 3 if small else 8)):
        n = rng.choice([0, 1, rng.randint(1, 20 if small else 600)])
        pairs.append((n, max(0, n + rng.choice([0, 0, rng.randint(-3, 10 if small else 300)]))))
    queries, keys = (sum(n) for n in zip(*pairs, strict=True))
    size = magnitude(rng, 1)
    inputs = {
        "q": draw(device, queries, H, K + S, scale=size),
        "kv": draw(device, keys, H, K + V),
        "shared": draw(device, keys, S),
    }
    gated = rng.random() < 0.7
    if gated:
        inputs["gate"] = draw(device, queries, H, V, scale=magnitude(rng, 1))
    borders = [offsets(device, [pair[side] for pair in pairs]) for side in (0, 1)]

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        y, largest = gated_mla(
            own["q"], own["kv"], own["shared"], own.get("gate"), *borders,
            return_max_logit=True, implementation=implementation,
        )  # fmt: skip
        assert largest is not None
        return {"y": y, "largest logit": largest}

    return Case(inputs, call, tuple(inputs), traits={"pairs": pairs, "H": H, "sizes": (K, S, V), "q": size})


def decode(rng: Rng, device: str) -> Case:
    small = device == "cpu"
    H, R, S = (2, 64, 16) if small else rng.choice([(96, 512, 64), (8, 256, 64), (32, 512, 64), (3, 128, 64)])
    page = 16 if small else rng.choice([16, 64, 128])
    W = rng.choice([1, 1, 2, 4])
    lengths = [rng.choice([0, W, rng.randint(1, 40 if small else 3000)]) for _ in range(rng.randint(1, 6))]
    lengths = [n if n >= W or n == 0 else W for n in lengths]
    needed = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(needed) + 2, device=device).int()
    table = torch.zeros(len(lengths), max(*needed, 1), dtype=torch.int32, device=device)
    taken = 0
    for row, n in enumerate(needed):
        table[row, :n] = order[taken : taken + n]
        taken += n
    inputs = {
        "q_latent": draw(device, len(lengths), W, H, R),
        "q_shared": draw(device, len(lengths), W, H, S),
        "cache": draw(device, len(order), page, R + S),
    }
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    scale, split = magnitude(rng, 0.5) * (R + S) ** -0.5, rng.choice([None, 64, 512])

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        options = {"split": split} if implementation == "triton" else {}
        mixed, lse = mla_decode(
            own["q_latent"], own["q_shared"], own["cache"], table, held, scale=scale, return_lse=True,
            implementation=implementation, **options,
        )  # fmt: skip
        assert lse is not None
        return {"mixed": mixed, "lse": lse}

    def facts() -> list[str]:
        latents = inputs["cache"].new_tensor(0).expand(5, R + S) + draw(device, 5, R + S).to(inputs["cache"])
        mine, right = inputs["cache"].clone(), inputs["cache"].clone()
        slots = torch.randperm(len(order) * page, device=device)[:5].int()
        slots[2] = -1
        mla_append(latents, mine, slots, implementation="triton")
        kept = slots >= 0
        right.view(-1, R + S)[slots[kept].long()] = latents[kept]
        return [] if torch.equal(mine, right) else ["mla_append"]

    traits = {"lengths": lengths, "W": W, "H": H, "R": R, "page": page, "split": split}
    return Case(inputs, call, (), facts, traits)


def attnres(rng: Rng, device: str) -> Case:
    small = device == "cpu"
    d = 24 if small else rng.choice([96, 512, 7168])
    S = rng.choice([1, 3] if small else [1, 2, 5, 9, 13])
    T = tokens(rng, device, 900)
    inputs = {f"row {i}": draw(device, T, d, scale=magnitude(rng, 1)) for i in range(S)}
    inputs |= {"query": draw(device, d, scale=d**-0.5), "gain": 1 + draw(device, d, scale=0.1)}
    form = rng.choice(["mix", "add and norm", "norm", "bank"])
    if form == "add and norm":
        inputs["output"] = draw(device, T, d)
    if "norm" in form:
        inputs["norm gain"] = 1 + draw(device, d, scale=0.1)

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        rows = [own[f"row {i}"] for i in range(S)]
        chosen = {"implementation": implementation}
        if form == "mix":
            mixed, _ = attnres_mix(rows, own["query"], own["gain"], **chosen)
            return {"mixed": mixed}
        if form == "bank":
            queries, gains = torch.stack([own["query"], -own["query"]]), torch.stack([own["gain"]] * 2)
            mixes = attnres_bank_mixes(
                [row.detach() for row in rows], queries.detach(), gains.detach(), **chosen
            )
            return {
                f"{name} {i}": x
                for i, mix in enumerate(mixes)
                for name, x in zip(mix._fields, mix, strict=True)
            }
        made = attnres_add_mix_norm(
            rows[:-1], rows[-1], own.get("output"), own["query"], own["gain"], own["norm gain"],
            return_mixed=True, **chosen,
        )  # fmt: skip
        assert made.normed is not None
        assert made.mixed is not None
        return {"normed": made.normed, "mixed": made.mixed, "prefix": made.prefix}

    wanted = () if form == "bank" else tuple(inputs)
    return Case(inputs, call, wanted, traits={"S": S, "T": T, "d": d, "form": form})


def loss(rng: Rng, device: str) -> Case:
    d, V = (16, 40) if device == "cpu" else (rng.choice([64, 512]), rng.choice([1000, 4133]))
    T = max(1, tokens(rng, device))
    targets = torch.randint(V, (T,), device=device)
    targets[torch.rand(T, device=device) < rng.choice([0.0, 0.3, 1.0])] = -100
    inputs = {
        "hidden": draw(device, T, d, scale=magnitude(rng, 0.5)),
        "weight": draw(device, V, d, scale=d**-0.5),
    }

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        total, count = linear_cross_entropy(
            own["hidden"], own["weight"], targets, implementation=implementation
        )
        return {"loss": total, "count": count}

    return Case(inputs, call, tuple(inputs), traits={"T": T, "d": d, "V": V})


def units(rng: Rng, device: str) -> Case:
    T, F = tokens(rng, device), 24 if device == "cpu" else rng.choice([40, 416, 3072])
    kind = rng.choice(["situ", "swiglu", "glu"])
    inputs = {"both": draw(device, T, 2 * F, scale=magnitude(rng, 2))}

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        halves = own["both"].chunk(2, dim=-1)
        return {
            "of halves": Activation(kind).of_halves(own["both"], implementation=implementation),
            "of two": Activation(kind)(*halves, implementation=implementation),
        }

    return Case(inputs, call, ("both",), traits={"T": T, "F": F, "kind": kind})


def norms(rng: Rng, device: str) -> Case:
    T, d = tokens(rng, device), 24 if device == "cpu" else rng.choice([128, 512, 7168])
    inputs = {
        "x": draw(device, T, 2 * d, scale=magnitude(rng, 3)),
        "gate": draw(device, T, d, scale=magnitude(rng, 1)),
        "weight": 1 + draw(device, d, scale=0.3),
    }

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        x = own["x"][:, :d]  # rows that lie apart
        chosen = {"implementation": implementation}
        return {
            "rms": rms_norm(x, own["weight"], 1e-5, **chosen),
            "gated": gated_rms_norm(x, own["gate"], own["weight"], 1e-5, **chosen),
            "l2": l2_norm(x, **chosen),
        }

    return Case(inputs, call, tuple(inputs), traits={"T": T, "d": d})


def convolution(rng: Rng, device: str) -> Case:
    D = 16 if device == "cpu" else rng.choice([96, 1536])
    W = 4 if device == "cpu" else rng.choice([2, 4])
    lengths = [tokens(rng, device, 400) for _ in range(rng.randint(1, 5))]
    inputs = {"x": draw(device, sum(lengths), D, scale=magnitude(rng, 1)), "weight": draw(device, D, W)}
    if rng.random() < 0.5:
        inputs["state"] = draw(device, len(lengths), W - 1, D)
    borders = offsets(device, lengths)

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        y, tail = short_conv(
            own["x"], own["weight"], borders, initial_state=own.get("state"), implementation=implementation
        )
        return {"y": y, "tail": tail}

    return Case(inputs, call, tuple(inputs), traits={"lengths": lengths, "D": D, "W": W})


def formats(rng: Rng, device: str) -> Case:
    """Codes, scales and rounded numbers have one right value: those of the eager forms on a CPU."""
    rows, columns = (
        rng.randint(1, 8 if device == "cpu" else 300),
        32 * rng.randint(1, 3 if device == "cpu" else 40),
    )
    x = draw(device, rows, columns, scale=magnitude(rng, 12)) * 2.0 ** torch.randint(
        -8, 9, (rows, 1), device=device
    )
    x = x.to(torch.bfloat16) if device != "cpu" else x
    x[torch.rand(x.shape, device=device) < 0.1] = 0

    def facts() -> list[str]:
        wrong = []
        packed, scale = encode_mxfp4(x, implementation="triton")
        right, right_scale = encode_mxfp4(x.cpu(), implementation="eager")
        if not (torch.equal(packed.cpu(), right) and torch.equal(scale.cpu(), right_scale)):
            wrong.append("encode_mxfp4")
        if not torch.equal(
            decode_mxfp4(packed, scale, implementation="triton").cpu(),
            decode_mxfp4(right, right_scale, implementation="eager"),
        ):
            wrong.append("decode_mxfp4")
        for function in (mxfp4_rounded, mxfp8_rounded):
            mine, oracle = function(x, implementation="triton"), function(x.cpu(), implementation="eager")
            if not torch.equal(mine.cpu(), oracle):
                wrong.append(function.__name__)
        return wrong

    return Case({}, lambda own, implementation: {}, (), facts, {"rows": rows, "columns": columns})


def decoding(rng: Rng, device: str) -> Case:
    """Routed experts of a decoding step."""
    width, F = (32, 24) if device == "cpu" else rng.choice([(256, 416), (64, 136)])
    E = 5 if device == "cpu" else rng.choice([16, 256])
    n, k = rng.choice([1, 3] if device == "cpu" else [1, 2, 4, 5, 17, 64, 200]), rng.randint(1, 5)
    logits, bias = torch.randn(n, E, device=device), torch.randn(E, device=device) * 0.1
    inputs = {
        "x": draw(device, n, width, scale=magnitude(rng, 1)),
        "w1": draw(device, E, F, width, scale=width**-0.5),
        "w3": draw(device, E, F, width, scale=width**-0.5),
        "w2": draw(device, E, width, F, scale=F**-0.5),
    }
    ids, weights = choose_experts(logits, bias, k, implementation="triton")

    def call(own: dict[str, Tensor], implementation: Any) -> dict[str, Tensor]:
        y = expert_sums(
            own["x"], ids, weights.to(own["x"].dtype) if implementation != "triton" else weights,
            own["w1"], own["w3"], own["w2"], Activation(), implementation=implementation,
        )  # fmt: skip
        return {"y": y}

    def facts() -> list[str]:
        right, _ = choose_experts(logits.double(), bias.double(), k, implementation="eager")
        biased = torch.sigmoid(logits.double()) + bias.double()
        apart = (biased.gather(1, ids.long()) - biased.gather(1, right.long())).abs().max()
        return ["choose_experts"] if apart > 1e-6 else []

    return Case(inputs, call, (), facts, {"n": n, "k": k, "E": E, "l": width, "F": F})


FAMILIES: dict[str, Callable[[Rng, str], Case]] = {
    "experts": experts,
    "mx_experts": mx_experts,
    "router": router,
    "attention": attention,
    "decode": decode,
    "attnres": attnres,
    "loss": loss,
    "units": units,
    "norms": norms,
    "convolution": convolution,
    "formats": formats,
    "decoding": decoding,
}
