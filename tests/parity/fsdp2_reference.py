"""Ten steps of Python FSDP2, or of DDP, for each case of a directory; writes the losses back.

    fsdp2_reference.py DIRECTORY WORLD_SIZE CASE...

The folder CASE holds one raw file of fp32 weights per parameter (0.bin, 1.bin, ...) in the order in which the C++ net
registers them, and `data.bin`: fp32 inputs (mlp, lora) or int64 tokens (gpt) of all steps, the joined batch of each. The
mean loss over ranks of each step goes to `losses.txt`. A case is named NET[_VARIANT].
"""

import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "python"))
from gpt import GPT  # noqa: E402

NUM_STEPS = 10
ROWS_PER_RANK = 2


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))

    def units(self):
        return [self.layers[0], self.layers[2], self.layers[4]]

    def forward(self, x):
        return self.layers(x).square().mean()


class Lora(nn.Module):
    """A frozen base with adapters of rank 2 that train."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(7, 13)
        self.down = nn.Linear(7, 2, bias=False)
        self.up = nn.Linear(2, 13, bias=False)
        self.base.requires_grad_(False)

    def units(self):
        return [self.base]

    def forward(self, x):
        return (self.base(x) + self.up(self.down(x)) - 1).square().mean()


class NextToken(nn.Module):
    """The GPT with its loss."""

    def __init__(self, tied):
        super().__init__()
        self.gpt = GPT(vocab_size=11, dim=12, num_layers=2, num_heads=3, seq_len=6, tied=tied)

    def units(self):
        return list(self.gpt.blocks)

    def forward(self, tokens):
        return F.cross_entropy(self.gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def load_weights(model, directory):
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            values = np.fromfile(os.path.join(directory, f"{i}.bin"), dtype=np.float32)
            parameter.copy_(torch.from_numpy(values).view_as(parameter))


def batches(directory, net, world_size):
    dtype, width = (np.int64, 7) if net == "gpt" else (np.float32, 7)
    values = torch.from_numpy(np.fromfile(os.path.join(directory, "data.bin"), dtype=dtype))
    return values.view(NUM_STEPS, world_size * ROWS_PER_RANK, width)


def make_net(net, variant):
    if net == "gpt":
        return NextToken(tied=variant == "tied")
    return Mlp() if net == "mlp" else Lora()


def wrap(model, variant, world_size):
    if variant.startswith("ddp"):
        return DistributedDataParallel(model)
    hsdp = {"mesh": init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))}
    flat = {"mesh": init_device_mesh("cpu", (world_size,))}
    options = hsdp if variant == "hsdp" else flat
    if variant == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in model.units():
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return model


def syncs_gradients(model, syncs):
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if syncs else model.no_sync()
    model.set_requires_gradient_sync(syncs)
    return contextlib.nullcontext()


def train(rank, directory, case, world_size):
    net, _, variant = case.partition("_")
    model = make_net(net, variant)
    load_weights(model, directory)
    model = wrap(model, variant, world_size)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    losses = []
    for batch in batches(directory, net, world_size):
        optimizer.zero_grad()
        rows = batch[rank * ROWS_PER_RANK : (rank + 1) * ROWS_PER_RANK]
        parts = rows.chunk(2) if variant.endswith("accumulate") else [rows]
        total = torch.zeros((), dtype=torch.float64)
        for i, part in enumerate(parts):
            with syncs_gradients(model, i + 1 == len(parts)):
                loss = model(part) / len(parts)
                loss.backward()
            total += loss.detach().double()
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    if rank == 0:
        with open(os.path.join(directory, "losses.txt"), "w") as file:
            file.writelines(f"{loss!r}\n" for loss in losses)


def run(rank, directory, world_size, cases):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for case in cases:
        train(rank, os.path.join(directory, case), case, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1], int(sys.argv[2]), sys.argv[3:]), nprocs=int(sys.argv[2]))
