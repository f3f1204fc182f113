"""What documents and windows cost attention: forward and backward beside plain causal attention, and beside torch's own
with a mask of the whole sequence.

    python benchmarks/attention.py [--seq-len 2048] [--part 512] [--rounds 9]

In CPU seconds of one thread, the ways in turn; on a device in seconds by its events, in bf16.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # behind site-packages: only `tests` and `benchmarks` are meant

from hethub.kernels.device import Clock, choose_device
from hethub.runtime.model.layers import Documents, _mix

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--part", type=int, default=512, help="tokens of a document and of the window")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    device = choose_device(0, 1)
    clock, where = Clock(device), device.torch_device
    inputs = [
        torch.randn(1, chosen.seq_len, heads, HEAD_DIM, device=where, dtype=torch.bfloat16 if device.is_gpu else None)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]

    def seconds(attend: Attention) -> float:
        leaves = [each.detach().requires_grad_() for each in inputs]
        device.synchronize()
        start = clock.stamp() if device.is_gpu else process_time()
        result = attend(*leaves)
        result.backward(torch.ones_like(result))
        return clock.between(start, clock.stamp()) if not isinstance(start, float) else process_time() - start

    kinds = ways(chosen.seq_len, chosen.part, where)
    times = [[seconds(attend) for attend in kinds.values()] for _ in range(1 + chosen.rounds)][1:]
    print("| attention | ms, forward and backward | over causal (median) |\n|---|---|---|")
    for number, name in enumerate(kinds):
        own = [each[number] for each in times]
        ratios = [each[number] / each[0] for each in times]
        print(f"| {name} | {1e3 * median(own):.1f} | {median(ratios):.2f} |")


def ways(seq: int, part: int, where: torch.device) -> dict[str, Attention]:
    """By name, the plain causal attention first."""
    sizes = [min(part, seq - start) for start in range(0, seq, part)]
    documents = Documents(sizes=tuple(sizes), starts=torch.tensor([0, *sizes]).cumsum(0).to(where, torch.int32))
    positions = torch.arange(seq, device=where)
    behind = positions.unsqueeze(1) - positions
    same = positions.unsqueeze(1) // part == positions // part

    def masked(mask: Tensor) -> Attention:
        def attend(*tensors: Tensor) -> Tensor:
            query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

        return attend

    return {
        "causal": partial(_mix, documents=None),
        f"documents of {part}": partial(_mix, documents=documents),
        f"a window of {part}": partial(_mix, documents=None, window=part),
        "torch's, documents as a mask": masked((behind >= 0) & same),
        "torch's, the window as a mask": masked((behind >= 0) & (behind < part)),
    }


if __name__ == "__main__":
    main()
