"""Data-parallel training, one batch in several processes.

    torchrun --nproc-per-node 2 examples/distributed.py
    torchrun --nproc-per-node 2 examples/distributed.py --ddp --checkpoint run.pt

Each process reads its own part of every batch. The optimizer does the communication, and all processes get the weights
that one process with the whole batch would have. `--ddp` wraps the model in `DistributedDataParallel`. A run that was
killed resumes from its checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpnopt import DDPNOpt
from ddpnopt.checkpoint import save


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    """Points in the plane, labelled by the ring they lie in; identical in all processes."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(size, 2, generator=g)
    return x, x.norm(dim=1).mul(2).long().clamp_max(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=126, help="number of samples over all processes")
    parser.add_argument("--ddp", action="store_true", help="wrap the model in DistributedDataParallel")
    parser.add_argument("--checkpoint", type=Path, help="file to save every ten steps and to resume from")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
    first = 0
    state = None
    if options.checkpoint is not None and options.checkpoint.exists():
        state = torch.load(options.checkpoint, map_location=device, weights_only=True)
        net.load_state_dict(state["model"])
        first = state["step"]
    model = DistributedDataParallel(net) if options.ddp else net
    opt = DDPNOpt(model) if options.ddp else DDPNOpt(model, data_parallel=True)
    if state is not None:
        opt.load_state_dict(state["opt"])

    for step in range(first, options.steps):
        x, y = (t.tensor_split(size)[rank].to(device) for t in batch(step, options.batch))
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        if (step + 1) % 10 == 0 and rank == 0:
            print(f"step {step + 1:4d}   loss on this process's samples {loss.item():.4f}", flush=True)
            if options.checkpoint is not None:
                save(options.checkpoint, {"model": net.state_dict(), "opt": opt.state_dict(), "step": step + 1})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
