"""Checkpoints that openk3 saved in either form, computed by mlx-lm on the CPU and by openk3.

mlx-lm keeps packed MXFP4 experts in the K3 form; its Kimi-Linear takes them unpacked by compressed-tensors.
Its Kimi-Linear normalises the key-value latent with `rms_norm_eps`, where the released class, transformers
and its own K3 have 1e-6: it is given models with that eps.
"""

from __future__ import annotations

import pytest

from oracle.cases import peer, saved
from oracle.comparison import difference_at_once, difference_in_pieces
from oracle.random_models import SEEDS, k3, kimi_linear

pytestmark = pytest.mark.oracle

FORMS = {"kimi_k3": k3, "kimi_linear": lambda seed: with_its_latent_eps(kimi_linear(seed))}


def with_its_latent_eps(config):
    mla = config.mla.model_copy(update={"latent_norm_eps": config.rms_norm_eps})
    return config.model_copy(update={"mla": mla})


@pytest.fixture(
    scope="module", params=[(form, seed) for form in FORMS for seed in SEEDS], ids=lambda p: f"{p[0]}-{p[1]}"
)
def form_and_case(request, tmp_path_factory):
    form, seed = request.param
    return form, saved(FORMS[form](seed), seed, tmp_path_factory.mktemp("saved") / "ours")


@pytest.fixture(scope="module")
def case(form_and_case):
    return form_and_case[1]


@pytest.fixture(scope="module")
def theirs(form_and_case, tmp_path_factory):
    form, case = form_and_case
    folder = case.folder
    if form == "kimi_linear" and case.ours.model.config.expert_format == "mxfp4":
        folder = peer("compressed_tensors_peer").with_dense_experts(folder, tmp_path_factory.mktemp("dense"))
    return peer("mlx_peer").MlxPeer(folder)


@pytest.fixture
def within(form_and_case, hold):
    return lambda difference: hold(f"mlx-lm {form_and_case[0]}", difference)


def test_packed_prefill_gives_the_logits_of_each_sequence(case, theirs, within):
    within(difference_at_once(case.ours, theirs, case.sequences))


def test_decoding_token_by_token_gives_the_logits_of_its_cache(case, theirs, within):
    tokens = case.sequences[-1]
    within(difference_in_pieces(case.ours, theirs, tokens, [1] * len(tokens)))


def test_decoding_in_pieces_that_straddle_chunks_gives_the_logits_of_its_cache(case, theirs, within):
    within(difference_in_pieces(case.ours, theirs, case.sequences[-1], [1, 15, 1, 2, 12, 33, 1, 64]))
