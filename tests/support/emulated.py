"""An emulated cluster of two makers, and plans on it."""

from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.support.job_files import MODEL, STAGES, plan

NODES = [
    {"name": "nv", "accelerator": "A100-SXM4-80GB", "accelerators": 2, "nics": 2, "gbps_per_nic": 200},
    {"name": "amd", "accelerator": "MI250X-GCD", "accelerators": 2, "nics": 2, "gbps_per_nic": 200},
]
EMULATED = {"name": "two-makers", "emulated": True, "nodes": NODES}


def layout(stages=STAGES, cluster=EMULATED, **changes):
    model = ModelSpec.model_validate(MODEL)
    return bind(PlanSpec.model_validate(plan(stages, **changes)), model, ClusterSpec.model_validate(cluster))
