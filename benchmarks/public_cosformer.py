#!/usr/bin/env python3
"""The public cosFormer module replaced by ours: outputs, gradients, time and memory.

    PYTHONPATH=python build/venv/bin/python3 benchmarks/public_cosformer.py PATH/cosformer.py

PATH/cosformer.py: the file of the authors' repository (OpenNLPLab/cosFormer). Both hold the
same parameters; ours takes M = the length, which is what theirs does in each call. Forward
and backward, causal and not, one thread; memory is the largest that is allocated beyond what
was there before, by torch's profiler.
"""

import argparse
import importlib.util
import statistics
import time

import cosformer
import torch

EMBED, HEADS, ROUNDS = 256, 4, 3


def public_module(path):
    spec = importlib.util.spec_from_file_location("public_cosformer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CosformerAttention


def peak_megabytes(run):
    """From the events of the profiler: the kernels' own scratch memory (a chunk) is not in it."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak / 2**20


def compare(public, length, is_causal):
    theirs = public(EMBED, HEADS, causal=is_causal)
    ours = cosformer.nn.CosformerAttention(EMBED, HEADS, is_causal=is_causal, reweight_len=length)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, length, EMBED, requires_grad=True)
    y = x.detach().transpose(0, 1).contiguous().requires_grad_()  # theirs: [seq, batch, embed]
    d_out = torch.randn(1, length, EMBED)

    def run_ours():
        x.grad = None
        out = ours(x)
        out.backward(d_out)
        return out

    def run_theirs():
        y.grad = None
        out = theirs(y)
        out.backward(d_out.transpose(0, 1))
        return out

    out, expected = run_ours(), run_theirs().transpose(0, 1)
    error = ((out - expected).norm() / expected.norm()).item()
    d_error = ((x.grad - y.grad.transpose(0, 1)).norm() / y.grad.norm()).item()
    times = {run_ours: [], run_theirs: []}
    for _ in range(ROUNDS if length < 16384 else 1):
        for run, taken in times.items():
            start = time.process_time()
            run()
            taken.append(time.process_time() - start)
    a, b = (1e3 * statistics.median(taken) for taken in times.values())
    print(
        f"| {'causal' if is_causal else 'non-causal'} | {length} | {error:.1e} | {d_error:.1e} "
        f"| {b:.0f} | {a:.0f} | {b / a:.1f} "
        f"| {peak_megabytes(run_theirs):.0f} | {peak_megabytes(run_ours):.0f} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="cosformer.py of the authors' repository")
    public = public_module(parser.parse_args().path)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        "| form | tokens | output differs by | gradient by | public, ms | ours, ms | ratio ", end=""
    )
    print("| public, MB | ours, MB |", "|---" * 9 + "|", sep="\n")
    for is_causal in (False, True):
        for length in (1024, 4096, 16384):
            compare(public, length, is_causal)


if __name__ == "__main__":
    main()
