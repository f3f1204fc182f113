"""Small clusters, models and plans for the predictor's tests."""

from hethub.predictor import Prediction
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, ScheduleName

LLAMA_8B = ModelSpec(
    name="llama-8b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, max_seq_len=8192
)
TINY = ModelSpec(name="tiny", layers=4, hidden=64, heads=4, kv_heads=2, ffn=176, vocab=256, max_seq_len=256)


def cluster(*nodes: tuple[str, int, int], gbps: float | None = 200.0, name: str = "test") -> ClusterSpec:
    """A cluster of (accelerator, machines, accelerators per machine)."""
    entries = [
        {
            "name": f"n{i}",
            "accelerator": a,
            "count": count,
            "accelerators": per,
            "nics": min(per, 8),
            "gbps_per_nic": gbps,
        }
        for i, (a, count, per) in enumerate(nodes)
    ]
    return ClusterSpec.model_validate({"name": name, "nodes": entries})


def under(schedule: ScheduleName, plan: PlanSpec, chunks: int = 1) -> PlanSpec:
    """The plan under a schedule, every stage in so many chunks, a chunk of each in turn; its layers must divide
    evenly."""
    size = plan.num_layers // (chunks * len(plan.stages))
    starts = [
        [size * (chunk * len(plan.stages) + stage) for chunk in range(chunks)] for stage in range(len(plan.stages))
    ]
    stages = [
        stage.replace(layers=tuple((start, start + size) for start in own))
        for stage, own in zip(plan.stages, starts, strict=True)
    ]
    return plan.replace(schedule=schedule, stages=tuple(stages))


def uniform(
    model: ModelSpec,
    on: ClusterSpec,
    *,
    tp: int,
    pp: int,
    micro_batch: int,
    batch: int,
    seq: int,
    precision: str = "bf16",
    **stage: object,
) -> Layout:
    """tp x pp x dp with equal stages; tensor-parallel groups innermost, stages outermost."""
    dp = on.size // (tp * pp)
    stages = []
    for s in range(pp):
        first = s * dp * tp
        replicas = [
            {
                "ranks": list(range(first + d * tp, first + (d + 1) * tp)),
                "micro_batch": micro_batch,
                "samples": batch // dp,
            }
            for d in range(dp)
        ]
        layers = [[s * model.layers // pp, (s + 1) * model.layers // pp]]
        stages.append({"layers": layers, "replicas": replicas, **stage})
    plan = {
        "model": model.name,
        "cluster": on.name,
        "global_batch": batch,
        "seq_len": seq,
        "precision": precision,
        "stages": stages,
    }
    return bind(PlanSpec.model_validate(plan), model, on)


def last_stops(prediction: Prediction) -> list[float]:
    """When each rank of a predicted timeline has done its last action."""
    assert prediction.timeline is not None
    stops: dict[int, float] = {}
    for span in prediction.timeline:
        stops[span.rank] = max(stops.get(span.rank, 0.0), span.stop_seconds)
    return list(stops.values())
