"""Validation against a sum over documents by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tiny_run import TinyDocuments, tiny_config

from openk3.model import K3, initialise
from openk3.train.balance import routers
from openk3.train.evaluate import FirstDocuments, evaluate


@pytest.fixture(scope="module")
def model():
    model = K3(tiny_config().model, dtype=torch.float64)
    initialise(model, 3)
    return model


def nll_by_hand(model: K3, documents: TinyDocuments, context: int) -> tuple[float, int]:
    """Each window of the documents laid end to end, each document's part of it as a forward of its own."""
    total, predicted = 0.0, 0
    start = 0
    for number, length in enumerate(documents.lengths.tolist()):
        ids = torch.from_numpy(documents.tokens(number).astype(np.int64))
        cuts = [
            0,
            *(at - start for at in range(start, start + length) if at % context == 0 and at > start),
            length,
        ]
        for first, last in itertools.pairwise(cuts):
            cu = torch.tensor([0, last - first], dtype=torch.int32)
            log_p = model.logits(model(ids[first:last], cu).hidden).log_softmax(-1)
            for position in range(first, min(last, length - 1)):
                total -= float(log_p[position - first, ids[position + 1]])
                predicted += 1
        start += length
    return total, predicted


@pytest.mark.parametrize(("context", "windows"), [(16, 3), (1000, 1)])
def test_loss_and_bits_per_byte_are_sums_over_the_same_documents(model, context, windows):
    documents = TinyDocuments(6, seed=5)
    with torch.no_grad():
        nll, predicted = nll_by_hand(model, documents, context)

    found = evaluate(model, [documents], context=context, windows=windows)

    first_tokens = len(documents.lengths) * math.log(model.config.vocab_size)
    assert found.loss == pytest.approx(nll / predicted, rel=1e-9)
    assert found.bits_per_byte == pytest.approx(
        (nll + first_tokens) / math.log(2) / documents.byte_counts.sum()
    )
    assert found.tokens == documents.lengths.sum()
    assert found.bytes == documents.byte_counts.sum()


def test_several_sources_are_pooled_by_their_tokens_and_bytes(model):
    sources = [TinyDocuments(3, seed=6), TinyDocuments(5, seed=7)]
    one, two = (evaluate(model, [source], context=64, windows=2) for source in sources)
    both = evaluate(model, sources, context=64, windows=2)
    assert both.bytes == one.bytes + two.bytes
    pooled = (one.bits_per_byte * one.bytes + two.bits_per_byte * two.bytes) / both.bytes
    assert both.bits_per_byte == pytest.approx(pooled, rel=1e-9)


def test_evaluation_leaves_no_trace_in_the_model(model):
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluate(model, [TinyDocuments(3, seed=6)], context=64, windows=2)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert routers(model).keys() == {1, 2}


def test_the_first_documents_are_whole_and_at_least_one():
    documents = TinyDocuments(10, seed=8)
    ends = np.cumsum(documents.lengths)
    assert len(FirstDocuments(documents, int(ends[3])).lengths) == 4
    assert len(FirstDocuments(documents, int(ends[3]) - 1).lengths) == 3
    assert len(FirstDocuments(documents, 1).lengths) == 1
    assert len(FirstDocuments(documents, 10**9).lengths) == 10
