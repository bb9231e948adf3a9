"""Files, bases and overrides become one config, in that order, and nothing in a file is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_overlap.config import (
    ConfigError,
    OverlapConfig,
    dump_config,
    load_launch_config,
    load_overlap_file,
    without_overlap,
)
from tests.config.samples import RIGHT, write


def test_a_base_is_read_first_and_an_override_last(tmp_path: Path) -> None:
    write(tmp_path, f"{RIGHT}megatron_args: [--foo]\n", "base.yaml")
    file = write(tmp_path, "base: base.yaml\nname: child\ntrain: {seq_length: 64, lr: 0.01}\nmegatron_args: [--bar]\n")
    cfg = load_launch_config(file, ["train.lr=0.02"])
    assert (cfg.name, cfg.train.seq_length, cfg.train.lr, cfg.train.iterations) == ("child", 64, 0.02, 5)
    assert cfg.megatron_args == ("--bar",), "a list replaces a list"


def test_bases_are_relative_to_the_file_and_later_ones_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write(inner, "train: {lr: 0.5, seed: 7}\n", "one.yaml")
    write(inner, "train: {lr: 0.25}\n", "two.yaml")
    write(inner, "base: [one.yaml, two.yaml]\n", "both.yaml")
    file = write(tmp_path, f"base: inner/both.yaml\n{RIGHT}")
    monkeypatch.chdir("/")
    train = load_launch_config(file).train
    assert (train.lr, train.seed) == (0.25, 7)


def test_one_base_twice_is_no_cycle(tmp_path: Path) -> None:
    write(tmp_path, RIGHT, "root.yaml")
    write(tmp_path, "base: root.yaml\ntrain: {lr: 0.5}\n", "a.yaml")
    write(tmp_path, "base: root.yaml\ntrain: {seed: 3}\n", "b.yaml")
    assert load_launch_config(write(tmp_path, "base: [a.yaml, b.yaml]\n")).train.seed == 3


def test_tabs_before_values_and_comments(tmp_path: Path) -> None:
    """YAML permits them, and libyaml reads them."""
    write(tmp_path, RIGHT, "root.yaml")
    file = write(tmp_path, "base: root.yaml\ntrain:\n  lr:\t0.5\t# constant\n")
    assert load_launch_config(file).train.lr == 0.5


def test_a_cycle_names_the_files(tmp_path: Path) -> None:
    write(tmp_path, "base: b.yaml\n", "a.yaml")
    file = write(tmp_path, "base: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml: base: b\.yaml: .*\(b\.yaml -> a\.yaml -> b\.yaml\)"):
        load_launch_config(file)


@pytest.mark.parametrize(
    ("text", "value"),
    [("train.lr=1e-4", 1e-4), ("train.lr=3", 3.0), ("train.min_lr=0", 0.0), ("train.seed=9", 9)],
)
def test_an_override_is_yaml(tmp_path: Path, text: str, value: float) -> None:
    cfg = load_launch_config(write(tmp_path), [text])
    assert getattr(cfg.train, text.partition("=")[0].removeprefix("train.")) == value


def test_an_override_makes_sections_and_lists(tmp_path: Path) -> None:
    cfg = load_launch_config(write(tmp_path), ["launch.hosts.hosts=2", "launch.hosts.gbps=1", "megatron_args=[--a, 1]"])
    assert cfg.launch.hosts is not None
    assert cfg.launch.hosts.gbps == 1.0
    assert cfg.megatron_args == ("--a", "1")


def test_an_empty_override_is_null(tmp_path: Path) -> None:
    cfg = load_launch_config(write(tmp_path, f"{RIGHT}overlap: {{timeout_s: 3.0}}\n"), ["overlap.timeout_s="])
    assert cfg.overlap.timeout_s is None


def test_a_star_reaches_every_method(tmp_path: Path) -> None:
    overlap = load_launch_config(write(tmp_path), ["overlap.*.method=none"]).overlap
    methods = {
        overlap.tensor.method,
        overlap.data.method,
        overlap.ulysses.method,
        overlap.expert.method,
        overlap.varlen.method,
    }
    assert methods == {"none"}


@pytest.mark.parametrize("text", ["a: ${oc.env:HOME}", "a: [x, '${b}']", "a: {b: '${now:}'}", "a: ???"])
def test_interpolations_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="no interpolations"):
        load_launch_config(write(tmp_path, f"{RIGHT}{text}\n"))
    with pytest.raises(ConfigError, match="no interpolations"):
        load_launch_config(write(tmp_path), [text.replace(": ", "=", 1)])


def test_a_tag_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(ConfigError):
        load_launch_config(write(tmp_path, f"a: !!python/object/apply:pathlib.Path.touch [{mark}]\n"))
    assert not mark.exists()


@pytest.mark.parametrize("preset", ["gpt_tiny", "llama_tiny"])
def test_a_dumped_config_reads_back_equal(tmp_path: Path, preset: str) -> None:
    cfg = load_launch_config(write(tmp_path), [f"model.preset={preset}", "launch.hosts={hosts: 2, gbps: 0.5}"])
    assert load_launch_config(write(tmp_path, dump_config(cfg), "dump.yaml")) == cfg
    assert load_launch_config(tmp_path / "dump.yaml") == cfg


def test_without_overlap_changes_nothing_else(tmp_path: Path) -> None:
    cfg = load_launch_config(write(tmp_path), ["overlap.tensor.schedule=ring", "overlap.strict=true"])
    off = without_overlap(cfg)
    assert off.name == "sample_baseline"
    assert (off.overlap.tensor.method, off.overlap.ulysses.method, off.overlap.varlen.method) == ("none",) * 3
    assert off.overlap.data.method == "stock", "Megatron's overlap is not part of the plugin"
    assert off.model_copy(update={"name": cfg.name, "overlap": cfg.overlap}) == cfg
    invariant = load_launch_config(write(tmp_path), ["overlap.deterministic=tp_invariant"])
    assert without_overlap(invariant).overlap.deterministic is True
    silent = load_launch_config(write(tmp_path), ["overlap.data.method=none"])
    assert without_overlap(silent).overlap.data.method == "none"


def test_ulysses_without_overlap_is_ulysses_exposed(tmp_path: Path) -> None:
    cfg = load_launch_config(write(tmp_path), ["parallel.context=2", "overlap.ulysses.method=p2p"])
    off = without_overlap(cfg).overlap.ulysses
    assert (off.method, off.schedule) == ("p2p", "serial")
    engine = load_launch_config(
        write(tmp_path),
        ["parallel.context=2", "overlap.ulysses.method=p2p", "train.transformer_impl=transformer_engine"],
    )
    assert without_overlap(engine).overlap.ulysses.schedule == "serial"
    on_gpus = load_launch_config(
        write(tmp_path),
        ["parallel.context=2", "launch.device=cuda", "train.transformer_impl=transformer_engine"],
    )
    assert without_overlap(on_gpus).overlap.ulysses.method == "none", "TransformerEngine's own context parallelism"


def test_the_overlap_of_a_launch_config(tmp_path: Path) -> None:
    file = write(tmp_path, f"{RIGHT}overlap: {{strict: true}}\n")
    overlap, launch = load_overlap_file(file)
    assert (overlap.strict, launch.device) == (True, "cpu")
    assert OverlapConfig.from_yaml(file, ["overlap.strict=false"]).strict is False


@pytest.mark.parametrize(
    "text",
    ["overlap: {tensor: {method: p2p}}", "tensor: {method: p2p}", "tensor: {method: p2p}\ndata: {method: stock}"],
)
def test_the_overlap_alone(tmp_path: Path, text: str) -> None:
    overlap, launch = load_overlap_file(write(tmp_path, text))
    assert (overlap.tensor.method, launch.device) == ("p2p", "cuda")


def test_some_sections_of_a_launch_config(tmp_path: Path) -> None:
    overlap, launch = load_overlap_file(write(tmp_path, "overlap: {strict: true}\nlaunch: {device: cpu}\n"))
    assert (overlap.strict, launch.device) == (True, "cpu")
    assert load_overlap_file(write(tmp_path, "name: nothing_else\n"))[0] == OverlapConfig()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("overlp: {}", "overlp: {}: unknown key; did you mean overlap?"),
        ("overlap: {tensr: {}}", "overlap.tensr: {}: unknown key; did you mean tensor?"),
        ("overlap: {tensor: {method: p2}}", "overlap.tensor.method: p2: use auto, p2p, fused or none"),
        ("strict: 3", "strict: 3: use true or false"),
        ("overlap: {}\nlaunch: {devise: cpu}", "launch.devise: cpu: unknown key; did you mean device?"),
        ("data: {method: p2p}", "data: {'method': 'p2p'}: here it is the data set; write `overlap: {data: ...}`"),
    ],
)
def test_a_wrong_overlap_file(tmp_path: Path, text: str, line: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_overlap_file(file)
    assert str(caught.value).startswith(f"{file}: {line}")


def test_inputs_are_looked_at_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    overrides = [f"data={{kind: text, path: {folder}}}"]
    file = write(tmp_path)
    load_launch_config(file, overrides)
    with pytest.raises(ConfigError, match=r"no file .*text/tokens\.bin"):
        load_launch_config(file, overrides, inputs=True)
    folder.mkdir()
    for ending in (".bin", ".idx"):
        (folder / f"tokens{ending}").touch()
    with pytest.raises(ConfigError, match=r"no readable data\.json"):
        load_launch_config(file, overrides, inputs=True)
    (folder / "data.json").write_text('{"vocab_size": 4000}')
    load_launch_config(file, overrides, inputs=True)
    (folder / "data.json").write_text('{"vocab_size": 4001}')
    with pytest.raises(ConfigError, match=r"model\.vocab_size: 4000: .* at least 4001"):
        load_launch_config(file, overrides, inputs=True)


def test_the_last_file_that_said_a_key_is_named(tmp_path: Path) -> None:
    write(tmp_path, RIGHT, "base.yaml")
    file = write(tmp_path, "base: base.yaml\ntrain: {seq_length: 8k}\n")
    with pytest.raises(ConfigError, match=r"sample\.yaml: train\.seq_length: 8k"):
        load_launch_config(file)
    with pytest.raises(ConfigError, match=r"sample\.yaml \(override\): train\.seq_length: 9k"):
        load_launch_config(file, ["train.seq_length=9k"])
    with pytest.raises(ConfigError, match=r"base\.yaml: train\.global_batch_size: 4"):
        load_launch_config(write(tmp_path, "base: base.yaml\n", "deep.yaml"), ["launch.ranks_per_node=6"])
