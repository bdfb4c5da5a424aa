"""Kimi-Linear checkpoints that openk3 saved, computed by transformers' `KimiLinearForCausalLM` and by openk3.

MXFP4 experts reach it unpacked by compressed-tensors: its experts are stacked tensors that cannot be packed.
"""

from __future__ import annotations

import pytest

from oracle.cases import peer, saved
from oracle.comparison import difference_at_once, difference_in_pieces
from oracle.random_models import SEEDS, kimi_linear

pytestmark = [
    pytest.mark.oracle,
    # The released config.json has the field, and so has ours.
    pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning"),
]

PEER = "transformers KimiLinearForCausalLM"


@pytest.fixture(scope="module", params=SEEDS)
def case(request, tmp_path_factory):
    return saved(kimi_linear(request.param), request.param, tmp_path_factory.mktemp("saved") / "ours")


@pytest.fixture(scope="module")
def theirs(case, tmp_path_factory):
    folder = case.folder
    if case.ours.model.config.expert_format == "mxfp4":
        folder = peer("compressed_tensors_peer").with_dense_experts(folder, tmp_path_factory.mktemp("dense"))
    return peer("transformers_peer").TransformersPeer(folder)


def test_packed_prefill_gives_the_logits_of_each_sequence(case, theirs, hold):
    hold(PEER, difference_at_once(case.ours, theirs, case.sequences))


def test_decoding_token_by_token_gives_the_logits_of_its_cache(case, theirs, hold):
    tokens = case.sequences[-1]
    hold(PEER, difference_in_pieces(case.ours, theirs, tokens, [1] * len(tokens)))


def test_decoding_in_pieces_that_straddle_chunks_gives_the_logits_of_its_cache(case, theirs, hold):
    hold(PEER, difference_in_pieces(case.ours, theirs, case.sequences[-1], [1, 15, 1, 2, 12, 33, 1, 64]))
