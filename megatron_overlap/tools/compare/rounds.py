"""The launches of a comparison: which configs, whether they are comparable, and their interleaved execution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_overlap.config import ConfigError, LaunchConfig, arms, load_launch_config
from megatron_overlap.config.megatron_args import TWO_MICROBATCHES, value_at
from megatron_overlap.config.resources import resource_folder
from megatron_overlap.tools.compare.comparison import WARM_UP_ITERATIONS, Launched
from megatron_overlap.tools.compare.generation import Workload
from megatron_overlap.tools.launch.netlab import NetlabError
from megatron_overlap.tools.launch.plan import CONFIG_FILE, LaunchPlan, changed, execute, plan
from megatron_overlap.tools.launch.processes import OnLine, RunError
from megatron_overlap.tools.launch.run_records import RunRecord, RunRecordError, read_run

# Runs that differ in one of these compute different losses.
_MUST_AGREE = (
    *("data.kind", "data.path", "data.split"),
    *("train.seq_length", "train.global_batch_size", "train.iterations", "train.precision", "train.seed", "train.load"),
    *("train.lr", "train.min_lr", "train.lr_decay_style", "train.lr_decay_iterations", "train.lr_warmup_iterations"),
    *("train.weight_decay", "train.clip_grad"),
)
_UNSAVED = {"save": None, "save_interval": None}  # keys of `train` without checkpoints


@dataclass(frozen=True)
class Selection:
    """The launches of a comparison."""

    configs: tuple[LaunchConfig, ...]  # the reference first
    serial: bool  # the last run sends the messages of the plugin without overlap
    notes: tuple[str, ...]  # the changes made to the configs, for the report


def select(given: Sequence[tuple[str, LaunchConfig]], *, attribute: bool) -> Selection:
    """Complete and check the configs of a comparison by their files. The runs of a single config are its `arms`.

    `attribute` adds a run that sends the messages of the plugin without overlap. Raises ConfigError if they are not
    comparable.
    """
    file, overlapped, configs = _runs_of(given)
    needed = WARM_UP_ITERATIONS + 1
    if overlapped.train.iterations < needed:
        remedy = f"must be at least {needed}: the first {WARM_UP_ITERATIONS} of every launch are not timed"
        raise ConfigError(file, "train.iterations", overlapped.train.iterations, remedy)
    notes = _differences(configs)
    if attribute:
        configs.append(_serial(file, overlapped))
    if any(config.train.save is not None for config in configs):
        notes.append("Checkpoints are not saved (train.save is removed): the runs would write to the same folder.")
        configs = [changed(config, train=_UNSAVED) for config in configs]
    _different_names(file, configs)
    return Selection(tuple(configs), attribute, tuple(notes))


def select_generation(
    given: Sequence[tuple[str, LaunchConfig]],
    *,
    prompt_tokens: Sequence[int] | None,
    batches: Sequence[int],
    new_tokens: int,
    engine: str,
) -> Selection:
    """As `select`, for configs that launch `scripts/generate_gpt.py` with every length of prompts and every batch.

    `prompt_tokens` None: `train.seq_length`, or as many tokens as the model has positions for, and a quarter of it. The
    launches save no checkpoint and record no events. Raises ConfigError as `select` does, and if a config cannot
    generate.
    """
    file, _, configs = _runs_of(given)
    launch = {"entry": str(resource_folder("scripts") / "generate_gpt.py")}
    chosen = []
    for config in configs:
        for key, allowed in (("parallel.context", 1), ("parallel.pipeline", 1), ("overlap.varlen.method", "none")):
            if value_at(config, key) != allowed:
                raise ConfigError(file, key, value_at(config, key), f"must be {allowed} with compare --generate")
        positions = config.model.max_position_embeddings
        most = max(1, min(config.train.seq_length, positions - new_tokens))
        lengths = prompt_tokens or (max(1, most // 4), most)
        longest = max(lengths) + new_tokens
        if longest > positions:
            remedy = f"prompt and new tokens need {longest} positions; give shorter --prompt-tokens"
            raise ConfigError(file, "model.max_position_embeddings", positions, remedy)
        if config.train.tp_comm_overlap:
            continue
        workloads = sorted({Workload(length, batch) for length in lengths for batch in batches})
        arguments = ("--generate-workloads", *map(str, workloads), "--generate-tokens", str(new_tokens))
        args = (*config.megatron_args, *arguments, "--generate-engine", engine)
        chosen.append(changed(config, launch=launch, train=_UNSAVED, overlap={"trace": False}, megatron_args=args))
    _different_names(file, chosen)
    entry = any(config.launch.entry is not None for config in configs)
    notes = ["The model is that of the provided scripts: launch.entry does not run."] if entry else []
    return Selection(tuple(chosen), False, tuple(notes))


def read_training(run_dir: Path, config: LaunchConfig) -> RunRecord:
    """The record of one launch of a training; see `read_run`."""
    record = read_run(run_dir, config.world_size, config.train.iterations)
    if len(record.iterations) <= WARM_UP_ITERATIONS:
        steps = f"{len(record.iterations)} steps; the first {WARM_UP_ITERATIONS} of every launch are not timed"
        raise RunRecordError(f"{run_dir}: it has {steps}")
    return record


def run_rounds[Record](
    configs: Sequence[LaunchConfig],
    rounds: int,
    folder: Path,
    *,
    read: Callable[[Path, LaunchConfig], Record],
    on_launch: Callable[[str], None] = lambda text: None,
    on_line: OnLine | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> list[Launched[Record]]:
    """Launch every config, of different names, once in each round, and read the records.

    Every second round is in reversed order, so that a slow period of the machine affects all configs alike. `folder`
    gets the `run_folder` of each launch. `read` reads its record there, and may raise a RunRecordError. `on_launch` is
    called before each launch with its round and name; for `on_line` and `on_note` see `execute`.

    Raises:
        ConfigError: a config cannot be launched; nothing was started.
        RunError: a launch failed; its processes have ended. The text names the round, the run and the rank.
    """
    numbers = range(1, rounds + 1)
    plans = [[plan(config, run_folder(folder, number, config.name)) for config in configs] for number in numbers]
    records: dict[str, list[Record]] = {config.name: [] for config in configs}
    for number, planned in zip(numbers, plans, strict=True):
        for launched in planned if number % 2 else reversed(planned):
            name = launched.config.name
            on_launch(f"round {number}/{rounds}  {name}")
            try:
                execute(launched, on_line=on_line, on_note=on_note)
                records[name].append(read(launched.run_dir, launched.config))
            except (RunError, NetlabError, RunRecordError) as error:
                raise RunError(f"round {number} of {rounds}, {name}: {error}") from error
    # The network is that of the last launch of a config.
    return [Launched(last.config.name, _link_of(last), tuple(records[last.config.name])) for last in plans[-1]]


def run_folder(folder: Path, number: int, name: str) -> Path:
    """Folder of the launch of one config in one round, counted from 1."""
    return folder / f"round{number}-{name}"


def _link_of(launch_plan: LaunchPlan) -> dict[str, Any]:
    """The network between the ranks of a finished run, from its folder: the launch may have used a fallback."""
    config = load_launch_config(launch_plan.run_dir / CONFIG_FILE)
    if (hosts := config.launch.hosts) is not None:
        described = hosts.model_dump(mode="json", exclude={"fallback"})
        return {"kind": "network namespaces", "description": launch_plan.link, **described}
    if config.launch.device == "cpu":
        return {"kind": "loopback", "description": "loopback without a rate limit"}
    return {"kind": "cuda", "description": launch_plan.link}


def _runs_of(given: Sequence[tuple[str, LaunchConfig]]) -> tuple[str, LaunchConfig, list[LaunchConfig]]:
    """The file and the config with the overlap, and the configs to launch, the reference first."""
    for file, config in given:
        if config.launch.nodes > 1:
            remedy = "compare starts ranks on this node only; use launch --emit-slurm --baseline, then compare --logs"
            raise ConfigError(file, "launch.nodes", config.launch.nodes, remedy)
    if len(given) > 1:
        _same_training(given)
        return *given[1], [config for _, config in given]
    file, overlapped = given[0]
    overlap = overlapped.overlap
    methods = (overlap.tensor.method, overlap.ulysses.method, overlap.expert.method, overlap.varlen.method)
    # The reference uses the data parallel overlap of Megatron too. `auto` needs two copies of the model.
    data = overlap.data.method == "p2p" or (overlap.data.method == "auto" and overlapped.num_weight_copies > 1)
    if not data and all(method == "none" for method in methods):
        remedy = "the config has no overlap to compare with the stock path: set a method, or give two configs"
        raise ConfigError(file, "overlap.tensor.method", overlap.tensor.method, remedy)
    return file, overlapped, [*arms(overlapped)]


def _differences(configs: Sequence[LaunchConfig]) -> list[str]:
    """Notes of the report on runs that may do other work."""
    first = configs[0]
    notes = [
        f"{config.name} has {config.world_size} ranks, {first.name} {first.world_size}."
        for config in configs
        if config.world_size != first.world_size
    ]
    given = [{*config.megatron_args} for config in configs]
    every, shared = set.union(*given), given[0].intersection(*given)
    if different := every - shared - {TWO_MICROBATCHES}:
        notes.append(f"Only some runs have these megatron_args: {' '.join(sorted(different))}.")
    return notes


def _same_training(given: Sequence[tuple[str, LaunchConfig]]) -> None:
    first_file, first = given[0]
    model = [f"model.{name}" for name in type(first.model).model_fields if name != "preset"]
    for file, config in given[1:]:
        for key in (*model, *_MUST_AGREE):
            expected, found = value_at(first, key), value_at(config, key)
            if expected != found:
                remedy = f"must be {expected} as in {first_file}: compared runs must train alike"
                raise ConfigError(file, key, found, remedy)


def _serial(file: str, config: LaunchConfig) -> LaunchConfig:
    """The config with the same messages, during which the ranks compute nothing."""
    parallel, overlap = config.parallel, config.overlap
    sections: dict[str, Any] = {}
    if parallel.tensor > 1 and overlap.tensor.method in ("auto", "p2p"):
        sections["tensor"] = {**overlap.tensor.model_dump(), "method": "p2p", "schedule": "serial"}
    if parallel.context > 1 and overlap.ulysses.method != "none":
        sections["ulysses"] = {**overlap.ulysses.model_dump(), "schedule": "serial"}
    if config.expert_parallel_size > 1 and overlap.expert.method != "none":
        sections["expert"] = {"method": "p2p", "schedule": "serial"}
    if not sections:
        remedy = "compare --attribute needs method p2p or auto of tensor, ulysses or expert, and ranks that share it"
        raise ConfigError(file, "overlap.tensor.method", overlap.tensor.method, remedy)
    return changed(config, name=f"{config.name}_serial", overlap=sections)


def _different_names(file: str, configs: Sequence[LaunchConfig]) -> None:
    names = [config.name for config in configs]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(file, "name", name, "two configs have this name; their runs would share a folder")
