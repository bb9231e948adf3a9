"""Commands that the README and the pages show."""

from __future__ import annotations

import re

from tests.helpers.releases import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("megatron-overlap ", "python ", "bash ", "torchrun ", "pip ", "sbatch ", "mkdocs ")
# What a reader puts in, or the name of a subcommand alone: such a command is a synopsis.
PLACEHOLDER = re.compile(
    r"^megatron-overlap (?!doctor|schema|patches)\w+$"
    r"|\b(?:CONFIG|FILE|RUN_DIR|PROFILE|HOST|PORT|PATH|NAME|SHARED_FOLDER|WHEEL_OR_FOLDER|[AB]\.(?:yaml|log)|NEW)\b"
    r"|\[|<|\.\.\.|X\.Y"
)


def commands() -> list[tuple[str, str]]:
    """Page and command, each once, of code blocks and of inline code; comments and output redirections left out."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        shown = re.findall(r"^ {4,}(\S.*)$", text, flags=re.MULTILINE)
        for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            shown += block.splitlines()
        shown += re.findall(r"`((?:megatron-overlap|python|bash) [^`]+)`", text)
        for line in shown:
            command = re.sub(r"\s+", " ", re.split(r"\s+#|\s+>|\s+<<<", line)[0]).strip()
            if command.startswith(PROGRAMS) and not command.startswith("python -"):
                found[page.name, command] = None
    return list(found)


COMMANDS = commands()
