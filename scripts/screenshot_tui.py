"""A picture of the terminal console against a running control plane.

    python scripts/screenshot_tui.py --size 120x40 --screen overview --out docs/images/tui.png

Runs the app without a terminal, waits until it shows numbers, presses `--keys`, exports SVG and
turns it into PNG with a headless Chromium. `.svg` as the file's ending keeps the SVG.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

from console.tui.app import ConsoleApp
from console.tui.caps import Caps
from console.tui.run import actor_name
from controlplane.client import AsyncClient, find_token

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip


def main() -> None:
    """Parse the command line and take one picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--url", default=None, help="control plane; default $PERILUNE_URL or loopback"
    )
    parser.add_argument("--size", default="120x40", help="columns x rows")
    parser.add_argument("--screen", default="overview", help="overview, cache, request/ID, ...")
    parser.add_argument(
        "--keys", default="", help="keys to press, as Textual names them, by spaces"
    )
    parser.add_argument(
        "--wait", type=float, default=3.0, help="seconds to collect before pressing"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    columns, _, rows = args.size.partition("x")
    svg = asyncio.run(
        picture(args.url, (int(columns), int(rows)), args.screen, args.keys.split(), args.wait)
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.out.suffix == ".svg":
        args.out.write_text(svg, encoding="utf-8")
    else:
        to_png(svg, args.out)
    print(args.out)


async def picture(
    url: str | None, size: tuple[int, int], screen: str, keys: list[str], wait: float
) -> str:
    """The app's screen as SVG."""
    token = find_token()
    async with AsyncClient(url, token, actor=actor_name()) as client:
        app = ConsoleApp(
            client,
            clock=monotonic,
            can_act=token is not None,
            actor=actor_name(),
            caps=Caps("truecolor"),
            start=screen,
        )
        async with app.run_test(size=size) as pilot:
            await pilot.pause(wait)
            for key in keys:
                await pilot.press(key)
                await pilot.pause(0.3)
            await pilot.pause(0.7)
            return app.export_screenshot(title="perilune console")


def to_png(svg: str, out: Path) -> None:
    """Draw the SVG at its own size."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"{out} needs Chromium: install it, or end --out in .svg")
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    width, height = (round(float(value)) for value in box.groups()) if box else (1200, 800)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        style = "<style>body{margin:0}svg{display:block}</style>"
        page.write_text(
            f"<!doctype html><meta charset=utf-8>{style}{offline(svg)}", encoding="utf-8"
        )
        subprocess.run(
            [
                browser,
                *FLAGS,
                f"--user-data-dir={folder}/profile",
                f"--window-size={width},{height}",
                f"--screenshot={out.resolve()}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=60,
        )


def offline(svg: str) -> str:
    """Without the web font that the exporter names: a local monospace one is as wide."""
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg)
    return svg.replace("Fira Code", "DejaVu Sans Mono")


if __name__ == "__main__":
    main()
