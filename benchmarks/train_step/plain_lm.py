"""The peer of the training-step benchmark: the same language model as a plain PyTorch module.

4 layers, 4 heads, 128 wide, feed-forward 512 with GELU, pre-LayerNorm, no biases, tied
embeddings; attention by scaled_dot_product_attention ("softmax") or by a plain causal
cosFormer that forms the quadratic matrix of weights ("cosformer": the cheaper way in eager
PyTorch at short lengths, and what a first implementation looks like).
"""

import argparse
import json
import math
import time

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads, kind, max_len):
        super().__init__()
        self.heads, self.kind, self.reweight_len = heads, kind, max_len
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        batch, seq, dim = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.kind == "softmax":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            at = torch.arange(seq)
            cosine = torch.cos(math.pi / 2 * (at[:, None] - at[None]) / self.reweight_len)
            weights = (F.relu(q) @ F.relu(k).transpose(-1, -2)) * cosine.tril()
            y = (weights @ v) / weights.sum(-1, keepdim=True).clamp_min(1e-6)
        return self.out(y.transpose(1, 2).reshape(batch, seq, dim))


class Block(nn.Module):
    def __init__(self, dim, heads, ffn, kind, max_len):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, bias=False)
        self.attention = Attention(dim, heads, kind, max_len)
        self.norm2 = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainLM(nn.Module):
    def __init__(self, kind, context, vocab=65, dim=128, layers=4, heads=4, ffn=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, ffn, kind, context) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids):
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


def make_step(kind, context, batch, vocab=65):
    """One optimiser step on random tokens, as a function."""
    torch.manual_seed(1)
    model = PlainLM(kind, context, vocab)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    data = torch.randint(vocab, (batch, context + 1))

    def step():
        optimiser.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        return loss.item()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", default="softmax", choices=["softmax", "cosformer"])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    step = make_step(args.kind, args.context, args.batch)
    for _ in range(args.warmup):
        step()
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"milliseconds": [1e3 * s for s in seconds]}))


if __name__ == "__main__":
    main()
