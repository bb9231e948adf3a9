"""The commands in the README and in the pages of the documentation."""

from __future__ import annotations

import re

from tests.helpers.releases import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("megatron-overlap ", "python ", "bash ", "torchrun ", "pip ", "sbatch ", "mkdocs ")
# A placeholder, or a subcommand without arguments: the command is a synopsis.
PLACEHOLDER = re.compile(
    r"^megatron-overlap (?!doctor|schema|patches)\w+$"
    r"|\b(?:CONFIG|FILE|RUN_DIR|PROFILE|HOST|PORT|PATH|NAME|SHARED_FOLDER|WHEEL_OR_FOLDER|[AB]\.(?:yaml|log)|NEW)\b"
    r"|\[|<|\.\.\.|X\.Y"
)


def commands() -> list[tuple[str, str]]:
    """(page, command) pairs of code blocks and inline code, each once, without comments and redirections."""
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
