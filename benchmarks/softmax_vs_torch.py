#!/usr/bin/env python3
"""Exact softmax attention against torch's scaled_dot_product_attention, one thread.

    PYTHONPATH=python build/venv/bin/python3 benchmarks/softmax_vs_torch.py

Prints how many times torch takes as long, forward and forward + backward: the median of
ROUNDS rounds that alternate between the two, by processor time.
"""

import statistics
import time

import cosformer
import torch
from torch.nn.functional import scaled_dot_product_attention

ROUNDS = 7


def seconds(run, repeats):
    start = time.process_time()
    for _ in range(repeats):
        run()
    return time.process_time() - start


def ratio(ours, theirs, repeats):
    ours(), theirs()  # the first call is slower
    rounds = [seconds(theirs, repeats) / seconds(ours, repeats) for _ in range(ROUNDS)]
    return statistics.median(rounds)


def compare(is_causal, length, head_dim):
    heads = 16 if length < 4096 else 4
    q, k, v, d_out = (torch.randn(1, length, heads, head_dim) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def ours(*inputs):
        return cosformer.softmax_attention(*inputs, is_causal=is_causal)

    def theirs(*inputs):
        q, k, v = (x.transpose(1, 2) for x in inputs)
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)

    repeats = max(1, int(2e9 / (4 * head_dim * length * length * heads)))
    forward = ratio(lambda: ours(q, k, v), lambda: theirs(q, k, v), repeats)
    both = ratio(
        lambda: ours(*leaves).backward(d_out), lambda: theirs(*leaves).backward(d_out), repeats
    )
    name = "causal" if is_causal else "full"
    print(f"| {name} | {length} | {heads} | {head_dim} | {forward:.2f} | {both:.2f} |", flush=True)


def main():
    torch.set_num_threads(1)
    print(f"torch {torch.__version__} against cosformer {cosformer.__version__}, {cosformer.isa()}")
    print("| form | tokens | heads | head_dim | forward | forward + backward |")
    print("|---|---|---|---|---|---|")
    for is_causal in (False, True):
        for length in (64, 256, 1024, 4096):
            for head_dim in (64, 128):
                compare(is_causal, length, head_dim)


if __name__ == "__main__":
    main()
