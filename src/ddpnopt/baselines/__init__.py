"""The methods that DDPNOpt is compared with, each an optimizer for the ordinary training loop."""

from ddpnopt.baselines.emsa import EMSA
from ddpnopt.baselines.kronecker import EKFAC, KFAC
from ddpnopt.baselines.mmc import MMCLoss, mmc_centres, mmc_terminal
from ddpnopt.baselines.vanilla import VanillaDDP
from ddpnopt.baselines.vgr import SGDVGR

__all__ = ["EKFAC", "EMSA", "KFAC", "SGDVGR", "MMCLoss", "VanillaDDP", "mmc_centres", "mmc_terminal"]
