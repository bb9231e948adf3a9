"""`python -m megatron_overlap`: an invalid request prints one line and exits with code 2."""

from pathlib import Path

import pytest

from tests.adapters.megatron_runs import PLUGIN_OFF, start_ranks


def test_te_layers_without_te_name_the_remedy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('must not run')\n")
    flags = ["--overlap-device", "cpu", "--transformer-impl", "transformer_engine"]
    (done,) = start_ranks(1, [str(script), *flags], env={"MEGATRON_OVERLAP_TE": str(tmp_path)}, timeout_s=60)
    assert done.returncode == 2, done.stdout
    assert "scripts/setup.sh te" in done.stdout


def test_a_thread_inside_torch_does_not_abort_the_end(tmp_path: Path) -> None:
    """The thread returns to the interpreter every millisecond, as a thread of gloo that releases a tensor does."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, threading, time, torch\n"
        "def work():\n"
        "    while True:\n"
        "        torch.zeros(64, 64) @ torch.zeros(64, 64)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), print('joined'))).start()\n"
        "atexit.register(print, 'exit handler')\n"
    )
    (done,) = start_ranks(1, [str(script), "--overlap-device", "cpu"], env=PLUGIN_OFF, timeout_s=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-2:] == ["joined", "exit handler"]


def test_a_script_that_replaces_a_function_of_megatron_ends_well(tmp_path: Path) -> None:
    """The patches of the plugin cannot be reverted then, and need not: the process ends."""
    script = tmp_path / "script.py"
    script.write_text(
        "from megatron.core import parallel_state\n"
        "inner = parallel_state.initialize_model_parallel\n"
        "parallel_state.initialize_model_parallel = lambda *args, **kwargs: inner(*args, **kwargs)\n"
        "import atexit, megatron_overlap.session as session\n"
        "session.current().add_close(lambda: print('cleaned up'))\n"
    )
    (done,) = start_ranks(1, [str(script), "--overlap-device", "cpu"], timeout_s=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "cleaned up"


def test_a_failed_rank_ends_although_its_log_is_on_a_full_disk(tmp_path: Path) -> None:
    """Otherwise the interpreter would wait for threads, which may wait for peers."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, threading\n"
        "full = os.open('/dev/full', os.O_WRONLY)\n"
        "os.dup2(full, 1), os.dup2(full, 2)\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "raise ValueError('the rank failed')\n"
    )
    (done,) = start_ranks(1, [str(script), "--overlap-device", "cpu"], env=PLUGIN_OFF, timeout_s=60)
    assert done.returncode == 1


def test_a_log_without_utf_8_ends_no_training(tmp_path: Path) -> None:
    """The tables of the report shorten long words with an ellipsis."""
    script = tmp_path / "script.py"
    script.write_text("print('trained')\n")
    (done,) = start_ranks(
        1, [str(script), "--overlap-device", "cpu"], env={"PYTHONIOENCODING": "latin-1"}, timeout_s=60
    )
    assert done.returncode == 0, done.stdout
    assert "trained" in done.stdout.splitlines()


def test_only_the_report_at_the_end_names_features_without_a_call(tmp_path: Path) -> None:
    """At the start the line would read as if the plugin had refused the feature."""
    script, config = tmp_path / "script.py", tmp_path / "overlap.yaml"
    script.write_text("print('trained')\n")
    config.write_text("tensor: {method: p2p}\n")
    argv = [str(script), "--overlap-device", "cpu", "--overlap-config", str(config)]
    (done,) = start_ranks(1, argv, timeout_s=60)
    assert done.returncode == 0, done.stdout
    start, end = done.stdout.split("trained")
    assert "megatron_overlap is active" in start
    assert "no call on this rank" not in start
    assert "not overlapped: overlap.tensor: no call on this rank" in end


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "the first argument must be the training script"),
        (["--overlap-config", "x.yaml"], "the first argument must be the training script"),
        (["no_such_script.py"], "no_such_script.py: no such script"),
        (["SCRIPT", "--overlap-config", "no_such.yaml"], "no_such.yaml"),
        (["SCRIPT", "--overlap-config"], "--overlap-config: missing: expected one argument"),
        (["SCRIPT", "--overlap-device", "tpu"], "--overlap-device: invalid choice: 'tpu'"),
        (["SCRIPT", "--overlap-config", "TYPO"], "tensr"),
        (["SCRIPT", "--overlap-device", "cpu", "--overlap-run-dir", "SCRIPT"], "--overlap-run-dir"),
    ],
)
def test_an_invalid_request_prints_one_line(argv: list[str], told: str, tmp_path: Path) -> None:
    files = {
        "SCRIPT": ("script.py", "raise SystemExit('must not run')\n"),
        "TYPO": ("typo.yaml", "overlap: {tensr: {method: p2p}}\n"),
    }
    for name, text in files.values():
        (tmp_path / name).write_text(text)
    resolved = [str(tmp_path / files[word][0]) if word in files else word for word in argv]
    (done,) = start_ranks(1, resolved, timeout_s=60)
    assert done.returncode == 2, done.stdout
    assert len(done.stdout.splitlines()) == 1, done.stdout
    assert told in done.stdout
