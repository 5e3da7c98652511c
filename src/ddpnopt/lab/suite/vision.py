"""Picture classifiers: plain, residual and depthwise convolutions, patches with attention, patches with mixing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import scattered_digits, textured_shapes
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.measures import accuracy, majority_accuracy
from ddpnopt.lab.suite.task import Batch, Setup, suite_task


def plain_cnn(channels: int, classes: int, width: int = 16) -> nn.Sequential:
    """Three convolutions, two poolings, one hidden layer; 14x14 or 16x16 pictures."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, 48),
        nn.ReLU(),
        nn.Linear(48, classes),
    )


def normalisation(kind: str, channels: int) -> nn.Module:
    """Batch norm, group norm or none."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(4, channels) if kind == "group" else nn.Identity()


class TwoConvolutions(nn.Module):
    """Two convolutions added to a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        bias = norm == "none"
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)
        self.norm1 = normalisation(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias)
        self.norm2 = normalisation(norm, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


def residual_cnn(channels: int, classes: int, norm: str, width: int = 12) -> nn.Sequential:
    """A stem and three residual blocks, the last two at half the resolution each."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        TwoConvolutions(width, width, 1, norm),
        TwoConvolutions(width, 2 * width, 2, norm),
        TwoConvolutions(2 * width, 2 * width, 2, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, classes),
    )


class InvertedBottleneck(nn.Module):
    """MobileNetV2's block: widen by a 1x1 convolution, filter each channel by itself, narrow again."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = 3 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x)
        return x + h if self.skip else h


class PatchMixer(nn.Module):
    """One block of an MLP-mixer: a network across the patches, then one across the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across_patches = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.across_channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.across_channels(self.norm2(x))


class MLPMixer(nn.Module):
    """Patches of 4x4, two blocks, mean over patches."""

    def __init__(self, channels: int, size: int, classes: int, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 4, 4)
        self.blocks = nn.Sequential(*[PatchMixer((size // 4) ** 2, width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class SmallViT(nn.Module):
    """Patches of 4x4 with a class token and learned positions, two of PyTorch's encoder layers."""

    def __init__(self, channels: int, size: int, classes: int, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (size // 4) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))


@suite_task("convolutional", "accuracy %", "higher", steps=400, batch_size=50)
def cnn_digits() -> Setup:
    """Digits somewhere on a noisy canvas of 14x14."""
    return classifier(plain_cnn(1, 10), scattered_digits())


@suite_task("convolutional", "accuracy %", "higher", steps=400, batch_size=50)
def cnn_shapes() -> Setup:
    """Striped shapes in colour and noise, 16x16."""
    return classifier(plain_cnn(3, 8), textured_shapes())


@suite_task("convolutional", "accuracy %", "higher", steps=400, batch_size=50)
def cnn_tanh() -> Setup:
    """LeNet's way: tanh, averaging pools, and the loss written as log-softmax and `nll_loss`."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.nll_loss(F.log_softmax(model(x), dim=1), y)

    model = nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(12, 24, 5),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24 * 9, 48),
        nn.Tanh(),
        nn.Linear(48, 10),
    )
    splits = scattered_digits()
    return Setup(model, splits, loss, accuracy, majority_accuracy(splits.test[1]))


@suite_task("residual", "accuracy %", "higher", steps=300, batch_size=50)
def resnet_batch_norm() -> Setup:
    """Residual blocks with batch norm."""
    return classifier(residual_cnn(3, 8, "batch"), textured_shapes())


@suite_task("residual", "accuracy %", "higher", steps=300, batch_size=50)
def resnet_group_norm() -> Setup:
    """Residual blocks with group norm."""
    return classifier(residual_cnn(3, 8, "group"), textured_shapes())


@suite_task("residual", "accuracy %", "higher", steps=400, batch_size=50)
def resnet_no_norm() -> Setup:
    """Residual blocks without normalisation."""
    return classifier(residual_cnn(1, 10, "none"), scattered_digits())


@suite_task("residual", "accuracy %", "higher", steps=300, batch_size=50)
def mobilenet() -> Setup:
    """Depthwise convolutions with batch norm."""
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU6(),
        InvertedBottleneck(12, 12, 1),
        InvertedBottleneck(12, 20, 2),
        InvertedBottleneck(20, 20, 1),
        InvertedBottleneck(20, 28, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(28, 10),
    )
    return classifier(model, scattered_digits())


@suite_task("patches", "accuracy %", "higher", steps=600, batch_size=50)
def vit() -> Setup:
    """A small vision transformer."""
    return classifier(SmallViT(1, 16, 10), scattered_digits(16, 0.1, 4))


@suite_task("patches", "accuracy %", "higher", steps=500, batch_size=50)
def mixer() -> Setup:
    """An MLP-mixer of two blocks."""
    return classifier(MLPMixer(3, 16, 8), textured_shapes())


TASKS = (
    cnn_digits,
    cnn_shapes,
    cnn_tanh,
    resnet_batch_norm,
    resnet_group_norm,
    resnet_no_norm,
    mobilenet,
    vit,
    mixer,
)
