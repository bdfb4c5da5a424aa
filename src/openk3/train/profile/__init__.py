"""Where a training step's time goes, by part of the model, and the least that each part could take.

`parts`        names, and which work is whose     `scopes`       names of modules while a profile runs
`trace`        a profiler's events, tied together `attribution`  pieces of work with their parts
`timeline`     a device's time, divided           `floors`       bytes and operations from shapes
`peaks`        what a device does at best         `measure`      steps under a profiler
`made`         text for it                        `result`       the numbers, as JSON
`plot`         bars (imports matplotlib)
"""

from __future__ import annotations

from openk3.train.profile.made import MadeDocuments
from openk3.train.profile.measure import predict, profile
from openk3.train.profile.result import Item, Measured, Profile, load, save

__all__ = ["Item", "MadeDocuments", "Measured", "Profile", "load", "predict", "profile", "save"]
