"""The command line `mw`: its commands and exit codes.

    0    done
    1    ran and found a problem (does not fit, the audit differs)
    2    bad input: one line on stderr with the change that is needed
    130  interrupted

A command's module is imported when the command runs, so help and plans answer at once.
"""

import json
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command as to_command

from meshwright import __version__
from meshwright.cli.commands import command_in
from meshwright.cli.extras import bringing
from meshwright.cli.faults import unknown_command, usage_fault, value_fault, with_line
from meshwright.cli.other_values import HELP, plain_words
from meshwright.errors import MeshwrightError, shorten

BAD_INPUT, INTERRUPTED = 2, 130
# Maximum length of a path or a layout in a message.
_LONGEST_WORD = 160

# Module of cli/ and the line that `mw --help` shows.
COMMANDS = {
    "demo": "Plan, train, audit and serve a small model on this machine.",
    "plan": "Rank layouts for training or serving a model.",
    "ui": "Explore layouts in a local web page.",
    "compare": "Compare plans: time, chips, memory, price.",
    "validate": "Score predictions against published results.",
    "train": "Train a model with a plan's layout.",
    "launch": "Start a command as several processes.",
    "export": "Write a run's checkpoint as a Hugging Face model.",
    "audit": "Compile a plan's step and compare it with the plan.",
    "tune": "Compile variants of a plan and rank them.",
    "quantize": "Write a checkpoint with int8, fp8 or int4 weights.",
    "generate": "Generate text with a checkpoint.",
    "serve": "Serve a checkpoint over OpenAI's API.",
    "report": "Write a run or a plan as one HTML file.",
    "model": "Count a model's parameters, FLOPs and cache.",
    "fit": "Show which uses of a model fit a machine.",
    "support": "Show which layouts a model runs under.",
    "hardware": "List the known chips, or one with its sources.",
    "shard": "Derive and price sharded matmuls and reshards.",
    "reshard": "Price moving a model's weights to another layout.",
    "collective": "Price one collective on a machine.",
    "plot": "Plot the textbook's curves for any model and machine.",
    "calibrate": "Measure this machine, so that plans can use it.",
    "bench": "Benchmark collectives, matmuls, servers and the planner.",
    "mcp": "Serve plans and audits as tools for agents.",
    "doctor": "Check the installation and say how to fix it.",
}


class _LazyGroup(TyperGroup):
    """The commands by name; a command's module is imported only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A placeholder with the short help, for the list of commands."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if name.startswith("-"):
            return super().resolve_command(ctx, args)
        if name in HELP:
            name, args = "help", ["help", *args[1:]]
        if name == "help" and args[1:] and not args[1].startswith("-") and args[1] not in COMMANDS:
            print(_glossary_entry(args[1:]))
            raise typer.Exit
        if name == "version" and "--json" in args:
            print(json.dumps({"version": __version__}))
            raise typer.Exit
        if name in ("version", "help"):
            args = ["--version"] if name == "version" else [*args[1:], "--help"]
            self.main(args=args, prog_name=ctx.command_path, standalone_mode=False)
            raise typer.Exit
        if name not in COMMANDS:
            raise MeshwrightError(f"command {name!r} is unknown; {unknown_command(args, list(COMMANDS))}")
        _refuse_empty(args)
        command = command_in(name)
        command.name = name
        return name, named_values(command), plain_words(args[1:])


def _glossary_entry(words: list[str]) -> str:
    """The entry of the term after `mw help`. Raises MeshwrightError for an unknown term."""
    from meshwright.cli.glossary import definition  # here, since most command lines ask for no term

    if entry := definition("-".join(words)):
        return entry
    commands = unknown_command(words, list(COMMANDS))
    raise MeshwrightError(f"help {words[0]!r}: no command or term; {commands}")


def _refuse_empty(args: list[str]) -> None:
    """Raise MeshwrightError for an empty argument, since an empty path would be the working folder."""
    ours = args[: args.index("--")] if "--" in args else args  # the rest is another command's
    for before, arg in pairwise(ours):
        if arg == "" or (arg.startswith("--") and arg.endswith("=")):
            which = arg.rstrip("=") or (
                before if before.startswith("-") else f"the argument after {before!r}"
            )
            raise MeshwrightError(f"{which} is empty; give it a value, or leave it out")


def named_values(command: Any) -> Any:
    """The command, with values of options as PATH or MODEL in its help instead of Python's types."""
    for inner in getattr(command, "commands", {}).values():
        named_values(inner)
    for param in command.params:
        is_argument = param.param_type_name == "argument"
        if param.metavar is None and (is_argument or not param.is_flag):
            kind = str(param.display_type_rich(ctx=None)).strip("<>[]")
            plain = "PATH" if kind == "path" and not is_argument else param.opts[-1].lstrip("-").upper()
            param.metavar = kind if "|" in kind else plain
        if is_argument:
            param.display_type_rich = lambda ctx: None
            param.get_usage_pieces = partial(_usage, param)
    return command


def _usage(argument: Any, ctx: Any) -> list[str]:
    """The argument in the usage line: `RUN`, `[PLAN.toml]`, `FILE.csv...`."""
    name = argument.metavar.strip("[]")
    text = name if argument.required else f"[{name}]"
    return [text if argument.nargs == 1 or name.endswith("...") else f"{text}..."]


app = typer.Typer(
    cls=_LazyGroup,
    rich_markup_mode=None,  # rich's help costs 0.2 s at every --help
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def meshwright(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, train, serve and audit sharded Transformers.

    \b
    mw demo
    mw plan train --model llama-3-70b --hardware v5p:16x20x28 --batch-tokens 4M --seq-len 4096
    """


def main(args: Sequence[str], *, offers_line: bool = True) -> int:
    """Run `mw` with these arguments; returns its exit code.

    offers_line: whether a message about a wrong line ends with the line to type.
    """
    warnings.showwarning = _show_warning
    try:
        result = to_command(app).main(args=_with_help_last(args), prog_name="mw", standalone_mode=False)
        sys.stdout.flush()
    except MeshwrightError as error:
        from meshwright.cli.other_files import other_file  # here, since help reads no files

        answer = other_file(args, str(error)) or value_fault(str(error), args)
        return _fail(with_line(answer, args, list(COMMANDS)) if offers_line else answer)
    except typer.TyperException as error:
        return _fail(usage_fault(error, args, list(COMMANDS), offers_line=offers_line))
    except ModuleNotFoundError as error:
        extra = bringing(error.name or "")
        if extra is None or extra.is_installed:
            raise  # a module of this package, or of a broken installation
        return _fail(extra.missing(str(error.name)))
    except ImportError as error:
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            return INTERRUPTED
        raise
    except SystemExit as ended:  # the parser exits so if the reader of its output has ended
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _with_help_last(args: Sequence[str]) -> list[str]:
    """The arguments, with `--help plan train` as `plan train --help`; --help if there are none."""
    is_first = len(args) > 1 and args[0] in ("--help", "-h") and args[1] in COMMANDS
    return [*args[1:], args[0]] if is_first else list(args) or ["--help"]


def run(*, offers_line: bool = True) -> None:
    """Run the command line of this process, and exit. offers_line: as in `main`."""
    code = main(sys.argv[1:], offers_line=offers_line)
    if code == INTERRUPTED:
        # Threads of compilers may still run, and an orderly exit beneath them can crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code == BAD_INPUT:
        from meshwright.nn.start.processes import COORDINATOR  # here, so that help need not import it

        if COORDINATOR in os.environ:
            # An orderly exit would wait for the other processes, which wait for this one.
            sys.stdout.flush()
            os._exit(code)
    sys.exit(code)


def _fail(message: str) -> int:
    words = (shorten(word, limit=_LONGEST_WORD) for word in message.split())
    print("mw: " + " ".join(words), file=sys.stderr)
    return BAD_INPUT


def _show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    """Print warnings of this package in one line; warnings of libraries are not for the user."""
    if issubclass(category, UserWarning):
        print(f"mw: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    run()
