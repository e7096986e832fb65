"""The command line: `offload-engine train`, `bench`, `timeline`, `doctor`; the same as `python -m offload_engine`.

It parses, calls one room, and turns the package's errors into one message each. Exit codes: 0 done, 2 an error that
the user can mend, 130 stopped by Ctrl-C; `doctor` 1 where training cannot work.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from offload_engine import __version__

__all__ = ["main"]

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
_SCRIPT = "offload-engine"
_BENCHMARKS = ("update", "step", "overlap")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A benchmark parses its own options, "--help" among them.
    if arguments[:1] == ["bench"] and len(arguments) > 1 and arguments[1] in _BENCHMARKS:
        if (
            argv is None and arguments[1] == "overlap"
        ):  # the others start processes of their own, or need none
            _restart_in_fast_environment()
        return _guarded(lambda: _bench(arguments[1], arguments[2:]), traceback=False)
    options = _parser().parse_args(arguments)
    if argv is None and options.command == "train":
        _restart_in_fast_environment()
    return _guarded(lambda: _COMMANDS[options.command](options), traceback=options.traceback)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offload-engine",
        description="Train models that do not fit their device, and see where time and bytes go.",
    )
    parser.add_argument("--version", action="version", version=f"offload-engine {__version__}")
    parser.add_argument(
        "--traceback", action="store_true", help="show the traceback of an error (OFFLOAD_ENGINE_DEBUG=1)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run the training job of a TOML file")
    train.add_argument("config", metavar="CONFIG.toml", help="the job, for example configs/quickstart.toml")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="override one value",
    )
    train.add_argument("--resume", action="store_true", help="go on from the run's checkpoint")
    train.add_argument(
        "--nproc",
        type=int,
        metavar="RANKS",
        help="train on this many processes of this machine, which share out each step's micro-batches (torchrun)",
    )
    train.add_argument(
        "--stop-after",
        type=int,
        metavar="STEP",
        help="stop once STEP steps of the run are done, as Ctrl-C would",
    )

    bench = commands.add_parser(
        "bench",
        help="measure: 'update' the CPU optimizer, 'step' a whole training step, 'overlap' what hides under compute",
    )
    bench.add_argument(
        "benchmark", choices=_BENCHMARKS, help="its own options follow; try 'bench update --help'"
    )

    doctor = commands.add_parser(
        "doctor", help="one page on this machine: what a bug report needs, what to mend"
    )
    doctor.add_argument("--json", action="store_true", help="print the facts as JSON")

    timeline = commands.add_parser("timeline", help="read a recorded timeline")
    actions = timeline.add_subparsers(dest="action", required=True, metavar="ACTION")
    summary = actions.add_parser("summary", help="print what a timeline adds up to, in words")
    summary.add_argument("file", metavar="FILE", help="for example runs/quickstart/timeline.json")
    return parser


def _train(options: argparse.Namespace) -> int:
    from offload_engine.parallel.collectives import process_group
    from offload_engine.training.config import load
    from offload_engine.training.loop import Outcome, run_job
    from offload_engine.training.ranks import launch_command

    settings = [argument for override in options.overrides for argument in ("--set", override)]
    if options.nproc is not None and "RANK" not in os.environ:
        resume = ["--resume"] if options.resume else []
        stop = [] if options.stop_after is None else ["--stop-after", str(options.stop_after)]
        command, environment = launch_command(
            options.nproc, ["train", options.config, *settings, *resume, *stop]
        )
        return subprocess.run(command, env=environment, check=False).returncode
    with process_group(os.environ):
        outcome = run_job(
            load(options.config, options.overrides), resume=options.resume, stop_after=options.stop_after
        )
    if outcome is Outcome.FINISHED or os.environ.get("RANK", "0") != "0":
        return 0
    words = "".join(f" --set {shlex.quote(override)}" for override in options.overrides)
    if "RANK" in os.environ:
        words += f" --nproc {os.environ['WORLD_SIZE']}"
    print(f"go on with: {_own_command()} train {shlex.quote(options.config)}{words} --resume", flush=True)
    return EXIT_INTERRUPTED if outcome is Outcome.INTERRUPTED else 0


def _own_command() -> str:
    """Return how this program is called from here: as it was called now, quoted for a shell.

    The script of a virtual environment is on the PATH only where that was activated.
    """
    started = Path(sys.argv[0])
    if started.name == _SCRIPT:
        on_path = shutil.which(_SCRIPT)
        if on_path is not None and started.exists() and os.path.samefile(on_path, started):
            return _SCRIPT
        return shlex.quote(_short_path(started))
    python = shutil.which("python")
    if python is not None and Path(python).absolute() == Path(sys.executable):
        return f"python -m {__package__}"
    return f"{shlex.quote(_short_path(Path(sys.executable)))} -m {__package__}"


def _short_path(path: Path) -> str:
    """Return a path seen from the working directory where it lies below that, else an absolute one."""
    path, here = path.absolute(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _bench(benchmark: str, arguments: Sequence[str]) -> int:
    run: Callable[[Sequence[str]], int] = import_module(f"offload_engine.bench.{benchmark}").main
    return run(list(arguments))


def _timeline(options: argparse.Namespace) -> int:
    from offload_engine import timeline
    from offload_engine.errors import ConfigError

    try:
        events = timeline.load(options.file)
    except OSError as error:
        raise ConfigError(f"timeline {options.file!r} cannot be read: {error}.") from None
    print(timeline.summarise(events).words())
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from offload_engine.doctor import main as doctor

    return doctor(["--json"] if options.json else [])


_COMMANDS = {"train": _train, "timeline": _timeline, "doctor": _doctor}


def _guarded(command: Callable[[], int], *, traceback: bool) -> int:
    """Run a command; print the package's own errors as one message each."""
    from offload_engine.errors import OffloadEngineError

    try:
        return command()
    except OffloadEngineError as error:
        if traceback or os.environ.get("OFFLOAD_ENGINE_DEBUG", "") not in ("", "0"):
            raise
        print(f"offload-engine: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("\noffload-engine: stopped at once by Ctrl-C; files written so far are whole.", file=sys.stderr)
        return EXIT_INTERRUPTED


def _restart_in_fast_environment() -> None:
    """Start this command over with settings that libraries read at their start, unless the user chose otherwise."""
    from offload_engine.host.environment import missing_settings

    missing = missing_settings(os.environ)
    if os.name == "posix" and missing:
        os.environ.update(missing)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
