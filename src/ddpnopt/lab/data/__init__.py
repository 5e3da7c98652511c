"""The data sets of the experiments, held in tensors."""

from ddpnopt.lab.data.catalogue import DATASETS, DatasetStatus, canonical, load, status
from ddpnopt.lab.data.dataset import Dataset
from ddpnopt.lab.data.images import IMAGE_SETS, user_folder
from ddpnopt.lab.data.tabular import digits, gaussian_clusters, wine

__all__ = [
    "DATASETS",
    "IMAGE_SETS",
    "Dataset",
    "DatasetStatus",
    "canonical",
    "digits",
    "gaussian_clusters",
    "load",
    "status",
    "user_folder",
    "wine",
]
