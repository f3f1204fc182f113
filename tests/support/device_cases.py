"""Plans of devices beside CPUs: trained on real devices, where there are some, and on late ones everywhere."""

from tests.support.layouts import Case, chunked, replica, stage

ALL = (0, 4)
CHUNKS = [chunked([(0, 1), (2, 3)], replica([0], 8, 2)), chunked([(1, 2), (3, 4)], replica([1], 8, 2))]
TWO_STAGES = [stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 2))]
UNLIKE = replica([0], 6, 3), replica([1], 2)
THREE = replica([0], 4, 2), replica([1], 2), replica([2], 2)
OFFLOADED = ["parameters", "optimizer", "activations"]

CASES = [
    Case(name="alone", vendors="g", stages=[stage(ALL, replica([0], 8, 4))]),
    Case(name="documents", vendors="g", document_mask=True, stages=[stage(ALL, replica([0], 8, 4))]),
    Case(name="recompute full", vendors="g", stages=[stage(ALL, replica([0], 8, 4), recompute="full")]),
    Case(name="recompute selective", vendors="g", stages=[stage(ALL, replica([0], 8, 4), recompute="selective")]),
    *(Case(name=f"offload {what}", vendors="g", stages=[stage(ALL, replica([0], 8, 2), offload=[what])]) for what in OFFLOADED),
    Case(name="pipeline", vendors="gc", stages=TWO_STAGES),
    Case(name="replicas", vendors="gc", stages=[stage(ALL, *UNLIKE, zero=1)]),
    Case(name="ministages", vendors="gc", stages=CHUNKS, schedule="ministages"),
    Case(name="zero_bubble", vendors="gc", stages=TWO_STAGES, schedule="zero_bubble"),
    Case(name="layered, zero3", vendors="gc", stages=[stage(ALL, *UNLIKE, zero=3)], schedule="layered"),
    Case(name="tensor parallel", vendors="gg", stages=[stage(ALL, replica([0, 1], 8, 2))]),
    Case(name="pipeline over their link", vendors="gg", stages=TWO_STAGES),
    Case(name="ministages over their link", vendors="gg", stages=CHUNKS, schedule="ministages"),
    Case(name="zero3 of two", vendors="gg", stages=[stage(ALL, *UNLIKE, zero=3)]),
    Case(name="zero3 of two, offloaded", vendors="gg", stages=[stage(ALL, *UNLIKE, zero=3, offload=OFFLOADED[:1])]),
    Case(name="two beside a CPU", vendors="ggc", stages=[stage(ALL, *THREE, zero=2)]),
    Case(name="two beside a CPU, offloaded", vendors="ggc", stages=[stage(ALL, *THREE, zero=2, offload=OFFLOADED[:2])]),
    Case(name="degrees 2 and 2", vendors="ggcc", stages=[stage(ALL, replica([0, 1], 6, 3), replica([2, 3], 2), zero=1)]),
    Case(name="degrees 2 and 1", vendors="ggc", stages=[stage(ALL, replica([0, 1], 6, 3), replica([2], 2), zero=1)]),
]  # fmt: skip
"""A device's ranks are "g", of one maker; those on CPUs "c"."""
