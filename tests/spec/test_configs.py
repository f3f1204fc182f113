"""The packaged models and clusters: the published shapes, and every file says where it is from."""

from pathlib import Path

import pytest

from hethub.capacity.catalogue import CatalogueSpec, load_catalogue
from hethub.spec.cluster import load_cluster
from hethub.spec.lookup import load_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(path for kind in ("models", "clusters") for path in (CONFIGS / kind).glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_where_it_is_from(path: Path) -> None:
    assert path.read_text().startswith("# ")
    named = load_cluster(path) if path.parent.name == "clusters" else load_model(path.name, path.parent)
    assert named.name == path.stem


def test_the_catalogue_loads_and_invents_no_price() -> None:
    catalogue = load_catalogue(CONFIGS / "catalogues" / "two-makers.yaml")
    assert catalogue.assumptions == CatalogueSpec.model_fields["assumptions"].default
    assert {node.price_per_hour for node in catalogue.nodes} == {None}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-7b", 6_738_415_616), ("llama-13b", 13_015_864_320), ("llama-33b", 32_528_943_616),
        ("llama-65b", 65_285_660_672), ("llama2-70b", 68_976_648_192), ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800), ("tinyllama-1.1b", 1_100_048_384),
        ("llama-140b", 140_912_111_616),
    ],
)  # fmt: skip
def test_llamas_have_the_published_weights_to_the_last_one(name: str, parameters: int) -> None:
    assert load_model(f"{name}.yaml", CONFIGS / "models").parameters == parameters


def test_llama_140b_is_as_specified() -> None:
    model = load_model("llama-140b.yaml", CONFIGS / "models")
    assert (model.layers, model.hidden, model.heads, model.num_kv_heads) == (96, 12288, 96, 8)
    assert (model.ffn, model.vocab, model.tied_head) == (30720, 32000, False)


def test_hethub_768_is_as_specified() -> None:
    cluster = load_cluster(CONFIGS / "clusters" / "hethub-768.yaml")
    nodes = [(node.device.name, node.count, node.accelerators, node.gbps) for node in cluster.nodes]
    assert nodes == [("MI250X-GCD", 16, 8, 200), ("A100-SXM4-80GB", 80, 8, 200)]
    assert cluster.links.between_islands.gbps_per_node == 100
    assert {island: len(ranks) for island, ranks in cluster.islands.items()} == {"amd": 128, "nvidia": 640}


def test_the_clusters_of_the_literature_are_there() -> None:
    named = {
        "hethub-768": 768, "zorse-a": 20, "zorse-b": 64, "zorse-c": 128, "poplar-a": 8, "poplar-b": 8, "poplar-c": 8,
        "cephalo-paper": 8, "cephalo-aws": 64, "hap-64": 64, "joint-16": 16, "hetu-48": 48, "sailor-mixed": 24,
        "frontier-32": 256, "laptop-mixed": 4,
    }  # fmt: skip
    assert {name: load_cluster(CONFIGS / "clusters" / f"{name}.yaml").size for name in named} == named
