"""The data sets of the experiments, whole in tensors."""

from ddpnopt.experiments.data.catalogue import DATASETS, Status, canonical, load, status
from ddpnopt.experiments.data.dataset import Dataset
from ddpnopt.experiments.data.images import IMAGE_SETS, user_folder
from ddpnopt.experiments.data.tabular import digits, gaussian_clusters, wine

__all__ = [
    "DATASETS",
    "IMAGE_SETS",
    "Dataset",
    "Status",
    "canonical",
    "digits",
    "gaussian_clusters",
    "load",
    "status",
    "user_folder",
    "wine",
]
