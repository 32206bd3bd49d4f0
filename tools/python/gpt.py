"""The GPT that Python programs of this repository train beside the C++ one: same layers, same order of parameters."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Pre-norm attention and feed-forward; projections without bias. [B, T, D] -> [B, T, D]"""

    def __init__(self, dim, num_heads, gelu):
        super().__init__()
        self.num_heads = num_heads
        self.gelu = gelu
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x)), approximate=self.gelu))


class GPT(nn.Module):
    """Token and position embedding, blocks, norm, head. [B, T] -> [B, T, V]

    `gelu`: "none" (exact) or "tanh".
    """

    def __init__(self, vocab_size, dim, num_layers, num_heads, seq_len, gelu="none", tied=False):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList([Block(dim, num_heads, gelu) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens):
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
