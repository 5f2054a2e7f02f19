"""`foveal completion`: a script that completes commands, options and choices in a shell.

Made from the parsers themselves, so that it never lags behind them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import msgspec

from foveal_operator.cli.help import Help
from foveal_operator.common.errors import EXIT_OK

_EPILOG = """\
  bash:  source <(foveal completion bash)        # in ~/.bashrc
  zsh:   source <(foveal completion zsh)         # in ~/.zshrc, after compinit
  fish:  foveal completion fish | source         # in ~/.config/fish/config.fish
"""
_FILES = ("FILE", "DIRECTORY", "PROGRAM")


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """`names` such as -f and --filename; `takes` a value, of `choices` or a file."""

    names: tuple[str, ...]
    help: str
    takes: bool
    choices: tuple[str, ...] = ()
    is_file: bool = False


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One subcommand; `words` are what its first argument may be."""

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...] = ()


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    root: argparse.ArgumentParser,
) -> None:
    parser = commands.add_parser(
        "completion",
        help="a script for bash, zsh or fish",
        description="Prints a completion script.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("shell", choices=sorted(_SHELLS))
    parser.set_defaults(run=lambda arguments: run(arguments, root))


def run(arguments: argparse.Namespace, root: argparse.ArgumentParser) -> int:
    sys.stdout.write(_SHELLS[arguments.shell](list(commands_of(root))))
    return EXIT_OK


def commands_of(root: argparse.ArgumentParser) -> Iterator[Command]:
    """Every subcommand of the parser, with its options."""
    for action in root._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, parser in action.choices.items():
            words = [
                str(word)
                for part in parser._actions
                if not part.option_strings and part.choices
                for word in part.choices
            ]
            yield Command(
                name=name,
                help=helps.get(name, ""),
                options=tuple(_options(parser)),
                words=tuple(words),
            )


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            text = (action.help or "").partition(" (default")[0]
            yield Option(
                names=tuple(action.option_strings),
                help=text.replace("%", ""),
                takes=action.nargs != 0,
                choices=tuple(str(choice) for choice in action.choices or ()),
                is_file=action.metavar in _FILES,
            )


def _bash(commands: list[Command]) -> str:
    """`compgen` on words that depend on the command and the word before."""
    cases, values = [], []
    for command in commands:
        words = [name for option in command.options for name in option.names] + [*command.words]
        cases.append(f'    {command.name}) words="{" ".join(words)}" ;;')
        for option in command.options:
            for name in option.names:
                if option.choices:
                    values.append(
                        f'    {command.name}:{name}) words="{" ".join(option.choices)}" ;;'
                    )
                elif option.is_file:
                    values.append(f"    {command.name}:{name}) files=1 ;;")
                elif option.takes:
                    values.append(f'    {command.name}:{name}) words="" ; none=1 ;;')
    names = " ".join(command.name for command in commands)
    return _BASH.format(names=names, cases="\n".join(cases), values="\n".join(values))


_BASH = """\
# foveal completion for bash
_foveal() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
  local words="" files="" none="" command="${{COMP_WORDS[1]}}"
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{names} --help --version" -- "$cur"))
    return
  fi
  case "$command:$prev" in
{values}
  esac
  if [ -n "$files" ]; then
    COMPREPLY=($(compgen -f -- "$cur"))
    return
  fi
  if [ -z "$words" ] && [ -z "$none" ]; then
    case "$command" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o filenames -F _foveal foveal kubectl-foveal
"""


def _quoted(text: str) -> str:
    """For single quotes, in zsh's and fish's tables."""
    return text.replace("'", "").replace("[", "(").replace("]", ")").replace(":", " -")


def _zsh(commands: list[Command]) -> str:
    lines = ["#compdef foveal kubectl-foveal", "# foveal completion for zsh", "_foveal() {"]
    lines.append("  local -a commands")
    named = " ".join(f"'{c.name}:{_quoted(c.help)}'" for c in commands)
    lines += [f"  commands=({named})", "  if (( CURRENT == 2 )); then"]
    lines += ["    _describe command commands", "    return", "  fi", '  case "$words[2]" in']
    for command in commands:
        lines.append(f"    {command.name})")
        specs = [spec for option in command.options for spec in _zsh_specs(option)]
        if command.words:
            specs.append(f"'2:what:({' '.join(command.words)})'")
        lines += [f"      _arguments {' '.join(specs)}", "      ;;"]
    lines += ["  esac", "}", "compdef _foveal foveal kubectl-foveal"]
    return "\n".join(lines) + "\n"


def _zsh_specs(option: Option) -> Iterator[str]:
    value = ""
    if option.choices:
        value = f":value:({' '.join(option.choices)})"
    elif option.is_file:
        value = ":file:_files"
    elif option.takes:
        value = ":value:"
    for name in option.names:
        yield f"'{name}[{_quoted(option.help)}]{value}'"


def _fish(commands: list[Command]) -> str:
    lines = ["# foveal completion for fish"]
    for program in ("foveal", "kubectl-foveal"):
        head = f"complete -c {program}"
        lines.append(f"{head} -f")
        for command in commands:
            lines.append(f"{head} -n __fish_use_subcommand -a {command.name} -d "
                         f"'{_quoted(command.help)}'")  # fmt: skip
            seen = f"-n '__fish_seen_subcommand_from {command.name}'"
            for word in command.words:
                lines.append(f"{head} {seen} -a {word}")
            lines += [f"{head} {seen} {_fish_option(option)}" for option in command.options]
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    parts = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
             for name in option.names]  # fmt: skip
    if option.choices:
        parts.append(f"-x -a '{' '.join(option.choices)}'")
    elif option.is_file:
        parts.append("-r -F")
    elif option.takes:
        parts.append("-x")
    return " ".join([*parts, f"-d '{_quoted(option.help)}'"])


_SHELLS: dict[str, Callable[[list[Command]], str]] = {"bash": _bash, "fish": _fish, "zsh": _zsh}
