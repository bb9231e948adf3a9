"""`megatron-overlap launch`: run a launch config, print its plan, rehearse it on CPUs or write a Slurm batch file.

`megatron-overlap tune`: fill the autotuning cache with a short run of the same job.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.status import Status
from rich.table import Table
from typer import Argument, Context, Option

from megatron_overlap.autotune.search import calls_to_select
from megatron_overlap.config import ConfigError, LaunchConfig, arms, load_launch_config
from megatron_overlap.config.errors import usage_error, writing
from megatron_overlap.config.resources import config_file
from megatron_overlap.counters import AutotuneLine
from megatron_overlap.patching.manifest import load_permits
from megatron_overlap.schedules.heuristics import KNOBS, max_p2p_settings
from megatron_overlap.session_report import autotune_table
from megatron_overlap.tools.launch.downscale import downscale
from megatron_overlap.tools.launch.netlab import NetlabError
from megatron_overlap.tools.launch.plan import LOG_FOLDER, LaunchPlan, batch_file, changed, execute, plan, unused_folder
from megatron_overlap.tools.launch.processes import OnLine, RunError
from megatron_overlap.tools.launch.rehearsal import max_local_ranks, permits_table
from megatron_overlap.tools.launch.rehearsal import rehearse as run_rehearsal
from megatron_overlap.tools.launch.run_records import RunRecordError, deviation

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+)\s*\|")
_FIELDS = {  # name, title in Megatron's line, text of `launch`
    "step_time_ms": ("elapsed time per iteration (ms)", "{} ms"),
    "loss": ("lm loss", "lm loss {}"),
    "grad_norm": ("grad norm", "grad norm {}"),
    "tflops": ("throughput per GPU (TFLOP/s/GPU)", "{} TFLOP/s per device"),
    "skipped": ("number of skipped iterations", "skipped {}"),
    "global_batch": ("global batch size", ""),
}
# Another field, or the end of the line, follows: the last line of a killed run may end anywhere.
_PATTERNS = {
    name: re.compile(rf"{re.escape(title)}:\s*([-+.\deEnaifNAIF]+)[^|]*\|") for name, (title, _) in _FIELDS.items()
}
_EVENTS = re.compile(r"validation loss at|successfully (?:saved|loaded) checkpoint|exiting program at", re.IGNORECASE)
_TORCHRUN = re.compile(r"^\[\w+?\d+\]:")  # torchrun's prefix of every line of a rank
# Lines of the plugin: its report (text, and tables with titles) and the results of check mode.
_PLUGIN = re.compile(
    r"^(?:megatron_overlap is |tensor: |(?:patches|calls on this rank|autotuning)\s*$"
    r"|(?:communication buffers|messages|symmetric memory) of |  \d+ GEMMs ran |not overlapped: |numerics check: "
    r"|overlap check: |[\u2500-\u257f])"
)

Config = Annotated[Path, Argument(help="Launch config: a YAML file, or the name of a shipped one.")]
Overrides = Annotated[list[str] | None, Argument(help="key=value, which overrides the file.")]
RunDir = Annotated[Path | None, Option(help="Folder of this run. Default: a new folder in launch.output_dir.")]
Rendezvous = Annotated[str | None, Option(help="HOST:PORT of the first node. Required with several nodes.")]


def launch(
    context: Context,
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print commands, environment and config; run nothing.")] = False,
    run_dir: RunDir = None,
    rendezvous: Rendezvous = None,
    rehearse: Annotated[
        bool, Option("--rehearse", help="Run a downscaled copy on local CPUs and compare it with the stock path.")
    ] = False,
    rehearse_ranks: Annotated[
        int | None, Option(min=1, help="Largest number of ranks of the rehearsal. Default: as many as fit.")
    ] = None,
    emit_slurm: Annotated[
        bool, Option("--emit-slurm", help="Write a Slurm batch file to FILE, the argument that follows, or to stdout.")
    ] = False,
    baseline: Annotated[
        str | None, Option(help="Baseline config: --emit-slurm writes a job array. `self`: runs of `compare CONFIG`.")
    ] = None,
) -> int:
    """Run a launch config."""
    config = config_file(config)
    if emit_slurm:
        names = ("dry_run", "run_dir", "rendezvous", "rehearse", "rehearse_ranks")
        refuse_options(context, names, "has no effect with --emit-slurm; leave it out")
        return _emit_slurm(config, overrides or [], baseline)
    refuse_options(context, ("baseline",), "needs --emit-slurm; to run both here: megatron-overlap compare CONFIG")
    if rehearse:
        refuse_options(context, ("rendezvous",), "a rehearsal runs on this machine only; leave it out")
        return _rehearse(config, overrides or (), run_dir, rehearse_ranks, dry_run)
    refuse_options(context, ("rehearse_ranks",), "needs --rehearse")
    cfg = load_launch_config(config, overrides or (), inputs=not dry_run)
    if not dry_run:
        require_shared_options("launch", rendezvous, run_dir, cfg.launch.nodes)
    folder = run_dir or unused_folder(cfg.launch.output_dir, cfg.name)
    try:
        return _launch(plan(cfg, folder, rendezvous=rendezvous), dry_run)
    except ConfigError as error:  # the plan knows the config's name; the message names its file
        raise ConfigError(str(config), error.key, error.value, error.remedy) from error


def _launch(planned: LaunchPlan, dry_run: bool) -> int:
    cfg, folder = planned.config, planned.run_dir
    if dry_run:
        print(planned.render())
        return 0

    def on_line(rank: int, line: str) -> None:
        # Rank 0 writes the plugin's report, and Megatron logs iterations on the last rank.
        text = progress_line(line) if rank in (0, cfg.world_size - 1) else None
        if text is not None:
            print(text, flush=True)

    print(f"{cfg.name}: {len(planned.commands)} processes, {planned.link}; logs: {folder / LOG_FOLDER}", flush=True)
    try:
        wall_s = execute(planned, on_line=on_line, on_note=lambda text: print(f"note: {text}", file=sys.stderr))
    except (RunError, NetlabError) as error:
        print(f"{cfg.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{cfg.name}: interrupted; all ranks have ended", file=sys.stderr)
        return 130
    print(f"{cfg.name}: done after {wall_s:.1f} s; run directory: {folder}")
    return 0


def _rehearse(
    config: Path, overrides: Sequence[str], run_dir: Path | None, max_ranks: int | None, dry_run: bool
) -> int:
    cfg = load_launch_config(config, overrides)
    downscaled, changes = downscale(cfg, max_ranks or max_local_ranks())
    folder = run_dir or unused_folder(cfg.launch.output_dir, downscaled.name)
    console = _wide_console()
    table = Table("key", "config", "rehearsal", title="downscaled", title_justify="left")
    for change in changes:
        table.add_row(*change)
    console.print(table)
    console.print(permits_table(p for p in load_permits() if not (p.remedy and downscaled.launch.rehearsal)))
    if dry_run:
        print(plan(downscaled, folder).render())
        return 0
    try:
        result = run_rehearsal(cfg, downscaled, folder, lambda started: print(f"{started.name}: {folder}", flush=True))
    except (RunError, RunRecordError) as error:
        print(f"{cfg.name}: {error}", file=sys.stderr)
        return 1
    overlapped = "the plugin was off"
    if (report := result.overlapped.report) is not None:
        overlapped = f"{report.overlapped_calls} calls overlapped"
        for calls in report.fallbacks:
            print(f"stock path: {calls.module}: {calls.op} {calls.direction}: {calls.calls} calls: {calls.reason}")
    if result.failures:
        for failure in result.failures:
            print(f"{cfg.name}: {failure}", file=sys.stderr)
        print(f"{cfg.name}: rehearsal FAILED: {overlapped}")
        return 1
    for name, bound, pairs in result.columns:
        largest = max(deviation(*pair) for pair in pairs)
        print(f"{name}: differs from the stock path by at most {largest:.1e}; the bound is {bound:.1e}")
    print(f"{cfg.name}: rehearsal passed: {overlapped}")
    return 0


def _emit_slurm(config: Path, arguments: list[str], baseline: str | None) -> int:
    """Write the batch file. The argument without `=` is its name; the others are overrides."""
    files = [text for text in arguments if "=" not in text]
    overrides = [text for text in arguments if "=" in text]
    if len(files) > 1:
        raise usage_error("launch --emit-slurm", " ".join(files), "give at most one file name")
    configs = [load_launch_config(config, overrides)]
    if baseline == "self":
        configs = [*arms(configs[0])]
    elif baseline is not None:
        configs.insert(0, load_launch_config(config_file(baseline), overrides))
        if configs[0].name == configs[1].name:
            remedy = f"must differ from that in {config}: it names the run directory"
            raise ConfigError(baseline, "name", configs[0].name, remedy)
    text = batch_file(configs, files[0] if files else "FILE")
    if not files:
        if not text.isascii() and sys.stdout.encoding == "ascii":
            raise usage_error("launch --emit-slurm", None, "give FILE, or set PYTHONUTF8=1: the text is not ASCII")
        print(text, end="")
        return 0
    with writing("launch --emit-slurm", Path(files[0])):
        Path(files[0]).write_text(text, encoding="utf-8", errors="surrogateescape")
    print(f"{files[0]}: {len(configs)} run(s) on {configs[0].launch.nodes} node(s); submit it with: sbatch {files[0]}")
    return 0


def refuse_options(context: Context, names: Sequence[str], remedy: str) -> None:
    """Raise ConfigError with this remedy if the command line has one of these options."""
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if param.name in names and source is not None and source.name == "COMMANDLINE":
            raise usage_error(f"{context.info_name} {param.opts[0]}", context.params[param.name], remedy)


def require_shared_options(command: str, rendezvous: str | None, run_dir: Path | None, nodes: int) -> None:
    """Require the options that must be the same on every node of a multi-node run."""
    if rendezvous is not None and not re.fullmatch(r".+:\d+", rendezvous):
        raise usage_error(f"{command} --rendezvous", rendezvous, "give HOST:PORT of the first node")
    for option, value, what in (
        ("--rendezvous", rendezvous, "HOST:PORT of the first node"),
        ("--run-dir", run_dir, "a folder that all nodes share"),
    ):
        if value is None and nodes > 1:
            remedy = f"launch.nodes is {nodes}: give {what}, the same on every node"
            raise usage_error(f"{command} {option}", None, remedy)


def _wide_console() -> Console:
    """A console for wide tables: rich wraps at 80 columns if the output is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 150, markup=False)


def logged_iteration(line: str) -> tuple[int, int, dict[str, str]] | None:
    """Number of an iteration, number of iterations, and fields of a line that Megatron logs; None: of another line.

    The fields may be anywhere in the line: launchers write prefixes, and Megatron releases differ in the other fields.
    """
    if (found := _ITERATION.search(line)) is None:
        return None
    fields = {name: match[1] for name, pattern in _PATTERNS.items() if (match := pattern.search(line))}
    return int(found[1]), int(found[2]), fields


def progress_line(line: str) -> str | None:
    """The text of `launch` for a line of a rank, such as `iteration 3/20: 412.5 ms, lm loss 4.6`; None: nothing."""
    line = _TORCHRUN.sub("", line)
    if (found := logged_iteration(line)) is not None:
        number, last, fields = found
        shown = {name: f"{float(value):.6g}" if "E" in value.upper() else value for name, value in fields.items()}
        texts = [_FIELDS[name][1].format(value) for name, value in shown.items() if (name, value) != ("skipped", "0")]
        return f"iteration {number}/{last}: {', '.join(filter(None, texts))}"
    if _EVENTS.search(line) or _PLUGIN.search(line):
        return line.rstrip()
    return None


def iterations_in(status: Status) -> OnLine:
    """Shows the iterations that the lines of the ranks log in a status line of the terminal."""

    def on_line(rank: int, line: str) -> None:
        if _ITERATION.search(line) is not None:
            status.update(progress_line(line) or "")

    return on_line


_FIRST_STEPS = 2
_MARGIN = 1.1  # for backward passes that run late, which the search waits for


def tune(config: Config, overrides: Overrides = None, run_dir: RunDir = None, rendezvous: Rendezvous = None) -> int:
    """Measure the methods of each layer, and cache the fastest for later runs."""
    config = config_file(config)
    cfg = short_run(str(config), load_launch_config(config, overrides or (), inputs=True))
    require_shared_options("tune", rendezvous, run_dir, cfg.launch.nodes)
    folder = run_dir or unused_folder(cfg.launch.output_dir, cfg.name)
    console = _wide_console()
    try:
        with console.status(f"{cfg.name}: {cfg.train.iterations} steps") as status:
            execute(plan(cfg, folder, rendezvous=rendezvous), on_line=iterations_in(status), on_note=console.print)
    except (RunError, NetlabError) as error:
        print(f"{cfg.name}: {error}", file=sys.stderr)
        return 1
    lines = read_selections(folder)
    console.print(autotune_table(lines))
    missing = sum(line.ms is None for line in lines)
    if missing or not lines:
        print(f"{cfg.name}: {missing} of {len(lines)} kinds of calls were not measured; see {folder}", file=sys.stderr)
        return 1
    console.print(f"{cfg.name}: {len(lines)} selections are in {cfg.overlap.tensor.autotune_cache}")
    return 0


def short_run(name: str, cfg: LaunchConfig) -> LaunchConfig:
    """The same job with as many iterations as autotuning needs, without checkpoints and evaluation.

    Raises ConfigError if the config `name` has neither tensor nor expert parallelism, no autotuning or no cache.
    """
    tensor, experts = cfg.overlap.tensor, cfg.overlap.expert.method == "auto" and cfg.expert_parallel_size > 1
    if cfg.parallel.tensor == 1 and not experts:
        remedy = "autotuning needs tensor parallelism, or expert parallelism with overlap.expert.method=auto"
        raise ConfigError(name, "parallel.tensor", 1, remedy)
    if tensor.method != "auto" and not experts:
        remedy = "tune needs auto: add overlap.tensor.method=auto"
        raise ConfigError(name, "overlap.tensor.method", tensor.method, remedy)
    if tensor.autotune_cache is None:
        raise ConfigError(name, "overlap.tensor.autotune_cache", None, "name a folder for the cache")
    calls = float(calls_to_select(2)) if experts else 0.0  # of each layer
    if cfg.parallel.tensor > 1 and tensor.method == "auto":
        calls = max(calls, _linear_calls(cfg))
    iterations = _FIRST_STEPS + math.ceil(_MARGIN * calls / cfg.num_microbatches)
    train = {"iterations": max(iterations, cfg.train.lr_warmup_iterations + 1), "eval_iterations": 0}
    return changed(cfg, name=f"{cfg.name}_tune", train={**train, "save": None, "save_interval": None, "load": None})


def _linear_calls(cfg: LaunchConfig) -> float:
    """Calls of each tensor parallel layer until all kinds have a selection."""
    # The output layer runs once a micro-batch, every other layer kind once a layer and micro-batch. Variants of fused
    # kernels are measured in the layers; the output layer may end with fewer of them.
    cuda = cfg.launch.device == "cuda"
    layers, num = cfg.model.num_layers // cfg.parallel.pipeline, 1 + max_p2p_settings(cfg.parallel.tensor) + 2 * cuda
    variants = sum(len(values) - 1 for values in KNOBS.values()) if cuda else 0
    calls = max(calls_to_select(num), calls_to_select(num, variants) / layers)
    if not cfg.parallel.sequence_parallel and cfg.overlap.tensor.split == "auto":
        calls += calls_to_select(2)  # then batch overlap of each block is measured
    return calls


def read_selections(run_dir: Path) -> list[AutotuneLine]:
    """The selections of all ranks of a run; of each kind of call that of the first rank that has it."""
    found: dict[tuple[Any, ...], AutotuneLine] = {}
    for path in sorted(run_dir.glob("report-rank*.json")):
        for tree in json.loads(path.read_text(encoding="utf-8")).get("autotuning", ()):
            line = AutotuneLine(**{name: value for name, value in tree.items() if name != "gain"})
            found.setdefault((line.module, line.op, line.rows, line.dtype, line.passes), line)
    return list(found.values())
