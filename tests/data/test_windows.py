"""Windows over documents against the stream written out token by token."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import ListedDocuments, numbered_documents, stream_by_definition, windows_by_definition

from openk3.data.loader import Loader
from openk3.data.windows import ShuffledWindows, Windows, permutation
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


# Windows in an order of their own.


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.integers(0, 2**63 - 1))
def test_shuffled_windows_are_the_windows_each_once(lengths, context, seed):
    windows = Windows(numbered_documents(lengths), context, seed)
    shuffled = ShuffledWindows(windows)
    count = 3 * max(1, sum(lengths) // context)
    found = {index: shuffled.sample(index) for index in reversed(range(count))}  # asked for in any order
    there = [windows.sample(index) for index in range(count)]
    for a, b in zip(by_content(found.values()), by_content(there), strict=True):
        assert a == b


def by_content(samples):
    return sorted((s.tokens.tolist(), s.targets.tolist(), s.lengths) for s in samples)


def test_shuffled_windows_tear_documents_apart_and_seeds_and_epochs_differ():
    documents = numbered_documents([400, 400])

    def neighbours(stream, first):
        """Pairs of windows of one document, side by side in an epoch."""
        owner = [int(stream.sample(i).tokens[0]) // 400 for i in range(first, first + 200)]
        return sum(a == b for a, b in pairwise(owner))

    windows = Windows(documents, 4, 0)
    assert neighbours(windows, 0) == 198
    orders = set()
    for seed in range(4):
        shuffled = ShuffledWindows(Windows(documents, 4, seed))
        for epoch in range(3):
            assert 60 < neighbours(shuffled, 200 * epoch) < 140  # 99.5 expected, deviation 7
            samples = (shuffled.sample(200 * epoch + i) for i in range(200))
            orders.add(tuple(int(sample.tokens[0]) for sample in samples))
            assert shuffled.epoch(200 * epoch) == epoch
    assert len(orders) == 12


def test_a_place_in_one_order_is_refused_in_the_other():
    windows = Windows(numbered_documents([40, 30]), 5, 0)
    state = Loader(windows, 2, 2).state_dict()
    with pytest.raises(InvalidInput, match="shuffled"):
        Loader(ShuffledWindows(windows), 2, 2).load_state_dict(state)
