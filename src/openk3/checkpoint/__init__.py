"""What is kept on disk: the state of a training run, and the small atomic writes that everything else uses.

`train_state`  `CheckpointStore`: save, load and keep the full state of a run
`background`   saves while training goes on
`official`     the released safetensors layout, in and out
`streamed`     generation from such a checkpoint when it is larger than memory
`rng`          the state of the random number generators, as part of that state
`jsonl`        append-only logs that a resumed run continues without gaps or doubles
`atomic`       files and folders that appear whole or not at all; needs no torch

Import from these modules: the package itself imports nothing, so that a caller of `atomic` stays light.
"""
