"""For people who vendor Megatron-LM: what the line in `patches/` calls before Megatron reads its flags.

The training command is then started as ever and may have `--quartet-plan FILE` among its flags. Without one
of the plugin's flags nothing happens, and nothing is imported.
"""

import ast
import os
import sys
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quartet_plugin.rank.source_tree import SourceTree

PARSE_ARGS = ("megatron.training.arguments", "parse_args")
_LINES = (
    "    from quartet_plugin.megatron.vendored import start as start_quartet",
    "",
    "    start_quartet()",
)


def patch_of(tree: "SourceTree") -> str:
    """The patch of a source tree: the plugin's lines, first in `parse_args`, with no context around them.

    Raises ValueError where the tree has no such function.
    """
    module, name = PARSE_ARGS
    definition, file = tree.definition(module, name), tree.file(module)
    if file is None or not isinstance(definition, ast.FunctionDef):
        raise ValueError(f"{tree.roots[0]}: has no {module}.{name}")
    path = PurePosixPath(*file.relative_to(tree.roots[0]).parts)
    first = definition.body[0]
    has_docstring = ast.get_docstring(definition) is not None
    before = (first.end_lineno or first.lineno) if has_docstring else first.lineno - 1
    added = "".join(f"+{line}\n" for line in _LINES)
    return f"--- a/{path}\n+++ b/{path}\n@@ -{before},0 +{before + 1},{len(_LINES)} @@\n{added}"


def start() -> None:
    """Apply what the `--quartet-*` flags of this process say, and take them out of sys.argv.

    Ends the process, as the drop-in entry does, with one line and the exit code of a refusal.
    """
    if not any(word.startswith("--quartet-") for word in sys.argv[1:]):
        return
    from quartet_plugin.errors import QuartetError
    from quartet_plugin.megatron.entry import prepare
    from quartet_plugin.protocol.terminal import terminal_line
    from quartet_plugin.rank.entry_options import EntryCommand, take_options
    from quartet_plugin.rank.rendezvous import RankEnv
    from quartet_plugin.rank.session import Session

    session = None
    try:
        options, words = take_options(sys.argv[1:])
        command = EntryCommand(target=sys.argv[0], is_module=False, arguments=tuple(words), options=options)
        session = Session(command=command, rank_env=RankEnv.of(os.environ))
        sys.argv[1:] = words
        sys.argv[1:] = prepare(session)
    except QuartetError as error:
        if session is None:
            print(f"quartet: {terminal_line(str(error))}", file=sys.stderr)
        else:
            session.record(error)
            session.print_refusal(error)
        raise SystemExit(int(error.exit_code)) from None
