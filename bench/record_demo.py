"""Runs `reft-cli demo` and draws its terminal, as an SVG file.

python bench/record_demo.py examples/demo.svg
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.options import output

WIDTH = 128  # columns of the drawn terminal
DEMO = [sys.executable, "-m", "reft.cli.main", "demo"]
# rich writes colours into a pipe only with FORCE_COLOR. The fonts are those of the reader's
# machine.
COLOURED = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px monospace; line-height: {line_height}px; white-space: pre; }}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def drawn(text: str) -> str:
    """Returns an SVG of a program's terminal output.

    Of a row that was written several times, the last text counts.
    """
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere)
        for line in text.split("\n"):  # an updated row ends with a carriage return, and is one line
            console.print(Text.from_ansi(line.rstrip("\r")))
        return console.export_svg(title="reft-cli demo", code_format=FRAME)


def main() -> int:
    """Writes the file if the demo passed; returns the demo's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=output)
    path = parser.parse_args().path
    done = subprocess.run(DEMO, stdout=subprocess.PIPE, env={**os.environ, **COLOURED}, check=False)
    if done.returncode == 0:
        path.write_text(drawn(done.stdout.decode()))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
