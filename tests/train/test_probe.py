"""Counting answers: models that know everything, nothing, or what they were taught in a few seconds."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import tiny_config
from torch import nn

from openk3.config import ModelConfig
from openk3.data import IGNORED
from openk3.data.probes import AGAIN, MARKS, Copy, Needle, Recall, measured_sequence
from openk3.errors import InvalidInput
from openk3.model import K3, Output, initialise
from openk3.train.config import TrainConfig
from openk3.train.probe import MEASURE_SEED, Recalled, measure, run_probe
from openk3.train.recipes import as_table, read_table

MODEL = {
    "vocab_size": 32,
    "hidden_size": 48,
    "num_layers": 2,
    "mla_layers": [2],
    "kda": {"num_heads": 2, "head_dim": 32},
    "mla": {
        "num_heads": 2,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
    },
    "dense_layers": 2,
    "dense_width": 96,
    "attn_res": {"kind": "none"},
    "tie_embeddings": True,
    "initializer_range": 0.1,
}


class Answering(nn.Module):
    """A stand-in for `K3` whose logits follow from a function of a sequence's tokens."""

    def __init__(self, answer: Any, vocabulary: int) -> None:
        super().__init__()
        self.answer, self.vocabulary = answer, vocabulary
        self.embed_tokens = nn.Embedding(vocabulary, 1)
        self.passes: list[list[int]] = []

    def forward(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor) -> Output:
        assert not self.training
        assert not torch.is_grad_enabled()
        borders = cu_seqlens.tolist()
        self.passes.append(borders)
        parts = [self.answer(tokens[a:b].tolist()) for a, b in itertools.pairwise(borders)]
        hidden = nn.functional.one_hot(torch.tensor([t for part in parts for t in part]), self.vocabulary)
        return Output(hidden.float(), hidden.float(), None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def look_up(tokens: list[int]) -> list[int]:
    """The token that followed this one the first time; in every probe with different keys, the answer."""
    followed = dict(reversed(list(itertools.pairwise(tokens))))
    return [followed.get(token, 0) for token in tokens]


def copy_string(tokens: list[int]) -> list[int]:
    mark = tokens.index(AGAIN)
    string = [token for token in tokens[:mark] if token >= MARKS]
    return [0] * mark + string


@pytest.mark.parametrize(
    ("probe", "length", "solver"),
    [
        (Recall(keys=16, values=8), 64, look_up),
        (Recall(keys=16, values=8), 50, look_up),
        (Copy(values=6), 33, copy_string),
        (Copy(values=6), 8, copy_string),
        (Needle(keys=16, values=8, filler=4, needles=3), 700, look_up),
    ],
)
def test_one_who_knows_reaches_all_answers(probe, length, solver):
    model = Answering(solver, probe.vocab_size).train()
    found = measure(model, probe, length, sequences=20)
    assert (found.accuracy, found.exact, found.length) == (1.0, 1.0, length)
    assert (found.sequences, found.answers) == (20, 20 * probe.answers(length))
    assert (found.chance, found.unbound) == (probe.chance, probe.unbound(length))
    assert model.training


def test_each_sequence_is_asked_once_alone_and_in_passes_of_bounded_size():
    probe = Needle(keys=16, values=8, filler=4, needles=3)
    seen: list[list[int]] = []
    model = Answering(lambda tokens: seen.append(tokens) or look_up(tokens), probe.vocab_size)
    measure(model, probe, 3000, sequences=7)
    expected = [measured_sequence(probe, 3000, MEASURE_SEED, i).tokens.tolist() for i in range(7)]
    assert seen == expected
    assert model.passes == [[0, 3000, 6000]] * 3 + [[0, 3000]]


def test_an_answer_is_right_where_the_likeliest_of_all_tokens_is_the_target_and_a_sequence_where_all_are():
    """A table of guesses drawn at random, counted here with plain loops."""
    probe, length = Recall(keys=4, values=2), 12
    random = np.random.default_rng(0)
    guesses: list[list[int]] = []

    def guess(tokens: list[int]) -> list[int]:
        guesses.append(random.integers(MARKS + 4, MARKS + 6, len(tokens)).tolist())
        return guesses[-1]

    found = measure(Answering(guess, probe.vocab_size), probe, length, sequences=200)
    hits, whole = 0, 0
    for index, guessed in enumerate(guesses):
        targets = measured_sequence(probe, length, MEASURE_SEED, index).targets.tolist()
        right = [g == t for g, t in zip(guessed, targets, strict=True) if t != IGNORED]
        hits += sum(right)
        whole += all(right)
    assert found.sequences == len(guesses) == 200
    assert found.accuracy == pytest.approx(hits / 600)
    assert found.exact == pytest.approx(whole / 200)
    assert 0.4 < found.accuracy < 0.6
    assert 0.05 < found.exact < 0.25


def test_a_new_model_knows_nothing():
    probe = Recall(keys=14, values=16)
    model = K3(ModelConfig.model_validate(MODEL))
    initialise(model, 0)
    found = measure(model, probe, 32, sequences=200)
    assert found.accuracy < 0.15  # chance is 1/16, and an untrained head may name any of 32 tokens
    assert found.exact == 0


def test_packing_changes_no_answer():
    """Each sequence alone through the model gives what the packed passes count."""
    probe, length = Needle(keys=8, values=8, filler=8, needles=2), 24
    model = K3(ModelConfig.model_validate(MODEL))
    initialise(model, 1)
    found = measure(model, probe, length, sequences=60)
    right = 0
    for index in range(60):
        tokens, targets = measured_sequence(probe, length, MEASURE_SEED, index)
        borders = torch.tensor([0, length], dtype=torch.int32)
        with torch.no_grad():
            best = model.logits(model(torch.from_numpy(tokens), borders).hidden).argmax(-1).numpy()
        right += int((best == targets).sum())
    assert found.answers == 120
    assert found.accuracy == pytest.approx(right / 120)


def probe_config(**data: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": MODEL,
        "data": {
            "kind": "probe",
            "probe": {"kind": "recall", "keys": 8, "values": 8},
            "lengths": [8, 16],
            "measured": [8, 16],
            "measured_sequences": 100,
            **data,
        },
        "train": {
            "steps": 120,
            "context": 16,
            "micro_batch_tokens": 1024,
            "device": "cpu",
        },
        "optim": {"lr": 0.005},
        "evaluation": {"every": None},
        "logging": {"detail_every": 1000, "tensorboard": False},
    }
    return TrainConfig.model_validate(read_table(TrainConfig, values))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("probe") / "run"
    return folder, run_probe(probe_config(), folder)


def test_a_hybrid_learns_to_recall_a_few_pairs(trained):
    _, result = trained
    for found in result.recalled:
        assert found.accuracy > 0.9 > found.unbound > found.chance


def test_the_result_lies_in_the_run_folder_as_json(trained):
    folder, result = trained
    assert json.loads((folder / "probe.json").read_text()) == json.loads(json.dumps(result.as_json()))
    assert (result.probe, result.seed, result.steps, result.tokens) == ("recall", 0, 120, 120 * 1024)
    assert [found.length for found in result.recalled] == [8, 16]
    assert all(isinstance(found, Recalled) for found in result.recalled)
    assert result.parameters == sum(
        np.prod(p.shape) for p in K3(ModelConfig.model_validate(MODEL)).parameters()
    )


def test_a_finished_run_is_not_trained_again_and_gives_the_same_result(trained):
    folder, result = trained
    rows = (folder / "metrics.jsonl").read_bytes()
    assert asdict(run_probe(probe_config(), folder)) == asdict(result)
    assert (folder / "metrics.jsonl").read_bytes() == rows


def test_a_probe_recipe_survives_being_written():
    config = probe_config()
    assert TrainConfig.model_validate(read_table(TrainConfig, as_table(config))) == config


def test_without_lengths_the_context_is_the_length(tmp_path):
    config = probe_config(lengths=[], measured=[], measured_sequences=1)
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})})
    assert [found.length for found in run_probe(config, tmp_path / "run").recalled] == [16]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"measured": [40]}, "10 pairs with different keys, and there are 8"),
        ({"lengths": [12]}, "sequences of 12 tokens do not fill a context of 16"),
        ({"probe": {"kind": "copy", "values": 64}}, "vocabulary of 66, model.vocab_size is 32"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_training(data, why, tmp_path):
    with pytest.raises(InvalidInput, match=why):
        run_probe(probe_config(**data), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_data_that_is_no_probe_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r'data\.kind is .given.: a probe needs data\.kind = "probe"'):
        run_probe(tiny_config(), tmp_path / "run")
