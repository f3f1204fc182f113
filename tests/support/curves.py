"""What ranks might have measured of themselves, without a rank."""

from hethub.predictor.cost.profile import DeviceProfile
from hethub.spec.model import ModelSpec
from tests.support.job_files import MODEL

TINY = ModelSpec.model_validate(MODEL)


def curve(seconds: float, largest: int = 8) -> DeviceProfile:
    """A layer that takes so many seconds a sample, whatever the size."""
    layers = [
        {"micro_batch": b, "seq_len": 32, "forward_seconds": seconds * b / 3, "backward_seconds": seconds * b * 2 / 3}
        for b in (1, 2, 4, 8)
    ]
    content = {"accelerator": "CPU-core", "precision": "fp32", "layers": layers, "largest_micro_batch": largest}
    return DeviceProfile.model_validate(content)
