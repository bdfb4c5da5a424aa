"""Ablations: sets of training runs that ask what a part is worth, several seeds each.

`config`    what a set is, read from TOML
`plan`      from a set to its runs, and which stand for what; pure
`runner`    the runs, each in a process and a folder of its own
`results`   numbers from the runs' metrics
`summary`   means, standard errors, paired differences to a baseline
`table`     Markdown and CSV
`plot`      pictures of groups and of a whole set; `curves` of recall probes
`estimate`  how long a set will take
`study`     all of it, in order
"""
