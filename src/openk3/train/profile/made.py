"""Text that is none, for a profile without a corpus: documents of the lengths of source files.

Tokens are drawn as those of text are, few of them often and most of them rarely (Zipf), so that the look-up
and its gradient touch about as many rows as they would.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from openk3.data import Windows
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData

LOG_MEAN, LOG_SPREAD = 7.3, 1.2
"""Of the natural logarithm of a document's tokens: a median of 1,480."""
LEAST, MOST = 16, 100_000


class MadeDocuments:
    """At least `tokens` tokens in documents. Implements `openk3.data.windows.Documents`."""

    def __init__(self, vocab_size: int, tokens: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        lengths: list[int] = []
        while sum(lengths) < tokens:
            lengths.append(int(np.clip(random.lognormal(LOG_MEAN, LOG_SPREAD), LEAST, MOST)))
        self.lengths = self.byte_counts = np.array(lengths)
        self._vocab_size, self._seed = vocab_size, seed

    def tokens(self, document: int) -> NDArray[np.uint32]:
        random = np.random.default_rng([self._seed, document])
        uniform = random.random(int(self.lengths[document]))
        ranks = self._vocab_size**uniform - 1  # density 1 / rank
        return ranks.astype(np.uint32).clip(0, self._vocab_size - 1)


def made_data(config: TrainConfig, steps: int) -> TrainingData:
    """Enough for `steps` steps."""
    documents = MadeDocuments(config.model.vocab_size, steps * config.train.step_tokens, config.train.seed)
    return TrainingData(Windows(documents, config.train.context, config.train.seed))
