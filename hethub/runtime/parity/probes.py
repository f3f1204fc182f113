"""Properties of a device's arithmetic that a few numbers show: widths of products and sums, denormals, NaN, rounding,
bytes of fp8."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hethub.kernels.device import Device
from hethub.runtime.parity.row import Row, State
from hethub.runtime.state.storage import DTYPES

_SIZE = 64  # of square matrices, enough for a matrix unit
_SUMMANDS = 4096


def probes(device: Device, precision: str) -> Iterator[Row]:
    """A row per property; one that a device lacks fails, but for denormals, which some flush by design."""
    dtype, where = DTYPES[precision], device.torch_device
    for what, holds, lacking, reason in _PROPERTIES:
        found = holds(dtype, where)
        if found is not None:
            state: State = "pass" if found else lacking
            yield Row(what=what, where=device.name, state=state, reason="" if found else reason)


def keeps_inputs(dtype: torch.dtype, where: torch.device) -> bool | None:
    """Whether fp32 products take all bits of their inputs; None in other types, which have no shorter stand-in."""
    if dtype != torch.float32:
        return None
    values = torch.full((_SIZE, _SIZE), 1 + 2.0**-12, device=where)
    return bool(torch.equal(values @ torch.eye(_SIZE, device=where), values))


def sums_wide(dtype: torch.dtype, where: torch.device) -> bool:
    """Whether a product's sum is kept in at least fp32: many small summands behind a large one are not lost."""
    small = {torch.float32: 2.0**-20, torch.float64: 2.0**-40}.get(dtype, 2.0**-9)
    rows = torch.full((_SIZE, _SUMMANDS), small, dtype=dtype, device=where)
    rows[:, 0] = 1
    found = (rows @ torch.ones(_SUMMANDS, _SIZE, dtype=dtype, device=where)).double()
    expected = 1 + small * (_SUMMANDS - 1)
    # Partial sums may be rounded once each (torch allows it for half precisions); one narrow sum stays near 1.
    return float((found - expected).abs().max()) <= 0.25 * (expected - 1)


def keeps_denormals(dtype: torch.dtype, where: torch.device) -> bool:
    """Whether a product of denormal inputs is not zero."""
    tiny = torch.finfo(dtype).tiny
    values = torch.full((_SIZE, _SIZE), tiny / 8, dtype=dtype, device=where)
    found = values @ (torch.eye(_SIZE, dtype=dtype, device=where) * 1024)
    return bool((found == tiny * 128).all())


def shows_nan(dtype: torch.dtype, where: torch.device) -> bool:
    """Whether a NaN or an infinity of an input is in the results it has a part in, and in their maximum."""
    values = torch.ones(_SIZE, _SIZE, dtype=dtype, device=where)
    values[1, 2], values[3, 4] = float("nan"), float("inf")
    found = values @ torch.ones(_SIZE, _SIZE, dtype=dtype, device=where)
    return bool(found[1].isnan().all() and found[3].isinf().all() and found.amax(0).isnan().all())


def rounds_to_even(dtype: torch.dtype, where: torch.device) -> bool:
    """Whether a value halfway between two of the type goes to the even one."""
    eps = torch.finfo(dtype).eps
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
    if dtype == torch.float64:  # no wider type: a sum that falls halfway
        found = torch.tensor([1.0, 1 + eps], dtype=dtype, device=where) + eps / 2
    else:
        found = torch.tensor([1 + eps / 2, 1 + 1.5 * eps], dtype=wide, device=where).to(dtype)
    return found.double().tolist() == [1.0, 1 + 2 * eps]


def reads_fp8(dtype: torch.dtype, where: torch.device) -> bool:
    """Whether fp8 bytes mean what OCP's e4m3 says: MI300's matrix units read the same byte as half as much (e4m3fnuz)."""
    values = torch.tensor([1.0, -448.0, 2.0**-9], device=where)
    bytes_: Tensor = values.to(torch.float8_e4m3fn)
    return bytes_.view(torch.uint8).tolist() == [0x38, 0xFE, 0x01] and bool(torch.equal(bytes_.float(), values))


_PROPERTIES: tuple[tuple[str, Callable[[torch.dtype, torch.device], bool | None], State, str], ...] = (
    (
        "products take whole inputs", keeps_inputs, "fail",
        "fp32 products round their inputs (TF32 or less); unset torch.backends.*.allow_tf32, torch.set_float32_matmul_precision "
        "and NVIDIA_TF32_OVERRIDE, HIPBLASLT_ALLOW_TF32",
    ),
    ("sums are wide", sums_wide, "fail", "sums of products are kept in fewer bits than fp32"),
    (
        "denormals", keeps_denormals, "note",
        "denormal inputs of products count as zero (MI200 does so in half precisions); small fp16 gradients vanish: take bf16",
    ),
    ("NaN and infinity are seen", shows_nan, "fail", "a NaN or an infinity of an input is lost in a product or a maximum"),
    ("rounding", rounds_to_even, "fail", "values halfway between two are not rounded to the even one"),
    ("fp8 bytes", reads_fp8, "fail", "bytes of fp8 do not mean what OCP's e4m3 says; do not use communicator.wire: fp8"),
)  # fmt: skip
