"""Ten steps of Python FSDP2 on the weights and data of a directory; writes the losses back.

    fsdp2_reference.py DIRECTORY WORLD_SIZE

Each of its folders `mlp` and `gpt` holds one raw file of fp32 weights per parameter (0.bin, 1.bin, ...) in the order in which the C++ net
registers them, and `data.bin`: fp32 inputs (mlp) or int64 tokens (gpt) of all steps, the joined batch of each. The mean
loss over ranks of each step goes to `losses.txt`.
"""

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.projection = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers=2, vocab=11, dim=12, heads=3, length=6):
        super().__init__()
        self.token = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def units(self):
        return list(self.blocks)

    def forward(self, tokens):
        inputs = tokens[:, :-1]
        h = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def load_weights(model, directory):
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            values = np.fromfile(os.path.join(directory, f"{i}.bin"), dtype=np.float32)
            parameter.copy_(torch.from_numpy(values).view_as(parameter))


def batches(directory, kind, world_size):
    dtype, width = (np.float32, 7) if kind == "mlp" else (np.int64, 7)
    values = torch.from_numpy(np.fromfile(os.path.join(directory, "data.bin"), dtype=dtype))
    return values.view(NUM_STEPS, world_size * ROWS_PER_RANK, width)


def train(rank, directory, kind, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    model = Mlp() if kind == "mlp" else Gpt()
    load_weights(model, directory)
    for unit in model.units():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for batch in batches(directory, kind, world_size):
        optimizer.zero_grad()
        loss = model(batch[rank * ROWS_PER_RANK : (rank + 1) * ROWS_PER_RANK])
        loss.backward()
        optimizer.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    if rank == 0:
        with open(os.path.join(directory, "losses.txt"), "w") as file:
            file.writelines(f"{loss!r}\n" for loss in losses)


def run(rank, directory, world_size):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for kind in ("mlp", "gpt"):
        train(rank, os.path.join(directory, kind), kind, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1], int(sys.argv[2])), nprocs=int(sys.argv[2]))
