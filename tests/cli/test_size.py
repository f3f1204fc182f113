"""`hethub size` through the command line: a deadline, owned nodes, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import hethub
from hethub.predictor.cost.profile import ProfileSpec, save_profile
from hethub.predictor.cost.profiled_layer import estimated_device
from hethub.spec.accelerator import find_accelerator
from hethub.spec.model import ModelSpec
from tests.support.command import PROJECT, one, ranks
from tests.support.job_files import MODEL, write_job, write_yaml

CATALOGUE: dict[str, Any] = {
    "currency": "EUR",
    "date": "2026-01-01",
    "nodes": [
        {"name": "big", "accelerator": "A100-SXM4-80GB", "accelerators": 8, "count": 2, "price_per_hour": 20.0, "gbps_per_nic": 200},
        {"name": "small", "accelerator": "T4", "accelerators": 2, "count": 2, "price_per_hour": 1.0, "gbps_per_nic": 25},
    ],
}  # fmt: skip


def ask(folder: Path, *arguments: Any) -> Any:
    job = write_job(folder, constraints={"time_limit_seconds": 1})
    return one(ranks(1, "size", job, "--set", "plan=auto", *arguments, cwd=folder))


def test_a_deadline_is_met_by_the_cheapest(tmp_path: Path) -> None:
    catalogue = write_yaml(tmp_path / "catalogue.yaml", CATALOGUE)
    ended = ask(tmp_path, "--tokens", "1e9", "--deadline", 100, "--catalogue", catalogue, "--json")
    assert ended.exit_code == 0, ended.stderr
    answer = json.loads(ended.stdout)
    meeting = [option for option in answer["options"] if option["meets"] == "likely"]
    assert meeting
    assert meeting[0]["cost"] == min(option["cost"] for option in meeting)
    assert all(option["days"] <= option["days_interval"][1] <= 100 for option in meeting)
    assert answer["currency"] == "EUR"
    guide = (PROJECT / "docs" / "capacity.md").read_text()
    assert not [key for key in {**answer, **meeting[0]} if f"`{key}`" not in guide]  # no page said what they are


def test_a_job_s_plan_file_is_not_left_aside_without_a_word(tmp_path: Path) -> None:
    catalogue = write_yaml(tmp_path / "catalogue.yaml", CATALOGUE)
    job = write_job(tmp_path, constraints={"time_limit_seconds": 1})
    ended = one(ranks(1, "size", job, "--tokens", "1e9", "--catalogue", catalogue, "--json", cwd=tmp_path))
    assert json.loads(ended.stdout)["options"], ended.stderr
    assert f"{tmp_path / 'plan.yaml'}, the job's plan, is left aside" in ended.stderr


def test_dates_need_no_quotes_and_the_catalogue_states_the_mtbf(tmp_path: Path) -> None:
    text = yaml.safe_dump({**CATALOGUE, "assumptions": {"node_mtbf_hours": 500.0}}).replace(
        "'2026-01-01'", "2026-01-01"
    )
    catalogue, page = tmp_path / "catalogue.yaml", tmp_path / "size.html"
    catalogue.write_text(text)
    ended = ask(tmp_path, "--tokens", "1e9", "--deadline", 0.0001, "--catalogue", catalogue, "--out", page)
    assert ended.exit_code == 0, ended.stderr
    for words in ("prices of 2026-01-01", "node_mtbf_hours 500", "MWh (assumed)", "none of the options; the fastest, "):
        assert words in ended.stdout
        assert words in page.read_text()
    assert "<circle" in page.read_text()


def test_a_node_without_a_link_speed_is_left_out_by_name(tmp_path: Path) -> None:
    nodes = [CATALOGUE["nodes"][1], {**CATALOGUE["nodes"][0], "gbps_per_nic": None}]
    catalogue = write_yaml(tmp_path / "catalogue.yaml", {**CATALOGUE, "nodes": nodes})
    ended = ask(tmp_path, "--tokens", "1e9", "--catalogue", catalogue)
    assert ended.exit_code == 0, ended.stderr
    assert "left out 2 big" in ended.stdout
    assert "gbps_per_nic" in ended.stdout


def test_a_size_goes_by_what_the_job_says_of_speeds(tmp_path: Path) -> None:
    """`profile` and `train.compile` changed `hethub plan`'s answers and not these."""
    catalogue = write_yaml(tmp_path / "catalogue.yaml", CATALOGUE)
    measured = estimated_device(ModelSpec(**MODEL), find_accelerator("T4"), 32, "fp32", 8).slower(100.0)
    profile = ProfileSpec(
        date="", hethub=hethub.__version__, software="", model=ModelSpec(**MODEL), devices=(measured,)
    )
    save_profile(profile, tmp_path / "slow.json")
    have = write_yaml(tmp_path / "t4.yaml", {"name": "ours", "nodes": [CATALOGUE["nodes"][1]]})

    def speed(*more: str) -> float:
        ended = ask(tmp_path, "--set", f"cluster={have}", "--tokens", "1e9", "--catalogue", catalogue, "--json", *more)
        assert ended.exit_code == 0, ended.stderr
        options = json.loads(ended.stdout)["options"]
        return float(max(own["tokens_per_second"] for own in options if own["nodes"] == {"small": 1}))

    plain = speed()
    assert speed("--set", "profile=slow.json") < plain / 2
    assert speed("--set", "train.compile=false") < plain


def test_the_next_node_is_ranked_by_price(tmp_path: Path) -> None:
    catalogue = write_yaml(tmp_path / "catalogue.yaml", CATALOGUE)
    have = {"name": "ours", "nodes": [{"name": "t4", "accelerator": "T4", "accelerators": 2, "gbps_per_nic": 25}]}
    owned = write_yaml(tmp_path / "ours.yaml", have)
    ended = ask(tmp_path, "--catalogue", catalogue, "--have", owned, "--add", "--nodes", 2, "--json")
    assert ended.exit_code == 0, ended.stderr
    additions = json.loads(ended.stdout)["additions"]
    assert {(each["node"], each["count"]) for each in additions} == {("big", 2), ("small", 2)}
    gains = [addition["gained_per_price"] for addition in additions]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "-3"], "--tokens -3: give a positive number"),
        (["--tokens", "1e9", "--add"], "--have CLUSTER.yaml"),
        ([], "how many tokens to train on is not said; give --tokens"),
        (["--tokens", "1e9", "--nodes", "4"], "--nodes says how many nodes --add adds at once; give --add too"),
        (["--tokens", "1e9", "--add", "--have", "ours.yaml", "--out", "page.html"], "takes no --out"),  # it was ignored
        (["--tokens", "1e9", "--out", "."], ".: this is a folder, and a file is to be written"),  # said after minutes
        (["--tokens", "1e9", "--budget", "10"], "--budget needs prices, and hethub has none; give --catalogue FILE"),
        # "No cluster of the 15 looked at can train this" was said, and that a job with plan: hap can.
        (
            ["--tokens", "1e9", "--set", "plan=hap"],
            "hethub size plans layers, and strategy 'hap' plans operators; leave it out",
        ),
    ],
)
def test_bad_questions_are_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    ended = ask(tmp_path, *arguments)
    assert ended.exit_code == 2
    assert words in ended.stderr


def test_a_budget_without_a_price_is_refused(tmp_path: Path) -> None:
    """The answer was "for 10 None: none of the options"."""
    nodes = [{**node, "price_per_hour": None} for node in CATALOGUE["nodes"]]
    catalogue = write_yaml(tmp_path / "catalogue.yaml", {"nodes": nodes})
    ended = ask(tmp_path, "--tokens", "1e9", "--budget", "10", "--catalogue", catalogue)
    assert ended.exit_code == 2
    assert "--budget needs prices, and " in ended.stderr


def test_prices_need_a_currency(tmp_path: Path) -> None:
    catalogue = tmp_path / "catalogue.yaml"
    catalogue.write_text(yaml.safe_dump({"nodes": CATALOGUE["nodes"]}))
    ended = ask(tmp_path, "--tokens", "1e9", "--catalogue", catalogue)
    assert ended.exit_code == 2
    assert "currency" in ended.stderr
