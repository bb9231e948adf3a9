"""`megatron-overlap compare`: launches configs in interleaved rounds and reports the speedup and its spread."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_overlap.config import LaunchConfig, dump_config, load_launch_config
from megatron_overlap.config.errors import usage_error, writing
from megatron_overlap.config.resources import config_file
from megatron_overlap.tools.compare import report
from megatron_overlap.tools.compare.comparison import WARM_UP_ITERATIONS, Comparison, NotComparableError, Side, Workload
from megatron_overlap.tools.compare.comparison import compare as compare_sides
from megatron_overlap.tools.compare.flops import (
    CONVENTION,
    Peak,
    UnknownFlopsError,
    find_peak,
    step_flops,
    tokens_per_step,
)
from megatron_overlap.tools.compare.megatron_logs import NOTES, read_log
from megatron_overlap.tools.compare.megatron_logs import sides as read_sides
from megatron_overlap.tools.compare.rounds import LaunchFailedError, Selection, run_rounds, select
from megatron_overlap.tools.launch.command import iterations_in
from megatron_overlap.tools.launch.plan import unused_folder
from megatron_overlap.tools.launch.processes import RunError


def compare(
    configs: Annotated[
        list[str], typer.Argument(help="Launch configs, the reference first, and key=value overrides for all.")
    ],
    logs: Annotated[
        bool, typer.Option("--logs", help="Compare logs of finished Megatron runs; launch nothing.")
    ] = False,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Launches of each config, interleaved.")] = 3,
    output: Annotated[
        Path | None, typer.Option("--output", help="Folder of the result. Default: a new one in launch.output_dir.")
    ] = None,
    attribute: Annotated[
        bool,
        typer.Option(
            "--attribute", help="Add a run that sends the same messages without overlap, to separate both gains."
        ),
    ] = False,
    peak_tflops: Annotated[
        float | None,
        typer.Option("--peak-tflops", min=0.001, help="With --logs: peak TFLOP/s of a device, for the MFU."),
    ] = None,
) -> int:
    """Measure configs in alternating rounds. A single config is compared with itself on the stock path."""
    if logs:
        return _compare_logs([Path(file) for file in configs], output, attribute, peak_tflops)
    if peak_tflops is not None:
        raise usage_error("compare --peak-tflops", peak_tflops, "needs --logs: a launch determines the peak itself")
    files, overrides = _split(configs)
    chosen = select([(file, load_launch_config(config_file(file), overrides)) for file in files], attribute=attribute)
    last = chosen.configs[-1]
    folder = _open_folder(
        output if output is not None else unused_folder(last.launch.output_dir, f"compare-{last.name}")
    )
    console = Console()
    try:
        result = _measure(chosen, rounds, folder, console)
        report.write(result, folder, {config.name: dump_config(config) for config in chosen.configs})
    except (LaunchFailedError, NotComparableError, RunError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    _show(result, folder, console)
    return 0


def _compare_logs(files: Sequence[Path], output: Path | None, attribute: bool, peak_tflops: float | None) -> int:
    """The same table and files from finished logs; figures that a log lacks are left out."""
    if len(files) < 2:
        remedy = "give at least two logs, the reference first"
        raise usage_error("compare --logs", files[0], remedy)
    if attribute:
        raise usage_error("compare --attribute", None, "launches one more run; leave it out with --logs")
    logged = read_sides([read_log(file) for file in files], peak_tflops)
    folder = _open_folder(
        output if output is not None else unused_folder("runs", f"compare-{logged[-1].name.replace('/', '-')}")
    )
    settings = {"source": "logs", "logs": [str(file) for file in files], "notes": list(NOTES)}
    try:
        result = compare_sides(logged, settings=settings)
    except NotComparableError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    report.write(result, folder, {})
    _show(result, folder, Console())
    return 0


def _open_folder(folder: Path) -> Path:
    with writing("compare --output", folder):
        folder.mkdir(parents=True, exist_ok=True)
        report.remove(folder)
    return folder


def _measure(chosen: Selection, rounds: int, folder: Path, console: Console) -> Comparison:
    notes = list(chosen.notes)

    def note(text: str) -> None:
        notes.append(f"{text[0].upper()}{text[1:]}.")
        console.print(f"note: {text}", highlight=False, soft_wrap=True)

    with console.status("") as status:

        def on_launch(text: str) -> None:
            console.print(text, highlight=False)
            status.update("starting")

        runs, on_line = folder / report.RUNS_FOLDER, iterations_in(status)
        recorded = run_rounds(chosen.configs, rounds, runs, on_launch=on_launch, on_line=on_line, on_note=note)
    console.print("measuring the peak rate of the device ...", highlight=False)
    name = str(recorded[0].records[0].meta.get("device_name"))
    peaks: dict[tuple[object, ...], Peak] = {}
    sides = []
    for config, launched in zip(chosen.configs, recorded, strict=True):
        key = (config.launch.device, config.train.precision, config.launch.threads_per_rank, config.world_size)
        if key not in peaks:
            peaks[key] = find_peak(name, config)
        sides.append(Side(config.name, workload(config), peaks[key], launched.link, launched.records))
    settings = {
        "rounds": rounds,
        "order": "alternating",
        "warm_up_iterations": WARM_UP_ITERATIONS,
        "iterations": chosen.configs[0].train.iterations,
        "notes": [
            f"Rounds: {rounds}. Each round launches every run once; every second round in reversed order. The first "
            f"{WARM_UP_ITERATIONS} iterations of every launch are not timed.",
            "Step time: of the slowest rank, pooled over all rounds. Speedup: in each round the median step time of "
            "the reference divided by that of the run; then median, p20 and p80 over the rounds.",
            "Deviation: largest relative difference from the reference over all iterations and rounds. Between rounds "
            "of the run: from the first round of the same run.",
            "Calls and bytes: of all ranks in one launch.",
            *notes,
        ],
    }
    return compare_sides(sides, serial=chosen.serial, settings=settings)


def workload(config: LaunchConfig) -> Workload:
    """The work of one iteration of a config."""
    try:
        flops, convention = step_flops(config), CONVENTION
    except UnknownFlopsError as error:
        flops, convention = None, str(error)
    return Workload(tokens_per_step(config), flops, convention, config.world_size)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files and overrides. `a=b` is an override unless a file has that name."""
    files = [text for text in arguments if "=" not in text or Path(text).is_file()]
    if not files:
        raise usage_error("compare", None, "give CONFIGS; see megatron-overlap compare --help")
    return files, [text for text in arguments if text not in files]


def _show(result: Comparison, folder: Path, console: Console) -> None:
    console.print(report.table(result))
    for line in report.notes(result):
        console.print(f"- {line}", style="dim", highlight=False, soft_wrap=True)
    for run, module, operation, reason, calls in report.fallback_lines(result):
        console.print(f"- {run}: {module}: {operation}: {calls} calls on the stock path: {reason}", highlight=False)
    console.print(f"\n{report.headline(result)}", style="bold", highlight=False, soft_wrap=True)
    parts = report.attribution(result)
    if parts is not None:
        console.print(parts, highlight=False, soft_wrap=True)
    names = ", ".join((report.JSON_FILE, report.PNG_FILE, report.HTML_FILE))
    console.print(f"{folder}: {names}", highlight=False, soft_wrap=True)
