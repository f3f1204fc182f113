"""The user's guide: every key is in it as the specs have it, every page is reachable, and what it names is there."""

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from hethub.cli import run
from hethub.commands import reference
from hethub.runtime.launch.launcher_command import LAUNCHERS, LauncherName, launch_commands
from hethub.spec.cluster import load_cluster
from tests.support.command import BIN, HANG_SECONDS, Running
from tests.support.job_files import CLUSTER, MODEL, write_yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_the_reference_of_every_key_is_what_the_specs_say() -> None:
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == reference.page(), (
        "python -m hethub.commands.reference docs/reference.md"
    )


def test_every_page_is_in_the_menu_and_every_entry_is_a_page() -> None:
    menu = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    pages = {path.name for path in DOCS.glob("*.md")} | {"decisions/README.md"}
    assert menu == pages


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_commands_of_the_guide_exist_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages())
    named = set(
        re.findall(
            r"hethub ([a-z]+)(?=[ `\n])", "\n".join(re.findall(r"`hethub [^`]*`|^(?:.*)hethub [a-z]+ .*$", text, re.M))
        )
    )
    used: dict[str, set[str]] = {}
    for command, rest in re.findall(r"hethub ([a-z]+) ([^`\n]*)", text):
        used.setdefault(command, set()).update(re.findall(r"(?<![\w-])--[a-z-]+", rest.split("#")[0]))
    known = {
        "train",
        "plan",
        "predict",
        "size",
        "launch",
        "report",
        "diff",
        "watch",
        "init",
        "export",
        "doctor",
        "profile",
    }
    assert known <= named
    for command in sorted(known & set(used)):
        with pytest.raises(SystemExit):
            run([command, "--help"])
        options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        launchers = {"--oversubscribe", "--continuous", "--host", "--bind-to", "--nproc-per-node", "--max-restarts"}
        assert used[command] - launchers <= options, (command, used[command] - options)


def test_every_file_of_a_run_folder_is_in_the_guide() -> None:
    from hethub.runtime.run_folder import FILES

    page = (DOCS / "operations.md").read_text(encoding="utf-8")
    assert [name for name in (*FILES, "checkpoints", "owner.json") if name not in page] == []


def test_every_key_of_a_line_of_metrics_is_in_the_guide() -> None:
    from hethub.runtime.metrics import StepMetrics

    page = (DOCS / "operations.md").read_text(encoding="utf-8")
    table = page[page.index("### A line of metrics.jsonl") : page.index("## Stopping and going on")]
    named = {key for row in re.findall(r"^\| (`.*?) \|", table, re.M) for key in re.findall(r"`(\w+)`", row)}
    assert named == {field.name for field in fields(StepMetrics)}


def test_the_example_of_measured_steps_is_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```csv\n(.*?)```", (DOCS / "plans.md").read_text(encoding="utf-8"), re.S)
    table = tmp_path / "steps.csv"
    table.write_text(example)
    assert run(["validate", str(table), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in answer["rows"]] == ["one", "two"]
    assert answer["skipped"] == []
    table.write_text(example.replace("step_seconds", "seconds"))
    assert run(["validate", str(table)]) == 2
    assert "docs/plans.md has an example" in capsys.readouterr().err


def test_examples_of_jobs_are_jobs() -> None:
    from hethub.spec.job import JobSpec

    for page in (ROOT / "README.md", DOCS / "jobs.md"):
        (example,) = re.findall(r"```yaml\n(model:.*?)```", page.read_text(encoding="utf-8"), re.S)
        assert JobSpec.model_validate(yaml.safe_load(example)).checkpoint.keep_every == 5000


def examples(page: str, language: str) -> list[str]:
    """The code blocks of a page, those of its lists too, without their indentation."""
    blocks = re.findall(rf"^( *)```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)
    return [textwrap.dedent(block) for _, block in blocks]


def test_the_example_of_a_plan_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (block for block in examples("plans.md", "yaml") if block.startswith("version:"))
    (tmp_path / "plan.yaml").write_text(example)
    nodes = [{**node, "accelerators": 3} for node in CLUSTER["nodes"]]  # type: ignore[attr-defined]
    write_yaml(tmp_path / "cluster.yaml", {"name": "six", "nodes": nodes})
    write_yaml(tmp_path / "model.yaml", {**MODEL, "name": "mini", "layers": 8, "max_seq_len": 128})
    assert run(["predict", str(tmp_path / "plan.yaml"), "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_of_nodes_of_two_makers_starts_under_every_launcher(launcher: LauncherName, tmp_path: Path) -> None:
    (example,) = examples("launching.md", "yaml")
    (tmp_path / "cluster.yaml").write_text(example)
    said = "\n".join(map(str, launch_commands(Path("job.yaml"), load_cluster(tmp_path / "cluster.yaml"), launcher)))
    assert "/opt/hethub-cuda/bin/" in said
    assert "amd1" in said or launcher == "srun"


def test_the_program_over_the_communicator_trains(tmp_path: Path) -> None:
    (program,) = examples("communicator.md", "python")
    (tmp_path / "program.py").write_text(program)
    (command,) = re.findall(r"`(HETHUB_ISLANDS=[^`]*)`", (DOCS / "communicator.md").read_text(encoding="utf-8"))
    ended = Running(["bash", "-c", command], tmp_path, {"PATH": f"{BIN}:{os.environ['PATH']}"}).end(HANG_SECONDS)
    assert ended.exit_code == 0, ended.stderr
    assert len(re.findall(r"rank \d: loss \d", ended.stdout)) == 2


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material: pip install 'hethub[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "site" / "reference" / "index.html").exists()
