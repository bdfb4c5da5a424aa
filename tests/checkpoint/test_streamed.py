"""Streamed generation: the numbers of the loaded model, the same bits at every budget, bounded memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch

from checkpoint.official_folders import K3_FORM, LINEAR_FORM, random_model, saved, shards
from checkpoint.streaming_child import spend
from checkpoint.synthetic import SMALL, shaped_like_k3, write_synthetic
from model.tiny import packed
from openk3.checkpoint.official import checksums
from openk3.checkpoint.official.folder import OfficialFolder
from openk3.checkpoint.official.load import load_official
from openk3.checkpoint.official.save import save_official
from openk3.checkpoint.streamed.model import StreamedK3
from openk3.errors import CheckpointError, InvalidInput
from openk3.model.generate import Sampling, generate

GREEDY = Sampling(temperature=0)
FORMS = {
    "K3": K3_FORM.model_copy(update={"num_layers": 5}),
    "Kimi-Linear": LINEAR_FORM,
    "tied": K3_FORM.model_copy(update={"tie_embeddings": True}),
    "dense": K3_FORM.model_copy(update={"dense_layers": 3, "moe": None}),
    "MTP": K3_FORM.model_copy(update={"mtp_layers": 1}),
}


def least_budget(folder) -> int:
    with pytest.raises(InvalidInput, match="are too few") as error:
        StreamedK3(folder, 1)
    return int(re.search(r"at least ([\d,]+)", str(error.value))[1].replace(",", ""))


def plenty(folder) -> int:
    """Enough to hold everything, and what fp32 is widened in."""
    return 10 * sum(stored.bytes for stored in folder.tensors.values())


def watched(folder, monkeypatch) -> list[str]:
    """The names of the tensors that are read from now on."""
    read, read_into = [], folder.reader.read_into
    monkeypatch.setattr(
        folder.reader, "read_into", lambda name, out: (read.append(name), read_into(name, out))
    )
    return read


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_and_greedy_tokens_are_those_of_the_checkpoint_loaded_whole(tmp_path, form, experts):
    path = saved(tmp_path / "c", FORMS[form], experts=experts)
    whole = load_official(path)
    tokens, cu_seqlens = packed([7, 1, 20], 300)
    written = list(generate(whole, [5, 250, 17], 8, sampling=GREEDY))
    with torch.no_grad():
        expected = whole.logits(whole(tokens, cu_seqlens).hidden)
    with OfficialFolder.open(path) as folder:
        for budget in (least_budget(folder), plenty(folder)):
            with StreamedK3(folder, budget) as model:
                logits = model.logits(model(tokens, cu_seqlens).hidden)
                assert logits.dtype == torch.float32
                torch.testing.assert_close(
                    logits, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
                )
                assert list(generate(model, [5, 250, 17], 8, sampling=GREEDY)) == written


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
def test_every_budget_gives_the_same_bits(tmp_path, experts):
    config = K3_FORM.model_copy(update={"num_layers": 6})
    tokens, cu_seqlens = packed([9, 4], 300)
    further = torch.tensor([3, 299])
    one_each = torch.tensor([0, 1, 2], dtype=torch.int32)
    found, divisions = [], set()
    with OfficialFolder.open(saved(tmp_path / "c", config, experts=experts)) as folder:
        least = least_budget(folder)
        for budget in range(least, least + 200_000, 20_000):
            with StreamedK3(folder, budget) as model:
                divisions.add((len(model.division.streamed), model.division.slots))
                assert model.division.held <= budget
                out = model(tokens, cu_seqlens)
                step = model(further, one_each, state=out.state)
                found.append((model.logits(out.hidden), model.logits(step.hidden)))
    assert len(divisions) > 3
    for prompt, step in found:
        assert torch.equal(prompt, found[0][0])
        assert torch.equal(step, found[0][1])


def test_token_by_token_gives_the_numbers_of_the_whole_text(tmp_path):
    tokens, cu_seqlens = packed([12], 300)
    with (
        OfficialFolder.open(saved(tmp_path / "c", experts="mxfp4")) as folder,
        StreamedK3(folder, least_budget(folder)) as model,
    ):
        at_once = model.logits(model(tokens, cu_seqlens).hidden)
        state, steps = None, []
        for token in tokens.split(1):
            out = model(token, torch.tensor([0, 1], dtype=torch.int32), state=state)
            state = out.state
            steps.append(model.logits(out.hidden))
        scale = float(at_once.abs().max())
        torch.testing.assert_close(torch.cat(steps), at_once, rtol=1e-4, atol=1e-5 * scale)
        assert (model.usage.prompt.tokens, model.usage.decode.tokens) == (13, 11)


def test_weights_kept_in_fp32_are_streamed_whole(tmp_path):
    model = random_model(K3_FORM, torch.float32)
    path = save_official(model, tmp_path / "c", experts="bf16", dtype="float32")
    tokens, cu_seqlens = packed([6], 300)
    with torch.no_grad():
        expected = model.eval().logits(model(tokens, cu_seqlens).hidden)
    with OfficialFolder.open(path) as folder, StreamedK3(folder, least_budget(folder)) as streamed:
        logits = streamed.logits(streamed(tokens, cu_seqlens).hidden)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_a_long_prompt_loads_each_chosen_expert_once_a_layer_even_with_two_slots(tmp_path, monkeypatch):
    tokens, cu_seqlens = packed([200], 300)
    with OfficialFolder.open(saved(tmp_path / "c", experts="mxfp4")) as folder:
        read = watched(folder, monkeypatch)
        with StreamedK3(folder, least_budget(folder)) as model:
            assert model.division.slots == 2
            model(tokens, cu_seqlens)
            packed_halves = [name for name in read if ".experts." in name and name.endswith("packed")]
    assert len(packed_halves) == 2 * 4 * 3  # every expert of both layers, three matrices each
    assert len(set(packed_halves)) == len(packed_halves)


def test_what_does_not_change_is_read_once_and_hits_are_counted(tmp_path):
    with (
        OfficialFolder.open(saved(tmp_path / "c", experts="mxfp4")) as folder,
        StreamedK3(folder, plenty(folder)) as model,
    ):
        assert (model.division.streamed, model.division.head_pinned) == ((), True)
        list(generate(model, list(range(200)), 5, sampling=GREEDY))
        usage = model.usage
        assert usage.prompt.misses == 2 * 4
        assert (usage.decode.hits, usage.decode.misses) == (4 * 2 * 2, 0)  # tokens, layers, experts a token
        assert usage.decode.bytes == 4 * 2 * folder.config.hidden_size  # rows of the embedding
        text = sum(s.bytes for s in folder.tensors.values())
        rows = usage.prompt.bytes - sum(s.bytes for n, s in folder.tensors.items() if ".experts." in n)
        embedding = folder.tensors["language_model.model.embed_tokens.weight"].bytes
        ends_held = 3 * 2 * folder.config.hidden_size  # the last norms, which nobody counts
        assert rows == 200 * 2 * folder.config.hidden_size
        assert usage.start.bytes + usage.prompt.bytes - rows + ends_held == text - embedding


# --------------------------------------------------------------------------------------------------- damage


def test_a_budget_too_small_says_what_would_do_and_for_what(tmp_path):
    with OfficialFolder.open(saved(tmp_path / "c")) as folder:
        with pytest.raises(InvalidInput, match=r"1,000 bytes are too few.*to work in.*layers.*head.*experts"):
            StreamedK3(folder, 1000)
        least = least_budget(folder)
        with pytest.raises(InvalidInput, match=f"at least {least:,}"):
            StreamedK3(folder, least - 1)


@pytest.mark.parametrize("place", ["layers.1.self_attn.o_proj", "layers.2.block_sparse_moe.experts."])
def test_damage_met_on_the_way_is_named_and_a_mended_file_goes_on(tmp_path, monkeypatch, place):
    path = saved(tmp_path / "c", FORMS["K3"], experts="mxfp4")
    tokens, cu_seqlens = packed([50], 300)
    with OfficialFolder.open(path) as folder, StreamedK3(folder, least_budget(folder)) as model:
        assert model.division.streamed
        read = watched(folder, monkeypatch)
        expected = model(tokens, cu_seqlens).hidden
        name = next(n for n in read if place in n)
        stored = folder.tensors[name]
        whole = stored.file.read_bytes()
        broken = bytearray(whole)
        broken[stored.offset + 3] ^= 16
        for _ in range(3):
            stored.file.write_bytes(broken)
            with pytest.raises(CheckpointError, match=f"{re.escape(stored.file.name)}.*{re.escape(name)}"):
                twice(model, tokens, cu_seqlens)  # a layer read ahead before the damage serves once more
            stored.file.write_bytes(whole)
            with contextlib.suppress(CheckpointError):  # and one read ahead from the broken file fails once
                model(tokens, cu_seqlens)
            assert torch.equal(model(tokens, cu_seqlens).hidden, expected)


def twice(model, *inputs) -> None:
    for _ in range(2):
        model(*inputs)


def test_a_shard_that_shrinks_meanwhile_is_named(tmp_path):
    path = saved(tmp_path / "c", FORMS["K3"], experts="mxfp4")
    (path / checksums.FILE_NAME).unlink()
    tokens, cu_seqlens = packed([50], 300)
    with OfficialFolder.open(path) as folder, StreamedK3(folder, least_budget(folder)) as model:
        shard = shards(path)[3]
        shard.write_bytes(shard.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match=f"{shard.name}: truncated inside"):
            model(tokens, cu_seqlens)


def test_scales_that_are_none_are_named_with_their_expert(tmp_path):
    path = saved(tmp_path / "c", experts="mxfp4")
    (path / checksums.FILE_NAME).unlink()
    tokens, cu_seqlens = packed([100], 300)
    with OfficialFolder.open(path) as folder, StreamedK3(folder, plenty(folder)) as model:
        stored = folder.tensors["language_model.model.layers.1.block_sparse_moe.experts.3.w3.weight_scale"]
        with stored.file.open("r+b") as file:
            file.seek(stored.offset)
            file.write(b"\xff")
        with pytest.raises(CheckpointError, match=r"layers\.1\..*experts\.3\.w3: .*is 255; want at most 252"):
            model(tokens, cu_seqlens)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    tokens, cu_seqlens = torch.tensor([1, 300]), torch.tensor([0, 2], dtype=torch.int32)
    with (
        OfficialFolder.open(saved(tmp_path / "c")) as folder,
        StreamedK3(folder, plenty(folder)) as model,
        pytest.raises(InvalidInput, match="token 300 at position 1 is outside the vocabulary of 300"),
    ):
        model(tokens, cu_seqlens)


# --------------------------------------------------------------------------------------------------- memory


def test_nothing_is_mapped(tmp_path):
    with OfficialFolder.open(saved(tmp_path / "c")) as folder, StreamedK3(folder, plenty(folder)) as model:
        list(generate(model, [1, 2], 2))
        assert ".safetensors" not in Path("/proc/self/maps").read_text()


def check_memory(folder: Path, **options) -> None:
    """Same tokens at four budgets, each kept within 100 MB of what it was; ever more found in memory."""
    total = sum(shard.stat().st_size for shard in shards(folder))
    found = [(share, spend(folder, int(share * total), **options)) for share in (0.1, 0.25, 0.5, 1.0)]
    for share, result in found:
        assert result["tokens"] == found[0][1]["tokens"]
        assert len(set(result["tokens"])) > 5
        assert result["held"] <= share * total
        assert result["memory"] <= share * total + 100e6
    rates = [result["hit_rate"] for _, result in found]
    assert rates == sorted(rates)
    assert rates[-1] > rates[0]


def test_memory_stays_within_the_budget_and_tokens_do_not_depend_on_it(tmp_path):
    check_memory(write_synthetic(tmp_path / "c", SMALL))


@pytest.mark.slow
def test_memory_stays_within_the_budget_for_a_checkpoint_of_a_gigabyte(tmp_path):
    config = shaped_like_k3(hidden=512, layers=8, experts=256, chosen=8, width=768, latent=512, vocab=4096)
    folder = write_synthetic(tmp_path / "c", config)
    assert sum(shard.stat().st_size for shard in shards(folder)) > 1e9
    check_memory(folder, prompt=60, tokens=200)
