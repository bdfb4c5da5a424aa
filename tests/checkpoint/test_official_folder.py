"""Models in and out of the released layout: what comes back, and what is said when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.official_folders import (
    K3_FORM,
    LINEAR_FORM,
    header_of,
    random_model,
    saved,
    shards,
)
from model.tiny import VARIANTS
from openk3.checkpoint.official.convert import convert_official
from openk3.checkpoint.official.folder import INDEX, OfficialFolder, survey
from openk3.checkpoint.official.layout import official_tensors
from openk3.checkpoint.official.load import load_official
from openk3.checkpoint.official.save import save_official
from openk3.checkpoint.official.summary import summarise, verify
from openk3.config import PRESETS, VisionConfig
from openk3.errors import CheckpointError, InvalidInput, StorageError
from openk3.ops.mx import decode_mxfp4

FORMS = {
    "K3": K3_FORM,
    "Kimi-Linear": LINEAR_FORM,
    "nano": PRESETS["nano"],
    **{
        name: config
        for name, config in VARIANTS.items()
        if config.attn_res.kind != "full" and "GLU" not in name
    },
}


def _assert_same_files(a, b):
    names = sorted(file.name for file in a.iterdir())
    assert names == sorted(file.name for file in b.iterdir())
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.mark.parametrize("form", FORMS)
def test_a_model_comes_back_bit_for_bit(tmp_path, form):
    model = random_model(FORMS[form])
    save_official(model, tmp_path / "a")
    back = load_official(tmp_path / "a", dtype=torch.bfloat16)
    theirs = back.state_dict()
    assert theirs.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


def test_an_fp32_model_can_be_kept_whole(tmp_path):
    model = random_model(K3_FORM, torch.float32)
    save_official(model, tmp_path / "a", dtype="float32")
    back = load_official(tmp_path / "a").state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("form", ["K3", "Kimi-Linear"])
@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
def test_the_files_hold_the_layouts_tensors_as_the_formats_library_reads_them(tmp_path, form, experts):
    config = FORMS[form]
    save_official(random_model(config), tmp_path / "a", experts=experts)
    found = {name: tensor for shard in shards(tmp_path / "a") for name, tensor in load_file(shard).items()}
    wanted = {s.name: s for s in official_tensors(config.model_copy(update={"expert_format": experts}))}
    assert found.keys() == wanted.keys()
    assert all(tuple(found[name].shape) == spec.shape for name, spec in wanted.items())
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(spec.bytes for spec in wanted.values())
    of_layers = [
        {n.split("layers.")[1].split(".")[0] for n in load_file(s) if "layers." in n}
        for s in shards(tmp_path / "a")
    ]
    assert of_layers == [{str(layer)} for layer in range(config.num_layers)] + [set()]


def test_decay_rates_are_padded_with_zeros_and_checked_for_them(tmp_path):
    folder = saved(tmp_path / "a")
    name = "language_model.model.layers.0.self_attn.A_log"
    tensors = load_file(shards(folder)[0])
    assert tensors[name].shape == (128,)
    assert not tensors[name][2:].any()
    tensors[name][2] = 1.0
    save_file(tensors, shards(folder)[0])
    (folder / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match="A_log is not zero behind its 2 heads"):
        load_official(folder)


def test_mxfp4_experts_load_as_their_decoded_values(tmp_path):
    folder = saved(tmp_path / "q", experts="mxfp4")
    model = load_official(folder)
    stem = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight"
    with OfficialFolder.open(folder) as opened:
        assert opened.config.expert_format == "mxfp4"
        want = decode_mxfp4(opened.read(f"{stem}_packed"), opened.read(f"{stem}_scale"), torch.float32)
    assert torch.equal(model.layers[1].block_sparse_moe.experts.w2[3], want)


def test_the_format_of_experts_is_told_by_the_tensors_not_by_the_config(tmp_path):
    folder = saved(tmp_path / "q", experts="mxfp4")
    table = json.loads((folder / "config.json").read_text())
    del table["text_config"]["quantization_config"]
    (folder / "config.json").write_text(json.dumps(table))
    with OfficialFolder.open(folder) as opened:
        assert opened.config.expert_format == "mxfp4"
    load_official(folder)


def test_mxfp4_loaded_and_saved_is_the_same_bytes_also_with_scales_that_no_rule_gives(tmp_path):
    folder = saved(tmp_path / "q", experts="mxfp4")
    shard = shards(folder)[1]
    tensors = load_file(shard)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("_packed"):  # every code, minus zero too
            tensor.random_(0, 256, generator=generator)
        if name.endswith("_scale"):
            tensor.random_(0, 253, generator=generator)
    save_file(tensors, shard)
    (folder / "checksums.json").unlink()
    with OfficialFolder.open(folder) as like:
        for dtype in (torch.bfloat16, torch.float32):
            out = tmp_path / str(dtype)
            save_official(load_official(folder, dtype=dtype), out, like=like)
            again = {n: t for s in shards(out) for n, t in load_file(s).items()}
            for name, tensor in tensors.items():
                assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_conversion_there_and_back_is_the_same_folder(tmp_path):
    saved(tmp_path / "q", experts="mxfp4")
    with OfficialFolder.open(tmp_path / "q") as folder:
        convert_official(folder, tmp_path / "b", experts="bf16")
    with OfficialFolder.open(tmp_path / "b") as folder:
        assert folder.config.expert_format == "bf16"
        convert_official(folder, tmp_path / "q2", experts="mxfp4")
    _assert_same_files(tmp_path / "q", tmp_path / "q2")
    packed, plain = load_official(tmp_path / "q").state_dict(), load_official(tmp_path / "b").state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in packed.items())


def _with_vision(tmp_path):
    """A checkpoint with vision tensors, a foreign file and an unknown config field."""
    vision = VisionConfig(
        hidden_size=8, num_layers=2, num_heads=2, qkv_width=12, intermediate_size=16, position_grid=4
    )
    config = K3_FORM.model_copy(update={"vision": vision})
    text = saved(tmp_path / "text", K3_FORM.model_copy(update={"vision": None}))
    folder = tmp_path / "with-vision"
    from openk3.checkpoint.official.save import write_folder

    generator = torch.Generator().manual_seed(5)
    with OfficialFolder.open(text) as opened:
        write_folder(
            folder,
            config,
            lambda spec: (
                opened.read(spec.name)
                if spec.ours
                else torch.randn(spec.shape, generator=generator).to(torch.bfloat16)
            ),
        )
    (folder / "LICENSE").write_text("theirs")
    (folder / "tokenizer_config.json").write_text("{}")
    table = json.loads((folder / "config.json").read_text())
    table["image_placeholder"] = "<|image|>"
    (folder / "config.json").write_text(json.dumps(table))
    return folder


def test_vision_tensors_foreign_files_and_unknown_fields_pass_through(tmp_path):
    folder = _with_vision(tmp_path)
    before = {
        n: t for s in shards(folder) for n, t in load_file(s).items() if n.startswith(("vision", "mm_"))
    }
    assert len(before) == 3 + 3 + 2 * 6
    with OfficialFolder.open(folder) as like:
        save_official(load_official(folder), tmp_path / "again", like=like)
        convert_official(like, tmp_path / "packed", experts="mxfp4")
    for out in ("again", "packed"):
        after = {n: t for s in shards(tmp_path / out) for n, t in load_file(s).items()}
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        assert json.loads((tmp_path / out / "config.json").read_text())["image_placeholder"] == "<|image|>"
    assert (tmp_path / "packed" / "LICENSE").read_text() == "theirs"
    assert [s.name for s in shards(folder)][-2:] == [f"model-0000{n}-of-000006.safetensors" for n in (5, 6)]


def test_everything_that_is_wrong_comes_in_one_error(tmp_path):
    folder = saved(tmp_path / "a")
    (folder / "checksums.json").unlink()
    first = shards(folder)[0]
    tensors = load_file(first)
    prefix = "language_model.model.layers.0."
    tensors[f"{prefix}self_attn.q_proj.weight"] = torch.zeros(3, 5, dtype=torch.bfloat16)
    tensors[f"{prefix}input_layernorm.weight"] = torch.zeros(32, dtype=torch.float16)
    del tensors[f"{prefix}self_attn.A_log"]
    tensors["surprise"] = torch.zeros(1)
    save_file(tensors, first)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][f"{prefix}self_attn.A_log"], index["metadata"]["total_size"]
    index["weight_map"]["surprise"] = first.name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        OfficialFolder.open(folder)
    text = str(error.value)
    assert f"{prefix}self_attn.q_proj.weight is [3, 5], the configuration says" in text
    assert f"{prefix}input_layernorm.weight is F16, the layout says BF16" in text
    assert f"{prefix}self_attn.A_log is missing" in text
    assert "surprise is unexpected" in text


def test_a_missing_a_truncated_and_an_alien_shard_are_each_named(tmp_path):
    folder = saved(tmp_path / "a")
    one, two, three, four = shards(folder)
    one.unlink()
    two.write_bytes(two.read_bytes()[:-5])
    three.write_bytes(b"no safetensors file at all")
    with pytest.raises(CheckpointError) as error:
        load_official(folder)
    for shard in (one, two, three):
        assert shard.name in str(error.value)
    assert four.name not in str(error.value)


def test_a_flipped_bit_is_named_by_tensor_and_shard_when_it_is_read(tmp_path):
    folder = saved(tmp_path / "a")
    shard = shards(folder)[1]
    raw = bytearray(shard.read_bytes())
    raw[-3] ^= 4
    shard.write_bytes(raw)
    last = max(header_of(shard)[0].items(), key=lambda item: item[1].get("data_offsets", [0, 0])[1])[0]
    with pytest.raises(CheckpointError, match=rf"{shard.name}.*{last}.*checksum"):
        load_official(folder)
    assert not survey(folder).problems  # headers are whole
    with OfficialFolder.open(folder) as opened, pytest.raises(CheckpointError, match=last):
        verify(opened)


@pytest.mark.parametrize(
    "index", ["[]", "{", '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 3}}']
)
def test_a_bad_index_is_named(tmp_path, index):
    folder = saved(tmp_path / "a")
    (folder / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match="index"):
        OfficialFolder.open(folder)


def test_a_changed_index_is_noticed(tmp_path):
    folder = saved(tmp_path / "a")
    (folder / INDEX).write_text((folder / INDEX).read_text() + " ")
    with pytest.raises(CheckpointError, match=r"index\.json.*checksum"):
        OfficialFolder.open(folder)


def test_a_single_file_without_an_index_is_a_checkpoint_too(tmp_path):
    folder = saved(tmp_path / "a")
    together = {name: tensor for shard in shards(folder) for name, tensor in load_file(shard).items()}
    for file in (*shards(folder), folder / INDEX, folder / "checksums.json"):
        file.unlink()
    save_file(together, folder / "model.safetensors")
    assert load_official(folder).config == K3_FORM


def test_values_that_are_not_finite_are_not_saved_and_nothing_is_left(tmp_path):
    for name in ("norm.weight", "layers.1.block_sparse_moe.experts.w1"):
        for experts in ("bf16", "mxfp4"):
            model = random_model(K3_FORM)
            with torch.no_grad():
                dict(model.named_parameters())[name].view(-1)[7] = float("nan")
            with pytest.raises(InvalidInput, match=r"norm|w1"):
                save_official(model, tmp_path / "a", experts=experts)
            assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_touched(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageError, match="exists"):
        saved(tmp_path / "a")


def test_experts_that_are_no_whole_groups_cannot_be_packed(tmp_path):
    config = K3_FORM.model_copy(update={"moe": K3_FORM.moe.model_copy(update={"expert_width": 24})})
    with pytest.raises(InvalidInput, match="expert_width"):
        saved(tmp_path / "a", config, experts="mxfp4")


def test_scales_that_bf16_cannot_hold_are_refused(tmp_path):
    folder = saved(tmp_path / "q", experts="mxfp4")
    shard = shards(folder)[1]
    tensors = load_file(shard)
    name = next(n for n in tensors if n.endswith("experts.2.w1.weight_scale"))
    tensors[name][3, 0] = 255
    save_file(tensors, shard)
    (folder / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match=r"experts\.2\.w1"):
        load_official(folder)


def test_a_summary_counts_what_is_there(tmp_path):
    model = random_model(K3_FORM)
    save_official(model, tmp_path / "q", experts="mxfp4")
    summary = summarise(survey(tmp_path / "q"))
    held = sum(tensor.numel() for tensor in model.state_dict().values())
    padding = sum(128 - 2 for layer in range(K3_FORM.num_layers) if not K3_FORM.is_mla(layer))
    assert summary.parameters == held + padding
    assert summary.bytes == sum(
        s.bytes for s in official_tensors(K3_FORM.model_copy(update={"expert_format": "mxfp4"}))
    )
    assert (summary.form, summary.expert_format, summary.checked) == ("kimi_k3", "mxfp4", True)


PEAK = """
import sys, torch
from openk3.checkpoint.official.folder import OfficialFolder
from openk3.checkpoint.official.load import fill
from openk3.checkpoint.official.convert import convert_official
from openk3.model import K3
torch.set_num_threads(1)

def status(field):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(field))

def peak(action):
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
    action()
    return status("VmHWM") - before

with OfficialFolder.open(sys.argv[1]) as folder:
    model = K3(folder.config, dtype=torch.bfloat16)  # allocated and touched: NaN
    print(peak(lambda: fill(model, folder)))
    print(peak(lambda: convert_official(folder, sys.argv[2], experts=sys.argv[3])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
@pytest.mark.parametrize(("experts", "to"), [("bf16", "mxfp4"), ("mxfp4", "bf16")])
def test_loading_and_converting_hold_less_than_a_layer_beside_the_model(tmp_path, experts, to):
    config = K3_FORM.model_copy(
        update={
            "hidden_size": 512,
            "num_layers": 8,
            "moe": K3_FORM.moe.model_copy(
                update={"num_experts": 64, "expert_width": 256, "latent_width": 256}
            ),
        }
    )
    model = random_model(config)
    save_official(model, tmp_path / "a", experts=experts)
    layers = [shard.stat().st_size for shard in shards(tmp_path / "a")]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "a"), str(tmp_path / "b"), to],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    loading, converting = (int(line) for line in done.stdout.split())
    slack = 4 * 2**20  # the interpreter's own
    assert sum(layers) > 4 * (max(layers) + slack)
    assert loading < max(layers) + slack
    assert converting < max(layers) + slack


def _as_float16(folder):
    """`folder` as a tool would write it that keeps weights in F16."""
    for shard in shards(folder):
        save_file({n: t if t.dtype == torch.uint8 else t.half() for n, t in load_file(shard).items()}, shard)
    table = json.loads((folder / "config.json").read_text())
    table["dtype"] = table["text_config"]["dtype"] = "float16"
    (folder / "config.json").write_text(json.dumps(table))
    (folder / "checksums.json").unlink()
    index = json.loads((folder / INDEX).read_text())
    del index["metadata"]
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
def test_f16_weights_are_read_exactly_and_converted_to_f32(tmp_path, experts):
    folder = _as_float16(saved(tmp_path / "a", experts=experts))
    stored = {n: t for shard in shards(folder) for n, t in load_file(shard).items()}
    model = load_official(folder)
    assert torch.equal(model.lm_head.weight, stored["language_model.lm_head.weight"].float())
    with OfficialFolder.open(folder) as opened:
        convert_official(opened, tmp_path / "b", experts="bf16")
        save_official(model, tmp_path / "c", dtype="float32", like=opened)
    for path in (tmp_path / "b", tmp_path / "c"):
        again = load_official(path).state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    assert json.loads((tmp_path / "b" / "config.json").read_text())["text_config"]["dtype"] == "float32"


def test_vision_tensors_pass_into_a_checkpoint_of_another_type(tmp_path):
    folder = _with_vision(tmp_path)
    with OfficialFolder.open(folder) as like:
        save_official(load_official(folder), tmp_path / "wide", dtype="float32", like=like)
        with OfficialFolder.open(tmp_path / "wide") as wide:
            name = "mm_projector.post_norm.weight"
            assert torch.equal(wide.read(name), like.read(name).float())
