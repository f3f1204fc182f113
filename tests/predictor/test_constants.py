"""How an accelerator finds its constants."""

from hethub.predictor.constants import packaged
from hethub.spec.accelerator import find_accelerator


def test_a_family_never_measured_takes_its_predecessors_scales() -> None:
    constants = packaged()
    assert "blackwell fp16" not in constants.families
    new, old = (constants.efficiency(find_accelerator(name), "bf16") for name in ("B200-SXM", "H100-PCIe-80GB"))
    assert (new.scale, new.attention) == (old.scale, old.attention)


def test_an_accelerator_of_nobodys_family_is_predicted_from_its_data_sheet() -> None:
    unknown = find_accelerator("A100-SXM4-80GB").replace(name="mine", vendor="mine")
    assert packaged().efficiency(unknown, "bf16").scale == 1.0


def test_constants_are_far_fewer_than_rows() -> None:
    assert packaged().count <= 2650 / 10
    assert not any(
        key in table for table in (packaged().families, packaged().accelerators) for key in ("vTrain", "AMP")
    )
