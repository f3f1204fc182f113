"""Predicted memory against the runtime's own count of tensors, rank by rank."""

import pytest

from hethub.predictor import rank_memory
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import Kind
from hethub.spec.layout.state import StateMap
from hethub.spec.model import ModelSpec
from hethub.spec.ranges import Range
from tests.predictor.plans import cluster, uniform

torch = pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

from hethub.runtime.memory.accounting import MemoryMeter  # noqa: E402
from hethub.runtime.model.initial import initialise  # noqa: E402
from hethub.runtime.model.stage import MicrobatchInput, Stage  # noqa: E402
from hethub.runtime.model.tensor_parallel import TensorGroup  # noqa: E402
from hethub.runtime.pace import Pace  # noqa: E402
from hethub.runtime.pipeline.itinerary import Itinerary, Visit  # noqa: E402
from hethub.runtime.pipeline.passes import MicrobatchPass  # noqa: E402
from hethub.runtime.state.reduction import Reducer  # noqa: E402
from hethub.runtime.state.storage import FlatStorage  # noqa: E402
from hethub.runtime.state.zero import ZeroManager  # noqa: E402

GROUPED = ModelSpec(name="grouped", layers=6, hidden=128, heads=8, kv_heads=2, ffn=344, vocab=512, max_seq_len=256)
PLAIN = ModelSpec(
    name="plain", layers=6, hidden=128, heads=4, kv_heads=4, ffn=344, vocab=512, max_seq_len=256, tied_head=True
)


def counted_bytes(layout: Layout, rank: int) -> int:
    """Weights, gradients and kept tensors of a rank without tensor parallelism, all its microbatches in flight run
    forward."""
    assignment = layout.assignments[rank]
    storage = FlatStorage(StateMap(layout), assignment, layout.plan.precision, torch.device("cpu"))
    initialise(storage, layout.model, seed=0)
    stage = Stage(layout, assignment, storage, TensorGroup(None))
    meter = MemoryMeter([storage.weights, storage.grads, stage.cos, stage.sin])
    spec, seq = layout.replica(assignment.stage, assignment.replica), layout.plan.seq_len
    zero_manager = ZeroManager(Reducer(storage.state, storage, lambda ranks: None, spec.ranks), meter)
    zero_manager.start_step(10**6)
    in_flight, layers = layout.in_flight[assignment.stage][assignment.replica], range(len(stage.layers))
    visits = [Visit(Kind.FORWARD, layer) for _ in range(in_flight) for layer in layers]
    visits += [Visit(Kind.BACKWARD, layer) for layer in reversed(layers)]
    itinerary = Itinerary(zero_manager, visits, Pace())
    tokens = torch.zeros(spec.micro_batch, seq, dtype=torch.long)
    data = MicrobatchInput(batch=spec.micro_batch, tokens=tokens, targets=tokens)
    running = []
    with meter.counting():
        for _ in range(in_flight):
            x = None
            if not stage.is_first:
                x = torch.zeros(spec.micro_batch * seq, stage.hidden, dtype=storage.weights.dtype)
            running.append(MicrobatchPass(stage, itinerary, Range(0, len(stage.layers)), data, 1.0))
            result = running[-1].forward(x)
        running[0].backward(None if stage.is_last else torch.zeros_like(result))
    return storage.weights.nbytes + storage.grads.nbytes + meter.peak_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [GROUPED, PLAIN], ids=lambda model: model.name)
def test_tensors_of_every_stage_are_foreseen(model: ModelSpec, recompute: str, precision: str) -> None:
    layout = uniform(
        model,
        cluster(("CPU-core", 1, 3)),
        tp=1,
        pp=3,
        micro_batch=2,
        batch=16,
        seq=128,
        precision=precision,
        recompute=recompute,
    )
    for entry in rank_memory(layout):
        parts = entry.parts["weights"] + entry.parts["gradients"] + entry.parts["activations"]
        assert parts == pytest.approx(counted_bytes(layout, entry.rank), rel=0.05)


@pytest.mark.parametrize("more", [{}, {"recompute": "full"}, {"offload": ["activations"]}], ids=str)
def test_a_microbatch_holds_no_more_than_its_replica_has(more: dict[str, object]) -> None:
    """Logits, buffers and the layer at work were counted for all of a micro_batch above the replica's samples."""
    for device in ("CPU-core", "A100-SXM4-80GB"):
        exact, above = (
            uniform(GROUPED, cluster((device, 1, 2)), tp=1, pp=2, micro_batch=size, batch=4, seq=128, precision="fp32", **more)
            for size in (4, 64)
        )  # fmt: skip
        assert rank_memory(above) == rank_memory(exact)
