"""Trains a tiny causal cosFormer on the bytes of a text, saves it, and lets it write.

python examples/train_char_lm.py TEXT_FILE OUT_FOLDER [--steps 300]
cosformer generate OUT_FOLDER --prompt "The "
"""

import argparse
from pathlib import Path

import cosformer
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("text", type=Path, help="any file: a token is a byte")
parser.add_argument("out", type=Path, help="the model folder to write")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()

torch.manual_seed(options.seed)
data = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
if len(data) <= options.context:
    raise SystemExit(f"{options.text} has {len(data)} bytes, expected over {options.context}")
config = cosformer.ModelConfig(
    vocab_size=256,
    embed_dim=64,
    num_layers=2,
    num_heads=4,
    max_len=256,  # M of the cosine too: fixed by the model, not by the length of a call
    position="rope",
    attention="cosformer",
)
model = cosformer.Transformer(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.98))
warm_up = max(options.steps // 10, 1)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warm_up, 1.0, 1.1 - step / options.steps)
)
offsets = torch.arange(options.context + 1)
for step in range(options.steps):
    starts = torch.randint(len(data) - options.context, (options.batch, 1))
    text = data[starts + offsets]
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % 50 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)

model.save_pretrained(options.out, tokenizer="bytes")
prompt = data[:16].tolist()
written = cosformer.generate(model, prompt, max_new_tokens=200, temperature=0.7, top_p=0.95)
print(bytes(prompt + written[0].tolist()).decode(errors="replace"))
