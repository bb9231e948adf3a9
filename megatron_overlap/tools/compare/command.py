"""`megatron-overlap compare`: launches configs in interleaved rounds and reports the speedup and its spread."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Context, Option

from megatron_overlap.config import LaunchConfig, dump_config, load_launch_config
from megatron_overlap.config.errors import usage_error, writing
from megatron_overlap.config.resources import config_file
from megatron_overlap.tools.compare import comparison, flops, generation_report, megatron_logs, report
from megatron_overlap.tools.compare.comparison import WARM_UP_ITERATIONS, Launched, Side, Workload
from megatron_overlap.tools.compare.generation import compare_generation, read_generation
from megatron_overlap.tools.compare.rounds import Selection, read_training, run_rounds, select, select_generation
from megatron_overlap.tools.launch.command import iterations_in, refuse_options
from megatron_overlap.tools.launch.plan import unused_folder
from megatron_overlap.tools.launch.processes import RunError


def compare(
    context: Context,
    configs: Annotated[list[str], Argument(help="Launch configs, reference first, and key=value overrides for all.")],
    logs: Annotated[bool, Option("--logs", help="Compare logs of finished Megatron runs; launch nothing.")] = False,
    rounds: Annotated[int, Option(min=1, help="Launches of each config, interleaved.")] = 3,
    output: Annotated[Path | None, Option(help="Result folder. Default: a new one in launch.output_dir.")] = None,
    attribute: Annotated[
        bool, Option("--attribute", help="Add a run with the same messages without overlap, to separate both gains.")
    ] = False,
    peak_tflops: Annotated[float | None, Option(min=0.001, help="With --logs: peak of a device, for the MFU.")] = None,
    generate: Annotated[bool, Option("--generate", help="Generate tokens with Megatron instead of training.")] = False,
    prompt_tokens: Annotated[str | None, Option(help="With --generate: lengths of prompts, such as 128,512.")] = None,
    batches: Annotated[str, Option(help="With --generate: numbers of prompts.")] = "1,4",
    new_tokens: Annotated[int, Option(min=2, help="With --generate: tokens generated from a prompt.")] = 16,
    engine: Annotated[str, Option(help="With --generate: dynamic or static.")] = "dynamic",
) -> int:
    """Measure configs in alternating rounds. A single config is compared with itself on the stock path."""
    try:
        if not generate:
            refuse_options(context, ("prompt_tokens", "batches", "new_tokens", "engine"), "needs --generate")
        if logs:
            refuse_options(context, ("attribute",), "launches one more run; leave it out with --logs")
            refuse_options(context, ("rounds", "generate"), "has no effect with --logs; leave it out")
            _compare_logs([Path(file) for file in configs], output, peak_tflops)
            return 0
        refuse_options(context, ("peak_tflops",), "needs --logs: a launch determines the peak itself")
        # `a=b` is an override unless a file has that name.
        files = [text for text in configs if "=" not in text or Path(text).is_file()]
        if not files:
            raise usage_error("compare", None, "give CONFIGS; see megatron-overlap compare --help")
        overrides = [text for text in configs if text not in files]
        given = [(file, load_launch_config(config_file(file), overrides, inputs=True)) for file in files]
        if not generate:
            _compare_training(select(given, attribute=attribute), rounds, output)
            return 0
        refuse_options(context, ("attribute",), "separates the parts of a training step; leave it out")
        if engine not in ("dynamic", "static"):
            raise usage_error("compare --engine", engine, "give dynamic or static")
        lengths = None if prompt_tokens is None else _numbers("--prompt-tokens", prompt_tokens)
        sizes = _numbers("--batches", batches)
        chosen = select_generation(given, prompt_tokens=lengths, batches=sizes, new_tokens=new_tokens, engine=engine)
        _compare_generation(chosen, rounds, output)
    except (comparison.NotComparableError, RunError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    return 0


def _compare_training(chosen: Selection, rounds: int, output: Path | None) -> None:
    """Times, losses and peak rates of training, in a table and three files."""
    folder, launched, notes = _launch(chosen, rounds, output, read_training)
    Console().print("measuring the peak rate of the device ...", highlight=False)
    name = str(launched[0].records[0].meta.get("device_name"))
    sides = []
    for config, each in zip(chosen.configs, launched, strict=True):
        device, threads = config.launch.device, config.launch.threads_per_rank
        peak = None
        try:
            peak = flops.find_peak(name, device, config.train.precision, threads, config.world_size)
        except RunError as error:  # the launches are complete: their times count without it
            print(f"compare: {each.name}: the peak rate is unknown: {error}", file=sys.stderr)
        sides.append(Side(each.name, each.link, each.records, _workload(config), peak))
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
    result = comparison.compare(sides, serial=chosen.serial, settings=settings)
    report.write(result, folder, {config.name: dump_config(config) for config in chosen.configs})


def _compare_generation(chosen: Selection, rounds: int, output: Path | None) -> None:
    """The same files for generation: times of prefill and decode, and the generated tokens."""
    folder, launched, notes = _launch(chosen, rounds, output, read_generation)
    how = [
        f"Rounds: {rounds}. Each round launches every run once; every second round in reversed order. A call that "
        "generates two tokens from the same prompts comes before the timed one.",
        "Times: of forward passes on the slowest rank; median over the rounds. First token: the first pass. ms per "
        "token: the median of the other passes. tokens/s: of all prompts, over all passes.",
        "Relative to the reference: the ratio within each round; then median, p20 and p80 over the rounds. Above 1 is "
        "faster.",
        *notes,
    ]
    result = compare_generation(launched, {"rounds": rounds, "order": "alternating", "notes": how})
    generation_report.write(result, folder, {config.name: dump_config(config) for config in chosen.configs})


def _compare_logs(files: Sequence[Path], output: Path | None, peak_tflops: float | None) -> None:
    """The same table and files from finished logs; figures that a log lacks are left out."""
    if len(files) < 2:
        raise usage_error("compare --logs", files[0], "give at least two logs, the reference first")
    read = [megatron_logs.read_log(file) for file in files]
    logged = megatron_logs.sides(read, peak_tflops)
    folder = _open_folder(output, "runs", logged[-1].name.replace("/", "-"))
    settings = {"source": "logs", "logs": [str(file) for file in files], "notes": megatron_logs.notes(read)}
    report.write(comparison.compare(logged, settings=settings), folder, {})


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise usage_error(f"compare {option}", text, "give whole numbers of 1 or more, separated by commas")
    return tuple(map(int, parts))


def _open_folder(output: Path | None, parent: str, run: str) -> Path:
    folder = output or unused_folder(parent, f"compare-{run}")
    with writing("compare --output", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (report.JSON_FILE, report.HTML_FILE, report.PNG_FILE):
            (folder / name).touch()  # a folder without write permission fails here, before the launches
            (folder / name).unlink()  # that of an earlier comparison
    return folder


def _launch[Record](
    chosen: Selection, rounds: int, output: Path | None, read: Callable[[Path, LaunchConfig], Record]
) -> tuple[Path, list[Launched[Record]], list[str]]:
    """All launches with their progress on the console: their folder and records, and notes for the report."""
    console, last, notes = Console(), chosen.configs[-1], list(chosen.notes)
    folder = _open_folder(output, last.launch.output_dir, last.name)

    def note(text: str) -> None:
        line = f"{text[0].upper()}{text[1:]}."
        if line not in notes:
            notes.append(line)
            console.print(f"note: {text}", highlight=False, soft_wrap=True)

    with console.status("") as status:

        def on_launch(text: str) -> None:
            console.print(text, highlight=False)
            status.update("starting")

        runs, on_line = folder / report.RUNS_FOLDER, iterations_in(status)
        done = run_rounds(chosen.configs, rounds, runs, read=read, on_launch=on_launch, on_line=on_line, on_note=note)
    return folder, done, notes


def _workload(config: LaunchConfig) -> Workload:
    try:
        counted, convention = flops.step_flops(config), flops.CONVENTION
    except flops.UnknownFlopsError as error:
        counted, convention = None, str(error)
    tokens = config.train.global_batch_size * config.train.seq_length
    return Workload(tokens, counted, convention, config.world_size)
