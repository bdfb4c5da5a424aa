"""Generation from a checkpoint larger than memory, within one budget of bytes.

`budget`   what of the model is held, and what is read when it is used
`memory`   where tensors lie in a buffer that we own
`trunk`    the layers without their routed experts: pinned, or read ahead
`experts`  the routed experts: slots, least recently used first out, several reads at once
`ends`     embedding rows and the head
`dispatch` the seam of the model behind which experts come from disk
`usage`    what was read, found and spent
`model`    all of it as something that generates

Import from these modules: the package itself imports nothing. What is held never changes a result: every
product has the same operands, blocks and alignment at every budget.
"""
