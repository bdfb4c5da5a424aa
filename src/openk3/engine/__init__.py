"""Many requests on one model: continuous batching over pages, with prefixes that are reused.

`core`           the step                       `runner`        what it asks of a model
`pool`           pages                          `memory`        what lies in them
`prefix_cache`   which prefixes can be reused   `model_runner`  a model over pages
`hashing`        prefixes as hashes             `sampler`       the next token
`naive`          the definition                 `llm`           prompts in, answers out
"""
