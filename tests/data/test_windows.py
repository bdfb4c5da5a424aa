"""Windows over documents against the stream written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import ListedDocuments, numbered_documents, stream_by_definition, windows_by_definition

from openk3.data.windows import Windows, permutation
from openk3.errors import InvalidInput

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.integers(0, 2**63 - 1))
def test_every_window_is_its_slice_of_the_endless_stream(lengths, context, seed):
    documents = numbered_documents(lengths)
    stream = stream_by_definition(documents, seed, epochs=4 + 4 * context // sum(lengths))
    windows = Windows(documents, context, seed)
    expected = windows_by_definition(stream, context)[: len(stream) // context]
    assert len(expected) >= 3
    for index in reversed(range(len(expected))):  # random access: the order of asking does not matter
        sample = windows.sample(index)
        assert (sample.tokens.tolist(), sample.targets.tolist(), sample.lengths) == expected[index]
        assert (sample.tokens.dtype, sample.targets.dtype, sample.mask) == (np.int64, np.int64, None)
        assert windows.epoch(index) == index * context // sum(lengths)


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.integers(0, 1000))
def test_an_epoch_reads_every_token_once_and_loses_no_target(lengths, context, seed):
    lengths = [*lengths, context - sum(lengths) % context]  # so that the epoch ends with a window
    documents = numbered_documents(lengths)
    windows = Windows(documents, context, seed)
    samples = [windows.sample(i) for i in range(sum(lengths) // context)]
    tokens = np.concatenate([sample.tokens for sample in samples])
    targets = np.concatenate([sample.targets for sample in samples])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    # Every token is predicted once but the first of each document; the last of each predicts nothing.
    firsts = {document[0] for document in documents.documents}
    assert sorted(targets[targets >= 0].tolist()) == sorted(set(range(sum(lengths))) - firsts)
    assert (targets == -100).sum() == len(lengths)


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.integers(0, 3))
def test_the_reported_share_of_divided_documents_is_the_share_of_divided_documents(lengths, context, epoch):
    documents = numbered_documents(lengths)
    position, divided = epoch * sum(lengths), 0
    for i in permutation(len(lengths), 5, epoch).tolist():
        places = range(position, position + lengths[i])
        divided += len({place // context for place in places}) > 1
        position += lengths[i]
    assert Windows(documents, context, 5).split_fraction(epoch) == pytest.approx(divided / len(lengths))


def splitmix64(x: int) -> int:
    """The published generator, in whole numbers."""
    mask = 2**64 - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (17, 3), (2**63 - 1, 10**6)])
def test_the_order_of_an_epoch_sorts_by_a_published_hash(seed, epoch):
    stream = splitmix64(splitmix64(seed) ^ epoch)
    expected = sorted(range(50), key=lambda i: splitmix64(stream ^ i))
    assert permutation(50, seed, epoch).tolist() == expected


def test_every_document_comes_to_every_place_about_equally_often():
    n, epochs = 8, 4000
    seen = np.zeros((n, n))
    for epoch in range(epochs):
        seen[permutation(n, 3, epoch), np.arange(n)] += 1
    expected = epochs / n
    chi_square = ((seen - expected) ** 2 / expected).sum()  # 49 degrees of freedom: mean 49, deviation 9.9
    assert chi_square < 49 + 5 * 9.9


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(permutation(20, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize(("documents", "context"), [([], 8), ([[1, 2]], 0)])
def test_an_empty_corpus_and_an_empty_window_are_refused(documents, context):
    with pytest.raises(InvalidInput, match="both must be positive"):
        Windows(ListedDocuments(documents), context, 0)
