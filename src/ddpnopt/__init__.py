"""ddpnopt: differential dynamic programming as a PyTorch optimizer."""

from ddpnopt.curvature.base import Curvature
from ddpnopt.curvature.diagonal import Adam, Identity, RMSprop
from ddpnopt.curvature.kronecker import EKFAC, KFAC
from ddpnopt.errors import (
    CheckpointError,
    DDPNOptError,
    ModelError,
    NonFiniteError,
    OpenLoopWarning,
    OptionError,
    PeerError,
    StepError,
    TrainingWarning,
    UncertainLossWarning,
)
from ddpnopt.optimizer import DDPNOpt
from ddpnopt.report import Report
from ddpnopt.trace.model_layers import register_layer

__version__ = "0.1.0"

__all__ = [
    "EKFAC",
    "KFAC",
    "Adam",
    "CheckpointError",
    "Curvature",
    "DDPNOpt",
    "DDPNOptError",
    "Identity",
    "ModelError",
    "NonFiniteError",
    "OpenLoopWarning",
    "OptionError",
    "PeerError",
    "RMSprop",
    "Report",
    "StepError",
    "TrainingWarning",
    "UncertainLossWarning",
    "register_layer",
]
