"""The parameters of a command, made from the options that `meshwright.options` declares.

    @command(app)
    def train(*, run: RunOptions, given: Annotated[dict, OptionsOf(Settings)], as_json: bool = JSON):

The type of a parameter may be a dataclass with options: the function then gets an instance of it, or with
`OptionsOf` a dict of the values. The default of a parameter may be an option.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from inspect import Parameter, signature
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand

from meshwright.cli.completions import OF_OPTIONS
from meshwright.cli.console import note
from meshwright.cli.other_values import LISTS
from meshwright.errors import MeshwrightError
from meshwright.options import Option, as_option, options_of

# Keys of a context's `meta`: the parameters of the line in order, and the notes on repeated ones.
_ORDER, _REPEATED = "meshwright.order", "meshwright.repeated"
Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class OptionsOf:
    """The mark of a parameter that is a dict of the options of `owner`.

    only: the names of the fields to include; () for all. given: include only the options that the user gave.
    """

    owner: type
    only: tuple[str, ...] = ()
    given: bool = False

    @property
    def options(self) -> dict[str, Option]:
        every = options_of(self.owner)
        return {name: every[name] for name in self.only or every}


class _StrictCommand(TyperCommand):
    """A command that drops no value of a repeated option silently, as click's parser does."""

    def make_parser(self, ctx: Any) -> Any:
        """click's parser, which keeps the order of the line's parameters in the context, too."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            values, rest, order = parse(args)
            ctx.meta[_ORDER] = order
            return values, rest, order

        parser.parse_args = parse_args
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, list(args))
        if not ctx.resilient_parsing:  # an unfinished line is being completed
            ctx.meta[_REPEATED] = _repeated(ctx.meta[_ORDER])
        return rest

    def invoke(self, ctx: Any) -> Any:
        for text in ctx.meta.get(_REPEATED, ()):  # not while parsing, since lines to offer are parsed too
            note(text)
        return super().invoke(ctx)


def _repeated(given: Sequence[Any]) -> list[str]:
    """A note for each option that is given more than once; its last value counts.

    given: the parameters of the line, in order. Options with several values, and flags such as --json, may
    be repeated; flags with an opposite, such as --x/--no-x, get a note. Raises MeshwrightError for a list,
    such as --given: it may be meant as a part of one list.
    """
    notes = []
    for param, count in Counter(given).items():
        is_single = param.param_type_name == "option" and not param.multiple
        if count > 1 and is_single and (not param.is_flag or param.secondary_opts):
            name, times = param.opts[-1], "twice" if count == 2 else f"{count} times"
            if name in LISTS:
                raise MeshwrightError(f"{name} is given {times} and has one value; leave one out")
            notes.append(f"mw: warning: {name} is given {times}; the last value counts")
    return notes


def command(app: typer.Typer, **settings: Any) -> Callable[[Function], Function]:
    """Add a function to `app` as a command, with the options that its parameters declare."""

    def add(function: Function) -> Function:
        app.command(cls=_StrictCommand, **settings)(_with_options(function))
        return function

    return add


def _with_options(function: Callable[..., object]) -> Callable[..., object]:
    """The function with a parameter for each option, in the form that Typer reads."""
    shown: list[Parameter] = []
    later: list[tuple[str, list[Parameter]]] = []
    owners: dict[str, tuple[OptionsOf, bool]] = {}
    single: dict[str, Option] = {}
    for parameter in signature(function, eval_str=True).parameters.values():
        name, kind, options, optional = parameter.name, parameter.annotation, [], False
        marker = next((mark for mark in get_args(kind)[1:] if isinstance(mark, OptionsOf)), None)
        if marker or (isinstance(kind, type) and is_dataclass(kind)):
            of = marker or OptionsOf(kind)
            owners[name] = of, marker is None
            options, optional = list(of.options.values()), of.given
        elif option := as_option(parameter.default, name, kind):
            single[name] = option
            options = [option]
        else:
            shown.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        group = shown
        for option in options:
            if option.after:
                later.append((option.after, group := []))
            group.append(_parameter(option, optional=optional))
    for name, group in later:
        at = [parameter.name for parameter in shown].index(name) + 1
        shown[at:at] = group

    def run(**values: object) -> object:
        for name, (of, is_instance) in owners.items():
            fields = values_of(of, values)
            values[name] = of.owner(**fields) if is_instance else fields
            for field in of.options:
                del values[field]
        return function(**values | _collected(single, values))

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    run.__dict__["__signature__"] = signature(function).replace(parameters=shown)
    return run


def values_of(of: OptionsOf, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's options, from the values of Typer's parameters."""
    every = _collected(of.options, values)
    return {
        name: value for name, value in every.items() if not of.given or (value is not None and value != ())
    }


def _collected(options: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `options`; a repeatable one has a list from Typer, or None."""
    made = {name: _collection(option.kind) for name, option in options.items()}
    return {name: make(values[name] or ()) if make else values[name] for name, make in made.items()}


def _parameter(option: Option, *, optional: bool) -> Parameter:
    """The option as Typer's parameter. optional: its default is None, and the help shows the option's."""
    kind, default, text = option.kind, option.default, option.help
    if option.unset:
        text += f" [default: {option.unset}]"
    elif optional and kind is not bool and default not in (None, (), MISSING):
        text += f" [default: {default:g}]" if isinstance(default, float) else f" [default: {default}]"
    if optional or (_collection(kind) and default is not MISSING):
        default = None
    flags, metavar = option.flag.split(), option.metavar
    if kind is bool and default is True and "/" not in option.flag:
        flags = [f"{option.flag}/--no-{option.flag.removeprefix('--')}"]
    if _collection(kind):
        kind = list[get_args(kind)[0]]
    elif optional and option.choices:  # the dataclass checks them
        kind, metavar = str, "|".join(option.choices)
    declared = typer.Option(
        *flags,
        help=text,
        metavar=metavar or None,
        envvar=option.env,
        parser=_parser(option) if option.parser or option.is_bounded or kind is float else None,
        autocompletion=OF_OPTIONS.get(option.flag),
    )
    kind = Annotated[kind if default is not None else kind | None, declared]
    default = Parameter.empty if default is MISSING else default
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _collection(kind: object) -> Callable[[Sequence[str]], object] | None:
    """The constructor of the values of a repeatable option, a tuple or frozenset; None for other options."""
    if get_origin(kind) in (tuple, frozenset):
        return get_origin(kind)
    return _single_or_tuple if kind == str | tuple[str, ...] else None


def _single_or_tuple(values: Sequence[str]) -> str | tuple[str, ...]:
    return values[0] if len(values) == 1 else tuple(values)


def _parser(option: Option) -> Callable[[str], object]:
    def parsed(text: str) -> object:
        try:
            return option.parse(text)
        except MeshwrightError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed
