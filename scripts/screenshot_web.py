"""Takes a picture of a page: `screenshot_web.py --url http://127.0.0.1:7700 --page / --out FILE`."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE_WIDTH = 600
TIMEOUT_MS = 15_000


def options() -> argparse.Namespace:
    """What to take, how wide, into which file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:7700", help="where the pages are")
    parser.add_argument("--page", default="/", help="path of the page, with its query")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--scheme", choices=["dark", "light"], default="dark")
    parser.add_argument("--full", action="store_true", help="the whole page, not one screen of it")
    parser.add_argument("--wait", type=float, default=1.5, help="seconds to let it settle")
    parser.add_argument("--press", default="", help="keys to press first, e.g. '?' or 'E'")
    parser.add_argument("--timezone", default="UTC")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "/usr/bin/chromium")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def take(page: Page, args: argparse.Namespace) -> None:
    """Wait for the figures, not for the network: the event stream never ends."""
    page.goto(args.url.rstrip("/") + args.page, wait_until="load", timeout=TIMEOUT_MS)
    if page.locator(".plot:visible").count():
        page.wait_for_selector(".plot .main-svg", timeout=TIMEOUT_MS)
    page.wait_for_timeout(args.wait * 1000)
    for key in args.press:
        page.keyboard.press(key)
        page.wait_for_timeout(400)
    page.screenshot(path=args.out, full_page=args.full)


def main() -> int:
    """Exit code 0 when the picture lies in --out."""
    args = options()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=FLAGS)
        try:
            context = browser.new_context(
                viewport={"width": args.width, "height": args.height},
                color_scheme=args.scheme,
                timezone_id=args.timezone,
                device_scale_factor=2 if args.width < PHONE_WIDTH else 1,
                has_touch=args.width < PHONE_WIDTH,
            )
            take(context.new_page(), args)
        finally:
            browser.close()
    sys.stdout.write(f"{args.out}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
