"""Errors in configs and command lines: one line with file, key, value and remedy, and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_overlap import cli
from tests.config.samples import RIGHT, write


@dataclass(frozen=True)
class Wrong:
    """One wrong input.

    Attributes:
        name: name of the case.
        key, value, remedy: parts of the line; remedy may be a substring.
        overrides: arguments after the config.
        text: the config; empty: the valid one.
        file: text before the first colon; empty: the path of the config.
    """

    name: str
    key: str
    value: str
    remedy: str
    overrides: tuple[str, ...] = ()
    text: str | bytes = ""
    file: str = ""


def override(name: str, key: str, value: str, remedy: str, *overrides: str) -> Wrong:
    """A wrong `key=value` for a valid config."""
    return Wrong(name, key, value, remedy, overrides or (f"{key}={value}",))


def edited(name: str, key: str, value: str, remedy: str, old: str, new: str) -> Wrong:
    """The valid config with one changed passage."""
    assert old in RIGHT
    return Wrong(name, key, value, remedy, text=RIGHT.replace(old, new))


UNREADABLE = [
    Wrong("scalar", "hello", "null", "use one of name, model", text="hello"),
    Wrong("list", "(file)", "- a - b", "a config is a mapping", text="- a\n- b\n"),
    Wrong("open bracket", "line 2", "b: 2", "is not valid YAML", text="a: [1\nb: 2\n"),
    Wrong("same key twice", "line 2", "name: b", "found duplicate key name", text="name: a\nname: b\n"),
    Wrong("tab", "line 2", "lr: 1", "is not valid YAML", text="train:\n\tlr: 1\n"),
    Wrong("bytes", "(file)", "sample.yaml", "give a YAML file", text=b"\xff\xfe\x00"),
    Wrong("nothing", "model", "null", "missing; give a section", text="# nothing\n"),
    Wrong("number as key", "7", "seven", "keys are names", text="7: seven\n"),
    Wrong("python tag", "line 1", "a: !!python/object/apply:os.system [ls]", "is not valid YAML",
          text="a: !!python/object/apply:os.system [ls]\n"),
    Wrong("base of itself", "base", "sample.yaml", "cannot include itself", text="base: sample.yaml\n"),
    Wrong("base that is not there", "base", "other.yaml", "no such file", text="base: other.yaml\n"),
    Wrong("base of a wrong type", "base", "3", "give one file name or a list", text="base: 3\n"),
    Wrong("environment", "name", "${oc.env:HOME}", "no interpolations", text="name: ${oc.env:HOME}\n"),
]  # fmt: skip
WRONG_KEYS = [
    edited("section", "trian", "{'seq_length': 128,", "did you mean train?", "train:", "trian:"),
    edited("key", "train.seq_lenght", "128", "did you mean seq_length?", "seq_length", "seq_lenght"),
    edited("device", "launch.devise", "cpu", "did you mean device?", "device", "devise"),
    edited("missing key", "train.iterations", "null", "missing; use a whole number", "  iterations: 5\n", ""),
    edited("missing section", "model", "null", "missing; give a section", "model: {preset: llama_tiny}\n", ""),
    edited("bare model", "model.arch", "null", "or name a model.preset", "preset: llama_tiny", "num_layers: 2"),
    override("nested", "overlap.tensor.methd", "p2p", "did you mean method?"),
    override(
        "keys over a list",
        "train.seq_length",
        "{'a': 1}",
        "use a whole number",
        "train.seq_length=[1, 2]",
        "train.seq_length={a: 1}",
    ),
    override("list over keys", "train", "[1]", "give a section with keys such as seq_length", "train=[1]"),
    override("every method", "overlap.tensor.methd", "none", "did you mean method?", "overlap.*.methd=none"),
    override("hosts", "launch.hosts.gbsp", "1", "did you mean gbps?", "launch.hosts.gbsp=1", "launch.hosts.hosts=2"),
]
WRONG_VALUES = [
    edited("text for a number", "train.seq_length", "8k", "use a whole number >= 1", "128", "8k"),
    edited("quoted number", "parallel.tensor", "2", "use a whole number >= 1", "tensor: 2", "tensor: '2'"),
    edited("scalar for a section", "launch", "cpu", "give a section with keys", "{device: cpu}", "cpu"),
    edited("null section", "parallel", "null", "give a section with keys", "{tensor: 2, sequence_parallel: true}", ""),
    override("base 60", "launch.slurm.time", "12:00:00", "put it in quotes"),
    override("base 8", "train.seq_length", "0100", "write it without the zero"),
    edited("base 8 in a file", "line 3", "010", "write it without the zero", "tensor: 2", "tensor: 010"),
    override("fraction", "train.iterations", "2.5", "use a whole number >= 1"),
    override("number for a switch", "overlap.strict", "1", "use true or false"),
    override("negative", "train.lr", "-0.1", "use a number > 0"),
    override("infinite", "train.weight_decay", "inf", "use a number >= 0", "train.weight_decay=.inf"),
    override("choice", "train.precision", "fp8", "use fp32, bf16 or fp16"),
    override("zero chunks", "overlap.tensor.chunks_per_rank", "0", "use auto or a whole number >= 1"),
    override("preset", "model.preset", "lama_tiny", "did you mean llama_tiny?"),
    override("name", "name", "a/b", "it names a folder"),
    override("long name", "name", "x...x", "200 bytes at most", f"name={'x' * 201}"),
    override("long folder", "launch.output_dir", "runs/x", "200 bytes at most", f"launch.output_dir=runs/{'x' * 201}"),
    override(
        "many hosts",
        "launch.hosts.hosts",
        "252",
        "use a whole number >= 1 and <= 250",
        "launch.hosts={hosts: 252, gbps: 1}",
    ),
    override("rate", "launch.hosts.gbps", "0", "use a number >= 0.001", "launch.hosts={hosts: 2, gbps: 0}"),
    override("split", "data.split", "90,nine", "give up to three weights"),
    override("arguments", "megatron_args", "--foo", "use a list of texts"),
]
IMPOSSIBLE = [
    override("sp alone", "parallel.sequence_parallel", "true", "use false with tensor 1", "parallel.tensor=1"),
    override("heads", "model.num_attention_heads", "9", "multiple of parallel.tensor 2",
             "model.num_attention_heads=9", "model.num_query_groups=9", "model.kv_channels=32"),
    override("hidden by heads", "model.hidden_size", "260", "multiple of model.num_attention_heads 8"),
    override("groups by heads", "model.num_query_groups", "3", "must divide model.num_attention_heads 8"),
    override("groups by ranks", "model.num_query_groups", "6", "multiple or a divisor of parallel.tensor 4",
             "model.num_query_groups=6", "model.num_attention_heads=12", "model.kv_channels=32", "parallel.tensor=4"),
    override("ffn", "model.ffn_hidden_size", "687", "multiple of parallel.tensor 2"),
    override("layers", "model.num_layers", "3", "multiple of parallel.pipeline 2",
             "model.num_layers=3", "parallel.pipeline=2"),
    override("sequence by ranks", "train.seq_length", "127", "multiple of parallel.tensor x parallel.context = 2"),
    override("too long", "train.seq_length", "2048", "must not exceed model.max_position_embeddings 1024"),
    override("batch", "train.global_batch_size", "5", "= 1 x 2 = 2",
             "train.global_batch_size=5", "launch.ranks_per_node=4"),
    override("ranks", "launch.ranks_per_node", "3", "use a multiple of 2 ranks"),
    override("hosts and ranks", "launch.ranks_per_node", "2", "remove this key",
             "launch.hosts={hosts: 2, gbps: 1}", "launch.ranks_per_node=2"),
    override("hosts by ranks", "launch.hosts.hosts", "3", "use a multiple of 2", "launch.hosts={hosts: 3, gbps: 1}"),
    override("hosts on cuda", "launch.device", "cuda", "needs cpu",
             "launch.device=cuda", "launch.hosts={hosts: 2, gbps: 1}"),
    override("context", "parallel.context", "2", "no context parallelism; use 1, overlap.ulysses.method=p2p or",
             "parallel.context=2", "launch.ranks_per_node=4"),
    override("context of TE on the CPU", "parallel.context", "2", "context parallelism needs launch.device",
             "parallel.context=2", "launch.ranks_per_node=4", "train.transformer_impl=transformer_engine"),
    override("ulysses alone", "overlap.ulysses.method", "p2p", "needs parallel.context of 2 or more"),
    override("ulysses heads", "model.num_attention_heads", "8", "parallel.tensor x parallel.context = 16",
             "parallel.context=8", "overlap.ulysses.method=p2p"),
    override("ulysses dropout", "model.attention_dropout", "0.1", "use 0 with overlap.ulysses",
             "parallel.context=2", "overlap.ulysses.method=auto", "model.attention_dropout=0.1"),
    override("batch overlap with fused", "overlap.tensor.split", "batch", "fused does not split the batch; use p2p",
             "overlap.tensor.method=fused", "overlap.tensor.split=batch"),
    override("batch overlap with query split", "overlap.tensor.split", "batch", "query_split does not split the batch",
             "overlap.tensor.method=p2p", "overlap.tensor.split=batch", "overlap.tensor.attention=query_split"),
    override("batch overlap of an odd batch", "train.micro_batch_size", "1", "must be even",
             "overlap.tensor.split=batch",
             "overlap.tensor.method=p2p", "parallel.sequence_parallel=false"),
    override("ulysses groups", "overlap.ulysses.head_groups", "0", "use auto or a whole number >= 1"),
    override("ulysses schedule", "overlap.ulysses.schedule", "ring", "use auto, direct or serial"),
    override("min_lr", "train.min_lr", "1.0", "must not exceed train.lr"),
    override("warm-up", "train.lr_warmup_iterations", "5", "less than the 5 iterations"),
    override("fp16 on cpu", "train.precision", "fp16", "use bf16 or fp32"),
    override("nodes on cpu", "launch.nodes", "2", "one node"),
    override("engine overlaps too", "train.tp_comm_overlap", "true", "use false, or overlap.tensor.method=none",
             "launch.device=cuda", "train.transformer_impl=transformer_engine", "train.tp_comm_overlap=true"),
    override("engine overlaps on cpu", "train.tp_comm_overlap", "true", "needs launch.device cuda",
             "train.transformer_impl=transformer_engine", "train.tp_comm_overlap=true", "overlap.tensor.method=none"),
    override("engine overlaps local layers", "train.tp_comm_overlap", "true", "needs launch.device cuda, train.transf",
             "launch.device=cuda", "train.tp_comm_overlap=true", "overlap.tensor.method=none"),
    override("fusion on cpu", "train.gradient_accumulation_fusion", "true", "use false or null"),
    override("interval alone", "train.save_interval", "5", "needs train.save"),
    override("path of mock data", "data.path", "corpus", "reads no file"),
    override("no path", "data.path", "null", "needs the prefix", "data.kind=indexed"),
    override("flag of a key", "megatron_args.0", "--lr", "train.lr, now 0.0003, sets this flag",
             "megatron_args=[--lr, '0.1']"),
    override("flag with a value", "megatron_args.1", "--seq-length=64", "train.seq_length, now 128",
             "megatron_args=[--foo, --seq-length=64]"),
    override("flag of the device", "megatron_args.0", "--attention-backend", "launch.device, now cpu",
             "megatron_args=[--attention-backend, flash]"),
    override("other parser", "megatron_args.0", "--yaml-cfg", "remove it", "megatron_args=[--yaml-cfg, x.yaml]"),
]  # fmt: skip
NOT_THERE = [
    override("data", "data.path", "nowhere/x", "no file nowhere/x.bin", "data={kind: indexed, path: nowhere/x}"),
    override("text", "data.path", "nowhere", "scripts/prepare_data.py --output nowhere",
             "data={kind: text, path: nowhere}"),
    override("script", "launch.entry", "nowhere.py", "give a training script"),
    override("checkpoint", "train.load", "nowhere", "give a folder of checkpoints"),
]  # fmt: skip
WRONG_OVERRIDES = [
    override("no equals sign", "train.lr", "train.lr", "write an override as key=value", "train.lr"),
    override("no key", "(empty)", "=3", "name the key with dots", "=3"),
    override("empty part", "train..lr", "train..lr=1", "name the key with dots", "train..lr=1"),
    override("no YAML", "train.lr", "[1", "is not a valid YAML value"),
    override("below a number", "train.lr", "{'x': 1}", "use a number > 0", "train.lr.x=1"),
    override("base", "base", "other.yaml", "overrides cannot set base"),
]

COMPOSED = [*UNREADABLE, *WRONG_KEYS, *WRONG_VALUES, *IMPOSSIBLE, *NOT_THERE, *WRONG_OVERRIDES]

COMMAND = "command line"
COMMAND_LINES = {
    "no command": ([], COMMAND, "command", "missing", "use one of launch, compare"),
    "command": (["lunch"], COMMAND, "command", "lunch", "did you mean launch?"),
    "option before": (["--verson"], COMMAND, "option", "--verson", "did you mean --version?"),
    "option": (["launch", "x.yaml", "--dry-rnu"], COMMAND, "launch", "--dry-rnu", "did you mean --dry-run?"),
    "dashes": (["launch", "x.yaml", "--train.lr=1"], COMMAND, "launch", "--train.lr", "without dashes"),
    "no config": (["launch"], COMMAND, "launch", "missing", "give CONFIG"),
    "argument": (["schema", "x.yaml"], COMMAND, "schema", "x.yaml", "takes no such argument"),
    "no configs": (["compare"], COMMAND, "compare", "missing", "give CONFIGS"),
    "range": (["compare", "x.yaml", "--rounds", "0"], COMMAND, "compare --rounds", "0", "see megatron-overlap"),
    "type": (["compare", "x.yaml", "--rounds=two"], COMMAND, "compare --rounds", "two", "integer"),
    "no value": (["launch", "x.yaml", "--run-dir"], COMMAND, "launch --run-dir", "missing", "requires an argument"),
    "option of patches": (["patches", "--foo"], COMMAND, "patches", "--foo", "use one of --megatron"),
    "nothing to compare": (["compare", "nowhere.yaml"], COMMAND, "CONFIG", "nowhere.yaml", "no such file"),
    "no file": (["launch", "nowhere.yaml"], COMMAND, "CONFIG", "nowhere.yaml", "or a name such as"),
    "folder": (["launch", "/"], COMMAND, "CONFIG", "/", "no such file or shipped config"),
}


def check_line(stderr: str, file: str, key: str, value: str, remedy: str) -> None:
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    start = f"{file}: {key}: "
    assert lines[0].startswith(start), lines[0]
    rest = lines[0].removeprefix(start)
    shown, _, advice = rest.partition(": ")
    if rest.startswith(value):  # a value may hold a colon itself
        shown, advice = value, rest.removeprefix(value)
    assert value in shown, lines[0]
    assert remedy in advice, lines[0]


def config_of(wrong: Wrong, folder: Path) -> Path:
    file = write(folder)
    if isinstance(wrong.text, bytes):
        file.write_bytes(wrong.text)
    elif wrong.text:
        file.write_text(wrong.text, encoding="utf-8")
    return file


@pytest.mark.parametrize("wrong", COMPOSED, ids=lambda wrong: wrong.name)
def test_config(
    wrong: Wrong, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = config_of(wrong, tmp_path)
    assert cli.main(["launch", str(file), *wrong.overrides]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    # An override that is right about itself may be wrong for a value of the file, and the line names that one.
    check_line(err.replace(" (override)", ""), str(file), wrong.key, wrong.value, wrong.remedy)
    assert [item.name for item in tmp_path.iterdir()] == [file.name], "nothing was started"


@pytest.mark.parametrize("case", COMMAND_LINES)
def test_command_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, file, key, value, remedy = COMMAND_LINES[case]
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    check_line(err, file, key, value, remedy)


@pytest.mark.parametrize("name", ["key", "choice", "sp alone", "bytes"])
def test_as_a_process(name: str, tmp_path: Path) -> None:
    wrong = next(item for item in COMPOSED if item.name == name)
    file = config_of(wrong, tmp_path)
    argv = [sys.executable, "-m", "megatron_overlap.cli", "launch", str(file), *wrong.overrides]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environment()
    )
    assert done.returncode == 2
    assert done.stdout == ""
    check_line(done.stderr.replace(" (override)", ""), str(file), wrong.key, wrong.value, wrong.remedy)


def environment() -> dict[str, str]:
    """This process's, with the package under test in reach of another folder."""
    root = str(Path(cli.__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def test_an_unreadable_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = write(tmp_path, "train: {seq_lenght: 3}\n", "inner.yaml")
    outer = write(tmp_path, f"base: inner.yaml\n{RIGHT}", "outer.yaml")
    assert cli.main(["launch", str(outer)]) == 2
    check_line(capsys.readouterr().err, str(inner), "train.seq_lenght", "3", "did you mean seq_length?")


def test_an_override_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path)
    assert cli.main(["launch", str(file), "train.lr=x"]) == 2
    check_line(capsys.readouterr().err, f"{file} (override)", "train.lr", "x", "use a number > 0")


def test_there_are_enough() -> None:
    assert len(COMPOSED) + len(COMMAND_LINES) >= 30
