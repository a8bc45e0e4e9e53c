import ctypes
import resource
import time

import cosformer
import torch

n, exact = 4096, None
x = torch.randn(1, n, 512, generator=torch.manual_seed(0))
weights = cosformer.nn.SoftmaxAttention(512, 8).state_dict()
options = {
    "cosformer": {"reweight_len": n},
    "linformer": {"max_len": n},
    "longformer": {"window": 256},
}
for kind in ("softmax", "cosformer", "linear", "performer", "linformer", "longformer", "bigbird"):
    layer = cosformer.nn.attention(kind, 512, 8, **options.get(kind, {}))
    layer.load_state_dict(weights, strict=False)
    ctypes.CDLL(None).malloc_trim(0)  # Linux: what is free goes back, and the peak starts anew
    open("/proc/self/clear_refs", "w").write("5")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    out = layer(x).detach()
    seconds = time.perf_counter() - start
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    exact = out if exact is None else exact
    print(f"{kind:11}{seconds * 1e3:7.0f} ms {memory:5.0f} MB", end="   from softmax: ")
    print(f"{(out - exact).norm() / exact.norm():.2f}")
