"""Time of one training step of the GPT of bench_step under Python FSDP2: the same layers, data sizes and options.

Wants the environment of a launcher. Rank 0 prints {"median_ms": ..., "best_ms": ...} on one line.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB_SIZE = 256
NUM_HEADS = 4
NUM_WARMUP_STEPS = 3


class Block(nn.Module):
    """Pre-norm attention and feed-forward; projections without bias. [B, T, D] -> [B, T, D]"""

    def __init__(self, dim):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, NUM_HEADS, dim // NUM_HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Token and position embedding, blocks, norm, head. [B, T] -> [B, T, V]"""

    def __init__(self, dim, num_layers, seq_len):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB_SIZE, dim)
        self.position_embedding = nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB_SIZE, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def step_ms(model, optimizer, args):
    data = torch.randint(VOCAB_SIZE, (args.batch_size, args.seq_len + 1))
    inputs, targets = data[:, :-1], data[:, 1:]

    start = time.perf_counter()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.reshape(-1))
    loss.backward()
    # full_tensor(): C++ clip_grad_norm_ returns a number, so both read the norm.
    nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    optimizer.step()
    optimizer.zero_grad()
    return (time.perf_counter() - start) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="of each rank")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = GPT(args.dim, args.num_layers, args.seq_len)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # foreach: the faster of the two for DTensor parameters on the CPU.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    torch.manual_seed(1 + dist.get_rank())

    times = [step_ms(model, optimizer, args) for _ in range(NUM_WARMUP_STEPS + args.steps)][NUM_WARMUP_STEPS:]
    if dist.get_rank() == 0:
        times.sort()
        print(json.dumps({"median_ms": times[len(times) // 2], "best_ms": times[0]}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
