"""Profiles replace the roofline where they measured, are interpolated between, and refused for another model."""

import json
from itertools import product
from math import log
from pathlib import Path

import pytest

import hethub
from hethub.cli import run
from hethub.predictor import LayerCost, predict
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.profile import Corrections, LinkTiming, ProfileSpec, load_profile, merge, save_profile
from hethub.predictor.cost.profiled_layer import ProfiledLayerCost, estimated_device
from hethub.spec.accelerator import find_accelerator
from hethub.spec.errors import BadInput
from hethub.spec.job import load_job
from hethub.spec.layout.bind import bind
from tests.predictor.plans import LLAMA_8B, TINY, cluster, uniform
from tests.support.job_files import write_job

CORE = find_accelerator("CPU-core")
LAYOUT = uniform(TINY, cluster(("CPU-core", 1, 4)), tp=1, pp=2, micro_batch=2, batch=16, seq=128, precision="fp32")


def profile(factor: float = 3.0, **changes: object) -> ProfileSpec:
    """A profile in which every layer takes `factor` times the roofline's estimate."""
    cost = LayerCost(TINY, CORE, 128, "fp32")
    layers = [
        {"micro_batch": b, "seq_len": 128, "tp": tp, "forward_seconds": factor * cost.layer(b, tp).forward,
         "backward_seconds": factor * cost.layer(b, tp).backward}
        for b in (1, 2, 4) for tp in (1, 2)
    ]  # fmt: skip
    device = {"accelerator": "CPU-core", "precision": "fp32", "layers": layers}
    return ProfileSpec.model_validate(
        {
            "date": "2026-01-01",
            "hethub": hethub.__version__,
            "software": "test",
            "model": TINY.to_dict(),
            "devices": [device],
            **changes,
        }
    )


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_measured_points_are_met_and_between_them_the_ratio_holds(samples: int) -> None:
    plain = LayerCost(TINY, CORE, 128, "fp32").layer(samples)
    measured = ProfiledLayerCost(TINY, CORE, 128, "fp32").use(profile().devices[0])
    assert measured.layer(samples).total == pytest.approx(3 * plain.total)
    assert not measured.extrapolated


def test_between_points_a_ratio_is_interpolated_in_logarithms() -> None:
    """1 at one sample and 16 at sixteen: at 2, a quarter of the way, the fourth root of 16."""
    between = Corrections({(0.0, 0.0, 0.0): 1.0, (log(16), 0.0, 0.0): 16.0})
    assert [between.at(samples, 1, 1) for samples in (0.5, 1, 2, 4, 16, 32)] == pytest.approx([1, 1, 2, 4, 16, 16])


def test_where_not_all_around_was_measured_the_nearest_point_counts() -> None:
    """Long sequences of one sample, short ones of four: nothing is known of four long ones."""
    points = {(0.0, 0.0, 0.0): 1.0, (log(4), 0.0, 0.0): 2.0, (0.0, log(4), 0.0): 5.0}
    assert Corrections(points).at(3.5, 2, 1) == 2.0
    assert Corrections(points).at(2, 3.5, 1) == 5.0


def slow_but(size: int, tp: int) -> ProfiledLayerCost:
    """Every layer of 1 to 4 samples took three times as long as estimated, but for one size in shards of one degree."""
    cost, layers = LayerCost(TINY, CORE, 128, "fp32"), []
    for own, degree in product((1, 2, 3, 4), (1, 2)):
        factor, plain = 1.0 if (own, degree) == (size, tp) else 3.0, cost.layer(own, degree)
        place = {"micro_batch": own, "seq_len": 128, "tp": degree}
        layers.append({**place, "forward_seconds": factor * plain.forward, "backward_seconds": factor * plain.backward})
    device = {"accelerator": "CPU-core", "precision": "fp32", "layers": layers}
    return ProfiledLayerCost(TINY, CORE, 128, "fp32").use(profile(devices=[device]).devices[0])


@pytest.mark.parametrize(("size", "tp"), [(3, 1), (4, 2), (3, 2)])
def test_the_ceiling_looks_at_every_size_and_share_for_what_was_measured(size: int, tp: int) -> None:
    measured, plain = slow_but(size, tp), LayerCost(TINY, CORE, 128, "fp32").layer(size, tp)
    assert measured.layer(size, tp).total == pytest.approx(plain.total)
    assert measured.layer(2, tp).total == pytest.approx(3 * LayerCost(TINY, CORE, 128, "fp32").layer(2, tp).total)
    assert measured.best_layer_samples_per_second(4) == pytest.approx(size / tp / plain.total)


@pytest.mark.parametrize("seq_len", [1, 20, 32, 100, 1000, 2048, 4095])
@pytest.mark.parametrize("accelerator", ["A100-SXM4-80GB", "MI250X-GCD"])
def test_no_microbatch_is_faster_than_the_ceiling(accelerator: str, seq_len: int) -> None:
    """Of 13 sequences of 32 tokens no more than 12 fill whole lines of memory: they were 7 % faster than the ceiling."""
    cost = LayerCost(LLAMA_8B, find_accelerator(accelerator), seq_len, "bf16")
    for most in (7, 13, 33, 65):
        fastest = max(size / cost.layer(size).total for size in range(1, most + 1))
        assert cost.best_layer_samples_per_second(most) == pytest.approx(fastest)


def test_an_estimate_in_a_profiles_form_reaches_the_largest_microbatch() -> None:
    found = estimated_device(TINY, CORE, 128, "fp32", 6)
    points = [(timing.micro_batch, timing.tp) for timing in found.layers]
    assert points == list(product((1, 2, 4, 6), (1, 2, 4)))


def test_a_head_of_few_words_takes_time_in_its_forward() -> None:
    """Cut in four it had less than none: what its backward passes on was counted as longer than all of it."""
    model = TINY.replace(hidden=2048, heads=8, kv_heads=8, vocab=512)
    for name, tp in product(("T4", "MI250X-GCD", "A100-SXM4-80GB"), (1, 2, 4, 8)):
        assert LayerCost(model, find_accelerator(name), 2048, "fp16").head(8, 1.0 / tp).forward > 0
        assert estimated_device(model, find_accelerator(name), 2048, "fp16", 8).parts


def test_of_several_ways_of_a_level_the_slowest_counts() -> None:
    ways = [
        LinkTiming(level="in_node", operation="send", latency_seconds=0.0, gbytes_per_second=rate)
        for rate in (3.0, 2.0, 4.0)
    ]
    found = profile(links=[way.to_dict() for way in ways]).link("in_node", "send")
    assert found == ways[1]


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_measured_backward_hides_as_much_more_of_its_sums(factor: float) -> None:
    """Of a layer that takes three times as long, what runs beside its sums does too."""
    plain, measured = LayerCost(TINY, CORE, 128, "fp32"), ProfiledLayerCost(TINY, CORE, 128, "fp32")
    measured.use(profile(factor).devices[0])
    hidden = [2 * 1.0 - cost.sums_beside_weights(2, 2, 0.5, 1.0, 0.0) for cost in (plain, measured)]
    assert hidden[0] > 0
    assert hidden[1] == pytest.approx(factor * hidden[0])


def test_beyond_the_measured_points_it_says_so() -> None:
    measured = ProfiledLayerCost(TINY, CORE, 128, "fp32").use(profile().devices[0])
    assert measured.layer(8).total == pytest.approx(
        2 * measured.layer(4).total
    )  # a sample gets no cheaper than measured
    assert measured.extrapolated


@pytest.mark.parametrize("largest", [5, 7, 8, 9, 16, 64])
def test_a_sample_of_the_largest_measured_microbatch_and_of_larger_ones_costs_what_was_measured(largest: int) -> None:
    """8 is more than exp(log(8)): such a size was priced as 8 less a trifle, whose tokens fill no line of memory, 9 % more."""
    device = find_accelerator("A100-SXM4-80GB")
    plain = LayerCost(LLAMA_8B, device, 2048, "bf16")
    measured = ProfiledLayerCost(LLAMA_8B, device, 2048, "bf16")
    measured.use(estimated_device(LLAMA_8B, device, 2048, "bf16", largest))
    for times in (1, 2, 3):
        assert measured.layer(times * largest).total == pytest.approx(times * plain.layer(largest).total)
        assert sum(measured.head(times * largest)) == pytest.approx(times * sum(plain.head(largest)))


def test_a_device_that_is_slower_steps_slower_by_its_own_factor() -> None:
    """As a run has shown of layers and of the optimizer, each beside the profile."""
    for own in (profile().devices[0], profile().devices[0].replace(optimizer_seconds_per_parameter=1e-9)):
        first, again = (
            ProfiledLayerCost(TINY, CORE, 128, "fp32").use(of) for of in (own, own.slower(2.0, optimizer=5.0))
        )
        assert again.layer(2).total == pytest.approx(2 * first.layer(2).total)
        assert again.optimizer(1e6) == pytest.approx(5 * first.optimizer(1e6))
        twice = own.slower(2.0, optimizer=5.0).slower(3.0)
        assert twice.optimizer_factor == pytest.approx(3 * 5)


def test_prediction_takes_the_profile() -> None:
    plain, measured = predict(LAYOUT), predict(LAYOUT, profile=profile())
    assert 2 * plain.breakdown["compute"] < measured.breakdown["compute"] < 3 * plain.breakdown["compute"]
    assert not measured.extrapolated
    assert measured.percent_of_ceiling <= 100


def test_an_accelerator_that_a_plan_leaves_unused_makes_its_interval_no_wider() -> None:
    stranger = cluster(("CPU-core", 1, 4), ("A100-SXM4-80GB", 1, 1))
    beside = LAYOUT.plan.replace(unused=(4,))
    alone, mixed = (predict(each, profile=profile()) for each in (LAYOUT, bind(beside, TINY, stranger)))
    assert mixed.step_seconds == alone.step_seconds
    assert mixed.step_seconds_interval == alone.step_seconds_interval


def test_the_ceiling_is_each_profiles_own_and_no_prediction_is_marked_by_anothers_questions() -> None:
    fast, slow = (predict(LAYOUT, profile=profile(factor)).ceiling_tokens_per_second for factor in (3.0, 6.0))
    assert fast == pytest.approx(2 * slow)
    beyond = uniform(TINY, LAYOUT.cluster, tp=1, pp=2, micro_batch=8, batch=16, seq=128, precision="fp32")
    marks = [predict(layout, profile=profile()).extrapolated for layout in (LAYOUT, beyond, LAYOUT)]
    assert marks == [False, True, False]


def test_measured_links_replace_the_data_sheet() -> None:
    link = {"level": "in_node", "operation": "send", "latency_seconds": 0.5, "gbytes_per_second": 1.0}
    assert predict(LAYOUT, profile=profile(links=[link])).breakdown["pp"] > 0.5


def test_another_model_is_refused() -> None:
    layout = uniform(
        LLAMA_8B, cluster(("CPU-core", 1, 4)), tp=1, pp=2, micro_batch=2, batch=16, seq=128, precision="fp32"
    )
    with pytest.raises(BadInput, match="measured layers of model 'tiny' with hidden 64"):
        predict(layout, profile=profile())


def test_another_version_is_refused() -> None:
    with pytest.raises(BadInput, match="measured by hethub 0, this is"):
        predict(LAYOUT, profile=profile(hethub="0"))


def test_round_trip_and_faults(tmp_path: Path) -> None:
    save_profile(profile(), tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile()
    (tmp_path / "bad.json").write_text(json.dumps({**profile().to_dict(), "devices": []}))
    with pytest.raises(BadInput, match="devices"):
        load_profile(tmp_path / "bad.json")
    (tmp_path / "worse.json").write_text("{")
    with pytest.raises(BadInput, match="is not valid JSON"):
        load_profile(tmp_path / "worse.json")


def test_merging_keeps_the_slower_of_equal_points() -> None:
    both = merge([profile(2.0), profile(3.0)])
    assert both.devices[0].layers[0].forward_seconds == profile(3.0).devices[0].layers[0].forward_seconds
    slow = profile(2.0).devices[0].layers[0]
    slow = slow.replace(forward_seconds=slow.forward_seconds / 2, backward_seconds=2 * slow.backward_seconds)
    devices = [profile().devices[0].replace(layers=(slow,)).to_dict()]
    assert (
        slow in merge([profile(2.0), profile(devices=devices)]).devices[0].layers
    )  # forward and backward together count
    with pytest.raises(BadInput, match="cannot be merged"):
        merge([profile(), profile(hethub="0")])
    with pytest.raises(BadInput, match="measured layers of model 'llama-8b' with hidden 4096"):
        merge([profile(), profile(model=LLAMA_8B.to_dict())])


def test_merging_is_the_same_in_any_order() -> None:
    """Of heads, embeddings and optimizers the first profile's counted, though another's were slower."""
    one = estimated_device(TINY, CORE, 128, "fp32", 4).replace(
        optimizer_seconds_per_parameter=1e-9, largest_micro_batch=8
    )
    pair = [
        profile(devices=(device.to_dict(),))
        for device in (
            one,
            one.slower(2.0).replace(optimizer_seconds_per_parameter=2e-9, largest_micro_batch=4),
        )
    ]
    assert merge(pair) == merge(pair[::-1]) == pair[1]


def test_merged_measurements_are_as_sure_as_the_least_sure_and_an_update_takes_no_longer_than_the_slowest() -> None:
    """The first profile's half width counted, and one's seconds of an update times the other's factor: 6 ns for 3."""
    usual = packaged().interval["profiled"]
    for given, half_width in (((None, 0.3), 0.3), ((None, usual / 2), None), ((0.1, 0.3), 0.3)):
        pair = [profile(devices=[profile().devices[0].replace(half_width=own)]) for own in given]
        assert [merge(order).devices[0].half_width for order in (pair, pair[::-1])] == [half_width] * 2
    for updates, slowest in ((((2e-9, 1.0), (1e-9, 3.0)), (1e-9, 3.0)), (((None, 5.0), (1e-9, 1.0)), (1e-9, 1.0))):
        keys = ("optimizer_seconds_per_parameter", "optimizer_factor")
        both = [profile(devices=[profile().devices[0].replace(**dict(zip(keys, own, strict=True)))]) for own in updates]
        for order in (both, both[::-1]):
            assert tuple(getattr(merge(order).devices[0], key) for key in keys) == slowest


def test_measurements_under_unlike_train_compile_are_not_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first profile's word counted for the other's layers too."""
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file, compiled in zip(files, (True, False), strict=True):
        save_profile(profile(devices=[profile().devices[0].replace(compiled=compiled)]), file)
    assert run(["profile", "--merge", *files, "--out", str(tmp_path / "both.json")]) == 2
    told = capsys.readouterr().err
    assert f"{files[1]}: CPU-core was measured in fp32 under unlike train.compile" in told
    assert not (tmp_path / "both.json").exists()


def test_of_points_and_devices_that_stand_twice_in_a_file_the_slower_counts(tmp_path: Path) -> None:
    """The last point counted, and the first device; of links as fast as each other the first one's latency."""
    whole, slow = profile().to_dict(), profile(6.0).to_dict()["devices"][0]
    (device,), ways = whole["devices"], [
        {"level": "in_node", "operation": "send", "latency_seconds": own, "gbytes_per_second": 1.0} for own in (0.1, 0.5)
    ]  # fmt: skip
    twice = {**device, "layers": [*device["layers"], slow["layers"][2]]}
    for devices, expected in (
        ([twice], [twice["layers"][2:] + device["layers"][:2]]),
        ([device, slow], [slow["layers"]]),
    ):
        found = []
        for order in (1, -1):
            given = [{**own, "layers": own["layers"][::order]} for own in devices][::order]
            (tmp_path / "own.json").write_text(json.dumps({**whole, "devices": given, "links": ways[::order]}))
            read = load_profile(tmp_path / "own.json")
            found.append(predict(LAYOUT, profile=read))
            times = {(timing.micro_batch, timing.tp): timing.forward_seconds for timing in read.devices[0].layers}
            for timing in expected[0]:
                key = (timing["micro_batch"], timing["tp"])
                assert times[key] >= timing["forward_seconds"]
        assert found[0].step_seconds == found[1].step_seconds > 0.5


def test_a_key_that_stands_twice_in_a_profile_is_refused(tmp_path: Path) -> None:
    """The last one counted, and what stood under the first was gone without a word; in YAML it is refused."""
    text = json.dumps(profile().to_dict())
    (tmp_path / "own.json").write_text(text[:-1] + ', "links": [], "links": []}')
    with pytest.raises(
        BadInput, match=r"own.json: the profile is not valid JSON: key 'links' is given twice; keep one\."
    ):
        load_profile(tmp_path / "own.json")


@pytest.mark.parametrize("key", ["forward_seconds", "backward_seconds"])
def test_seconds_in_a_mistaken_unit_are_refused_by_their_key(key: str, tmp_path: Path) -> None:
    """The step took nan seconds, for which the cluster's figures were blamed."""
    content = profile().to_dict()
    content["devices"][0]["layers"][0][key] = 1e308
    (tmp_path / "own.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=rf"own.json: devices\[0\].layers\[0\].{key} is 1e\+308"):
        load_profile(tmp_path / "own.json")


def test_a_sliding_window_is_another_model() -> None:
    """Its layers were predicted to take what those without a window were measured to."""
    windowed = TINY.replace(sliding_window=16)
    layout = uniform(windowed, LAYOUT.cluster, tp=1, pp=2, micro_batch=2, batch=16, seq=128, precision="fp32")
    with pytest.raises(BadInput, match="with sliding_window nothing, but model 'tiny' has 16"):
        predict(layout, profile=profile())


def test_profiles_of_several_nodes_are_merged_without_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`hethub profile --merge a.json b.json`, where each was measured on its own node."""
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file, factor in zip(files, (2.0, 3.0), strict=True):
        save_profile(profile(factor), file)
    out = str(tmp_path / "both.json")
    assert run(["profile", "--merge", *files, "--out", out]) == 0
    assert load_profile(out).devices == merge([profile(2.0), profile(3.0)]).devices
    save_profile(profile(2.0, hethub="0.0.1"), files[1])
    assert run(["profile", "--merge", *files, "--out", out]) == 2
    assert "cannot be merged" in capsys.readouterr().err


def test_profiles_of_two_models_are_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message named no file, and advised to predict without the profile."""
    files = [str(tmp_path / name) for name in ("a.json", "b.json", "c.json")]
    for file, model in zip(files, (TINY, TINY, TINY.replace(name="other", hidden=2 * TINY.hidden)), strict=True):
        save_profile(profile(model=model), file)
    out = tmp_path / "all.json"
    assert run(["profile", "--merge", *files, "--out", str(out)]) == 2
    told = f"{files[2]}: the profile measured layers of model 'other' with hidden {2 * TINY.hidden}, but model 'tiny' has {TINY.hidden}; "
    assert told + "run `hethub profile` with this model, or leave the profile out." in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", ["a.json", "b.json", "link.json"])
def test_merged_profiles_take_the_place_of_none_of_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a node had measured was gone, with exit code 0."""
    monkeypatch.chdir(tmp_path)
    for file, factor in (("a.json", 2.0), ("b.json", 3.0)):
        save_profile(profile(factor), file)
    Path("link.json").symlink_to("b.json")
    before = [Path(file).read_bytes() for file in ("a.json", "b.json")]
    assert run(["profile", "--merge", "a.json", "b.json", "--out", name]) == 2
    assert f"{name}: this is the file to read, and would be overwritten; name another file." in capsys.readouterr().err
    assert [Path(file).read_bytes() for file in ("a.json", "b.json")] == before


@pytest.mark.parametrize("option", ["--profile", "--calibrate"])
def test_measurements_under_another_train_compile_are_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were used without a word: no profile said how its layers ran."""
    job = load_job(write_job(tmp_path))
    assert job.cluster is not None
    sequences, seq_len, precision = job.spec.train.batch
    own = profile().replace(
        model=job.model, devices=(estimated_device(job.model, CORE, seq_len, precision, sequences),)
    )
    given = ["plan", str(job.path), option, str(tmp_path / "own.json"), "--set"]
    for compiles, accepts in ((None, (None, True, False)), (True, (True,)), (False, (None, False))):
        known = own if compiles is None else own.as_compiled(job.cluster, compiles)
        save_profile(known, tmp_path / "own.json")
        for wanted in (None, True, False):
            is_refused = run([*given, f"train.compile={json.dumps(wanted)}"]) == 2
            told = capsys.readouterr().err
            assert is_refused == (wanted not in accepts), (compiles, wanted, told)
            assert not is_refused or ("own.json: the profile measured CPU-core" in told and "train.compile" in told)
    size = ["size", str(job.path), "--tokens", "1e9", "--have", str(job.base / "cluster.yaml"), *given[2:4]]
    assert option == "--profile" or run([*size, "--set", "train.compile=true"]) == 2  # counted there without a word
    assert own.as_compiled(job.cluster, None).devices[0].compiled is False  # on a CPU, whatever maker it stands for
