"""A set of ablations small enough for tests."""

from __future__ import annotations

from tiny_run import MODEL

from openk3.train.ablation.config import AblationSet
from openk3.train.ablation.plan import Run, distinct, entries, first_choices, trials

VOCAB = 520


def base(corpus: str = "nowhere") -> dict:
    return {
        "model": {**MODEL, "vocab_size": VOCAB, "mtp_layers": 0},
        "data": {"kind": "shards", "sources": [{"folder": corpus}]},
        "train": {"steps": 8, "context": 32, "micro_batch_tokens": 64, "device": "cpu"},
        "optim": {"lr": 1e-2},
        "checkpoint": {"every": 4},
        "logging": {"tensorboard": False},
    }


def group(name: str = "depth", **fields) -> dict:
    variants = [{"name": "block"}, {"name": "none", "overrides": {"model": {"attn_res": {"kind": "none"}}}}]
    return {"name": name, "question": "Which one?", "variants": variants, **fields}


def ablation(*groups: dict, **fields) -> AblationSet:
    return AblationSet.model_validate(
        {"name": "tiny", "base": base(), "seeds": [0, 1], "groups": list(groups) or [group()], **fields}
    )


def planned(a: AblationSet) -> list[Run]:
    return [*distinct(trials(a)), *distinct(entries(a, first_choices(a)))]
