"""The K3 text model, one module per idea of the report."""

from openk3.model.decoder import K3, Loss, Output
from openk3.model.init import check, initialise
from openk3.model.record import ForwardRecord
from openk3.model.state import DecodeState, KdaState, MlaState

__all__ = [
    "K3",
    "DecodeState",
    "ForwardRecord",
    "KdaState",
    "Loss",
    "MlaState",
    "Output",
    "check",
    "initialise",
]
