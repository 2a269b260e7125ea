"""The `quartet` command: finds the sub-command, runs it, and turns errors into one line and an exit code.

What follows the first literal `--` is the user's training command. It is split off before anything
is parsed, never edited, and reaches the commands as `Invocation.user_command`.

This module imports next to nothing: what takes time is imported where `entry` has already taken Ctrl-C over.
"""

import _thread
import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from quartet_plugin.errors import ExitCode, QuartetError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    import typer

# Every command with the module that has its function, or its own typer.Typer, as COMMAND_command. Importing
# a module must be cheap, so numpy, numba, pydantic, optuna and the like are imported inside of functions.
COMMANDS = {
    "tune": "tune",
    "batch": "batch",
    "init": "init",
    "knobs": "knobs",
    "work": "workers",
    "status": "runs",
    "trials": "runs",
    "repair": "runs",
    "report": "report",
    "train": "train",
    "check": "check",
    "doctor": "doctor",
    "recheck": "doctor",
    "convert": "convert",
    "show": "export",
    "export": "export",
    "schedule": "schedule",
    "partition": "partition",
    "rehearse": "rehearse",
    "trace": "trace",
    "predict": "predict",
    "plan": "plan",
    "layout": "layout",
    "explain": "explain",
    "probe": "probe",
    "profile": "profile",
    "calibrate": "calibrate",
}
# In words, because the table of options would cut so long a name on a narrow terminal.
_CHANGED_SOURCE = (
    " --accept-changed-source allows custom schedules even if functions of Megatron have changed; the "
    "parity gate then decides."
)
# The commands that run the user's command; every other one refuses words behind --.
_EPILOGS = {
    "tune": f"The training command follows a literal --; it is run as it is.{_CHANGED_SOURCE}",
    "train": f"The training command follows a literal --; it is run as it is.{_CHANGED_SOURCE}",
    "check": f"The training command follows a literal --; it is run twice, briefly.{_CHANGED_SOURCE}",
    "convert": "The training command follows a literal --; nothing is trained with it.",
    "knobs": "A training command may follow a literal --; its flags are read, and nothing is started.",
    "profile": "The training command follows a literal --; it is run for a few iterations.",
    "probe": "For several nodes run it on each node, with torchrun and its options after --.",
    "plan": "A training command that follows a literal -- is read, not run.",
}

_IMPORTED_S = time.monotonic()
_INTERRUPTED = "interrupted"
_MOMENT_S = 0.01
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# As for a run folder of another user, which is open to that one alone.
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
# The distributions that `--version` names where they are installed.
_FRAMEWORKS = ("optuna", "torch", "megatron-core", "megatron-bridge", "deepspeed", "transformer-engine")
# The modules that write to the output.
_PRINTERS = ("quartet_plugin.cli.main", "quartet_plugin.cli.output", "typer", "click", "rich")


def build_app() -> "typer.Typer":
    """The whole command line; cheap, and without side effects."""
    from typing import Annotated

    import typer

    from quartet_plugin.cli.command import refuse_user_command

    app = typer.Typer(
        name="quartet",
        help="Tune shape, layer split, pipeline schedule and rank mapping of LLM pretraining.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(epilog="What follows a literal -- is your training command; it is never edited.")
    def _options(
        ctx: typer.Context,
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                help="Print the versions of quartet and of the installed frameworks.",
                callback=_version,
                is_eager=True,
            ),
        ] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
    ) -> None:
        del version, debug
        if ctx.invoked_subcommand not in _EPILOGS:
            refuse_user_command(ctx)

    for name, module in COMMANDS.items():
        function = getattr(import_module(f"quartet_plugin.cli.{module}"), f"{name}_command")
        if isinstance(function, typer.Typer):
            app.add_typer(function)
        else:
            app.command(name, epilog=_EPILOGS.get(name), hidden=name == "work")(function)
    return app


def main(argv: Sequence[str] | None = None, *, started_s: float | None = None) -> int:
    """Run the command line `argv`, without the program's name, and return its exit code.

    None takes the arguments of this process; `started_s` (monotonic) is when it started, None for now. No
    QuartetError leaves it: each is one line on stderr. Raises OSError where the output's reader left, or the
    disk that the output goes to is full.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command: tuple[str, ...] | None = None
    if "--" in arguments:
        dashes = arguments.index("--")
        arguments, command = arguments[:dashes], tuple(arguments[dashes + 1 :])
    debug = "--debug" in arguments
    begin = time.monotonic() if started_s is None else started_s
    try:
        return _run([argument for argument in arguments if argument != "--debug"], command, begin)
    except KeyboardInterrupt:
        return _failed(_INTERRUPTED, ExitCode.INTERRUPTED, debug=debug)
    except QuartetError as error:
        message, *table = error.lines
        return _failed(message, error.exit_code, debug=debug, table=table)
    except SystemExit as error:
        # So do typer and rich end where the reader of the output has left.
        if isinstance(error.__context__, BrokenPipeError):
            raise error.__context__ from None
        raise
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in _FULL_DISK:
            if _is_of_output(error):
                raise
            place = "a file" if error.filename is None else error.filename
            return _failed(f"{place}: cannot be written: {error.strerror}", ExitCode.STORAGE, debug=debug)
        if error.filename is not None and error.errno in _NOT_ALLOWED:
            return _failed(f"{error.filename}: {error.strerror}", ExitCode.USAGE, debug=debug)
        return _failed_elsewhere(error, arguments, has_command=command is not None, debug=debug)
    except Exception as error:
        return _failed_elsewhere(error, arguments, has_command=command is not None, debug=debug)


def entry() -> None:
    """The console script. Ctrl-C gives one line at any time, a reader that leaves gives none."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    sys.unraisablehook = _interrupt_again
    try:
        from quartet_plugin.cli.output_encoding import encodable

        sys.stdout, sys.stderr = encodable(sys.stdout), encodable(sys.stderr)
        # The interpreter has been running at least as long as it has computed.
        code = main(started_s=min(_IMPORTED_S, time.monotonic() - time.process_time()))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) left.
        _drop(sys.stdout)
        code = ExitCode.OUTPUT_CLOSED
    except OSError as error:
        _drop(sys.stdout)
        code = _failed_at_end(f"the output cannot be written: {error.strerror}", ExitCode.STORAGE)
    except KeyboardInterrupt:
        code = _failed_at_end(_INTERRUPTED, ExitCode.INTERRUPTED)
    sys.exit(code)


def _interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C where Python can raise nothing, as in a library's callback, is given again a moment later.

    From a thread: given again here, it would be raised in this function, where it is lost too.
    """
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt_soon, ())
    else:
        sys.__unraisablehook__(unraisable)


def _interrupt_soon() -> None:
    time.sleep(_MOMENT_S)
    _thread.interrupt_main()


def _failed_at_end(message: str, code: int) -> int:
    """As `_failed`, where nothing is left that could answer a reader of the errors who has left."""
    try:
        return _failed(message, code, debug=False)
    except BrokenPipeError:
        _drop(sys.stderr)
        return int(code)


def _drop(stream: "TextIO") -> None:
    """Send what is still buffered to the null device: Python would complain again when it flushes at exit.

    Do nothing where the stream is none of the system's, as in a test.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_of_output(error: OSError) -> bool:
    """Whether a full disk does not take the output: a printer wrote, or what is buffered is refused again."""
    if error.filename is not None:
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is not None and place.tb_frame.f_globals.get("__name__", "").startswith(_PRINTERS):
        return True
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _exit_at_once(number: int, frame: object) -> None:
    """Ctrl-C while modules are imported: nothing has been begun, and an import is not left in its middle."""
    del number, frame
    os.write(2, f"quartet: {_INTERRUPTED}\n".encode())
    os._exit(ExitCode.INTERRUPTED)


def _run(arguments: list[str], user_command: tuple[str, ...] | None, started_s: float) -> int:
    import typer

    from quartet_plugin.cli.command import Invocation
    from quartet_plugin.protocol.masking import collect_secrets

    collect_secrets(user_command or ())
    command = typer.main.get_command(build_app())
    if signal.getsignal(signal.SIGINT) is _exit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    context = Invocation(user_command=user_command, started_s=started_s)
    result = command.main(args=arguments, prog_name="quartet", standalone_mode=False, obj=context)
    if result == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return result if isinstance(result, int) else int(ExitCode.DONE)


def _failed(message: str, code: int, *, debug: bool, table: Sequence[str] = ()) -> int:
    """Tell why the command ends, and return its exit code, also where the errors' disk is full.

    Raises BrokenPipeError where the reader of the errors has left.
    """
    from quartet_plugin.cli.output import tell, tell_traceback

    try:
        if debug:
            tell_traceback()
        tell(f"quartet: {message}", *table)
    except BrokenPipeError:
        raise
    except OSError:
        _drop(sys.stderr)
    return int(code)


def _failed_elsewhere(error: Exception, arguments: Sequence[str], *, has_command: bool, debug: bool) -> int:
    """What the parser of the command line raises, whose classes typer keeps to itself; the rest is a bug."""
    from quartet_plugin.cli.signals import is_interruption

    names = {kind.__name__ for kind in type(error).__mro__}
    if "Abort" in names or is_interruption(error):
        return _failed(_INTERRUPTED, ExitCode.INTERRUPTED, debug=debug)
    if "ClickException" in names:
        message = _usage_message(error)
        if not has_command and _names_a_command(arguments):
            message += "; write a training command after --, as in: -- torchrun ..."
        return _failed(message, ExitCode.USAGE, debug=debug) if message else ExitCode.DONE
    reason = (
        f"internal error: {type(error).__name__}: {error}; run again with --debug and report the traceback"
    )
    return _failed(reason, 1, debug=debug)


def _usage_message(error: Exception) -> str:
    """The parser's own words in one line, and where the help is; nothing where it showed the help itself."""
    words = " ".join(str(getattr(error, "format_message", error.__str__)()).split()).rstrip(".")
    words = words.replace(": Value error, ", ": ")
    if not words:
        return ""
    context = getattr(error, "ctx", None)
    path = "quartet" if context is None else context.command_path
    return f"{words}; see {path} --help"


def _names_a_command(arguments: Sequence[str]) -> bool:
    """Whether a training command was written without the -- before it."""
    from quartet_plugin.launchers.command import is_starter

    return any(is_starter(argument) for argument in arguments)


def _version(wanted: bool) -> None:
    """Print the version and what is installed of the frameworks, one a line, and end."""
    if wanted:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        import typer

        from quartet_plugin import __version__

        lines = [f"quartet {__version__}", f"python {platform.python_version()}"]
        for name in _FRAMEWORKS:
            with contextlib.suppress(PackageNotFoundError):
                lines.append(f"{name} {version(name)}")
        print("\n".join(lines))
        raise typer.Exit
