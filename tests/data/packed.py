"""Token documents held in lists, and plain ways to say what packing must give."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from openk3.data.batch import IGNORED, Batch
from openk3.data.windows import permutation

Contents = tuple[list[int], list[int], list[int]]  # tokens, targets, sequence lengths


class ListedDocuments:
    """Documents from lists of ids; the last id of each stands for [EOS]."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = documents
        self.lengths = np.array([len(document) for document in documents], np.int64)

    def tokens(self, document: int) -> NDArray[np.uint32]:
        return np.array(self.documents[document], np.uint32)


def numbered_documents(lengths: list[int]) -> ListedDocuments:
    """Documents in which every token is different, so that any mix-up shows."""
    starts = np.cumsum([0, *lengths])
    return ListedDocuments([list(range(start, start + n)) for start, n in zip(starts, lengths, strict=False)])


def stream_by_definition(
    documents: ListedDocuments, seed: int, epochs: int, *, shuffled: bool = True
) -> list[tuple[int, int, bool]]:
    """(token, target, starts a document) of epochs one after another, token by token."""
    stream = []
    n = len(documents.documents)
    for epoch in range(epochs):
        for i in permutation(n, seed, epoch).tolist() if shuffled else range(n):
            document = documents.documents[i]
            for place, token in enumerate(document):
                target = document[place + 1] if place + 1 < len(document) else IGNORED
                stream.append((token, target, place == 0))
    return stream


def windows_by_definition(stream: list[tuple[int, int, bool]], context: int) -> list[Contents]:
    """What each window holds; a sequence starts where a window or a document does."""
    windows = []
    for start in range(0, len(stream), context):
        part = stream[start : start + context]
        starts = [i for i, (_, _, fresh) in enumerate(part) if fresh or i == 0]
        lengths = np.diff([*starts, len(part)]).tolist()
        windows.append(([t for t, _, _ in part], [t for _, t, _ in part], lengths))
    return windows


def contents(batch: Batch) -> Contents:
    """What a batch holds."""
    return batch.tokens.tolist(), batch.targets.tolist(), np.diff(batch.cu_seqlens.numpy()).tolist()


def joined(parts: list[Contents]) -> Contents:
    """Parts one after another."""
    tokens, targets, lengths = ([x for part in parts for x in part[i]] for i in range(3))
    return tokens, targets, lengths
