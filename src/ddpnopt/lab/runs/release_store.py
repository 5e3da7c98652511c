"""Where the finished runs of the published tables are: files of a release, too large to be kept in the repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddpnopt.lab.data.cache import sha256

RELEASE = "https://github.com/ddpnopt/ddpnopt/releases/download/v0.1.0"
"""The address of the files."""


@dataclass(frozen=True)
class ReleasedStore:
    """A store of runs in the release."""

    asset: str
    sha256: str
    what: str

    @property
    def url(self) -> str:
        return f"{RELEASE}/{self.asset}"

    def hint(self, path: Path) -> str:
        """What to do when there is no store at `path`."""
        return (
            f"no store of finished runs at {path}; the runs of {self.what} can be downloaded from {self.url} "
            f"(SHA-256 {self.sha256}) and saved there"
        )

    def matches(self, path: Path) -> bool:
        """Whether `path` is the released file, unchanged."""
        return sha256(path) == self.sha256


REPRODUCE = ReleasedStore(
    "reproduce-runs.sqlite",
    "b07c9657f5943e0d4093fb461dea45ef328898aa057d90165cb02839f7425cd7",
    "the paper's tables and figures",
)
LR_WINDOW = ReleasedStore(
    "lr-window-runs.sqlite",
    "3e57d83d4e4b38bfcfbf5585093c560dfafa30a7ddf08ddfbe1854ed156b3527",
    "the learning-rate windows",
)
