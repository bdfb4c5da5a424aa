"""Checkpoints in the released safetensors layout of Kimi K3 and Kimi-Linear, in and out.

`layout`       which tensors a configuration's checkpoint holds, and where each lives in our model
`config_json`  `config.json` to `ModelConfig` and back
`shard`        one safetensors file: its header, and reading a tensor without the rest
`folder`       a checkpoint folder as a checked inventory of its tensors
`checksums`    optional checksums of what was written, by tensor
`load`, `save` a model from such a folder, and into one
`convert`      from one expert format to the other, tensor by tensor

Import from these modules: the package itself imports nothing.
"""
