import shutil
import subprocess

import pytest

import harness
from harness.record.provenance import code_version, environment, shown_command, without_folders
from tests.conftest import ROOT


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    (tmp_path / ".gitignore").write_text("results/\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path


def test_a_clean_checkout_is_its_commit(checkout):
    asked = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert asked.stdout.startswith(code_version(checkout)) and len(code_version(checkout)) == 10


def test_every_difference_shows_and_goes_away_again(checkout):
    clean = code_version(checkout)
    (checkout / "code.py").write_text("a = 2\n")
    changed = code_version(checkout)
    (checkout / "new.py").write_text("b = 1\n")
    added = code_version(checkout)
    (checkout / "new.py").write_text("b = 2\n")
    edited = code_version(checkout)
    assert len({clean, changed, added, edited}) == 4
    assert all(version.startswith(f"{clean}+") for version in (changed, added, edited))
    (checkout / "new.py").unlink()
    (checkout / "code.py").write_text("a = 1\n")
    (checkout / "results").mkdir()
    (checkout / "results" / "summary.json").write_text("{}")
    assert code_version(checkout) == clean


def test_runs_anywhere_below_results_leave_the_code_clean(checkout):
    """With the project's own .gitignore: the second job of a sweep is the same code as the first."""
    shutil.copy(ROOT / ".gitignore", checkout)
    subprocess.run(["git", "-C", str(checkout), "add", "."], check=True)
    clean = code_version(checkout)
    for place in ("runs/a", "compare/runs/a", "compare/sweeps/b", "figures"):
        folder = checkout / "results" / place
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
        assert code_version(checkout) == clean, place


def test_a_committed_report_that_grows_leaves_the_code_clean(checkout):
    """Its rows say which code computed them, and the first would make the second one's another."""
    (checkout / ".gitignore").unlink()
    report = checkout / "results" / "reference" / "rows.json"
    report.parent.mkdir(parents=True)
    report.write_text("[]")
    for arguments in (("add", "."), ("commit", "-q", "-m", "a report")):
        subprocess.run(["git", "-C", str(checkout), *arguments], check=True)
    clean = code_version(checkout)
    assert len(clean) == 10
    report.write_text("[1]")
    report.with_name("new.json").write_text("{}")
    assert code_version(checkout) == clean


def test_without_a_commit_or_without_git(tmp_path):
    assert code_version(tmp_path) == f"v{harness.__version__}"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "code.py").write_text("a = 1\n")
    assert code_version(tmp_path).startswith("uncommitted+")


def test_the_environment_names_versions_and_machine():
    found = environment(("numpy", "no-such-package"))
    assert list(found["packages"]) == ["numpy"]
    assert found["num_cores"] >= 1 and found["memory_bytes"] > 1e8 and found["processor"]


def test_a_command_is_shown_without_the_machines_folders():
    shown = shown_command(
        "x.py", ["--out", "/somewhere/results", "results/reference", "--title", "a, b", "--repeats", "3"]
    )
    assert shown == "python x.py --out FOLDER results/reference --title 'a, b' --repeats 3"


def test_overrides_keep_domains_and_brackets_without_folders():
    given = [
        "out=/tmp/x/model",
        "text=[sums:/tmp/data/a.jsonl,verses:/tmp/b.txt,code:python]",
        "held_out=[sums:~/c.jsonl]",
    ]
    shown = without_folders(given)
    assert shown == ["out=model", "text=[sums:a.jsonl,verses:b.txt,code:python]", "held_out=[sums:c.jsonl]"]
