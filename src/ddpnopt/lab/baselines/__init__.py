"""The methods that DDPNOpt is compared with, each an optimizer for the ordinary training loop."""

from ddpnopt.lab.baselines.emsa import EMSA
from ddpnopt.lab.baselines.kronecker import EKFACOptimizer, KFACOptimizer
from ddpnopt.lab.baselines.mmc import MMCLoss, mmc_centres, mmc_terminal
from ddpnopt.lab.baselines.vanilla import VanillaDDP
from ddpnopt.lab.baselines.vgr import SGDVGR

__all__ = ["EMSA", "SGDVGR", "EKFACOptimizer", "KFACOptimizer", "MMCLoss", "VanillaDDP", "mmc_centres", "mmc_terminal"]
