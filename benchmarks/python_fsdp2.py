"""Time of one training step of the GPT of bench_step under Python FSDP2: the same layers, data sizes and options.

Wants the environment of a launcher. Rank 0 prints {"median_ms": ..., "best_ms": ...} on one line.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools" / "python"))
from gpt import GPT  # noqa: E402

VOCAB_SIZE = 256
NUM_HEADS = 4
NUM_WARMUP_STEPS = 3


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
    model = GPT(VOCAB_SIZE, args.dim, args.num_layers, NUM_HEADS, args.seq_len, gelu="tanh")
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
