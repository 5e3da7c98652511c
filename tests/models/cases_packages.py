"""Models of `diffusers` and PyTorch Geometric."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from data import images, split
from torch import Tensor, nn
from trial import Trial, case

GRAPHS = "PyTorch Geometric"
DIFFUSION = "diffusers"


@case(
    "UNet, predicting noise",
    DIFFUSION,
    needs=("diffusers",),
    steps=30,
)
def unet() -> Trial:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=8,
    )  # fmt: skip
    schedule = DDPMScheduler(num_train_timesteps=50)
    x, _ = images(32, channels=1, size=8)
    noise, t = torch.randn_like(x), torch.randint(50, (32,))

    def loss(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(model(schedule.add_noise(x, noise, t), t).sample, noise)

    return Trial(model, loss, split(16, x, noise, t))


@case("AutoencoderKL", DIFFUSION, needs=("diffusers",), steps=30)
def autoencoder_kl() -> Trial:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        in_channels=1, out_channels=1, block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=2, norm_num_groups=4, sample_size=8,
    )  # fmt: skip
    x, _ = images(32, channels=1, size=8)
    return Trial(model, lambda x: F.mse_loss(model(x).sample, x), split(16, x))


def graph(nodes: int = 60, classes: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nodes of a class are linked with each other more often: x, edges, labels, and which nodes are trained on."""
    y = torch.arange(nodes) % classes
    alike = y[:, None] == y[None]
    linked = torch.rand(nodes, nodes) < torch.where(alike, 0.15, 0.02)
    edges = (linked | linked.T).nonzero().T.contiguous()
    return torch.randn(classes, 8)[y] + 1.5 * torch.randn(nodes, 8), edges, y, torch.rand(nodes) < 0.5


class Net(nn.Module):
    """Two layers on a whole graph."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        heads = options.get("heads", 1)
        self.first, self.second = kind(8, 16, **options), kind(16 * heads, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edges).relu(), edges)
        return out


def on_graph(model: nn.Module) -> Trial:
    x, edges, y, train = graph()
    return Trial(model, lambda: F.cross_entropy(model(x, edges)[train], y[train]), [()])


@case(
    "GCN, whole graph with train_mask",
    GRAPHS,
    needs=("torch_geometric",),
)
def gcn() -> Trial:
    from torch_geometric.nn import GCNConv

    return on_graph(Net(GCNConv))


@case(
    "GAT, whole graph with train_mask",
    GRAPHS,
    needs=("torch_geometric",),
)
def gat() -> Trial:
    from torch_geometric.nn import GATConv

    return on_graph(Net(GATConv, heads=2))


@case(
    "GraphSAGE, whole graph with train_mask",
    GRAPHS,
    needs=("torch_geometric",),
)
def sage() -> Trial:
    from torch_geometric.nn import SAGEConv

    return on_graph(Net(SAGEConv))


class GraphClassifier(nn.Module):
    """GIN on batches of small graphs: layers on nodes, then layers on graphs."""

    def __init__(self) -> None:
        from torch_geometric.nn import GINConv

        super().__init__()
        self.first = GINConv(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))
        self.second = GINConv(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import global_add_pool

        h = self.second(self.first(x, edges).relu(), edges).relu()
        out: Tensor = self.head(global_add_pool(h, batch))
        return out


def batches_of_graphs() -> list[tuple[Any, ...]]:
    """Three batches of twelve rings of 4 to 8 nodes; the class shifts the features of all nodes."""
    from torch_geometric.data import Batch, Data

    patterns = torch.randn(3, 8)
    batches: list[tuple[Any, ...]] = []
    for _ in range(3):
        graphs = []
        for k in range(12):
            n = 4 + k % 5
            edges = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
            graphs.append(Data(x=patterns[k % 3] * 0.3 + torch.randn(n, 8), edge_index=edges, y=torch.tensor([k % 3])))
        batches.append((Batch.from_data_list(graphs),))
    return batches


@case("GIN, batches of small graphs", GRAPHS, needs=("torch_geometric",))
def gin() -> Trial:
    model = GraphClassifier()
    return Trial(
        model, lambda data: F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y), batches_of_graphs()
    )


class PooledNet(nn.Module):
    """Two layers on nodes, the mean over those of each graph, and a layer on graphs; reads a batch as one object."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.first = kind(8, 16, **options)
        self.second = kind(16 * options.get("heads", 1), 16)
        self.head = nn.Linear(16, 3)

    def forward(self, data: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        h = self.second(self.first(data.x, data.edge_index).relu(), data.edge_index).relu()
        out: Tensor = self.head(global_mean_pool(h, data.batch))
        return out


def on_batches(model: nn.Module) -> Trial:
    return Trial(model, lambda data: F.cross_entropy(model(data), data.y), batches_of_graphs())


@case("GCN, batches of small graphs", GRAPHS, needs=("torch_geometric",))
def gcn_batches() -> Trial:
    from torch_geometric.nn import GCNConv

    return on_batches(PooledNet(GCNConv))


@case("GATv2, batches of small graphs", GRAPHS, needs=("torch_geometric",))
def gatv2_batches() -> Trial:
    from torch_geometric.nn import GATv2Conv

    return on_batches(PooledNet(GATv2Conv, heads=2))
