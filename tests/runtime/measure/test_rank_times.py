"""What a rank is planned to compute: layer by layer, and in a step."""

import pytest

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB, hethub_software
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.runtime.measure.measured_speeds import STEPS, MeasuredSpeeds, estimated
from hethub.runtime.measure.rank_times import PASSES, RankTimes, planned_seconds
from hethub.spec.layout.execution import Kind
from tests.support.emulated import EMULATED, layout
from tests.support.job_files import STAGES


def test_layers_and_ends_add_up_to_the_predicted_microbatch():
    bound = layout()
    costs = PlanCosts(bound, HETHUB, packaged())
    for assignment in bound.assignments:
        times, samples = RankTimes(costs, assignment), bound.replica(assignment.stage, assignment.replica).micro_batch
        microbatch = costs.microbatch(assignment.stage, assignment.replica, samples)
        for kind, parts in ((Kind.FORWARD, microbatch.forward), (Kind.BACKWARD, microbatch.backward)):
            own = sum(times.layer(kind, layer, samples) for layer in range(bound.stages[assignment.stage].num_layers))
            assert own == pytest.approx(parts.compute)


def test_gradients_of_weights_that_are_put_off_leave_the_backward():
    whole, apart = (planned_seconds(layout(schedule=schedule), None) for schedule in ("1f1b", "zero_bubble"))
    for one, other in zip(whole, apart, strict=True):
        assert other[Kind.BACKWARD] + other[Kind.WEIGHT] == pytest.approx(one[Kind.BACKWARD])
        assert other[Kind.FORWARD] == one[Kind.FORWARD]


def test_a_slowdown_slows_all_that_a_rank_computes():
    bound = layout(schedule="zero_bubble")
    costs = PlanCosts(bound, HETHUB, packaged())
    plain, slow = RankTimes(costs, bound.assignments[0]), RankTimes(costs, bound.assignments[0], 1.5)
    for kind in PASSES:
        assert 0 < slow.layer(kind, 1, 2) == pytest.approx(1.5 * plain.layer(kind, 1, 2))
    assert slow.optimizer(1000) == pytest.approx(1.5 * plain.optimizer(1000))
    assert plain.optimizer(0) == 0.0


def test_a_rank_computes_its_share_of_the_tensors():
    unequal = {"ranks": [0, 1], "micro_batch": 4, "samples": 8, "tensor_shares": [5, 3]}
    stages = [{"layers": [[0, 2]], "replicas": [unequal]}, STAGES[1]]
    larger, smaller, *_ = planned_seconds(layout(stages), None)
    assert larger[Kind.FORWARD] > smaller[Kind.FORWARD]


def test_copies_that_pass_each_other_share_what_a_host_carries():
    stages = [{**stage, "offload": ["optimizer"]} for stage in STAGES]
    limited = {**EMULATED, "links": {"staging": {"per_host_gbytes_per_second": 1}}}
    costs = PlanCosts(layout(stages, limited), HETHUB, packaged())
    times = RankTimes(costs, costs.layout.assignments[0])
    assert times.host_passing_seconds_per_byte == pytest.approx(2 * times.host_seconds_per_byte)


def test_planned_work_is_that_of_all_microbatches_times_what_is_known():
    plain = planned_seconds(layout(), None)
    assert len(plain) == 4
    assert plain[2] == plain[3]  # one replica
    assert set(plain[2]) == {"forward", "backward", "step"}
    again = planned_seconds(layout(), None, {0: 1.5})
    assert again[0] == {kind: pytest.approx(1.5 * seconds) for kind, seconds in plain[0].items()}
    assert again[1:] == plain[1:]


def test_speeds_of_a_long_run_are_told_by_its_last_steps():
    """A rank keeps a figure for a device type and step, and not for all steps: a run may have a hundred thousand."""
    bound, speeds = layout(), MeasuredSpeeds()
    planned = planned_seconds(bound, None)
    for step in range(2 * STEPS):
        slow = 3.0 if step < STEPS else 2.0
        busy = [{kind: slow * seconds for kind, seconds in own.items()} for own in planned]
        speeds.note(bound, busy, planned)
    assert all(len(medians) == STEPS for medians in speeds._medians.values())
    devices = {node.device.name: node.device for node in bound.cluster.nodes}
    for found in speeds.profile(bound, None, HETHUB).devices:
        usual = estimated(bound, devices[found.accelerator], HETHUB)
        assert found.layers[0].forward_seconds == pytest.approx(2 * usual.layers[0].forward_seconds)


@pytest.mark.parametrize("compiles", [None, True, False])
def test_an_update_is_slow_by_what_updates_took(compiles):
    """Ranks twice as slow as planned in their layers and three times in their updates; the first step's update comes
    behind it. A plan that the measured speeds are asked of is foretold what it took."""
    bound, speeds, software = layout(), MeasuredSpeeds(), hethub_software(compiles)
    planned = planned_seconds(bound, None, software=software)
    factors = {Kind.FORWARD: 2.0, Kind.BACKWARD: 2.0, Kind.STEP: 3.0}
    taken = [{kind: factors[kind] * seconds for kind, seconds in own.items()} for own in planned]
    speeds.note(bound, [{**own, Kind.STEP: 0.0} for own in taken], planned)
    for _ in range(2):
        speeds.note(bound, taken, planned)
    again = planned_seconds(bound, speeds.profile(bound, None, software), software=software)
    assert again == [{kind: pytest.approx(seconds) for kind, seconds in own.items()} for own in taken]
