"""`fig-policy`: the feedback as images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from ddpnopt.errors import ModelError
from ddpnopt.lab.paper import fig_policy as policy
from ddpnopt.lab.paper.deconvolution import project_back
from ddpnopt.lab.paper.feedback_gains import feedback_gains
from ddpnopt.lab.paper.item import Context, write


def test_without_relu_and_pooling_the_way_back_is_the_transposed_network() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 4))
    image, direction = torch.randn(1, 1, 6, 6), torch.randn(32)
    with torch.enable_grad():
        leaf = image.clone().requires_grad_()
        hidden = model[:3](leaf)
        expected = torch.autograd.grad(hidden, leaf, direction[None])[0]
    torch.testing.assert_close(project_back(model, model[3], image, direction), expected)


def test_pooling_is_undone_at_the_place_of_the_largest() -> None:
    model = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(1, 1, 1))
    image = torch.tensor([[[[0.0, 3.0], [1.0, 2.0]]]])
    back = project_back(model, model[1], image, torch.tensor([5.0]))
    assert back.tolist() == [[[[0.0, 5.0], [0.0, 0.0]]]]


def test_a_module_without_a_way_back_is_named() -> None:
    model = nn.Sequential(nn.Sigmoid(), nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no way back through Sigmoid"):
        project_back(model, model[1], torch.zeros(1, 2), torch.zeros(2))


def test_the_leading_direction_is_that_of_the_whole_matrix() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4))
    target = torch.tensor([2])
    gains = feedback_gains(model, policy.METHOD, 0.1, torch.randn(1, 6), lambda z: F.cross_entropy(z, target))
    for gain in gains[1:]:
        values, direction = policy.leading_direction(gain)
        _, s, right = torch.linalg.svd(gain.dense(), full_matrices=False)
        torch.testing.assert_close(values[:2], s[:2], rtol=1e-3, atol=1e-7)
        assert abs(float(direction @ right[0])) == pytest.approx(1, abs=1e-3)


@pytest.fixture
def handwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """scikit-learn's digits, enlarged, in the place of MNIST."""
    monkeypatch.setenv("DDPNOPT_CACHE", str(tmp_path / "cache"))
    digits = load_digits()
    for split, part in (("train", slice(0, 400)), ("test", slice(400, 700))):
        rows = []
        for number, pixels in enumerate(digits.images[part]):
            buffer = io.BytesIO()
            Image.fromarray((pixels * 15.9).astype(np.uint8)).resize((28, 28)).save(buffer, "PNG")
            rows.append({"bytes": buffer.getvalue(), "path": f"{number}.png"})
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        path = tmp_path / "data" / "mnist" / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = {"image": pa.array(rows, kind), "label": pa.array(digits.target[part], pa.int64())}
        pq.write_table(pa.table(columns), path)
    return tmp_path / "data"


def test_a_quick_run_shows_every_layer_behind_the_first(
    handwritten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "QUICK", policy.PolicyEffort(256, 1, 20))
    context = Context(out=tmp_path / "out", quick=True, data_dir=handwritten)
    result = policy.ITEM.run(context)
    assert result.tables[0].frame["layer"].tolist() == ["conv 2", "conv 3", "conv 4", "fc 1", "fc 2"]
    folder = write(policy.ITEM, result, context)
    assert (folder / "policy.svg").stat().st_size > 10_000
