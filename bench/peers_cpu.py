"""Training and decoding on a CPU, beside transformers' `KimiLinearForCausalLM` at the same shape and weights.

    OMP_NUM_THREADS=2 python bench/peers_cpu.py

One process, two threads for both, the same seed, tokens and batch. What is compared is the Kimi-Linear form
of nano: the peer knows no other. Our weights reach it through our saver, and before anything is timed both
must give the same loss and the same greedy tokens. The peer has several ways to run experts: beside the one
it takes by itself stands the next best for each work. K3's nano has no peer. `--dry-run` leaves the results
alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rows import merge, row

from openk3.checkpoint.official.save import save_official
from openk3.config import (
    ActivationConfig,
    AttnResConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    preset,
)
from openk3.model import K3, initialise
from openk3.model.generate import Sampling, generate

try:
    import transformers
    from transformers import PreTrainedModel
except ModuleNotFoundError:
    raise SystemExit("transformers is not installed; it comes with: pip install 'openk3[oracle]'") from None

Tensor = torch.Tensor
Work = Callable[[], object]

PEER = f"transformers {transformers.__version__}"
BY_ITSELF = "grouped_mm"
NEXT_BEST = {"forward and backward": "eager", "greedy decoding": "batched_mm"}
SEQUENCES, LENGTH = 4, 256
PROMPT, NEW_TOKENS = 64, 128
WARM_UP, REPEATS = 2, 7


def kimi_linear_nano() -> ModelConfig:
    """nano in the Kimi-Linear form: its widths, depth, heads and experts, none of K3's additions."""
    nano = preset("nano")
    assert nano.kda and nano.mla and nano.moe
    return ModelConfig(
        vocab_size=nano.vocab_size,
        hidden_size=nano.hidden_size,
        num_layers=nano.num_layers,
        kda=KdaConfig(
            num_heads=nano.kda.num_heads, head_dim=nano.kda.head_dim, gate="softplus", output_gate="low_rank"
        ),
        mla=MlaConfig(**nano.mla.model_dump(exclude={"gated", "q_lora_rank"}), gated=False),
        moe=MoeConfig(
            num_experts=nano.moe.num_experts,
            experts_per_token=nano.moe.experts_per_token,
            num_shared_experts=nano.moe.num_shared_experts,
            expert_width=nano.moe.expert_width,
            latent_norm=False,
        ),
        dense_width=nano.dense_width,
        activation=ActivationConfig(kind="swiglu"),
        attn_res=AttnResConfig(kind="none"),
        max_context=nano.max_context,
    )


def built(config: ModelConfig) -> K3:
    model = K3(config)
    initialise(model, seed=0)
    return model


def as_peer(model: K3) -> PreTrainedModel:
    """The same weights in transformers, fp32."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_official(model, Path(folder) / "nano", dtype="float32")
        peer = transformers.KimiLinearForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True
        )
    assert peer.config._experts_implementation == BY_ITSELF
    peer.generation_config.eos_token_id = None  # always as many tokens as are asked for
    return peer


def our_step(model: K3, tokens: Tensor) -> Callable[[], float]:
    """Forward and backward of the mean loss over tokens `[N, T]`, packed."""
    targets = torch.cat([tokens[:, 1:], torch.full((len(tokens), 1), -100)], dim=1).flatten()
    cu_seqlens = torch.arange(0, tokens.numel() + 1, tokens.shape[1], dtype=torch.int32)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model.loss(tokens.flatten(), targets, cu_seqlens)
        mean = loss.total / loss.count
        mean.backward()
        return float(mean)

    return step


def peer_step(peer: PreTrainedModel, tokens: Tensor) -> Callable[[], float]:
    def step() -> float:
        peer.zero_grad(set_to_none=True)
        loss = peer(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return float(loss)

    return step


def our_decoding(model: K3, prompt: list[int]) -> Callable[[], list[int]]:
    return lambda: list(generate(model, prompt, NEW_TOKENS, sampling=Sampling(temperature=0)))


def peer_decoding(peer: PreTrainedModel, prompt: list[int]) -> Callable[[], list[int]]:
    ids = torch.tensor([prompt])

    def decode() -> list[int]:
        mask = torch.ones_like(ids)
        out = peer.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        found: list[int] = out[0, len(prompt) :].tolist()
        return found

    return decode


def rates(work: Sequence[Work], tokens: int) -> list[float]:
    """Median tokens per second of each, their repeats interleaved so that a slow moment meets all."""
    times: list[list[float]] = [[] for _ in work]
    for repeat in range(WARM_UP + REPEATS):
        for function, taken in zip(work, times, strict=True):
            start = time.perf_counter()
            function()
            if repeat >= WARM_UP:
                taken.append(time.perf_counter() - start)
    return [tokens / statistics.median(taken) for taken in times]


def compare(
    work: str, shape: str, tokens: int, ours: Work, theirs: Work, nano: Work, peer: PreTrainedModel
) -> list[dict[str, object]]:
    """Rates of ours, of the peer in both ways (`theirs` runs `peer`), and of nano: printed, and as rows."""

    def with_experts(experts: str) -> Work:
        def run() -> object:
            peer.set_experts_implementation(experts)
            return theirs()

        return run

    names = {PEER: BY_ITSELF, f"{PEER}, {NEXT_BEST[work]} experts": NEXT_BEST[work]}
    mine, k3, *others = rates([ours, nano, *map(with_experts, names.values())], tokens)
    peers = dict(zip(names, others, strict=True))
    print(f"{work}: ours {mine:.0f} tokens/s, K3 nano {k3:.0f}")
    for name, rate in peers.items():
        print(f"  {name}: {rate:.0f} tokens/s, ratio {mine / rate:.2f}")
    shape = f"{shape} fp32, threads={torch.get_num_threads()}"
    form = "Kimi-Linear form of nano"
    return [
        row(f"{work}, {form}", mine, "tokens/s", "higher", shape=shape, peers=peers),
        row(f"{work}, nano", k3, "tokens/s", "higher", shape=shape),
    ]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--dry-run", action="store_true", help="print, and leave the results alone")
    options = arguments.parse_args()
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    linear, nano = built(kimi_linear_nano()), built(preset("nano"))
    peer = as_peer(linear)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(linear.config.vocab_size, (SEQUENCES, LENGTH), generator=generator)
    prompt = tokens[0, :PROMPT].tolist()

    ours, theirs = our_step(linear, tokens), peer_step(peer.train(), tokens)
    mine, other = ours(), theirs()
    assert abs(mine - other) < 1e-5, f"losses differ: ours {mine}, {PEER} {other}"
    shape = f"N={SEQUENCES} T={LENGTH}"
    rows = compare("forward and backward", shape, tokens.numel(), ours, theirs, our_step(nano, tokens), peer)

    decode, theirs_decode = our_decoding(linear.eval(), prompt), peer_decoding(peer.eval(), prompt)
    assert decode() == theirs_decode(), "greedy tokens differ"
    nano_decode = our_decoding(nano.eval(), prompt)
    shape = f"prompt {PROMPT}, {NEW_TOKENS} new, N=1"
    rows += compare("greedy decoding", shape, NEW_TOKENS, decode, theirs_decode, nano_decode, peer)
    if not options.dry_run:
        print("merged into", merge(rows, "cpu"))


if __name__ == "__main__":
    main()
