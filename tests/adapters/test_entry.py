"""`python -m megatron_overlap`: an invalid request prints one line and exits with code 2."""

from pathlib import Path

import pytest

from tests.adapters.megatron_runs import start_ranks


def test_te_layers_without_te_name_the_remedy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('must not run')\n")
    flags = ["--overlap-device", "cpu", "--transformer-impl", "transformer_engine"]
    (done,) = start_ranks(1, [str(script), *flags], env={"MEGATRON_OVERLAP_TE": str(tmp_path)}, timeout_s=60)
    assert done.returncode == 2, done.stdout
    assert "scripts/setup.sh te" in done.stdout


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "the first argument must be the training script"),
        (["--overlap-config", "x.yaml"], "the first argument must be the training script"),
        (["no_such_script.py"], "no_such_script.py: no such script"),
        (["SCRIPT", "--overlap-config", "no_such.yaml"], "no_such.yaml"),
        (["SCRIPT", "--overlap-config"], "--overlap-config: expected one argument"),
        (["SCRIPT", "--overlap-device", "tpu"], "invalid choice: 'tpu'"),
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
