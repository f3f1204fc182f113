"""The packaged catalogue against the gathered facts, and peaks by precision."""

import csv
from pathlib import Path
from typing import Any

import pytest

from hethub.spec.accelerator import AcceleratorSpec, catalogue, find_accelerator
from hethub.spec.cluster import load_cluster
from hethub.spec.errors import BadInput

FACTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "accelerators.csv"
COLUMNS = {
    "memory_gb": "memory_gb", "memory_gbytes_per_second": "hbm_bw_gbps", "bf16_tflops": "bf16_dense_tflops",
    "fp16_tflops": "fp16_dense_tflops", "fp32_tflops": "fp32_tflops", "tf32_tflops": "tf32_tflops",
    "fp32_matrix_tflops": "fp32_matrix_tflops", "fp8_tflops": "fp8_dense_tflops",
    "link_gbytes_per_second": "intra_node_link_gbps_per_dir", "pcie_generation": "pcie_gen", "tdp_watts": "tdp_w",
}  # fmt: skip


# Of GDDR memory that keeps ECC, 15 of 16 parts are there to use (nvidia-smi: T4 15,360 MiB, L4 23,034, L40S 46,068).
WITH_ECC = ("T4", "P4", "P40", "A10G", "A40", "L4", "L40S")


@pytest.mark.skipif(not FACTS.exists(), reason=f"{FACTS.name} with the gathered facts is not beside the project")
def test_the_catalogue_has_every_gathered_fact() -> None:
    rows = list(csv.DictReader(FACTS.open()))
    differences: list[Any] = []
    for row in rows:
        found = catalogue().get(row["name"])
        if found is None:
            differences.append((row["name"], "is missing"))
            continue
        if (found.vendor, found.source) != (row["vendor"].lower(), row["source"]):
            differences.append((row["name"], found.vendor, found.source))
        for ours, theirs in COLUMNS.items():
            value, held = float(row[theirs]) if row[theirs] else None, getattr(found, ours)
            if ours == "memory_gb" and row["name"] in WITH_ECC:
                value = 15 / 16 * float(row[theirs])
            if value is not None and held != (value or None):  # empty: not gathered; a rate of 0 means: cannot
                differences.append((row["name"], ours, held, value))
    assert len(rows) >= 47
    assert not differences


def test_every_entry_says_where_its_figures_are_from() -> None:
    assert all(entry.source != AcceleratorSpec.model_fields["source"].default for entry in catalogue().values())
    assert all(entry.memory_bytes == entry.memory_gb * 2**30 for entry in catalogue().values())


def test_cards_that_keep_ecc_in_their_memory_hold_a_sixteenth_less() -> None:
    """A plan for 47 GiB of an L40S was let through, which has 44.99."""
    assert {name: find_accelerator(name).memory_gb for name in WITH_ECC} == {
        "T4": 15, "P4": 7.5, "P40": 22.5, "A10G": 22.5, "A40": 45, "L4": 22.5, "L40S": 45,
    }  # fmt: skip


def test_peaks_by_precision() -> None:
    a100, mi250, v100 = map(find_accelerator, ("A100-SXM4-80GB", "MI250X-GCD", "V100-SXM2-16GB"))
    assert a100.peak_flops("bf16") == 312e12
    assert a100.peak_flops("fp32") == 19.5e12  # TF32 is off unless asked for
    assert mi250.peak_flops("fp32") == 47.9e12  # its matrix units compute in full fp32
    assert v100.peak_flops("bf16") == 0.0
    assert v100.peak_flops("fp16") == 125e12
    assert v100.peak_flops("fp64") == pytest.approx(15.7e12 / 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("MI250X", "MI250X-GCD"), ("t4", "T4"), ("A100-SXM-80GB", "A100-SXM4-80GB"), ("RTX4090", "RTX-4090")],
)
def test_an_unknown_accelerator_names_the_nearest(given: str, expected: str) -> None:
    with pytest.raises(BadInput, match=f"'{given}' is not in the catalogue; did you mean '{expected}'.*in place"):
        find_accelerator(given)


def test_a_name_that_several_begin_with_names_them_all() -> None:
    with pytest.raises(BadInput, match="did you mean 'H100-NVL-94GB', 'H100-PCIe-80GB', 'H100-SXM5-80GB' or "):
        find_accelerator("h100")
    with pytest.raises(BadInput, match=r"known: .*A100-SXM4-80GB"):
        find_accelerator("abacus")


def test_a_name_with_more_than_a_name_of_the_catalogue_names_that() -> None:
    """For H100x there was MI100 alone."""
    with pytest.raises(BadInput, match="did you mean 'H100-"):
        find_accelerator("H100x")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "'H100-PCIe-80GB' or 'H100-SXM5-80GB'"),
        ("NVIDIA GeForce RTX 4090", "'RTX-4090'"),
        ("AMD Instinct MI300X", "'MI300X'"),
        ("4090", "'RTX-4090'"),
    ],
)
def test_a_name_as_nvidia_smi_and_rocm_smi_print_it_names_the_catalogues(given: str, expected: str) -> None:
    """All names of the catalogue were listed instead."""
    with pytest.raises(BadInput) as refused:
        find_accelerator(given)
    assert f"did you mean {expected}?" in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("gbps_per_nic: 400000", "gbps_per_nic: 400000 is beyond physics"),  # Mbit/s
        ("gbps_per_nic: 400 Gbit/s", "gbps_per_nic is '400 Gbit/s', but input should be a number alone, without its unit"),
        ("gbps_per_nic: 400, gbit: 3", "gbit"),
        ("gbps_per_nic: 400, accelerator: {name: a, vendor: a, memory_gb: 80, memory_gbytes_per_second: 3350000, "
         "fp32_tflops: 60, link_gbytes_per_second: 450}", "memory_gbytes_per_second: 3.35e+06 is beyond physics"),
        ("gbps_per_nic: 400, accelerator: {name: a, vendor: a, memory_gb: 46068, memory_gbytes_per_second: 864, "
         "fp32_tflops: 60, link_gbytes_per_second: 32}", "memory_gb: 46068 is beyond physics"),  # MiB, as nvidia-smi says
    ],
)  # fmt: skip
def test_a_rate_in_another_unit_is_refused_with_file_line_and_key(tmp_path: Path, changed: str, said: str) -> None:
    path, named = tmp_path / "cluster.yaml", "" if "accelerator:" in changed else ", accelerator: A100-SXM4-80GB"
    path.write_text(f"name: own\nnodes:\n  - {{name: a, accelerators: 8{named}, {changed}}}\n")
    with pytest.raises(BadInput, match=r"cluster.yaml, line 3: nodes\[0\]") as refused:
        load_cluster(path)
    assert said in str(refused.value)
